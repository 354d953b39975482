"""Memory that several ranks have in common: it lies in the arena of the first rank of their host.

Tensors in it have storages of their own, which may overlap: saving or copying one covers only its own bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from .base import Work
from .host import Host
from .message import Message
from .ordinary import tensor_over
from .page import Entry


class CommonMemory:
    """Zeroed memory from which tensors are cut.

    Args:
        buffer: the memory; it lives as long as any tensor in it.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements from byte ``start`` on, flat, as a tensor with a storage of its own."""
        return tensor_over(self._buffer, start, numel, dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")

    def words(self, count: int) -> memoryview:
        """So many four-byte numbers from the first byte on, each written and read atomically."""
        return self._buffer[: 4 * count].cast("I")


def own_memory(nbytes: int) -> CommonMemory:
    """Memory of this process alone."""
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows knows no forks
    return CommonMemory(memoryview(mmap.mmap(-1, max(nbytes, 1), **private)))


class OfferMemory(Message):
    """The first rank's memory, opened by the others. Collective among the ranks of a host."""

    action = b"common memory"
    root = 0
    by_all = True

    def __init__(self, host: Host, nbytes: int) -> None:
        self.numel = nbytes
        self.tensor = host.allocate(nbytes) if host.local_rank == 0 else None
        self.memory: CommonMemory | None = None
        self._host = host

    def begin(self, entries: Sequence[bytes]) -> None:
        """Open it; not on the first rank, which has it open and would count it twice."""
        if self.tensor is not None:
            self.memory = CommonMemory(self._host.page.arena.buffer_of(self.tensor))
        else:
            location = Entry.unpack(entries[0]).location
            self.memory = CommonMemory(self._host.peers[0].memory.buffer_at(location, self.numel))


def common_memory(host: Host, nbytes: int, wait_for: Callable[[Work, str], None], what: str) -> CommonMemory:
    """What all ranks of the host see. Collective among them.

    Args:
        host: the ranks.
        nbytes: how much.
        wait_for: waits for a collective, named by a noun.
        what: the noun.
    """
    offer = OfferMemory(host, nbytes)
    wait_for(host.post(offer), what)
    assert offer.memory is not None, "it has been waited for"
    return offer.memory
