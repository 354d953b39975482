"""A sharded optimizer is as the one that was given: its options, hooks and groups, and the state that it is handed."""

from __future__ import annotations

import copy
import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_shared_memory import shared
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import stretto
from stretto.sharding import inner
from stretto.sharding.attributes import comparable
from stretto.sharding.kinds import Kind, kind_of
from stretto.testing import run_ranks, spawn_ranks


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 50), torch.nn.Linear(50, 20)
        self.scale, self.shift = torch.nn.Parameter(torch.tensor(1.5)), torch.nn.Parameter(torch.tensor(0.5))
        self.late: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x))) * self.scale + self.shift
        return x if self.late is None else self.late(x)


START = Two()


def train(model: torch.nn.Module, optimizer: Any, rank: int, steps: range = range(3)) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()


def pair(
    transport: Any, make: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> tuple[Two, Any, stretto.Synchronizer, Two, torch.optim.Optimizer]:
    """A model with a sharded optimizer, and one with a plain one."""
    model, plain = copy.deepcopy(START), copy.deepcopy(START)
    sync = stretto.attach(model, transport=transport)
    stretto.attach(plain, transport=transport)
    return model, stretto.shard(make(model.parameters()), sync, **options), sync, plain, make(plain.parameters())


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# Options that are not among the defaults


class Signed(torch.optim.Optimizer):
    """Steps by ``delta``."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(group["lr"] * self.delta(group, one))


class Twice(Signed):
    def __init__(self, params: Any, twice: bool = False, bounds: Any = (0.0, [1.0])) -> None:
        self.twice, self.bounds = twice, bounds
        super().__init__(params, {})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad.clamp(self.bounds[0], self.bounds[1][0]) * (2 if self.twice else 1)


class Options(Signed):
    def __init__(self, params: Any, **options: Any) -> None:
        self.base = options.get("base", 1.0)
        super().__init__(params, {"k": 1.0, **options})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad * self.defaults["k"] * self.base


class Handed(Options):
    def __init__(self, params: Any, more: float = 1.0, **options: Any) -> None:
        super().__init__(params, more=more, **options)

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return super().delta(group, parameter) * self.defaults["more"]


class Derived(Signed):
    def __init__(self, params: Any, rates: tuple[float, float] = (1.0, 1.0)) -> None:
        super().__init__(params, {"k": rates[0] * rates[1]})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad * self.defaults["k"]


class Counting(Signed):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.count, self.seen = 0, torch.tensor(0.0)

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen += 1
        super().step()

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad / (self.count + self.seen)


LIKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "on itself": lambda p: Twice(p, twice=True),
    "several on itself": lambda p: Twice(p, twice=True, bounds=(-0.001, [0.002])),
    "handed on to torch": lambda p: Options(p, k=2.0, base=3.0),
    "handed on twice": lambda p: Handed(p, k=2.0, more=3.0),
    "made of what is handed on": lambda p: Derived(p, rates=(2.0, 3.0)),
    "a count of steps on itself": Counting,
}


@pytest.mark.parametrize("way", LIKE)
def test_what_steps_a_share_has_all_options(way: str) -> None:
    def worker(transport: Any) -> None:
        rank = transport.rank
        model, sharded, _, plain, optimizer = pair(transport, LIKE[way])
        train(model, sharded, rank)
        train(plain, optimizer, rank)
        assert_same(model, plain)
        for net in (model, plain):  # all is laid out anew
            net.first.bias.requires_grad_(False)
            net.zero_grad()
        train(model, sharded, rank, range(3, 6))
        train(plain, optimizer, rank, range(3, 6))
        assert_same(model, plain)
        train(model, sharded.unshard(), rank, range(6, 8))
        train(plain, optimizer, rank, range(6, 8))
        assert_same(model, plain)

    shared(worker, 2)


class Strict(Signed):
    def __init__(self, params: Any, **options: Any) -> None:
        if {*options} - {"lr", "k"}:
            raise TypeError(f"what is {options}?")
        super().__init__(params, {"k": 1.0, **options})


def test_torchs_own_option_is_not_handed_on() -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, Strict)
        sharded.load_state_dict(Strict(model.parameters()).state_dict())
        assert "differentiable" in sharded.original.defaults
        train(model, sharded, transport.rank)

    shared(worker, 2)


class Buffered(Signed):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.buffers = [torch.zeros_like(one) for group in self.param_groups for one in group["params"]]


class Lazily(Signed):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.cache: Any = {}

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return self.cache.setdefault(parameter, parameter.grad.clone())


class Scheduled(Signed):
    def __init__(self, params: Any, schedule: Any = None) -> None:
        super().__init__(params, {})
        self.schedule = schedule


class Plainly(Signed):
    """Lists of its parameters are made by the constructor."""

    def __init__(self, params: Any, how: Any = torch.sign) -> None:
        super().__init__(params, {})
        self.all = [one for group in self.param_groups for one in group["params"]]
        self.how = how

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return self.how(parameter.grad)


class Splits(torch.optim.SGD):
    """Its constructor makes a group without weight decay of vectors, whatever it is given."""

    def __init__(self, groups: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(groups, lr, weight_decay=weight_decay)
        for group in [*self.param_groups]:
            vectors = [one for one in group["params"] if one.dim() < 2]
            group["params"] = [one for one in group["params"] if one.dim() > 1]
            self.add_param_group({"params": vectors})


def test_a_constructor_that_makes_other_groups_is_refused() -> None:
    """What it puts into another group would not be stepped."""
    with pytest.raises(stretto.UnsupportedError) as caught:
        kind_of(Splits([*START.parameters()]), "rank 0, shard")
    reason = "of 1 group it makes 2"
    assert str(caught.value) == (
        f"rank 0, shard: Splits cannot be built again for a part of its parameters: {reason}.\n"
        "Its constructor must take parameter groups first, and its defaults as keywords, as torch's do. One that "
        "wraps another optimizer (SAM, Lookahead) is used without stretto.shard()."
    )


def test_what_cannot_be_handed_on_is_refused_by_name() -> None:
    parameters = [*START.parameters()]
    kept = {Buffered: "buffers", Lazily: "cache", functools.partial(Scheduled, schedule=object()): "schedule"}
    for make, name in kept.items():
        optimizer: Any = make(parameters)
        with pytest.raises(stretto.UnsupportedError) as caught:
            kind_of(optimizer, "rank 0, shard")
        assert str(caught.value) == (
            f"rank 0, shard: {type(optimizer).__name__} cannot be built again for a part of its parameters: what it "
            f"keeps as {name} is not a plain value, and not what its constructor makes from its defaults.\n"
            "Keep options in the parameter groups, and what belongs to a parameter in state, as torch's do."
        )
    kind_of(Plainly(parameters))
    with pytest.raises(stretto.UnsupportedError):
        kind_of(Plainly(parameters, how=torch.relu))
    optimizer = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts its own there
    kind_of(optimizer)


# Options are compared over ranks


class Tag:
    """Without a ``repr`` of its own: it would say where it lies."""


def test_options_are_compared_by_value_and_objects_by_type() -> None:
    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        extra = {
            "tag": Tag(),
            "by": lambda: 0,
            "limit": float("nan"),
            "of": (1, [Tag(), torch.float64]),
            "to": {1: Tag()},
        }
        optimizer.param_groups[0].update(extra)
        train(model, stretto.shard(optimizer, sync), transport.rank)

    run_ranks(worker, 2)


def test_tensors_that_print_alike_differ() -> None:
    def worker(transport: Any) -> str:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            stretto.shard(torch.optim.SGD(model.parameters(), lr=rates[transport.rank]), sync)
        return str(caught.value)

    rates = [torch.tensor(1 + 2**-20), torch.tensor(1 + 2**-21)]
    assert str(rates[0]) == str(rates[1])
    for rank, text in enumerate(run_ranks(worker, 2)):
        assert text == (
            f"rank {rank}, shard: parameter group 0 has lr={1 + 2**-21} on rank 1, lr={1 + 2**-20} on rank 0.\n"
            "Build the same on all ranks."
        )


def test_what_is_comparable() -> None:
    assert comparable([1, (2.5, "a"), {"b": None}, {3, 2}]) == [1, (2.5, "a"), {"b": None}, [2, 3]]
    assert comparable(torch.ones(2, 2)) == [[1.0, 1.0], [1.0, 1.0]]
    assert comparable(torch.nn.Parameter(torch.ones(2))) == "torch.nn.parameter.Parameter"
    assert comparable([torch.nn.Parameter(torch.ones(2))]) == comparable([*START.parameters()]) == "builtins.list"
    assert comparable(float("nan")) == "nan" and comparable(torch.float32) == "torch.float32"
    assert comparable(Tag) == comparable(Tag()) == f"{__name__}.Tag"
    assert comparable(torch.empty(2, device="meta")) == "torch.Tensor"


@pytest.mark.parametrize("which", ["sharded", "original"])
@pytest.mark.parametrize("world", [1, 2])
def test_groups_that_are_assigned_are_followed(world: int, which: str) -> None:
    """Those of the one that was sharded stayed: rates in the new ones had no effect, in silence."""

    def worker(transport: Any = None) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, sync.rank)
            owner = sharded.original if net is model and which == "original" else one
            first, *others = one.param_groups[0]["params"]
            owner.param_groups = [{**one.param_groups[0], "params": [first]}]
            owner.add_param_group({"params": others, "lr": 0.2})
            one.param_groups[0]["lr"] = 0.01
            train(net, one, sync.rank, range(3, 6))
        assert sharded.param_groups is sharded.original.param_groups
        assert_same(model, plain)

    shared(worker, 2) if world > 1 else worker()


# Hooks


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """Names of the optimizers whose steps torch's hooks for all optimizers have seen begin, and end."""
    seen: list[str] = []

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(type(optimizer).__name__)

    handles = register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook)
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_for_all_optimizers_see_one_step(world: int, steps: list[str]) -> None:
    def worker(transport: Any = None) -> None:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.NAdam(model.parameters()), sync)
        sharded.stateful().state_dict()
        sharded.load_state_dict(torch.optim.NAdam(model.parameters()).state_dict())
        train(model, sharded, sync.rank, range(2))

    run_ranks(worker, 2) if world > 1 else worker()
    assert steps == ["ShardedOptimizer"] * 2 * 2 * world


def test_hooks_of_the_step_are_called_once_alone() -> None:
    model = copy.deepcopy(START)
    sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), stretto.attach(model))
    called: list[str] = []
    for one in (sharded, sharded.original):
        one.register_step_pre_hook(lambda *_: called.append("before"))
        one.register_step_post_hook(lambda *_: called.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(sharded.original, 1)
    train(model, sharded, 0, range(2))
    schedule.step()  # it warns if it has seen no step
    assert called == ["before", "before", "after", "after"] * 2


class WithoutClosure(Twice):
    def step(self) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_whose_step_takes_no_closure(world: int) -> None:
    """It could not be stepped alone."""

    def worker(transport: Any = None) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, WithoutClosure)
        train(model, sharded, sync.rank)
        train(plain, optimizer, sync.rank)
        assert_same(model, plain)

    shared(worker, 2) if world > 1 else worker()


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_of_state_dicts_are_called_wherever_they_were_put(world: int) -> None:
    def worker(transport: Any = None) -> list[str]:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        original, called = torch.optim.AdamW(model.parameters()), list[str]()
        original.register_state_dict_post_hook(lambda _, state: state | {"mark": 1})
        sharded = stretto.shard(original, sync)
        train(model, sharded, sync.rank)
        sharded.register_state_dict_pre_hook(lambda one: called.append(f"save {len(one.state)}"))
        sharded.register_state_dict_post_hook(lambda _, state: state | {"marks": state["mark"] + 1})
        sharded.register_load_state_dict_pre_hook(lambda _, state: called.append(f"load {state['marks']}"))
        sharded.register_load_state_dict_post_hook(lambda one: called.append(f"loaded {len(one.state)}"))
        state = sharded.state_dict()
        if transport is not None:
            state = transport.all_gather_object(state)[0]
        sharded.load_state_dict(copy.deepcopy(state))
        assert state["marks"] == 2
        return called

    told = run_ranks(worker, 2) if world > 1 else [worker()]
    assert told == [[f"save {0 if rank else 6}", "load 2", "loaded 6"] for rank in range(world)]


# State that is not kept for each element


class Slow(Signed):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})


class Lists(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        buffers = self.state[parameter].setdefault("buffers", {beta: torch.zeros_like(parameter) for beta in (0, 0.9)})
        for beta, buffer in buffers.items():
            buffer.mul_(beta).add_(parameter.grad)
        return sum(buffers.values())


class Stacked(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        last = self.state[parameter].setdefault("last", torch.zeros(2, *parameter.shape))
        last.copy_(torch.stack([parameter.grad, last[0]]))
        return last.mean(0)


class Remembering(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        steps = self.state[parameter].setdefault("steps", torch.zeros(20))  # as long as a bias
        steps[int(steps.sum())] = 1
        return parameter.grad / steps.sum()


class WithADimension(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        step = self.state[parameter].setdefault("step", torch.zeros(1)).add_(1)
        return self.state[parameter].setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 1 / step[0])


class InBlocks(Slow):
    """Large ones in 8 bits, with a scale for every 64 elements."""

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state, numel = self.state[parameter], parameter.numel()
        if numel < 1000:
            return state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
        scale = state.setdefault("scale", torch.ones(-(-numel // 64), 1))
        eight = state.setdefault("eight", torch.zeros(numel, dtype=torch.int8))
        blocks = torch.nn.functional.pad(eight.float(), (0, -numel % 64)).view(-1, 64) * scale
        mean = blocks.flatten()[:numel].view_as(parameter).lerp(parameter.grad, 0.5)
        blocks = torch.nn.functional.pad(mean.flatten(), (0, -numel % 64)).view(-1, 64)
        scale.copy_(blocks.abs().amax(1, keepdim=True) / 127)
        eight.copy_((blocks / scale).round().flatten()[:numel])
        return mean


class ByRowsAndColumns(Slow):
    """Large matrices alone."""

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state, squares = self.state[parameter], parameter.grad.square() + 1e-12
        if parameter.dim() < 2 or min(parameter.shape) < 16:
            return parameter.grad / state.setdefault("square", torch.zeros_like(parameter)).lerp_(squares, 0.5).sqrt()
        rows, columns = squares.mean(1), squares.mean(0)
        rows = state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.5)
        columns = state.setdefault("columns", torch.zeros_like(columns)).lerp_(columns, 0.5)
        return parameter.grad * (rows.mean() / (rows[:, None] * columns)).sqrt()


class NormKept(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        self.state[parameter]["norm"] = parameter.norm()
        return parameter.grad


class ShapeKept(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        shape = self.state[parameter].setdefault("shape", tuple(parameter.shape))
        return parameter.grad.view(shape)


KEPT = (Lists, Stacked, Remembering, WithADimension, InBlocks, ByRowsAndColumns, NormKept, ShapeKept)


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("make", KEPT, ids=lambda one: one.__name__)
def test_what_is_not_kept_for_each_element_stays_whole(make: Any, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        rank = transport.rank
        model, sharded, _, plain, optimizer = pair(transport, make, keep_grads=keep_grads)
        train(model, sharded, rank)
        train(plain, optimizer, rank)
        assert_same(model, plain)
        mine, theirs = transport.all_gather_object(sharded.state_dict())[0], optimizer.state_dict()
        assert comparable(mine) == comparable(theirs)
        sharded.load_state_dict(mine)
        train(model, sharded, rank, range(3, 5))
        train(plain, optimizer, rank, range(3, 5))
        assert_same(model, plain)

    shared(worker, 2)


class CountingInADict(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        counts = self.state[parameter].setdefault("counts", {"steps": 0})
        counts["steps"] += 1
        return parameter.grad / counts["steps"]


def test_parameters_that_part_ways_have_no_object_of_their_state_in_common() -> None:
    """Neighbours are stepped as one until one of them has no gradient, and had one dict between them from then on."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, CountingInADict)
        for step in range(5):
            for net, one in ((model, sharded), (plain, optimizer)):
                one.zero_grad()
                x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + transport.rank))
                (net.first(x).sum() if step in (2, 3) else net(x).sum()).backward()
                one.step()
            assert_same(model, plain)
        state = sharded.state_dict()
        if transport.rank == 0:
            assert state["state"] == optimizer.state_dict()["state"]

    shared(worker, 2)


class BeginningLate(Slow):
    """Keeps a mean from its third step on."""

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if state["step"] < 3:
            return parameter.grad
        return state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)


def test_what_is_kept_from_a_later_step_on_is_laid_out_anew() -> None:
    """Of a parameter without dimensions it was not known to be by element, and a step failed halfway."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, BeginningLate)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(5))
            net.first.bias.requires_grad_(False)
            net.zero_grad()
            train(net, one, transport.rank, range(5, 8))
        assert_same(model, plain)

    shared(worker, 2)


class WritingIntoOptions(Signed):
    """As RAdam was first written: what belongs to a step is computed once, for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"of": [None] * 10})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state = self.state[parameter]
        step = state["step"] = state.get("step", 0) + 1
        group["of"][step] = group["of"][step] or group["lr"] / step
        return parameter.grad * group["of"][step]


@pytest.mark.parametrize("world", [1, 2])
def test_options_that_an_optimizer_writes_into_are_not_those_of_the_probe(world: int) -> None:
    """It had left its own there, of another learning rate."""

    def worker(transport: Any = None) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, WritingIntoOptions)
        assert sharded.param_groups[0]["of"] == [None] * 10
        train(model, sharded, sync.rank)
        train(plain, optimizer, sync.rank)
        assert_same(model, plain)
        sharded.stateful().state_dict()
        assert sharded.param_groups[0]["of"] == optimizer.param_groups[0]["of"]

    shared(worker, 2) if world > 1 else worker()


class CountingInOptions(Signed):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": torch.zeros(())})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
        super().step()

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad / group["steps"]


def test_an_optimizer_that_counts_in_a_tensor_of_its_options() -> None:
    """It was refused: the parts that were tried counted in one tensor."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, CountingInOptions)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        assert_same(model, plain)

    shared(worker, 2)


class RememberingInOptions(Signed):
    """With what no list is: a queue, and tensors that are computed from another."""

    def __init__(self, params: Any) -> None:
        of = torch.tensor(0.5, requires_grad=True)
        super().__init__(params, {"last": deque(maxlen=20), "scale": (of * 4, [of * 1])})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["last"].append(len(group["last"]))
        super().step()

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        return parameter.grad * group["scale"][0] * group["scale"][1][0] / len(group["last"])


def test_an_optimizer_that_remembers_in_its_options() -> None:
    """The steps that are tried were found in its queue, and a tensor with a graph was refused."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, RememberingInOptions)
        assert not sharded.param_groups[0]["last"]
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        assert_same(model, plain)
        assert sharded.param_groups[0]["last"] == optimizer.param_groups[0]["last"]

    shared(worker, 2)


class CountingByName(Slow):
    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        self.state["all"].setdefault("steps", 0)
        return parameter.grad


class CountingInATensorByName(Slow):
    """As pytorch_optimizer's MADGRAD, of which was said that its step had failed."""

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        self.state["all"] = torch.zeros(1)
        return parameter.grad


class CountingInTheFirst(Slow):
    def step(self, closure: Any = None) -> None:
        state = self.state[self.param_groups[0]["params"][0]]
        state["steps"] = state.get("steps", 0) + 1
        super().step()


class Clipping(Signed):
    """Steps with no more than a norm, of one parameter or of all, far above that of small numbers."""

    def __init__(self, params: Any, most: float = 100.0, each: bool = True) -> None:
        super().__init__(params, {"most": most, "each": each})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            some = [one for one in group["params"] if one.grad is not None]
            for part in [[one] for one in some] if group["each"] else [some]:
                torch.nn.utils.clip_grad_norm_(part, group["most"])
        super().step()


def test_a_step_that_clips_large_gradients_is_seen_to_depend_on_them() -> None:
    """Of small ones it does not, and they alone were tried: parts of a parameter clipped by themselves, in silence."""
    parameters = [torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))]
    assert kind_of(Clipping(parameters)) is Kind.WHOLE
    with pytest.raises(stretto.UnsupportedError, match="how it steps a parameter depends on the others"):
        kind_of(Clipping(parameters, 5000.0, each=False))


class Estimating(Signed):
    """As of D-adaptation: a number that is made of all gradients, and that steps depend on in the end."""

    def __init__(self, params: Any, on_itself: bool = False) -> None:
        self.on_itself, self.seen = on_itself, 0.0
        super().__init__(params, {"seen": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen" if not self.on_itself else "unused"] = sum(float(one.grad.norm()) for one in group["params"])
            self.seen = group.pop("unused") if self.on_itself else 0.0
        super().step()


class EstimatingInATensor(Estimating):
    """As pytorch_optimizer's classes of D-adaptation do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["seen"] = torch.tensor([group["seen"]])


def test_what_a_step_makes_in_a_tensor_is_refused_by_name() -> None:
    """In the second step it was told that ranks have other groups, which nobody could mend."""
    with pytest.raises(stretto.UnsupportedError, match="its step makes seen from all its parameters, but each rank"):
        kind_of(EstimatingInATensor([torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))]))


class DecayingByAll(Signed):
    """As pytorch_optimizer's AdamS: by a number of all parameters, too little to be seen in one step of 0.01."""

    def __init__(self, params: Any, weight_decay: float) -> None:
        super().__init__(params, {"weight_decay": weight_decay})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        of_all = sum(float(one.grad.square().sum()) for one in group["params"]) ** 0.5
        return parameter.grad + 0.01 * group["weight_decay"] * parameter / of_all


@pytest.mark.parametrize(("decay", "kind"), [(0.0, Kind.ELEMENTWISE), (1e-4, None), (1e-2, None)])
def test_a_small_decay_by_all_parameters_is_seen(decay: float, kind: Kind | None) -> None:
    """Each rank decayed by another number, in silence."""
    made = DecayingByAll([torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))], decay)
    if kind is not None:
        assert kind_of(made) is kind
        return
    with pytest.raises(stretto.UnsupportedError, match="depends on the others"):
        kind_of(made)


@pytest.mark.parametrize("on_itself", [False, True])
def test_what_a_step_makes_of_all_gradients_is_refused_by_name(on_itself: bool) -> None:
    """Each rank would make it of its share. It was told in the first step, that groups are not alike, or never."""
    with pytest.raises(stretto.UnsupportedError) as caught:
        kind_of(Estimating([torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))], on_itself))
    assert str(caught.value) == (
        f"shard: Estimating cannot be divided over ranks: its step makes {'self.' * on_itself}seen from all its "
        "parameters, but each rank would make it from its share only.\n"
        "Use it as it is, without stretto.shard()."
    )


class WithAClock(Signed):
    """What differs between parts, and of what no step can be made."""

    def __init__(self, params: Any) -> None:
        self.at, self.stepped, self.shapes = 0.0, 0, list[Any]()
        super().__init__(params, {})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        self.at, self.stepped = time.perf_counter(), self.stepped + 1
        self.shapes = [*map(torch.Tensor.size, group["params"])]
        return super().delta(group, parameter)


def test_a_clock_and_counts_on_an_optimizer_are_no_reason_to_refuse_it() -> None:
    parameters = [torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))]
    assert kind_of(WithAClock(parameters)) is Kind.ELEMENTWISE


class WithMethods(Signed):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def eval(self) -> None:
        """Without a ``train()``: it is of another kind than that of schedule-free optimizers."""


@pytest.mark.parametrize("world", [1, 2])
def test_a_method_that_is_not_divided_says_so(world: int) -> None:
    def worker(transport: Any = None) -> None:
        _, sharded, *_ = pair(transport, WithMethods)
        assert not hasattr(sharded, "eval")
        with pytest.raises(AttributeError) as caught:
            sharded.eval()
        assert str(caught.value) == (
            "A sharded WithMethods has no eval: each rank holds a share, which WithMethods does not know about. "
            "step(), zero_grad(), add_param_group(), state_dict() and load_state_dict() are divided.\n"
            "Use WithMethods without stretto.shard(), or call unshard() first; .original is the one that was sharded."
        )
        with pytest.raises(AttributeError, match="'ShardedOptimizer' object has no attribute 'epoch'"):
            assert sharded.epoch

    shared(worker, 2) if world > 1 else worker()


def test_state_that_is_of_no_parameter_or_of_one_for_all_is_refused() -> None:
    """It was not in what state_dict() put together, or there for every parameter."""
    told = {
        CountingByName: "rank 0, shard: CountingByName cannot be divided over ranks: what it keeps in state under "
        "'all' belongs to no parameter.\nUse it as it is, without stretto.shard().",
        CountingInATensorByName: "rank 0, shard: CountingInATensorByName cannot be divided over ranks: what it keeps "
        "in state under 'all' belongs to no parameter.\nUse it as it is, without stretto.shard().",
        CountingInTheFirst: "rank 0, shard: CountingInTheFirst cannot be divided over ranks: how it steps a parameter "
        "depends on the others.\nUse it as it is, without stretto.shard().",
    }
    for make, why in told.items():
        with pytest.raises(stretto.UnsupportedError) as caught:
            kind_of(make(START.parameters()), "rank 0, shard")
        assert str(caught.value) == why


class Noting(Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.epoch, self.lines = 0, []


def test_what_a_program_notes_on_its_optimizer_is_not_written_over() -> None:
    """Only what steps have changed is handed back."""

    def worker(transport: Any) -> None:
        model, sharded, _, _, _ = pair(transport, Noting)
        train(model, sharded, transport.rank)
        sharded.original.epoch, sharded.original.lines = 5, ["one"]
        sharded.state_dict()
        assert sharded.original.epoch == 5 and sharded.original.lines == ["one"] and sharded.original.count == 3
        assert sharded.unshard().epoch == 5

    shared(worker, 2)


class Saving(Counting):
    """Its count of steps, and not what it has seen."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


def test_what_an_optimizer_keeps_on_itself_is_saved_and_loaded() -> None:
    """The one that was given does not step: it had saved a count of 0, and it loaded in vain."""

    def worker(transport: Any) -> None:
        rank = transport.rank
        model, sharded, _, plain, optimizer = pair(transport, Saving)
        train(model, sharded, rank)
        train(plain, optimizer, rank)
        assert sharded.state_dict()["count"] == optimizer.state_dict()["count"] == 3
        for one in (sharded, optimizer):
            one.load_state_dict(optimizer.state_dict() | {"count": 10})
        train(model, sharded, rank, range(3, 6))
        train(plain, optimizer, rank, range(3, 6))
        assert_same(model, plain)
        assert sharded.state_dict()["count"] == sharded.unshard().count == 13
        assert sharded.original.seen == optimizer.seen == 6

    shared(worker, 2)


# Gradients that the step changes


class Replacing(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad = one.grad.sign() * 0.1
        return super().step(closure)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_step_that_replaces_gradients_has_new_ones_in_the_next(keep_grads: bool) -> None:
    """It went on with those of the first."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, Replacing, keep_grads=keep_grads)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        assert_same(model, plain)

    shared(worker, 2)


class Zeroing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


def test_a_step_that_takes_gradients_away_is_refused() -> None:
    """It had none from its second step on, and stood still."""
    with pytest.raises(stretto.UnsupportedError) as caught:
        kind_of(Zeroing(START.parameters(), lr=0.1), "rank 0, shard")
    assert str(caught.value) == (
        "rank 0, shard: Zeroing cannot be divided over ranks: its step sets gradients to None, and each rank would do "
        "so for its share only.\n"
        "Call zero_grad() after step(), not in it."
    )


# State


@pytest.mark.parametrize(
    "make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.RMSprop], ids=lambda one: one.__name__
)
def test_state_of_neighbours_without_dimensions_is_loaded(make: Any) -> None:
    def worker(transport: Any) -> None:
        rank = transport.rank
        model, sharded, _, plain, optimizer = pair(transport, make)
        train(model, sharded, rank)
        train(plain, optimizer, rank)
        state = transport.all_gather_object(sharded.state_dict())[0]
        sharded.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(copy.deepcopy(state))
        train(model, sharded, rank, range(3, 6))
        train(plain, optimizer, rank, range(3, 6))
        assert_same(model, plain)
        state = sharded.state_dict()
        for index, theirs in optimizer.state_dict()["state"].items() if rank == 0 else ():
            mine = state["state"][index]
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in theirs)

    shared(worker, 2)


ENDED = (
    "{}shard: this sharded optimizer has ended: by detach() or unshard(), or for a later one.\n"
    "Call unshard() before, on all ranks, and use what it returns: it has the whole state."
)


@pytest.mark.parametrize("world", [1, 2])
def test_after_detach_there_is_no_state_to_save_or_to_load(world: int) -> None:
    def worker(transport: Any = None) -> None:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
        train(model, sharded, sync.rank)
        whole, late = sharded.state_dict(), sharded.stateful()
        shares, groups = late.state_dict(), copy.deepcopy(sharded.param_groups)
        sync.detach()
        other = copy.deepcopy(whole)
        other["param_groups"][0]["lr"] = 17.0
        for use in (
            sharded.state_dict,
            lambda: sharded.load_state_dict(other),
            sharded.unshard,
            sharded.step,
            sharded.stateful,
            late.state_dict,
            lambda: late.load_state_dict(shares),
        ):
            with pytest.raises(stretto.SetupError) as caught:
                use()
            assert str(caught.value) == ENDED.format(f"rank {sync.rank}, " if world > 1 else "")
        assert sharded.param_groups[0]["lr"] == sharded.original.param_groups[0]["lr"] == groups[0]["lr"]

    run_ranks(worker, 2) if world > 1 else worker()


@pytest.mark.parametrize("how", ["sharded again", "and loaded", "as it is", "loaded", "by torch", "handed back"])
def test_who_goes_on_without_the_state_that_detach_has_lost_is_told(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        plain = torch.optim.AdamW(model.parameters())
        sharded = stretto.shard(plain, sync)
        train(model, sharded, sync.rank)
        state = sharded.state_dict()
        like = copy.deepcopy(START)
        other = torch.optim.AdamW(like.parameters())
        if how == "handed back":
            sharded.unshard()
        sync.detach()
        sync.detach()
        if how == "loaded" and not sync.rank:
            plain.load_state_dict(state)
        going_on = plain
        if how in ("sharded again", "and loaded"):
            going_on = stretto.shard(plain, stretto.attach(model, transport=transport))
        if how == "and loaded":
            part = going_on.stateful()
            read = part.state_dict()
            for value in (value for one in read["state"].values() for value in one.values()):
                value.was_read = True  # as torch.distributed.checkpoint.load does
            part.load_state_dict(read)
        if how == "by torch" and not sync.rank:
            train(like, other, sync.rank)
            model.zero_grad()  # else torch takes no step first
            set_optimizer_state_dict(model, plain, get_optimizer_state_dict(like, other))
        train(model, going_on, sync.rank)

    run_ranks(worker, 2)
    told = [record.getMessage() for record in caplog.records if "without the state" in record.getMessage()]
    expected = [
        f"rank {rank}, shard: this AdamW was sharded before, and begins again without the state that it had: the "
        "shares of it were lost by detach(), or with a wrapper that another has replaced.\n"
        "To keep it: optimizer = optimizer.unshard(), on all ranks, before that. Shown once."
        for rank in {"sharded again": (0, 1), "as it is": (0, 1), "loaded": (1,), "by torch": (1,)}.get(how, ())
    ]
    assert sorted(told) == expected


@pytest.mark.parametrize("world", [1, 2])
def test_what_unshard_handed_back_is_saved_and_loaded_after_detach(world: int) -> None:
    def worker(transport: Any = None) -> None:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
        train(model, sharded, sync.rank)
        plain = sharded.unshard()
        sync.detach()
        state = sharded.state_dict()
        assert {int(one["step"]) for one in state["state"].values()} == {3} and len(state["state"]) == 6
        assert sharded.unshard() is plain and len(plain.state) == 6
        state["param_groups"][0]["lr"] = 0.25
        sharded.load_state_dict(state)
        assert plain.param_groups[0]["lr"] == sharded.param_groups[0]["lr"] == 0.25
        assert len(plain.state) == 6 and len(sharded.stateful().state_dict()["state"]) == 6

    run_ranks(worker, 2) if world > 1 else worker()


def test_a_state_that_is_refused_leaves_groups_as_they_were() -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, torch.optim.AdamW)
        train(model, sharded, transport.rank)
        state = sharded.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        if transport.rank == 1:
            state["state"][0] = {}
        groups = sharded.param_groups
        with pytest.raises(stretto.SetupError):
            sharded.load_state_dict(state)  # whole on rank 0, and a part on the other
        assert sharded.param_groups is sharded.original.param_groups is groups
        assert groups[0]["lr"] == 0.001
        train(model, sharded, transport.rank)

    run_ranks(worker, 2)


@pytest.mark.parametrize("on", [run_ranks, shared])
def test_what_torch_refuses_to_load_on_one_rank_is_told_on_all(on: Any) -> None:
    def worker(transport: Any) -> str:
        model, sharded, _, plain, optimizer = pair(transport, torch.optim.AdamW)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        groups = sharded.param_groups
        state = copy.deepcopy(transport.all_gather_object(sharded.state_dict())[0])
        state["param_groups"][0]["lr"] = 0.25
        if transport.rank == 1:
            state["param_groups"].append(state["param_groups"][0])
        with pytest.raises(stretto.SetupError) as caught:
            sharded.load_state_dict(state)
        assert sharded.param_groups is sharded.original.param_groups is groups and groups[0]["lr"] == 0.001
        assert isinstance(caught.value.__cause__, ValueError) == (transport.rank == 1)
        train(model, sharded, transport.rank, range(3, 5))
        train(plain, optimizer, transport.rank, range(3, 5))
        assert_same(model, plain)
        return str(caught.value)

    for rank, text in enumerate(on(worker, 2)):
        assert text == (
            f"rank {rank}, pass 3: rank 1 cannot load the state that it was given, so no rank does.\n"
            "  ValueError: loaded state dict has a different number of parameter groups\n"
            "Load what state_dict() of an optimizer with the same parameter groups has returned, of a sharded one on "
            "rank 0."
        )


@pytest.mark.parametrize("world", [1, 2])
def test_what_another_rank_than_0_got_of_a_state_is_refused(world: int) -> None:
    """All ranks had written one file, say, and the last one counts: AdamW began anew without a word."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def saved(transport: Any) -> Any:
        model, sharded, *_ = pair(transport, adamw)
        nothing = sharded.state_dict()
        train(model, sharded, transport.rank, range(2))
        return nothing, sharded.state_dict()

    (_, of_rank_0), (nothing, of_rank_1) = run_ranks(saved, 2)
    assert {*of_rank_0} == {"state", "param_groups"} and of_rank_1["state"] == {}

    def worker(transport: Any) -> str:
        _, sharded, *_ = pair(transport, adamw)
        for state in (nothing, of_rank_0):
            sharded.load_state_dict(copy.deepcopy(state))
        with pytest.raises(stretto.SetupError) as caught:
            sharded.load_state_dict(copy.deepcopy(of_rank_1))
        assert world == 1 or len(sharded.state_dict()["state"]) == (0 if transport.rank else len(of_rank_0["state"]))
        return str(caught.value)

    why = (
        "this is what rank 1 got from state_dict(), only the groups. Save what rank 0 gets; all ranks call state_dict()"
    )
    for rank, text in enumerate(run_ranks(worker, world)):
        assert text == (why if world == 1 else BEFORE_A_STEP.format(rank, why))


BEFORE_A_STEP = (
    "rank {}, before pass 1: rank 0 cannot load the state that it was given, so no rank does.\n"
    "  SetupError: {}\n"
    "Load what state_dict() of an optimizer with the same parameter groups has returned, of a sharded one on rank 0."
)


class Counted(Signed):
    """Has a count for all elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state = self.state[parameter]
        if not state:
            state["count"] = 0
        state["count"] = state["count"] + 1
        return parameter.grad / state["count"]


NO_STEP_COULD_FOLLOW = {
    "of another shape": (
        torch.optim.AdamW,
        {"exp_avg": torch.zeros(3, 2)},
        "the state of NAME has exp_avg of shape (3, 2), for a parameter of ",
    ),
    "without a part": (torch.optim.AdamW, {"exp_avg_sq": None}, "the state of NAME lacks exp_avg_sq\n"),
    "without what is for all elements": (Counted, {"count": None, "more": 1}, "the state of NAME lacks count\n"),
    "of another kind": (Counted, {"count": {}}, "with the state of NAME a step of Counted fails: TypeError: "),
    "of whole parameters": (
        torch.optim.Adafactor,
        {"row_var": None},
        "with the state of NAME a step of Adafactor fails: AssertionError: row_var and col_var should be defined",
    ),
}


@pytest.mark.parametrize("case", NO_STEP_COULD_FOLLOW)
def test_a_state_with_which_no_step_could_follow_is_refused_on_all_ranks(case: str) -> None:
    """torch loads it, and fails in the next step, when there is no way back."""
    kind, change, told = NO_STEP_COULD_FOLLOW[case]

    def worker(transport: Any) -> str:
        model, sharded, _, plain, optimizer = pair(transport, kind)
        train(model, sharded, transport.rank, range(3))
        train(plain, optimizer, transport.rank, range(3))
        state = copy.deepcopy(transport.all_gather_object(sharded.state_dict())[0])
        for one in state["state"].values() if transport.rank == 1 else ():
            one |= change
            for key in [key for key, value in one.items() if value is None]:
                del one[key]
        with pytest.raises(stretto.SetupError) as caught:
            sharded.load_state_dict(state)
        train(model, sharded, transport.rank, range(3, 5))
        train(plain, optimizer, transport.rank, range(3, 5))
        assert_same(model, plain)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(worker, 2)):
        before, after = text.split("  ValueError: ")
        assert before == f"rank {rank}, pass 3: rank 1 cannot load the state that it was given, so no rank does.\n"
        assert re.match(re.escape(told).replace("NAME", r"[\w.]+"), after), after
        assert after.endswith(
            "\nLoad what state_dict() of an optimizer with the same parameter groups has returned, of a sharded one on "
            "rank 0."
        )


class Late(Signed):
    """What it keeps for elements comes one by one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        state, zero = self.state[parameter], torch.zeros_like(parameter)
        if "sum" in state:
            state.setdefault("later", zero).add_(state["sum"])
        return state.setdefault("sum", zero.clone()).add_(parameter.grad)


def test_what_an_optimizer_can_step_is_loaded_whatever_it_looks_like() -> None:
    """States of no parameter, which torch keeps, and without what would be made in the next step."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, Late)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        state = copy.deepcopy(transport.all_gather_object(sharded.state_dict())[0])
        for one in state["state"].values():
            del one["later"]
        state["state"] |= {"told": {"sum": torch.zeros(3)}, 77: {"sum": 1}}
        sharded.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(state)
        train(model, sharded, transport.rank, range(3, 6))
        train(plain, optimizer, transport.rank, range(3, 6))
        assert_same(model, plain)

    run_ranks(worker, 2)


def test_a_state_that_cannot_be_taken_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, torch.optim.AdamW)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        state = transport.all_gather_object(sharded.state_dict())[0]
        refused.add(threading.get_ident())
        with pytest.raises(MemoryError):
            sharded.load_state_dict(state)
        refused.remove(threading.get_ident())
        train(model, sharded, transport.rank, range(3, 6))
        train(plain, optimizer, transport.rank, range(3, 6))
        assert_same(model, plain)

    build, refused = inner.build_like, set[int]()

    def no_room(*given: Any) -> torch.optim.Optimizer:
        if threading.get_ident() in refused:
            raise MemoryError("no room")
        return build(*given)

    monkeypatch.setattr(inner, "build_like", no_room)
    shared(worker, 2)


def test_neighbours_whose_states_are_of_other_kinds_are_loaded() -> None:
    """Counts of steps were plain numbers in earlier versions of torch."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        state = optimizer.state_dict()
        state["state"] = {
            place: {"momentum_buffer": torch.ones_like(one), "mark": torch.tensor(1.0) if place % 2 else 1.0}
            for place, one in enumerate(plain.parameters())
        }
        sharded.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(state)
        train(model, sharded, transport.rank)
        train(plain, optimizer, transport.rank)
        assert_same(model, plain)

    shared(worker, 2)


@pytest.mark.parametrize("dense", [False, True])
def test_the_momentum_of_sparse_gradients_is_loaded(dense: bool) -> None:
    """It is sparse as they are, and a step of it with a dense gradient fails; of a dense one with a sparse one too."""

    def worker(transport: Any) -> None:
        models = [torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 2)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        sync = stretto.attach(models[0], transport=transport)
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]
        sharded = stretto.shard(optimizers[0], sync)
        rows = torch.tensor([0, 1])

        def step(number: int) -> None:
            for model, optimizer in zip(models, (sharded, optimizers[1]), strict=True):
                optimizer.zero_grad()
                (model(rows) * number).sum().backward()
                optimizer.step()

        step(1)
        state = transport.all_gather_object(sharded.state_dict())[0]
        if dense:
            state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].to_dense()
        sharded.load_state_dict(copy.deepcopy(state))
        optimizers[1].load_state_dict(state)
        step(2)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other)

    shared(worker, 2)


def test_a_share_that_is_refused_leaves_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(START)
    sharded = stretto.shard(torch.optim.AdamW(model.parameters()), stretto.attach(model))
    train(model, sharded, 0)
    stateful = sharded.stateful()
    shares = stateful.state_dict()
    shares["param_groups"][0] |= {"lr": 0.25, "more": 1}

    def take(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("stretto.sharding.checkpoint.OnlyRank.take", take)
        with pytest.raises(MemoryError):
            stateful.load_state_dict(shares)
    assert sharded.param_groups[0]["lr"] == 0.001 and "more" not in sharded.param_groups[0]
    stateful.load_state_dict(shares)
    assert sharded.param_groups[0]["lr"] == 0.25


# Groups that grow


def unfreeze(model: Two) -> None:
    model.second.requires_grad_(True)


def grow(model: Two) -> None:
    model.late = torch.nn.Linear(20, 20)
    model.late.load_state_dict({"weight": torch.eye(20), "bias": torch.ones(20)})


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("how", [unfreeze, grow])
def test_parameters_are_added_before_the_backward_that_reaches_them(how: Any, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        rank = transport.rank
        model, plain = copy.deepcopy(START), copy.deepcopy(START)
        optimizers: list[Any] = []
        for net in (model, plain):
            net.second.requires_grad_(how is grow)
            sync = stretto.attach(net, transport=transport)
            known = [one for one in net.parameters() if one.requires_grad]
            one = torch.optim.AdamW(known, lr=0.01)
            one = stretto.shard(one, sync, keep_grads=keep_grads) if net is model else one
            train(net, one, rank)
            how(net)
            old = {id(each) for each in known}
            one.add_param_group({"params": [each for each in net.parameters() if id(each) not in old], "lr": 0.02})
            optimizers.append(one)
            train(net, one, rank, range(3, 6))
        assert_same(model, plain)
        state = optimizers[0].state_dict()
        assert rank or state["state"].keys() == optimizers[1].state_dict()["state"].keys()

    shared(worker, 2)


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
def test_a_gradient_that_no_pass_has_reduced_is_not_stepped(run: Any) -> None:
    def worker(transport: Any) -> str:
        rank = transport.rank
        model, sharded, sync, plain, optimizer = pair(transport, torch.optim.AdamW)
        train(model, sharded, rank)
        train(plain, optimizer, rank)
        for net, one in ((model, sharded), (plain, optimizer)):
            grow(net)
            one.add_param_group({"params": [*net.late.parameters()]})
        before = [one.detach().clone() for one in model.parameters()]
        with sync.no_sync():
            model(torch.ones(2, 30)).sum().backward()
        with pytest.raises(stretto.SetupError) as caught:
            sharded.step()
        assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        assert not sync._reducer.failing.is_lost, "the backward that the text asks for may follow"
        if run is shared:  # all know that none has stepped
            train(model, sharded, rank, range(3, 6))
            train(plain, optimizer, rank, range(3, 6))
            assert_same(model, plain)
        return str(caught.value)

    for rank, text in enumerate(run(worker, 2)):
        assert text == (
            f"rank {rank}, pass 3: late.weight has a gradient of this rank only: no pass has reduced it since it was "
            "added to the optimizer.\nRun a backward outside no_sync() before the step, or zero_grad()."
        )


# Norms


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("dtypes", ["float32 float32", "float32 float64", "float64 float64"])
def test_a_norm_is_in_the_widest_dtype_of_gradients(dtypes: str, keep_grads: bool) -> None:
    first, second = (getattr(torch, name) for name in dtypes.split())

    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(30, 50).to(first), torch.nn.Linear(50, 20).to(second))
        sync = stretto.attach(model, transport=transport)
        stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync, keep_grads=keep_grads)
        inputs = torch.full((2, 30), 0.5, dtype=first), torch.full((2, 50), 0.1, dtype=second)
        torch.stack([one(x).sum().double() for one, x in zip(model, inputs, strict=True)]).sum().backward()
        norm = sync.clip_grad_norm_(1.0)
        exact = 2.0 * (50 * (30 * 0.5**2 + 1) + 20 * (50 * 0.1**2 + 1)) ** 0.5
        assert norm.dtype is second
        assert abs(norm.item() / exact - 1) < (1e-14 if first is torch.float64 else 1e-6)

    run_ranks(worker, 2)


class EightBits(Slow):
    """As torchao's: in blocks where a parameter is large and can be cut into blocks of 256."""

    def delta(self, group: dict[str, Any], parameter: torch.Tensor) -> Any:
        numel = parameter.numel()
        blocks = numel // 256 if numel >= 4096 and numel % 256 == 0 else numel
        scale = self.state[parameter].setdefault("scale", torch.ones(blocks))
        scale.copy_(parameter.grad.view(blocks, -1).abs().amax(1))
        return (parameter.grad.view(blocks, -1) / scale[:, None]).view_as(parameter)


@pytest.mark.parametrize("shape", [(1000, 768), (50257, 16), (300, 1280)])
def test_a_large_parameter_is_tried_in_a_shape_that_can_be_cut_into_blocks(shape: tuple[int, int]) -> None:
    assert kind_of(EightBits([torch.nn.Parameter(torch.ones(shape))])) is Kind.WHOLE


def test_a_default_device_is_not_that_of_the_trial_steps() -> None:
    """One without values, or an accelerator beside a model that is on the CPU."""
    optimizer = torch.optim.AdamW(START.parameters())
    with torch.device("meta"):
        assert kind_of(optimizer) is Kind.ELEMENTWISE


def profiled(rank: int) -> None:
    model, sharded, _, plain, other = pair(None, torch.optim.AdamW)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True, profile_memory=True, record_shapes=True):
        train(model, sharded, rank)
    train(plain, other, rank)
    assert_same(model, plain)


@pytest.mark.ranks
def test_torchs_profiler_finds_no_state_to_look_into() -> None:
    """It follows Python, and looks at optimizers where they say that they have stepped."""
    spawn_ranks(profiled, 2)


def test_one_thread_at_a_time_asks_torch_for_its_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes its answer with a lock held; where garbage is collected then, others run, and wait for that lock."""
    inside, most, meeting = [0], list[int](), threading.Barrier(3)
    real = torch.random.get_rng_state

    def get_rng_state() -> torch.Tensor:
        inside[0] += 1
        most.append(inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return real()

    class Meets(torch.optim.SGD):
        """Its step waits for the other ranks: each has come in, and none keeps another out."""

        def step(self, closure: Any = None) -> None:
            meeting.wait(10)
            super().step(closure)

    monkeypatch.setattr(torch.random, "get_rng_state", get_rng_state)
    optimizer = Meets(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    before = real()
    assert run_ranks(lambda transport: kind_of(optimizer), 3) == [Kind.ELEMENTWISE] * 3
    assert {*most} == {1} and torch.equal(real(), before)
