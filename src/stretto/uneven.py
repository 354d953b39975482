"""Inside torch's ``Join``: ranks that run out of batches early take part in the passes of the others.

    has batches  ──> a pass begins ──> announces it ──┐
    has run out  ──> waits in Join for that word ─────┴──> who has batches? ──> pass ──> buffers of one that has some

A pass is announced when it begins, in backward: forward may fail before that, run twice for it, or be another method.

[Note: left]  An exception that leaves ``Join`` tells nobody. That the ``Join`` is over shows only when nobody holds it
any more, maybe at another time on each rank, since one may keep the exception or the Join. So each rank goes on
announcing, and says what it sees behind the last bucket of a pass. When all say so, it is over for all, at the end of
that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .buffers import BufferPlaces
from .launch import LaunchQueue
from .words import COUNTS, Control

if TYPE_CHECKING:
    from .reducer import Reducer


@dataclass
class Uneven:
    """Of one handle, as long as it is inside."""

    tell: Callable[[], bool]
    """Let the ranks that have run out of batches know that a pass comes. Collective. False if this is over."""
    has_left: Callable[[], bool]
    """Whether an exception has, as far as this rank sees: see [Note: left]."""
    end: Callable[[], None]
    """It is over, on all ranks."""
    has_batches: bool = True
    """Whether this rank is not one of these, during a pass of the others."""
    _is_announced: bool = False

    def announce(self) -> bool:
        """Do so for the pass that is about to begin, once. Collective. False if this is over."""
        if self.has_batches and not self._is_announced:
            self._is_announced = self.tell()
        return self._is_announced or not self.has_batches

    def begin(self, queue: LaunchQueue, places: BufferPlaces) -> None:
        """Before anything else of a pass: announce it, and see whose buffers all follow. Collective.

        As in torch, those of the last rank that has batches.

        Args:
            queue: carries the question.
            places: where buffers live, which are sent at the end of the pass.
        """
        goes_on, self._is_announced = self.announce(), False
        if goes_on and places.any and places.policy != "none":
            have = torch.zeros(queue.transport.world_size, dtype=torch.int32, device=queue.devices[0])
            have[queue.transport.rank] = self.has_batches
            queue.wait_for(queue.transport.all_reduce(have), "who has batches")
            places.follows = int(have.nonzero().max())

    def says(self) -> list[Control]:
        """What this rank says after the last bucket of a pass."""
        return [Control.HAS_LEFT] * (self.has_batches and self.has_left())

    def hear(self, said: Sequence[float], world_size: int) -> None:
        """What all ranks have said."""
        if said[Control.HAS_LEFT] >= min(world_size, COUNTS):
            self.end()


def announce_all(members: Iterable[Reducer]) -> None:
    """For the handles of one backward, before any of them sends: the others wait for that word first. Collective."""
    for member in members:
        if member.uneven is not None and not member.failing.is_lost:
            with member.failing:
                member.uneven.announce()
