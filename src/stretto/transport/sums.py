"""What the collectives of one host's ranks do with memory.

A large message takes two meetings. When all have published, each rank sums its slice over all ranks' memory, in rank
order, and writes the sum into all ranks' memory; when all have finished, the result is there. A small message is copied
into staging memory, so that its tensor need not be waited for, and each rank sums all of it for itself: one meeting
instead of two. Either way every element is summed in rank order, so the bits are the same on every rank, for every
plan, in every run.

Half types are summed in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

import torch

from ..specs import dtype_name
from ..wording import KIB, MIB
from .host import Host
from .message import Message
from .ordinary import elements
from .page import Entry
from .slices import add_in_order, slice_of
from .staging import Staging

SMALL_BYTES = 16 * KIB
"""Up to this size, each rank sums all of a message for itself."""
BLOCK_BYTES = 128 * KIB
"""Added and written in blocks that stay in the processor's cache in between."""
PIECE_BYTES = 4 * MIB
"""Tensors outside shared memory pass through it in pieces of this size."""


class SumForAll(Message):
    """Each rank sums all of a small message: from all ranks' staging memory into its tensor."""

    tensor: torch.Tensor

    def __init__(self, staging: Staging, result: torch.Tensor, averaged: int) -> None:
        self.action = action("mean" if averaged else "sum", result.dtype)
        self.numel = result.numel()
        self._averaged = averaged
        self.tensor = staging.take(result.nbytes)
        self._host, self._result, self._staging = staging.host, result, staging
        staging.view(self.tensor, result).copy_(result)

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum."""
        routes, divisor = self._host.routes, len(self._host.peers)
        key = (self._result.dtype, *entries)
        parts = routes.get(key)
        if parts is None:
            parts = routes[key] = views(self._host, entries, self._result.dtype, 0, self.numel)
        add_in_order(parts, self._result, divisor if self._averaged else 1, self._averaged)

    def release(self) -> None:
        """The staging memory is free."""
        self._staging.give(self.tensor)


class SumOfNumbers(Message):
    """Two integers of each rank, in its ring entry, where other messages say where their tensor lies."""

    def __init__(self, numbers: MutableSequence[int], action: bytes) -> None:
        self.action = action
        self.numel = len(numbers)
        self._numbers = numbers

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum."""
        first = second = 0
        for one, other in map(Entry.numbers, entries):
            first, second = first + one, second + other
        self._numbers[0], self._numbers[1] = first, second


class SumOfSlices(Message):
    """Each rank sums its slice in the first rank's memory and copies it to the others'."""

    tensor: torch.Tensor
    by_all = True

    def __init__(self, host: Host, tensor: torch.Tensor, averaged: int) -> None:
        self.action = action("mean" if averaged else "sum", tensor.dtype)
        self.numel = tensor.numel()
        self.tensor = tensor
        self._averaged = averaged
        self._host = host

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum and write, block by block."""
        for block in self.blocks(entries):
            block.add_up()
            block.write()

    def blocks(self, entries: Sequence[bytes]) -> list[Block]:
        """What this rank sums of every rank's tensor, in blocks."""
        key = (self.action, self.numel, self._averaged, *entries)
        found: list[Block] | None = self._host.routes.get(key)
        if found is None:
            found = self._host.routes[key] = self._route(entries)
        return found

    def _route(self, entries: Sequence[bytes]) -> list[Block]:
        places = len(self._host.peers)
        low, high = slice_of(self.numel, self._host.local_rank, places)
        return blocks(self._host, entries, self.tensor.dtype, low, high, self._averaged, places)


class SumOfShare(SumOfSlices):
    """Each rank sums its share in its own memory, and for itself also what follows the shares."""

    def __init__(self, host: Host, tensor: torch.Tensor, shared: int) -> None:
        super().__init__(host, tensor, averaged=shared)
        self.action = action("share", tensor.dtype)
        self._shared = shared
        self._behind: torch.Tensor | None = None

    def begin(self, entries: Sequence[bytes]) -> None:
        """Sum."""
        *share, behind = self.blocks(entries)
        for block in share:
            block.add_up(self._host.local_rank)
        self._behind = torch.empty_like(behind.parts[0])
        add_in_order(behind.parts, self._behind)

    def _route(self, entries: Sequence[bytes]) -> list[Block]:
        places = len(self._host.peers)
        low, high = slice_of(self._shared, self._host.local_rank, places)
        behind = Block(views(self._host, entries, self.tensor.dtype, self._shared, self.numel), 1)
        return [*blocks(self._host, entries, self.tensor.dtype, low, high, high, places), behind]

    def release(self) -> None:
        """No rank reads this rank's data any more."""
        assert self._behind is not None, "it has begun"
        self.tensor[self._shared :].copy_(self._behind)


class StagedSum(SumOfSlices):
    """The same for a tensor outside shared memory."""

    def __init__(self, staging: Staging, result: torch.Tensor, averaged: int) -> None:
        self._memory = staging.take(result.nbytes)
        super().__init__(staging.host, staging.view(self._memory, result), min(max(averaged, 0), result.numel()))
        self._result, self._staging = result, staging
        self.tensor.copy_(result)

    def release(self) -> None:
        """Copy the result to the tensor."""
        self._result.copy_(self.tensor)
        self._staging.give(self._memory)


class Copy(Message):
    """One rank's tensor for all."""

    root: int

    def __init__(self, staging: Staging, tensor: torch.Tensor, root: int) -> None:
        self.action = f"broadcast by {root}".encode()
        self.numel = tensor.numel()
        self.root = root
        self._host, self._result, self._staging = staging.host, tensor, staging
        if root == self._host.local_rank:
            self.tensor = staging.take(tensor.nbytes)
            self.tensor[: tensor.numel()].copy_(tensor)

    def begin(self, entries: Sequence[bytes]) -> None:
        """Receive."""
        if self.root != self._host.local_rank:
            memory = self._host.peers[self.root].memory
            self._result.copy_(memory.bytes_at(Entry.unpack(entries[self.root]).location, self._result.nbytes))

    def end(self) -> None:
        """The caller may drop the tensor."""
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


@dataclass(frozen=True)
class Block:
    """The same elements of every rank's tensor."""

    parts: Sequence[torch.Tensor]
    divisor: int

    def add_up(self, place: int = 0) -> torch.Tensor:
        """The sum in rank order, divided, into the memory of one of them; the others are not changed."""
        return add_in_order(self.parts, self.parts[place], self.divisor)

    def write(self) -> None:
        """Copy the first part into all others."""
        for part in self.parts[1:]:
            part.copy_(self.parts[0])


def blocks(
    host: Host,
    entries: Sequence[bytes],
    dtype: torch.dtype,
    low: int,
    high: int,
    averaged: int,
    divisor: int,
    source: int = 0,
) -> list[Block]:
    """Elements ``low`` to ``high``, cut to fit the processor's cache; those before ``averaged`` will be divided.

    The part of the rank at place ``source`` comes first.
    """
    edge, step = min(max(low, averaged), high), BLOCK_BYTES // dtype.itemsize
    found = []
    for begin, end, divides_by in ((low, edge, divisor), (edge, high, 1)):
        for start in range(begin, end, step):
            parts = views(host, entries, dtype, start, min(start + step, end))
            found.append(Block((parts.pop(source), *parts), divides_by))
    return found


@functools.cache
def action(what: str, dtype: torch.dtype) -> bytes:
    """The name that a message publishes."""
    return f"{what} {dtype_name(dtype)}".encode()
