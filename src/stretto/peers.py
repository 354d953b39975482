"""When one rank fails, ends or does not come: the others learn of it within seconds, with its own words.

a rank fails or ends ──> Note in the store          a rank waits ──> in slices; between them it reads the notes
                                                                 └─> PeerError that quotes them

The channel is the process group's store, so that it works when collectives do not. Passes that go well never touch it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import inspect
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from .agreement import describe_ranks
from .errors import CommunicationError, PeerError
from .notes import WAYS_TO_LEAVE, Board, Note
from .transport.base import Transport
from .whereabouts import Progress, count, place_of_frame

NOTE_SECONDS = 2.0
"""How long a rank that knows of a failure waits for the words of the one that failed."""
GONE_SECONDS = 1.0
"""How long, when a collective failed, for a note or for a process to be seen dead."""
FLUSH_SECONDS = 5.0
"""How long a rank that gave up a pass stays with it, where the others need its part."""
ASK_SECONDS = 5.0
"""How long a rank waits before it asks the others where they are."""
FIRST_SLICE = datetime.timedelta(seconds=0.5)
SLICE = datetime.timedelta(seconds=1.0)

_log = logging.getLogger(__name__)


class Peers:
    """The other ranks of one attached handle, as far as they tell of themselves.

    Creating one is not collective, but all ranks attach in the same order, so they agree on where in the store to meet.

    Args:
        transport: has the ``store``, and in ``patience`` how long a collective may take; see :class:`Transport`.
    """

    def __init__(self, transport: Transport) -> None:
        self.progress = Progress()
        self._rank = transport.rank
        self._pid = os.getpid()
        self._flush: Callable[[float], object] = getattr(transport, "flush", _nothing)
        self._patience: float | None = getattr(transport, "patience", None)
        self._board: Board | None = None
        self._dead: Callable[[], Sequence[tuple[int, int]]] = tuple
        store: Store | None = getattr(transport, "store", None)
        if store is not None:
            handle = store.add(f"stretto/{self._rank}", 1)
            own = PrefixStore(f"stretto/{handle}", store)
            self._board = Board(own, transport, self.progress, in_one_process=isinstance(store, HashStore))
            self._dead = self._board.whereabouts.dead
            self._leave = weakref.finalize(self, self._board.leave, "dropped")
            self._leave.atexit = False
            # Then the interpreter is whole, and has set sys.last_value if an exception ends the program.
            atexit.register(self._board.leave, "ended")
        self._dead = getattr(transport, "dead", self._dead)

    # Telling

    def tell_failed(self, phase: str, error: BaseException | None, trace: TracebackType | None = None) -> None:
        """Others will quote it. Never raises: an exception is on its way already."""
        if self._board is not None:
            self._board.tell_failed(phase, error, trace)

    def close(self) -> None:
        """Tell that this rank has done its passes. Harmless twice."""
        if self._board is not None and self._leave.detach():
            self._board.leave("detached")

    def refuse_fork(self) -> None:
        """Raise in a forked child, before anything of its parent is touched."""
        if self._pid != os.getpid():
            raise CommunicationError(
                f"rank {self._rank}: this process was forked from process {self._pid}, which alone can reduce.\n"
                "Call detach() in the child before it trains there, or fork before stretto.attach(model)."
            )

    def flush(self) -> None:
        """This rank has given up a pass, and may not come back for a while: let the others have their part of it."""
        self._flush(FLUSH_SECONDS)

    # Waiting

    def wait(self, work: Any, number: int) -> None:
        """Wait for a collective of a pass, and look for news meanwhile. Work that is done costs one call.

        Raises:
            PeerError: it will never be done.
            RuntimeError: as the transport's.
        """
        if self._patience is None or not _takes_time(type(work)):  # type: ignore[arg-type]  # it is hashable
            work.wait()
        elif not self._done_within(work, FIRST_SLICE, number):
            self._wait_on(work, number, self._patience)

    def _wait_on(self, work: Any, number: int, patience: float) -> None:
        began = time.monotonic() - FIRST_SLICE.total_seconds()
        asked: dict[int, str] | None = None
        warned = False
        while True:
            self._raise_if_gone(number)
            waited = time.monotonic() - began
            if waited > patience:
                raise RuntimeError(f"not done within {patience:.0f} s")
            if self._board is not None and waited > ASK_SECONDS and not warned:
                asked, warned = self._inquire(self._board, number, waited, asked)
            if self._done_within(work, SLICE, number):
                return

    def _done_within(self, work: Any, time_: datetime.timedelta, number: int) -> bool:
        """Whether a collective is done; its own failure is raised. A wait that ran out of time can be repeated."""
        try:
            work.wait(time_)
        except PeerError:  # the transport has seen a rank die, and knows nothing of its last words
            self._blame(number)
            raise
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it may have become complete just after the time was over
        return True

    def _inquire(
        self, board: Board, number: int, waited: float, asked: dict[int, str] | None
    ) -> tuple[dict[int, str] | None, bool]:
        """Ask where the others are; when they have answered, or should have, say so once. Does not block."""
        with contextlib.suppress(RuntimeError):
            if asked is None:
                return board.whereabouts.ask(), False
            told = board.whereabouts.heard(asked)
            if len(told) == len(asked) or waited > ASK_SECONDS + 4:
                _log.warning("rank %d, pass %d: %s.", self._rank, number, self._places(told, waited))
                return asked, True
            return asked, False
        return asked, True

    def _places(self, told: dict[int, str], waited: float | None = None) -> str:
        assert self._board is not None
        since = "" if waited is None else f" since {waited:.0f} s"
        lines = [f"rank {self._rank} waits{since} at {place_of_frame(sys._getframe())}"]
        lines += [f"rank {rank} {told.get(rank, 'does not answer')}" for rank in self._board.whereabouts.others()]
        return "; ".join(lines)

    def _raise_if_gone(self, number: int, *, broken: bool = False) -> None:
        """Raise if a rank has left without taking part in this pass; or at all, where something is ``broken``.

        Whoever failed first is named, not those who left because of it.
        """
        dead = self._dead()
        self._look()  # last words were written before the death
        left = [note for note in self._notes if note.leaves]
        silent = [(rank, pid) for rank, pid in dead if rank not in {note.rank for note in left}]
        gone = [note for note in left if broken or note.passes < number]
        if not silent or any(note.failed and not note.error.startswith("PeerError") for note in gone):
            self._raise_for(gone, number)
        if silent:
            raise self._killed(silent, number)

    # Explaining

    def explain(self, number: int) -> str:
        """A collective failed. Raise what is to blame if it can be found; else say where the others are.

        Raises:
            PeerError: a rank has left, or died.
        """
        if self._board is None:
            return ""
        self._blame(number)
        return self._places(self._board.whereabouts.gather(2.5)) + ".\n"

    def _blame(self, number: int) -> None:
        """Raise what is to blame, if it can be found soon."""
        until = time.monotonic() + (0.0 if self._board is None or self._board.in_one_process else GONE_SECONDS)
        while True:
            self._raise_if_gone(number, broken=True)
            if time.monotonic() >= until:
                break
            time.sleep(0.05)

    def failures(self, number: int, ranks: int) -> list[Note]:
        """What so many ranks that gave up a pass told of it, as far as it comes soon enough."""
        until = time.monotonic() + NOTE_SECONDS
        while True:
            self._look()
            found = [note for note in self._notes if note.phase == "backward" and note.passes == number]
            found = list({note.rank: note for note in found}.values())
            if len(found) >= ranks or self._board is None or time.monotonic() >= until:
                return sorted(found, key=lambda note: note.rank)
            time.sleep(0.01)

    def _look(self) -> None:
        """Read what is new."""
        if self._board is not None:
            self._board.read()

    @property
    def _notes(self) -> list[Note]:
        """Those of the other ranks, as read so far."""
        return [] if self._board is None else [note for note in self._board.notes if note.rank != self._rank]

    def _raise_for(self, notes: list[Note], number: int) -> None:
        if not notes:
            return
        where = f"rank {self._rank}, pass {number}"
        failed = [note for note in notes if note.failed]
        if not failed:
            note = notes[0]
            how = WAYS_TO_LEAVE[note.phase]
            raise PeerError(
                f"{where}: rank {note.rank} finished after {count(note.passes)} ({how}), so nobody can complete this "
                "one.\nGive every rank as many batches, or use the drop-in and its join(): with model.join(): ..."
            )
        first_hand = [note for note in failed if not note.error.startswith("PeerError")] or failed[:1]
        told = "".join(f"  {note}\n" for note in first_hand)
        ranks = describe_ranks(sorted({note.rank for note in first_hand}))
        raise PeerError(
            f"{where}: {ranks} failed and left, so nobody can complete this pass.\n{told}"
            "Remove the cause and start again, on all ranks."
        )

    def _killed(self, dead: list[tuple[int, int]], number: int) -> PeerError:
        told = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in dead)
        return PeerError(
            f"rank {self._rank}, pass {number}: {told} died without a word, so nobody can complete this pass.\n"
            "Something killed it: a signal, a crash outside Python, or the system for want of memory (see dmesg). "
            "Start again, on all ranks."
        )


@functools.cache
def _takes_time(kind: type) -> bool:
    """Whether works of this kind can be waited for in slices: a user's own may know nothing but ``wait()``."""
    if not (hasattr(kind, "wait") and hasattr(kind, "is_completed")):
        return False
    try:
        inspect.signature(kind.wait).bind(None, SLICE)
    except ValueError:  # torch's, of C++, which takes one
        return True
    except TypeError:
        return False
    return True


def _nothing(seconds: float) -> None:
    """Transports whose messages go on by themselves have nothing to flush."""
