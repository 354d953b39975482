"""What an all-reduce through shared memory costs at least on this hardware, in a step that is not wrong about it.

At the end of backward the ranks meet once, by a message of 4 bytes; then each writes as many bytes as it has gradients
into memory that all ranks map, sums its share over the ranks, and writes that share into everybody's memory: in blocks
that fit a core's cache, by flat operations, with no further meeting and nothing in Python for a parameter.

The sums are of no use: the gradients themselves are not what is copied. They are in the cache when a reducer takes
them, so the source of the copy is one block that stays in the cache, and ranks read what others may be writing. What is
left out cannot be had for less; what is done cannot be left out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

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
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    buffers = _buffers_of_all(numel)
    mine, others = buffers[dist.get_rank()], [b for rank, b in enumerate(buffers) if rank != dist.get_rank()]
    meet, hot = meeting(shared), torch.ones(min(BLOCK, numel))
    blocks = [_slices(mine, others, at, min(at + BLOCK, numel)) for at in range(0, numel, BLOCK)]

    def work() -> None:
        meet()
        for block, share, shares in blocks:
            block.copy_(hot[: block.numel()])
            for peer in shares:
                share.add_(peer)
            for peer in shares:
                peer.copy_(share)

    return work


def _slices(
    mine: torch.Tensor, others: list[torch.Tensor], begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A block of this rank, this rank's share of it, and that share in the memory of each other."""
    first, last = (begin + (end - begin) * (dist.get_rank() + n) // dist.get_world_size() for n in (0, 1))
    return mine[begin:end], mine[first:last], [other[first:last] for other in others]


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
