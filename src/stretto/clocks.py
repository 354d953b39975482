"""How far apart the steady clocks of ranks are, so that their times can be laid side by side.

Ranks that see the same kernel read one clock. Of the other ranks, the first of each such group asks rank 0 for the time
through the process group's store, by Cristian's method (1989): the answer is right to half the time that the question
took. It asks several times, and the quickest answer counts.

    asker ──> TALK/RANK/n/asked ──> rank 0 ──> TALK/RANK/n/told ──> asker      whoever reads a key deletes it

Clocks drift apart. So a trace asks once more where it ends (:meth:`ClockTalk.again`), and times in between are
interpolated. At the end no rank can be sure that the other comes: each waits a few seconds, and one that gives up
leaves a word for the other.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .awaited_keys import AwaitedKeys

if TYPE_CHECKING:
    from .line import Line

QUESTIONS = 16
PATIENCE = 30.0
"""Seconds for an answer, where all ranks are known to take part."""
LAST_PATIENCE = 4.0
"""Seconds for all answers at the end of a trace."""
DRIFT = 20e-6
"""Seconds a second by which quartz clocks of two hosts may drift apart; half of it is common."""
NOBODY = b"nobody"
"""Stands for a question or an answer: the rank that wrote it has gone."""


@dataclass(frozen=True)
class Clock:
    """Add ``offset`` to a time of this rank, and it is one of rank 0's."""

    offset: int
    """Nanoseconds."""
    uncertainty: int
    """Nanoseconds; 0 where it is the same clock."""
    at: int = 0
    """When they were compared, by this rank's clock; 0 where that need not be known."""

    def right_to(self, time: int, later: Clock | None = None) -> int:
        """Nanoseconds by which a time of this rank may be wrong, as it was compared so long before or after.

        Args:
            time: by this rank's clock.
            later: a second comparison, between which and this one the time lies.
        """
        if not self.uncertainty or not self.at:
            return self.uncertainty
        if later is not None:
            return max(self.uncertainty, later.uncertainty)
        return self.uncertainty + int(DRIFT * abs(time - self.at))


class ClockTalk:
    """Rank 0 and the ranks that ask it for the time.

    Args:
        line: to the store, through which hosts can ask. None: clocks of other hosts are unknown.
        rank: this one.
        gather: brings the values of all ranks together.
        wait: waits for a key that another rank sets, at most so many seconds, and looks whether that rank lives.
            Raises ``RuntimeError`` or what derives from it.
        clock: default, what ``identity`` says.
        now: reads this rank's clock, in nanoseconds.
    """

    def __init__(
        self,
        line: Line | None,
        rank: int,
        gather: Callable[[Any], list[Any]],
        wait: Callable[[AwaitedKeys, float], object],
        *,
        clock: str | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.clock = identity() if clock is None else clock
        self._line = line
        self._rank = rank
        self._gather = gather
        self._wait = wait
        self._now = now
        self._talk = ""
        self._asking: list[int] = []

    def compare(self) -> list[Clock | None]:
        """Every rank's clock against rank 0's, in rank order. Collective; takes some milliseconds a host.

        Raises:
            CommunicationError: a rank does not come, or ends.
        """
        everyone: list[tuple[str, str, bool]] = self._gather((self.clock, os.urandom(8).hex(), self._line is not None))
        clocks = [one for one, _, _ in everyone]
        others = [clocks.index(one) for one in dict.fromkeys(clocks) if one != clocks[0]]
        self._talk = f"clock/{everyone[0][1]}"
        self._asking = others if all(has_store for _, _, has_store in everyone) else []
        told = self._talk_once("first", PATIENCE)
        found: list[Clock | None] = self._gather(told) if others else [None] * len(clocks)
        return [Clock(0, 0) if one == clocks[0] else found[clocks.index(one)] for one in clocks]

    def again(self) -> Clock | None:
        """A second comparison, for ranks that asked in the first one; None for all others, and if it fails.

        Not collective: each rank calls it or not. It lasts ``LAST_PATIENCE`` at most, and raises nothing.
        """
        with contextlib.suppress(RuntimeError):
            return self._talk_once("last", LAST_PATIENCE)
        return None

    def _talk_once(self, when: str, patience: float) -> Clock | None:
        until = time.monotonic() + patience
        if self._rank == 0:
            for other in self._asking:
                self._answer(f"{self._talk}/{other}/{when}", until)
        elif self._rank in self._asking:
            return self._ask(f"{self._talk}/{self._rank}/{when}", until)
        return None

    def _ask(self, talk: str, until: float) -> Clock | None:
        best: Clock | None = None
        for number in range(QUESTIONS):
            asked = self._now()
            self._put(f"{talk}/{number}/asked", b"")
            told = self._take(f"{talk}/{number}/told", until, f"{talk}/{number + 1}/asked")
            heard = self._now()
            if told == NOBODY:
                return None
            one = Clock(int(told) - (asked + heard) // 2, (heard - asked + 1) // 2, asked)
            best = one if best is None or one.uncertainty < best.uncertainty else best
        return best

    def _answer(self, talk: str, until: float) -> None:
        for number in range(QUESTIONS):
            if self._take(f"{talk}/{number}/asked", until, f"{talk}/{number}/told") == NOBODY:
                return
            self._put(f"{talk}/{number}/told", str(self._now()).encode())

    def _put(self, key: str, value: bytes) -> None:
        assert self._line is not None, "nobody asks without"
        self._line.put(key, value)

    def _take(self, key: str, until: float, otherwise: str) -> bytes:
        """Wait for a key, and delete it. If it does not come, leave ``NOBODY`` under another."""
        assert self._line is not None, "nobody asks without"
        awaited = AwaitedKeys(self._line, key)
        try:
            if not awaited.comes_soon():
                self._wait(awaited, max(0.0, until - time.monotonic()))
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                self._put(otherwise, NOBODY)
            raise
        return awaited.take()


def identity() -> str:
    """The same for all processes that read the same steady clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # not Linux: a process can at least trust itself
        return f"process {os.getpid()} of {platform.node()}"
