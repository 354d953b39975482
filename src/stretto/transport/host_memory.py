"""The common part of the transports over the memory of a host."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .base import Leftover, Transport, Work, as_reals
from .common import CommonMemory, common_memory
from .host import Host
from .ordinary import elements


class HostMemoryTransport(Transport):
    """Tensors of the host lie in memory that its ranks map; objects and tensors of other devices go over ``base``.

    Args:
        host: the ranks of this host, also for other kinds of messages.
        base: a transport of all ranks.
    """

    own_channel = True

    def __init__(self, host: Host, base: Transport) -> None:
        self.rank = base.rank
        self.world_size = base.world_size
        self.store = base.store
        self.host = host
        self.base = base

    @property
    def patience(self) -> float:  # type: ignore[override]  # never assigned elsewhere
        """That of the host."""
        return self.host.patience

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the host that all its ranks map."""
        if device.type != "cpu":
            return self.base.allocate(numel, dtype, device)
        return elements(self.host.allocate(numel * dtype.itemsize), dtype)

    def common(self, nbytes: int, wait_for: Callable[[Work, str], None], what: str) -> CommonMemory:
        """Memory that exists once for all ranks of a host. Collective; arguments as of ``common_memory``."""
        return common_memory(self.host, nbytes, wait_for, what)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum in place: in rank order inside each host."""
        return self.all_reduce_mean(tensor, 0)

    def all_reduce_mean(self, tensor: torch.Tensor, numel: int) -> Work:
        """The same, with the first ``numel`` elements divided by the world size."""
        if not tensor.is_cpu:
            tensor[:numel].div_(self.world_size)
            return self.base.all_reduce(tensor)
        return self._sum(as_reals(tensor), 2 * numel if tensor.is_complex() else numel)

    @abc.abstractmethod
    def _sum(self, tensor: torch.Tensor, numel: int) -> Work:
        """Sum a real tensor that lies on the host, and divide its first ``numel`` elements."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Over ``base``."""
        return self.base.all_gather_object(value)

    @property
    def process_group(self) -> Any:
        """Of ``base``."""
        return self.base.process_group

    @property
    def leftovers_for_hooks(self) -> Sequence[Leftover]:
        """Of ``base``."""
        return self.base.leftovers

    def flush(self, seconds: float) -> None:
        """Give the other ranks what they need from this one, if they come within so many seconds.

        For a rank that leaves, or will not come back for a while: what it has begun progresses only while it waits.
        """
        self.host.flush(seconds)

    def break_off(self, reason: str) -> None:
        """End everything on this host, for this reason; other hosts wait in vain."""
        self.host.lose_patience(reason)
