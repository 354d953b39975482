"""Ranks of one host: gradients are summed where they lie.

sums.py has what is done to memory, host.py how ranks meet.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableSequence
from typing import Any

import torch

from ..wording import MIB
from .base import Transport, Work
from .host import Host
from .host_memory import HostMemoryTransport
from .memory import Location
from .message import Posted
from .staging import Staging
from .sums import PIECE_BYTES, SMALL_BYTES, Copy, StagedSum, SumForAll, SumOfNumbers, SumOfShare, SumOfSlices

CLOSE_SECONDS = 5.0
"""How long a rank that leaves waits for others that have not yet read what it has sent."""


class SharedMemoryTransport(HostMemoryTransport):
    """Collectives of ranks that share this host's memory; tensors of other devices go over ``base``.

    Made by :func:`stretto.transport.choose`, since all ranks have to open each other's memory first.

    Args:
        host: the ranks, which are all ranks of ``base``.
        base: a transport of the same ranks, for objects and for tensors that are not in this host's memory.
    """

    def __init__(self, host: Host, base: Transport) -> None:
        super().__init__(host, base)
        self.name = "shared_memory"
        self.hosts = (tuple(range(self.world_size)),)
        self.bucket_cap_bytes = 17 * MIB // 8  # matrices whose sizes are powers of two, and their biases: see sizing.py
        self.last_bucket_cap_bytes = MIB // 4
        self._staging = Staging(host)
        weakref.finalize(self, _flush_at_exit, weakref.ref(host))

    def _sum(self, tensor: torch.Tensor, numel: int) -> Work:
        if tensor.nbytes <= SMALL_BYTES:
            return self.host.post(SumForAll(self._staging, tensor, numel))
        if (place := self.host.page.arena.locate(tensor)) is not None:
            return self.host.post(SumOfSlices(self.host, tensor, numel), place)
        step = PIECE_BYTES // tensor.itemsize
        pieces = enumerate(torch.split(tensor, step))  # they end in order
        return [self.host.post(StagedSum(self._staging, piece, numel - n * step)) for n, piece in pieces][-1]

    def reduce_shares(self, tensor: torch.Tensor, numel: int) -> Work:
        """Mean of this rank's share of the first ``numel`` elements, and sum of what follows; other shares are lost."""
        place = self.host.page.arena.locate(tensor) if tensor.is_cpu and tensor.nbytes > SMALL_BYTES else None
        if place is None or tensor.is_complex():
            return self.all_reduce_mean(tensor, numel)
        return self.host.post(SumOfShare(self.host, tensor, numel), place)

    def meet(self, numbers: MutableSequence[int], action: bytes) -> Work:
        """The sums of two numbers, in place, under a name: so ranks that called something else are noticed.

        Args:
            numbers: two, from 0 to 2**63, summed too.
            action: at most 16 bytes.
        """
        assert len(numbers) == 2, "an entry of the ring has room for two"
        return self.host.post(SumOfNumbers(numbers, action), Location(numbers[0], numbers[1], 0))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Each receiver copies from the root's memory."""
        if tensor.device.type != "cpu":
            return self.base.broadcast(tensor, root)
        pieces = torch.split(tensor.view(torch.uint8), PIECE_BYTES)
        return [self.host.post(Copy(self._staging, piece, root)) for piece in pieces][-1]

    def abandon(self, work: Any, handle: str, told: str) -> None:
        """Shared memory waits for nothing; the group underneath may, for what a comm hook has begun there."""
        if not isinstance(work, Posted):
            self.base.abandon(work, handle, told)

    def dead(self) -> list[tuple[int, int]]:
        """Rank and pid of those whose process has ended without giving a reason."""
        return [(peer.rank, peer.pid) for peer in self.host.dead()]

    def close(self) -> None:
        """Memory is freed with the last tensor in it, everything else with the transport; but peers may still read."""
        self.host.flush(CLOSE_SECONDS)
        self.base.close()


def _flush_at_exit(host: weakref.ref[Host]) -> None:
    if (alive := host()) is not None:
        alive.flush(CLOSE_SECONDS)


def let_go(host: weakref.ref[Host]) -> None:
    """The group was destroyed on this rank: ranks that wait for it are told, once they have what they were to get."""
    if (alive := host()) is not None:
        alive.flush(CLOSE_SECONDS)
        alive.break_off("it has let go of its process group")
