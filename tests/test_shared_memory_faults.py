"""Ranks that die, fork, are stopped or have no memory, while they share it. Each rank is a process."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Rank, fork_ranks, in_warm_process

import stretto
from stretto.transport import memory

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
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("Shmem:")) * 1024


def own_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:stretto")


# kill -9


def train_until_it_fails(rank: int, tell: Tell, prepare: Callable[[int], None] | None = None) -> Any:
    """When and what was raised; and how much shared memory is still mapped when the handle is gone."""
    if prepare is not None:
        prepare(rank)
    try:
        model, sync = model_and_handle()
        tell("attached")
        for _ in range(10_000):
            step(model, rank)
    except stretto.PeerError as error:
        told = time.monotonic(), str(error)
    model = sync = None
    gc.collect()
    return (*told, own_mappings())


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
        assert raised - killed < SOON, text
        assert mapped == 0, (number, mapped)
        assert rank.end() == 0
        assert rank.complaints.read_text() == ""


def kill_at_random_points(folder: str, rounds: int) -> None:
    chance = random.Random(0)
    before = shmem()
    for _ in range(rounds):
        ranks = fork_ranks(train_until_it_fails, 3, folder)
        for rank in ranks:
            assert rank.hear() == "attached"
        victim = chance.randrange(3)
        time.sleep(chance.random() * 0.03)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        check_survivors(ranks, victim, time.monotonic())
    assert shmem() - before < rounds * memory.CHUNK_BYTES, "some of the memory has stayed"


@pytest.mark.slow
def test_a_rank_is_killed_at_a_hundred_random_points_of_training(tmp_path: Path) -> None:
    in_warm_process(kill_at_random_points, str(tmp_path), 100)
