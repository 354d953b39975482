"""How fast each transport is between two ranks of this host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..errors import SetupError
from ..plan import MIB
from ..transport import ProcessGroupTransport, Transport, choose
from .ranks import work

_SMALLEST = 4
_ROUNDS = {_SMALLEST: 300, MIB: 60, 25 * MIB: 12}
"""By bytes of the tensor."""
_QUICK = {_SMALLEST: 40, MIB: 10, 25 * MIB: 3}
_WARM = 2
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Timing:
    """All-reduces of one size over one transport."""

    nbytes: int
    median: float
    """Seconds."""
    low: float
    """A quarter of them took at most this."""
    high: float
    """A quarter took at least this."""

    @property
    def bytes_per_second(self) -> float:
        """Of the tensor, however many bytes travel for that."""
        return self.nbytes / self.median


@dataclass(frozen=True)
class Speed:
    """Of what there is."""

    timings: Mapping[str, tuple[Timing, ...]]
    """By transport."""
    no_shared_memory: str = ""
    """Why there is none; empty if there is."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds, sizes in bytes."""
        return asdict(self)


def measure(*, quick: bool) -> Speed:
    """Start two ranks and have them all-reduce tensors of 4 B, 1 MB and 25 MB, the transports in turns.

    Args:
        quick: a few rounds only.

    Raises:
        RuntimeError: a rank failed; with its traceback.
        TimeoutError: they did not end.
    """
    rounds = _QUICK if quick else _ROUNDS
    return work("measuring two ranks", 1.0, _measure_on_rank, rounds, timeout=_TIMEOUT)[0]


def _measure_on_rank(rank: int, rounds: Mapping[int, int], tell: Connection) -> Speed:
    base = ProcessGroupTransport()
    transports: dict[str, Transport] = {"process_group": base}
    problem = ""
    try:
        transports["shared_memory"] = choose(base, "shared_memory")
    except SetupError as error:
        problem = str(error).partition("cannot be had: ")[2].partition(".\n")[0]
    tensors = {
        (name, size): one.allocate(size // 4, torch.float32, torch.device("cpu"))
        for name, one in transports.items()
        for size in rounds
    }
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in tensors}
    most = max(rounds.values())
    for number in range(-_WARM, most):
        for (name, size), tensor in tensors.items():
            if number < rounds[size]:
                transports[name].all_reduce(tensors[name, _SMALLEST]).wait()  # ranks leave the one before at odd times
                began = time.perf_counter()
                transports[name].all_reduce(tensor).wait()
                seconds[name, size].append(time.perf_counter() - began)
                tensor.zero_()
        if rank == 0:
            tell.send(_share_done(number, rounds))
    return Speed({name: tuple(_timing(size, seconds[name, size]) for size in rounds) for name in transports}, problem)


def _share_done(number: int, rounds: Mapping[int, int]) -> float:
    """By bytes, since these take the time."""
    done = sum(min(number + 1, most) * size for size, most in rounds.items())
    return max(0.0, done / sum(most * size for size, most in rounds.items()))


def _timing(size: int, seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds[_WARM:], n=4)
    return Timing(size, median, low, high)
