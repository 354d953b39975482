"""When a bucket left and when its result was there, while it is being recorded.

The transport tells when a bucket's result was there: by the future of torch's collectives, by a look at a message of
shared memory after each call that may have moved it, or by what a synthetic link says of itself. If nothing tells, the
result was there at the latest when this rank had waited for it, and is marked so (``Launch.told``). On accelerators all
these times are the host's, which runs ahead of the device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from typing import Any

from .listeners import at_forks

EXIT_SECONDS = 10.0
"""The end of the program waits so long for works that were given up. They fail when another rank's interpreter is gone,
which on a busy machine takes it 6 s after its last line."""
LET_GO_SECONDS = 0.01
"""And so long for the thread that has said so."""

now = time.perf_counter_ns


class Flight:
    """A bucket that is being recorded."""

    __slots__ = ("_work", "begin", "end", "handed_over", "nbytes", "seen", "tells")

    def __init__(self, begin: int) -> None:
        self.begin = self.handed_over = begin
        self.nbytes = self.end = self.seen = 0
        self.tells = False
        """Whether one learns of the end otherwise than by waiting."""
        self._work: Any = None

    def follow(self, work: Any) -> None:
        """Find out when it ends, in one of the ways that its kind has."""
        self._work = work
        future: Any = getattr(work, "future", None)  # of a comm hook
        if future is None and hasattr(work, "get_future") and not hasattr(work, "is_over"):
            with contextlib.suppress(RuntimeError):  # not every backend has them
                future = work.get_future()
        self.tells = hasattr(future, "add_done_callback")
        if self.tells:
            in_the_air().add(self)
            future.add_done_callback(self._ended)
        self.tells = self.tells or hasattr(work, "is_over") or hasattr(work, "ended_at")
        self.look()

    def _ended(self, _: Any) -> None:
        self.end = self.end or now()
        in_the_air().discard(self)

    def look(self) -> None:
        """Whether the work says that it has ended, without doing anything for it."""
        if self._work is None or self.end:
            return
        ended_at = getattr(self._work, "ended_at", None)  # of a synthetic link, in seconds
        if ended_at is not None:
            self.end = int(ended_at * 1e9) if ended_at * 1e9 <= now() else 0
        elif getattr(self._work, "is_over", False):
            self.end = now()


class InTheAir:
    """Buckets of which a thread of Gloo's has yet to say that they ended, also after this rank has given them up.

    The end of the program waits for them a little, once for all: a thread that comes into an interpreter which is gone
    ends the process by a signal.
    """

    def __init__(self) -> None:
        self._flights = set[Flight]()
        self.add = self._flights.add
        self.discard = self._flights.discard
        atexit.register(self._see_them_land)
        at_forks(after_in_child=self._flights.clear)  # the threads stay with the parent

    def _see_them_land(self) -> None:
        if not self._flights:
            return
        until = time.monotonic() + EXIT_SECONDS
        while self._flights and time.monotonic() < until:
            time.sleep(LET_GO_SECONDS)
        time.sleep(LET_GO_SECONDS)


@functools.cache
def in_the_air() -> InTheAir:
    """Those of this process, which ends once: made by the first, so that nothing is registered where there are none."""
    return InTheAir()
