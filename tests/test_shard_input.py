"""What ``shard`` and the step of a sharded optimizer refuse, in which words; and that all is as it was then."""

from __future__ import annotations

import copy
import importlib
import logging
import re
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from test_shard import CARRIERS
from test_shared_memory import shared

import stretto
from stretto.sharding import layout, stretches, writings
from stretto.sharding.layout import Layout
from stretto.testing import run_ranks


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 50), torch.nn.Linear(50, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


START = Two()


class Moody(torch.optim.SGD):
    def __init__(self, params: Any, mood: str) -> None:
        super().__init__(params, lr=0.1)


class Lean(torch.optim.SGD):
    """Cannot be built for flat parameters, but for the probe's, which are smaller."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if any(one.dim() == 1 and one.numel() > 1100 for group in self.param_groups for one in group["params"]):
            raise ValueError("too much")


def train(model: torch.nn.Module, optimizer: Any, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def stepped(model: Two, sync: Any, rank: int) -> None:
    optimizer = adam(model)
    model.first.weight.grad = torch.zeros_like(model.first.weight)
    optimizer.step()
    model.zero_grad()
    stretto.shard(optimizer, sync)


def strangers(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(adam(torch.nn.Linear(3, 2)), sync)


def twice(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(torch.optim.SGD([model.first.bias, *model.parameters()], lr=0.1), sync)


def nothing(model: Two, sync: Any, rank: int) -> None:
    stretto.shard("adam", sync)  # type: ignore[arg-type]


def not_made(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(torch.optim.AdamW, sync)  # type: ignore[arg-type]


def closest(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(torch.optim.LBFGS(model.parameters()), sync)


def peculiar(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(Moody(model.parameters(), "good"), sync)


def on_one_rank(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(adam(model if rank == 0 else torch.nn.Linear(3, 2)), sync)


def other_classes(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(adam(model) if rank == 0 else torch.optim.SGD(model.parameters(), lr=0.1), sync)


def other_groups(model: Two, sync: Any, rank: int) -> None:
    groups = [[*model.first.parameters()], [*model.second.parameters()]]
    several = [{"params": one} for one in groups] if rank else [{"params": groups[0] + groups[1]}]
    stretto.shard(torch.optim.AdamW(several), sync)


def other_parameters(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(adam(model.first if rank else model), sync)


def other_order(model: Two, sync: Any, rank: int) -> None:
    parameters = [*model.first.parameters()]
    stretto.shard(torch.optim.AdamW(parameters[::-1] if rank else parameters), sync)


def other_rates(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(torch.optim.AdamW(model.parameters(), lr=0.25 + rank), sync)


def other_options(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(adam(model), sync, keep_grads=rank == 0)


def fails_to_build(model: Two, sync: Any, rank: int) -> None:
    stretto.shard(Lean(model.parameters()), sync, keep_grads=False)


def converted(model: Two, sync: Any, rank: int) -> None:
    kept = model.second.bias.data
    model.second.bias.data = kept.double() if rank else kept
    try:
        stretto.shard(adam(model), sync)
    finally:
        model.second.bias.data = kept


ONE = (
    "Build the optimizer over parameters of the attached module, or attach one module that has all of them, "
    "torch.nn.ModuleList([model, loss]), or shard it with the handle that reduces them."
)
DIFFERS = "Build the same on all ranks."
REFUSED: dict[Callable[..., None], tuple[str, ...]] = {
    stepped: (
        "SetupError: rank {0}, shard: the optimizer has a state already, as after a step.\n"
        "Shard it before its first step. To go on with its state: state = optimizer.state_dict(), build it again, "
        "shard that, load_state_dict(state). An optimizer that makes its state when it is built, without a count of "
        "steps, cannot be sharded.",
    ),
    strangers: (
        "SetupError: rank {0}, shard: parameter 0 of group 0, (2, 3), is stepped by the optimizer, and not reduced by "
        f"this handle.\n{ONE}",
    ),
    twice: (
        "SetupError: rank {0}, shard: the optimizer's groups list more than once: first.bias.\n"
        "List each parameter once.",
    ),
    nothing: (
        "SetupError: rank {0}, shard: str is not a torch.optim.Optimizer.\n"
        "Call optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync).",
    ),
    not_made: (
        "SetupError: rank {0}, shard: the class AdamW is not a torch.optim.Optimizer.\n"
        "Call optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync).",
    ),
    closest: (
        "UnsupportedError: rank {0}, shard: LBFGS cannot be divided over ranks: tried on small tensors, step() "
        "without a closure raised TypeError: LBFGS.step() missing 1 required positional argument: 'closure'\n"
        "Use it as it is, without stretto.shard().",
    ),
    peculiar: (
        "UnsupportedError: rank {0}, shard: Moody cannot be built again for a part of its parameters: "
        "Moody.__init__() missing 1 required positional argument: 'mood'.\n"
        "Its constructor must take parameter groups first, and its defaults as keywords, as torch's do. One that "
        "wraps another optimizer (SAM, Lookahead) is used without stretto.shard().",
    ),
    on_one_rank: (
        "SetupError: rank 0, shard: the optimizer cannot be sharded on rank 1.\n"
        "  rank 1, shard: parameter 0 of group 0, (2, 3), is stepped by the optimizer, and not reduced by "
        f"this handle.\n{ONE}",
        "SetupError: rank 1, shard: parameter 0 of group 0, (2, 3), is stepped by the optimizer, and not reduced by "
        f"this handle.\n{ONE}",
    ),
    converted: (
        "SetupError: rank 0, shard: the optimizer cannot be sharded on rank 1.\n"
        "  rank 1, shard: second.bias was float32 (20,) on cpu when the ranks last agreed, and is float64 (20,) on cpu "
        "now.\nConvert the model before stretto.attach(); or run a backward before stretto.shard(): the plan follows.",
        "SetupError: rank 1, shard: second.bias was float32 (20,) on cpu when the ranks last agreed, and is float64 "
        "(20,) on cpu now.\n"
        "Convert the model before stretto.attach(); or run a backward before stretto.shard(): the plan follows.",
    ),
    other_classes: (
        "ModelMismatchError: rank {0}, shard: rank 1 has SGD, rank 0 AdamW.\nBuild the same on all ranks.",
    ),
    other_groups: (f"ModelMismatchError: rank {{0}}, shard: rank 1 has 2 parameter groups, rank 0 1.\n{DIFFERS}",),
    other_parameters: (
        "ModelMismatchError: rank {0}, shard: parameter group 0 differs between rank 0 and rank 1: "
        f"second.bias, second.weight.\n{DIFFERS}",
    ),
    other_order: (
        "ModelMismatchError: rank {0}, shard: parameter group 0 differs between rank 0 and rank 1: "
        f"first.bias, first.weight.\n{DIFFERS}",
    ),
    other_rates: (
        f"ModelMismatchError: rank {{0}}, shard: parameter group 0 has lr=1.25 on rank 1, lr=0.25 on rank 0.\n"
        f"{DIFFERS}",
    ),
    other_options: (
        "ModelMismatchError: rank {0}, shard: rank 1 was given keep_grads=False, overlap=True, rank 0 "
        f"keep_grads=True, overlap=True.\n{DIFFERS}",
    ),
    fails_to_build: (
        "UnsupportedError: shard: Lean cannot be built again for a part of its parameters: too much.\n"
        "Its constructor must take parameter groups first, and its defaults as keywords, as torch's do. One that "
        "wraps another optimizer (SAM, Lookahead) is used without stretto.shard().",
    ),
}


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
def test_what_is_refused_leaves_all_as_it_was(ask: Callable[..., None], run: Callable[..., Any]) -> None:
    def worker(transport: Any) -> str:
        rank = transport.rank
        model, plain = copy.deepcopy(START), copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        stretto.attach(plain, transport=transport)
        with pytest.raises(stretto.StrettoError) as caught:
            ask(model, sync, rank)
        if ask is fails_to_build:  # it has left the others, who must not wait for it
            return f"{type(caught.value).__name__}: {caught.value}"
        model.__dict__["_modules"].pop("late", None)
        for net in (model, plain):
            net.load_state_dict(START.state_dict())
            train(net, adam(net), rank)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
        assert all(torch.is_tensor(one.grad) and float(one.grad.norm()) for one in model.parameters())
        sharded = stretto.shard(adam(model), sync)  # and can be sharded all the same
        train(model, sharded, rank)
        train(plain, adam(plain), rank)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = REFUSED[ask]
    assert run(worker, 2) == [texts[min(rank, len(texts) - 1)].format(rank) for rank in range(2)]


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
def test_a_model_that_was_converted_is_sharded_as_it_is_after_a_backward(run: Callable[..., Any]) -> None:
    def worker(transport: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        model.double()
        with pytest.raises(stretto.SetupError, match="was float32"):
            stretto.shard(adam(model), sync)
        x = torch.ones(1, 30, dtype=torch.float64)
        model(x).sum().backward()
        sharded = stretto.shard(adam(model), sync)
        sharded.step()
        return [*model.parameters()]

    plain = copy.deepcopy(START).double()
    plain(torch.ones(1, 30, dtype=torch.float64)).sum().backward()
    adam(plain).step()
    for found in run(worker, 2):
        assert all(one.dtype is torch.float64 for one in found)
        torch.testing.assert_close(found, [*plain.parameters()])


def test_what_fails_on_one_rank_for_a_reason_of_its_own_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that catches it and goes on would be waited for, and nobody would hear of the cause."""
    begin = importlib.import_module("stretto.sharding.begin")
    kind_of, poor = begin.kind_of, ["rank 1"]

    def fails_once(*arguments: Any) -> Any:
        if threading.current_thread().name in poor:
            poor.clear()
            raise MemoryError("no room")
        return kind_of(*arguments)

    monkeypatch.setattr(begin, "kind_of", fails_once)

    def worker(transport: Any) -> str:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        with pytest.raises((stretto.SetupError, MemoryError)) as caught:
            stretto.shard(adam(model), sync)
        train(model, stretto.shard(adam(model), sync), transport.rank)
        return str(caught.value)

    told = "rank 0, shard: the optimizer cannot be sharded on rank 1.\n  MemoryError: no room"
    assert run_ranks(worker, 2, timeout=10) == [told, "no room"]


def test_parameters_have_one_optimizer() -> None:
    def worker(transport: Any) -> list[str]:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        original = adam(model)
        sharded = stretto.shard(original, sync)
        said = []
        for again in (sharded, original, adam(model.second)):
            with pytest.raises(stretto.SetupError) as caught:
                stretto.shard(again, sync)
            said.append(str(caught.value))
        train(model, sharded, transport.rank)
        plain = sharded.unshard()
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(sharded, sync)
        said.append(str(caught.value))
        train(model, plain, transport.rank)
        anew = stretto.shard(adam(model), sync)
        anew.load_state_dict(plain.state_dict())
        train(model, anew, transport.rank)
        sync.detach()
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(adam(model), sync)
        said.append(str(caught.value))
        return said

    for rank, said in enumerate(shared(worker, 2)):
        where = f"rank {rank}, shard"
        assert said == [
            f"{where}: the optimizer is sharded already.\nUse what the first call returned.",
            f"{where}: the optimizer is sharded already.\nUse what the first call returned.",
            f"{where}: second.weight, second.bias belong to another sharded optimizer.\n"
            "Give each parameter to one optimizer, or call unshard() of the other one before.",
            f"{where}: what you give has ended: by detach() or unshard(), or for a later one.\nBuild a new "
            "optimizer, and shard that. To go on with the state that unshard() gave back: load_state_dict() it then.",
            "shard: this handle has been detached.\nShard the optimizer before detach().",
        ]


def test_alone_the_same_is_refused() -> None:
    model = Two()
    sync = stretto.attach(model)
    with pytest.raises(stretto.SetupError) as caught:
        stretto.shard(adam(torch.nn.Linear(3, 2)), sync)
    assert str(caught.value).startswith("shard: parameter 0 of group 0, (2, 3), is stepped by the optimizer")
    with pytest.raises(stretto.UnsupportedError, match=r"^shard: LBFGS cannot be divided over ranks: tried on small"):
        stretto.shard(torch.optim.LBFGS(model.parameters()), sync)
    sharded = stretto.shard(adam(model), sync)
    with pytest.raises(stretto.SetupError) as caught:
        stretto.shard(adam(model), sync)
    assert "belong to another sharded optimizer" in str(caught.value)
    train(model, sharded, 0)
    train(model, stretto.shard(torch.optim.SGD(sharded.unshard().param_groups[0]["params"]), sync), 0)


RESIZED = (
    "rank {0}, pass {1}: second.bias was (20,) torch.float32 when its optimizer was sharded, and is (1,) {2} now.\n"
    "Run a backward that reaches it before the step where the dtype has changed; where the size has, "
    "build another parameter, and another optimizer for it."
)


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_parameter_has_another_size(backward: bool, run: Callable[..., Any]) -> None:
    def worker(transport: Any) -> str:
        rank = transport.rank
        model = Two()
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, rank)
        model.second.bias.data = torch.zeros(1)
        before = [one.clone() for one in model.parameters()]
        if backward:
            sharded.zero_grad()
            model(torch.ones(2, 30)).sum().backward()
        with pytest.raises(stretto.SetupError) as caught:
            sharded.step()
        assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        if run is shared:  # mended, it goes on
            model.second.bias.data = torch.zeros(20)
            train(model, sharded, rank)
        sync.detach()
        sync = stretto.attach(model, transport=transport)
        train(model, torch.optim.SGD(model.parameters()), rank)
        sync.detach()
        return str(caught.value)

    number = 4 if backward else 3
    assert run(worker, 2) == [RESIZED.format(rank, number, "torch.float32") for rank in range(2)]


def test_a_parameter_has_another_size_on_one_rank() -> None:
    def worker(transport: Any) -> str:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, transport.rank)
        kept = model.second.bias.data
        before = [one.clone() for one in model.parameters()]
        if transport.rank == 1:
            model.second.bias.data = torch.zeros(1)
        with pytest.raises(stretto.StrettoError) as caught:
            sharded.step()
        model.second.bias.data = kept
        assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        train(model, sharded, transport.rank)
        sync.check()
        return str(caught.value)

    first, second = shared(worker, 2)
    assert second == RESIZED.format(1, 3, "torch.float32")
    note = "".join(line + "\n" for line in first.splitlines()[1:-1])
    assert note.startswith(f"  rank 1, pass 3, step: SetupError: {second.splitlines()[0]}")
    assert first == (
        "rank 0, pass 3: the step of an optimizer was refused on rank 1, before any rank had stepped.\n"
        f"{note}Remove the cause; then all ranks can go on."
    )


def moved_by_hand(model: torch.nn.Module) -> None:
    """Every parameter lies elsewhere, with another value."""
    values = torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    torch.nn.utils.vector_to_parameters(values, model.parameters())


def fail_once(owner: Any, name: str, error: BaseException) -> None:
    def fail(*args: Any, **options: Any) -> None:
        delattr(owner, name)
        raise error

    setattr(owner, name, fail)


def without_lines(text: str) -> str:
    return re.sub(r"\.py:\d+", ".py:LINE", text)


@pytest.mark.parametrize(("owner", "name"), [("layout", "strayed"), ("layout", "copies"), ("_groups", "number")])
def test_what_fails_on_one_rank_before_any_has_stepped_is_told(owner: str, name: str) -> None:
    def worker(transport: Any) -> str:
        rank = transport.rank
        model, plain = copy.deepcopy(START), copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        stretto.attach(plain, transport=transport)
        sharded, optimizer = stretto.shard(adam(model), sync), adam(plain)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, rank)
            moved_by_hand(net)
        before = copy.deepcopy(model)
        if rank == 1:
            fail_once(getattr(sharded._shares, owner), name, MemoryError("no room"))
        with pytest.raises((MemoryError, stretto.PeerError)) as caught:
            sharded.step()
        assert all(torch.equal(one, two) for one, two in zip(before.parameters(), model.parameters(), strict=True))
        for net, one in ((model, sharded), (plain, optimizer)):
            one.step()
            train(net, one, rank)
        assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), model.parameters(), strict=True))
        return without_lines(str(caught.value))

    assert shared(worker, 2) == [
        "rank 0, pass 3: the step of an optimizer was refused on rank 1, before any rank had stepped.\n"
        "  rank 1, pass 3, step: MemoryError: no room (test_shard_input.py:LINE in fail)\n"
        "Remove the cause; then all ranks can go on.",
        "no room",
    ]


@pytest.mark.parametrize(
    ("run", "error"),
    [(run_ranks, MemoryError("no room")), (run_ranks, KeyboardInterrupt()), (shared, KeyboardInterrupt())],
    ids=["apart-fails", "apart-ctrl-c", "shared-ctrl-c"],
)
def test_a_rank_that_leaves_before_it_has_stepped_says_so(run: Callable[..., Any], error: BaseException) -> None:
    has_raised = threading.Event()

    def worker(transport: Any) -> str:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, transport.rank)
        moved_by_hand(model)
        if transport.rank == 0:
            with pytest.raises(stretto.PeerError) as told:
                sharded.step()
                model.state_dict()
            has_raised.set()
            return without_lines(str(told.value))
        before = copy.deepcopy(model)
        fail_once(sharded._shares.layout, "copies", error)
        with pytest.raises(type(error)):
            sharded.step()
        assert has_raised.wait(10), "the other one waits for what does not come"
        assert all(torch.equal(one, two) for one, two in zip(before.parameters(), model.parameters(), strict=True))
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(stretto.CommunicationError) as again:
                sharded.step()
            assert str(again.value) == (
                "rank 1, shard: a step of this optimizer has failed, so no other can follow; the model is whole.\n"
                "Start again from the last checkpoint."
            )
        return ""

    told = run(worker, 2)[0]
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    assert told == (
        "rank 0, pass 3: rank 1 failed and left, so nobody can complete this call.\n"
        f"  rank 1, pass 3, step: {said} (test_shard_input.py:LINE in fail)\n"
        "Remove the cause and start again, on all ranks."
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [("tell", KeyboardInterrupt()), ("part_from", MemoryError("no room")), ("bring_back", KeyboardInterrupt())],
)
def test_a_rank_that_leaves_behind_the_meeting_shows_no_half_stepped_model(name: str, error: BaseException) -> None:
    """The other steps its share of the one memory: a model of no step was readable, and saved behind Ctrl-C, say."""

    def worker(transport: Any) -> str:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, 1)
        halve(model, (0, 1), transport.rank)
        shares = sharded._shares
        if name == "part_from":  # another group, along which all is laid out behind the meeting
            sharded.param_groups[0]["params"] = sharded.param_groups[0]["params"][:3]
        if transport.rank == 1:
            owner = {"tell": shares.writings, "part_from": shares._groups, "bring_back": shares.layout}[name]
            fail_once(owner, name, error)
        with pytest.raises((type(error), stretto.PeerError)):
            train(model, sharded, transport.rank, 1)
            model.state_dict()
        with pytest.raises(stretto.CommunicationError) as looks:
            model.state_dict()
        return str(looks.value)

    assert shared(worker, 2) == [
        f"rank {rank}, pass 2: a step of the optimizer has failed, so the model may be stepped in part.\n"
        "Start again from the last checkpoint, on all ranks."
        for rank in range(2)
    ]


class Logs(torch.optim.AdamW):
    norms: Any = None

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is self.norms:
            torch.linalg.matrix_norm(self.param_groups[0]["params"][0])  # raises for other shapes
        return super().step(closure)


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
def test_an_optimizer_that_steps_otherwise_on_one_rank_is_refused_on_all(run: Callable[..., Any]) -> None:
    """Each divided what it had found to be divisible: some elements were stepped twice, and others by nobody."""

    def worker(transport: Any) -> str:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        if transport.rank == 1:
            Logs.norms = threading.current_thread()
        transport.all_gather_object(None)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            stretto.shard(Logs([model.first.weight, model.second.weight]), sync)
        train(model, adam(model), transport.rank, 1)
        return str(caught.value)

    assert run(worker, 2) == [
        f"rank {rank}, shard: Logs, tried on a few numbers, looked at whole parameters or failed on rank 1, and not on "
        "rank 0. What only one rank does in its step, such as logging a norm, belongs after the step.\n"
        "Build the same on all ranks."
        for rank in range(2)
    ]


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
def test_behind_an_unshard_that_has_failed_nothing_is_stepped_in_shares(run: Callable[..., Any]) -> None:
    """The others had gone on without; the rank that caught its error waited in the next step for ever."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, 1)
        if transport.rank == 1:
            fail_once(sharded._shares.layout, "release", MemoryError("no room"))
            with pytest.raises(MemoryError):
                sharded.unshard()
            with pytest.raises(stretto.SetupError, match="this sharded optimizer has ended: by detach"):
                sharded._step_share(None)
        train(model, sharded.unshard(), transport.rank, 1)
        assert all(one.dim() for one in model.parameters())

    run(worker, 2)


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and SAM are: it has the parameters, and its step calls that of another, each second time."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.calls = base, 0

    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        if not self.calls % 2:
            self.base.step()


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            one.sub_(one.grad)
        self.zero_grad()


class Derived(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Whole(torch.optim.Adafactor):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_another_optimizer_does_not_step_what_ranks_have_in_one_memory() -> None:
    """Each rank stepped the same memory, in silence: a second phase with a plain optimizer over the same model."""

    def worker(transport: Any) -> list[str]:
        model, apart = copy.deepcopy(START), torch.nn.Linear(30, 1)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, Wrapper(sharded), transport.rank)
        train(apart, adam(apart), transport.rank)
        sync.check()
        before = [one.clone() for one in model.parameters()]
        told = []
        for plain in (torch.optim.SGD(model.second.parameters(), lr=0.1), Own([*model.parameters()])):
            with pytest.raises(stretto.SetupError) as caught:
                train(model, plain, transport.rank, 1)
            told.append(str(caught.value))
            assert all(map(torch.equal, before, model.parameters())) is (len(told) == 1)
            model.zero_grad()
        train(model, sharded, transport.rank)
        train(model, sharded.unshard(), transport.rank)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), transport.rank)
        train(model, stretto.shard(adam(model), sync), transport.rank)
        sync.check()
        return told

    for rank, (before, behind) in enumerate(shared(worker, 2)):
        assert before == (
            f"rank {rank}, shard: this SGD steps parameters of a sharded AdamW, which the ranks of this host share in "
            "one memory, so each rank would step them once more.\n"
            "Call unshard() of the sharded one first, on all ranks; then shard this one, or step it as it is. What has "
            "left the groups of the sharded one is in that memory until its next step: let it step first."
        )
        assert behind == (
            f"rank {rank}, shard: this Own has stepped parameters of a sharded AdamW, which the ranks of this host "
            "share in one memory, so each rank has stepped them once more.\nLoad the values from before that step. "
            "Call unshard() of the sharded one first, on all ranks; then shard this one, or step it as it is. What has "
            "left the groups of the sharded one is in that memory until its next step: let it step first."
        )


def test_another_optimizer_is_refused_though_it_has_stepped_as_many_others_before() -> None:
    def worker(transport: Any) -> None:
        model, apart = copy.deepcopy(START), torch.nn.Linear(30, 1)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, transport.rank)
        plain = torch.optim.SGD(apart.parameters(), lr=0.1)
        train(apart, plain, transport.rank, 1)
        plain.param_groups[0]["params"] = [*model.second.parameters()]
        before = [one.clone() for one in model.parameters()]
        with pytest.raises(stretto.SetupError, match="this SGD steps parameters of a sharded AdamW"):
            train(model, plain, transport.rank, 1)
        assert all(map(torch.equal, before, model.parameters()))

    shared(worker, 2)


@pytest.mark.parametrize("before", ["", "a new group", "a new group, and a state is loaded"])
def test_what_a_dropped_sharded_optimizer_has_stepped_is_stepped_once_by_a_plain_one(before: str) -> None:
    """With its handle, and without unshard(): a notebook's cell, or a function that returns the optimizer alone."""

    def worker(transport: Any) -> None:
        nets = []
        for shards in (True, False):
            model = copy.deepcopy(START)
            sync = stretto.attach(model, transport=transport)
            optimizer: Any = torch.optim.SGD(model.first.parameters(), lr=0.1)
            optimizer = stretto.shard(optimizer, sync) if shards else optimizer
            if before:
                optimizer.add_param_group({"params": [*model.second.parameters()]})
            if "loaded" in before:  # for which parameters are laid out anew
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                train(model, optimizer, transport.rank)
            del sync, optimizer
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), transport.rank)
            nets.append(model)
        assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))

    shared(worker, 2)


@pytest.mark.parametrize("is_known", [False, True])
def test_another_optimizer_waits_for_a_step_before_it_takes_a_parameter_over(is_known: bool) -> None:
    """Until then the parameter lies in shared memory, and each rank stepped it once more, mostly in silence."""

    def worker(transport: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for model in (copy.deepcopy(START), copy.deepcopy(START)):
            sync, apart = stretto.attach(model, transport=transport), torch.nn.Linear(30, 1)
            first, plain = adam(model), torch.optim.SGD(apart.parameters(), lr=0.1)
            if not found:
                first = stretto.shard(first, sync)
            train(model, first, transport.rank)
            if is_known:  # as one that steps nothing of the sharded one's
                train(apart, plain, transport.rank, 1)
            moved = first.param_groups[0]["params"].pop()
            plain.param_groups[0]["params"][-1] = moved
            if not is_known:
                plain = torch.optim.SGD([moved], lr=0.1)
            model(torch.ones(4, 30)).sum().backward()
            if not found:
                with pytest.raises(stretto.SetupError, match="is in that memory until its next step: let it step"):
                    plain.step()
            first.step()
            plain.step()
            found.append(moved.detach().clone())
            sync.detach()
        return found[0], found[1]

    for sharded, wanted in shared(worker, 2):
        torch.testing.assert_close(sharded, wanted)


def of_writes(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without those of a rank that waits long, on a busy machine."""
    return [record for record in caplog.records if record.module == "writings"]


def halve(model: torch.nn.Module, only: Collection[int], rank: int) -> None:
    with torch.no_grad():
        if rank in only:
            model.first.weight.mul_(0.5)


@pytest.mark.parametrize(
    ("world", "only", "tells"), [(2, (0, 1), [0]), (3, (1, 2), [1, 2]), (3, (0,), []), (2, (1,), []), (2, (), [])]
)
@pytest.mark.parametrize("behind", [1, 4, 10])
def test_what_several_ranks_write_in_one_memory_is_told_of(
    caplog: pytest.LogCaptureFixture, world: int, only: tuple[int, ...], tells: list[int], behind: int
) -> None:
    """Each halved it once more, in silence."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(behind + 4):
            train(model, sharded, transport.rank, 1)
            if step + 1 == behind or step > behind:
                halve(model, only, transport.rank)
                model.second.weight.data = model.second.weight * 0.5
            transport.all_gather_object(None)

    shared(worker, world)
    assert sorted(record.getMessage() for record in of_writes(caplog)) == [
        f"rank {rank}, pass {behind + 1}: since the last step {len(only)} ranks have written in place to "
        "parameters that the ranks of a host share in one memory (nn.init, p.mul_(), an optimizer hook, a forward); "
        f"this rank, of ranks {', '.join(map(str, range(world)))}, has written to first.weight. If several ranks "
        "of a host change a parameter, the change is applied once for each of them, while others may be reading it.\n"
        "Let one rank of each host do it, between two calls of torch.distributed.barrier(); or let all assign "
        "parameter.data = ... (SAM: old = p.data; p.data = old + e, and p.data = old before the step). What a "
        "layer writes in its own forward is for an optimizer that is not sharded. See docs/sharding.md. If each rank "
        "writes different parameters, or writing twice does no harm (clamp_, values "
        "copied in between barriers), ignore this. Shown once."
        for rank in tells
    ]


@pytest.mark.parametrize(("behind", "told"), [(13, 0), (16, 1), (20, 0), (24, 1)])
def test_after_the_first_steps_writes_are_looked_for_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, behind: int, told: int
) -> None:
    """After steps that are powers of two, and in the end every 1,024; here every 24. A few, every fourth, do not count:
    after these all may have loaded the best weights."""
    assert writings._EVERY == 1024
    monkeypatch.setattr(writings, "_EVERY", 24)

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, behind)
        transport.all_gather_object(None)
        halve(model, (0, 1), transport.rank)
        transport.all_gather_object(None)
        train(model, sharded, transport.rank, 1)

    shared(worker, 2)
    assert len(of_writes(caplog)) == told


@pytest.mark.parametrize(("bound", "tells"), [(100.0, 0), (0.5, 1)])
def test_a_clamp_that_changes_nothing_is_not_told_of(
    caplog: pytest.LogCaptureFixture, bound: float, tells: int
) -> None:
    """CLIP clamps its temperature on all ranks after every step, mostly within the bounds, and got the warning."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        model.first.bias.data.fill_(1.0)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(9):
            train(model, sharded, transport.rank, 1)
            transport.all_gather_object(None)  # else a slower rank may look at values that are clamped already
            with torch.no_grad():
                model.first.bias.clamp_(-100.0, bound if step > 2 else 100.0)
            transport.all_gather_object(None)

    shared(worker, 2)
    told = [record.getMessage() for record in of_writes(caplog)]
    assert len(told) == tells
    assert all("since the last step 2 ranks have written in place" in one for one in told)


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_that_are_loaded_with_a_state_are_not_told_of(
    caplog: pytest.LogCaptureFixture, distributed: bool
) -> None:
    """Going back to a checkpoint on all ranks, between barriers as docs/sharding.md says, gave the warning."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, 2)
        weights = copy.deepcopy(model.state_dict())
        state = transport.all_gather_object(sharded.state_dict())[0]
        train(model, sharded, transport.rank, 2)
        transport.all_gather_object(None)
        model.load_state_dict(weights)
        transport.all_gather_object(None)
        if distributed:
            stateful = sharded.stateful()
            stateful.load_state_dict(stateful.state_dict())
        else:
            sharded.load_state_dict(state)
        train(model, sharded, transport.rank, 1)

    shared(worker, 2)
    assert [record.getMessage() for record in of_writes(caplog)] == []


def write_uncounted(parameter: torch.nn.Parameter, how: str) -> None:
    if how == "data":
        parameter.data.mul_(0.5)
    elif how == "counted, then moved":
        with torch.no_grad():
            parameter.mul_(0.5)
        parameter.data = torch.ones_like(parameter)
    else:
        parameter.detach().numpy()[:] *= 0.5


@pytest.mark.parametrize("how", ["data", "numpy", "counted, then moved"])
@pytest.mark.parametrize("behind", [1, 4])
def test_a_write_that_torch_does_not_count_is_told_of(caplog: pytest.LogCaptureFixture, behind: int, how: str) -> None:
    """Each rank halved it once more, and nobody said so."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(behind + 4):
            train(model, sharded, transport.rank, 1)
            transport.all_gather_object(None)
            if step + 1 >= behind:
                write_uncounted(model.first.weight, how)
            transport.all_gather_object(None)

    shared(worker, 3)
    assert [record.getMessage() for record in of_writes(caplog)] == [
        f"rank 0, pass {behind + 1}: since the last step the values of first.weight have changed in the memory that "
        "the ranks of a host share, by writes that torch does not count: through .data (p.data.mul_(), an average that "
        "is swapped in to evaluate), from NumPy, in a library's layer, or right before parameter.data = ... (SAM). If "
        "several ranks of a host change a parameter, the change is applied once for each of them, while others may be "
        "reading it.\n"
        "Let one rank of each host do it, between two calls of torch.distributed.barrier(); or let all assign "
        "parameter.data = ... (SAM: old = p.data; p.data = old + e, and p.data = old before the step). What a "
        "layer writes in its own forward is for an optimizer that is not sharded. See docs/sharding.md. If one rank "
        "did it, or writing twice does no harm (clamp_, values copied in between "
        "barriers), ignore this. Shown once."
    ]


def shift(parameter: torch.nn.Parameter) -> None:
    """As in SAM."""
    parameter.data.add_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))


def binarize(parameter: torch.nn.Parameter) -> None:
    """As in BinaryConnect. Two values are left, and yet it is no bound: they are put back."""
    parameter.data.sign_()


@pytest.mark.parametrize("move", [shift, binarize])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_values_that_are_moved_for_a_backward_and_put_back_are_told_of(
    caplog: pytest.LogCaptureFixture, move: Any, micro_batches: int
) -> None:
    """All ranks computed with weights that each had moved once more. In the next step they were those of before."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(4):
            sharded.zero_grad()
            kept = model.first.weight.data.clone()
            transport.all_gather_object(None)
            move(model.first.weight)
            for batch in range(micro_batches):
                model(torch.ones(2, 30) + step + batch).sum().backward()
            transport.all_gather_object(None)
            model.first.weight.data.copy_(kept)
            transport.all_gather_object(None)
            sharded.step()

    shared(worker, 2)
    (told,) = (record.getMessage() for record in of_writes(caplog))
    assert "pass" in told and "since the last step the values of first.weight have changed in the memory" in told


@pytest.mark.parametrize("swapped", ["data", "counted", "data, between barriers"])
def test_an_average_that_is_swapped_in_to_evaluate_is_told_of_where_it_was_mixed_up(
    caplog: pytest.LogCaptureFixture, swapped: str
) -> None:
    """As by torch_ema's ``average_parameters()``: a rank keeps what another has put there, and brings that back."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        values = [one if swapped == "counted" else one.data for one in model.parameters()]
        averages, kept = [torch.randn_like(one) for one in values], list[torch.Tensor]()

        def keep() -> None:
            kept.extend(one.clone() for one in values)

        def put(new: list[torch.Tensor]) -> None:
            with torch.no_grad():
                torch._foreach_copy_(values, new)

        def each(*do: Callable[[], None]) -> None:
            for turn in range(2):
                for one in do if turn == transport.rank else ():
                    one()
                transport.all_gather_object(None)

        train(model, sharded, transport.rank, 20)
        if "barriers" in swapped:
            each(keep)
            each(lambda: put(averages))
        else:
            each(keep, lambda: put(averages))
        each(lambda: put(kept))
        train(model, sharded, transport.rank, 1)

    shared(worker, 2)
    told = [record.getMessage() for record in of_writes(caplog)]
    assert len(told) == (swapped == "data") and all("since the last step the values of" in one for one in told)


def test_where_a_backward_looks_is_forgotten_with_the_memory() -> None:
    """A plan that a state follows, or an end, takes it away."""

    def worker(transport: Any) -> list[int]:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        events, found = sync._reducer._events, list[int]()

        def look() -> None:
            found.append(sum(type(one).__module__ == writings.__name__ for one, _ in events.pass_settled))

        train(model, sharded, transport.rank, 2)
        look()
        model.second.bias.requires_grad_(False)
        model(torch.ones(4, 30)).sum().backward()
        sharded.stateful().state_dict()
        look()
        sharded.step()
        look()
        sharded.unshard()
        look()
        return found

    assert shared(worker, 2) == [[1, 0, 1, 0], [0, 0, 0, 0]]


def clips(parameter: torch.nn.Parameter) -> None:
    parameter.data.clamp_(-0.05, 0.05)


def masks(parameter: torch.nn.Parameter) -> None:
    parameter.data[:, 0] = 0


@pytest.mark.parametrize("write", [clips, masks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_and_masks_are_not_told_of(caplog: pytest.LogCaptureFixture, write: Any, dtype: torch.dtype) -> None:
    """As often as they are set, they are the same: a warning after each step would be for nothing."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START).to(dtype)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(6):
            sharded.zero_grad()
            model(torch.ones(2, 30, dtype=dtype) + step).sum().backward()
            sharded.step()
            transport.all_gather_object(None)
            write(model.first.weight)
            transport.all_gather_object(None)

    shared(worker, 2)
    assert of_writes(caplog) == []


def test_a_mask_behind_a_backward_is_not_values_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """When the backward ended, the parameter held a bound already, and then it was set in more places."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(4):
            sharded.zero_grad()
            model.first.weight.data.clamp_(min=0)
            transport.all_gather_object(None)
            model(torch.ones(2, 30) + step).sum().backward()
            transport.all_gather_object(None)
            model.first.weight.data[:, ::2] = 0
            transport.all_gather_object(None)
            sharded.step()

    shared(worker, 2)
    assert of_writes(caplog) == []


def test_a_parameter_with_the_memory_of_another_is_refused() -> None:
    """It was given its values back in a place of its own, and what it had stepped was lost at the next assignment."""

    def worker(transport: Any) -> list[str]:
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        told = []
        for assigned in (model[0].weight.data, model[0].weight.data.clone()):
            model(torch.ones(2, 6)).sum().backward()
            model[1].weight.data = assigned
            try:
                sharded.step()
            except stretto.SetupError as error:
                told.append(str(error))
                model[1].weight.data = assigned.clone()
                sharded.step()
        a, b = (one.weight.data for one in model)
        model[0].weight.data, model[1].weight.data = b, a  # no more than that: both have moved
        sharded.step()
        model[0].weight.data = model[1].weight.data = torch.ones(6, 6)
        with pytest.raises(stretto.SetupError, match="was given the memory of"):
            sharded.step()
        return told

    for rank, told in enumerate(shared(worker, 2)):
        assert told == [
            f"rank {rank}, pass 1: 1.weight was given the memory of 0.weight (parameter.data = other.data), and a "
            "sharded optimizer steps each in memory of its own.\n"
            "Let both modules hold one parameter, before stretto.shard(...): module.weight = other.weight; or, for its "
            "values alone, parameter.data = other.data.clone()."
        ]


@pytest.mark.parametrize("world", [2, 3])
def test_behind_what_torch_does_not_count_all_ranks_still_count(caplog: pytest.LogCaptureFixture, world: int) -> None:
    """Rank 0 alone knew of the warning, and counted no more: of two ranks nobody told then, and of three two did."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for step in range(5):
            train(model, sharded, transport.rank, 1)
            transport.all_gather_object(None)
            if transport.rank == 0 and step == 0:
                write_uncounted(model.first.weight, "data")  # one alone, as it should be
            elif step > 1:
                halve(model, range(world), transport.rank)
            transport.all_gather_object(None)

    shared(worker, world)
    told = [record.getMessage() for record in of_writes(caplog)]
    assert sum("by writes that torch does not count" in one for one in told) == 1
    assert sum(f"since the last step {world} ranks have written in place" in one for one in told) == 1
    assert len(told) == 2


@pytest.mark.parametrize("how", ["counted", "data"])
def test_writes_are_told_of_once_where_the_step_is_refused(caplog: pytest.LogCaptureFixture, how: str) -> None:
    """The next one looked at the same writes again."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, 1)
        transport.all_gather_object(None)
        if how == "counted":
            halve(model, (0, 1), transport.rank)
        else:
            write_uncounted(model.first.weight, how)
        sharded.param_groups[0]["lr"] = 0.1 + transport.rank
        with pytest.raises(stretto.StrettoError):
            train(model, sharded, transport.rank, 1)
        sharded.param_groups[0]["lr"] = 0.1
        train(model, sharded, transport.rank, 1)

    shared(worker, 2)
    assert len(of_writes(caplog)) == 1


@pytest.mark.parametrize(("carry", "only"), [(run_ranks, (0, 1)), (CARRIERS["hosts"], (0, 2))])
def test_what_one_rank_of_each_memory_writes_is_as_it_should_be(
    caplog: pytest.LogCaptureFixture, carry: Any, only: tuple[int, ...]
) -> None:
    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        for _ in range(5):
            train(model, sharded, transport.rank, 1)
            transport.all_gather_object(None)
            halve(model, only, transport.rank)
            transport.all_gather_object(None)

    carry(worker, 2)
    assert of_writes(caplog) == []


def test_another_optimizer_is_seen_by_what_it_changes() -> None:
    """Of a matrix whose first column never has a gradient, as of pixels that are always 0, and beside NaN."""

    def worker(transport: Any) -> str:
        model = torch.nn.Linear(784, 64, bias=False)
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
        sync = stretto.attach(model, transport=transport)
        stretto.shard(adam(model), sync)
        inputs = torch.ones(2, 784)
        inputs[:, 0] = 0
        other = Own([*model.parameters()])
        model.weight.grad = torch.zeros_like(model.weight)
        other.step()  # of nothing
        transport.all_gather_object(None)
        model.weight.grad = inputs[:1].expand(64, 784).clone()
        with pytest.raises(stretto.SetupError) as caught:
            other.step()
        return str(caught.value)

    assert all("this Own has stepped" in told for told in shared(worker, 2))


@pytest.mark.parametrize("kind", [Derived, Whole])
def test_what_steps_a_share_is_no_other_optimizer(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where a class calls the step of torch's, that one has its hooks, which were told of steps on trial, too."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        train(plain := torch.nn.Linear(30, 1), kind.__base__(plain.parameters()), transport.rank)
        sync = stretto.attach(model, transport=transport)
        train(model, stretto.shard(kind(model.parameters()), sync), transport.rank, 4)
        sync.check()

    shared(worker, 2)
    assert not caplog.records


def test_where_each_rank_has_its_own_another_optimizer_may_step_what_is_sharded() -> None:
    def worker(transport: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        train(model, stretto.shard(adam(model), sync), transport.rank)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), transport.rank)
        sync.check()
        return [one.detach().clone() for one in model.parameters()]

    one, other = run_ranks(worker, 2)
    assert all(map(torch.equal, one, other))


def test_a_sharded_optimizer_is_not_copied() -> None:
    model = Two()
    sharded = stretto.shard(adam(model), stretto.attach(model))
    with pytest.raises(stretto.StrettoError) as caught:
        copy.deepcopy(sharded)
    assert str(caught.value) == (
        "A sharded optimizer is tied to its process: use state_dict(), on all ranks, to save or copy it."
    )


def test_state_takes_no_more_memory_than_it_has_elements() -> None:
    def worker(transport: Any) -> None:
        model = Two()
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, transport.rank)
        whole = transport.all_gather_object(sharded.state_dict())[0]
        for _ in range(2):
            state = [
                one
                for kept in sharded._shares.inner.state.values()
                for one in kept.values()
                if torch.is_tensor(one) and one.dim()
            ]
            assert sum(one.untyped_storage().nbytes() for one in state) == sharded.footprint()[0].state
            sharded.load_state_dict(whole)

    shared(worker, 2)


@pytest.fixture
def laid_flat(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parameters that ranks have copied whole before a step."""
    names = list[str]()

    def lay_flat(value: torch.Tensor, spec: stretto.ParameterSpec) -> torch.Tensor:
        names.append(spec.name)
        return real(value, spec)

    real = layout.laid_flat
    monkeypatch.setattr(layout, "laid_flat", lay_flat)
    return names


def test_copies_of_what_strayed_take_no_more_memory_than_they_have_elements(
    laid_flat: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 512)

    def worker(transport: Any) -> None:
        model = Two()
        shares = stretto.shard(adam(model), stretto.attach(model, transport=transport))._shares
        copies = shares.layout.copies(shares.layout.parameters, shares._division.pieces, list)
        assert len(copies) > 2 * len(shares.layout.parameters)
        held = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies.values()}
        assert sum(held.values()) == sum(4 * piece.numel for piece in shares._division.pieces)

    shared(worker, 2)
    assert max(map(laid_flat.count, laid_flat)) <= 2, "once on each rank"


def test_what_strayed_is_not_copied_where_all_is_laid_out_anew(laid_flat: list[str]) -> None:
    def worker(transport: Any) -> None:
        model, plain = copy.deepcopy(START), copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport)
        stretto.attach(plain, transport=transport)
        sharded, optimizer = stretto.shard(adam(model), sync), adam(plain)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank)
            moved_by_hand(net)
            one.param_groups[0]["params"].reverse()
            one.step()
        assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), model.parameters(), strict=True))

    shared(worker, 2)
    assert laid_flat == []


LATE = {
    "unfrozen": lambda model: model[0].requires_grad_(True),
    "replaced": lambda model: model.__setitem__(0, torch.nn.Linear(3, 3)),
    "built": lambda model: model.append(torch.nn.Linear(3, 3)),
}


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("trained_before", [True, False])
@pytest.mark.parametrize("change", LATE)
def test_an_optimizer_is_sharded_over_layers_of_which_no_backward_knows(
    change: str, trained_before: bool, keep_grads: bool
) -> None:
    """Two-stage fine-tuning: the plan follows in the next backward, and add_param_group took them already."""

    def worker(transport: Any) -> list[list[torch.Tensor]]:
        found = []
        for sharded in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
            model[0].requires_grad_(False)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            sync = stretto.attach(model, transport=transport)
            optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)
            if sharded and trained_before:
                optimizer = stretto.shard(optimizer, sync, keep_grads=keep_grads)
            for step in range(4 * trained_before):
                optimizer.zero_grad()
                model(torch.full((1, 3), transport.rank + step + 1.0)).sum().backward()
                optimizer.step()
            if sharded and trained_before:
                optimizer.unshard()
            LATE[change](model)
            with torch.no_grad():
                for parameter in model[0 if change != "built" else 2].parameters():
                    parameter.fill_(0.1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            if sharded:
                optimizer = stretto.shard(optimizer, sync, keep_grads=keep_grads)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((1, 3), transport.rank + step + 1.0)).sum().backward()
                optimizer.step()
            found.append([parameter.detach().clone() for parameter in model.parameters()])
            sync.detach()
        return found

    for carrier in (run_ranks, shared):
        for mine, plain in carrier(worker, 2):
            assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_layer_that_was_replaced_stays_in_its_group_and_the_new_one_gets_another(keep_grads: bool) -> None:
    """As torch has it: what the module has no more gets no gradient, and keeps its state."""

    def worker(transport: Any) -> list[Any]:
        found = []
        for sharded in (True, False):
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
            for number, parameter in enumerate(model.parameters(), 1):
                torch.nn.init.constant_(parameter, 0.1 * number)
            sync = stretto.attach(model, transport=transport)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if sharded:
                optimizer = stretto.shard(optimizer, sync, keep_grads=keep_grads)
            for step in range(6):
                if step == 2:
                    model[1] = torch.nn.Linear(3, 4)
                    for parameter in model[1].parameters():
                        torch.nn.init.ones_(parameter)
                    optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.02})
                optimizer.zero_grad()
                model(torch.full((1, 3), transport.rank + step + 1.0)).sum().backward()
                optimizer.step()
            state = optimizer.state_dict()
            found.append([[one.detach().clone() for one in model.parameters()], state if transport.rank == 0 else {}])
            sync.detach()
        return found

    for carrier in (run_ranks, shared):
        for mine, plain in carrier(worker, 2):
            torch.testing.assert_close(mine, plain, rtol=0, atol=0)


EDITS = {
    "clear": lambda one, parameter: one.state.clear(),
    "assigned": lambda one, parameter: setattr(one, "state", {}),
    "popped": lambda one, parameter: one.state.pop(parameter, None),
    "read": lambda one, parameter: one.state[parameter],
    "read if it is there": lambda one, parameter: one.state.get(parameter),
    "deleted": lambda one, parameter: one.state.__delitem__(parameter),
    "written": lambda one, parameter: one.state.__setitem__(parameter, {}),
    "set if missing": lambda one, parameter: one.state.setdefault(parameter, {}),
    "updated": lambda one, parameter: one.state.update({parameter: {}}),
    "joined": lambda one, parameter: one.state.__ior__({parameter: {}}),
    "copied": lambda one, parameter: copy.copy(one.state),
    "copied by itself": lambda one, parameter: one.state.copy(),
    "copied deeply": lambda one, parameter: copy.deepcopy(one.state),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_state_that_lies_in_shares_is_not_edited_by_parameter(edit: str) -> None:
    """It had no effect, in silence."""

    def worker(transport: Any) -> str:
        model = torch.nn.Linear(3, 3)
        sharded = stretto.shard(torch.optim.AdamW(model.parameters()), stretto.attach(model, transport=transport))
        old = torch.nn.Parameter(torch.ones(1))
        assert not sharded.state and not len(sharded.state) and old not in sharded.state
        assert model.weight in sharded.state  # torch's compiler asks
        assert sharded.state.pop(old, None) is None and sharded.state[old] == {}  # of nobody's
        with pytest.raises(stretto.UnsupportedError) as caught:
            EDITS[edit](sharded, model.weight)
        assert sharded.unshard().state is sharded.state
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        f"rank {rank}, shard: the state of this optimizer is divided over the ranks, so optimizer.state has no "
        "entries to read or set.\n"
        "To read it: state_dict(), on all ranks; to set it: load_state_dict(). To start without a state: unshard(), "
        "then build a new optimizer, and shard that."
        for rank in range(2)
    ]


def test_the_state_of_the_only_rank_is_that_of_the_original() -> None:
    model = torch.nn.Linear(3, 3)
    plain = torch.optim.AdamW(model.parameters())
    sharded = stretto.shard(plain, stretto.attach(model))
    model(torch.ones(1, 3)).sum().backward()
    sharded.step()
    plain.load_state_dict(plain.state_dict())  # makes another state
    assert sharded.state is plain.state and len(sharded.state) == 2
    sharded.state = plain.state.__class__(dict)
    assert sharded.state is plain.state and not plain.state


def test_layers_that_the_handle_was_told_to_ignore_are_refused() -> None:
    def worker(transport: Any) -> str:
        model = copy.deepcopy(START)
        sync = stretto.attach(model, transport=transport, ignore=["second.*"])
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(adam(model), sync)
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        f"rank {rank}, shard: second.weight is stepped by the optimizer, and not reduced by this handle.\n{ONE}"
        for rank in range(2)
    ]


@pytest.mark.parametrize("frozen", [False, True])  # a frozen parameter that comes first belongs to no handle
def test_one_optimizer_over_the_models_of_two_handles_is_refused(frozen: bool) -> None:
    def worker(transport: Any) -> str:
        first, second = copy.deepcopy(START), torch.nn.Linear(2, 2)
        second.weight.requires_grad_(not frozen)
        both = torch.optim.Adam([*first.parameters(), *second.parameters()])
        sync, _other = stretto.attach(first, transport=transport), stretto.attach(second, transport=transport)
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(both, sync)
        return str(caught.value)

    assert run_ranks(worker, 2) == [
        f"rank {rank}, shard: parameter {'5 of group 0, (2,),' if frozen else '4 of group 0, (2, 2),'} is stepped by "
        "the optimizer, and reduced by another handle.\n"
        "Build one optimizer for each handle, and shard it with that; or attach one module that has both, in place of "
        "the two."
        for rank in range(2)
    ]


def test_what_the_module_has_no_more_is_not_said_to_be_anothers() -> None:
    def worker(transport: Any) -> str:
        model = copy.deepcopy(START)
        optimizer, sync = adam(model), stretto.attach(model, transport=transport)
        model.second = torch.nn.Linear(3, 2)
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(optimizer, sync)
        return str(caught.value)

    for said in run_ranks(worker, 2):
        assert said.endswith(f"is stepped by the optimizer, and not reduced by this handle.\n{ONE}")


def test_where_there_is_no_memory_for_what_leaves_all_lies_where_it_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In shared memory such a rank saw what the others stepped, and was told that its model is whole."""

    def no_room(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    both = threading.Barrier(2, timeout=20)

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        sharded = stretto.shard(adam(model), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank)
        del sharded.param_groups[0]["params"][-1]
        model.state_dict()
        lay = [one.data_ptr() for one in model.parameters()]
        if both.wait() == 0:
            monkeypatch.setattr(Layout, "_part_from", no_room)
        both.wait()
        with pytest.raises(MemoryError, match="no room"):
            sharded.step()
        assert [one.data_ptr() for one in model.parameters()] == lay
        with pytest.raises(stretto.CommunicationError, match="the model is whole"):
            sharded.step()
        if both.wait() == 0:
            monkeypatch.undo()
        both.wait()

    run_ranks(worker, 2)


def test_what_has_no_memory_of_its_own_is_passed_over() -> None:
    """Sparse buffers, and frozen parameters, that are left out."""

    def worker(transport: Any) -> None:
        model = copy.deepcopy(START)
        model.register_buffer("adjacent", torch.eye(3).to_sparse())
        model.register_parameter("table", torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False))
        sync = stretto.attach(model, transport=transport, ignore=["adjacent", "table"])
        sharded = stretto.shard(adam(model), sync)
        train(model, sharded, transport.rank)
        sharded.unshard()
        sync.detach()

    run_ranks(worker, 2)
