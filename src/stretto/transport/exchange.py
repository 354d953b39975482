"""Shares over a process group: each rank sends every other what that one needs, and nothing else.

    reduce     rank r sends share s of its tensor to rank s ──> rank s adds up what all have sent, in rank order
    spread     rank r sends its own share to all

Both are all-to-alls: (N - 1) / N of the tensor leaves each rank, half of what an all-reduce sends. Gloo's own
reduce-scatter costs as much as its all-reduce.

[Note: two at a time]  Between two ranks Gloo's all-to-all uses the link in one direction after the other: 8 MB each
way take 139 ms at 1 Gb/s. Two at the same time use both. So a message goes in two halves; what every rank needs of all
others, the words behind the shares, goes with the second: a message of its own would leave the other half alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .base import Work
from .slices import WIDER, slice_of

_ALONE_BYTES = 64 * 1024
"""A share of up to here is sent at once."""


def all_to_all(
    group: dist.ProcessGroup,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
) -> Work:
    """Flat tensors of one dtype, cut by rank into so many elements. As bytes: every dtype can travel."""
    size = sent.itemsize
    work: Work = group.alltoall_base(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [size * numel for numel in received_splits],
        [size * numel for numel in sent_splits],
        dist.AllToAllOptions(),
    )
    return work


class Exchange(NamedTuple):
    """All-to-alls under way."""

    works: Sequence[Any]
    sent: Sequence[torch.Tensor]
    """Until it has left."""

    def is_completed(self) -> bool:
        """Whether it can be had without waiting."""
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Until all have come. Raises ``RuntimeError`` if one lasts longer, and can be called again then."""
        for work in self.works:
            work.wait(*([timeout] if timeout else []))


def exchange_shares(
    group: dist.ProcessGroup, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int]
) -> Exchange:
    """This rank's share to all others, and theirs, one behind the other, into ``received``.

    Args:
        group: of all ranks.
        received: flat, as long as the other ranks' shares together.
        share: flat, of the same dtype.
        numels: of the ranks' shares.
    """
    rank, places = group.rank(), group.size()
    own = [0 if place == rank else len(share) for place in range(places)]
    others = [0 if place == rank else numel for place, numel in enumerate(numels)]
    if places > 2:
        sent = share.repeat(places - 1)
        return Exchange([all_to_all(group, received, sent, others, own)], [sent])
    cuts = [cut_at(numel * share.itemsize, numel, places) for numel in (len(received), len(share))]
    works = []
    if any(cuts):
        first = [[cut if numel else 0 for numel in splits] for splits, cut in zip((others, own), cuts, strict=True)]
        works.append(all_to_all(group, received[: cuts[0]], share[: cuts[1]], *first))
    rest = [[numel - cut if numel else 0 for numel in splits] for splits, cut in zip((others, own), cuts, strict=True)]
    works.append(all_to_all(group, received[cuts[0] :], share[cuts[1] :], *rest))
    return Exchange(works, [share])


def cut_at(nbytes: int, numel: int, places: int) -> int:
    """How many elements of a share go with the first half. See [Note: two at a time]."""
    return numel // 2 if places == 2 and nbytes >= _ALONE_BYTES else 0


class ShareSum:
    """The mean of this rank's share of a tensor's first elements, and the sum of all behind them, on its way.

    Args:
        group: of all ranks.
        tensor: flat; the result is in place, and the other shares hold what they held.
        shared: so many elements are divided into shares.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor, shared: int) -> None:
        self._rank, self._places = group.rank(), group.size()
        bounds = [slice_of(shared, place, self._places) for place in range(self._places)]
        cuts = [low + cut_at((high - low) * tensor.itemsize, high - low, self._places) for low, high in bounds]
        low, high = bounds[self._rank]
        self._own = [tensor[low : cuts[self._rank]], tensor[cuts[self._rank] : high]]
        self._words = tensor[shared:]
        others = [place for place in range(self._places) if place != self._rank]
        numels = [len(self._own[0]), len(self._own[1]) + len(self._words)]
        self._received = [tensor.new_empty((len(others), numel)) for numel in numels]
        halves = [
            {place: [tensor[bounds[place][0] : cuts[place]]] for place in others},
            {place: [tensor[cuts[place] : bounds[place][1]], self._words] for place in others},
        ]
        works, sent = [], []
        for parts, received in zip(halves, self._received, strict=True):
            splits = [sum(map(len, parts.get(place, ()))) for place in range(self._places)]
            own = [0 if place == self._rank else received.shape[1] for place in range(self._places)]
            if any(splits) or any(own):
                sent.append(_joined([part for place in others for part in parts[place]]))
                works.append(all_to_all(group, received.view(-1), sent[-1], own, splits))
        self._exchange = Exchange(works, sent)
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether it can be had without waiting."""
        return self._exchange.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Until the result is there. Raises ``RuntimeError`` if it lasts longer, and can be called again then."""
        if self._is_over:
            return
        self._exchange.wait(timeout)
        self._is_over = True
        first, second = self._received
        cut = len(self._own[1])
        self._add_up(self._own[0], first, self._places)
        self._add_up(self._own[1], second[:, :cut], self._places)
        self._add_up(self._words, second[:, cut:], 1)

    def _add_up(self, own: torch.Tensor, others: torch.Tensor, divisor: int) -> None:
        """In rank order, into ``own``; half types are rounded once."""
        parts = [*others]
        parts.insert(self._rank, own)
        wide = WIDER.get(own.dtype)
        total = parts[0].to(wide) if wide else torch.add(parts[0], parts[1])
        for part in parts[1 if wide else 2 :]:
            total.add_(part)
        own.copy_(total if divisor == 1 else total.div_(divisor))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts of one tensor, one behind the other; without a copy where they lie so."""
    first, behind = parts[0], 0
    for part in parts:
        if part.data_ptr() != first.data_ptr() + behind:
            return torch.cat([*parts])
        behind += part.nbytes
    return first.as_strided((behind // first.itemsize,), (1,))
