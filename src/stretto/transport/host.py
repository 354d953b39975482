"""The ranks of one host at work on the same messages, without a thread and without a lock.

    post ──> published[me] += 1 ──> wake ┐        advance: in order, a message for which everybody needed has published
                                         ├──────>     ──> this rank's part ──> finished[me] += 1 ──> wake
    peers likewise  ─────────────────────┘        wait:    advance, then sleep on the word of a rank that is awaited

Every rank has a page that all map: two counters that only it writes, and a ring that says where the tensor of message
number n lies. Ranks post the same messages in the same order. A message is a small machine: published by this rank,
begun when those it needs have published, ended at once or when what goes on outside the host is done, over when its
own part, or for some everybody's, has ended. Nothing but ``wait`` ever waits, so a late peer stops nobody's backward.

See futex.py for [Note: memory order].
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from .futex import Futex
from .memory import Location
from .page import ENTRIES, FINISHED, PUBLISHED, SEQUENCE, Entry, Page, Peer

_SPINS = 12
"""Looks, with a yield of the core after each, before a rank sleeps: some 10 us."""
_LOOK_SECONDS = 0.2
"""How long a rank sleeps before it looks whether the one it waits for still lives."""
_OUTSIDE_SECONDS = 0.002
"""The same for what goes on outside, while messages wait for peers: one cannot sleep on both."""


class Message(Protocol):
    """What one collective does with memory; see shared_memory.py for the kinds."""

    @property
    def action(self) -> bytes:
        """What it is, at most 16 bytes; the same on all ranks."""

    @property
    def numel(self) -> int:
        """Elements; the same on all ranks."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """What the others may read or write, in this rank's arena; None if nothing."""

    @property
    def root(self) -> int | None:
        """The only rank that has to publish before the others' part; None if all have to."""

    @property
    def by_all(self) -> bool:
        """Whether the result is there when all have done their part; else when this rank has."""

    def begin(self, entries: Sequence[bytes]) -> Any:
        """This rank's part, given where each rank's tensor lies.

        May return a torch ``Work``, which is waited for before the end.
        """

    def end(self) -> None:
        """The rest of this rank's part."""

    def release(self) -> None:
        """Nobody reads or writes the memory any more."""


class Posted:
    """A message under way: the :class:`~stretto.transport.Work` of this transport."""

    __slots__ = ("_host", "is_over", "message", "number", "outside")

    def __init__(self, host: Host, message: Message, number: int) -> None:
        self._host = host
        self.message = message
        self.number = number
        self.outside: Any = None
        self.is_over = False

    def is_completed(self) -> bool:
        """Whether the result is there, or never will be. Does what can be done for it."""
        self._host.advance()
        return self.is_over or self._host.broken is not None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until the result is there. Raises ``RuntimeError`` if that lasts longer or a rank has died."""
        self._host.wait(self, timeout)


class Host:
    """The ranks of one host, seen from one of them.

    Args:
        page: this rank's.
        peers: all ranks of the host in rank order, this one included.
        place: the index of this rank among them.
        patience: seconds that a collective may take.
    """

    def __init__(self, page: Page, peers: Sequence[Peer], place: int, patience: float) -> None:
        self.page = page
        self.peers = list(peers)
        self.place = place
        self.patience = patience
        self._pid = os.getpid()
        self._futex = Futex()
        self._others = [peer for peer in peers if peer is not peers[place]]
        self._me = peers[place]
        self._number = 0
        self._waiting: collections.deque[Posted] = collections.deque()  # for others to publish
        self._outside: collections.deque[Posted] = collections.deque()  # begun, and not ended
        self._held: collections.deque[Posted] = collections.deque()  # ended here, and not by all
        self.broken: str | None = None
        """Why nothing will ever be done again."""
        self._cause: BaseException | None = None
        self.routes: dict[Any, Any] = {}
        """What kinds of messages keep from one time to the next, as long as memory stays where it is."""

    # Posting

    def post(self, message: Message) -> Posted:
        """Publish, and do what can be done now for this and earlier messages."""
        if self._pid != os.getpid():
            raise RuntimeError("this process was forked from one that is attached: only that one can reduce")
        self._make_room()
        number = self._number = self._number + 1
        place = Location(0, 0, 0) if message.tensor is None else self.page.arena.locate(message.tensor)
        assert place is not None, "what is published lies in the arena"
        self.page.publish(number, Entry(message.action, message.numel, place))
        posted = Posted(self, message, number)
        self._waiting.append(posted)
        self._say(PUBLISHED, number)
        self.advance()
        return posted

    def _say(self, word: int, number: int) -> None:
        self._futex.fence()
        self.page.set(word, number)
        self._futex.wake(self._me.base + word)

    def _make_room(self) -> None:
        """The ring is full: wait until everybody is done with its oldest entry."""
        while len(self._held) + len(self._waiting) + len(self._outside) >= ENTRIES:
            self.wait((self._held or self._outside or self._waiting)[0], None, by_all=True)

    # Progress

    def advance(self) -> None:
        """Do this rank's part of every message that is ready for it, in order; never waits."""
        if self.broken is not None:
            return
        try:
            while self._waiting and self._unpublished(self._waiting[0]) is None:
                posted = self._waiting.popleft()
                posted.outside = posted.message.begin(self._entries(posted))
                self._outside.append(posted)
                self._end_what_is_ready()
            self._end_what_is_ready()
            while self._held and self._unfinished(self._held[0]) is None:
                self._futex.fence()
                posted = self._held.popleft()
                posted.message.release()
                posted.is_over = True
        except BaseException as error:  # went it on, the counters would say that this rank has done its part
            self.broken = f"{error}" if isinstance(error, (OSError, RuntimeError)) else f"stopped by {error!r}"
            self._cause = error
            if not isinstance(error, (OSError, RuntimeError)):
                raise

    def _end_what_is_ready(self) -> None:
        while self._outside:
            posted, work = self._outside[0], self._outside[0].outside
            if work is not None:
                if not work.is_completed():
                    return
                work.wait()
            self._outside.popleft()
            posted.message.end()
            posted.is_over = not posted.message.by_all
            self._held.append(posted)
            self._say(FINISHED, posted.number)

    def _entries(self, posted: Posted) -> list[bytes]:
        """Where everybody's tensor lies. Raises ``RuntimeError`` if they called something else."""
        self._futex.fence()
        number, root = posted.number, posted.message.root
        own = self._me.packed_entry(number)
        entries = []
        for place, peer in enumerate(self.peers):
            entry = peer.packed_entry(number) if root in (None, place) else own
            if entry[Entry.SAME] != own[Entry.SAME]:
                theirs, ours = Entry.unpack(entry), Entry.unpack(own)
                raise RuntimeError(f"rank {peer.rank} called {theirs}, rank {self._me.rank} {ours}")
            if peer.has_moved():
                self.routes.clear()
            entries.append(entry)
        return entries

    def _unpublished(self, posted: Posted) -> _Missing | None:
        root = posted.message.root
        return _behind(self._others if root is None else (self.peers[root],), PUBLISHED, posted.number)

    def _unfinished(self, posted: Posted) -> _Missing | None:
        return _behind(self._others, FINISHED, posted.number)

    # Waiting

    def wait(self, posted: Posted, timeout: timedelta | None, *, by_all: bool = False) -> None:
        """Do what can be done, and sleep in between.

        Args:
            posted: what is waited for.
            timeout: default, the patience of the host.
            by_all: wait until everybody is done with it, not only until the result is here.
        """
        seconds = self.patience if timeout is None else timeout.total_seconds()
        spins, until = 0, 0.0
        while True:
            self.advance()
            if posted.is_over and not (by_all and posted in self._held):
                return
            if self.broken is not None:
                raise RuntimeError(self.broken) from self._cause
            spins += 1
            if spins <= _SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            until = until or now + seconds
            if now >= until:
                raise RuntimeError(f"not done within {seconds:.0f} s")
            self._sleep(posted, min(_LOOK_SECONDS, until - now))

    def _sleep(self, posted: Posted, seconds: float) -> None:
        """Until a word has changed without which nothing goes on."""
        if self._outside and (work := self._outside[0].outside) is not None:
            limit = min(seconds, _OUTSIDE_SECONDS) if self._waiting else seconds
            with contextlib.suppress(RuntimeError):  # raised again where its end is looked for
                work.wait(timedelta(seconds=limit))
            return
        first = self._waiting[0] if self._waiting else None
        if first is not None and first.number <= posted.number:
            missing = self._unpublished(first)
        else:
            missing = self._unfinished(posted)
        if missing is None:
            return
        peer, word, seen = missing
        self._futex.wait(peer.base + word, seen, seconds)
        if peer.words[word // 4] == seen and peer.is_dead() and peer.words[word // 4] == seen:
            self.broken = f"rank {peer.rank} (pid {peer.pid}) has died"


_Missing = tuple[Peer, int, int]
"""Somebody who has to go on first, the word that will say so, and what it says now."""


def _behind(peers: Sequence[Peer], word: int, number: int) -> _Missing | None:
    for peer in peers:
        seen = peer.words[word // 4]
        if (seen - number) % SEQUENCE >= SEQUENCE // 2:
            return peer, word, seen
    return None
