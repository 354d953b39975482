"""The ranks of one host at work on the same messages, without a thread and without a lock.

    post ──> published[me] += 1 ──> wake ┐        advance: in order, a message for which everybody needed has published
                                         ├──────>     ──> this rank's part ──> finished[me] += 1 ──> wake
    peers likewise  ─────────────────────┘        wait:    advance, then sleep on the word of a rank that is awaited

Every rank has a page that all map: two counters that only this rank writes, and a ring that says where the tensor of
message number n lies, or holds two numbers instead. Ranks post the same messages in the same order. A message is a
small state machine: published by this rank; begun when the ranks it needs have published; ended at once, or when the
work outside the host is done; over when this rank's part (for some messages, every rank's) has ended. Only ``wait``
ever waits, so a late peer does not stop another rank's backward.

See breaking.py for how a host ends, futex.py for [Note: memory order] and [Note: nobody sleeps].
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from ..errors import CallsDifferError, CommunicationError
from . import memory
from .base import SHORTEST_SECONDS, raised_by_handler
from .breaking import Breakable
from .memory import Location
from .message import Message, Posted
from .ordinary import Routes
from .page import ASLEEP, ENTRIES, FINISHED, PUBLISHED, RETIRED, Entry, Missing, Page, Peer, behind
from .prompt import WokenFirst

_SPINS = 36
"""Checks before a rank sleeps, some 10 us. They never yield the core, which could cost a whole time slice."""
_LOOK_SECONDS = 0.2
"""How long a rank sleeps before it checks whether the others still live."""
_OUTSIDE_SECONDS = 0.002
"""How long it waits for work outside the host while messages wait for peers: it cannot sleep on both."""


class Host(Breakable):
    """The ranks of one host, seen from one of them.

    Args:
        page: this rank's.
        peers: all ranks of the host in rank order, this one included.
        local_rank: the index of this rank among them.
        patience: tells how many seconds a collective may take.
    """

    def __init__(self, page: Page, peers: Sequence[Peer], local_rank: int, patience: Callable[[], float]) -> None:
        super().__init__(page, peers, local_rank)
        self._patience = patience
        self._number = 0
        self._waiting: collections.deque[Posted] = collections.deque()  # for others to publish
        self._outside: collections.deque[Posted] = collections.deque()  # begun, and not ended
        self._held: collections.deque[Posted] = collections.deque()  # ended here, and not by all
        self.abroad = "other hosts"  # errors from outside name an address, not a rank
        self.routes = Routes()
        """What messages cache from one pass to the next, as long as memory stays where it is."""
        first = self.peers[0].address
        with contextlib.suppress(OSError):  # that rank has left already
            self.page.arena.take_turns_at(memory.open_file(first.pid, first.fd))

    @property
    def patience(self) -> float:
        """Seconds that a collective may take, as it is now."""
        return self._patience()

    # Posting

    def post(self, message: Message, location: Location | None = None) -> Posted:
        """Publish, and do what can be done now for this and earlier messages. ``location``: its tensor's, if known."""
        if len(self._held) + len(self._waiting) + len(self._outside) >= ENTRIES:
            self._make_room()
        number = self._number + 1
        posted = Posted(self, message, number, self._others if message.root is None else (self.peers[message.root],))
        if self.broken is not None:
            return posted  # its wait says why
        location = location or self._location_of(message.tensor)
        try:
            self.page.publish(number, message.action, message.numel, location)
            self._number = number
            self._waiting.append(posted)
            self._say(PUBLISHED, number)
        except BaseException as error:  # Ctrl-C between two of these
            self._stopped_by(error)
            raise
        self.advance()
        return posted

    def _location_of(self, tensor: torch.Tensor | None) -> Location:
        location = Location(0, 0, 0) if tensor is None else self.page.arena.locate(tensor)
        assert location is not None, "what is published lies in the arena"
        return location

    def _say(self, word: int, number: int) -> None:
        if self._futex.fenced:
            self._futex.fence()
        self.page.set(word, number)
        if not self._futex.may_look() or any([peer.words[ASLEEP // 4] for peer in self._others]):
            self._futex.wake(self._me.base + word)

    def _make_room(self) -> None:
        """If the ring is full: wait until all ranks are done with its oldest entry."""
        while self.broken is None and len(self._held) + len(self._waiting) + len(self._outside) >= ENTRIES:
            try:
                self.wait((self._held or self._outside or self._waiting)[0], None, by_all=True)
            except RuntimeError as error:  # raised by the wait for the message that finds no room
                self.break_off(f"{error}", error)

    # Progress

    def advance(self) -> None:
        """Do this rank's part of every message that is ready for it, in order; never waits."""
        if self.broken is not None:
            return
        try:
            while self._waiting and behind(self._waiting[0].needs, PUBLISHED, self._waiting[0].number) is None:
                posted = self._waiting.popleft()
                posted.outside = posted.message.begin(self._entries(posted))
                self._outside.append(posted)
                self._end_what_is_ready()
            if self._outside:
                self._end_what_is_ready()
            while self._held and behind(self._others, FINISHED, self._held[0].number) is None:
                if self._futex.fenced:
                    self._futex.fence()
                posted = self._held.popleft()
                posted.message.release()
                posted.is_over = True
                if not self._waiting and not self._outside:
                    self._forget_retired()
        except BaseException as error:  # if it went on, the counters would say that this rank's part is done
            self._stopped_by(error)
            if not isinstance(error, (OSError, RuntimeError)) or raised_by_handler(error):
                raise

    def _forget_retired(self) -> None:
        if all([peer.words[RETIRED // 4] == peer.retired for peer in self.peers]):
            return
        if moved := [peer for peer in self.peers if peer.has_moved()]:
            self._futex.fence()  # the word, then the table
            self.routes.clear()
            for peer in moved:
                peer.memory.forget_retired()

    def _end_what_is_ready(self) -> None:
        while self._outside:
            posted, work = self._outside[0], self._outside[0].outside
            if work is not None:
                if not work.is_completed():
                    return
                try:
                    work.wait()
                except RuntimeError as error:
                    raise CommunicationError(
                        f"rank {self._me.rank}: the exchange with {self.abroad} has failed: {error}\n"
                        "Look at the first error in the other ranks' logs, and start again, on all ranks."
                    ) from error
            self._outside.popleft()
            posted.message.end()
            posted.is_over = not posted.message.by_all
            self._held.append(posted)
            self._say(FINISHED, posted.number)

    def _entries(self, posted: Posted) -> list[bytes]:
        """Where each rank's tensor lies. Raises ``CallsDifferError`` if ranks called something else.

        If a message needs only its root, ranks that have not come yet are given as this rank.
        """
        number, missing = posted.number, set()
        if posted.message.root is not None:
            missing = {peer.rank for peer in self._others if behind((peer,), PUBLISHED, number)}
        if self._futex.fenced:
            self._futex.fence()
        own = self._me.packed_entry(number)
        entries = []
        for peer in self.peers:
            entry = own if peer is self._me or peer.rank in missing else peer.packed_entry(number)
            if entry[Entry.SAME] != own[Entry.SAME]:
                theirs, ours = Entry.unpack(entry), Entry.unpack(own)
                raise CallsDifferError(f"rank {peer.rank} called {theirs}, rank {self._me.rank} {ours}")
            entries.append(entry)
        return entries

    def _unpublished(self, posted: Posted) -> Missing | None:
        return behind(posted.needs, PUBLISHED, posted.number)

    def will_never_begin(self, posted: Posted) -> bool:
        """See :class:`Posted`."""
        gone = [peer for peer in self._others if peer.is_dead() or peer.reason()]  # first: it may come, and go then
        return behind(gone, PUBLISHED, posted.number) is not None

    # Waiting

    def wait(self, posted: Posted, timeout: timedelta | None, *, by_all: bool = False, again: bool = False) -> None:
        """Do what can be done, and sleep in between. Raises like :meth:`Posted.wait`.

        Args:
            posted: the message that is waited for.
            timeout: default, the patience of the host.
            by_all: wait until all ranks are done with it, not only until the result is here.
            again: the message goes on when the time is over, since the caller will wait again; otherwise it ends this
                host.
        """
        spins, seconds, until, first = 0, 0.0, 0.0, WokenFirst()
        try:
            while True:
                self.advance()
                if posted.is_over and not (by_all and posted in self._held):
                    return
                if self.broken is not None:
                    raise self._error() from self._cause
                spins += 1
                if spins <= _SPINS:
                    continue
                now = time.monotonic()
                if not until:  # not before: few messages last so long, and the question takes as long as some of them
                    seconds = self.patience if timeout is None else timeout.total_seconds()
                    until = now + seconds
                if now >= until:
                    late = "" if again else self.lose_patience(f"a message was not done within {seconds:.0f} s")
                    raise RuntimeError(f"not done within {seconds:.0f} s{late}")
                first.begin()
                woken = self._sleep(posted, min(_LOOK_SECONDS, until - now))
                if torch.get_num_threads() > 1:  # a message may make more of them: see prompt.py, [Note: short slices]
                    first.end()
                if not woken:
                    self._look_at_peers(posted, FINISHED if by_all or posted.message.by_all else PUBLISHED)
        except BaseException as error:  # Ctrl-C: the caller may reuse the memory, and others would sum that
            if not isinstance(error, RuntimeError) or raised_by_handler(error):
                self._stopped_by(error)
            raise
        finally:
            first.end()  # not before: others may wait for what it does after it has been woken

    def awaits_outside(self) -> bool:
        """Whether other hosts have not done their part of something."""
        return any(posted.outside is not None and not posted.outside.is_completed() for posted in self._outside)

    def flush(self, seconds: float) -> None:
        """Complete messages under way, if the other ranks come within so many seconds. Raises no ``RuntimeError``."""
        under_way = self._waiting or self._outside or self._held
        if under_way and self.broken is None:
            with contextlib.suppress(RuntimeError):
                self.wait(under_way[-1], timedelta(seconds=seconds), by_all=True, again=True)

    def _sleep(self, posted: Posted, seconds: float) -> bool:
        """Sleep until the word changes on which everything waits. False if the time ran out instead."""
        if self._outside and (work := self._outside[0].outside) is not None:
            also_peers = self._waiting or posted.number < self._outside[0].number
            limit = max(min(seconds, _OUTSIDE_SECONDS) if also_peers else seconds, SHORTEST_SECONDS)
            with contextlib.suppress(RuntimeError):  # raised again where its end is checked
                work.wait(timedelta(seconds=limit))
            return bool(work.is_completed())
        if self._waiting and self._waiting[0].number <= posted.number:
            missing = self._unpublished(self._waiting[0])
        else:
            missing = behind(self._others, FINISHED, posted.number)
        if missing is None:
            return True
        peer, word, seen = missing
        self.page.set(ASLEEP, 1)  # see futex.py, [Note: nobody sleeps]
        try:
            self._futex.wait(peer.base + word, seen, seconds)
        finally:
            self.page.set(ASLEEP, 0)
        return peer.words[word // 4] != seen

    # Breaking off: see breaking.py

    def lose_patience(self, reason: str) -> str:
        """Nobody waits any more: the memory may be filled again, and a late rank would sum that.

        Returns, in words, which ranks have not come, to be added to the reason.
        """
        first = next(iter(self._waiting), None)
        missing = None if first is None else self._unpublished(first)
        told, _, advice = reason.partition("\n")
        late = "" if missing is None else f", and rank {missing[0].rank} had not arrived"
        self.break_off(f"{told}{late}" + (f".\n{advice}" if advice else ""))
        for posted in self._outside:  # Gloo cannot cancel it, and another host would still sum this memory
            if posted.outside is not None:
                with contextlib.suppress(RuntimeError):
                    posted.outside.wait()
        return late
