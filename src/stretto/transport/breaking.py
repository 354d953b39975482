"""The ranks of one host, and why one of them goes on no more.

[Note: broken]  A rank whose sequence of messages has come to an end (they called something else, there is no memory,
Ctrl-C stopped it amid a message, its patience is over) is broken: it publishes nothing any more, and says why in its
page. Whoever waits looks every 0.2 s whether a rank that is behind has died or is broken, and is broken then too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..errors import CallsDifferError, CommunicationError, PeerError
from ..listeners import in_children
from .mapped import not_mapped
from .message import Posted
from .page import FINISHED, PUBLISHED, Page, Peer, behind, first_dead


class Breakable:
    """What of :class:`~stretto.transport.host.Host` may end, and how; arguments as there."""

    def __init__(self, page: Page, peers: Sequence[Peer], local_rank: int) -> None:
        self.page, self.local_rank = page, local_rank
        self.peers = list(peers)
        self.broken: str | None = None
        """Why nothing will ever be done again: see [Note: broken]."""
        self._cause: BaseException | None = None
        self._by_peer = False
        self._futex = page.futex
        self._others = [peer for peer in peers if peer is not peers[local_rank]]
        self._me = peers[local_rank]
        self._pid = os.getpid()
        in_children().change(more=self._forked)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """As of the arena. If there is no memory, the others are told: they may have it, and wait for this rank."""
        try:
            return self.page.arena.allocate(nbytes)
        except CommunicationError as error:
            self.break_off(f"{error}", error)
            raise

    def break_off(self, reason: str, cause: BaseException | None = None, *, by_peer: bool = False) -> None:
        """Nothing will ever be done again. Those who wait for this rank are told why."""
        if self.broken is None:
            self.broken, self._cause, self._by_peer = reason, cause, by_peer
            if not by_peer:
                reason = reason.splitlines()[0].rstrip(".").removeprefix(f"rank {self._me.rank}: ")
                reason = f"rank {self._me.rank} cannot go on: {reason}"
            self.page.say_broken(reason)
            self._futex.wake(self._me.base + PUBLISHED)
            self._futex.wake(self._me.base + FINISHED)

    def _stopped_by(self, error: BaseException) -> None:
        if isinstance(error, OSError):  # in opening somebody's memory
            if (gone := first_dead(self._others)) is not None:
                return self.break_off(_died(gone), error, by_peer=True)
            self.break_off(not_mapped(self._me.rank, error), error)
        elif isinstance(error, RuntimeError):
            self.break_off(f"{error}", error)
        else:
            self.break_off(f"stopped by {type(error).__name__}", error)

    def dead(self) -> list[Peer]:
        """Those whose process has ended without a word."""
        return [peer for peer in self._others if peer.is_dead() and not peer.reason()]

    def _look_at_peers(self, posted: Posted, word: int) -> None:
        """Whether one that is behind with the message will never come."""
        late = [peer for peer in self._others if behind((peer,), word, posted.number)]
        for peer in late:
            if reason := peer.reason():  # also of one that has ended since
                return self.break_off(reason, by_peer=True)
        for peer in late:
            if peer.is_dead() and behind((peer,), word, posted.number):  # it may have come, and ended then
                return self.break_off(_died(peer), by_peer=True)

    def _forked(self) -> None:
        """In a child of this process."""
        self.broken = f"this process was forked from process {self._pid}, which alone can reduce"
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
