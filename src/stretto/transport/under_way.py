"""What a step has left under way over a process group, and the wait for it at the end.

    spread_share ──> SentShares, in the list ──> waited for by whoever reads a parameter, and out of it
                                        └──> else by the end of the transport or of the program

When the interpreter ends, nothing may be under way: see letting_go.py.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import time
import weakref
from typing import Any

import torch.distributed as dist

from .base import Work, done_within
from .letting_go import never_free

log = logging.getLogger("stretto")

_LOOK = datetime.timedelta(seconds=0.1)
_PATIENT_SECONDS = 5.0
"""A longer wait is reported."""
LETTING_GO_SECONDS = 0.005
"""Within this time Gloo's thread has released the tensors of a collective that it has reported as complete."""
_LASTS = (
    "rank %d: the model was dropped, or the program ends, while parameters of its last step are on their way, and "
    "they have not arrived within %.0f s. Another rank has not taken that step, or hangs: look there. This rank "
    "waits until its process group times out (%.0f s), or for Ctrl-C.\n"
    "To drop the model before the others do, call detach() on the handle after a step that all ranks have taken."
)


class UnderWay:
    """The collectives of one transport that have not been waited for.

    Args:
        group: carries them.
        rank: in it.
        patience: seconds after which it gives up.
    """

    def __init__(self, group: weakref.ref[dist.ProcessGroup], rank: int, patience: float) -> None:
        self._group = group
        self._rank = rank
        self._patience = patience
        self._pid = os.getpid()
        self._spreads: list[SentShares] = []

    def add(self, work: Work) -> Work:
        """Keep a collective here until it has been waited for."""
        spread = SentShares(work, self)
        for one in [*self._spreads]:
            if one.is_completed():
                self.remove(one)
        self._spreads.append(spread)
        return spread

    def remove(self, spread: Any) -> None:
        """Drop one that has been waited for, or may never end. Harmless twice."""
        with contextlib.suppress(ValueError):
            self._spreads.remove(spread)  # in one go: another thread may add one

    def let_arrive(self) -> None:
        """Wait for all of them; see letting_go.py, [Note: letting go]."""
        if self._pid != os.getpid():
            return
        if all(spread.is_completed() for spread in self._spreads):
            self._spreads.clear()  # each holds this
            return
        try:
            self._wait()
        except BaseException:  # Ctrl-C; freeing the group would wait again
            for spread in self._spreads:
                if not spread.is_completed():
                    never_free(spread)
            if (group := self._group()) is not None:
                never_free(group)
            raise
        time.sleep(LETTING_GO_SECONDS)

    def _wait(self) -> None:
        tell_at = time.monotonic() + _PATIENT_SECONDS
        for spread in [*self._spreads]:
            with contextlib.suppress(RuntimeError):
                while not done_within(spread, _LOOK):  # in slices, so that Ctrl-C is heard
                    if time.monotonic() > tell_at:
                        tell_at = math.inf
                        log.warning(_LASTS, self._rank, _PATIENT_SECONDS, self._patience)


class SentShares:
    """Shares on their way.

    Args:
        work: the collective that carries them.
        among: forgets this when it has been waited for: it holds as much memory as it has brought.
    """

    waits_again = True
    """An interrupted wait leaves nothing unfinished: the next read waits again."""

    def __init__(self, work: Work, among: UnderWay) -> None:
        self._work: Any = work
        self._among = among

    def is_completed(self) -> bool:
        """Whether they are there, without waiting."""
        return bool(self._work.is_completed())

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until all have arrived. Raises ``RuntimeError`` if it takes longer; may then be called again."""
        self._work.wait(timeout)
        self._among.remove(self)
