"""Ranks as threads of one process: no ports, no processes. For tests, documentation and notebooks.

    group = LocalGroup(2)
    rank r: attach(model, transport=group.transport(r))

The last rank to arrive at a collective does the work for all, in rank order, so results are the same in every run.
"""

from __future__ import annotations

import datetime
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from ..wording import MIB
from .base import Transport, Work


@dataclass
class _Collective:
    """One collective: what each rank brought, and whether all have come."""

    action: str
    brought: dict[int, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None


class LocalGroup:
    """The meeting place of ``world_size`` threads.

    Example::

        group = LocalGroup(2)
        threads = [threading.Thread(target=train, args=(group.transport(rank),)) for rank in range(2)]
    """

    def __init__(self, world_size: int, timeout: float = 30.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.store = HashStore()
        self._lock = threading.Lock()
        self._meetings: dict[int, _Collective] = {}
        self._broken: str | None = None

    def transport(self, rank: int) -> LocalTransport:
        """The transport of one rank."""
        return LocalTransport(self, rank)

    def abort(self, reason: str) -> None:
        """Let every waiting rank raise ``RuntimeError(reason)``, now and from now on."""
        with self._lock:
            self._broken = reason
            for meeting in self._meetings.values():
                meeting.failure = reason
                meeting.done.set()

    def meet(self, sequence: int, rank: int, action: str, value: Any, combine: Callable[[list[Any]], None]) -> Work:
        """Bring ``value`` to the collective number ``sequence``; the rank that completes it runs ``combine``."""
        with self._lock:
            meeting = self._meetings.setdefault(sequence, _Collective(action))
            if self._broken is not None:
                meeting.failure = self._broken
                meeting.done.set()
            elif meeting.action != action:
                meeting.failure = f"collective {sequence}: rank {rank} called {action}, others {meeting.action}"
                meeting.done.set()
            meeting.brought[rank] = value
            if len(meeting.brought) == self.world_size:
                self._meetings.pop(sequence)
                if meeting.failure is None:
                    combine([meeting.brought[r] for r in range(self.world_size)])
                meeting.done.set()
        return _LocalWork(meeting, self)


@dataclass
class _LocalWork:
    meeting: _Collective
    group: LocalGroup

    def is_completed(self) -> bool:
        return self.meeting.done.is_set()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if not self.meeting.done.wait(self.group.timeout if timeout is None else timeout.total_seconds()):
            missing = sorted(set(range(self.group.world_size)) - set(self.meeting.brought))
            raise RuntimeError(
                f"{self.meeting.action}: ranks {missing} did not make this call within {self.group.timeout:.0f} s"
            )
        if self.meeting.failure is not None:
            raise RuntimeError(self.meeting.failure)


class LocalTransport(Transport):
    """One thread's end of a :class:`LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.name = "local (threads of one process)"
        self.rank = rank
        self.world_size = group.world_size
        self.bucket_cap_bytes = MIB
        self.last_bucket_cap_bytes = MIB // 4
        self.own_channel = True
        self.store = group.store
        self.patience = group.timeout
        self._group = group
        self._sequence = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Plain memory; all threads see it anyway."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum in rank order."""
        return self._meet(f"all_reduce of {tensor.numel()} x {tensor.dtype}", tensor, _sum)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Copy ``root``'s."""

        def copy(tensors: list[torch.Tensor]) -> None:
            for rank, other in enumerate(tensors):
                if rank != root:
                    other.copy_(tensors[root])

        return self._meet(f"broadcast of {tensor.numel()} x {tensor.dtype}", tensor, copy)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Pickled as between processes, so that no rank sees later changes of another's objects."""
        gathered: list[bytes] = []
        box = (pickle.dumps(value), gathered)

        def spread(boxes: list[tuple[bytes, list[bytes]]]) -> None:
            for _, target in boxes:
                target.extend(pickled for pickled, _ in boxes)

        self._meet("all_gather_object", box, spread).wait()
        return [pickle.loads(pickled) for pickled in gathered]

    def break_off(self, reason: str) -> None:
        """End everything, on all ranks, for this reason."""
        self._group.abort(reason)

    def close(self) -> None:
        """Nothing is held."""

    def _meet(self, action: str, value: Any, combine: Callable[[list[Any]], None]) -> Work:
        self._sequence += 1
        return self._group.meet(self._sequence, self.rank, action, value, combine)


def _sum(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
