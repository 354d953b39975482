"""Ranks that have gone, where no host waits for them.

    the channel's thread, once a second ──> Alarm.look ──> a line in the log ──> the next pass, step or call raises

Where ``Work.wait`` returns at once, as NCCL's does, it is the device that waits, for ever, and a host finds that out
wherever it next asks its device for something: there it stands, within torch, until NCCL's own time is up.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable

from .errors import PeerError
from .whereabouts import standing

log = logging.getLogger("stretto")

Blame = Callable[..., tuple[PeerError | None, bool]]


class Alarm:
    """Of one handle.

    Args:
        blame: a method that says which rank is to blame, and whether it surely has no part in this pass; not held.
    """

    def __init__(self, blame: Blame) -> None:
        self._blame: weakref.WeakMethod[Blame] = weakref.WeakMethod(blame)
        self._thread = threading.get_ident()
        self.error: PeerError | None = None
        """What is to be raised where anything would be sent."""

    def look(self) -> None:
        """Once it has been found it stays."""
        if self.error is not None or (blame := self._blame()) is None:
            return
        error, sure = blame()
        if not sure:  # one that has left in peace may have done all that there was to do
            error, _ = blame(by_itself=True)
        if error is not None:
            self.error = error
            first, _, rest = str(error).partition("\n")
            place = standing(sys._current_frames().get(self._thread))
            log.error("%s\n%s\nThis rank is %s: if it stays there, its device waits for that.", first, rest, place)
