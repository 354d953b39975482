"""How fast each transport is between ranks: two of this host, or those that torchrun has started."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ..specs import MIB
from ..testing_network import SeparateHosts
from ..transport import ProcessGroupTransport, Transport, choose
from .ranks import work

_SMALLEST = 4
_ROUNDS = {_SMALLEST: 300, MIB: 60, 25 * MIB: 12}
"""By bytes of the tensor."""
_QUICK = {_SMALLEST: 40, MIB: 10, 25 * MIB: 3}
_WARM = 2
_TIMEOUT = 120.0
_PAIR = 2
"""Ranks that are measured. One more takes part in the later check, asleep until then."""


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
    two_hosts: str | None = None
    """Why ranks that acted as two hosts could not sum; empty if they could, None if not tried."""


def measure(*, quick: bool) -> Speed:
    """Start ranks, have two all-reduce tensors of 4 B, 1 MB and 25 MB, the transports in turns; then see whether ranks
    that act as if on two hosts sum right.

    Args:
        quick: a few rounds only.

    Raises:
        RuntimeError: a rank failed; with its traceback.
        TimeoutError: they did not end.
    """
    rounds = _QUICK if quick else _ROUNDS
    found = work("measuring two ranks", 1.0, _measure_on_rank, rounds, timeout=_TIMEOUT, ranks=_PAIR + 1)[0]
    assert found is not None, "rank 0 is one of the pair"
    return found


def measure_here(*, quick: bool) -> Speed:
    """The same on the ranks that there are, over the transport that they would take. Collective, rank 0's figures.

    Args:
        quick: a few rounds only.
    """
    return _measured(ProcessGroupTransport(), _QUICK if quick else _ROUNDS, lambda done: None)


def _measure_on_rank(rank: int, rounds: Mapping[int, int], tell: Connection) -> Speed | None:
    pair = dist.new_group([*range(_PAIR)])
    speed = _measured(ProcessGroupTransport(pair), rounds, tell.send) if rank < _PAIR else None
    dist.barrier()
    problem = _why_not_over_hosts()
    return speed and replace(speed, two_hosts=None if speed.no_shared_memory else problem)


def _why_not_over_hosts() -> str:
    """Why ranks that act as if on two hosts cannot sum; empty if they can. Collective."""
    transport = choose(SeparateHosts(ProcessGroupTransport(), [_PAIR, 1]), "auto")
    if not transport.name.startswith("hierarchical"):
        return f"{transport.name} was chosen"
    tensor = transport.allocate(MIB // 4, torch.float32, torch.device("cpu")).fill_(dist.get_rank() + 1)
    transport.all_reduce(tensor).wait()
    found, expected = float(tensor.sum() / tensor.numel()), sum(range(1, dist.get_world_size() + 1))
    del tensor
    transport.close()
    return "" if math.isclose(found, expected) else f"their sum is {found:g} and should be {expected}"


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
