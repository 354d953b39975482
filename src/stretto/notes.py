"""What a rank tells all others when it fails or leaves, in a store that every rank can read.

[Note: who leaves]  A backward that fails is told in two ways. The control words keep all ranks in step and end the
pass (reducer.py, [Note: a pass given up]); its note is only quoted. A note that *leaves* says that its rank will not
come any more, and ends the waiting of others, whose buckets would never be complete.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType

from torch._C._distributed_c10d import Store

from .transport.base import Transport
from .whereabouts import Progress, Whereabouts, place_of_traceback

LINGER_SECONDS = 2.0
"""How long the rank that has the store stays for the others to read its last note."""
WAYS_TO_LEAVE = {
    "detached": "it was detached",
    "dropped": "its model was dropped",
    "ended": "its process has ended",
}
"""By which a rank leaves without having failed."""
_REDUCER = __file__.replace(os.sep, "/").replace("notes.py", "reducer.py")


@dataclass(frozen=True)
class Note:
    """What one rank tells all others."""

    rank: int
    passes: int
    """How many it had begun."""
    number: int
    """The pass that it was about."""
    phase: str
    error: str = ""
    """``ValueError: text``; empty if it ended, or failed with an exception that could not be seen."""
    place: str = ""
    leaves: bool = False
    """See [Note: who leaves]."""

    @property
    def failed(self) -> bool:
        """Whether there is more to tell than that the rank has done its passes."""
        return self.phase not in WAYS_TO_LEAVE

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        what = self.error or "failed; its own log has the error"
        return f"rank {self.rank}, pass {self.number}, {self.phase}: {what}{place}"


class Board:
    """Where notes are posted. It does not know its ``Peers``, so that it can tell when those are gone."""

    def __init__(self, store: Store, transport: Transport, progress: Progress, *, in_one_process: bool) -> None:
        self.in_one_process = in_one_process
        self.notes: list[Note] = []
        self._lock = threading.Lock()  # the thread of whereabouts.py reads notes too, while the store is there
        self._left = False
        self._told: tuple[int, str] | None = None
        self._store = store
        self._rank = transport.rank
        self._progress = progress
        self.whereabouts = Whereabouts(
            store, transport.rank, transport.world_size, progress, self.read, answers=not in_one_process
        )
        self._pid = os.getpid()

    def post(self, note: Note) -> None:
        """For all others to read. Never raises: the store may be gone."""
        if os.getpid() != self._pid or self.whereabouts.store_is_gone():  # a fork has inherited our connection
            return
        with contextlib.suppress(RuntimeError):
            number = self._store.add("notes", 1)
            self._store.set(f"note/{number}", json.dumps(asdict(note)))

    def tell_failed(self, phase: str, error: BaseException | None, trace: TracebackType | None) -> None:
        """A failure of the pass under way, after which this rank stays in step."""
        passes = self._progress.passes
        self._told = passes, _text(error)
        self.post(Note(self._rank, passes, passes, phase, _text(error), place_of_traceback(trace)))

    def read(self, store: Store | None = None) -> None:
        """What is new."""
        if self.whereabouts.store_is_gone():
            return
        store = store or self._store
        with self._lock, contextlib.suppress(RuntimeError):
            while store.check([key := f"note/{len(self.notes) + 1}"]):
                self.notes.append(Note(**json.loads(store.get(key))))

    def leave(self, how: str) -> None:
        """The last note of this rank: how it ended, unless an exception ends the program. Harmless twice."""
        if self._left or os.getpid() != self._pid:
            return
        self._left = True
        atexit.unregister(self.leave)
        error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
        if how == "ended" and error is not None and not hasattr(sys, "ps1"):
            note = self._last_words(error)
        else:
            note = Note(self._rank, self._progress.passes, self._progress.passes, how, leaves=True)
        self.whereabouts.stop()
        self.post(note)
        if how == "ended" and self._rank == 0 and self.whereabouts.rank_0_has_store():
            self._linger()

    def _last_words(self, error: BaseException) -> Note:
        """About the pass that was under way, or else about the next."""
        files = _files_of(error)
        begun = self._told == (self._progress.passes, _text(error)) or _REDUCER in files
        number = self._progress.passes + (not begun)
        place = place_of_traceback(error.__traceback__)
        return Note(self._rank, self._progress.passes, number, _phase_of(files), _text(error), place, leaves=True)

    def _linger(self) -> None:
        """The store ends with this process: let the others read, and write their own last note."""
        until = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < until:
            self.read()
            left = {note.rank for note in self.notes if note.leaves} | {rank for rank, _ in self.whereabouts.dead()}
            if left.issuperset(self.whereabouts.others()):
                break
            time.sleep(0.02)


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"[:2000]


def _files_of(error: BaseException) -> set[str]:
    """Those that an exception came through."""
    files = set()
    trace = error.__traceback__
    while trace is not None:
        files.add(trace.tb_frame.f_code.co_filename.replace(os.sep, "/"))
        trace = trace.tb_next
    return files


def _phase_of(files: set[str]) -> str:
    """In which part of a step an exception that came through these was raised."""
    if any(file.endswith("torch/autograd/graph.py") for file in files):
        return "backward"
    return "forward" if any(file.endswith("torch/nn/modules/module.py") for file in files) else "outside backward"
