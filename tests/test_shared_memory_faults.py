"""Ranks that die, fork, are stopped or have no memory, while they share it. Each rank is a process."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from warm import Rank, fork_ranks, in_warm_process

import stretto
from stretto.beside import Beside
from stretto.launch import LaunchQueue
from stretto.replanning import Replanning
from stretto.transport import memory, shared_memory, sums
from stretto.transport.host import Host

attach = sys.modules["stretto.attach"]  # the package has a function of that name
transport_choose = sys.modules["stretto.transport.choose"]
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]
Tell = Callable[[Any], None]
SOON = 2.0
"""Seconds within which a death is known."""


def model_and_handle() -> tuple[torch.nn.Module, stretto.Synchronizer]:
    """Messages of both kinds: large ones, and small ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 64))
    sync = stretto.attach(model, transport="shared_memory", bucket_cap_mb=0.02, last_bucket_cap_mb=0.01)
    return model, sync


def step(model: torch.nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.full((4, 64), 1.0 + rank)).sum().backward()


def shmem() -> int:
    """Bytes of shared memory of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) * 1024


def check_nothing_stayed(before: int, rounds: int) -> None:
    """Of what ranks had in so many rounds. The machine's other programs have some of it too, for a time."""
    until = time.monotonic() + 10
    while shmem() - before >= rounds * memory.CHUNK_BYTES:
        assert time.monotonic() < until, "some of the memory has stayed"
        time.sleep(0.1)


def own_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:stretto")


# kill -9


@dataclass(frozen=True)
class Deadly:
    """A call, of all calls of this function, at which a rank kills itself."""

    rank: int
    owner: type | ModuleType
    function: str
    number: int

    def set_up(self) -> None:
        original, calls = getattr(self.owner, self.function), itertools.count(1)

        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == self.number:
                time.sleep(0.05)  # a file store with half a record, of this rank's thread, would answer nobody any more
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(self.owner, self.function, call)


def train_until_it_fails(rank: int, tell: Tell, deadly: Deadly | None = None) -> Any:
    """When and what was raised; and how much shared memory is still mapped when the handle is gone."""
    if deadly is not None and rank == deadly.rank:
        deadly.set_up()
    model = sync = None
    try:
        model, sync = model_and_handle()
        tell("attached")
        for _ in range(10_000):
            step(model, rank)
    except stretto.PeerError as error:
        told = time.monotonic(), str(error)
    del model, sync
    for _ in range(
        2
    ):  # the exception goes first: through autograd's graph, which the collector cannot see, it held all
        gc.collect()
    return (*told, own_mappings())


class Later:
    """Calls ``check`` with what it is given when it is given more: survivors find out meanwhile, others start."""

    def __init__(self, check: Callable[..., object]) -> None:
        self._check = check
        self._waits: list[tuple[Any, ...]] = []

    def __call__(self, *how: Any) -> None:
        self._waits.append(how)
        if len(self._waits) > 1:
            self._check(*self._waits.pop(0))

    def last(self) -> None:
        """What is left."""
        while self._waits:
            self._check(*self._waits.pop(0))


def outcome(rank: Rank) -> tuple[float, str, int]:
    """What ``train_until_it_fails`` returned."""
    found = rank.hear()
    return rank.hear() if found == "attached" else found


def check_survivors(ranks: list[Rank], victim: int, killed: float) -> None:
    """They know who died, soon; nothing is left of anybody."""
    dead = f"rank {victim} (pid {ranks[victim].pid}) died without a word"
    for number, rank in enumerate(ranks):
        if number == victim:
            assert rank.end() == -signal.SIGKILL
            continue
        raised, text, mapped = outcome(rank)
        assert dead in text, text
        assert raised - killed < SOON, f"told late: {text}"
        assert mapped == 0, (number, mapped)
        assert rank.end() == 0
        assert rank.complaints.read_text() == ""


def kill_at_random_points(folder: str, rounds: int) -> None:
    chance = random.Random(0)
    check = Later(check_survivors)
    for _ in range(rounds):
        ranks = fork_ranks(train_until_it_fails, 3, folder)
        for rank in ranks:
            assert rank.hear() == "attached"
        victim = chance.randrange(3)
        time.sleep(chance.random() * 0.03)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        check(ranks, victim, time.monotonic())
    check.last()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_is_killed_at_a_hundred_random_points_of_training(tmp_path: Path) -> None:
    in_warm_process(kill_at_random_points, str(tmp_path), 100, timeout=180)


@pytest.mark.alone  # other tests' ranks share memory too
def test_no_memory_stays_of_ranks_that_were_killed(tmp_path: Path) -> None:
    before = shmem()
    in_warm_process(kill_at_random_points, str(tmp_path), 10)
    check_nothing_stayed(before, 10)


PLACES = {
    "before it says that it has published, or finished": (Host, "_say", [*range(1, 24), 60, 61, 62, 63]),
    "while it sums": (sums.Block, "add_up", [1, 2, 7]),
    "between two blocks of a sum": (shared_memory.SumOfSlices, "begin", [1, 2]),
    "before it reads a small message": (shared_memory.SumForAll, "begin", [1, 2, 9]),
    "while it takes memory": (memory, "create", [2]),
    "while ranks compare what they have": (attach, "agree", [1]),
    "before rank 0's values": (attach, "broadcast_coalesced", [1]),
    "before the first pass": (LaunchQueue, "adopt", [1]),
    "before a plan is cut": (Replanning, "follow_order", [1]),
    "with a plan that is not in use yet": (LaunchQueue, "adopt", [2]),
    "before buffers are sent": (Beside, "_send_buffers", [1, 2]),
    "before it waits": (Host, "wait", [1, 2, 12]),
    "before ranks have met": (transport_choose, "_exchange_offers", [1, 1]),
    "while ranks tell whether they see each other": (transport_choose, "_open", [1]),
}


def kill_at(folder: str, place: str) -> None:
    owner, function, numbers = PLACES[place]
    assert callable(getattr(owner, function))
    check = Later(check_survivors)
    for number in numbers:
        victim = number % 3
        ranks = fork_ranks(train_until_it_fails, 3, folder, Deadly(victim, owner, function, number))
        until = time.monotonic() + 20
        while os.waitid(os.P_PID, ranks[victim].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < until, f"rank {victim} has not come to {function} number {number}"
            time.sleep(0.001)
        check(ranks, victim, time.monotonic())
    check.last()


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed_at_a_chosen_point(tmp_path: Path, place: str) -> None:
    """Attaching, the first pass and its plan, and later ones."""
    in_warm_process(kill_at, str(tmp_path), place)


def attach_beside_a_dead_rank(rank: int, tell: Tell) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(stretto.CommunicationError) as caught:
        model_and_handle()
    return str(caught.value)


def ranks_of_which_one_never_attaches(folder: str) -> list[str]:
    ranks = fork_ranks(attach_beside_a_dead_rank, 3, folder)
    return [ranks[rank].hear() for rank in (0, 2)]


def test_a_rank_that_was_killed_before_it_attached_is_one_that_did_not_come(tmp_path: Path) -> None:
    """It has told nobody its pid; whoever waits says where everybody is, beside the transport's own words."""
    for rank, text in zip((0, 2), in_warm_process(ranks_of_which_one_never_attaches, str(tmp_path)), strict=True):
        first, places, expected = text.splitlines()
        assert first.startswith(
            f"rank {rank}, attach: what ranks hold could not be gathered over process_group (gloo): "
        )
        assert places.startswith(f"rank {rank} waits in attach() at test_shared_memory_faults.py:")
        assert "; rank 1 has not come here so far" in places
        assert expected == (
            "Expected every rank to call stretto.attach. Look at the first error in the other ranks' logs."
        )


# A backward that fails, on a rank that then does not come back for a while


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.fail = fail
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fail:
            raise ValueError("bad label")
        return gradient, None


def fail_and_sleep(rank: int, tell: Tell, late: float) -> Any:
    model, _ = model_and_handle()
    step(model, rank)
    x = torch.full((4, 64), 1.0 + rank)
    began = time.monotonic()
    if rank == 0:
        time.sleep(late)
    model.zero_grad()
    try:
        hidden = Fails.apply(model[0](x), rank == 1)
        model[2](model[1](hidden)).sum().backward()
    except (ValueError, stretto.PeerError) as error:
        took, text = time.monotonic() - began, f"{type(error).__name__}: {error}"
    time.sleep(max(0.0, began + late + 3 - time.monotonic()))  # on all ranks: nobody is to complain of waiting
    step(model, rank)
    return took, text, sum(p.grad.sum().item() for p in model.parameters())


def ranks_of_which_one_fails(folder: str, late: float) -> list[Any]:
    ranks = fork_ranks(fail_and_sleep, 3, folder, late)
    return [(*rank.hear(), rank.end(), rank.complaints.read_text()) for rank in ranks]


@pytest.mark.parametrize("late", [0.0, 1.5])
def test_the_others_do_not_wait_for_a_rank_that_deals_with_its_failure(tmp_path: Path, late: float) -> None:
    found = in_warm_process(ranks_of_which_one_fails, str(tmp_path), late)
    for rank, (took, text, total, code, complaint) in enumerate(found):
        assert (code, complaint, total) == (0, "", found[0][2])
        if rank == 1:
            assert text == "ValueError: bad label" and took < late + 2
        else:
            assert took < late + 2.5, text
            assert re.sub(r"\.py:\d+", ".py:LINE", text) == (
                f"PeerError: rank {rank}, pass 2: backward failed on rank 1, so the mean of this pass lacks gradients."
                "\n  rank 1, pass 2, backward: ValueError: bad label (test_shared_memory_faults.py:LINE in backward)\n"
                "Do not step with these gradients: zero_grad() and go on, on all ranks."
            )
