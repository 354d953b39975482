"""Every kind of graph, in one table: the gradients of two and of three ranks are those of one process.

Each entry builds a model and runs one pass of training on a batch. Losses are means over rows, so the same pass on the
joined batch gives what the mean over ranks must be. All entries run on threads, with buckets of one parameter and with
one bucket for all, and once more in real processes over Gloo.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import checkpoint
from torch import nn

import stretto
from stretto.testing import run_ranks, spawn_ranks

STEPS = 4
ROWS = 4
WIDTH = 4
ONE_EACH, ALL_IN_ONE = 1e-6, 1.0

Batch = torch.Tensor
Pair = collections.namedtuple("Pair", "first second")  # as users write it


@dataclasses.dataclass
class Out:
    code: torch.Tensor
    extra: dict[str, Any]


@dataclasses.dataclass
class Run:
    """What a pass is given: the models, their handles (none in the reference), the batch, the number of the pass."""

    model: Any
    syncs: list[stretto.Synchronizer]
    x: Batch
    number: int
    world: int
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a pass leaves for the next."""
    results: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """What is to be compared beside gradients and parameters."""

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for sync in self.syncs:
            stack.enter_context(sync.no_sync())
        return stack

    def zero(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)


@dataclasses.dataclass
class Graph:
    build: Callable[[], nn.Module]
    step: Callable[[Run], None]
    attached: Callable[[nn.Module], list[nn.Module]] = lambda model: [model]
    passes: int = STEPS
    """Synchronised passes in all, of each attached module."""
    tolerance: float = 1e-5


GRAPHS: dict[str, Graph] = {}


def graph(build: Callable[[], nn.Module], *names: str, **options: Any) -> Callable[[Any], Any]:
    """Enter a pass into the table; with names, once for each, which it gets as its second argument."""

    def enter(step: Callable[..., None]) -> Callable[..., None]:
        for name in names or ("",):
            bound = (lambda run, name=name: step(run, name)) if name else step
            GRAPHS[f"{step.__name__}{'-' if name else ''}{name}"] = Graph(build, bound, **options)
        return step

    return enter


def filled(module: nn.Module) -> nn.Module:
    """Thread ranks share torch's default generator, so values come from one of their own."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def batch(rank: int, number: int) -> Batch:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        filled(self)

    def through(self, x: Batch, names: str) -> torch.Tensor:
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x

    def forward(self, x: Batch, names: str = "abc") -> torch.Tensor:
        return self.through(x, names)

    def encode(self, x: Batch) -> torch.Tensor:
        return self.b(self.a(x))

    def packed(self, x: Batch, kind: str) -> Any:
        first, second, third = self.a(x), self.b(x), self.c(x)
        return {
            "dict": {"first": first, "second": [second], "note": "no tensor"},
            "dataclass": Out(first, {"second": second, "none": None}),
            "namedtuple": Pair(first, second),
            "nested": [({"deep": Out(first, {"more": Pair(second, 3)})},)],
            "unused": (first, second, third),
        }[kind]


# Forward by any method, outputs in any container


@graph(Net)
def net(run: Run) -> None:
    run.zero()
    run.model(run.x).square().mean().backward()


@graph(Net)
def another_method(run: Run) -> None:
    run.zero()
    run.model.encode(run.x).mean().backward()


@graph(Net)
def no_method_at_all(run: Run) -> None:
    run.zero()
    nn.functional.linear(run.model.a(run.x), run.model.c.weight).mean().backward()


@graph(Net, "dict", "dataclass", "namedtuple", "nested", "unused")
def outputs_in(run: Run, kind: str) -> None:
    run.zero()
    out = run.model.packed(run.x, kind)
    if kind == "nested":
        out = out[0][0]["deep"]
    first = {"dict": lambda: out["first"], "dataclass": lambda: out.code, "nested": lambda: out.code}
    tensor = first.get(kind, lambda: out[0])()
    second = {"dict": lambda: out["second"][0], "nested": lambda: out.extra["more"].first, "namedtuple": lambda: out[1]}
    loss = tensor.square().mean()
    if kind in second:
        loss = loss + second[kind]().mean()
    loss.backward()


# Several forwards, several backwards


@graph(Net)
def two_forwards_one_backward(run: Run) -> None:
    run.zero()
    (run.model(run.x, "ab").mean() + run.model(2 * run.x, "bc").mean()).backward()


@graph(Net, passes=2 * STEPS)
def two_forwards_two_backwards(run: Run) -> None:
    run.zero()
    first, second = run.model(run.x, "ab").mean(), run.model(2 * run.x, "bc").mean()
    second.backward()
    first.backward()


@graph(Net, passes=2 * STEPS)
def one_forward_two_backwards(run: Run) -> None:
    run.zero()
    loss = run.model(run.x).mean()
    loss.backward(retain_graph=True)
    loss.backward()


@graph(Net, passes=2 * STEPS)
def two_losses_of_two_halves(run: Run) -> None:
    run.zero()
    hidden = run.model.a(run.x)
    run.model.b(hidden.detach()).square().mean().backward()
    run.model.c(hidden).square().mean().backward()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
        filled(self)


def play(run: Run) -> None:
    """The generator's pass reaches the critic's parameters as well, whose gradients are thrown away."""
    generator, critic = run.model.generator, run.model.critic
    if not run.memory:
        run.memory.update(g=torch.optim.SGD(generator.parameters(), 0.1), c=torch.optim.SGD(critic.parameters(), 0.1))
    run.memory["c"].zero_grad()
    (critic(generator(run.x).detach()).mean() - critic(run.x + 1).mean()).backward()
    run.memory["c"].step()
    run.memory["g"].zero_grad()
    (-critic(generator(run.x)).mean()).backward()
    run.memory["g"].step()


@graph(Gan, passes=2 * STEPS)
def gan(run: Run) -> None:
    play(run)


@graph(Gan, passes=0, attached=lambda model: [model.critic, model.generator])
def gan_attached_in_two_parts(run: Run) -> None:
    play(run)


@graph(Gan, attached=lambda model: [model.generator, model.critic])
def two_attached_models_in_one_backward(run: Run) -> None:
    run.zero()
    run.model.critic(run.model.generator(run.x)).mean().backward()


@graph(Net)
def backward_to_some_inputs(run: Run) -> None:
    run.zero()
    run.model(run.x).mean().backward(inputs=[run.model.a.weight, run.model.c.bias])


# Used twice


@graph(Net)
def layer_used_twice(run: Run) -> None:
    run.zero()
    run.model(run.x, "abab").mean().backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight
        filled(self)


@graph(Tied)
def tied_parameters(run: Run) -> None:
    run.zero()
    run.model.decode(torch.tanh(run.model.encode(run.x))).square().mean().backward()


@graph(Tied, "reentrant", "not reentrant")
def tied_and_checkpointed(run: Run, kind: str) -> None:
    run.zero()
    hidden = torch.tanh(run.model.encode(run.x.requires_grad_()))
    checkpoint(run.model.decode, hidden, use_reentrant=kind == "reentrant").square().mean().backward()


def enter_checkpoints() -> None:
    layouts: dict[str, Callable[[Net, Batch, bool], torch.Tensor]] = {
        "part": lambda net, x, way: net.c(checkpoint(net.b, net.a(x), use_reentrant=way)),
        "whole": lambda net, x, way: checkpoint(net, x, use_reentrant=way),
        "each": lambda net, x, way: checkpoint(net.c, checkpoint(net.a, x, use_reentrant=way), use_reentrant=way),
        "twice": lambda net, x, way: net.c(
            checkpoint(net.b, checkpoint(net.b, net.a(x), use_reentrant=way), use_reentrant=way)
        ),
        "inside and outside": lambda net, x, way: net.c(net.a(checkpoint(net.c, x, use_reentrant=way))),
        "nested": lambda net, x, way: net.c(
            checkpoint(lambda h: net.b(checkpoint(net.a, h, use_reentrant=way)), x, use_reentrant=way)
        ),
        "unused inside": lambda net, x, way: net.c(
            checkpoint(lambda h: (net.a(h), net.b(h).detach())[0], x, use_reentrant=way)
        ),
    }
    for layout, output in layouts.items():
        for way in (True, False):

            def step(run: Run, output=output, way=way) -> None:
                run.zero()
                output(run.model, run.x.requires_grad_(), way).square().mean().backward()

            GRAPHS[f"checkpoint-{layout}-{'reentrant' if way else 'not reentrant'}"] = Graph(Net, step)


enter_checkpoints()


@graph(Net, passes=2 * STEPS)
def checkpoint_and_two_backwards(run: Run) -> None:
    run.zero()
    loss = run.model.c(checkpoint(run.model.b, run.model.a(run.x), use_reentrant=False)).mean()
    loss.backward(retain_graph=True)
    loss.backward()


# Backward of backward


@graph(Net)
def gradient_penalty(run: Run) -> None:
    run.zero()
    x = run.x.clone().requires_grad_()
    out = run.model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()


@graph(Net)
def backward_that_keeps_a_graph(run: Run) -> None:
    run.zero()
    run.model(run.x).square().mean().backward(create_graph=True)


@graph(Net)
def second_derivative_by_parameters(run: Run) -> None:
    """torch.autograd.grad fires no hook, so the inner backward is no pass; the loss is linear in it."""
    run.zero()
    loss = run.model(run.x).square().mean()
    inner = torch.autograd.grad(loss, [run.model.a.weight], create_graph=True)[0]
    inner.sum().backward()


# Accumulation


@graph(Net)
def no_sync_around_forward_and_backward(run: Run) -> None:
    run.zero()
    with run.no_sync():
        run.model(run.x).mean().backward()
    run.model(3 * run.x).mean().backward()


@graph(Net)
def no_sync_around_backward_only(run: Run) -> None:
    run.zero()
    first, second = run.model(run.x).mean(), run.model(3 * run.x).mean()
    with run.no_sync():
        first.backward()
    second.backward()


@graph(Net)
def no_sync_around_forward_only(run: Run) -> None:
    run.zero()
    with run.no_sync():
        loss = run.model(run.x).mean()
    loss.backward()


@graph(Net)
def no_sync_left_by_an_exception(run: Run) -> None:
    run.zero()
    with contextlib.suppress(KeyError), run.no_sync():
        run.model(run.x).mean().backward()
        raise KeyError
    run.model(3 * run.x).mean().backward()


@graph(Net)
def used_in_the_first_micro_batch_only(run: Run) -> None:
    run.zero()
    for micro in range(3):
        with run.no_sync() if micro < 2 else contextlib.nullcontext():
            run.model((1 + micro) * run.x, "abc" if micro == 0 else "a").mean().backward()


@graph(Net, "to none", "in place", "alternating")
def zero_grad(run: Run, kind: str) -> None:
    run.zero(set_to_none=kind == "to none" or (kind == "alternating" and run.number % 2 == 0))
    run.model(run.x).mean().backward()


@graph(Net)
def zero_grad_never(run: Run) -> None:
    run.model(run.x, "abc" if run.number != 2 else "a").mean().backward()


@graph(Net)
def zero_grad_of_some(run: Run) -> None:
    run.model.a.zero_grad()
    run.model(run.x).mean().backward()


@graph(Net)
def zero_grad_of_an_optimizer_with_no_sync(run: Run) -> None:
    run.zero(set_to_none=False)
    with run.no_sync():
        run.model(run.x, "ab").mean().backward()
    run.model(run.x).mean().backward()


@graph(Net)
def gradients_preset_by_the_user(run: Run) -> None:
    """Different ones on each rank; what comes out is the mean of them and the mean of the new."""
    for parameter in run.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0) * run.x.mean()
    run.model(run.x).mean().backward()


# Kinds of parameters


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.phase = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))
        self.phase_scalar = nn.Parameter(torch.zeros((), dtype=torch.complex128))
        filled(self)


@graph(Kinds)
def complex_scalar_and_empty(run: Run) -> None:
    run.zero()
    model = run.model
    out = (run.x * model.phase * model.phase_scalar.to(torch.complex64)).abs() * model.scalar
    (out.mean() + model.empty.sum()).backward()


@graph(lambda: filled(nn.Sequential(nn.Conv2d(1, 6, 2), nn.Conv2d(6, 3, 1))).to(memory_format=torch.channels_last))
def channels_last(run: Run) -> None:
    run.zero()
    run.model(run.x.reshape(-1, 1, 2, 2)).square().mean().backward()
    for parameter in run.model.parameters():
        assert parameter.grad.stride() == parameter.stride()


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@graph(lambda: filled(nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in DTYPES)), tolerance=2e-2)
def four_dtypes_in_one_model(run: Run) -> None:
    run.zero()
    x = run.x
    for layer in run.model:
        x = torch.tanh(layer(x.to(layer.weight.dtype)))
    x.square().mean().backward()
    assert [layer.weight.grad.dtype for layer in run.model] == [*DTYPES]


@graph(Net, tolerance=2e-2)
def autocast(run: Run) -> None:
    run.zero()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.model(run.x).float().square().mean()
    loss.backward()


@graph(Net)
def grad_scaler_with_an_inf_in_one_row(run: Run) -> None:
    """In pass 1 one rank has the inf; the mean is inf on all, so all of them skip the step and lower the scale."""
    if not run.memory:
        run.memory.update(
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
            optimizer=torch.optim.SGD(run.model.parameters(), 0.1),
        )
    scaler, optimizer = run.memory["scaler"], run.memory["optimizer"]
    optimizer.zero_grad()
    x = run.x
    before = copy.deepcopy(run.model.state_dict())
    spoil = run.number == 1 and torch.equal(x[-ROWS:], batch(run.world - 1, 1))
    out = run.model(x).square()
    if spoil:
        out = torch.cat([out[:-1], out[-1:] * float("inf")])
    scaler.scale(out.mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    stayed = all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    assert stayed == (run.number == 1)
    run.results.append(torch.tensor(scaler.get_scale()))


@graph(Net)
def clipped_by_norm(run: Run) -> None:
    run.zero()
    run.model(run.x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
    assert norm > 0.01
    run.results.append(norm)


# Exceptions on every rank


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("backward fails")


@graph(Net, passes=STEPS)
def exception_in_forward_on_every_rank(run: Run) -> None:
    run.zero()
    with contextlib.suppress(ValueError):
        run.model.a(run.x)
        raise ValueError
    run.model(run.x).mean().backward()


@graph(Net, "before any gradient", "amid", "inside no_sync", "in a reentrant checkpoint")
def exception_in_backward_on_every_rank(run: Run, where: str) -> None:
    run.zero()
    model, x = run.model, run.x.clone().requires_grad_()
    with contextlib.suppress(ValueError), run.no_sync() if where == "inside no_sync" else contextlib.nullcontext():
        if where == "before any gradient":
            Fails.apply(model(x)).mean().backward()
        elif where == "in a reentrant checkpoint":
            hidden = checkpoint(lambda h: Fails.apply(model.b(h)), model.a(x), use_reentrant=True)
            model.c(hidden).mean().backward()
        else:
            model.c(Fails.apply(model.a(x))).mean().backward()
        raise AssertionError("backward did not fail")
    run.zero()
    model(run.x).mean().backward()


# What runs them


class Wrapped:
    """A model whose forward is run by the drop-in around it, and all else past that."""

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper.module, name)

    def __iter__(self) -> Any:
        return iter(self.wrapper.module)


def train(entry: Graph, world: int, x_of: Callable[[int], Batch], attach: Callable[[nn.Module], Any] | None) -> dict:
    """All passes of an entry; the gradients after each, the parameters at the end, and what it wrote down."""
    model = entry.build()
    faces = [attach(part) for part in entry.attached(model)] if attach else []
    wrapped = [face for face in faces if isinstance(face, nn.Module) and face.module is model]
    syncs = [face.synchronizer if isinstance(face, nn.Module) else face for face in faces]
    run = Run(Wrapped(*wrapped) if wrapped else model, syncs, torch.empty(0), 0, world)
    found: dict[str, torch.Tensor | None] = {}
    for run.number in range(STEPS):
        run.x = x_of(run.number)
        entry.step(run)
        for name, parameter in model.named_parameters():
            found[f"pass {run.number}: {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    found |= {f"parameter {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    found |= {f"result {place}": value for place, value in enumerate(run.results)}
    if entry.passes:
        assert [sync.statistics.passes for sync in syncs] == [entry.passes] * len(syncs)
    for sync in syncs:
        sync.detach()
    return found


def one_process(entry: Graph, world: int) -> dict:
    return train(entry, world, lambda number: torch.cat([batch(rank, number) for rank in range(world)]), None)


def compare(entry: Graph, ranks: list[dict], wanted: dict) -> None:
    """All ranks to the last bit, and with one process up to the order of sums."""
    for name, value in wanted.items():
        for rank, found in enumerate(ranks):
            assert (found[name] is None) == (value is None), f"{name} on rank {rank}: {found[name]}, wanted {value}"
            if value is not None:
                assert found[name].dtype == value.dtype, name
                mine, first = (one[name].reshape(-1).view(torch.uint8) for one in (found, ranks[0]))
                assert torch.equal(mine, first), f"{name} differs between rank 0 and rank {rank}"
        if value is not None and value.numel():
            size = value.abs().nan_to_num(posinf=0).max().item()
            torch.testing.assert_close(
                ranks[0][name],
                value,
                rtol=0,
                atol=entry.tolerance * max(size, 1e-3),
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


keeps_graph = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


@keeps_graph
@pytest.mark.timeout(30)
@pytest.mark.parametrize("cap", [ONE_EACH, ALL_IN_ONE])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name: str, world: int, cap: float) -> None:
    entry = GRAPHS[name]

    def worker(transport):
        def attach(module: nn.Module) -> stretto.Synchronizer:
            return stretto.attach(module, transport=transport, bucket_cap_mb=cap)

        return train(entry, world, lambda number: batch(transport.rank, number), attach)

    compare(entry, run_ranks(worker, world, timeout=10), one_process(entry, world))


@pytest.mark.parametrize("cap", [ONE_EACH, ALL_IN_ONE])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("uses", [["ab", "ab", "ab"], ["ab", "c", "b"], ["a", "abc", "a"]])
def test_parameters_unused_with_a_comm_hook(uses: list[str], world: int, cap: float) -> None:
    """What nobody used keeps its ``.grad``, whatever the hook makes of zeros, and who used what is known."""

    def worker(transport):
        def mean(state: object, bucket: Any) -> torch.futures.Future:
            transport.all_reduce(bucket.buffer().div_(world)).wait()
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = Net()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=cap)
        sync.register_comm_hook(None, mean)
        found = {}
        for number in range(STEPS):
            model.zero_grad()
            model(batch(transport.rank, number), uses[transport.rank]).mean().backward()
            assert {name[0]: ranks for name, ranks in sync.used_by.items()} == counts
            grads = {name: p.grad for name, p in model.named_parameters()}
            found |= {f"pass {number}: {name}": None if g is None else g.clone() for name, g in grads.items()}
        return found

    counts = {layer: sum(layer in use for use in uses[:world]) for layer in "abc"}
    model, wanted = Net(), {}
    for number in range(STEPS):
        model.zero_grad(set_to_none=False)
        for rank in range(world):
            (model(batch(rank, number), uses[rank]).mean() / world).backward()
        wanted |= {
            f"pass {number}: {name}": None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
    compare(Graph(Net, lambda run: None), run_ranks(worker, world, timeout=10), wanted)


def test_who_used_what_is_known_after_each_pass() -> None:
    """Also after the first, which ends with another plan, and in bf16."""
    uses = [["ab", "b", "b"], ["b", "b", "b"], ["c", "abc", ""]]

    def worker(transport):
        net = Net().bfloat16() if transport.world_size == 3 else Net()
        sync = stretto.attach(net, transport=transport, bucket_cap_mb=ONE_EACH)
        found = [sync.used_by]
        for use in uses:
            net(batch(transport.rank, 0).to(net.a.weight.dtype), use[transport.rank] or "c").mean().backward()
            found.append(sync.used_by)
        return [{name[0]: count for name, count in one.items()} for one in found], sync.graph_changed

    zeros = dict.fromkeys("abc", 0)
    for found, changed in run_ranks(worker, 2):
        assert changed and found == [
            zeros,
            {"a": 1, "b": 2, "c": 0},
            {"a": 0, "b": 2, "c": 0},
            {"a": 1, "b": 1, "c": 2},
        ]
    for found, changed in run_ranks(worker, 3):
        assert changed and found[1:] == [{"a": 1, "b": 3, "c": 0}, {"a": 0, "b": 3, "c": 0}, {"a": 1, "b": 1, "c": 3}]


@pytest.mark.parametrize("steady", [True, False])
def test_a_graph_that_stays_is_told_from_one_that_changes(steady: bool) -> None:
    def worker(transport):
        net = Net()
        sync = stretto.attach(net, transport=transport)
        for number in range(STEPS):
            net(batch(transport.rank, number), "ab" if steady or number != 2 else "b").mean().backward()
        return sync.graph_changed

    assert run_ranks(worker, 2) == [not steady] * 2


COMPILED = [(backend, face) for backend in ("eager", "aot_eager") for face in ("attach", "drop-in")]


def train_compiled(rank: int, world: int, backend: str, face: str) -> dict:
    """A compiled model, or a compiled drop-in around one."""
    torch.compiler.reset()
    graphs: list[Any] = []
    forward: list[Callable[[Batch], torch.Tensor]] = []

    def compile_and_count(traced: Any, inputs: Any) -> Any:
        graphs.append(traced)
        return torch._dynamo.lookup_backend(backend)(traced, inputs)

    def start(module: nn.Module) -> stretto.Synchronizer:
        wrapper = stretto.DistributedDataParallel(module) if face == "drop-in" else None
        forward.append(torch.compile(wrapper or module, backend=compile_and_count))
        return wrapper.synchronizer if wrapper else stretto.attach(module)

    def step(run: Run) -> None:
        run.zero()
        forward[0](run.x).square().mean().backward()

    found = train(Graph(Net, step), world, lambda number: batch(rank, number), start)
    assert graphs, "everything ran eagerly"
    return found


def all_graphs(rank: int, world: int) -> dict[str, dict]:
    """Every entry, one after the other; every other one by the drop-in, which runs the forward of a whole model too."""
    warnings.simplefilter("ignore")

    def attach(module: nn.Module) -> stretto.Synchronizer:
        return stretto.attach(module, bucket_cap_mb=ONE_EACH)

    def wrap(module: nn.Module) -> stretto.DistributedDataParallel:
        return stretto.DistributedDataParallel(module, bucket_cap_mb=1)

    found = {
        name: train(entry, world, lambda number: batch(rank, number), wrap if place % 2 else attach)
        for place, (name, entry) in enumerate(GRAPHS.items())
    }
    for backend, face in COMPILED if world == 2 else ():  # importing the compiler costs each process seconds
        found[backend, face] = train_compiled(rank, world, backend, face)
    return found


@pytest.fixture(scope="module")
def in_processes() -> Callable[[int], list[dict[str, dict]]]:
    return functools.cache(lambda world: spawn_ranks(all_graphs, world, world, timeout=60))


@keeps_graph
@pytest.mark.ranks
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.xdist_group(f"graphs {n}")) for n in (2, 3)])
@pytest.mark.parametrize("name", GRAPHS)
def test_graph_in_processes(name: str, world: int, in_processes) -> None:
    compare(GRAPHS[name], [found[name] for found in in_processes(world)], one_process(GRAPHS[name], world))


@pytest.mark.ranks
@pytest.mark.xdist_group("graphs 2")
@pytest.mark.parametrize("backend, face", COMPILED)
def test_compiled_in_processes(backend: str, face: str, in_processes) -> None:
    entry = GRAPHS["net"]
    compare(entry, [found[backend, face] for found in in_processes(2)], one_process(entry, 2))
