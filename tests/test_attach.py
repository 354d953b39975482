"""What ``attach`` and the drop-in check, the words they say it in, and that a refusal leaves nothing attached."""

from __future__ import annotations

import copy
import logging.handlers
import pickle
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_programs
from torch.testing._internal.two_tensor import TwoTensor

import stretto
from stretto.reducer import reducer_of
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import Transport


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def refusals(build, **options) -> list[str]:
    """The message on each rank of attaching what ``build(rank)`` returns; it must leave nothing attached."""

    def worker(transport):
        module = build(transport.rank)
        with pytest.raises(stretto.SetupError) as caught:
            stretto.attach(module, transport=transport, **options)
        assert all(reducer_of(parameter) is None for parameter in module.parameters())
        return str(caught.value).removeprefix(f"rank {transport.rank}: ")

    started = time.monotonic()
    messages = run_ranks(worker, 3)
    assert time.monotonic() - started < 2
    return messages


def test_no_parameter_requires_grad() -> None:
    assert (
        refusals(lambda rank: linear().requires_grad_(False))
        == [
            "attach: the module has no parameter that requires a gradient, so there is nothing to reduce.\n"
            "Attach the module that is trained, and unfreeze (requires_grad_(True)) before attaching."
        ]
        * 3
    )


def test_a_word_is_no_yes_or_no() -> None:
    for one in ("no", ""):
        with pytest.raises(stretto.SetupError) as caught:
            stretto.attach(linear(), init_sync=one)  # type: ignore[arg-type]
        assert str(caught.value) == f"attach: init_sync={one!r} must be True or False"
    stretto.attach(linear(), init_sync=0).detach()  # type: ignore[arg-type]  # as torch's class takes it


class HoldsItsHandle(torch.nn.Linear):
    sync: stretto.Synchronizer


def test_a_module_that_holds_its_handle_is_copied_and_says_why_it_is_not_pickled() -> None:
    """As for an average of weights. The copy is not attached."""

    def worker(transport: Transport) -> tuple[str, bool]:
        model = HoldsItsHandle(3, 2)
        model.sync = stretto.attach(model, transport=transport)
        average = torch.optim.swa_utils.AveragedModel(model)
        with model.sync.no_sync():
            copy.copy(model)(torch.ones(1, 3)).sum().backward()
        model(torch.ones(1, 3)).sum().backward()
        average.update_parameters(model)
        assert all(reducer_of(one) is None for one in average.parameters())
        with pytest.raises(stretto.UnsupportedError) as caught:
            pickle.dumps(model)
        return str(caught.value), average.module.sync is model.sync

    for rank, (told, same) in enumerate(run_ranks(worker, 2)):
        assert same
        assert told == (
            f"rank {rank}: a handle belongs to its process and cannot be pickled.\n"
            "Save model.state_dict(), or keep the handle beside the module, not in it."
        )


def test_lazy_parameters_are_named() -> None:
    assert (
        refusals(lambda rank: torch.nn.Sequential(torch.nn.LazyLinear(2)))
        == [
            "attach: 0.weight, 0.bias are not initialised yet (lazy modules).\n"
            "Run one forward with an example batch before stretto.attach(model)."
        ]
        * 3
    )


def two_in_one(rank: int) -> torch.nn.Parameter:
    """As quantised weights are, and DTensor."""
    return torch.nn.Parameter(TwoTensor(torch.full((2,), 1.0 + rank), torch.full((2,), 5.0 + rank)))


def test_tensors_that_wrap_others_are_named() -> None:
    def build(rank: int) -> torch.nn.Module:
        model = linear()
        model.trained, model.frozen = two_in_one(rank), two_in_one(rank).requires_grad_(False)
        return model

    models = [build(rank) for rank in range(3)]  # the first of such tensors imports much of torch, which takes seconds
    assert (
        refusals(models.__getitem__)
        == [
            "attach: trained (TwoTensor), frozen (TwoTensor) have their values in other tensors, which cannot be "
            "averaged or sent.\nLeave them out with ignore=, and make sure that all ranks hold the same values."
        ]
        * 3
    )


UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "torch.quint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "TwoTensor": lambda: two_in_one(0).detach(),
}


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*quantized tensor creation")
@pytest.mark.parametrize("kind", UNLIKE)
def test_buffers_that_are_no_plain_memory_are_named_too(kind: str) -> None:
    """As the graph of a graph network. They are sent when attaching, whatever is done with buffers later.

    Of tensors that wrap others half of the values was sent then, and came out on other ranks as something else.
    """
    wanted = f"attach: graph ({kind}) have their values in other tensors, which cannot be averaged or sent."

    def worker(transport):
        model = linear()
        model.register_buffer("graph", UNLIKE[kind]())
        for buffers in ("rank0", "mean", "none"):
            with pytest.raises(stretto.SetupError) as caught:
                stretto.attach(model, transport=transport, buffers=buffers)
            assert wanted in str(caught.value)
        sync = stretto.attach(model, transport=transport, ignore=["graph"])
        model(torch.ones(1, 3)).sum().backward()
        sync.detach()
        model.graph = torch.ones(UNLIKE[kind]().shape)
        stretto.attach(model, transport=transport)
        model(torch.ones(1, 3)).sum().backward()
        model.graph = UNLIKE[kind]()
        with pytest.raises(
            stretto.SetupError, match=r"pass 2, rank .: graph \(.*\) have their values in other tensors"
        ):
            model(torch.ones(1, 3)).sum().backward()
        return True

    assert run_ranks(worker, 2) == [True, True]


def test_tensors_that_wrap_others_can_be_left_out_and_not_put_in_later() -> None:
    def worker(transport):
        model = linear()
        model.frozen = two_in_one(transport.rank).requires_grad_(False)
        stretto.attach(model, transport=transport, ignore=["frozen"])
        model(torch.ones(1, 3)).sum().backward()
        model.later = two_in_one(transport.rank).requires_grad_(False)
        with pytest.raises(stretto.SetupError) as caught:
            model(torch.ones(1, 3)).sum().backward()
        later = model.later.b.tolist()
        del model.later
        model(torch.ones(1, 3)).sum().backward()
        model.register_buffer("table", torch.ones(2))
        model.append(torch.nn.Identity())  # a module that has changed is looked through
        model(torch.ones(1, 3)).sum().backward()
        model.table = two_in_one(transport.rank).detach()
        with pytest.raises(stretto.SetupError, match=r"table \(TwoTensor\) have their values in other tensors"):
            model(torch.ones(1, 3)).sum().backward()
        return str(caught.value), model.frozen.a.tolist(), later

    (told, *first), (other, *second) = run_ranks(worker, 2)
    for rank, text in enumerate((told, other)):
        assert text == (
            f"pass 2, rank {rank}: later (TwoTensor) have their values in other tensors: "
            "attach again, with ignore= for these"
        )
    assert first == [[1.0, 1.0], [5.0, 5.0]] and second == [[2.0, 2.0], [6.0, 6.0]]


def test_a_gradient_of_another_dtype_is_no_gradient_of_a_bucket_then_or_later() -> None:
    def parameter(dtype: torch.dtype | None) -> torch.nn.Parameter:
        made = torch.nn.Parameter(torch.ones(3))
        made.grad_dtype = dtype
        return made

    def worker(transport):
        model = linear()
        model.any, model.same, model.frozen = map(parameter, (None, torch.float32, torch.float64))
        model.frozen.requires_grad_(False)
        model.register_buffer("state", torch.ones(2, requires_grad=True).exp(), persistent=False)
        stretto.attach(model, transport=transport)
        (model(torch.ones(1, 3)).sum() * (model.any + model.same).sum()).backward()
        model.later = parameter(torch.float64)
        with pytest.raises(stretto.SetupError) as caught:
            (model(torch.ones(1, 3)).sum() * model.later.sum()).backward()
        del model.later
        model(torch.ones(1, 3)).sum().backward()
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        f"pass 2, rank {rank}: later (torch.float64) are to have gradients of another dtype than their own: leave "
        "their grad_dtype alone"
        for rank in range(2)
    ]


def test_attached_already() -> None:
    def worker(transport):
        module = linear()
        stretto.attach(module, transport=transport)
        hooks = [dict(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()]
        with pytest.raises(stretto.AlreadyAttachedError) as caught:
            stretto.attach(torch.nn.Sequential(module, torch.nn.ReLU()), transport=transport)
        assert [dict(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()] == hooks
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        f"rank {rank}: attach: 0.0.weight, 0.0.bias, 0.1.weight, 0.1.bias already attached, here or as part of "
        "another module.\nCall detach() on the first handle, or attach only once."
        for rank in range(2)
    ]


def test_a_problem_of_one_rank_is_told_to_the_others() -> None:
    messages = refusals(lambda rank: linear().requires_grad_(rank != 1))
    assert messages[1].startswith("attach: the module has no parameter that requires a gradient")
    assert messages[0] == (
        "attach, rank 0: other ranks cannot take part, so this one cannot either:\n"
        "  rank 1: attach: the module has no parameter that requires a gradient, so there is nothing to reduce.\n"
        "Attach the module that is trained, and unfreeze (requires_grad_(True)) before attaching."
    )


def test_ranks_that_differ_all_raise_the_same_difference_by_name() -> None:
    def build(rank: int) -> torch.nn.Module:
        module = linear()
        if rank == 1:
            module[1] = torch.nn.Linear(4, 5)
            module.register_buffer("extra", torch.zeros(2, dtype=torch.int64))
        if rank == 2:
            module[0].bias.requires_grad_(False)
            module[0].weight.data = module[0].weight.data.double()
        return module

    messages = refusals(build)
    assert (
        messages
        == [
            "attach: the 3 ranks do not hold the same model.\n"
            "  parameter 0.weight: 4x3 float32 cpu on ranks 0, 1; 4x3 float64 cpu on rank 2\n"
            "  parameter 0.bias: 4 float32 cpu on ranks 0, 1; 4 float32 cpu, frozen on rank 2\n"
            "  parameter 1.weight: 2x4 float32 cpu on ranks 0, 2; 5x4 float32 cpu on rank 1\n"
            "  parameter 1.bias: 2 float32 cpu on ranks 0, 2; 5 float32 cpu on rank 1\n"
            "  buffer extra: missing on ranks 0, 2; 2 int64 cpu on rank 1\n"
            "Build the model from the same code and options on every rank, and call attach() before anything that only "
            "some ranks do."
        ]
        * 3
    )


def test_another_order_of_registration_is_a_difference() -> None:
    def build(rank: int) -> torch.nn.Module:
        names = ["before", "first", "second"] if rank else ["before", "second", "first"]
        return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in names})

    assert refusals(build) == [ORDERS] * 3


ORDERS = """attach: the 3 ranks do not hold the same model.
  the same tensors, registered in another order from tensor 2 on:
  rank 0 registers parameter second.weight, parameter first.weight
  rank 1 registers parameter first.weight, parameter second.weight
  rank 2 registers parameter first.weight, parameter second.weight
Build the model from the same code and options on every rank, and call attach() before anything that only some ranks \
do."""


def test_other_sparse_parameters_are_another_argument() -> None:
    def worker(transport):
        model = torch.nn.Embedding(4, 2)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            stretto.attach(model, transport=transport, sparse=["weight"] if transport.rank else [])
        return str(caught.value)

    for text in run_ranks(worker, 2):
        assert text == (
            "attach: the 2 ranks do not ask for the same.\n  option sparse: () on rank 0; ('weight',) on rank 1\n"
            "Give the same arguments to attach, or to the drop-in, on every rank."
        )


def test_a_transport_of_ones_own_that_lacks_something_is_named() -> None:
    class Mine(RecordingTransport):
        def __init__(self, inner):
            super().__init__(inner)
            self.process_group, self.hosts = None, None
            del self.world_size, self.name

    def worker(transport):
        with pytest.raises(stretto.SetupError) as caught:
            stretto.attach(linear(), transport=Mine(transport))
        with pytest.raises(stretto.SetupError, match=r"or an instance of a subclass of stretto\.transport\.Transport$"):
            stretto.attach(linear(), transport=Mine)
        return str(caught.value)

    for text in run_ranks(worker, 2):
        assert text == (
            "attach: transport=Mine(...) lacks name, world_size.\n"
            "Set what is missing in Mine.__init__: stretto.transport.Transport says what each is."
        )


def test_options_that_differ_are_a_difference() -> None:
    def worker(transport):
        with pytest.raises(stretto.ModelMismatchError) as caught:
            stretto.attach(linear(), transport=transport, bucket_cap_mb=1.0 + transport.rank)
        return str(caught.value)

    told = (
        "attach: the 2 ranks do not ask for the same.\n"
        "  option bucket_cap_mb: 1.0 on rank 0; 2.0 on rank 1\n"
        "Give the same arguments to attach, or to the drop-in, on every rank."
    )
    assert run_ranks(worker, 2) == [told] * 2


def test_a_bad_value_on_one_rank_is_told_to_the_others() -> None:
    def worker(transport):
        with pytest.raises(stretto.StrettoError) as caught:
            stretto.attach(linear(), transport=transport, bucket_cap_mb=-1 if transport.rank else None)
        return str(caught.value)

    first, second = run_ranks(worker, 2, timeout=5)
    assert second.startswith("rank 1: bucket_cap_mb=-1 must be a positive number")
    assert first == f"attach, rank 0: other ranks cannot take part, so this one cannot either:\n  {second}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"static_graph": True},
            "attach: there is no argument static_graph=. Leave it out: any graph works without it.",
        ),
        ({"init_sync": "no"}, "attach: init_sync='no' must be True or False"),
    ],
)
def test_what_no_rank_could_ask_for_is_told_to_the_others_where_one_alone_does(
    options: dict[str, Any], message: str
) -> None:
    def worker(transport):
        with pytest.raises(stretto.StrettoError) as caught:
            stretto.attach(linear(), transport=transport, **(options if transport.rank else {}))
        return str(caught.value)

    first, second = run_ranks(worker, 2, timeout=20)
    assert second == message
    assert "rank 1 failed and left" in first and message in first


def test_another_memory_format_is_a_difference() -> None:
    def build(rank: int) -> torch.nn.Module:
        module = torch.nn.Conv2d(2, 2, 2)
        return module.to(memory_format=torch.channels_last) if rank == 1 else module

    assert (
        "  parameter weight: 2x2x2x2 float32 cpu on ranks 0, 2; 2x2x2x2 float32 cpu, strides 8x1x4x2 on rank 1\n"
        in refusals(build)[0]
    )


DIFFERENCES = {
    "shape": "  parameter 0.weight: 4x3 float32 cpu on ranks {others}; 5x3 float32 cpu on rank {last}\n",
    "dtype": "  parameter 0.bias: 4 float32 cpu on ranks {others}; 4 float64 cpu on rank {last}\n",
    "name": "  parameter tail.weight: missing on ranks {others}; 2x4 float32 cpu on rank {last}\n",
    "count": "  parameter 1.bias: 2 float32 cpu on ranks {others}; missing on rank {last}\n",
}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_over_gloo_raise_within_two_seconds(world: int) -> None:
    found = spawn_ranks(attach_what_differs, world, world)
    others = ", ".join(map(str, range(world - 1)))
    for kind, line in DIFFERENCES.items():
        texts = [messages[kind] for messages in found]
        assert len(set(texts)) == 1
        assert texts[0].startswith(f"attach: the {world} ranks do not hold the same model.\n")
        line = line.format(others=others, last=world - 1)
        assert (line if world > 2 else line.replace("ranks 0", "rank 0")) in texts[0]


def attach_what_differs(rank: int, world: int) -> dict[str, str]:
    messages = {}
    for kind in DIFFERENCES:
        module = linear()
        if rank == world - 1:
            if kind == "shape":
                module[0] = torch.nn.Linear(3, 5)
            elif kind == "dtype":
                module[0].bias.data = module[0].bias.data.double()
            elif kind == "name":
                module = torch.nn.Sequential(OrderedDict({"0": module[0], "tail": module[1]}))
            else:
                module[1].bias = None
        dist.barrier()
        started = time.monotonic()
        with pytest.raises(stretto.ModelMismatchError) as caught:
            stretto.attach(module)
        assert time.monotonic() - started < 2
        assert all(reducer_of(parameter) is None for parameter in module.parameters())
        messages[kind] = str(caught.value)
    return messages


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_is_refused_on_all_ranks() -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))

    def worker(transport) -> str:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), scripted) if transport.rank else scripted
        with pytest.raises(stretto.SetupError) as caught:
            stretto.attach(module, transport=transport)
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        "rank 0: attach: the module went through torch.jit.script or torch.jit.trace.\n"
        "Attach the original module; to speed it up, use torch.compile(module).",
        "rank 1: attach: 1 went through torch.jit.script or torch.jit.trace.\n"
        "Attach the original module; to speed it up, use torch.compile(module).",
    ]
    with pytest.raises(stretto.SetupError, match=r"torch\.jit\.script"):
        stretto.attach(scripted)


class _WithScript(torch.nn.Module):
    """As e3nn builds its layers: the code is a scripted module, its weights are given to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.code = torch.jit.script(torch.nn.BatchNorm1d(3, affine=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(x @ self.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_without_parameters_are_part_of_a_model() -> None:
    torch.manual_seed(0)
    models = [_WithScript(), _WithScript()]

    def worker(transport) -> tuple[torch.Tensor, torch.Tensor]:
        model = models[transport.rank]
        sync = stretto.attach(model, transport=transport)
        optimizer = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        for number in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * transport.rank + number)
            model(torch.randn(4, 3, generator=generator)).pow(3).sum().backward()
            optimizer.step()
        sync.check()
        return model.weight.detach().clone(), model.code.running_mean.clone()

    (weight, mean), (same_weight, same_mean) = run_ranks(worker, 2)
    assert torch.equal(weight, same_weight)
    assert torch.equal(mean, same_mean) and mean.any()


INSTEAD = (
    "Use one of the two: attach the original module, and call that; or wrap it in stretto.DistributedDataParallel."
)


AROUND = (
    "the module is attached: with torch's DistributedDataParallel around it two would average the same "
    f"gradients, and some would be lost.\n{INSTEAD}"
)


def inside(rank: int, name: str) -> str:
    return (
        f"rank {rank}: attach: {name} is wrapped in torch's DistributedDataParallel: two would average the same "
        f"gradients, and some would be lost.\n{INSTEAD}"
    )


def torchs(module: torch.nn.Module, ignored: Sequence[str] = (), **how: Any) -> torch.nn.Module:
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return wrapper(module, **how)


@pytest.mark.ranks
def test_torchs_wrapper_around_what_is_attached_or_inside_it_is_refused() -> None:
    """Its reducer read a gradient that was in a bucket already, and wrote back what it had found instead."""
    for rank, (*texts, after) in enumerate(spawn_ranks(beside_torchs_wrapper, 2)):
        assert texts == [inside(rank, "0"), inside(rank, "the module"), AROUND, AROUND] and after == [1.5]


def beside_torchs_wrapper(rank: int) -> tuple[str, str, str, str, list[float]]:
    wrapped, model = torchs(linear()), torch.nn.Linear(1, 1)
    texts = [refusal(stretto.attach, torch.nn.Sequential(wrapped)), refusal(stretto.DistributedDataParallel, wrapped)]
    sync = stretto.attach(model)
    texts.append(refusal(torchs, torch.nn.Sequential(model)))
    sync.detach()
    run, apart = torchs(model), torchs(torch.nn.Sequential(inner := torch.nn.Linear(1, 1)), ["0.weight"])
    older = stretto.attach(model), stretto.attach(inner, ignore=["bias"])
    texts.append(refusal(run, torch.ones(1, 1)))
    older[0].detach()
    for net in (run, apart):  # each to its own
        net(torch.full((1, 1), float(1 + rank))).sum().backward()
    assert [one.grad.item() for one in inner.parameters()] == [1.5, 1.0]
    return *texts, model.weight.grad.flatten().tolist()


def refusal(take: Callable[..., object], *given: Any, **options: Any) -> str:
    with pytest.raises(stretto.SetupError) as caught:
        take(*given, **options)
    return str(caught.value)


class Scaled(torch.nn.Module):
    """One parameter at the root, and one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(1, 1))
        self.first, self.again, self.last = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))
        self.again.weight = self.first.weight
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs * self.scale) + self.again(inputs))


TIED = ("first.weight", "again.weight")


@pytest.mark.ranks
def test_parameters_that_torchs_wrapper_ignores_by_some_other_name_are_refused() -> None:
    """Its reducer took them all the same, and the first gradient was zero."""
    for rank, texts in enumerate(spawn_ranks(ignored_by_another_name, 2)):
        assert texts == [AROUND, AROUND, AROUND, inside(rank, "the module"), inside(rank, "0")]


def ignored_by_another_name(rank: int) -> list[str]:
    texts = []
    for ours, ignored, delayed in (
        (["first.*", "last.*"], ["scale"], []),
        (["scale", "last.*"], ["first.weight"], []),
        (["scale", "last.*"], [], TIED),
    ):
        net = Scaled()
        sync = stretto.attach(net, ignore=ours)
        named = [(name, net.first.weight) for name in delayed] or None
        how = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": named and net.last.weight}
        texts.append(refusal(torchs, net, ignored, **how))
        sync.detach()
    wrapped = torchs(Scaled(), ["scale"])
    texts.append(refusal(stretto.attach, wrapped, ignore=["module.first.*", "module.last.*"]))
    late = torchs(Scaled())
    late.module._ddp_params_and_buffers_to_ignore = TIED
    texts.append(refusal(stretto.attach, torch.nn.Sequential(late), ignore=["0.module.scale", "0.module.last.*"]))
    return texts


@pytest.mark.ranks
def test_torchs_wrapper_and_attach_each_reduce_parameters_of_their_own() -> None:
    assert spawn_ranks(reduced_side_by_side, 2) == [None, None]


def reduced_side_by_side(rank: int) -> None:
    for lay in (beside_it, around_it, around_the_root, inside_it):
        net = Scaled()
        alone = copy.deepcopy(net)
        sync, run = lay(net)
        for _ in range(3):
            for model, inputs in ((run, 1.0 + rank), (alone, 1.5)):  # the gradient at the mean is the mean gradient
                model(torch.full((1, 1), inputs)).sum().backward()
            for ours, right in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, right.grad)
            for model in (net, alone):
                torch.optim.SGD(model.parameters(), 0.1).step()
                model.zero_grad()
        sync.detach()


def beside_it(net: Scaled) -> tuple[stretto.Synchronizer, torch.nn.Module]:
    net.last = torchs(net.last)
    return stretto.attach(net, ignore=["last.*"]), net


def around_it(net: Scaled) -> tuple[stretto.Synchronizer, torch.nn.Module]:
    return stretto.attach(net.first), torchs(net, TIED)


def around_the_root(net: Scaled) -> tuple[stretto.Synchronizer, torch.nn.Module]:
    return stretto.attach(net, ignore=["first.*", "last.*"]), torchs(net, [".scale"])


def inside_it(net: Scaled) -> tuple[stretto.Synchronizer, torch.nn.Module]:
    run = torchs(net, TIED)
    return stretto.attach(run, ignore=["module.scale", "module.last.*"]), run


def test_unknown_arguments_and_values() -> None:
    with pytest.raises(stretto.UnsupportedError, match="buffers='all' is not known"):
        stretto.attach(linear(), buffers="all")
    with pytest.raises(stretto.SetupError, match="bucket_cap_mb=-1 must be a positive number"):
        stretto.attach(linear(), bucket_cap_mb=-1)
    with pytest.raises(stretto.SetupError, match=r"ignore= names 9.weight, which the module does not have"):
        stretto.attach(linear(), ignore=frozenset({"9.weight"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"find_unused_parameters": True, "static_graph": False, "device_id": 0},
            "attach: there is no argument find_unused_parameters=. Leave it out: any graph works without it.\n"
            "attach: there is no argument static_graph=. Leave it out: any graph works without it.\n"
            "attach: there is no argument device_id=. Leave it out: the module is not moved, so call model.to(device) "
            "before.",
        ),
        (
            {"broadcast_buffers": False},
            'attach: there is no argument broadcast_buffers=. Write buffers="rank0", the default, or buffers="none".',
        ),
        (
            {"message_size": 10, "num_allreduce_streams": 2, "shared_param": None, "prof": False},
            "attach: there is no argument message_size=. Write bucket_cap_mb=, in MiB, not in elements.\n"
            "attach: there is no argument num_allreduce_streams=. Write process_groups=, several groups of the same "
            "ranks; buckets take turns among them.\n"
            "attach: there is no argument shared_param=. Leave it out: parameters that layers share are right anyway.\n"
            "attach: there is no argument prof=. Leave it out: stretto trace shows what happens in a pass.",
        ),
        (
            {"gradient_average": False, "allreduce_trigger_params": [], "retain_allreduce_buffers": True},
            'attach: there is no argument gradient_average=. Write reduce="mean", the default, or reduce="sum".\n'
            "attach: there is no argument allreduce_trigger_params=. Write launch_after=.\n"
            "attach: there is no argument retain_allreduce_buffers=. Leave it out: .grad lies in its bucket anyway.",
        ),
        (
            {"device_mesh": None, "mixed_precision": None, "no_sync": True, "comm_hook": None},
            "attach: there is no argument device_mesh=. Use stretto.DistributedDataParallel(model, device_mesh=...).\n"
            "attach: there is no argument mixed_precision=. Use torch.autocast around forward, or "
            "stretto.DistributedDataParallel(model, mixed_precision=...); reduce_dtype= is only the dtype in which "
            "gradients travel.\n"
            "attach: there is no argument no_sync=. Write with sync.no_sync(): around backwards whose gradients are to "
            "be kept.\n"
            "attach: there is no argument comm_hook=. Call register_comm_hook(state, hook) afterwards.",
        ),
        (
            {"bucket_cap": 3},
            "attach: there is no argument bucket_cap=. Use one of: bucket_cap_mb.",
        ),
        (
            {"besides": []},
            "attach: there is no argument besides=. Use one of: beside.",
        ),
        (
            {"lr": 3},
            "attach: there is no argument lr=. Use one of: module, process_group, process_groups, transport, "
            "bucket_cap_mb, last_bucket_cap_mb, buffers, init_sync, ignore, reduce, weighted, predivide_factor, "
            "reduce_dtype, delay, launch_after, check_every, sparse, beside.",
        ),
    ],
)
def test_what_to_write_for_an_argument_that_there_is_not(arguments: dict[str, Any], message: str) -> None:
    module = linear()
    with pytest.raises(stretto.UnsupportedError, match=f"^{re.escape(message)}$") as raised:
        stretto.attach(module, **arguments)
    assert isinstance(raised.value, TypeError)
    stretto.attach(module)


def test_launched_ranks_without_a_group_are_told_to_initialise_it(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(stretto.SetupError, match=r"WORLD_SIZE=4 ranks were launched.*\n.*init_process_group"):
        stretto.attach(linear())


NO_GROUP = (
    "{}=4 processes were started, but no process group is initialised: each trains alone.\n"
    "If they are to train together, call torch.distributed.init_process_group() before stretto.attach(model)."
)


GROUP_OF_ONE = (
    "WORLD_SIZE=2 ranks were launched, but the process group has one: each trains alone.\n"
    "If they are to train together, call torch.distributed.init_process_group() without rank= and world_size=."
)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
@pytest.mark.parametrize("attach", [stretto.attach, stretto.DistributedDataParallel])
def test_processes_of_srun_or_mpirun_without_a_group_are_told_that_each_trains_alone(
    monkeypatch, caplog, name: str, attach: Any
) -> None:
    for count, told in (("1", []), ("4", [NO_GROUP.format(name)])):
        caplog.clear()
        monkeypatch.setenv(name, count)
        attach(linear())
        assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", text) for text in told]


@pytest.mark.parametrize("attach", [stretto.attach, stretto.DistributedDataParallel])
def test_ranks_of_a_launcher_that_make_a_group_each_are_told_that_each_trains_alone(
    monkeypatch, caplog, attach: Any
) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for count, told in (("1", []), ("2", [GROUP_OF_ONE])):
            monkeypatch.setenv("WORLD_SIZE", count)
            attach(linear())
            assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", one) for one in told]
        caplog.clear()
        stretto.attach(linear(), process_group=torch.distributed.new_group([0]))
        assert not caplog.records
    finally:
        torch.distributed.destroy_process_group()


def attached_without_a_group(rank: int, attach: Any, told: Any) -> None:
    logging.getLogger("stretto").addHandler(handler := logging.handlers.BufferingHandler(9))
    attach(linear())
    told.put([(one.levelname, one.getMessage()) for one in handler.buffer])


@pytest.mark.parametrize(
    "setup, told",
    [
        ("", "stretto: {}\n"),
        ("logging.basicConfig(format='%(name)s says: %(message)s')", "stretto says: {}\n"),
        ("logging.getLogger('stretto').addHandler(logging.NullHandler())", ""),
        ("logging.lastResort = None; logging.raiseExceptions = False", ""),
        ("logging.basicConfig(); logging.getLogger('stretto').propagate = False", "stretto: {}\n"),
    ],
)
def test_a_warning_says_who_speaks_unless_the_program_has_set_up_logging(setup: str, told: str) -> None:
    program = (
        f"import logging\n{setup}\nimport torch, stretto\n"
        "for _ in range(2):\n    stretto.attach(torch.nn.Linear(1, 1), reduce_dtype={'head*': torch.float64})\n"
        "logging.getLogger('stretto').info('not shown')"
    )
    warning = "attach: reduce_dtype= names head*, which no parameter has so far: see module.named_parameters()"
    ran = warm_programs.run(["-c", program])
    assert (ran.stdout, ran.stderr, ran.returncode) == ("", told.format(warning) * 2, 0)


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_ranks_of_torch_multiprocessing_without_a_group_are_told_that_each_trains_alone() -> None:
    told = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(attached_without_a_group, (stretto.attach, told), nprocs=1)
    assert told.get() == [
        (
            "WARNING",
            "torch.multiprocessing has started this process, but no process group is initialised: it trains alone.\n"
            "If such processes are to train together, call torch.distributed.init_process_group() before "
            "stretto.attach(model).",
        )
    ]


def test_a_batch_script_that_runs_once_is_told_nothing(monkeypatch, caplog) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    stretto.attach(linear())
    assert not caplog.records


def test_with_one_rank_a_loop_reads_what_it_set_and_is_refused_what_several_would_be() -> None:
    sync = stretto.attach(linear(), weighted=True)
    assert sync.synchronize and sync.weight == 1.0
    with sync.no_sync():
        assert not sync.synchronize  # a loop that steps "if sync.synchronize" accumulates here too
    assert sync.synchronize
    sync.weight = 3
    assert sync.weight == 3.0
    with pytest.raises(stretto.SetupError, match="no method named after an event"):
        sync.observe(object())
    sync = stretto.attach(linear())
    sync.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(stretto.SetupError, match="a comm hook is registered already"):  # where others come in again
        sync.register_comm_hook(None, lambda state, bucket: bucket.buffer())


def test_ignored_parameters_are_left_alone() -> None:
    def worker(transport):
        module = linear()
        with torch.no_grad():
            module[0].bias.fill_(transport.rank)
        stretto.attach(module, transport=transport, ignore=frozenset({"0.bias"}))
        module(torch.full((1, 3), 1.0 + transport.rank)).sum().backward()
        return module[0].bias.detach().clone(), module[1].bias.grad

    first, second = run_ranks(worker, 2)
    assert first[0].eq(0).all() and second[0].eq(1).all()
    assert torch.equal(first[1], second[1])


def test_only_rank_0_values_count_and_messages_are_few() -> None:
    def worker(transport):
        module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)), torch.nn.BatchNorm1d(2))
        recording = RecordingTransport(transport)
        stretto.attach(module, transport=recording)
        return list(module.state_dict().values()), [kind for kind, _ in recording.calls]

    (first, calls), (second, _) = run_ranks(worker, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert calls == ["all_reduce", "all_reduce", "broadcast"]  # what ranks hold, then all values


class TestDropIn:
    def test_passes_isinstance_and_never_builds_torchs_reducer(self, monkeypatch) -> None:
        def forbidden(*_: object) -> None:
            raise AssertionError("torch's reducer was built")

        monkeypatch.setattr(torch.distributed, "Reducer", forbidden)
        wrapped = stretto.DistributedDataParallel(linear())
        assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        assert all(name.startswith("module.") for name in wrapped.state_dict())
        assert wrapped.train() is wrapped
        assert wrapped(torch.ones(1, 3)).shape == (1, 2)

    def test_wrong_devices_and_modules(self) -> None:
        with pytest.raises(ValueError, match="leave both out"):
            stretto.DistributedDataParallel(linear(), device_ids=[0])
        with pytest.raises(ValueError, match="single element"):
            stretto.DistributedDataParallel(linear(), device_ids=[0, 1])
        with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
            stretto.DistributedDataParallel(linear().requires_grad_(False))

    def test_deprecated_arguments_warn_as_in_torch(self) -> None:
        told = "`broadcast_buffers` is deprecated in torch: use `forward_sync_buffers`."
        with pytest.warns(FutureWarning, match=told):
            wrapped = stretto.DistributedDataParallel(linear(), broadcast_buffers=False)
        assert not wrapped.forward_sync_buffers
        with pytest.warns(FutureWarning, match="`check_reduction` is deprecated and changes nothing."):
            stretto.DistributedDataParallel(linear(), check_reduction=True)


def caps(rank: int) -> tuple[int, int]:
    plan = stretto.attach(torch.nn.Linear(4, 4), transport="shared_memory").plan
    return plan.cap_bytes, plan.last_cap_bytes


@pytest.mark.ranks
def test_buckets_in_shared_memory_are_as_large_as_the_docs_say() -> None:
    assert spawn_ranks(caps, 2) == [(17 * 2**20 // 8, 2**20 // 4)] * 2


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the group's CUDA backend counts")
def test_a_group_made_without_naming_a_backend_gets_the_buckets_that_suit_gloo() -> None:
    program = (
        "import torch.distributed as dist, stretto.transport as t\n"
        "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(t.ProcessGroupTransport().bucket_cap_bytes)\n"
        "dist.destroy_process_group()\n"
    )
    ended = warm_programs.run(["-c", program], to_the_end=True)
    assert ended.stdout == f"{4 * 1024 * 1024}\n", ended.stderr


def test_a_handle_shows_itself_in_one_line() -> None:
    def worker(transport):
        model = linear()
        sync = stretto.attach(model, transport=transport)
        before = repr(sync)
        model(torch.ones(1, 3)).sum().backward()
        after = repr(sync)
        sync.detach()
        return before, after, repr(sync)

    alone = repr(stretto.attach(linear()))
    assert alone == "<stretto.Synchronizer of Sequential, 1 rank>"
    assert run_ranks(worker, 2)[1] == (
        "<stretto.Synchronizer of Sequential, rank 1 of 2 over local (threads of one process), 1 bucket, pass 0>",
        "<stretto.Synchronizer of Sequential, rank 1 of 2 over local (threads of one process), 1 bucket, pass 1>",
        "<stretto.Synchronizer of Sequential, detached>",
    )


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_can_never_get_a_gradient_or_is_left_alone_may_be_anything(reduce: str) -> None:
    def worker(transport):
        model = linear()
        with torch.inference_mode():
            model.register_parameter("made_for_inference", torch.nn.Parameter(torch.ones(2), requires_grad=False))
        model.register_buffer("nowhere", torch.ones(2, device="meta"))
        model.ignored = torch.nn.Parameter(torch.ones(2, device="meta"))
        stretto.attach(model, transport=transport, reduce=reduce, buffers="none", ignore=["ignored"])
        model[1](model[0](torch.ones(1, 3))).sum().backward()
        return model[1].bias.grad.tolist()

    assert run_ranks(worker, 2) == [[2.0, 2.0] if reduce == "sum" else [1.0, 1.0]] * 2


def test_what_is_ignored_on_some_ranks_alone_is_an_option_that_differs() -> None:
    def worker(transport):
        with pytest.raises(stretto.ModelMismatchError, match="do not ask for the same"):
            stretto.attach(linear(), transport=transport, ignore=["0.*"] if transport.rank else [])

    run_ranks(worker, 2)


def test_a_handle_says_that_it_is_no_model() -> None:
    """``model = stretto.attach(model)``: Python's own words led to ``trace`` where ``train`` was asked for."""
    handle: Any = stretto.attach(linear())
    for name in ("parameters", "train", "state_dict"):
        with pytest.raises(AttributeError) as asked:
            getattr(handle, name)
        assert str(asked.value) == (
            f"attach() returns a handle, which has no {name}: use the model as before.\n"
            "Write sync = stretto.attach(model) and go on with model; for a wrapper like torch's, model = "
            "stretto.DistributedDataParallel(model)."
        )
    with pytest.raises(TypeError) as called:
        handle(torch.ones(1))
    assert str(called.value) == (
        "attach() returns a handle, which cannot be called: use the model as before.\n"
        "Write sync = stretto.attach(model) and go on with model; for a wrapper like torch's, model = "
        "stretto.DistributedDataParallel(model)."
    )
    with pytest.raises(AttributeError) as misspelt:
        handle.reprot()
    assert str(misspelt.value) == "'Synchronizer' object has no attribute 'reprot'"
    assert not hasattr(handle, "forward") and not hasattr(handle, "_forward")
