"""Ranks of one host: gradients are summed where they lie.

sums.py has what is done to memory, host.py how ranks meet.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableSequence
from typing import Any

import torch

from ..specs import MIB
from .base import Transport, Work, abandon
from .common import Offered
from .host import Host
from .memory import Location
from .message import Posted
from .ordinary import elements
from .staging import Staging
from .sums import PIECE_BYTES, SMALL_BYTES, Copy, StagedSum, SumForAll, SumOfNumbers, SumOfShare, SumOfSlices

CLOSE_SECONDS = 5.0
"""How long a rank that leaves stays for others that have not yet read what it has sent."""


class SharedMemoryTransport:
    """Collectives of ranks that share this host's memory; tensors of other devices go over ``base``.

    Made by :func:`stretto.transport.choose`, since all ranks have to open each other's memory first.

    Args:
        host: the ranks, which are all ranks of ``base``.
        base: a transport of the same ranks, for objects and for tensors that are not in this host's memory.
    """

    def __init__(self, host: Host, base: Transport) -> None:
        self.name = "shared_memory"
        self.rank = base.rank
        self.world_size = base.world_size
        self.bucket_cap_bytes = 17 * MIB // 8  # matrices whose sizes are powers of two, and their biases: see sizing.py
        self.last_bucket_cap_bytes = MIB // 4
        self.own_channel = True
        self.store = getattr(base, "store", None)
        self.patience = host.patience
        self._host = host
        self._base = base
        self._staging = Staging(host)
        weakref.finalize(self, _flush_at_exit, weakref.ref(host))

    @property
    def host(self) -> Host:
        """The ranks, for whoever has messages of other kinds for them."""
        return self._host

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """On the host, in memory that all its ranks map."""
        if device.type != "cpu":
            return self._base.allocate(numel, dtype, device)
        return elements(self._host.allocate(numel * dtype.itemsize), dtype)

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """All ranks share one memory."""
        return (tuple(range(self.world_size)),)

    def common(self, nbytes: int) -> Offered:
        """Memory that lies once for all ranks of a home. Collective; it is there when the work is done."""
        return Offered.by(self._host, nbytes)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum in place, in rank order."""
        return self.all_reduce_mean(tensor, 0)

    def all_reduce_mean(self, tensor: torch.Tensor, numel: int) -> Work:
        """Sum in place, in rank order; then divide the first ``numel`` elements by the world size."""
        if not tensor.is_cpu:
            tensor[:numel].div_(self.world_size)
            return self._base.all_reduce(tensor)
        if tensor.is_complex():
            tensor, numel = torch.view_as_real(tensor).view(-1), 2 * numel
        if tensor.nbytes <= SMALL_BYTES:
            return self._host.post(SumForAll(self._host, tensor, self._staging, numel))
        if (place := self._host.page.arena.locate(tensor)) is not None:
            return self._host.post(SumOfSlices(self._host, tensor, numel), place)
        works, step = [], PIECE_BYTES // tensor.itemsize
        for start in range(0, tensor.numel(), step):
            piece = tensor[start : start + step]
            averaged = min(max(numel - start, 0), piece.numel())
            works.append(self._host.post(StagedSum(self._host, piece, self._staging, averaged)))
        return works[-1]  # they end in order

    def meet(self, numbers: MutableSequence[int], action: bytes) -> Work:
        """The sums of two numbers, in place, by a name of its own: it is told where other ranks called something else.

        Args:
            numbers: two, from 0 to 2**63, summed too.
            action: at most 16 bytes.
        """
        assert len(numbers) == 2, "an entry of the ring has room for two"
        return self._host.post(SumOfNumbers(numbers, action), Location(numbers[0], numbers[1], 0))

    def reduce_shares(self, tensor: torch.Tensor, numel: int) -> Work:
        """The same of this rank's share of the first ``numel`` elements, and of all that follows them, in place.

        What the rest holds then is undefined.
        """
        here = tensor.is_cpu and tensor.nbytes > SMALL_BYTES and self._host.page.arena.locate(tensor) is not None
        if not here or tensor.is_complex():
            return self.all_reduce_mean(tensor, numel)
        return self._host.post(SumOfShare(self._host, tensor, numel))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Copied by each receiver from the root's memory."""
        if tensor.device.type != "cpu":
            return self._base.broadcast(tensor, root)
        pieces = torch.split(tensor.view(torch.uint8), PIECE_BYTES)
        return [self._host.post(Copy(self._host, piece, self._staging, root)) for piece in pieces][-1]

    def all_gather_object(self, value: Any) -> list[Any]:
        """By the transport beneath."""
        return self._base.all_gather_object(value)

    @property
    def process_group(self) -> Any:
        """The group beneath, for whoever asks for one (comm hooks); None if there is none."""
        return getattr(self._base, "process_group", None)

    def flush(self, seconds: float) -> None:
        """Let the others have what they need of this rank, as far as they come within so many seconds.

        For a rank that leaves, or will not come back for a while: what it has begun goes on only while it waits.
        """
        self._host.flush(seconds)

    def break_off(self, reason: str) -> None:
        """Nothing will ever be done again, on any rank, for this reason."""
        self._host.lose_patience(reason)

    def abandon(self, work: Any) -> None:
        """Memory waits for nothing; the group beneath may, for what a comm hook has begun there."""
        if not isinstance(work, Posted):
            abandon(self._base, work)

    def dead(self) -> list[tuple[int, int]]:
        """Rank and pid of those whose process has ended without a word."""
        return [(peer.rank, peer.pid) for peer in self._host.dead()]

    def close(self) -> None:
        """Memory goes with the last tensor in it, everything else with the transport; but peers may still read."""
        self._host.flush(CLOSE_SECONDS)
        self._base.close()


def _flush_at_exit(host: weakref.ref[Host]) -> None:
    if (alive := host()) is not None:
        alive.flush(CLOSE_SECONDS)
