"""Several transports of the same ranks that take turns, as in section 5.4 of the VLDB paper on DDP (2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import SetupError
from .base import Transport, Work


class RoundRobinTransport(Transport):
    """All-reduces go to each of ``transports`` in turn; everything else goes to the first.

    All ranks issue all-reduces in the same order, so all take the same turn.

    Example::

        groups = [torch.distributed.new_group() for _ in range(3)]
        sync = stretto.attach(model, process_groups=groups)
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        members = {(transport.rank, transport.world_size) for transport in transports}
        if len(members) != 1:
            raise SetupError(
                f"process_groups must hold the same ranks in the same order, got (rank, size) {sorted(members)}.\n"
                "Make each of them with torch.distributed.new_group(ranks), with the same ranks."
            )
        first = transports[0]
        self.name = f"{len(transports)} x {first.name}"
        self.rank = first.rank
        self.world_size = first.world_size
        self.global_ranks = first.global_ranks
        self.caps_follow_link = first.caps_follow_link
        self.bucket_cap_bytes = first.bucket_cap_bytes
        self.last_bucket_cap_bytes = first.last_bucket_cap_bytes
        self.store = first.store
        self.leftovers = [one for transport in transports for one in transport.leftovers]
        self._transports = list(transports)
        self._turn = 0

    @property
    def patience(self) -> float | None:  # type: ignore[override]  # never assigned elsewhere
        """That of the first."""
        return self._transports[0].patience

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From the first."""
        return self._transports[0].allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """By the next in turn."""
        self._turn += 1
        return self._transports[self._turn % len(self._transports)].all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """By the first."""
        return self._transports[0].broadcast(tensor, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """By the first."""
        return self._transports[0].all_gather_object(value)

    @property
    def transports(self) -> Sequence[Transport]:
        """Those that take turns."""
        return self._transports

    @property
    def process_group(self) -> Any:
        """The first transport's; None if it has none."""
        return self._transports[0].process_group

    def break_off(self, reason: str) -> None:
        """All."""
        for transport in self._transports:
            transport.break_off(reason)

    def abandon(self, work: Any, handle: str, told: str) -> None:
        """Abandon on all transports: the others have messages under way as well."""
        for transport in self._transports:
            transport.abandon(work, handle, told)

    def close(self) -> None:
        """Close all."""
        for transport in self._transports:
            transport.close()
