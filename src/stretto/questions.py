"""Asking the other ranks where they are, and answering.

a waiting rank ──> ask/RANK/n ──> that rank's thread ──> at/RANK/n
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time

from torch._C._distributed_c10d import Store

from .people import People
from .seat import Answer, Seat
from .whereabouts import awaited_in_torchs, myself, standing
from .wording import counted

ANSWERS_KEPT = 4
"""For each rank, which asks once or twice in the seconds in which an answer is awaited. Older ones would pile up."""


class Questions(People):
    """Of the ranks at one store; arguments as for :class:`People`."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(store, rank, world_size)
        self.me = myself()
        """This process, and the thread that made this."""
        self._seats: list[Seat] = []
        self.begun = 0
        """How many models have a name that all ranks agreed on, in the same order everywhere."""
        self._asked: int | None = None
        """How many questions had a number at the last look; None before the first."""
        self._answered = 0
        """How many of them need no answer any more."""

    def ask(self, handle: str) -> dict[int, str]:
        """Ask the others where they are with a handle; returns the key under which each will answer."""
        return self.line.run(lambda store: self._ask(store, handle))

    def _ask(self, store: Store, handle: str) -> dict[int, str]:
        keys = {}
        for rank in self.others():
            if self.person(rank, store) is None:
                continue  # nobody is there to answer
            number = store.add(f"ask/{rank}", 1)
            store.set(f"ask/{rank}/{number}", handle)
            keys[rank] = f"at/{rank}/{number}"
        return keys

    def heard(self, keys: dict[int, str]) -> dict[int, Answer]:
        """The answers so far."""
        told = {}
        for rank, key in keys.items():
            person = self.person(rank, fresh=self.in_one_process)
            if person is not None and person.pid == self.me.pid and person.host == self.me.host:
                frame = sys._current_frames().get(person.thread)
                told[rank] = Answer(f"is {standing(frame)}" if frame else "has ended", [], {}, {})
            elif (answer := self.line.run(functools.partial(_read, key=key))) is not None:
                told[rank] = Answer(*json.loads(answer))
        return told

    def gather(self, handle: str, seconds: float) -> dict[int, Answer]:
        """Ask, and wait so long for answers."""
        told: dict[int, Answer] = {}
        with contextlib.suppress(RuntimeError):
            keys, until = self.ask(handle), time.monotonic() + seconds
            while True:
                told |= self.heard(keys)
                keys = {rank: key for rank, key in keys.items() if rank not in told}
                if not keys or time.monotonic() >= until:
                    break
                time.sleep(0.05)
        return told

    def answer(self, store: Store) -> None:
        """On the thread. Not what was asked before the first look, of another process."""
        if self._asked is None:
            self._asked = self._answered = store.add(f"ask/{self.rank}", 0)
        asked = int(store.get(f"ask/{self.rank}"))
        while self._answered < asked:
            number = self._answered + 1
            if store.check([key := f"ask/{self.rank}/{number}"]):
                store.set(f"at/{self.rank}/{number}", json.dumps(self._where(store.get(key).decode())))
                self._forget(key)
                self._forget(f"at/{self.rank}/{number - ANSWERS_KEPT * self._world_size}")
            elif number > self._asked:
                break  # it may be about to be written; later not any more, and others have asked behind it
            self._answered = number
        self._asked = asked

    def counted(self) -> int:
        """Models for which all ranks have agreed on a name, and those for which this one is about to."""
        return self.begun + sum(seat.meets for seat in [*self._seats])

    def beside(self) -> dict[str, list[int]]:
        """Progress of all handles, and without a name how many were attached: in one order too, if by one thread."""
        threads = {seat.thread for seat in [*self._seats] if seat.thread}
        if len(threads) > 1 or sum(not thread.daemon for thread in threading.enumerate()) > 1:
            return {}
        return {"": [self.counted()], **{seat.handle: seat.progress for seat in [*self._seats] if seat.handle}}

    def ended(self) -> dict[str, int]:
        """Of all handles with a name, the last pass that this rank has come to the end of."""
        return {seat.handle: seat.ended for seat in [*self._seats] if seat.handle}

    def _where(self, handle: str) -> Answer:
        frame = sys._current_frames().get(self.me.thread)
        before, now = None, self._counts(handle)
        while now != before:  # else it could mix states before and after a pass
            before, now = now, self._counts(handle)
        begun = f"has begun {counted(now[0][0], 'passes')} and " if now[0] else ""
        return Answer(f"{begun}is {standing(frame)}", *now, *awaited_in_torchs(frame))

    def _counts(self, handle: str) -> tuple[list[int], dict[str, list[int]], dict[str, int]]:
        progress = next((seat.progress for seat in [*self._seats] if handle and seat.handle == handle), [])
        return progress, self.beside(), self.ended()


def _read(store: Store, key: str) -> bytes | None:
    """Soon after one another, since answers are taken away again."""
    return store.get(key) if store.check([key]) else None
