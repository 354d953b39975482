"""One rank's end of the store that all ranks see: who the ranks are, what they announce, which call they come to.

    who/RANK     the process, while it has a handle       notes, note/n      how many, and what ranks tell: notes.py
    attempts/RANK    how often it has tried to attach

Whoever adds a note takes away one that is so old that all have read it, so that they do not pile up; and a new channel
reads the last ones alone.

All handles of a process on one store share one channel, with one thread and one connection of its own: line.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing.util import Finalize
from types import FrameType

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, is_initialized

from .awaited_keys import AwaitedKeys
from .line import POLL_SECONDS, Lookout
from .notes import Note, frame_of_child, has_failed, last_words, still_of_use
from .people import LINGER_SECONDS
from .questions import Questions
from .seat import Seat
from .transport.base import Leftover
from .whereabouts import base_name, standing

NOTES_KEPT = 128
"""So many are read, for each rank, and twice as many lie in the store: none may go while it is read. All have read
older ones, since they look once a second and in each pass that failed elsewhere; or those are of ranks that went on."""


class Channel(Questions):
    """See :func:`channel_of`; arguments as for :class:`People`."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(store, rank, world_size)
        self.notes: list[Note] = []
        """Those that were read and may be of use, this rank's own too."""
        self._sift_at = NOTES_KEPT
        """How many of them there are when they are looked through for those that are of no use any more."""
        self._numbers = 0
        """How many notes have been given a number, as far as is known."""
        self._missing: set[int] = set()
        """Those of them that were not there yet."""
        self.attempts = 0
        """To attach, also those that came to nothing before another rank heard of it."""
        self._leftovers: set[Leftover] = set()
        self._lock = threading.RLock()  # the thread reads notes too, and a handle that it collects meanwhile may
        self._ended = False
        self._finalizer: Finalize | None = None
        self._child = frame_of_child()

    def serves(self, store: Store, rank: int) -> bool:
        """Whether it is this rank's channel over that store."""
        return self._given is store and self.rank == rank and self._is_mine() and not self._ended

    def _is_mine(self) -> bool:
        """Not inherited by a fork, together with its connection."""
        return os.getpid() == self.me.pid

    # Handles come and go

    def open(self, seat: Seat, leftovers: Sequence[Leftover] = ()) -> None:
        """A handle joins; ``leftovers`` of its group learn of the others'. With the first, the rank says who it is."""
        self._seats.append(seat)
        self._leftovers.update(leftovers)
        seat.row = self._seats
        if len(self._seats) > 1:
            return
        self._set(f"who/{self.rank}", json.dumps(asdict(self.me)))
        if not self.in_one_process:
            # Then the interpreter is whole, and knows what ends it: see notes.py. Children of multiprocessing leave by
            # os._exit and run their finalizers alone.
            atexit.register(self.end)
            self._finalizer = Finalize(None, self.end, exitpriority=1000)
            self.line.lookout = Lookout(self, self.line)  # last: it may not be had, and the end tells that

    def count_attempt(self, seat: Seat) -> int:
        """The number of one to attach, when this rank comes together with the others, or fails before; counted once."""
        if not seat.attempt:
            seat.attempt = max(self.attempts, self.attempts_of(self.rank)) + 1  # it may have been without a handle
        self.attempts = max(self.attempts, seat.attempt)
        self._set(f"attempts/{self.rank}", str(self.attempts))
        return seat.attempt

    def catch_up(self, begun: int, attempts: int) -> None:
        """Another rank has this count: one without a handle for a while may restart, and one may fail alone."""
        self.begun = max(self.begun, begun)
        if attempts > self.attempts:
            self.attempts = attempts
            self._set(f"attempts/{self.rank}", str(attempts))

    def close(self, seat: Seat, how: str, *, stays: bool = False) -> None:
        """A handle leaves. With the last, the rank is silent. Harmless twice.

        ``stays``: until the others have read why, where the store may go with this process.
        """
        if seat not in self._seats or not self._is_mine():
            return
        if how == "dropped" and has_failed(self._child):  # together with what has ended the process
            return self.end()
        self._seats.remove(seat)
        if seat.handle:
            passes = seat.passes
            self.post(Note(self.rank, how, seat.handle, passes, passes, leaves=True, attempt=seat.attempt))
        if not self._seats and not self.in_one_process:
            self._stay_with_store(failed=stays)
            self._set(f"who/{self.rank}", "")
            self._stop()

    def end(self) -> None:
        """The last note of this process: how it ended. Harmless twice."""
        if not self._is_mine():
            return
        if not self._ended:
            begun = {seat.handle: seat.passes for seat in self._seats if seat.handle}
            told = {seat.told for seat in self._seats if seat.told is not None}
            try:
                self.post(last_words(self.rank, begun, told, failed=has_failed(self._child)))
                if self.rank == 0 and self.rank_0_has_store():
                    self._stay_until(self._all_have_left)
            finally:
                self._stop()
        if self._child is None:  # multiprocessing ends a child by os._exit, which no thread disturbs
            self.line.hang_up()

    def _stop(self) -> None:
        self._ended = True
        if (lookout := self.line.lookout) is not None:
            lookout.stop(waits=not self.line.is_silent)
            if lookout.is_alive() and not lookout.is_current():
                return  # the process may end before it
        atexit.unregister(self.end)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _stay_with_store(self, *, failed: bool) -> None:
        """It goes with this channel where the groups are destroyed, or a rank that has failed ends; see ``close``."""
        if self.rank == 0 and self.rank_0_has_store() and (failed or not is_initialized()):
            self._stay_until(functools.partial(self._all_have_tried, self.attempts) if failed else self._all_have_left)

    def _all_have_left(self) -> bool:
        """Have read, that is, and written their own last note."""
        self.read()
        gone = [note for note in self.notes if note.leaves and note.of_process]
        left = {note.rank for note in gone if self.is_still(note.rank, note.process)}
        left |= {rank for rank in self.others() if self.person(rank, fresh=True) is None}
        return left.union(rank for rank, _ in self.dead()).issuperset(self.others())

    # Notes

    def post(self, note: Note) -> None:
        """For all others to read. Never raises: the store may be gone."""
        if self._is_mine():
            text = json.dumps(asdict(replace(note, process=self.me.name)))
            self._try(functools.partial(self._post, text), later=True)

    def _post(self, text: str, store: Store) -> None:
        number: int = store.add("notes", 1)
        store.set(f"note/{number}", text)
        if (old := number - 2 * NOTES_KEPT * self._world_size) > 0:
            with contextlib.suppress(RuntimeError):  # some stores cannot forget
                store.delete_key(f"note/{old}")

    def read(self) -> None:
        """What is new."""
        self._try(self._read)

    def _read(self, store: Store) -> None:
        with self._lock:
            if self._numbers or store.check(["notes"]):
                last = int(store.get("notes"))
                oldest = last - NOTES_KEPT * self._world_size
                self._missing = {one for one in self._missing if one > oldest}
                self._missing.update(range(max(self._numbers, oldest) + 1, last + 1))
                self._numbers = last
            for number, said in _texts(store, sorted(self._missing)):
                note = Note(**json.loads(said)) if said else None
                if note is not None and number in self._missing:  # a handle that was collected may have read it
                    self._missing.discard(number)
                    self.notes.append(note)
                    self._heed(note, store)
            if len(self.notes) > self._sift_at:
                self._sift()

    def _sift(self) -> None:
        handles, count = {seat.handle for seat in [*self._seats]}, len(self.notes)
        self._sift_at = 2 * count
        of_use = still_of_use(self.notes[:count], None if "" in handles else handles)
        self.notes = of_use + self.notes[count:]  # a handle that was collected meanwhile may have read more
        self._sift_at = max(NOTES_KEPT, 2 * len(self.notes))

    def _heed(self, note: Note, store: Store) -> None:
        """It may be the last word of the process that has the store, or of what is left in the process group."""
        for one in [*self._leftovers] if note.leftover and note.rank != self.rank else ():  # a handle may join
            if not {*note.leftover[1:]}.isdisjoint(one.used):  # else it is another group
                one.is_of(note.rank, note.leftover[0], str(note))
        if self.rank and note.rank == 0 and note.leaves and note.of_process and self.rank_0_has_store():
            host = self.person(0, store)  # the rank may be another process by now
            if host is not None and host.name == note.process:
                self._goes_at = time.monotonic() + LINGER_SECONDS - POLL_SECONDS  # they may be so old already

    def told(self, seat: Seat, *, others: bool = False) -> list[Note]:
        """What was read about a handle, and about the processes that ranks are now; of ``others`` alone if asked."""
        notes = (note.about(seat.handle) for note in [*self.notes] if self._is_about(note, seat))
        return [note for note in notes if not (others and note.rank == self.rank)]

    def _is_about(self, note: Note, seat: Seat) -> bool:
        if note.handle:
            return note.handle == seat.handle
        return (note.of_process or 0 < seat.trying <= note.attempt) and self.is_still(note.rank, note.process)

    def look_again(self) -> None:
        """Ranks with notes about a process may be other ones by now, or be those, if that was not known so far."""
        for rank in {note.rank for note in self.notes if note.leaves and not note.handle} - {self.rank}:
            self.person(rank, fresh=not self.store_is_gone())

    # Where

    def can_meet(self) -> bool:
        """Whether ranks can come together in the store: they are processes, and it is there."""
        return not self.in_one_process and not self.store_is_gone()

    def come(self, seat: Seat, caller: FrameType, meanwhile: Callable[[], object]) -> AwaitedKeys:
        """This rank comes to a collective call. When all keys are there, the others have come too, and say what to.

        Args:
            seat: of a handle. To agree on its name, if it has none, ranks come to where they stay until they ``go``:
                all have come by then, or this rank has given up, and may come again.
            caller: what is called, and where.
            meanwhile: called while it is waited for.
        """
        call = f"call/{seat.handle}/{seat.calls}" if seat.handle else "here"
        keys = [f"{call}/{rank}" for rank in range(self._world_size)]
        site = f"{base_name(caller.f_code.co_filename)}:{caller.f_lineno}"
        said = f"{site} {standing(caller)}"
        self.line.put(keys[self.rank], said)
        # Where ranks have no name yet, one that gives up takes its key along, and whoever read that would wait for it.
        return AwaitedKeys(self.line, *keys, meanwhile=meanwhile, reads=bool(seat.handle))

    def came(self, seat: Seat) -> None:
        """All have come to the call under its name, and have read so."""
        self._forget(f"call/{seat.handle}/{seat.calls}/{self.rank}")

    def go(self) -> None:
        """See ``come``. Harmless to one that has not come."""
        if not self.in_one_process:
            self._forget(f"here/{self.rank}")

    def why_silent(self, rank: int) -> str:
        """See :class:`People`; with what it has told of an attempt to attach after which it has not come again."""
        last = max((note for note in self.notes if note.rank == rank), key=lambda note: note.attempt, default=None)
        if last is None or not last.attempt or last.handle or self.person(rank) is not None:
            return super().why_silent(rank)
        error = last.error or "its own log has the error"
        return f"has not come back since it failed ({error.splitlines()[0].rstrip('.')})"

    def watch(self, store: Store, is_over: Callable[[], bool]) -> None:
        """On the thread, until the store goes. Dead ranks must be known before that, so all are read early."""
        while True:
            try:
                self._look(store)
            except RuntimeError as error:  # it was silent for longer than it may be asked, and may answer again
                if isinstance(error, DistNetworkError):
                    raise
            self.alarm()
            # A look in the moment in which it goes would print a stack from C++.
            if self._goes_at < math.inf or is_over() or self.store_is_gone():
                return

    def _look(self, store: Store) -> None:
        """What is new, and questions; at first only, which there were for another process."""
        if self._asked is not None:
            for rank in [rank for rank in self.others() if rank not in self._people][:64]:
                self.person(rank, store)
            self._read(store)
        self.answer(store)

    def alarm(self) -> None:
        """On the thread, with the store or without it."""
        for seat in [*self._seats]:
            seat.alarm()


def _texts(store: Store, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
    """The notes among these that are there, in few calls: of a rank that was killed, one may never be written."""
    keys = [f"note/{number}" for number in numbers]
    if not keys or not store.check(keys):
        half = len(keys) // 2
        return _texts(store, numbers[:half]) + _texts(store, numbers[half:]) if half else []
    several = len(keys) > 1 and store.has_extended_api()  # type: ignore[attr-defined]
    return [*zip(numbers, store.multi_get(keys) if several else map(store.get, keys), strict=True)]


def channel_of(store: Store, rank: int, world_size: int) -> Channel:
    """The channel of this process over a store, which may be there already."""
    for thread in threading.enumerate():
        if isinstance(thread, Lookout) and thread.channel.serves(store, rank):
            return thread.channel
    return Channel(store, rank, world_size)
