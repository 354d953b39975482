"""torch's comm hooks, as they are, on stretto: a row per hook, against torch's DDP with the same hook."""

import functools
import importlib
import logging
import logging.handlers
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import Fails
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto import DistributedDataParallel, PeerError, SetupError, comm_hooks
from stretto.comm_hooks import CommHook, HookWork, check_hook, refuse_hook
from stretto.hook_work import is_of_hook
from stretto.options import Options
from stretto.peers import Peers
from stretto.testing import run_ranks, spawn_ranks
from stretto.transport import LocalGroup

WORLD = 2
PASSES = 6
CAP_MB = 0.004  # several buckets

EXACT, CLOSE = 0.0, 2e-6


def power(hook, *, start=3, **options):
    # The first passes are plain all-reduces; torch too cuts its buckets anew in them, and states go by bucket index.
    return lambda: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start, **options),
        hook,
    )


def post_local():
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=3)
    return state, post_localSGD_hook.post_localSGD_hook


def stateless(hook):
    return lambda: (None, hook)


HOOKS = {
    "allreduce": (stateless(default_hooks.allreduce_hook), CLOSE),
    "fp16": (stateless(default_hooks.fp16_compress_hook), CLOSE),
    "bf16": (stateless(default_hooks.bf16_compress_hook), CLOSE),
    "fp16 wrapper": (stateless(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), CLOSE),
    "bf16 wrapper": (stateless(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)), CLOSE),
    "PowerSGD": (power(powerSGD_hook.powerSGD_hook), 1e-4),
    "PowerSGD without error feedback": (power(powerSGD_hook.powerSGD_hook, use_error_feedback=False), 1e-4),
    "PowerSGD without warm start": (power(powerSGD_hook.powerSGD_hook, warm_start=False), 1e-4),
    # Its warm-up only: once it compresses, torch 2.13's hook fails on an assertion of its own, in torch's DDP as well.
    "batched PowerSGD": (power(powerSGD_hook.batched_powerSGD_hook, start=PASSES + 1), 1e-4),
    "post-localSGD": (post_local, CLOSE),
    "noop": (stateless(debugging_hooks.noop_hook), EXACT),
}
"""State and hook, and how far stretto may be from torch.

Not here: torch's quantization hooks and ZeRO overlap, which do not run over Gloo in torch's DDP either. The first
expect NCCL's form of an all-gather's result, the second raises by itself.
"""
ONE_BUCKET = [name for name in HOOKS if "PowerSGD" in name]
"""torch's DDP aborts over Gloo with more: see comm_hooks.py, [Note: one at a time]."""


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = torch.nn.Linear(24, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def train(wrap, state_and_hook, rank, cap_mb=CAP_MB):
    """Gradients of the last pass, and the parameters."""
    model = wrap(Net(), bucket_cap_mb=cap_mb)
    model.register_comm_hook(*state_and_hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(PASSES):
        optimizer.zero_grad()
        model(torch.randn(16, 24, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters()], [p.detach().clone() for p in model.parameters()]


def torch_takes_bf16(model, state, hook):
    """torch refuses bf16 hooks without CUDA, by name, although Gloo sums bf16: ask under another name."""
    renamed = functools.wraps(hook)(lambda state, bucket: hook(state, bucket))
    renamed.__name__ = "renamed"
    TorchDDP.register_comm_hook(model, state, renamed)


class Torch(TorchDDP):
    register_comm_hook = torch_takes_bf16


def every_hook(rank):
    warnings.simplefilter("ignore")
    found = {}
    for name, (state_and_hook, _) in HOOKS.items():
        cap = 25 if name in ONE_BUCKET else CAP_MB
        wrappers = (DistributedDataParallel, Torch)
        found[name] = tuple(train(wrap, state_and_hook, rank, cap) for wrap in wrappers)
        dist.barrier()
    for name in ONE_BUCKET:  # many times: the order of collectives is a race otherwise
        found[f"{name}, several"] = [train(DistributedDataParallel, HOOKS[name][0], rank) for _ in range(3)]
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found():
    return spawn_ranks(every_hook, WORLD)


@pytest.mark.ranks
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_torch_gives_what_it_gives_in_torch(name, found):
    tolerance = HOOKS[name][1]
    for rank in range(WORLD):
        ours, theirs = found[rank][name]
        for mine, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
            assert mine.isfinite().all()
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    if name != "noop":  # every rank its own gradients
        for mine, other in zip(found[0][name][0][1], found[1][name][0][1], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ONE_BUCKET)
def test_hooks_that_communicate_in_callbacks_keep_their_order_with_several_buckets(name, found):
    for mine, other in zip(found[0][f"{name}, several"], found[1][f"{name}, several"], strict=True):
        for one, two in zip(mine[1], other[1], strict=True):
            assert one.isfinite().all() and torch.equal(one, two)


def optimizers_in_backward(rank):
    """Each way of stepping inside backward, and the plain way: parameters after some passes, and what was warned of."""
    warnings.simplefilter("ignore")
    found, told = {}, logging.handlers.BufferingHandler(1000)
    logging.getLogger("stretto").addHandler(told)
    for way in ("plain", "fused", "apply", "apply to some", "builtin"):
        model = Net()
        if way.startswith("apply"):
            from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

            among = [*model.parameters()][:: 2 if way == "apply to some" else 1]
            _apply_optimizer_in_backward(torch.optim.SGD, among, {"lr": 0.05})
        model = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if way == "fused":
            model._register_fused_optim(torch.optim.SGD, 0.05)
        if way == "builtin":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        generator = torch.Generator().manual_seed(rank)
        for number in range(PASSES):
            optimizer.zero_grad()
            for _ in range(number % 2):
                with model.no_sync():
                    model(torch.randn(16, 24, generator=generator)).pow(2).mean().backward()
            model(torch.randn(16, 24, generator=generator)).pow(2).mean().backward()
            if way in ("plain", "apply to some", "builtin"):
                optimizer.step()
        found[way] = [p.detach().clone() for p in model.parameters()], [p.grad is None for p in model.parameters()]
        found[way] += ([record.getMessage() for record in told.buffer if record.levelno >= logging.WARNING],)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def stepped():
    return spawn_ranks(optimizers_in_backward, WORLD)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["fused", "apply", "apply to some", "builtin"])
def test_optimizers_that_step_in_backward_step_as_the_plain_one(way, stepped):
    for rank in range(WORLD):
        for mine, plain in zip(stepped[rank][way][0], stepped[rank]["plain"][0], strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
        assert stepped[rank][way][2] == []  # such as that a step took gradients that were not averaged
    assert all(stepped[0][way][1]) == (way == "apply")  # its gradients are used up


class Breaks(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ValueError("optimizer broke")
        return super().step(closure)


def an_optimizer_that_fails_in_backward(rank):
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(Breaks, model.parameters(), {"lr": 0.05})
    model = DistributedDataParallel(model)
    told = []
    for number in range(2):
        Breaks.fails = bool(number and rank)
        try:
            model(torch.ones(2, 24)).sum().backward()
        except (ValueError, PeerError) as error:
            told.append(f"{number} {type(error).__name__}")
    return told


@pytest.mark.ranks
def test_an_optimizer_that_fails_in_backward_is_told_in_that_pass():
    assert spawn_ranks(an_optimizer_that_fails_in_backward, WORLD) == [["1 PeerError"], ["1 ValueError"]]


def optimizers_in_backward_over_another_group(rank):
    """Weights and gradients after each pass; the group of the first has gone by the second."""
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, found, first = torch.nn.Linear(1, 1, bias=False), [], dist.new_group([0, 1])
    torch.nn.init.zeros_(model.weight)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DistributedDataParallel(model, process_group=first)
    for number in range(4):
        wrapped(torch.full((1, 1), 2.0 * rank)).sum().backward()
        found.append((model.weight.item(), model.weight.grad))
        if number == 0:
            wrapped._update_process_group(dist.group.WORLD)
            dist.destroy_process_group(first)
    return found


@pytest.mark.ranks
def test_optimizers_that_step_in_backward_go_on_over_another_group():
    assert spawn_ranks(optimizers_in_backward_over_another_group, 2) == [[(-n, None) for n in (1.0, 2.0, 3.0, 4.0)]] * 2


def optimizers_in_backward_of_half_precision(rank):
    """Gradients travel as float32, and are the parameter's own dtype again where its optimizer steps."""
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(model.weight)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DistributedDataParallel(model, reduce_dtype=torch.float32)
    wrapped(torch.full((1, 1), 2.0 * rank, dtype=torch.bfloat16)).sum().backward()
    return model.weight.item(), model.weight.dtype


@pytest.mark.ranks
def test_optimizers_in_backward_step_with_gradients_of_the_parameters_dtype():
    assert spawn_ranks(optimizers_in_backward_of_half_precision, 2) == [(-1.0, torch.bfloat16)] * 2


class TestWhatIsAHook:
    def test_it_must_be_callable(self):
        assert isinstance(found := check_hook({}), TypeError) and str(found) == "Communication hook must be callable."

    def test_annotations_must_be_those_of_the_contract(self):
        def wrong_bucket(state, bucket: int):
            pass

        def wrong_return(state, bucket) -> int:
            pass

        told = "Communication hook: bucket annotation should be dist.GradBucket."
        assert str(check_hook(wrong_bucket)) == told
        told = "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        assert str(check_hook(wrong_return)) == told

    def test_hooks_that_torch_trips_over_are_taken(self):
        def another_name(state, gradients):
            pass

        def text(state, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
            pass

        for hook in (another_name, text, functools.partial(text, None), default_hooks.bf16_compress_hook):
            assert check_hook(hook) is None

    def test_one_whose_annotations_are_for_a_type_checker_only_is_taken(self):
        """From Python 3.14 on they are looked up when they are asked for."""

        class Hook:
            @property
            def __signature__(self):
                raise NameError("name 'GradBucket' is not defined")

            def __call__(self, state, bucket):
                raise AssertionError("no backward is run")

        assert check_hook(Hook()) is None
        refuse_hook(Hook(), Options(), 0)

    def test_options_that_a_hook_would_override_are_refused_beside_it(self):
        model = DistributedDataParallel(torch.nn.Linear(1, 1), reduce="sum")
        with pytest.raises(SetupError, match="does its own scaling"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)


class MayFail(Net):
    def forward(self, x, fail=False):
        hidden = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(Fails.apply(hidden) if fail else hidden)))


def powersgd_after_a_failure(rank):
    warnings.simplefilter("ignore")
    model = DistributedDataParallel(MayFail())
    model.register_comm_hook(*HOOKS["PowerSGD"][0]())
    finite, told = [], []
    for number in range(9):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + rank)
        try:
            model(torch.randn(16, 24, generator=generator), fail=rank == 1 and number == 5).pow(2).mean().backward()
        except (ValueError, PeerError):
            told.append(number)
            continue
        finite.append(all(parameter.grad.isfinite().all() for parameter in model.parameters()))
    return finite, told


@pytest.mark.ranks
def test_what_a_stateful_hook_remembers_outlives_a_failure():
    assert spawn_ranks(powersgd_after_a_failure, 2) == [([True] * 8, [5])] * 2


def hook_that_ends_in_a_text(rank):
    """The error of its backward over a process group, and what that came after."""
    model = torch.nn.Linear(2, 1)
    sync = stretto.attach(model, transport="process_group")

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: "text")

    sync.register_comm_hook(None, hook)
    with pytest.raises(TypeError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value), repr(caught.value.__context__)


@pytest.mark.ranks
def test_the_error_of_a_hooks_future_is_raised_once():
    """To see whether the group may be let go of it was waited for again, and the traceback showed it twice."""
    text = "the comm hook's future holds a str in place of the reduced flat tensor.\n"
    told = text + "Let its last callback return that tensor."
    assert spawn_ranks(hook_that_ends_in_a_text, 2) == [(told, "None")] * 2


def bare_bucket(*, index: int = 0, is_last: bool = False) -> SimpleNamespace:
    """What a hook's launch looks at."""
    flat = torch.zeros(3)
    return SimpleNamespace(
        flat=flat, payload=flat[:2], footer=SimpleNamespace(flat=flat[2:]), index=index, is_last=is_last
    )


def test_a_future_can_be_waited_for_again():
    future, payload = torch.futures.Future(), torch.zeros(2)
    work = HookWork(SimpleNamespace(payload=payload), future, CommHook(None, print))
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=0.1))
    assert str(caught.value) == "the comm hook is not done within 0.1 s" and not work.is_completed()
    future.set_result([torch.ones(2)])
    work.wait(timedelta(seconds=5))
    assert work.is_completed() and payload.tolist() == [1, 1]


def test_a_hook_that_has_failed_behind_what_it_sends_is_not_called_again(monkeypatch):
    begun, called = iter([0, 0, 0, 1]), []
    monkeypatch.setattr(comm_hooks, "collectives_begun", lambda: next(begun))

    def hook(state, bucket):
        called.append(bucket)
        raise OSError("hook broke")

    bucket = bare_bucket()
    comm_hook = CommHook(None, hook)
    peers = Peers(LocalGroup(1).transport(0))
    comm_hook.use(peers)
    for _ in range(2):  # before anything is sent; behind it
        with pytest.raises(OSError, match="hook broke"):
            comm_hook.launch(bucket, None)
    with pytest.raises(stretto.CommunicationError) as caught:
        comm_hook.launch(bucket, None)
    named = f"comm hook {__name__}.test_a_hook_that_has_failed_behind_what_it_sends_is_not_called_again.<locals>.hook"
    assert str(caught.value) == (
        f"rank 0, attach: {named} has failed, so it is not called again.\n  OSError: hook broke\n"
        "Remove the cause and start again, on all ranks."
    )
    assert len(called) == 2


def test_a_last_bucket_that_was_waited_for_in_vain_is_not_sent_again():
    """Whatever kept it from coming: the pass is given up then, from this bucket on."""
    called = []

    def hook(state, bucket):
        called.append(bucket)
        return torch.futures.Future()

    def wait_for(work, bucket):
        raise PeerError("rank 1 died")

    comm_hook = CommHook(None, hook)
    for kind in (PeerError, stretto.CommunicationError):
        with pytest.raises(kind):
            comm_hook.launch(bare_bucket(is_last=True), wait_for)
    assert len(called) == 1


@pytest.mark.parametrize(
    ("hook", "knows"),
    [
        (default_hooks.allreduce_hook, False),
        (default_hooks.bf16_compress_hook, False),
        (default_hooks.fp16_compress_hook, False),
        (functools.partial(default_hooks.allreduce_hook), True),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), True),
        (lambda state, bucket: default_hooks.allreduce_hook(state, bucket), True),
        (debugging_hooks.noop_hook, True),
    ],
)
def test_only_hooks_that_are_known_let_the_plan_follow(hook, knows):
    """What a wrapper or a program's own function keeps nobody can see; beside noop nothing is told."""
    assert CommHook(None, hook).knows_buckets is knows


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("Got the following error when running the callback: KeyError: 'x'", True),
        ("Got the following error when running the callback: RuntimeError: Got the following error when running the "
         "callback: ValueError: x", True),
        ("Got the following error when running the callback: RuntimeError: Connection closed by peer", False),
        ("Got the following error when running the callback: DistStoreError: wait timeout", False),
        ("Connection closed by peer", False),
    ],
)  # fmt: skip
def test_only_errors_of_a_program_are_a_hooks_own(text, own):
    assert is_of_hook(RuntimeError(text)) is own


def test_a_bucket_before_that_was_waited_for_in_vain_is_waited_for_again():
    """When the pass is given up: the hook was called for the next one while it was under way, and all ranks hung."""
    called, waited = [], []

    def hook(state, bucket):
        called.append(bucket.index())
        return torch.futures.Future()

    def wait_for(work, bucket):
        waited.append(bucket.index)
        if len(waited) == 1:
            raise KeyboardInterrupt

    comm_hook = CommHook(None, hook)
    first, second = (bare_bucket(index=index) for index in range(2))
    comm_hook.launch(first, wait_for)
    with pytest.raises(KeyboardInterrupt):
        comm_hook.launch(second, wait_for)
    assert (called, waited) == ([0], [0])
    comm_hook.launch(second, wait_for)
    assert (called, waited) == ([0, 1], [0, 0])


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo", "stretto"])
def test_what_a_hook_begins_is_counted(backend):
    importlib.import_module("stretto.backend")  # registers one

    def all_reduces():
        before = comm_hooks.collectives_begun()
        dist.all_reduce(torch.ones(2))
        return comm_hooks.collectives_begun() - before

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [all_reduces(), all_reduces()] == [1, 1]
    finally:
        dist.destroy_process_group()


def test_where_a_backend_does_not_count_a_hook_that_fails_may_have_sent():
    """Of a group with several, torch itself asks only the default one, and says that it does not count."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers that backend

    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert comm_hooks.collectives_begun() is None
        comm_hook = CommHook(None, lambda state, bucket: {}["no such key"])
        with pytest.raises(KeyError):
            comm_hook.launch(bare_bucket(), None)
        assert comm_hook.failure == "KeyError: 'no such key'"
    finally:
        dist.destroy_process_group()


OTHER_SIZE = (
    "the comm hook's future holds {} in place of the 3 of the reduced flat tensor.\n"
    "Let its last callback return the whole tensor: that is future.value() of torch's own hooks, and "
    "future.value()[0] of Work.get_future()."
)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (torch.ones(()), OTHER_SIZE.format("1 element")),
        (torch.ones(4), OTHER_SIZE.format("4 elements")),
        (
            [*torch.ones(3)],
            "the comm hook's future holds a list in place of the reduced flat tensor.\n"
            "Let its last callback return that tensor.",
        ),
    ],
    ids=["an element", "too much", "its elements"],
)
def test_a_result_of_another_size_is_refused(result, told):
    """One ``[0]`` too many made all gradients the first one, without a word."""
    future, payload = torch.futures.Future(), torch.zeros(3)
    future.set_result(result)
    with pytest.raises((TypeError, ValueError)) as caught:
        HookWork(SimpleNamespace(payload=payload), future, CommHook(None, print)).wait()
    assert str(caught.value) == told


class Plain:
    """What a hook may return besides: it can only be waited for."""

    def done(self):
        return False

    def wait(self):
        return torch.ones(2)


def test_what_knows_no_callbacks_is_waited_for_plainly():
    payload = torch.zeros(2)
    HookWork(SimpleNamespace(payload=payload), Plain(), CommHook(None, print)).wait(timedelta(seconds=0.1))
    assert payload.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_see_complex_gradients_as_pairs_of_reals(dtype):
    """Also in a buffer that another hook has cast: torch has no complex bfloat16."""

    def worker(transport):
        def hook(_, bucket):
            bucket.set_buffer(bucket.buffer().to(dtype))
            shapes.append([tuple(one.shape) for one in bucket.gradients()])
            for one in bucket.gradients():
                one.mul_(2)
            transport.all_reduce(wide := bucket.buffer().float()).wait()
            future = torch.futures.Future()
            future.set_result((wide / transport.world_size).to(dtype))
            return future

        shapes = []
        layer = torch.nn.ParameterList([torch.ones(3, 2, dtype=torch.complex64), torch.ones((), dtype=torch.complex64)])
        sync = stretto.attach(layer, transport=transport)
        sync.register_comm_hook(None, hook)
        sum((one * (transport.rank + 1j)).sum().real for one in layer).backward()
        return shapes, [one.grad.flatten()[0].item() for one in layer]

    assert run_ranks(worker, 2) == [([[(3, 2, 2), (2,)]], [1 - 2j] * 2)] * 2


def test_descriptions_name_the_hook():
    def worker(hook, transport):
        sync = stretto.attach(torch.nn.Linear(1, 1), transport=transport)
        sync.register_comm_hook(None, hook)
        return sync.describe().splitlines()[1]

    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
    said = f"gradients: by comm hook {hook}, instead of local (threads of one process), in place when backward"
    assert run_ranks(functools.partial(worker, default_hooks.bf16_compress_hook), 2) == [f"{said} returns"] * 2
    partly = functools.partial(default_hooks.bf16_compress_hook)
    assert (
        run_ranks(functools.partial(worker, partly), 2)
        == [f"{said} returns".replace(hook, f"functools.partial({hook}, ...)")] * 2
    )

    class Called:
        def __call__(self, state, bucket):
            raise AssertionError("no pass")

    name = f"{__name__}.{Called.__qualname__}"  # no address, which would be another on each rank
    assert run_ranks(functools.partial(worker, Called()), 2) == [f"{said} returns".replace(hook, name)] * 2


class Trunk(torch.nn.Module):
    """A part that is attached for itself, between two layers, of which one may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, whole):
        x = self.part(self.first(x))
        return self.last(x) if whole else x


def hook_behind_another(rank, nested):
    """Rank 1 leaves out the last layer in every other pass, and so is at the end of backward when rank 0 sends that."""
    module = Trunk()
    part = stretto.attach(module.part)
    rest = module if nested else torch.nn.ModuleList([module.first, module.last])
    sync = stretto.attach(rest, bucket_cap_mb=1e-6)
    sync.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    for number in range(6):
        module(torch.full((2, 3), 1.0 + rank), rank == 0 or number % 2 == 0).sum().backward()
    return [one.grad.tolist() for one in module.parameters()], part.statistics.passes


@pytest.mark.ranks
@pytest.mark.parametrize("nested", [True, False])
def test_a_hook_that_is_waited_for_lets_a_model_before_it_end_its_pass(nested):
    """That one has a channel of its own, and a rank that waits there sends nothing for the hook."""
    first, second = spawn_ranks(hook_behind_another, 2, nested, timeout=30)
    assert first == second and first[1] == 6
