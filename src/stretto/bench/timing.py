"""Paired, interleaved timing: contestants take turns, in an order that all ranks share and that changes every round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import SetupError
from ..terminal import progress

FEWEST = 5
"""The least number of rounds, however long they take, unless fewer are asked for."""


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of some times or ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def show(self, unit: float = 1.0, digits: int = 2) -> str:
        """``1.08 [1.07 .. 1.10]``, in multiples of ``unit``."""
        low, median, high = (f"{value / unit:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} [{low} .. {high}]"


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 30
    """The most rounds; in each all contestants run once."""
    seconds: float = 30.0
    """If the rounds would take longer than this, judged by warm-up, fewer are run, but at least five."""
    block: float = 0.05
    """Seconds: a contestant trains so many steps at a time, since ranks that start together are not what training
    looks like."""
    warm_up: int = 3
    """Rounds before these, not counted."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or min(self.seconds, self.block) <= 0:
            raise SetupError(
                f"rounds={self.rounds}, seconds={self.seconds:g} and block={self.block:g} must be positive"
            )


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 5,
    *,
    title: str = "",
    seconds: float = float("inf"),
    watched: bool = True,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. Collective where a process group is initialised.

    Args:
        contestants: what is run, by name; the same names on all ranks.
        rounds: how many, or fewer if they would take more than ``seconds``.
        warm_up: rounds before these.
        title: beside the progress bar.
        seconds: for all rounds except those of warm-up, which tell how long one takes; without warm-up, all are run.
        watched: whether rank 0 draws a bar.
    """
    shuffle = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    first = not dist.is_initialized() or dist.get_rank() == 0
    with progress(title, rounds + warm_up, wanted=watched and first) as done:
        began = time.perf_counter()
        for number in range(warm_up):
            _round(contestants, shuffle)
            done(number + 1)
        if warm_up and seconds < float("inf"):
            took = (time.perf_counter() - began) / warm_up
            rounds = _alike(min(rounds, max(FEWEST, int(min(rounds, seconds / took)))))
        for number in range(rounds):
            for name, spent in _round(contestants, shuffle).items():
                found[name].append(spent)
            done(warm_up + number + 1)
    return found


def _round(contestants: Mapping[str, Callable[[], object]], shuffle: random.Random) -> dict[str, float]:
    names, spent = list(contestants), {}
    shuffle.shuffle(names)
    for name in names:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        contestants[name]()
        spent[name] = time.perf_counter() - start
    return spent


def _alike(number: int) -> int:
    """Rank 0's number, on all ranks."""
    if not dist.is_initialized():
        return number
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told)


def steps_in(seconds: float, once: Callable[[], object]) -> int:
    """How often ``once`` fits into a block of ``seconds``, at least one time; rank 0's answer, on all ranks."""
    for _ in range(3):
        once()
    began = time.perf_counter()
    once()
    return _alike(max(1, round(seconds / (time.perf_counter() - began))))


def worst_rank(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """The slower rank's time of each round: what a training loop would see. Collective."""
    everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return {name: [max(times) for times in zip(*(one[name] for one in everyone), strict=True)] for name in seconds}
