"""Several hosts with several ranks each: gradients are summed inside each host before anything leaves it.

    all ranks of a host publish ──> place p sums slice p ──> all-reduce with place p of every other host
                                                         ──> place p writes slice p into the memory of all its host

A rank's place is its index among the ranks of its host. A message has as many slices as the smallest host has ranks, so
that each slice has one owner on every host; places beyond that own none. The owners of a slice all-reduce it in a ring:
a host sends 2 (H - 1) / H of the message with H hosts, however many ranks it has. A flat ring over all P ranks sends
2 (P - 1) / P over each link between hosts: twice as much at two hosts with many ranks each, 1.5 times with two each.

Inside a host slices are summed in rank order, half types in float32; between hosts the message travels in its own
dtype, half types too. Gloo computes each element on one rank and copies it to the others, so the bits are the same
everywhere. See host.py for how the ranks of a host meet; the all-reduce between hosts is what a message does outside
its host.

[Note: another kind]  Inside a host a message has a name, and a rank that calls something else is told. Between hosts
this is not so: a rank that is alone on its host, or all ranks of one host, could begin a pass while the others step,
and Gloo ends a process that receives more than it expects. But Gloo keeps different kinds of collectives apart. So when
ranks meet, their numbers travel by a gather, which nothing else uses, and each rank adds them up. Calls that do not fit
together then wait, and ranks are told where the others are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..wording import MIB, describe_ranks
from .base import Transport, Work
from .counterparts import Counterparts
from .host import Host
from .host_memory import HostMemoryTransport
from .host_shares import HostShares
from .message import Message, Posted
from .shared_memory import CLOSE_SECONDS
from .slices import slice_of
from .spreading import SharesUnderWay, Spreading
from .staging import Staging
from .sums import PIECE_BYTES, SMALL_BYTES, Block, action, blocks, views

Hosts = Sequence[Sequence[int]]
"""The ranks of each host in order; hosts in the order of their first ranks."""


def why_not(base: Transport) -> str | None:
    """Why only ``base`` can carry slices between hosts; None if a Gloo group can be made."""
    if base.store is None:
        return f"{base.name} has no store, by which ranks of different hosts could find each other"
    return None if dist.is_gloo_available() else "this torch was built without Gloo"


class HierarchicalTransport(HostMemoryTransport):
    """Collectives of ranks on several hosts, some of which share memory; tensors on other devices go over ``base``.

    Made by :func:`stretto.transport.choose`, since ranks have to open each other's memory first. Collective.

    Args:
        host: the ranks of this host.
        hosts: the ranks of each host.
        base: a transport of all ranks, for objects and for tensors that are not in a host's memory.
        name: of the place in ``base``'s store where hosts meet; the same on all ranks, and never used before.
    """

    def __init__(self, host: Host, hosts: Hosts, base: Transport, name: str) -> None:
        super().__init__(host, base)
        self.name = f"hierarchical ({base.world_size} ranks on {len(hosts)} hosts)"
        self.caps_follow_link = True
        self.bucket_cap_bytes = 4 * MIB
        self.last_bucket_cap_bytes = MIB
        self.hosts = tuple(map(tuple, hosts))
        self._team = Team(host, self.hosts, base, name)

    def _sum(self, tensor: torch.Tensor, numel: int) -> Work:
        if tensor.numel() and self.host.page.arena.locate(tensor) is not None:
            return self._post([Sum(self._team, tensor, numel)])
        step = PIECE_BYTES // tensor.itemsize
        pieces = enumerate(torch.split(tensor, step))
        return self._post(Sum(self._team, piece, numel - n * step, staged=True) for n, piece in pieces)

    def reduce_shares(self, tensor: torch.Tensor, numel: int) -> Work:
        """Mean of this rank's share of the first ``numel`` elements, and sum of what follows; other shares are lost."""
        divisible = self._team.is_even and tensor.is_cpu and not tensor.is_complex()
        if not divisible or tensor.nbytes <= SMALL_BYTES or self.host.page.arena.locate(tensor) is None:
            return self.all_reduce_mean(tensor, numel)
        return self._post([HostShares(self._team, tensor, numel)])

    def meet(self, numbers: MutableSequence[int], action: bytes) -> Work:
        """The sums of numbers, in place. See [Note: another kind].

        Args:
            numbers: 64-bit, contiguous.
            action: at most 16 bytes.
        """
        return self._post([SumOfFew(self._team, torch.frombuffer(numbers, dtype=torch.int64), action)])

    def spreading(self, messages: int, wait_for: Callable[[Work, str], None]) -> Spreading | None:
        """For shares that go into each host's common memory; None if hosts have unequal numbers of ranks.

        Collective. Arguments as of :class:`Spreading`.
        """
        return Spreading(self._team, messages, wait_for) if self._team.is_even else None

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Each slice leaves the root's host through its owner there."""
        if tensor.device.type != "cpu":
            return self.base.broadcast(tensor, root)
        parts = torch.split(tensor.view(torch.uint8), PIECE_BYTES)
        return self._post(CopyAcross(self._team, part, root) for part in parts)

    def abandon(self, work: Any, handle: str, told: str) -> None:
        """Groups underneath with something under way are never freed."""
        if isinstance(work, SharesUnderWay):
            work.doubt()  # and goes on: others of this host wait for it
            return
        if self.host.awaits_outside():
            self._team.counterparts.abandon()
        if not isinstance(work, Posted):  # a comm hook's
            self.base.abandon(work, handle, told)

    def close(self) -> None:
        """Leave the ranks of the other hosts. Memory goes with the last tensor in it."""
        self.host.flush(CLOSE_SECONDS)
        self._team.counterparts.close()
        self.base.close()

    def _post(self, messages: Iterable[AcrossHosts | HostShares]) -> Work:
        _ = self.process_group  # raises on every rank if it was destroyed, and the connections with it
        return [self.host.post(message) for message in messages][-1]  # they end in order


class Team:
    """What the messages of one transport have in common: this rank's host, and the connection to the others.

    Args:
        host, hosts, base, name: as those of the transport.
    """

    def __init__(self, host: Host, hosts: Hosts, base: Transport, name: str) -> None:
        self.host = host
        self.staging = Staging(host)
        self.world_size = base.world_size
        self.slices = min(map(len, hosts))
        self.is_even = self.slices == max(map(len, hosts))
        self.counterparts = Counterparts(base, lambda: host.patience)
        self.hosts = hosts
        self.host_number, _ = self.host_of(base.rank)
        if host.local_rank < self.slices:
            host.abroad = _of_others([ranks[host.local_rank] for ranks in hosts if base.rank not in ranks])
            self.counterparts.connect(f"{name}/{host.local_rank}", self.host_number, len(hosts))

    def host_of(self, rank: int) -> tuple[int, int]:
        """The number of its host, and its place there."""
        found = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return found, self.hosts[found].index(rank)

    def own_slice(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """First and last (excluded) element that this rank owns. Small messages are not cut: the first owns them."""
        slices = 1 if numel * dtype.itemsize <= SMALL_BYTES else self.slices
        return slice_of(numel, self.host.local_rank, slices)


def _of_others(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} of {'another host' if len(ranks) == 1 else 'other hosts'}"


@dataclass(frozen=True)
class OwnSlice:
    """The slice of a message that this rank owns, in the memory of every rank of the host."""

    source: torch.Tensor
    """The whole slice, in the memory of the rank from which it leaves and to which it returns."""
    blocks: tuple[Block, ...]
    """Cut to fit the processor's cache; the source's part comes first."""


class AcrossHosts(Message, abc.ABC):
    """One message between all ranks; see host.py for when its methods are called.

    Args:
        team: those who take part.
        action: the same on all ranks.
        flat: what is to be replaced.
        staged: whether it lies outside the arena, and passes through memory inside.
        source: the place whose memory stands for this host towards the others.
    """

    tensor: torch.Tensor
    by_all = True

    def __init__(self, team: Team, action: bytes, flat: torch.Tensor, *, staged: bool, source: int) -> None:
        self.action = action
        self.numel = flat.numel()
        self.tensor = team.staging.take(flat.nbytes) if staged else flat
        self._team = team
        self._flat = flat
        self._staged = staged
        self._source = source
        self._averaged = 0  # how many of the first elements are divided by the world size
        self._share: OwnSlice | None = None

    def begin(self, entries: Sequence[bytes]) -> Any:
        """This rank's part: first inside the host, then outside."""
        key = (self.action, self.numel, self._averaged, *entries)
        routes = self._team.host.routes
        if key not in routes:
            routes[key] = self._cut(entries)
        self._share = routes[key]
        return None if self._share is None else self._leave(self._share)

    def _cut(self, entries: Sequence[bytes]) -> OwnSlice | None:
        dtype = self._flat.dtype
        low, high = self._team.own_slice(self.numel, dtype)
        if low == high:
            return None
        host, divisor = self._team.host, self._team.world_size
        cut = blocks(host, entries, dtype, low, high, self._averaged, divisor, self._source)
        return OwnSlice(views(host, entries, dtype, low, high)[self._source], tuple(cut))

    @abc.abstractmethod
    def _leave(self, share: OwnSlice) -> Work:
        """Begin what goes on between hosts with this rank's share."""

    def end(self) -> None:
        """The share is complete: write it into the memory of all ranks of the host."""
        if self._share is not None:
            for block in self._share.blocks:
                block.write()

    def release(self) -> None:
        """All shares are in place."""
        if self._staged:
            self._flat.copy_(self._team.staging.view(self.tensor, self._flat))
            self._team.staging.give(self.tensor)


class Sum(AcrossHosts):
    """The sum over all ranks, the first elements divided."""

    def __init__(self, team: Team, flat: torch.Tensor, averaged: int, *, staged: bool = False) -> None:
        super().__init__(team, action("mean" if averaged > 0 else "sum", flat.dtype), flat, staged=staged, source=0)
        self._averaged = averaged
        if staged:
            team.staging.view(self.tensor, flat).copy_(flat)

    def _leave(self, share: OwnSlice) -> Work:
        for block in share.blocks:
            block.add_up()
        return self._team.counterparts.all_reduce(share.source)


class SumOfFew(Sum):
    """A sum over all ranks, by a name of its own. See [Note: another kind]."""

    def __init__(self, team: Team, numbers: torch.Tensor, action: bytes) -> None:
        super().__init__(team, numbers, 0, staged=True)
        self.action = action
        self._brought: list[torch.Tensor] = []

    def _leave(self, share: OwnSlice) -> Work:
        for block in share.blocks:
            block.add_up()
        self._brought = [torch.empty_like(share.source) for _ in self._team.hosts]
        return self._team.counterparts.all_gather(self._brought, share.source)

    def end(self) -> None:
        """Add up what all hosts have brought; then as for any message."""
        if self._share is not None:
            torch.sum(torch.stack(self._brought), 0, out=self._share.source)
        super().end()


class CopyAcross(AcrossHosts):
    """One rank's bytes for all."""

    def __init__(self, team: Team, flat: torch.Tensor, root: int) -> None:
        self._from, place = team.host_of(root)
        source = place if self._from == team.host_number else 0
        super().__init__(team, f"bcast from {root}".encode(), flat, staged=True, source=source)
        if self._from == team.host_number and place == team.host.local_rank:
            self.tensor[: self.numel].copy_(flat)

    def _leave(self, share: OwnSlice) -> Work:
        return self._team.counterparts.broadcast(share.source, self._from)
