"""Any torch.distributed process group: Gloo on CPU, NCCL on CUDA, MPI where torch was built with it.

For CUDA tensors the same calls suffice: NCCL runs on its own stream, ordered after the stream that filled the bucket,
and ``Work.wait`` orders the current stream after NCCL's without blocking the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Its functions take the default group of the moment of import as a default argument and never let go. Optimizers import
# it late, after the group was made; Gloo's threads then outlive destroy_process_group() and can abort the exit.
import torch.distributed.nn
from torch._C._distributed_c10d import Store

from ..errors import CommunicationError, UnsupportedError
from ..wording import MIB
from .base import Leftover, Transport, Work, as_reals, raised_by_handler
from .exchange import ShareSum, exchange_shares
from .letting_go import InFlight
from .native import GatheredShares, ScatteredSum, can_gather, can_sum
from .prompt import let_gloo_go_first
from .under_way import UnderWay

_leftovers: MutableMapping[dist.ProcessGroup, Leftover] = weakref.WeakKeyDictionary()
"""Leftovers of all groups: torch's objects have no room for them, and several handles may use one group."""


class ProcessGroupTransport(Transport):
    """Collectives of ``process_group`` (the default group if ``None``).

    Example::

        dist.init_process_group("gloo")
        sync = stretto.attach(model, transport=ProcessGroupTransport())
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group: object = process_group if process_group is not None else dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise UnsupportedError("this rank is not in process_group=: call attach only on the ranks that are")
        if group is None:
            raise UnsupportedError("there is no process group: call torch.distributed.init_process_group() before")
        if not isinstance(group, dist.ProcessGroup):
            kind = type(group).__name__
            advice = ""
            if hasattr(group, "get_group"):  # torch's DeviceMesh
                advice = '.\nWrite mesh["dp"].get_group(), with the name of the dimension that is averaged over.'
            raise UnsupportedError(
                f"process_group= takes what torch.distributed.new_group() returns, not {kind}{advice}"
            )
        # Weak: torch's registry owns the group. Held by hooks on a model past destroy_process_group(), it would live to
        # the end of the program, where Gloo's threads can abort the interpreter's exit.
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.name = f"process_group ({dist.get_backend(group)})"
        # NCCL's start-up cost is hidden by larger messages. What suits Gloo depends on the link, and is measured.
        waits_on_host = _waits_on_host(group)
        self.caps_follow_link = waits_on_host and "stretto" not in dist.get_backend(group)
        self.bucket_cap_bytes = 4 * MIB if waits_on_host else 25 * MIB
        self.last_bucket_cap_bytes = self.bucket_cap_bytes // 4
        self._patience = _timeout_of(group) if waits_on_host else None
        self.leftovers = (_leftovers.setdefault(group, Leftover(_named(self.global_ranks))),)
        self._sum = dist.AllreduceOptions()  # its default is a sum
        self._in_flight = InFlight()
        self.under_way: UnderWay | None = None
        """Shares that a step has sent; None if ``Work.wait`` does not block the host."""
        if (patience := self.patience) is not None:
            self.under_way = UnderWay(self._group, self.rank, patience)
            weakref.finalize(self, self.under_way.let_arrive)
        let_gloo_go_first()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; raises if it no longer exists."""
        group = self._group()
        if group is None:
            raise CommunicationError(
                f"rank {self.rank}: the process group was destroyed while a model is attached to it.\n"
                "Call detach() on the handle first, or dist.destroy_process_group() after the last backward."
            )
        return group

    @property
    def patience(self) -> float | None:  # type: ignore[override]  # never assigned elsewhere
        """The time-out that the group has now, which ``dist.set_timeout`` changes, or had when it was destroyed."""
        if self._patience is not None and (group := self._group()) is not None:
            self._patience = _timeout_of(group)
        return self._patience

    @property
    def store(self) -> Store | None:  # type: ignore[override]  # never assigned elsewhere
        """The group's own store, by which its ranks found each other; it outlives the group."""
        try:
            store: Store = dist.distributed_c10d._get_process_group_store(self.process_group)
        except (KeyError, RuntimeError, ValueError):
            return None
        return store

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Plain memory of the device."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum in place. Complex tensors travel as pairs of reals, which sum alike."""
        return self._sent(self.process_group.allreduce, [as_reals(tensor)], self._sum)

    def reduce_shares(self, tensor: torch.Tensor, numel: int) -> Work:
        """Mean of this rank's share of the first ``numel`` elements, sum of what follows, in place.

        What the rest holds then is undefined.
        """
        sum_of = ScatteredSum if can_sum(tensor) else ShareSum
        return self._sent(sum_of, self.process_group, tensor, numel)

    def spread_share(self, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int]) -> Work:
        """Send this rank's share to all others, and receive theirs, one after the other, into ``received``.

        Args:
            received: flat, as long as the other ranks' shares together.
            share: flat, of the same dtype.
            numels: of the ranks' shares.
        """
        gather = GatheredShares if can_gather(share) else exchange_shares

        def send() -> Work:
            work = gather(self.process_group, received, share, numels)
            return work if self.under_way is None else self.under_way.add(work)

        return self._sent(send)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Send as bytes: every dtype that torch has can travel, also those the backend cannot add."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._sent(self.process_group.broadcast, [tensor.view(torch.uint8)], options)

    def _sent(self, send: Callable[..., Work], *arguments: Any) -> Work:
        """Send. A rank that Ctrl-C stops meanwhile cannot know whether its message has left; Python calls handlers of
        signals when the call returns, so that its result is lost."""
        try:
            return self._in_flight.add(send(*arguments))
        except BaseException as error:
            if not isinstance(error, Exception) or raised_by_handler(error):  # else it was refused
                self.leftovers[0].is_of(self.rank, "", type(error).__name__)
            raise

    def all_gather_object(self, value: Any) -> list[Any]:
        """Pickled; over NCCL through the current CUDA device."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def abandon(self, work: Any, handle: str, told: str) -> None:
        """Unless all is over, neither the group nor what is under way in it is ever freed.

        A Gloo group would wait, in ``destroy_process_group`` or at exit, for what never ends; see letting_go.py.
        """
        if self.under_way is not None:
            self.under_way.remove(work)
        if (group := self._group()) is None:
            return
        if not (is_over := work.is_completed()):
            self.leftovers[0].is_of(self.rank, handle, told)
        if not is_over or self._in_flight.is_under_way():  # a later one may wait for a rank that has failed likewise
            self._in_flight.never_free(group)

    def close(self) -> None:
        """The group belongs to whoever made it."""


def _named(ranks: Sequence[int]) -> str:
    return "" if len(ranks) == dist.get_world_size() else str([*ranks])


def _waits_on_host(group: dist.ProcessGroup) -> bool:
    """Whether ``Work.wait`` blocks the host; a group made without naming a backend has one for each device.

    stretto's backend, as in ``cpu:stretto,cuda:nccl``, blocks for all devices: torch makes no other next to it.
    """
    backend = dist.get_backend(group)
    several = backend == "undefined" or "gloo" in backend
    return backend in ("gloo", "mpi") or "stretto" in backend or (several and not torch.cuda.is_available())


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds; torch's default if the backend does not say (MPI)."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return float(getattr(options, "_timeout", dist.default_pg_timeout).total_seconds())
