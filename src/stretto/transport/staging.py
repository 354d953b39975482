"""Shared memory through which tensors that lie elsewhere pass."""

from __future__ import annotations

import torch

from .host import Host
from .ordinary import elements

KEPT_BYTES = 16 * 1024 * 1024
"""How much is kept for later messages."""

_Views = dict[tuple[torch.dtype, int], torch.Tensor]


class Staging:
    """Memory of one rank's arena, kept by size.

    Args:
        host: gives it.
    """

    def __init__(self, host: Host) -> None:
        self.in_use = 0
        """Bytes."""
        self.host = host
        self._free: dict[int, list[torch.Tensor]] = {}
        self._views: dict[int, tuple[torch.Tensor, _Views]] = {}  # by the id of the memory, which lives as long
        self._kept = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` bytes, as uint8; rounded up to a power of two."""
        size = max(64, 1 << (nbytes - 1).bit_length())
        self.in_use += size
        if not self._free.get(size):
            return self.host.allocate(size)
        self._kept -= size
        return self._free[size].pop()

    def give(self, memory: torch.Tensor) -> None:
        """Nobody uses it any more."""
        self.in_use -= memory.numel()
        if self._kept + memory.numel() <= KEPT_BYTES:
            self._kept += memory.numel()
            self._free.setdefault(memory.numel(), []).append(memory)
        else:
            self._views.pop(id(memory), None)

    def view(self, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The beginning of memory that was taken, as elements like these. Cached, since cutting it takes 2 us."""
        _, known = self._views.setdefault(id(memory), (memory, {}))
        key = like.dtype, like.numel()
        if key not in known:
            known[key] = elements(memory[: like.nbytes], like.dtype)
        return known[key]
