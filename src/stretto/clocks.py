"""How far the steady clocks of ranks are apart, so that their times can be laid side by side.

Ranks that see the same kernel read one clock. For others the first rank of each such group asks rank 0 for the time
through the process group's store, as Cristian (1989) has it: the answer is right to half the time that the question
took, and the quickest of some questions counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

QUESTIONS = 16
PATIENCE = timedelta(seconds=30)

Now = Callable[[], int]


@dataclass(frozen=True)
class Clock:
    """Add ``offset`` to a time of this rank, and it is one of rank 0's."""

    offset: int
    """Nanoseconds."""
    uncertainty: int
    """Nanoseconds; 0 where it is the same clock."""


def identity() -> str:
    """The same for all processes that read the same steady clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # not Linux: a process can at least trust itself
        return f"process {os.getpid()}"


def compare_clocks(
    store: Store | None,
    rank: int,
    gather: Callable[[Any], list[Any]],
    *,
    clock: str | None = None,
    now: Now = time.perf_counter_ns,
) -> list[Clock | None]:
    """Every rank's clock against rank 0's, in rank order. Collective; takes some milliseconds a host.

    Args:
        store: through which hosts can ask. None: clocks of other hosts are unknown.
        rank: this one.
        gather: brings the values of all ranks together.
        clock: default, what ``identity`` says.
        now: reads this rank's clock, in nanoseconds.

    Raises:
        CommunicationError: from ``gather``.
    """
    everyone: list[tuple[str, str, bool]] = gather(
        (identity() if clock is None else clock, os.urandom(8).hex(), store is not None)
    )
    clocks, talk = [one for one, _, _ in everyone], f"stretto/clock/{everyone[0][1]}"
    asking = [clocks.index(one) for one in dict.fromkeys(clocks) if one != clocks[0]]
    told: Clock | None = None
    if all(has_store for _, _, has_store in everyone) and store is not None:
        if rank == 0:
            for other in asking:
                _answer(store, f"{talk}/{other}", now)
        elif rank in asking:
            told = _ask(store, f"{talk}/{rank}", now)
    found: list[Clock | None] = gather(told) if asking else [None] * len(clocks)
    return [Clock(0, 0) if one == clocks[0] else found[clocks.index(one)] for one in clocks]


def _ask(store: Store, talk: str, now: Now) -> Clock:
    best: Clock | None = None
    for number in range(QUESTIONS):
        asked = now()
        store.set(f"{talk}/{number}/asked", "")
        store.wait([f"{talk}/{number}/told"], PATIENCE)
        theirs = int(store.get(f"{talk}/{number}/told"))
        heard = now()
        one = Clock(theirs - (asked + heard) // 2, (heard - asked + 1) // 2)
        best = one if best is None or one.uncertainty < best.uncertainty else best
    assert best is not None
    return best


def _answer(store: Store, talk: str, now: Now) -> None:
    for number in range(QUESTIONS):
        store.wait([f"{talk}/{number}/asked"], PATIENCE)
        store.set(f"{talk}/{number}/told", str(now()))
