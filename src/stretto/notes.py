"""What a rank tells all others when it fails or leaves.

[Note: who leaves]  When a pass fails on a rank that goes on, the control words keep all ranks in step and end the pass
(reducer.py, [Note: a pass given up]); the note is only quoted. A note that *leaves* says that its rank will not come
any more, or not to this step. It ends the waiting of others for what would never come. It is about one handle, about
the whole process, or, before the handle has a name, about one attempt to attach. Ranks count these attempts, and a rank
that makes the same attempt, or is behind it, heeds the note. So ranks that have all failed may try again, each when it
likes. But a rank that had waited for more than three seconds has left a message in the process group by then
(waiting.py), so all of them need another group.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from .whereabouts import place_of_traceback

WAYS_TO_LEAVE = {
    "detached": "it was detached",
    "dropped": "its model was dropped",
    "ended": "its process has ended",
}
"""By which a rank leaves without having failed."""
OF_A_KIND = 4
"""So many notes are kept; see :func:`still_of_use`."""
_FAILED_AND_LEFT = re.compile(r": ranks? ([\d, ]+) failed and left")  # blame.left_early says so
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
_RUNS_CHILDREN = "_bootstrap", "multiprocessing.process"
_REDUCER = __file__.replace(os.sep, "/").replace("notes.py", "reducer.py")


@dataclass(frozen=True)
class Note:
    """What one rank tells all others."""

    rank: int
    phase: str
    """Where it failed, or a key of ``WAYS_TO_LEAVE``."""
    handle: str = ""
    """What it is about, if that has a name; see ``of_process``."""
    passes: int | None = None
    """How many passes of the handle had begun; None if it never had that handle."""
    number: int | None = None
    """The pass that it was about."""
    error: str = ""
    """``ValueError: text``; empty if it ended, or failed with an exception that could not be seen."""
    place: str = ""
    leaves: bool = False
    """See [Note: who leaves]."""
    refused: int = 0
    """The step that it refused (the first is 1), after which it goes on with ranks that refused it too; else 0."""
    leftover: list[str] = field(default_factory=list)
    """If it has left something under way in a process group, the handle for which that was and all that used it."""
    process: str = ""
    """The process that wrote it: the rank may be another one by now."""
    attempt: int = 0
    """To attach, the rank's first is 1: that which the note is about, or by which its handle was attached."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Of a process: ``passes`` and ``number`` of each of its handles."""

    @property
    def failed(self) -> bool:
        """Whether there is more to tell than that the rank has done its passes."""
        return self.phase not in WAYS_TO_LEAVE

    @property
    def is_early(self) -> bool:
        """Whether it is about a pass that had not begun there."""
        return self.number is not None and self.passes is not None and self.number > self.passes

    @property
    def first_hand(self) -> bool:
        """Whether it did not fail for want of another rank."""
        return not self.error.startswith(("PeerError", "CommunicationError"))

    @property
    def of_process(self) -> bool:
        """Whether it is about all that the rank has."""
        return not self.handle and not self.attempt

    def is_for_want_of(self, rank: int) -> bool:
        """Whether it failed since that rank could not go on, which knows more of it."""
        left = _FAILED_AND_LEFT.search(self.error)
        is_told = f"rank {rank} cannot go on" in self.error or (left is not None and str(rank) in left[1].split(", "))
        return is_told and not self.first_hand

    def is_for_absence_of(self, rank: int) -> bool:
        """Whether it failed since that rank had left in peace, which is all that there is to tell."""
        ways = (f"rank {rank} has left (", f"rank {rank} finished after")
        return not self.first_hand and any(how in self.error for how in ways)

    def about(self, handle: str) -> Note:
        """The same for one handle."""
        if handle not in self.counts:  # as in a note about one handle
            return self
        passes, number = self.counts[handle]
        return replace(self, passes=passes, number=number)

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        number = f", pass {self.number}" if self.number else ""
        what = self.error or "failed; its own log has the error"
        return f"rank {self.rank}{number}, {self.phase}: {what}{place}"


def still_of_use(notes: Iterable[Note], handles: Collection[str] | None) -> list[Note]:
    """Those that a rank may yet have to quote, so that they do not pile up.

    Of the same kind, from one process about one handle, these are the last few if it went on, since ranks are at most a
    pass apart; and the first few if it left, which say why.

    Args:
        notes: in order.
        handles: that this process has; None while it has one without a name, which any of them may be about.
    """
    kinds: dict[tuple[Any, ...], list[Note]] = {}
    kept: set[int] = set()
    about = [note for note in notes if handles is None or not note.handle or note.handle in handles]
    for note in about:
        kinds.setdefault((note.rank, note.handle, note.process, note.leaves, bool(note.refused)), []).append(note)
    for (_, handle, _, leaves, refused), of_kind in kinds.items():
        first = leaves and not refused and handle
        kept.update(map(id, of_kind[:OF_A_KIND] if first else of_kind[-OF_A_KIND:]))
    return [note for note in about if id(note) in kept]


def text_of(error: BaseException | None) -> str:
    """``ValueError: text``."""
    if error is None:
        return ""
    try:
        text = str(error)
    except Exception:  # a class of the user's: others are to learn of the failure all the same
        text = "<exception str() failed>"  # as in tracebacks
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:2000]


def what_ends_this_process() -> BaseException | None:
    """The exception by which it ends, as far as Python says; call it while the process ends.

    A program's is in ``sys.last_value``. In a child of multiprocessing it is being handled: its finalizers run in a
    ``finally``, and torch's launcher raises ``SystemExit`` in place of what it has written down. From Python 3.13 on
    they run when it is gone: see :func:`has_failed`. Of a group, as asyncio's ``TaskGroup`` raises, it is the first.
    """
    if hasattr(sys, "ps1"):  # in an interactive session the last exception ended nothing
        return None
    error = sys.exc_info()[1] or getattr(sys, "last_exc", getattr(sys, "last_value", None))
    if isinstance(error, SystemExit):
        error = (error.__context__ or error) if error.code else None
    while isinstance(error, _GROUP):
        error = error.exceptions[0]
    return error


def frame_of_child() -> FrameType | None:
    """That in which multiprocessing keeps the exit code of this process, if it runs it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != _RUNS_CHILDREN:
        frame = frame.f_back
    return frame


def has_failed(child: FrameType | None) -> bool:
    """Whether the exit code is that of a failure. The frame may have ended; the exception has let go of its own."""
    return child is not None and child.f_locals.get("exitcode", 0) not in (0, None)


def last_words(rank: int, begun: Mapping[str, int], told: Collection[tuple[str, int, str]], *, failed: bool) -> Note:
    """The note of a process that ends now.

    Args:
        rank: this one.
        begun: how many passes of each handle.
        told: what was told before: handle, pass and text of the error.
        failed: it has, and the exception may be gone.
    """
    error = what_ends_this_process()
    if error is None and failed:  # most likely by the failure of backward that was told in the pass under way, if any
        last = {handle: text for handle, number, text in told if begun.get(handle) == number}
        numbers = {handle: [n, n + (handle not in last)] for handle, n in begun.items()}
        return Note(rank, "before it ended", error=next(filter(None, last.values()), ""), leaves=True, counts=numbers)
    if error is None:
        return Note(rank, "ended", leaves=True, counts={handle: [n, n] for handle, n in begun.items()})
    files, text = _files_of(error), text_of(error)
    # About the pass that was under way, or else about the next.
    numbers = {
        handle: [n, n + (_REDUCER not in files and (handle, n, text) not in told)] for handle, n in begun.items()
    }
    place = place_of_traceback(error.__traceback__)
    return Note(rank, _phase_of(files), error=text, place=place, leaves=True, counts=numbers)


def _files_of(error: BaseException) -> set[str]:
    """Those that an exception came through."""
    return {one.f_code.co_filename.replace(os.sep, "/") for one, _ in traceback.walk_tb(error.__traceback__)}


def _phase_of(files: set[str]) -> str:
    """In which part of a step an exception that came through these was raised."""
    if any(file.endswith("torch/autograd/graph.py") for file in files):
        return "backward"
    return "forward" if any(file.endswith("torch/nn/modules/module.py") for file in files) else "outside backward"
