"""Shares by the backend's own collectives: on accelerators, reduce-scatter and all-gather.

    reduce     reduce-scatter of the shares, all-reduce of the words behind them
    spread     all-gather

As many bytes leave each rank as with the all-to-alls of exchange.py. But NCCL sends them along rings and trees of the
machine, where a share passes from host to host once, not once for each rank of the other host. Its sums of half types
are rounded on each of these hops, so half types use exchange.py.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .base import as_reals
from .slices import WIDER, slice_of


def can_gather(share: torch.Tensor) -> bool:
    """Whether the backend for such tensors has something better than all-to-alls. Gloo, on the CPU, has not."""
    return not share.is_cpu


def can_sum(tensor: torch.Tensor) -> bool:
    """Whether shares of such tensors should be summed by reduce-scatter."""
    return can_gather(tensor) and tensor.dtype not in WIDER


class ScatteredSum:
    """A collective: the mean of this rank's share of a tensor's first elements, and the sum of all after those.

    Args:
        group: of all ranks.
        tensor: flat; the result is in place, and the other shares hold what they held.
        shared: how many elements are divided into shares.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor, shared: int) -> None:
        self._places = group.size()
        low, high = slice_of(shared, group.rank(), self._places)
        longest = slice_of(shared, 0, self._places)[1]
        self._own, words = tensor[low:high], tensor[shared:]
        self._sum = tensor.new_empty(longest)
        self._sent = _padded(tensor[:shared], longest * self._places)
        works = [group.reduce_scatter_single(as_reals(self._sum), as_reals(self._sent), dist.ReduceScatterOptions())]
        if len(words):
            works.append(group.allreduce([as_reals(words)], dist.AllreduceOptions()))
        self._works = works
        self._is_in_place = False

    def is_completed(self) -> bool:
        """Whether it can be had without waiting."""
        return self._is_in_place or all(work.is_completed() for work in self._works)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait for the result. Raises ``RuntimeError`` if it takes longer; may then be called again."""
        for work in self._works:
            work.wait(*([timeout] if timeout else []))
        if not self._is_in_place:
            torch.div(self._sum[: len(self._own)], self._places, out=self._own)
            self._is_in_place = True


class GatheredShares:
    """A collective: each rank's share to all.

    Args:
        group: of all ranks.
        received: flat, as long as the other ranks' shares together, which arrive there one after the other.
        share: flat, of the same dtype.
        numels: of the ranks' shares.
    """

    def __init__(
        self, group: dist.ProcessGroup, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int]
    ) -> None:
        longest = max(numels)
        sent, rows = _padded(share, longest), share.new_empty(len(numels), longest)
        self._work: Any = group.all_gather_single(rows.view(-1).view(torch.uint8), sent.view(torch.uint8))
        self._buffers: Sequence[torch.Tensor] = sent, rows  # until it has come
        others = [
            row[:numel] for place, (row, numel) in enumerate(zip(rows, numels, strict=True)) if place != group.rank()
        ]
        self._parts = [*zip(torch.split(received, [*map(len, others)]), others, strict=True)]

    def is_completed(self) -> bool:
        """Whether it can be had without waiting."""
        return bool(self._work.is_completed())

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until all have arrived. Raises ``RuntimeError`` if it takes longer; may then be called again."""
        self._work.wait(*([timeout] if timeout else []))
        for part, row in self._parts:
            part.copy_(row)
        self._parts, self._buffers = [], ()


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """Padded with zeros to so many elements."""
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])
