"""What an all-reduce through shared memory costs at least on this hardware, in a step that is not wrong about it.

At the end of backward the ranks meet once, by a message of 4 bytes; then each writes as many bytes as it has gradients
into memory that all ranks map, sums its share over the ranks, and writes that share into everybody's memory: in blocks
that fit a core's cache, by flat operations, with no further meeting and nothing in Python for a parameter.

The sums are of no use: the gradients themselves are not what is copied. They are in the cache when a reducer takes
them, so the source of the copy is one block that stays in the cache, and ranks read what others may be writing. What is
left out cannot be had for less; what is done cannot be left out.

Where the optimizer's step is divided, each rank sums its share for itself alone, steps so many elements, block by block
while they are in the cache, and the ranks meet once more before anybody may read them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SetupError
from ..transport import Transport
from ..transport.memory import map_shared

BLOCK = 128 * 1024
"""Elements: 512 KB of float32, which stay in the processor's cache."""


def meeting(shared: Transport) -> Callable[[], object]:
    """All ranks wait for each other, once, by the smallest message there is."""
    word = torch.zeros(1)
    return lambda: shared.all_reduce(word).wait()


def least_work(model: nn.Module, shared: Transport) -> Callable[[], object]:
    """What follows backward in the floor. Collective.

    Args:
        model: whose gradients are meant; counted as float32.
        shared: over shared memory.

    Raises:
        SetupError: a rank's memory cannot be opened by another.
    """
    meet, blocks = meeting(shared), _blocks(model)

    def work() -> None:
        meet()
        for block in blocks:
            block.sum_share()
            for peer in block.shares:
                peer.copy_(block.share)

    return work


def least_in_shares(model: nn.Module, shared: Transport) -> tuple[Callable[[], object], torch.optim.Optimizer]:
    """The same where each rank steps its share with AdamW: what follows backward, and the optimizer. Collective."""
    meet, blocks = meeting(shared), _blocks(model)
    parameters = [nn.Parameter(torch.zeros_like(block.share)) for block in blocks]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def stepped(*_: object) -> None:
        meet()

    optimizer.register_step_post_hook(stepped)

    def work() -> None:
        model.zero_grad()
        meet()
        for block, parameter in zip(blocks, parameters, strict=True):
            block.sum_share()
            parameter.grad = block.share

    return work, optimizer


@dataclass(frozen=True)
class _Block:
    own: torch.Tensor
    """Of this rank."""
    share: torch.Tensor
    """This rank's of it."""
    shares: list[torch.Tensor]
    """The same in the memory of each other."""
    hot: torch.Tensor
    """Stands for the gradients."""

    def sum_share(self) -> None:
        self.own.copy_(self.hot)
        for peer in self.shares:
            self.share.add_(peer)


def _blocks(model: nn.Module) -> list[_Block]:
    """All of a model's gradients. Collective."""
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rank, ranks, buffers = dist.get_rank(), dist.get_world_size(), _buffers_of_all(numel)
    hot, found = torch.ones(min(BLOCK, numel)), []
    for begin in range(0, numel, BLOCK):
        end = min(begin + BLOCK, numel)
        first, last = (begin + (end - begin) * (rank + n) // ranks for n in (0, 1))
        shares = [other[first:last] for place, other in enumerate(buffers) if place != rank]
        found.append(_Block(buffers[rank][begin:end], buffers[rank][first:last], shares, hot[: end - begin]))
    return found


def _buffers_of_all(numel: int) -> list[torch.Tensor]:
    """One of each rank, by rank: every rank sees the same bytes."""
    nbytes = max(1, numel) * 4
    number = os.memfd_create("stretto-floor")
    try:
        os.ftruncate(number, nbytes)
        mine = map_shared(number, nbytes, fresh=True)
        everyone: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(everyone, (os.getpid(), number))
        mappings = [mine if pid == os.getpid() else open_buffer(pid, theirs, nbytes) for pid, theirs in everyone]
        dist.barrier()  # all have opened all
    finally:
        os.close(number)
    return [torch.frombuffer(mapping, dtype=torch.float32)[:numel] for mapping in mappings]


def open_buffer(pid: int, number: int, nbytes: int) -> mmap.mmap:
    """The memory behind a descriptor of another process.

    Raises:
        SetupError: it cannot be opened.
    """
    try:
        theirs = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError as error:
        raise SetupError(f"the memory of process {pid} cannot be opened: {error.strerror}") from error
    try:
        return map_shared(theirs, nbytes)
    finally:
        os.close(theirs)
