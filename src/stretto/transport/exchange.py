"""Shares over a process group: each rank sends every other what that one needs, and nothing else.

    reduce     rank r sends share s of its tensor to rank s ──> rank s adds up what all have sent, in rank order
    spread     rank r sends its own share to all

Both are one all-to-all: (N - 1) / N of the tensor leaves each rank, half of what an all-reduce sends. Gloo's own
reduce-scatter costs as much as its all-reduce.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .base import Work
from .slices import WIDER, slice_of


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


class ShareSum:
    """The mean of this rank's share of a tensor's first elements, and the sum of all behind them, on its way.

    Args:
        group: of all ranks.
        tensor: flat; the result is in place, and the other shares hold what they held.
        shared: so many elements are divided into shares.
        behind: the sum of what follows them, under way.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: torch.Tensor, shared: int, behind: Work) -> None:
        rank, places = group.rank(), group.size()
        bounds = [slice_of(shared, place, places) for place in range(places)]
        low, high = bounds[rank]
        self._own = tensor[low:high]
        self._rank = rank
        self._places = places
        self._behind: Any = behind
        splits = [0 if place == rank else stop - start for place, (start, stop) in enumerate(bounds)]
        parts = [tensor[start:stop] for place, (start, stop) in enumerate(bounds) if place != rank]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._received = tensor.new_empty((places - 1, high - low))
        own = [0 if place == rank else high - low for place in range(places)]
        self._sent = sent  # until it has left
        self._exchanged: Any = all_to_all(group, self._received.view(-1), sent, own, splits)
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether it can be had without waiting."""
        return bool(self._exchanged.is_completed() and self._behind.is_completed())

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Until the result is there. Raises ``RuntimeError`` if it lasts longer, and can be called again then."""
        if self._is_over:
            return
        limit = [timeout] if timeout else []
        self._exchanged.wait(*limit)
        self._behind.wait(*limit)
        self._is_over = True
        parts = [*self._received]
        parts.insert(self._rank, self._own)
        wide = WIDER.get(self._own.dtype)
        total = parts[0].to(wide) if wide else torch.add(parts[0], parts[1])
        for part in parts[1 if wide else 2 :]:
            total.add_(part)
        self._own.copy_(total.div_(self._places))
