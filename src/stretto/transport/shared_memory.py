"""Ranks of one host: gradients are summed where they lie.

A large message has two halves. When all have published, each rank sums its slice over everybody's memory, in rank
order, and writes the sum into everybody's memory; when all have finished, the result is there. A small one is copied
into memory that is not waited for, and each rank sums all of it for itself: one meeting instead of two. Either way
every element is summed in rank order, so the bits are the same on every rank, for every plan, in every run.

Half types are summed in float32 and rounded once. See host.py for how ranks meet.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..specs import dtype_name
from .base import Transport, Work
from .host import Host
from .ordinary import elements
from .page import Entry
from .staging import Staging

KIB, MIB = 1024, 1024 * 1024
SMALL_BYTES = 16 * KIB
"""Up to here each rank sums all of a message for itself."""
BLOCK_BYTES = 128 * KIB
"""Added and written in blocks that stay in the processor's cache in between."""
PIECE_BYTES = 4 * MIB
"""What does not lie in shared memory passes through it in pieces of this size."""
CLOSE_SECONDS = 5.0
"""How long a rank that leaves stays for others that have not yet read what it has sent."""
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


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
        self.bucket_cap_bytes = MIB // 2
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
        if self._host.page.arena.locate(tensor) is not None:
            return self._host.post(SumOfSlices(self._host, tensor, numel))
        works, step = [], PIECE_BYTES // tensor.itemsize
        for start in range(0, tensor.numel(), step):
            piece = tensor[start : start + step]
            averaged = min(max(numel - start, 0), piece.numel())
            works.append(self._host.post(StagedSum(self._host, piece, self._staging, averaged)))
        return works[-1]  # they end in order

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Copied by each receiver from the root's memory."""
        if tensor.device.type != "cpu":
            return self._base.broadcast(tensor, root)
        pieces = torch.split(tensor.view(torch.uint8), PIECE_BYTES)
        return [self._host.post(Copy(self._host, piece, self._staging, root)) for piece in pieces][-1]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Pickled; sizes first, then each rank's bytes."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self.all_reduce(sizes).wait()
        everyone = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        everyone[self.rank] = own
        for work in [self.broadcast(one, rank) for rank, one in enumerate(everyone)]:
            work.wait()
        return [pickle.loads(ctypes.string_at(one.data_ptr(), len(one))) for one in everyone]

    @property
    def process_group(self) -> Any:
        """The group beneath, for whoever asks for one (comm hooks); None if there is none."""
        return getattr(self._base, "process_group", None)

    def advance(self) -> None:
        """Do what can be done for messages under way, without waiting."""
        self._host.advance()

    def flush(self, seconds: float) -> None:
        """Let the others have what they need of this rank, as far as they come within so many seconds.

        For a rank that leaves, or will not come back for a while: what it has begun goes on only while it waits.
        """
        self._host.flush(seconds)

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


class SumForAll:
    """Each rank sums all of a small message: from everybody's staging memory into the tensor."""

    root = None
    by_all = False

    def __init__(self, host: Host, result: torch.Tensor, staging: Staging, averaged: int) -> None:
        self.action = _action("mean" if averaged else "sum", result.dtype)
        self.numel = result.numel()
        self._averaged = averaged
        self.tensor: torch.Tensor = staging.take(result.nbytes)
        self._host, self._result, self._staging = host, result, staging
        staging.view(self.tensor, result).copy_(result)

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum."""
        routes, divisor = self._host.routes, len(self._host.peers)
        key = (self._result.dtype, *entries)
        parts = routes.get(key)
        if parts is None:
            parts = routes[key] = views(self._host, entries, self._result.dtype, 0, self.numel)
        if self._result.dtype in _WIDER:
            total = _widened(parts)
            total[: self._averaged].div_(divisor)
            self._result.copy_(total)
            return
        if len(parts) == 1:
            self._result.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=self._result)
            for part in parts[2:]:
                self._result.add_(part)
        if self._averaged:
            self._result[: self._averaged].div_(divisor)

    def end(self) -> None:
        """Nothing is left."""

    def release(self) -> None:
        """The staging memory is free."""
        self._staging.give(self.tensor)


class SumOfSlices:
    """Each rank sums its slice in the first rank's memory and copies it to the others'."""

    root = None
    by_all = True

    def __init__(self, host: Host, tensor: torch.Tensor, averaged: int) -> None:
        self.action = _action("mean" if averaged else "sum", tensor.dtype)
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self.tensor: torch.Tensor = tensor
        self._averaged = averaged
        self._host = host

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum and write, block by block."""
        for block in self.blocks(entries):
            total = block.add_up()
            for part in block.parts[1:]:
                part.copy_(total)

    def blocks(self, entries: Sequence[bytes]) -> list[Block]:
        """This rank's slice of every rank's tensor, cut into blocks."""
        key = (self.dtype, self.numel, self._averaged, *entries)
        found: list[Block] | None = self._host.routes.get(key)
        if found is None:
            places = len(self._host.peers)
            low, high = slice_of(self.numel, self._host.place, places)
            edge = min(max(low, self._averaged), high)
            step = BLOCK_BYTES // self.dtype.itemsize
            found = [
                Block(views(self._host, entries, self.dtype, start, min(start + step, end)), divisor)
                for begin, end, divisor in ((low, edge, places), (edge, high, 1))
                for start in range(begin, end, step)
            ]
            self._host.routes[key] = found
        return found

    def end(self) -> None:
        """Nothing is left."""

    def release(self) -> None:
        """The result is in place."""


class StagedSum(SumOfSlices):
    """The same for a tensor that lies elsewhere."""

    def __init__(self, host: Host, result: torch.Tensor, staging: Staging, averaged: int) -> None:
        self._memory = staging.take(result.nbytes)
        super().__init__(host, staging.view(self._memory, result), averaged)
        self._result, self._staging = result, staging
        self.tensor.copy_(result)

    def release(self) -> None:
        """The result goes where it was asked for."""
        self._result.copy_(self.tensor)
        self._staging.give(self._memory)


class Copy:
    """One rank's tensor for all."""

    by_all = False

    def __init__(self, host: Host, tensor: torch.Tensor, staging: Staging, root: int) -> None:
        self.action = f"broadcast by {root}".encode()
        self.numel = tensor.numel()
        self.root = root
        self._host, self._result, self._staging = host, tensor, staging
        self.tensor: torch.Tensor | None = None
        if root == host.place:
            self.tensor = staging.take(tensor.nbytes)
            self.tensor[: self.numel].copy_(tensor)

    def begin(self, entries: Sequence[bytes]) -> None:
        """Receive."""
        if self.root != self._host.place:
            memory = self._host.peers[self.root].memory
            self._result.copy_(memory.bytes_at(Entry.unpack(entries[self.root]).location, self.numel))

    def end(self) -> None:
        """Whoever called may let go of the tensor."""
        del self._result

    def release(self) -> None:
        """The staging memory is free."""
        if self.tensor is not None:
            self._staging.give(self.tensor)


def views(host: Host, entries: Sequence[bytes], dtype: torch.dtype, low: int, high: int) -> list[torch.Tensor]:
    """Elements ``low`` to ``high`` of every rank's tensor."""
    size = dtype.itemsize
    return [
        elements(peer.memory.bytes_at(Entry.unpack(entry).location.plus(low * size), (high - low) * size), dtype)
        for peer, entry in zip(host.peers, entries, strict=True)
    ]


def slice_of(numel: int, place: int, places: int) -> tuple[int, int]:
    """First and last (excluded) element of one rank's share; shares begin at multiples of 64 elements."""
    share = -(-numel // (64 * places)) * 64
    return min(place * share, numel), min((place + 1) * share, numel)


@dataclass(frozen=True)
class Block:
    """The same elements of every rank's tensor."""

    parts: Sequence[torch.Tensor]
    divisor: int

    def add_up(self) -> torch.Tensor:
        """The sum in rank order, divided, in the memory of the first."""
        total = self.parts[0]
        if total.dtype in _WIDER:
            wide = _widened(self.parts)
            total.copy_(wide if self.divisor == 1 else wide.div_(self.divisor))
            return total
        for part in self.parts[1:]:
            total.add_(part)
        return total if self.divisor == 1 else total.div_(self.divisor)


def _widened(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(_WIDER[parts[0].dtype])
    for part in parts[1:]:
        total.add_(part)
    return total


@functools.cache
def _action(what: str, dtype: torch.dtype) -> bytes:
    return f"{what} {dtype_name(dtype)}".encode()
