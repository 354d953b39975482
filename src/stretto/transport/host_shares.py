"""Shares over several hosts: each rank receives its share of the mean, and the sum of what follows the shares.

    all ranks of a host publish ──> place p adds up, inside its host, the shares of place p of every host
                                ──> an all-to-all with place p of the other hosts ──> adds up what all hosts have sent

With H hosts, a host sends (H - 1) / H of the message, half of what an all-reduce sends. This works only between hosts
with equal numbers of ranks. Sums are taken in rank order inside a host, then in the order of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .message import Message
from .slices import add_in_order, slice_of
from .sums import BLOCK_BYTES, action, views

if TYPE_CHECKING:
    from .hierarchical import Team


class HostShares(Message):
    """One such message; see host.py for when its methods are called.

    Args:
        team: those who take part.
        tensor: flat, in the arena; the result is in place.
        shared: how many elements are divided into shares.
    """

    tensor: torch.Tensor
    by_all = True

    def __init__(self, team: Team, tensor: torch.Tensor, shared: int) -> None:
        self.action = action("share", tensor.dtype)
        self.numel = tensor.numel()
        self.tensor = tensor
        self._team = team
        self._shared = shared
        place = team.host.local_rank
        self._bounds = [slice_of(shared, ranks[place], team.world_size) for ranks in team.hosts]
        self._own = self._bounds[team.host_number]
        behind = self.numel - shared
        self._sizes = [stop - start + behind for start, stop in self._bounds]
        self._sent = tensor.new_empty(sum(self._sizes))
        self._received = tensor.new_empty((len(team.hosts), self._sizes[team.host_number]))

    def begin(self, entries: Sequence[bytes]) -> Any:
        """Send to each counterpart what this host has of its share."""
        for (start, stop), part in zip(self._bounds, torch.split(self._sent, self._sizes), strict=True):
            self._add_up(entries, start, stop, part[: stop - start])
            self._add_up(entries, self._shared, self.numel, part[stop - start :])
        return self._team.counterparts.exchange(self._received.view(-1), self._sent, self._sizes)

    def _add_up(self, entries: Sequence[bytes], low: int, high: int, total: torch.Tensor) -> None:
        step = BLOCK_BYTES // total.itemsize
        for start in range(low, high, step):
            stop = min(start + step, high)
            parts = views(self._team.host, entries, total.dtype, start, stop)
            add_in_order(parts, total[start - low : stop - low])

    def end(self) -> None:
        """Add up what hosts have sent: nobody else reads this rank's share of its tensor."""
        received = [*self._received]
        total = add_in_order(received, received[0])
        start, stop = self._own
        torch.div(total[: stop - start], self._team.world_size, out=self.tensor[start:stop])

    def release(self) -> None:
        """No rank reads this rank's data any more."""
        start, stop = self._own
        self.tensor[self._shared :].copy_(self._received[0][stop - start :])
