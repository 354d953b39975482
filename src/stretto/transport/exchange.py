"""Shares over a process group: each rank sends every other what that one needs, and nothing else.

    reduce rank r sends share s of its tensor to rank s ──> rank s adds up what all have sent, in rank order
    spread     rank r sends its own share to all

Both are all-to-alls: (N - 1) / N of the tensor leaves each rank, half of what an all-reduce sends. Gloo's own
reduce-scatter costs as much as its all-reduce.

[Note: two at a time]  Between two ranks, Gloo's all-to-all uses one direction of the link and then the other: 8 MB each
way take 139 ms at 1 Gb/s. Two all-to-alls at the same time, as many as a Gloo group works on, use both directions. So a
message goes in an even number of pieces, small enough that the last one is not alone for long: four pieces of 4.7 MB
each way take 160 ms, two halves 171. The words after the shares, which every rank needs from all others, go with the
last piece.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..wording import KIB
from .base import SHORTEST_SECONDS, Work, done_within
from .slices import add_in_order, slice_of

_ALONE_BYTES = 64 * KIB
"""A share of up to this size is sent in one piece."""
_PIECE_BYTES = 512 * KIB


def all_to_all(
    group: dist.ProcessGroup,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
) -> Work:
    """All-to-all of flat tensors of one dtype, cut by rank as given. Sent as bytes, so that every dtype can travel."""
    size = sent.itemsize
    work: Work = group.alltoall_base(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [size * numel for numel in received_splits],
        [size * numel for numel in sent_splits],
        dist.AllToAllOptions(),
    )
    return work


@dataclass(eq=False)
class Exchange:
    """All-to-alls under way."""

    works: Sequence[Any]
    sent: Sequence[torch.Tensor]
    """Until it has left."""

    def is_completed(self) -> bool:
        """Whether the result is there, without waiting."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until all have arrived. Raises ``RuntimeError`` if one takes longer; may then be called again."""
        for work in self.works:
            work.wait(*([timeout] if timeout else []))


def exchange_shares(
    group: dist.ProcessGroup, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int]
) -> Exchange:
    """Send this rank's share to all others, and receive theirs, one after the other, into ``received``.

    Args:
        group: of all ranks.
        received: flat, as long as the other ranks' shares together.
        share: flat, of the same dtype.
        numels: of the ranks' shares.
    """
    rank, places = group.rank(), group.size()
    if places > 2:
        sent = share.repeat(places - 1)
        own = [0 if place == rank else len(share) for place in range(places)]
        others = [0 if place == rank else numel for place, numel in enumerate(numels)]
        return Exchange([all_to_all(group, received, sent, others, own)], [sent])
    works, pieces = [], _pieces(max(numels), share, places)
    for sent, arriving in zip(_cut(share, pieces), _cut(received, pieces), strict=True):
        own = [0 if place == rank else len(sent) for place in range(places)]
        others = [0 if place == rank else len(arriving) for place in range(places)]
        works.append(all_to_all(group, arriving, sent, others, own))
    return Exchange(works, [share])


def _pieces(numel: int, like: torch.Tensor, places: int) -> int:
    """In how many pieces shares go, given the longest one's elements; equal on all ranks. See [Note: two at a time]."""
    nbytes = numel * like.itemsize
    if places != 2 or nbytes < _ALONE_BYTES or not like.is_cpu:
        return 1
    return 2 * -(-nbytes // (2 * _PIECE_BYTES))


def _cut(flat: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    bounds = [len(flat) * number // pieces for number in range(pieces + 1)]
    return [flat[start:stop] for start, stop in pairwise(bounds)]


class ShareSum:
    """A collective: the mean of this rank's share of a tensor's first elements, and the sum of all after those.

    Args:
        group: of all ranks.
        tensor: flat; the result is in place, and the other shares hold what they held.
        shared: how many elements are divided into shares.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor, shared: int) -> None:
        self._rank, self._places = group.rank(), group.size()
        bounds = [slice_of(shared, place, self._places) for place in range(self._places)]
        pieces = _pieces(max(high - low for low, high in bounds), tensor, self._places)
        shares = [_cut(tensor[low:high], pieces) for low, high in bounds]
        self._own, self._words = shares[self._rank], tensor[shared:]
        others = [place for place in range(self._places) if place != self._rank]
        self._received: list[torch.Tensor] = []
        ready = []
        for number, own in enumerate(self._own):
            words = [self._words] if number == pieces - 1 else []
            received = tensor.new_empty((len(others), len(own) + sum(map(len, words))))
            parts = {place: [shares[place][number], *words] for place in others}
            sent = _joined([part for place in others for part in parts[place]])
            sizes = [sum(map(len, parts.get(place, ()))) for place in range(self._places)]
            arriving = [0 if place == self._rank else received.shape[1] for place in range(self._places)]
            ready.append((sent, arriving, sizes))
            self._received.append(received)
        # Not before all have their memory: if it ran out amid the pieces, the first would have left, and meet another.
        self._exchanges = [
            Exchange([all_to_all(group, received.view(-1), sent, arriving, sizes)], [sent])
            for received, (sent, arriving, sizes) in zip(self._received, ready, strict=True)
        ]
        self._added = 0
        """How many pieces are in place."""
        self._has_failed = False

    def is_completed(self) -> bool:
        """Whether the result is there, or never will be, without waiting."""
        return self._has_failed or all(exchange.is_completed() for exchange in self._exchanges)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait for the result. Raises ``RuntimeError`` if it takes longer; may then be called again."""
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._added < len(self._own):
            own, received = self._own[self._added], self._received[self._added]
            self._wait_for(self._exchanges[self._added], until)
            self._added += 1
            self._add_up(own, received[:, : len(own)], self._places)
            if self._added == len(self._own):
                self._add_up(self._words, received[:, len(own) :], 1)

    def _wait_for(self, piece: Exchange, until: float | None) -> None:
        if until is None:
            piece.wait()
            return
        left = max(until - time.monotonic(), SHORTEST_SECONDS)
        try:
            come = done_within(piece, datetime.timedelta(seconds=left))
        except RuntimeError:
            self._has_failed = True  # what follows it may never end
            raise
        if not come:
            raise RuntimeError("not done in time")

    def _add_up(self, own: torch.Tensor, others: torch.Tensor, divisor: int) -> None:
        """Add up in rank order, into ``own``."""
        parts = [*others]
        parts.insert(self._rank, own)
        add_in_order(parts, own, divisor)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts of one tensor, joined; without a copy if they are adjacent."""
    first, behind = parts[0], 0
    for part in parts:
        if part.data_ptr() != first.data_ptr() + behind:
            return torch.cat([*parts])
        behind += part.nbytes
    return first.as_strided((behind // first.itemsize,), (1,))
