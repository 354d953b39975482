"""The ranks of one host, and why one of them does not go on.

[Note: broken]  A rank whose sequence of messages has ended (ranks called different things, there is no memory, Ctrl-C
stopped it during a message, its patience is over) is broken: it publishes nothing more, and gives the reason in its
page. A rank that waits checks every 0.2 s whether a rank that is late has died or is broken, and is then broken too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..errors import CallsDifferError, CommunicationError, PeerError
from ..listeners import in_children
from .base import raised_by_handler
from .mapped import not_mapped
from .message import Posted
from .page import FINISHED, PUBLISHED, Page, Peer, behind, first_dead


class Breakable:
    """The part of :class:`~stretto.transport.host.Host` about how it ends; arguments as there."""

    def __init__(self, page: Page, peers: Sequence[Peer], local_rank: int) -> None:
        self.page, self.local_rank = page, local_rank
        self.peers = list(peers)
        self.broken: str | None = None
        """Why this rank will not go on: see [Note: broken]."""
        self._cause: BaseException | None = None
        self._by_peer = False
        self._futex = page.futex
        self._others = [peer for peer in peers if peer is not peers[local_rank]]
        self._me = peers[local_rank]
        self._pid = os.getpid()
        in_children().change(more=self._forked)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """As in the arena. If there is no memory, the others are told: they may have some, and wait for this rank."""
        try:
            return self.page.arena.allocate(nbytes)
        except CommunicationError as error:
            self.break_off(f"{error}", error)
            raise

    def break_off(self, reason: str, cause: BaseException | None = None, *, by_peer: bool = False) -> None:
        """Go on no further. Ranks that wait for this one are told why."""
        if self.broken is None:
            self.broken, self._cause, self._by_peer = reason, cause, by_peer
            if not by_peer:
                reason = reason.partition("\n")[0].rstrip(".").removeprefix(f"rank {self._me.rank}: ")
                reason = f"rank {self._me.rank} cannot go on: {reason}"
            self.page.say_broken(reason)
            self._futex.wake(self._me.base + PUBLISHED)
            self._futex.wake(self._me.base + FINISHED)

    def _stopped_by(self, error: BaseException) -> None:
        if raised_by_handler(error):  # first: it may be of any class, and its text says nothing about messages
            self.break_off(f"stopped by {type(error).__name__}", error)
        elif isinstance(error, OSError):  # in opening somebody's memory
            if (gone := first_dead(self._others)) is not None:
                return self.break_off(_died(gone), error, by_peer=True)
            self.break_off(not_mapped(self._me.rank, error), error)
        elif isinstance(error, RuntimeError):
            self.break_off(f"{error}", error)
        else:
            self.break_off(f"stopped by {type(error).__name__}", error)

    def dead(self) -> list[Peer]:
        """The ranks whose process has ended without giving a reason."""
        return [peer for peer in self._others if peer.is_dead() and not peer.reason()]

    def _look_at_peers(self, posted: Posted, word: int) -> None:
        """Find a rank that is late with the message and will never come."""
        late = [peer for peer in self._others if behind((peer,), word, posted.number)]
        for peer in late:
            if reason := peer.reason():  # also if it has ended since
                return self.break_off(reason, by_peer=True)
        for peer in late:
            if peer.is_dead() and behind((peer,), word, posted.number):  # it may have come, and then ended
                return self.break_off(_died(peer), by_peer=True)

    def _forked(self) -> None:
        """In a child of this process."""
        self.broken = f"this process was forked from process {self._pid}, and only that process can reduce"
        self.page.arena.make_private()
        for peer in self.peers:
            peer.memory.make_private()

    def _error(self) -> CommunicationError:
        if not self._by_peer:
            differ = isinstance(self._cause, CallsDifferError)
            return (CallsDifferError if differ else CommunicationError)(self.broken)
        return PeerError(f"rank {self._me.rank}: {self.broken}.\nRemove the cause and start again, on all ranks.")


def _died(peer: Peer) -> str:
    return peer.reason() or f"rank {peer.rank} (pid {peer.pid}) died without a word"
