"""Which rank owns what: each rank keeps and steps one share of every bucket. Pure functions of the plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from ..plan import BucketPlan
from ..transport import slice_of


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter, in the order in which they lie in its bucket."""

    index: int
    """The parameter's index in the plan."""
    bucket: int
    start: int
    """First element, in the bucket."""
    stop: int
    first: int
    """First element, in the parameter."""

    def parts(self, most: int) -> list[Piece]:
        """Cut into parts of about equal size, each of at most ``most`` elements (if that is 64 or more)."""
        count = -(-self.numel // most)
        size = -(-self.numel // (64 * count)) * 64
        return [
            Piece(self.index, self.bucket, start, min(start + size, self.stop), self.first + start - self.start)
            for start in range(self.start, self.stop, size)
        ]

    @property
    def end(self) -> int:
        """Where it ends in the parameter."""
        return self.first + self.stop - self.start

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def pieces_of(plan: BucketPlan, rank: int, world_size: int, among: Collection[int]) -> list[Piece]:
    """What one rank owns if each element is stepped independently: an equal share of each bucket, in order.

    Args:
        plan: the plan of the gradients.
        rank: the owner.
        world_size: number of ranks.
        among: indices of the parameters that are divided at all.
    """
    return [
        piece
        for number in range(len(plan.buckets))
        for piece in _within(plan, number, *slice_of(plan.offsets(number)[-1], rank, world_size))
        if piece.index in among
    ]


def _within(plan: BucketPlan, number: int, low: int, high: int) -> list[Piece]:
    bucket, offsets, found = plan.buckets[number], plan.offsets(number), []
    for place in chain.from_iterable(plan.layout(number)):
        index, begin = bucket.indices[place], offsets[place]
        start, stop = max(begin, low), min(begin + plan.parameters[index].numel, high)
        if start < stop:
            found.append(Piece(index, number, start, stop, start - begin))
    return found


def whole_pieces_of(plan: BucketPlan, rank: int, world_size: int, among: Collection[int]) -> list[Piece]:
    """The same if parameters are stepped whole: the largest first, each to the rank that has least so far."""
    loads = [0] * world_size
    owned: set[int] = set()
    for index in sorted(among, key=lambda one: (-plan.parameters[one].numel, one)):
        owner = loads.index(min(loads))
        loads[owner] += plan.parameters[index].nbytes
        if owner == rank:
            owned.add(index)
    return pieces_of(plan, 0, 1, owned)
