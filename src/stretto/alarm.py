"""Noticing that ranks have gone where no host waits for them.

    the channel's thread, once a second ──> Alarm.look ──> a line in the log ──> the next pass, step or call raises

Where ``Work.wait`` returns at once, as NCCL's does, it is the device that waits, for ever. The host notices only when
it next asks its device for something. There it blocks within torch until NCCL's own time is up.
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
        self.sounds = False
        """Whether a rank had gone when it was last looked; what that was may have come to nothing since."""

    def look(self) -> None:
        """On the channel's thread."""
        if self.sounds or (error := self._found()) is None:
            return
        self.sounds = True
        place = standing(sys._current_frames().get(self._thread))
        log.error(
            "%s\nThis rank is %s: if it stays there, it is waiting for something that will never come.", error, place
        )

    def refuse(self) -> None:
        """Raise ``PeerError`` where anything would be sent, if a rank is gone still."""
        if self.sounds and (error := self._found()) is not None:
            raise error
        self.sounds = False

    def _found(self) -> PeerError | None:
        if (blame := self._blame()) is None:
            return None
        error, sure = blame(far=True)
        if not sure:  # a rank that left properly may have finished its work
            error, _ = blame(far=True, by_itself=True)
        return error
