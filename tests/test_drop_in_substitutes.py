"""mixed_precision, and DDP beside tensor parallelism: what forward finds in the place of parameters, and when."""

import copy
import functools
import gc
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import stretto
from stretto import DistributedDataParallel, SetupError, UnsupportedError
from stretto.testing import spawn_ranks

HALF = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
STEPS = 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


class Mixing(torch.nn.TransformerEncoderLayer):
    """Reads parameters of a layer that it does not call."""

    def __init__(self):
        super().__init__(8, 2, 16, dropout=0.0, batch_first=True)


class Reader(torch.nn.Module):
    """Blocks, a tied layer, a recurrent one, a frozen parameter, buffers; much of it in checkpoints if asked for."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block(), Mixing()])
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.blocks[0].linear.weight
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.gain = torch.nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.reentrant = reentrant

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.seen = {parameter.dtype for parameter in self.parameters()}
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        last = self.read if self.reentrant is None else functools.partial(self.in_checkpoint, self.read)
        return {"read": last(x), "nothing": None}

    def in_checkpoint(self, method, x):
        return checkpoint(method, x, use_reentrant=self.reentrant)

    def read(self, x):
        x = self.blocks[1].linear.forward(self.tied(x))
        x, _ = self.recurrent(x * self.scale.to(x.dtype) * self.gain.to(x.dtype))
        return x


def reader(reentrant=None):
    torch.manual_seed(0)
    return Reader(reentrant)


def inputs(rank, step):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def is_itself(module):
    listed = [*module.recurrent._flat_weights, *module.parameters()]
    return all(type(one) is torch.nn.Parameter and one.dtype is torch.float32 for one in listed)


def trained_lower(rank, reentrant):
    """Gradients of each step, of the second one from two forwards."""
    module = reader(reentrant)
    model = DistributedDataParallel(module, mixed_precision=HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        for again in range(1 + (step == 1)):
            output = model(inputs(rank, step + 10 * again))["read"]
            assert output.dtype is torch.bfloat16 and module.seen == {torch.bfloat16} and is_itself(module)
            with model.no_sync() if step == 1 and not again else torch.enable_grad():
                output.float().pow(2).sum().backward()
            assert is_itself(module)
        found.append([one.grad.clone() for one in module.parameters() if one.requires_grad])
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_hand():
    """The same with a copy in bfloat16 and masters in float32, both ranks in one process."""
    module = reader()
    masters = [one for one in module.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    found = []
    for step in range(STEPS):
        totals = []
        for rank in range(2):
            total = [torch.zeros_like(one) for one in masters]
            for again in range(1 + (step == 1)):
                lower = copy.deepcopy(module).to(torch.bfloat16)
                lower.count = lower.count.long()
                lower(inputs(rank, step + 10 * again).bfloat16())["read"].float().pow(2).sum().backward()
                for sum_, one in zip(total, [one for one in lower.parameters() if one.requires_grad], strict=True):
                    sum_ += one.grad.float()
            totals.append(total)
        for one, mine, other in zip(masters, *totals, strict=True):
            one.grad = mine / 2 + other / 2
        found.append([one.grad.clone() for one in masters])
        optimizer.step()
    return found


@pytest.mark.ranks
class TestTogether:
    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_gradients_are_those_of_a_copy_in_lower_precision(self, reentrant):
        first, second = spawn_ranks(trained_lower, 2, reentrant)
        for mine, other, wanted in zip(first, second, by_hand(), strict=True):
            assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
            if reentrant:  # what the tied weight gets comes from two tasks, and is added up in float32
                torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02)
            else:
                assert all(torch.equal(one, two) for one, two in zip(mine, wanted, strict=True))

    def test_gradients_travel_in_the_dtype_of_torchs_rule(self):
        assert spawn_ranks(travels_as, 2)[0] == [
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float16),
            (torch.float32, None),
            (torch.float32, torch.float64),
        ]

    def test_beside_tensor_parallelism(self):
        assert spawn_ranks(two_dimensions, 4) == [(True, True, True, True)] * 4


def travels_as(rank):
    found = []
    for config, options in [
        (_MixedPrecision(param_dtype=torch.bfloat16), {}),
        (_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16), {}),
        (_MixedPrecision(buffer_dtype=torch.float16), {}),
        (HALF, {"reduce_dtype": torch.float64}),
    ]:
        model = DistributedDataParallel(torch.nn.Linear(2, 2), mixed_precision=config, **options)
        bucket = model.synchronizer.plan.buckets[0]
        found.append((bucket.dtype, bucket.reduce_dtype))
    return found


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(8, 16)
        self.narrow = torch.nn.Linear(16, 4)
        self.plain = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.plain(self.narrow(torch.relu(self.wide(x))))


def fully_sharded_inside(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "shard"))
    model = TwoLayers()
    fully_shard(model.narrow, mesh=mesh["shard"])
    with pytest.raises(stretto.UnsupportedError) as caught:
        DistributedDataParallel(model, device_mesh=mesh["data"])
    return str(caught.value)


@pytest.mark.ranks
def test_layers_of_fsdp_are_refused_as_they_would_stand_still():
    told = (
        "DistributedDataParallel: narrow went through fully_shard, whose parameters would not be trained here.\n"
        "Give fully_shard both dimensions of the mesh, and leave the wrapper out."
    )
    assert spawn_ranks(fully_sharded_inside, 2) == [told, told]


def two_dimensions(rank):
    """Two ranks that share out the layers, twice; the last layer is frozen at first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    alone = TwoLayers()
    layers = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    sharded = parallelize_module(copy.deepcopy(alone), mesh["tensor"], layers)
    sharded.wide.bias.requires_grad_(False)
    model = DistributedDataParallel(sharded, device_mesh=mesh["data"])
    frozen = not sharded.wide.bias.requires_grad and type(sharded.wide.bias) is torch.nn.Parameter
    optimizer, alike = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone))
    equal = []
    for step in range(4):
        sharded.wide.bias.requires_grad_(step > 1)
        alone.wide.bias.requires_grad_(step > 1)
        batches = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(step))
        torch.cat([alone(one) for one in batches]).pow(2).sum().div(2).backward()
        output = model(batches[mesh["data"].get_local_rank()])
        output.pow(2).sum().backward()
        part = alone.wide.weight.grad.chunk(2)[mesh["tensor"].get_local_rank()]
        equal.append(torch.allclose(sharded.wide.weight.grad, part, atol=1e-5))
        for one in (optimizer, alike):
            one.step()
            one.zero_grad()
    in_forward = []
    sharded.wide.register_forward_pre_hook(lambda layer, _: in_forward.append(isinstance(layer.weight, DTensor)))
    close = torch.allclose(model(batches[0]), alone(batches[0]), atol=1e-5)
    whole = len(model.state_dict()) == len(alone.state_dict())
    for one in (sharded, DistributedDataParallel(sharded, device_mesh=mesh["data"])):
        close = close and torch.allclose(one(batches[0]), alone(batches[0]), atol=1e-5)
    lowered = DistributedDataParallel(sharded, device_mesh=mesh["data"], mixed_precision=HALF)
    optimizer.zero_grad()
    checkpoint(lowered, batches[0], use_reentrant=False).sum().backward()
    close = close and lowered(batches[0]).dtype is torch.bfloat16 and sharded.wide.weight.grad.dtype is torch.float32
    dist.barrier()
    return all(equal) and close, all(in_forward), whole and type(sharded.wide.weight) is torch.nn.Parameter, frozen


class TestAlone:
    def test_evaluation_leaves_parameters_as_they_are(self):
        module = reader()
        model = DistributedDataParallel(module, mixed_precision=HALF)
        with torch.no_grad():
            assert model(inputs(0, 0))["read"].dtype is torch.bfloat16
        assert is_itself(module) and {one.dtype for one in model.state_dict().values()} >= {torch.float32, torch.int64}

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["forward", "recomputed"])
    def test_an_exception_leaves_parameters_as_they_are(self, error, where):
        module = reader(reentrant=False)
        model = DistributedDataParallel(module, mixed_precision=HALF)

        def fail(*_):
            raise error("here")

        output = model(inputs(0, 0))["read"]
        module.blocks[1].linear.register_forward_hook(fail)
        with pytest.raises(error, match="here"):
            model(inputs(0, 0)) if where == "forward" else output.sum().backward()
        assert is_itself(module)

    def test_only_floating_point_numbers_are_cast_and_none_that_are_to_be_ignored(self):
        module = reader()
        names = ["gain", "scale"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        model = DistributedDataParallel(module, mixed_precision=HALF)
        model(inputs(0, 0))
        assert module.seen == {torch.bfloat16, torch.float32}
        assert module.scale.dtype is torch.float32 and module.count.dtype is torch.int64
        assert not hasattr(module.gain, "_mp_param") and module.tied.bias._mp_param.dtype is torch.bfloat16

    def test_a_config_without_dtypes_changes_nothing(self):
        module = reader()
        model = DistributedDataParallel(module, mixed_precision=_MixedPrecision())
        assert model(inputs(0, 0))["read"].dtype is torch.float32 and module.scale.dtype is torch.float32

    def test_a_layer_that_comes_later_is_cast_and_recomputed_too(self):
        module = reader(reentrant=False)
        model = DistributedDataParallel(module, mixed_precision=HALF)
        model(inputs(0, 0))["read"].sum().backward()
        module.blocks.append(Block())
        model(inputs(0, 0))["read"].sum().backward()
        assert module.blocks[3].linear.weight.grad.dtype is torch.float32

    def test_what_forward_puts_in_a_parameters_place_stays(self):
        module = torch.nn.Linear(8, 8)
        other = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        module.register_forward_pre_hook(lambda layer, _: layer.register_parameter("weight", other))
        DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16))(torch.ones(1, 8))
        assert module.weight is other

    def test_copies_compute_in_lower_precision_and_copies_of_the_module_do_not(self):
        model = DistributedDataParallel(reader(reentrant=False), mixed_precision=HALF)
        model(inputs(0, 0))
        plain = copy.deepcopy(model.module)
        plain.scale = plain.scale.float()
        plain(inputs(0, 0))["read"].sum().backward()
        assert plain.seen == {torch.float32}
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for one in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            assert one(inputs(0, 0))["read"].dtype is torch.bfloat16 and is_itself(one.module)
            assert one.module.tied.bias._fp_param.dtype is torch.float32

    def test_layers_are_plain_when_the_wrapper_has_gone(self):
        module = reader(reentrant=False)
        model = DistributedDataParallel(module, mixed_precision=HALF)
        model(inputs(0, 0))["read"].sum().backward()
        del model
        gc.collect()
        module.scale = module.scale.float()
        module(inputs(0, 0))["read"].sum().backward()
        assert module.seen == {torch.float32}

    def test_rows_of_an_embedding_keep_their_gradients(self):
        module = torch.nn.EmbeddingBag(5, 3, sparse=True)
        DistributedDataParallel(module, mixed_precision=HALF)(torch.tensor([[0, 2]])).sum().backward()
        assert module.weight.grad.is_sparse and module.weight.grad.dtype is torch.float32

    @pytest.mark.parametrize("change", ["write", "freeze", "step"])
    def test_what_forward_changes_would_be_lost_and_is_refused(self, change):
        module = torch.nn.Linear(2, 2)
        before = torch.nn.Parameter(module.weight.detach().clone())

        def forward(x):
            with torch.no_grad():
                if change == "write":
                    module.weight.mul_(0.9)
                elif change == "step":
                    parameter.mul_(0.9)
            if change == "freeze":
                module.weight = torch.nn.Parameter(module.weight.detach(), requires_grad=False)
            return torch.nn.functional.linear(x, module.weight, module.bias)

        parameter, module.forward = module.weight, forward
        model = DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16))
        if change == "freeze":
            model(torch.ones(1, 2))
            assert module.weight.dtype is torch.bfloat16  # put there by the program, which may
            return
        with pytest.raises(UnsupportedError) as raised:
            model(torch.ones(1, 2))
        assert str(raised.value) == (
            "DistributedDataParallel: forward has changed weight, but with mixed_precision= it gets copies of them: "
            "the change would be lost.\nChange parameters, or which of them are trained, before forward."
        )
        assert module.weight is parameter and torch.equal(parameter, before) == (change == "write")

    def test_what_a_program_has_noted_on_a_parameter_is_found(self):
        module = torch.nn.Linear(2, 2)
        module.weight.note = "mine"
        module.register_forward_pre_hook(lambda layer, _: print(layer.weight.note))
        DistributedDataParallel(module, mixed_precision=HALF)(torch.ones(1, 2))

    def test_gradients_of_parameters_within_an_evaluation(self):
        module = torch.nn.Linear(2, 1)

        def forward(x):
            with torch.enable_grad():
                energy = torch.nn.functional.linear(x, module.weight).sum()
                return torch.autograd.grad(energy, [module.weight])[0]

        module.forward = forward
        with torch.no_grad():
            assert DistributedDataParallel(module, mixed_precision=HALF)(torch.ones(1, 2)).dtype is torch.bfloat16

    def test_who_keeps_a_loss_keeps_no_copies(self):
        model = DistributedDataParallel(reader(reentrant=False), mixed_precision=HALF)
        kept = []
        for step in range(3):
            kept.append(model(inputs(0, step))["read"].float().sum())
            kept[-1].backward()
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.dtype is torch.bfloat16]
        assert not [one for one in alive if one.shape == (8, 8) and not one.is_meta] and kept[-1].grad_fn is not None

    def test_several_threads(self):
        module = reader()
        model = DistributedDataParallel(module, mixed_precision=HALF)
        outputs = []

        def evaluate():
            with torch.no_grad():
                outputs.extend(model(inputs(0, 0))["read"] for _ in range(20))

        threads = [threading.Thread(target=evaluate) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outputs) == 60 and all(torch.equal(one, outputs[0]) for one in outputs) and is_itself(module)

    def test_what_is_no_config_is_refused(self):
        with pytest.raises(SetupError) as raised:
            DistributedDataParallel(torch.nn.Linear(1, 1), mixed_precision=torch.float16)
        assert str(raised.value) == (
            "DistributedDataParallel: mixed_precision=torch.float16 must be a "
            "torch.nn.parallel.distributed._MixedPrecision, or None.\nFor one dtype: _MixedPrecision(param_dtype=...)."
        )

    @pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    )  # asked for by the compiler
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compiled(self, backend):
        def gradients(compiled):
            module = reader()
            model = DistributedDataParallel(module, mixed_precision=HALF)
            run = torch.compile(model, backend=backend) if compiled else model
            for step in range(2):
                run(inputs(0, step))["read"].float().pow(2).sum().backward()
                assert is_itself(module)
            return [one.grad for one in module.parameters() if one.requires_grad]

        assert all(torch.equal(one, two) for one, two in zip(gradients(True), gradients(False), strict=True))


def test_nothing_is_in_the_way_of_those_who_do_not_ask():
    module = reader(reentrant=False)
    model = DistributedDataParallel(module)
    model(inputs(0, 0))
    assert model._substitutes is None
    assert stretto.DistributedDataParallel(torch.nn.Linear(1, 1)).mixed_precision is None
