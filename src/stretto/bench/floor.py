"""The least that an all-reduce through shared memory can cost within a step on this hardware.

At the end of backward the ranks meet once, by a message without content; then each writes as many bytes as it has
gradients into memory that all ranks map, sums its share over the ranks, and writes that share into everybody's memory:
in blocks that fit a core's cache, by flat operations, with no further meeting and nothing in Python for a parameter.

The sums are meaningless, since not the gradients themselves are copied: these are in the cache when a reducer takes
them, so here one block that stays in the cache is the source of all copies, and ranks read what others may be writing.
What is done here cannot be left out, so nothing can be cheaper.

Where the optimizer's step is divided, each rank sums its share of all blocks for itself alone, then steps so many
elements in blocks of that size, and the ranks meet once more before anybody may read what was stepped. To sum and step
block by block takes longer (measured on gradients of ones: 0.80 of the step without communication for 0.77).
"""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..sharding.rebuilt import bare_step
from ..transport.ordinary import elements
from ..transport.shared_memory import SharedMemoryTransport
from .models import LEARNING_RATE

SHARE = 64 * 1024
"""Elements that one rank sums of a block: 256 KB of float32, which stay in the processor's cache."""


def meeting(shared: SharedMemoryTransport) -> Callable[[], object]:
    """All ranks wait for each other, once, with the smallest possible message."""
    numbers = array.array("q", (0, 0))
    return lambda: shared.meet(numbers, b"floor").wait()


def least_work(model: nn.Module, shared: SharedMemoryTransport) -> Callable[[], object]:
    """What the floor does after backward. Collective.

    Args:
        model: gives the number of gradients, counted as float32.
        shared: of all ranks.
    """
    meet, blocks = meeting(shared), _blocks(model, shared)

    def work() -> None:
        meet()
        for block in blocks:
            block.sum_share()
            for peer in block.shares:
                peer.copy_(block.share)

    return work


class StepInShares:
    """What the floor does after backward if each rank steps its share with AdamW; arguments as above. Collective."""

    def __init__(self, model: nn.Module, shared: SharedMemoryTransport) -> None:
        self._model, self._meet = model, meeting(shared)
        self.blocks = _blocks(model, shared)
        """Of the gradients."""
        self.parameters = [nn.Parameter(torch.zeros_like(block.share)) for block in self.blocks]
        """What this rank steps, by block."""
        self._step = bare_step(torch.optim.AdamW(self.parameters, lr=LEARNING_RATE))  # that ranks part is meant

    def _take_values(self) -> None:
        """Step on the model's gradients as they are now: how long AdamW takes depends on how many of them are zero.

        torch takes 30 times as long for square roots if a third of the numbers are zero (MKL, on Intel).
        """
        model = [one for one in self._model.parameters() if one.requires_grad]
        flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in model])
        for block, parameter in zip(self.blocks, self.parameters, strict=True):
            parameter.grad = flat[block.first : block.first + len(block.share)].clone()

    def __call__(self) -> None:
        """One step."""
        if self.parameters[0].grad is None:
            self._take_values()
        self._model.zero_grad()
        self._meet()
        for block in self.blocks:
            block.sum_share()
        self._step()
        self._meet()


@dataclass(frozen=True)
class _Strip:
    own: torch.Tensor
    """Of this rank."""
    first: int
    """First element of the gradients that this rank sums."""
    share: torch.Tensor
    """What this rank sums, in its own memory."""
    shares: list[torch.Tensor]
    """The same in the memory of each other rank."""
    hot: torch.Tensor
    """Stands for the gradients."""

    def sum_share(self) -> None:
        self.own.copy_(self.hot)
        for peer in self.shares:
            self.share.add_(peer)


def _blocks(model: nn.Module, shared: SharedMemoryTransport) -> list[_Strip]:
    """All of a model's gradients. Collective."""
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rank, ranks, buffers = shared.rank, shared.world_size, _buffers_of_all(numel, shared)
    size = SHARE * ranks
    hot, found = torch.ones(min(size, numel)), []
    for begin in range(0, numel, size):
        end = min(begin + size, numel)
        first, last = (begin + (end - begin) * (rank + n) // ranks for n in (0, 1))
        shares = [other[first:last] for place, other in enumerate(buffers) if place != rank]
        found.append(_Strip(buffers[rank][begin:end], first, buffers[rank][first:last], shares, hot[: end - begin]))
    return found


def _buffers_of_all(numel: int, shared: SharedMemoryTransport) -> list[torch.Tensor]:
    """One memory of each rank, by rank: every rank sees the same bytes."""
    nbytes = max(1, numel) * 4
    mine = shared.host.allocate(nbytes)
    places = shared.all_gather_object(shared.host.page.arena.locate(mine))
    seen = [
        mine if rank == shared.rank else peer.memory.bytes_at(places[rank], nbytes)
        for rank, peer in enumerate(shared.host.peers)
    ]
    dist.barrier()  # all have opened all
    return [elements(one, torch.float32)[:numel] for one in seen]
