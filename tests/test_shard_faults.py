"""Ranks that die, fail, are stopped, fork or disagree around the step of a sharded optimizer. Each is a process."""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_programs
from test_shared_memory_faults import SOON, Deadly, Later, check_nothing_stayed, own_mappings, shmem
from warm import Rank, fork_ranks, in_warm_process

import stretto
from stretto.sharding.awaited import Arrival
from stretto.sharding.division import Division
from stretto.sharding.layout import Layout
from stretto.sharding.meetings import Meetings
from stretto.sharding.spread import Spread
from stretto.sharding.state import shaped
from stretto.sharding.stretches import Stretches
from stretto.sharding.succession import Succession
from stretto.sharding.writings import Writings
from stretto.testing_network import SeparateHosts
from stretto.transport import ProcessGroupTransport, choose
from stretto.transport.counterparts import Counterparts
from stretto.transport.courier import Courier
from stretto.transport.futex import Futex
from stretto.transport.host import Host

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]
Tell = Callable[[Any], None]
SPOILED = re.compile(
    r"rank \d, (pass \d+|attach): a step of the optimizer has failed, so the model may be stepped in part\.\n"
    r"Start again from the last checkpoint, on all ranks\."
)


@dataclass(frozen=True)
class Way:
    """How the model is trained."""

    transport: str
    keep_grads: bool

    @property
    def ranks(self) -> int:
        """Two on each of two pretended hosts, or three."""
        return 4 if self.transport == "hosts" else 3

    def carrier(self) -> Any:
        """What ``attach`` is given."""
        if self.transport != "hosts":
            return self.transport
        return choose(SeparateHosts(ProcessGroupTransport(), [2, 2]), "auto")


WAYS = [Way(transport, keep) for transport in ("shared_memory", "process_group") for keep in (True, False)]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.transport}-{way.keep_grads}")


class Scrambled(torch.nn.Module):
    """Registered in another order than gradients suggest, so that the plan changes after the first pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = (torch.nn.Linear(*sizes) for sizes in ((90, 64), (64, 90), (90, 90)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def build(way: Way) -> tuple[torch.nn.Module, stretto.Synchronizer, Any]:
    model = Scrambled()
    sync = stretto.attach(model, transport=way.carrier(), bucket_cap_mb=0.02, last_bucket_cap_mb=0.01)
    return model, sync, stretto.shard(torch.optim.AdamW(model.parameters()), sync, keep_grads=way.keep_grads)


def backward(model: torch.nn.Module, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + rank)).square().mean().backward()


def step(model: torch.nn.Module, optimizer: Any, rank: int) -> None:
    backward(model, optimizer, rank)
    optimizer.step()


def fingerprint(model: torch.nn.Module) -> str:
    values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(values).hexdigest()


def train_and_look(rank: int, tell: Tell, way: Way, steps: int) -> list[str]:
    """The model after so many steps."""
    model, _, optimizer = build(way)
    found = [fingerprint(model)]
    for _ in range(steps):
        step(model, optimizer, rank)
        found.append(fingerprint(model))
    return found


def stay(folder: str, rank: int, world: int) -> None:
    """Until all have come here, as often as they do: nobody is to be saved, or accused, by another's end."""
    Path(folder, f"stays{rank}").touch()
    until = time.monotonic() + 20
    while len([*Path(folder).glob("stays*")]) < world and time.monotonic() < until:
        time.sleep(0.02)


def tried(look: Callable[[], object]) -> str:
    """What it raises, if that is stretto's."""
    try:
        look()
    except stretto.CommunicationError as error:
        return str(error)
    return ""


def looks_at(model: torch.nn.Module) -> list[str]:
    looks: list[Callable[[], object]] = [
        lambda: model(torch.zeros(1, 64)),
        model.state_dict,
        lambda: copy.deepcopy(model),
        *[lambda one=one: one.sum() for one in model.parameters()],
        *[lambda one=one: one.detach() for one in model.parameters()],
        *[lambda one=one: one.data for one in model.parameters()],
    ]
    return [tried(look) for look in looks]


# kill -9


def train_until_it_fails(rank: int, tell: Tell, way: Way, deadly: Deadly | None = None) -> Any:
    """When and what was raised after how many steps, what can be seen of the model then, and what stays mapped."""
    if deadly is not None and rank == deadly.rank:
        deadly.set_up()
    model = sync = optimizer = None
    steps = 0
    try:
        model, sync, optimizer = build(way)
        tell("attached")
        while True:
            step(model, optimizer, rank)
            steps += 1
    except stretto.PeerError as error:
        told = time.monotonic(), str(error)
    looks = looks_at(model) if model is not None and optimizer is not None else []
    seen = fingerprint(model) if looks and not any(looks) else ""
    again = "never sharded"
    if optimizer is not None:  # where shares travel while forward goes on, it is there that their loss is known
        again = tried(optimizer.step) or looks_at(model)[0]
    if sync is not None:
        sync.detach()
        assert all(looks_at(model)) or not any(looks), "detaching does not mend it"
    del model, sync, optimizer
    for _ in range(2):
        gc.collect()
    return (*told, steps, looks, seen, again, own_mappings())


Seen = tuple[int, str]
"""After how many steps, and the fingerprint of the whole model that can be seen then, if one can."""


def check_survivors(way: Way, ranks: list[Rank], victim: int, killed: float) -> list[Seen]:
    """They know who died, soon, and see a whole model or none."""
    dead = f"rank {victim} (pid {ranks[victim].pid}) died without a word"
    seen_by_each, texts = [], []
    for number, rank in enumerate(ranks):
        if number == victim:
            assert rank.end() == -signal.SIGKILL
            continue
        found = rank.hear()
        raised, text, steps, looks, seen, again, mapped = rank.hear() if found == "attached" else found
        assert dead in text or "(it was detached)" in text, text  # by the other one, which has learnt of it before
        texts.append(text)
        assert raised - killed < SOON, f"told late: {text}"
        assert again, "it steps on"
        if seen:
            assert not any(looks), (number, steps, looks)
        else:
            assert all(SPOILED.fullmatch(look) or dead in look for look in looks), looks
        seen_by_each.append((steps, seen))
        if way.transport != "hosts":  # what goes on between two that live keeps their group, and the memory it sums
            assert mapped == 0, (number, mapped)
        assert rank.end() == 0
        assert rank.complaints.read_text() == ""
    assert any(dead in text for text in texts), texts
    return seen_by_each


def check_models(folder: str, way: Way, seen: list[Seen]) -> None:
    """Each is the one that ranks have after so many steps when nobody dies."""
    reference = references(folder, way, max(steps for steps, _ in seen))
    assert [one for one in seen if one[1] and one[1] != reference[one[0]]] == []


def references(folder: str, way: Way, steps: int) -> list[str]:
    ranks = fork_ranks(train_and_look, way.ranks, folder, way, steps)
    found = [rank.hear(60) for rank in ranks]
    assert [rank.end() for rank in ranks] == [0] * way.ranks
    assert found == [found[0]] * way.ranks
    return found[0]


def kill_at_random_points(folder: str, way: Way, rounds: int) -> list[bool]:
    chance = random.Random(WAYS.index(way))
    seen: list[Seen] = []
    check = Later(lambda *how: seen.extend(check_survivors(way, *how)))
    for _ in range(rounds):
        ranks = fork_ranks(train_until_it_fails, way.ranks, folder, way)
        for rank in ranks:
            assert rank.hear() == "attached"
        victim = chance.randrange(way.ranks)
        time.sleep(chance.random() * 0.06)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        check(ranks, victim, time.monotonic())
    check.last()
    check_models(folder, way, seen)
    return [bool(model) for _, model in seen]


@ways
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_is_killed_at_random_points_of_training(tmp_path: Path, way: Way) -> None:
    seen = in_warm_process(kill_at_random_points, str(tmp_path), way, 25, timeout=380)
    assert any(seen)


@pytest.mark.alone  # other tests' ranks share memory too
def test_no_memory_stays_of_ranks_that_were_killed(tmp_path: Path) -> None:
    before = shmem()
    in_warm_process(kill_at_random_points, str(tmp_path), WAYS[0], 10)
    check_nothing_stayed(before, 10)


@dataclass(frozen=True)
class Place:
    """Where a rank kills itself, and who sees a model then: everybody, nobody, or it depends."""

    owner: type
    function: str
    numbers: tuple[int, ...]
    whole: bool | None


SHARED = {
    "before it comes to the first meeting": Place(Meetings, "meet_before", (1, 2, 5), True),
    "in its step": Place(Stretches, "take_gradients", (1, 2, 5), False),
    "before it comes to the second meeting": Place(Meetings, "meet", (3, 4, 5), False),
    "behind the second meeting": Place(Spread, "send", (1, 2, 6), None),
    "while parameters are laid out": Place(Layout, "fill", (1,), None),
    "while parameters are laid out again": Place(Layout, "fill", (2,), True),
    "before they lie there": Place(Layout, "adopt", (2,), False),  # the others go on, and step
    "before it looks for a new plan": Place(Succession, "lay_out_again", (1,), True),
    "before it says that it has come somewhere": Place(Host, "_say", tuple(range(30, 70, 2)), None),
}
APART = {
    "before its step": Place(Stretches, "take_gradients", (1, 2, 5), None),
    "before it sends what it has stepped": Place(Spread, "send", (1, 2, 5), None),
    "before it sends some of what it has stepped": Place(Spread, "_exchange", (1, 2, 3, 9, 10), None),
    "with some of what others have stepped": Place(Arrival, "finish", (1, 2, 3, 9), None),
    "while parameters are laid out again": Place(Layout, "fill", (2,), False),
}
HOSTS = {
    "in its step": Place(Stretches, "take_gradients", (1, 2, 5), False),
    "before it sends what it has stepped": Place(Spread, "send", (1, 2, 5), None),
    "before it sends some of what it has stepped": Place(Counterparts, "spread", (1, 2, 3, 9, 10), None),
    "before it puts some of what has come where its host sees it": Place(Courier, "_carry", (1, 2, 3, 9, 12), None),
    "before it says so": Place(Futex, "wake", (20, 31, 42), None),
    "with some of what others have stepped": Place(Arrival, "finish", (1, 2, 3, 9), None),
}


def kill_at(folder: str, way: Way, place: Place) -> None:
    found: list[Seen] = []

    def look(number: int, *how: Any) -> None:
        seen = check_survivors(way, *how)
        assert place.whole is None or [bool(model) for _, model in seen] == [place.whole] * (way.ranks - 1), (
            number,
            seen,
        )
        found.extend(seen)

    check = Later(look)
    assert callable(getattr(place.owner, place.function))
    for number in place.numbers:
        victim = number % way.ranks
        deadly = Deadly(victim, place.owner, place.function, number)
        ranks = fork_ranks(train_until_it_fails, way.ranks, folder, way, deadly)
        until = time.monotonic() + 20
        while os.waitid(os.P_PID, ranks[victim].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < until, f"rank {victim} has not come to {place.function} number {number}"
            time.sleep(0.001)
        check(number, ranks, victim, time.monotonic())
    check.last()
    check_models(folder, way, found)


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("place", SHARED)
def test_a_rank_is_killed_at_a_chosen_point(tmp_path: Path, place: str, keep_grads: bool) -> None:
    in_warm_process(kill_at, str(tmp_path), Way("shared_memory", keep_grads), SHARED[place])


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("place", APART)
def test_a_rank_without_shared_memory_is_killed(tmp_path: Path, place: str, keep_grads: bool) -> None:
    in_warm_process(kill_at, str(tmp_path), Way("process_group", keep_grads), APART[place])


@pytest.mark.parametrize("place", HOSTS)
def test_a_rank_of_several_hosts_is_killed(tmp_path: Path, place: str) -> None:
    in_warm_process(kill_at, str(tmp_path), Way("hosts", keep_grads=True), HOSTS[place], timeout=140)


# One rank fails, or is stopped, or does something else


class Failing(torch.optim.AdamW):
    """Raises on one rank, in one step; the probe of ``shard`` steps copies of it."""

    when: tuple[int, int] = (-1, -1)
    rank = calls = -1

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].numel() > 200:
            Failing.calls += 1
            if (Failing.rank, Failing.calls) == Failing.when:
                raise Failing.error
        return super().step(closure)

    error: BaseException = ValueError("no more numbers")


def fail_in_step(rank: int, tell: Tell, folder: str, way: Way, error: BaseException) -> Any:
    model, sync, optimizer = build(way)
    optimizer.unshard()
    Failing.rank, Failing.when, Failing.error = rank, (1, 12), error
    optimizer = stretto.shard(Failing(model.parameters()), sync, keep_grads=way.keep_grads)
    Failing.calls = 0
    began = time.monotonic()
    try:
        for _ in range(20):
            began = time.monotonic()
            step(model, optimizer, rank)
        model.state_dict()
    except BaseException as raised:
        text = f"{type(raised).__name__}: {raised}"
    took = time.monotonic() - began
    stay(folder, rank, 3)
    return (
        took,
        text,
        looks_at(model),
        tried(optimizer.step),
        tried(optimizer.state_dict),
    )


def ranks_of_which_one_fails(folder: str, way: Way, error: BaseException) -> list[Any]:
    ranks = fork_ranks(fail_in_step, 3, folder, folder, way, error)
    return [(*rank.hear(), rank.end()) for rank in ranks]


def said_by(rank: int, number: int) -> str:
    return (
        f"rank {rank}, pass {number}: a step of the optimizer has failed, so the model may be stepped in part.\n"
        "Start again from the last checkpoint, on all ranks."
    )


def fail_behind_new_memory(rank: int, tell: Tell, way: Way) -> Any:
    model, _, optimizer = build(way)
    plans = set[str]()
    real = Division._by_piece

    def by_piece(self: Division, states: Any) -> Any:
        if rank == 1:
            raise MemoryError("no room for the state")
        return real(self, states)

    Division._by_piece = by_piece  # type: ignore[method-assign]
    while True:
        before = fingerprint(model)
        try:
            step(model, optimizer, rank)
        except (MemoryError, stretto.CommunicationError) as error:
            plans.add(str(error))
            break
    time.sleep(1.5)  # the others step meanwhile
    looks = looks_at(model)
    return plans.pop(), looks, not any(looks) and fingerprint(model) == before, tried(optimizer.step)


def ranks_of_which_one_has_no_room(folder: str, way: Way) -> list[Any]:
    ranks = fork_ranks(fail_behind_new_memory, 3, folder, way)
    return [(rank.hear(), rank.end()) for rank in ranks]


def test_a_rank_that_cannot_follow_a_new_plan_sees_nothing_of_what_the_others_step(tmp_path: Path) -> None:
    found = in_warm_process(ranks_of_which_one_has_no_room, str(tmp_path), Way("shared_memory", True))
    for rank, ((text, looks, is_whole, again), code) in enumerate(found):
        assert "no room for the state" in text and code == 0
        assert is_whole if rank == 1 else all(looks), (rank, looks)
        assert ("the model is whole" in again) == (rank == 1)


@ways
@pytest.mark.parametrize("error", [ValueError("no more numbers"), KeyboardInterrupt()], ids=["fails", "ctrl-c"])
def test_a_step_that_fails_on_one_rank_is_told_to_all(tmp_path: Path, way: Way, error: BaseException) -> None:
    found = in_warm_process(ranks_of_which_one_fails, str(tmp_path), way, error)
    own = f"{type(error).__name__}: {error}"
    for rank, (took, text, looks, again, state, code) in enumerate(found):
        assert took < 3.5 and code == 0, (rank, took)
        assert {*looks} <= {said_by(rank, 12), said_by(rank, 13)}, (rank, looks)
        assert (
            again
            == state
            == (
                f"rank {rank}, shard: a step of this optimizer has failed, so the model may be stepped in part.\n"
                "Start again from the last checkpoint."
            )
        )
        if rank == 1:
            assert text == own
        else:
            assert re.sub(r"pass \d+: rank", "pass N: rank", re.sub(r"\.py:\d+", ".py:LINE", text)) == (
                f"PeerError: rank {rank}, pass N: rank 1 failed and left, so nobody can complete this call.\n"
                f"  rank 1, pass 12, step: {own.removesuffix(': ')} (test_shard_faults.py:LINE in step)\n"
                "Remove the cause and start again, on all ranks."
            )


def stop_before_the_step(rank: int, tell: Tell, way: Way) -> Any:
    """Ctrl-C on rank 1, behind all that can be refused."""
    model, _, optimizer = build(way)
    step(model, optimizer, rank)
    backward(model, optimizer, rank)
    before, began = fingerprint(model), time.monotonic()

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    if rank == 1:
        Writings.found = stop  # type: ignore[method-assign]
    try:
        optimizer.step()
        fingerprint(model)  # waits for what others have stepped
    except KeyboardInterrupt:
        time.sleep(1.5)
        return "stopped", tried(lambda: fingerprint(model)) == "" and fingerprint(model) == before, 0.0
    except stretto.PeerError as error:
        return str(error), False, time.monotonic() - began
    return "stepped", False, 0.0


def ranks_of_which_one_is_stopped(folder: str, way: Way) -> list[Any]:
    ranks = fork_ranks(stop_before_the_step, 3, folder, way)
    return [(*rank.hear(), rank.end()) for rank in ranks]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_ctrl_c_right_before_the_step_is_told(tmp_path: Path, transport: str) -> None:
    """Over a process group, where no meeting comes before it, the others waited for that rank's share for ever."""
    found = in_warm_process(ranks_of_which_one_is_stopped, str(tmp_path), Way(transport, True))
    for rank, (said, is_whole, took, code) in enumerate(found):
        assert code == 0 and took < 3.5
        if rank == 1:
            assert said == "stopped" and is_whole == (transport == "process_group")
        else:
            assert "rank 1, pass 2, step: KeyboardInterrupt" in said


def fail_about_the_state(rank: int, tell: Tell, way: Way, call: str) -> Any:
    model, _, optimizer = build(way)
    for _ in range(3):
        step(model, optimizer, rank)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state)
    calls = 0

    def no_room(flat: torch.Tensor, spec: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no room for the state")
        return shaped(flat, spec)

    def no_room_at_all(*_: Any) -> Any:
        raise MemoryError("no room for the state")

    if rank == 1 and call == "load_state_dict":
        Division._by_piece = no_room_at_all  # type: ignore[method-assign]
    elif rank == 1:
        stretto.sharding.keeping.shaped = no_room  # type: ignore[attr-defined]
    try:
        told = tried(lambda: getattr(optimizer, call)(*state[: call == "load_state_dict"]))
    except MemoryError as error:
        told = f"{error}"
    return told, tried(lambda: step(model, optimizer, rank))


def ranks_of_which_one_has_no_room_for_the_state(folder: str, way: Way, call: str) -> list[Any]:
    ranks = fork_ranks(fail_about_the_state, 3, folder, way, call)
    return [(*rank.hear(), rank.end()) for rank in ranks]


@pytest.mark.parametrize("way", WAYS[::2], ids=lambda way: way.transport)
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict", "unshard"])
def test_a_rank_that_fails_amid_the_state_tells_the_others(tmp_path: Path, way: Way, call: str) -> None:
    """They met another message of it (over Gloo that ended their process), or stepped with what it had not loaded."""
    found = in_warm_process(ranks_of_which_one_has_no_room_for_the_state, str(tmp_path), way, call)
    assert [code for *_, code in found] == [0, 0, 0]
    for rank, (told, again, _) in enumerate(found):
        if rank == 1:
            assert told == "no room for the state"
        said = again if rank == 1 or call == "load_state_dict" else told
        assert "rank 1 failed and left" in said or rank == 1, (rank, said)
        assert "MemoryError: no room for the state" in said, (rank, said)


def step_on_some(rank: int, tell: Tell, folder: str, way: Way) -> Any:
    model, _, optimizer = build(way)
    for _ in range(5):
        step(model, optimizer, rank)
    began = time.monotonic()
    try:
        for number in range(3):
            backward(model, optimizer, rank)
            if rank != 1 or number:
                optimizer.step()
        model.state_dict()
    except stretto.CommunicationError as error:
        text = str(error)
    took = time.monotonic() - began
    stay(folder, rank, 2)
    return took, text


def ranks_of_which_one_does_not_step(folder: str, way: Way) -> list[Any]:
    ranks = fork_ranks(step_on_some, 2, folder, folder, way)
    return [(*rank.hear(30), rank.end()) for rank in ranks]


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_rank_that_does_not_step_is_named(tmp_path: Path, keep_grads: bool) -> None:
    way = Way("shared_memory", keep_grads)
    for rank, (took, text, code) in enumerate(in_warm_process(ranks_of_which_one_does_not_step, str(tmp_path), way)):
        called = "optimizer.step()", f"{'mean' if keep_grads else 'share'} float32 of 5761 elements"
        here = r"test_shard_faults\.py:\d+ in \w+"
        assert re.sub(f"rank {rank} waits at {here}; rank {1 - rank} .* at {here}", "PLACES", text) == (
            f"rank {rank}, pass {6 + rank}: rank {1 - rank} called {called[1 - rank]}, rank {rank} {called[rank]}.\n"
            "PLACES.\n"
            "All ranks must make the same calls in the same order. Look for a call that only some of them make, as "
            "under `if rank == 0` or after a `continue` or a `break`: attach(), shard(), backward, "
            "optimizer.step(), clip_grad_norm_(), check(), report(), trace(), state_dict(), load_state_dict(), "
            "unshard(), stretto.reduce()."
        )
        assert took < 5 and code == 0


def leave_out_a_step_on_one_host(rank: int, tell: Tell, folder: str, sizes: tuple[int, ...], keep_grads: bool) -> str:
    stretto.inquiry.ASK_SECONDS = 0.3
    model = Scrambled()
    transport = choose(SeparateHosts(ProcessGroupTransport(), sizes), "auto")
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.02, last_bucket_cap_mb=0.01)
    optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync, keep_grads=keep_grads)
    for _ in range(5):
        step(model, optimizer, rank)
    try:
        for number in range(3):
            backward(model, optimizer, rank)
            if rank < sizes[0] or number:
                optimizer.step()
        model.state_dict()
    except stretto.PeerError as error:
        text = str(error)
    tell(text)
    stay(folder, rank, sum(sizes))
    return text


def ranks_of_hosts_of_which_one_does_not_step(folder: str, sizes: tuple[int, ...], keep_grads: bool) -> list[str]:
    ranks = fork_ranks(leave_out_a_step_on_one_host, sum(sizes), folder, folder, sizes, keep_grads)
    found = [rank.hear(20) for rank in ranks]
    for rank in ranks:
        rank.hear()
        assert rank.end() == 0
        assert "terminate called" not in rank.complaints.read_text()
    return found


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_a_host_that_begins_a_pass_where_others_step_is_named(
    tmp_path: Path, sizes: tuple[int, ...], keep_grads: bool
) -> None:
    """No rank beside it on its host tells that; and gradients met the numbers with which ranks come to a step."""
    found = in_warm_process(ranks_of_hosts_of_which_one_does_not_step, str(tmp_path), sizes, keep_grads)
    apart = re.compile(
        r"ranks are out of step, so nobody can complete this\.(?:.|\n)*"
        r"7 passes and 5 steps of sharded optimizers.*6 passes and 6 steps of sharded optimizers"
        r"|6 passes and 6 steps of sharded optimizers.*7 passes and 5 steps of sharded optimizers"
    )
    for rank, text in enumerate(found):
        assert text.startswith(f"rank {rank}, pass {6 if rank < sizes[0] else 7}: "), text
        assert apart.search(text), text


def go_another_way(rank: int, tell: Tell, folder: str, instead: str) -> Any:
    stretto.inquiry.ASK_SECONDS = 0.3
    model, sync, optimizer = build(Way("process_group", keep_grads=instead != "clip_grad_norm_"))
    for _ in range(5):
        step(model, optimizer, rank)
    try:
        for number in range(3):
            backward(model, optimizer, rank)
            if rank == 1 and not number and instead == "evaluation":
                until = time.monotonic() + 20
                while not any(path.read_text() for path in Path(folder).glob("*.0")) and time.monotonic() < until:
                    time.sleep(0.01)
            if rank == 1 and not number and instead == "state_dict":
                optimizer.state_dict()
            if rank == 1 and not number and instead == "clip_grad_norm_":
                sync.clip_grad_norm_(1.0)
            if rank == 0 or number or instead == "evaluation":
                optimizer.step()
        model.state_dict()
    except stretto.PeerError as error:
        tell(("raised", re.sub(r"\.py:\d+", ".py:LINE", str(error))))
    else:
        tell(("", fingerprint(model)))
    stay(folder, rank, 2)
    dist.destroy_process_group()  # what Gloo has under way will not end while the other one lives
    tell("let go")


def ranks_that_go_apart(folder: str, instead: str) -> Any:
    ranks = fork_ranks(go_another_way, 2, folder, folder, instead)
    found = [rank.hear(15) for rank in ranks]
    assert [rank.hear(10) for rank in ranks] == ["let go", "let go"]
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        rank.end()
    return found, ranks[0].complaints.read_text()


@pytest.mark.parametrize(
    ("instead", "here", "there"),
    [
        ("backward", "6 passes and 6 steps of sharded optimizers", "7 passes and 5 steps of sharded optimizers"),
        (
            "state_dict",
            "6 passes and 6 steps of sharded optimizers",
            "6 passes and 5 steps of sharded optimizers and 1 other call more",
        ),
        (
            "clip_grad_norm_",
            "6 passes and 6 steps of sharded optimizers",
            "6 passes and 5 steps of sharded optimizers and 1 other call more",
        ),
    ],
)
def test_a_rank_that_goes_another_way_is_named_where_nothing_is_shared(
    tmp_path: Path, instead: str, here: str, there: str
) -> None:
    """Long before the collective would run out of time. It knows by itself, or by the other one."""
    found, _ = in_warm_process(ranks_that_go_apart, str(tmp_path), instead)
    begin, place = r"ranks are out of step, so nobody can complete this\.\n", r"test_shard_faults\.py:LINE in \w+"
    advice = (
        "All ranks must make the same calls in the same order. Look for a call that only some of them make, as "
        "under `if rank == 0` or after a `continue` or a `break`: attach(), shard(), backward, optimizer.step(), "
        "clip_grad_norm_(), check(), report(), trace(), state_dict(), load_state_dict(), unshard(), "
        "stretto.reduce()."
    )
    last = rf"\.\n{re.escape(advice)}\nSo far "
    own = (
        rf"{begin}rank 0 waits .*at {place}; rank 1 .* at {place}{last}rank 1 has begun {there}, this rank {here}\.",
        rf"{begin}rank 1 waits .*at {place}; rank 0 .* at {place}{last}rank 0 has begun {here}, this rank {there}\.",
    )
    for rank, (raised, text) in enumerate(found):
        where = f"rank {rank}, pass {7 if rank and instead == 'backward' else 6}: "
        assert raised and text.startswith(where), text
        assert re.fullmatch(where + own[rank], text) or ("failed and left" in text and re.search(own[1 - rank], text))


def test_a_rank_that_evaluates_before_its_step_is_waited_for_aloud(tmp_path: Path) -> None:
    found, complaint = in_warm_process(ranks_that_go_apart, str(tmp_path), "evaluation")
    assert not found[0][0] and found[0] == found[1]
    place = r"test_shard_faults\.py:\d+ in (go_another_way|<genexpr>)\.\n"
    assert re.search(rf"rank 1 has begun 6 passes and is at {place}", complaint)


def go_apart(rank: int, tell: Tell, folder: str, asks: int | None) -> None:
    """Rank ``asks`` finds out, or else Ctrl-C reaches both before anybody does."""
    stretto.inquiry.ASK_SECONDS = 0.3 if rank == asks else 60.0
    model, _, optimizer = build(Way("process_group", keep_grads=True))
    for _ in range(5):
        step(model, optimizer, rank)

    def backward() -> None:
        model(torch.full((4, 64), 1.0 + rank)).square().mean().backward()

    def interrupt() -> None:
        while "in _comes\n" not in "".join(traceback.format_stack(sys._current_frames()[main])):
            time.sleep(0.01)
        Path(folder, f"waits{rank}").touch()
        while not Path(folder, f"waits{1 - rank}").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    main = threading.main_thread().ident
    backward()
    if asks is None:
        threading.Thread(target=interrupt, daemon=True).start()
    try:
        if rank == 0:
            optimizer.step()
        backward()
    except (stretto.PeerError, KeyboardInterrupt) as error:
        tell((type(error).__name__, str(error)))
    left = [name for name, one in model.named_parameters() if rank and one.grad is not None]
    try:
        backward()
    except stretto.CommunicationError as error:
        tell((left, str(error)))
    dist.destroy_process_group()
    tell("let go")
    signal.pause()


def ranks_that_have_gone_apart(folder: str, asks: int | None) -> Any:
    ranks = fork_ranks(go_apart, 2, folder, folder, asks)
    found = [[rank.hear(20) for _ in range(2)] for rank in ranks]
    assert [rank.hear(10) for rank in ranks] == ["let go", "let go"]  # and both live
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        rank.end()
    return found


@pytest.mark.parametrize("asks", [0, 1, None], ids=["told by the other", "found out", "Ctrl-C"])
def test_ranks_that_have_gone_apart_let_go_of_their_group_and_begin_no_pass(tmp_path: Path, asks: int | None) -> None:
    """One has sums under way in its buckets, which nobody completes while the other lives."""
    found = in_warm_process(ranks_that_have_gone_apart, str(tmp_path), asks)
    wanted = "KeyboardInterrupt" if asks is None else "PeerError"
    assert [kind for (kind, _), _ in found] == [wanted, wanted]
    (_, text), (left, then) = found[1]
    if asks == 0:
        assert "failed and left" in text and "  rank 0, pass 6, waiting: PeerError: " in then
        return
    assert not left, "gradients lie where a sum is under way"
    assert then == (
        "rank 1, pass 7: this rank has failed and left, so it has lost its place among the others.\n"
        f"  {': '.join(filter(None, [wanted, text]))}\nRemove the cause and start again, on all ranks."
    )


# Children, and ends of all kinds


def private_parameters(rank: int, tell: Tell, way: Way, ended: bool) -> Any:
    """What a child writes, and what its parent has then. Of an earlier layout some parameters are still there."""
    model, sync, optimizer = build(way)
    held = [parameter.data for parameter in model.parameters()]
    for _ in range(3):
        step(model, optimizer, rank)
    values = [one.clone() for one in (*held, *model.state_dict().values())]
    sync.check()
    if ended and rank == 0:
        tell("ready")
        time.sleep(60)
    if ended:
        tell("ready")
        until = time.monotonic() + 20
        while sync._transport.dead() == [] and time.monotonic() < until:
            time.sleep(0.01)
    here, there = os.pipe()
    if not (pid := os.fork()):
        told = "nothing was raised"
        try:
            with torch.no_grad():
                for one in (*held, *model.parameters()):
                    one.fill_(17.0)
            grandchild = os.fork()
            if not grandchild:
                os._exit(int(not all(bool((one == 17.0).all()) for one in (*held, *model.parameters()))))
            assert os.waitpid(grandchild, 0)[1] == 0
            optimizer.step()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(there, told.encode())
        os._exit(0)
    os.close(there)
    told = os.read(here, 10_000).decode()
    os.waitpid(pid, 0)
    now = [*held, *model.state_dict().values()]
    same = all(torch.equal(one, other) for one, other in zip(values, now, strict=True))
    if not ended:
        step(model, optimizer, rank)
        sync.check()
        sync.detach()
        sync.detach()
    return told.replace(str(os.getpid()), "PID"), same


def ranks_that_fork(folder: str, way: Way, ended: bool) -> list[Any]:
    ranks = fork_ranks(private_parameters, 3, folder, way, ended)
    if not ended:
        return [(*rank.hear(), rank.end()) for rank in ranks]
    for rank in ranks:
        assert rank.hear() == "ready"
    os.kill(ranks[0].pid, signal.SIGKILL)
    assert ranks[0].end() == -signal.SIGKILL
    return [(*rank.hear(), rank.end()) for rank in ranks[1:]]


@pytest.mark.parametrize(("way", "ended"), [*((way, False) for way in WAYS), (WAYS[0], True)])
def test_a_child_writes_into_parameters_of_its_own(tmp_path: Path, way: Way, ended: bool) -> None:
    for rank, (told, same, code) in enumerate(in_warm_process(ranks_that_fork, str(tmp_path), way, ended), ended):
        assert same and code == 0, (rank, told)
        assert told == (
            f"CommunicationError: rank {rank}: this process was forked from process PID, and only that process can "
            "reduce.\n"
            "Call detach() in the child before it trains there, or fork before stretto.attach(model)."
        )


PROGRAM = """
{first}
import gc, sys, time, torch, torch.distributed as dist, stretto
sys.path.insert(0, {folder!r})
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(30, 300), torch.nn.Linear(300, 30))
sync = stretto.attach(model, transport={transport!r})
optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync, keep_grads={keep_grads!r})
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
{last}
"""
HOLDS_LOCK = "import atexit, ctypes; atexit.register(ctypes.PyDLL(None).sleep, 2)"
"""Called last at exit, it goes over into the interpreter's end without ever giving the interpreter's lock away."""
ENDS = {
    "just so": "",
    "with an exception": "raise SystemExit(3)",
    "detached twice": "sync.detach(); sync.detach()",
    "without its model": "del model, sync, optimizer",
    "long before the other": """
model(torch.ones(2, 30)).sum().backward()
time.sleep(rank)
optimizer.step()
del model, sync, optimizer
gc.collect()
""",
    "with a tidy end": "sync.detach(); dist.barrier(); dist.destroy_process_group()",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=lambda way: way.transport)
@pytest.mark.parametrize("end", ENDS)
def test_programs_end(tmp_path: Path, way: Way, end: str) -> None:
    """With shares under way, or not; with a process group, or not."""
    text = PROGRAM.format(
        folder=str(tmp_path),
        store=str(tmp_path / "store"),
        transport=way.transport,
        keep_grads=way.keep_grads,
        first=HOLDS_LOCK if end == "long before the other" else "",
        last=ENDS[end],
    )
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    programs: list[Any]
    if end == "long before the other":  # what comes before the import of torch needs a real start
        line, to_read = [sys.executable, "-c", text], {"stderr": subprocess.PIPE, "text": True, "env": environment}
        programs = [subprocess.Popen([*line, str(rank)], **to_read) for rank in range(2)]  # type: ignore[call-overload]
    else:
        programs = [warm_programs.start(["-c", text, rank], environment, to_the_end=True) for rank in range(2)]
    try:
        for program in programs:
            complaints = program.communicate(timeout=60)[1]
            assert "terminate called" not in complaints and "Traceback" not in complaints, complaints
            assert program.returncode == (3 if "exception" in end else 0), complaints
    finally:
        for program in programs:
            program.kill()


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_rank_that_waits_at_its_end_says_for_what(tmp_path: Path, interrupted: bool) -> None:
    text = PROGRAM.format(
        folder=str(tmp_path),
        store=str(tmp_path / "store"),
        transport="process_group",
        keep_grads=True,
        first="",
        last="model(torch.ones(2, 30)).sum().backward()\n"
        f"time.sleep({60 if interrupted else 7} * rank)\n"
        "optimizer.step()",
    )
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    one, other = programs = [warm_programs.start(["-c", text, rank], environment, to_the_end=True) for rank in range(2)]
    try:
        until = time.monotonic() + 60
        while one.complaint().count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
        told = (
            "stretto: rank 0: the model was dropped, or the program ends, while parameters of its last step are on "
            "their way, and they have not arrived within 5 s. Another rank has not taken that step, or hangs: look "
            "there. This rank waits until its process group times out (1800 s), or for Ctrl-C.\n"
            "To drop the model before the others do, call detach() on the handle after a step that all ranks have "
            "taken.\n"
        )
        assert one.complaint() == told
        if interrupted:
            os.kill(one.pid, signal.SIGINT)
            assert "KeyboardInterrupt" in one.communicate(timeout=30)[1]
            assert other.returncode is None and not other.complaint()
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0)
            return
        assert [program.communicate(timeout=60)[1] for program in programs] == [told, ""]
        assert [program.returncode for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.kill()
