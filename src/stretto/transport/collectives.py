"""Collectives of one host on tensors in any memory, done when the call returns.

    tensor ──piece by piece──> staging memory ──> every rank reads everybody's ──> result

A tensor passes through shared memory in pieces that stay in the processor's cache, a few of them under way at once, so
that even a large one needs hardly any memory. All ranks post the pieces of a call in the same order. With few ranks,
each reduces the whole piece for itself, with one meeting per piece; with more ranks each reduces a strip, and a second
meeting gathers the strips. Either way an element is reduced over the ranks in their order, so the bits are the same on
every rank.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from ..specs import dtype_name
from ..wording import KIB
from .host import Host
from .message import Message, Posted
from .page import ENTRIES, Entry
from .slices import WIDER
from .staging import Staging
from .sums import Copy

STAGED_BYTES = 1024 * KIB
"""Size of a piece, so that it stays in the processor's cache: less than where slices are summed, sums.PIECE_BYTES."""
WINDOW_BYTES = 4 * STAGED_BYTES
"""With more staging memory than this in use, a rank waits until all have read the oldest."""
STRIPS_FROM_RANKS = 4
"""From so many ranks on, each reduces only a strip, which is less memory traffic in total."""
STRIPS_FROM_BYTES = 64 * KIB
"""A smaller piece is not worth a second meeting."""

_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_FLOATING = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class Done(Work):
    """The work of a collective that is complete."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is done."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """Always true: a failure raises at once."""
        return True

    def result(self) -> list[torch.Tensor]:
        """The tensors that were written."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that has them."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class WorldOfOne:
    """The same calls in a world of one, where there is nothing to sum."""

    def all_reduce(self, tensor: torch.Tensor, operation: str, timeout: timedelta | None = None) -> None:
        """The tensor stays as it is."""

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta | None = None) -> None:
        """The tensor stays as it is."""

    def all_gather(
        self, results: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta | None = None
    ) -> None:
        """Copy the tensor."""
        results[0].copy_(tensor)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        operation: str,
        timeout: timedelta | None = None,
    ) -> None:
        """Copy the tensor."""
        result.copy_(tensors[0])

    def barrier(self, timeout: timedelta | None = None) -> None:
        """There is nobody to meet."""


def can_reduce(operation: str, dtype: torch.dtype) -> bool:
    """Whether the operation is known here, and defined for the dtype."""
    if operation not in _OPERATIONS:
        return False
    if operation in ("band", "bor", "bxor"):
        return dtype in _WHOLE
    return dtype in _FLOATING or (dtype in _WHOLE and operation != "avg")


class Collectives:
    """The collectives of the ranks of ``host``. All make the same calls in the same order, one at a time.

    Tensors are flat, contiguous and on the CPU; ``operation`` and dtype are such that :func:`can_reduce`. A call
    returns when this rank's result is there; its arguments may be written again from then on.

    Each call raises ``RuntimeError`` when a rank has died, when ranks call different things, and when a piece takes
    longer than ``timeout`` (default, the patience of the host).
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._staging = Staging(host)
        self._posted: collections.deque[Posted] = collections.deque(maxlen=ENTRIES)  # the host waits for older ones

    def all_reduce(self, tensor: torch.Tensor, operation: str, timeout: timedelta | None = None) -> None:
        """Replace the tensor by its reduction over the ranks."""
        pieces = _pieces(tensor, STAGED_BYTES)
        if len(self._host.peers) >= STRIPS_FROM_RANKS and tensor.nbytes > STRIPS_FROM_BYTES:
            self._reduce_strips(pieces, tensor.numel(), operation, timeout)
        else:
            reductions = (Reduction(self._staging, [p], 0, p, operation) for p in pieces)
            self._run(reductions, tensor.numel(), timeout)

    def _reduce_strips(
        self, pieces: Sequence[torch.Tensor], numel: int, operation: str, timeout: timedelta | None
    ) -> None:
        """Gathers the strips of one piece while the next is reduced."""
        ranks, place = len(self._host.peers), self._host.local_rank
        reduced: collections.deque[tuple[list[torch.Tensor], Posted]] = collections.deque()
        for piece in pieces:
            size = -(-piece.numel() // ranks)
            strips = [piece[n * size : (n + 1) * size] for n in range(ranks)]  # the last ones may be shorter, or empty
            message = Reduction(self._staging, [piece], place * size, strips[place], operation)
            reduced.append((strips, self._post(message, numel, timeout)))
            if len(reduced) > 1:
                self._gather_strips(*reduced.popleft(), numel, timeout)
        self._host.wait(self._gather_strips(*reduced.popleft(), numel, timeout), timeout)

    def _gather_strips(
        self, strips: Sequence[torch.Tensor], reduced: Posted, numel: int, timeout: timedelta | None
    ) -> Posted:
        self._host.wait(reduced, timeout)
        return self._post(Gathering(self._staging, strips[self._host.local_rank], strips), numel, timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta | None = None) -> None:
        """Replace the tensor by that of rank ``root``, which waits for the others only if the window is full."""
        pieces = _pieces(tensor.view(torch.uint8), STAGED_BYTES)
        self._run((Copy(self._staging, piece, root) for piece in pieces), tensor.nbytes, timeout)

    def all_gather(
        self, results: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta | None = None
    ) -> None:
        """Write the tensor of each rank into one of ``results``, which all have its size."""
        parts = [_pieces(result.view(torch.uint8), STAGED_BYTES) for result in results]
        pieces = zip(_pieces(tensor.view(torch.uint8), STAGED_BYTES), *parts, strict=True)
        gatherings = (Gathering(self._staging, piece, into) for piece, *into in pieces)
        self._run(gatherings, len(results) * tensor.nbytes, timeout)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        operation: str,
        timeout: timedelta | None = None,
    ) -> None:
        """Write into ``result`` the reduction of what all ranks have for this one; ``tensors`` has one for each."""
        nbytes = max(STAGED_BYTES // len(tensors), 64)
        parts = zip(_pieces(result, nbytes), *(_pieces(tensor, nbytes) for tensor in tensors), strict=True)
        place = self._host.local_rank
        pieces = (
            Reduction(self._staging, strips, place * into.numel(), into, operation, "rs ") for into, *strips in parts
        )
        self._run(pieces, len(tensors) * result.numel(), timeout)

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Return when all ranks have called."""
        self._run([Barrier()], 0, timeout)

    def _run(self, messages: Iterable[Message], numel: int, timeout: timedelta | None) -> None:
        """Post messages as they are made, and wait for the last: they end in order."""
        posted = None
        for message in messages:
            posted = self._post(message, numel, timeout)
        if posted is not None:
            self._host.wait(posted, timeout)

    def _post(self, message: Message, numel: int, timeout: timedelta | None) -> Posted:
        """Post; if too much is staged, wait until the others have read the oldest.

        Args:
            message: a piece of a call.
            numel: elements of the whole call, which tell it from others: their pieces may be as long.
            timeout: of that wait.
        """
        message.numel = numel
        posted = self._host.post(message)
        self._posted.append(posted)
        while self._staging.in_use > WINDOW_BYTES and len(self._posted) > 1:
            self._host.wait(self._posted.popleft(), timeout, by_all=True)
        return posted


class Staged(Message):
    """A message for which each rank puts something into staging memory, where all read it."""

    tensor: torch.Tensor

    def __init__(self, staging: Staging, parts: Sequence[torch.Tensor], action: bytes) -> None:
        self.action = action
        self._host, self._staging = staging.host, staging
        dtype = parts[0].dtype
        self.tensor = staging.take(sum(part.nbytes for part in parts))
        room, at = self.tensor.view(dtype), 0
        for part in parts:
            room[at : at + part.numel()].copy_(part)
            at += part.numel()

    def seen(self, entries: Sequence[bytes], place: int, low: int, like: torch.Tensor) -> torch.Tensor:
        """What the rank at ``place`` has staged, from element ``low`` on, as many elements as ``like`` has."""
        location = Entry.unpack(entries[place]).location.plus(low * like.itemsize)
        return self._host.peers[place].memory.bytes_at(location, like.nbytes).view(like.dtype)

    def release(self) -> None:
        """All have read it."""
        self._staging.give(self.tensor)


class Reduction(Staged):
    """Reduce what each rank has staged from element ``low`` on, as much as fits into ``result``."""

    def __init__(
        self,
        staging: Staging,
        parts: Sequence[torch.Tensor],
        low: int,
        result: torch.Tensor,
        operation: str,
        kind: str = "",
    ) -> None:
        action = f"{kind}{operation} {dtype_name(result.dtype)}".encode()
        super().__init__(staging, parts, action)
        self._low, self._result, self._operation = low, result, operation

    def begin(self, entries: Sequence[bytes]) -> None:
        """Reduce in rank order."""
        parts = [self.seen(entries, place, self._low, self._result) for place in range(len(entries))]
        reduce_into(self._result, parts, self._operation)

    def end(self) -> None:
        """The caller may drop the tensor."""
        del self._result


class Gathering(Staged):
    """Copy what each rank has staged into the matching one of ``results``."""

    def __init__(self, staging: Staging, part: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        super().__init__(staging, [part], b"all_gather")
        self._results = results

    def begin(self, entries: Sequence[bytes]) -> None:
        """Copy."""
        for place, result in enumerate(self._results):
            result.copy_(self.seen(entries, place, 0, result))

    def end(self) -> None:
        """The caller may drop the tensors."""
        del self._results


class Barrier(Message):
    """Only tells that all have come."""

    action = b"barrier"


def reduce_into(result: torch.Tensor, parts: Sequence[torch.Tensor], operation: str) -> None:
    """Reduce two or more parts in order; half types are added and multiplied in float32, and rounded once."""
    apply = _OPERATIONS[operation]
    wide = WIDER.get(result.dtype) if operation in ("sum", "avg", "prod") else None
    first, second, *rest = parts
    total = result if wide is None else torch.empty_like(result, dtype=wide)
    apply(first if wide is None else first.to(wide), second, out=total)
    for part in rest:
        apply(total, part, out=total)
    if operation == "avg":
        total.div_(len(parts))
    if wide is not None:
        result.copy_(total)


def _pieces(tensor: torch.Tensor, nbytes: int) -> Sequence[torch.Tensor]:
    return [tensor] if tensor.nbytes <= nbytes else torch.split(tensor, nbytes // tensor.itemsize)
