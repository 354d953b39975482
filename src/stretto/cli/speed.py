"""How fast each transport is between ranks: two of this host, or those that torchrun has started."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from ..transport import ProcessGroupTransport, Transport, choose
from ..wording import MIB
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
    """The lower quartile."""
    high: float
    """The upper quartile."""

    @property
    def bytes_per_second(self) -> float:
        """Size of the tensor, however many bytes travel."""
        return self.nbytes / self.median


@dataclass(frozen=True)
class Speed:
    """Of what there is."""

    timings: Mapping[str, tuple[Timing, ...]]
    """By transport."""
    no_shared_memory: str = ""
    """Why there is no shared memory; empty if there is."""


def measure(*, quick: bool) -> Speed:
    """Start two ranks, and have them all-reduce tensors of 4 B, 1 MB and 25 MB, the transports in turns.

    Args:
        quick: a few rounds only.

    Raises:
        RuntimeError: a rank failed; with its traceback.
        TimeoutError: they did not end.
    """
    rounds = _QUICK if quick else _ROUNDS
    return work("measuring two ranks", 1.0, _measure_on_rank, rounds, timeout=_TIMEOUT)[0]


def measure_here(*, quick: bool) -> Speed:
    """The same on the ranks that there are, over the transport that they would take. Collective, rank 0's figures.

    Args:
        quick: a few rounds only.
    """
    return _measured(ProcessGroupTransport(), _QUICK if quick else _ROUNDS, lambda done: None)


def _measure_on_rank(rank: int, rounds: Mapping[int, int], tell: Connection) -> Speed:
    return _measured(ProcessGroupTransport(), rounds, tell.send)


def _measured(base: ProcessGroupTransport, rounds: Mapping[int, int], tell: Callable[[float], object]) -> Speed:
    transports, problem = _transports(base)
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
        if base.rank == 0:
            tell(_share_done(number, rounds))
    found = {name: tuple(_timing(size, seconds[name, size]) for size in rounds) for name in transports}
    tensors.clear()
    for one in transports.values():
        one.close()
    return Speed(found, problem)


def _transports(base: ProcessGroupTransport) -> tuple[dict[str, Transport], str]:
    """The process group, the transport that would be taken instead, and why not all share memory. Collective."""
    reasons: list[str] = []
    taken = choose(base, "auto", tell=reasons.append)
    if not reasons:
        return {"process_group": base, "shared_memory": taken}, ""
    return {"process_group": base} | ({} if taken is base else {taken.name: taken}), reasons[0]


def _share_done(number: int, rounds: Mapping[int, int]) -> float:
    """Fewer rounds for more bytes, since these take longer."""
    done = sum(min(number + 1, most) * size for size, most in rounds.items())
    return max(0.0, done / sum(most * size for size, most in rounds.items()))


def _timing(size: int, seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds[_WARM:], n=4)
    return Timing(size, median, low, high)
