"""After a step: each rank's stepped share goes to the ranks that do not share its memory, while all go on.

    step ──> share of each bucket ──> under way, in the order in which forward reads ──> reading a parameter waits

Gradients arrive from the last layer to the first, so forward needs the plan's last bucket first. Where the optimizer
can step one bucket after the other (inner.py), each leaves while the next is stepped.

[Note: by themselves]  If one rank alone reads a parameter, to save it, it must not depend on other ranks that are in a
barrier meanwhile. A process group has threads of its own, which see to that; for ranks that share a host see
transport/spreading.py. Between hosts with unequal numbers of ranks nothing is left under way when ``step`` returns:
messages of several ranks of a host go on only while all of these are inside stretto.

[Note: in place]  A rank's part of a bucket is mostly contiguous. If one other rank owns the rest, and that is
contiguous too, the part is sent from where it lies, and the other arrives where it belongs, without copies: reading or
writing a parameter waits for both. Another tensor that shows its memory would not wait: then the step does.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ..blame import STEPPED_BY_OTHERS, STEPPED_ELSEWHERE
from ..launch import LaunchQueue
from ..transport import Work
from .awaited import Arrival, Awaited
from .compiled import CompilerWatch
from .layout import Layout
from .ownership import Piece


@dataclass(frozen=True)
class _OfBucket:
    """The shares of one bucket."""

    flats: Sequence[Sequence[torch.Tensor]]
    """What each rank owns, in rank order."""
    parameters: Sequence[torch.nn.Parameter]
    bucket: int
    """Its number."""

    @functools.cached_property
    def numels(self) -> list[int]:
        """Elements of each rank's share."""
        return [sum(map(len, flats)) for flats in self.flats]


class Spread:
    """The shares of all ranks, as messages.

    Args:
        layout: where parameters lie.
        owned: the pieces of each rank, in rank order.
        queue: has the transport that carries them.
        failed: told why a share will never come; a method, held weakly.
        compare: given the two numbers that each rank has sent; raises if they do not fit. Held weakly too.
        compiler: tells whether torch compiles; from then on everything is waited for at once.
        overlap: False to wait for all of them at once; see also [Note: by themselves].
    """

    def __init__(
        self,
        layout: Layout,
        owned: Sequence[Sequence[Piece]],
        queue: LaunchQueue,
        failed: Callable[[BaseException], None],
        compare: Callable[[Sequence[Sequence[int]]], None],
        compiler: CompilerWatch,
        *,
        overlap: bool,
    ) -> None:
        self._transport, self._wait_for = queue.transport, queue.wait_for
        self._failed, self._compare = weakref.WeakMethod(failed), weakref.WeakMethod(compare)
        self._under_way: list[Arrival] = []
        self._awaited = Awaited(compiler)
        self._host, self._shown = layout.host, layout.shown
        self._compiler = compiler
        self._buckets = _shares_by_bucket(layout, owned) if len(layout.hosts) > 1 else []
        self._spreading: Any = None
        if layout.is_shared and self._buckets and queue.transport.spreading is not None:
            self._spreading = queue.transport.spreading(len(self._buckets), self._wait_for)
        self.is_late = overlap and (not layout.is_shared or self._spreading is not None)
        """Whether messages are under way when a step has ended."""
        on_host = bool(self._buckets) and all(one.parameters[0].is_cpu for one in self._buckets)
        self.in_turn = self.is_late and not layout.is_shared and on_host
        """Whether a bucket is sent before others are stepped. A device runs steps later than the host anyway."""
        self._numbers: list[torch.Tensor] = []
        """All ranks' numbers, as the first bucket's dtype. None if memory is shared: then ranks have met before."""
        if self._buckets and not layout.is_shared and self._buckets[0].parameters[0].is_cpu:
            first, dtype = self._buckets[0], self._buckets[0].parameters[0].dtype
            self._numbers = [torch.zeros(2, dtype=torch.int64, device="cpu").view(dtype) for _ in owned]
            flats = [[*flats, number] for flats, number in zip(first.flats, self._numbers, strict=True)]
            self._buckets[0] = _OfBucket(flats, first.parameters, first.bucket)

    def send(self, groups: int, whose: int, step: Callable[[int | None], None] | None = None) -> None:
        """Send all shares. Collective. The first message also has two numbers, which should be equal on all ranks.

        Args:
            groups: number of the parameter groups with which this rank has stepped.
            whose: number of the optimizer.
            step: steps this rank's share of a bucket, given its number, or (None) what is in no bucket. Left out if
                everything is stepped already.
        """
        if self._numbers:
            self._numbers[self._transport.rank].view(torch.int64).copy_(torch.tensor([groups, whose], device="cpu"))
        if self._spreading is not None:
            self._spreading.begin()
        for message, shares in enumerate(self._buckets):
            if step is not None:
                step(shares.bucket)
            receive = self._send(message, shares)
            if self._numbers and shares is self._buckets[0]:
                receive = functools.partial(_receive_first, receive, self._compare, self._numbers)
            receive = functools.partial(_arrive, receive, self._failed)
            self._under_way.append(Arrival(shares.parameters, receive, self._awaited))
        if step is not None:
            step(None)
        if not self.is_late or self._compiler.is_at_work or self._shown():
            self.finish()

    @property
    def is_under_way(self) -> bool:
        """Whether something is."""
        return bool(self._under_way)

    def finish(self) -> None:
        """Wait until all parameters can be read."""
        for arrival in [*self._under_way]:
            arrival.finish()
            with contextlib.suppress(ValueError):  # another thread has done it
                self._under_way.remove(arrival)

    def drop(self) -> None:
        """Wait for nothing more."""
        self._under_way.clear()
        self._awaited.drop()
        if self._spreading is not None:
            self._spreading.doubt()

    def _send(self, message: int, shares: _OfBucket) -> Callable[[], None]:
        """Send one bucket's shares. The returned function waits until they are in place, and does not hold this."""
        if self._spreading is not None:
            return self._spread(message, shares)
        exchange = self._transport.spread_share
        return self._broadcast(shares) if exchange is None else self._exchange(shares, exchange)

    def _spread(self, message: int, shares: _OfBucket) -> Callable[[], None]:
        rank, spreading = self._transport.rank, self._spreading
        alike = [ranks[spreading.local_rank] for ranks in spreading.hosts]
        numels = [shares.numels[one] for one in alike]
        own = _joined(shares.flats[rank], like=shares.parameters[0])
        others = [flat for one in alike if one != rank for flat in shares.flats[one]]
        work = spreading.send(message, own, numels, others)
        return functools.partial(self._wait_for, work, STEPPED_ELSEWHERE)

    def _exchange(self, shares: _OfBucket, exchange: Callable[..., Work]) -> Callable[[], None]:
        numels, rank = shares.numels, self._transport.rank
        mine = shares.flats[rank]
        others = [flat for root, flats in enumerate(shares.flats) if root != rank for flat in flats]
        in_place = len(mine) == len(others) == 1 and mine[0].is_cpu
        own = mine[0] if in_place else _joined(mine, like=shares.parameters[0])
        received = others[0] if in_place else own.new_empty(sum(numels) - numels[rank])
        work, wait_for = exchange(received, own, numels), self._wait_for

        def arrive() -> None:
            wait_for(work, STEPPED_BY_OTHERS)
            if not in_place:
                _put(received, others)

        return arrive

    def _broadcast(self, shares: _OfBucket) -> Callable[[], None]:
        under_way, wait_for, host = [], self._wait_for, self._host
        for root, flats in enumerate(shares.flats):
            if flats:
                message = _joined(flats, like=shares.parameters[0])
                under_way.append((self._transport.broadcast(message, root), message, flats, root))

        def arrive() -> None:
            for work, message, flats, root in under_way:
                wait_for(work, f"what rank {root} has stepped")
                if root not in host:  # what they have stepped is here already
                    _put(message, flats)

        return arrive


def _arrive(receive: Callable[[], None], reference: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
    try:
        receive()
    except Exception as error:  # after Ctrl-C the next read waits again
        if (failed := reference()) is not None:
            failed(error)
        raise


def _receive_first(
    receive: Callable[[], None],
    reference: weakref.WeakMethod[Callable[[Sequence[Sequence[int]]], None]],
    numbers: Sequence[torch.Tensor],
) -> None:
    receive()
    if (compare := reference()) is not None:
        compare([one.view(torch.int64).tolist() for one in numbers])


def _shares_by_bucket(layout: Layout, owned: Sequence[Sequence[Piece]]) -> list[_OfBucket]:
    """Those of buckets that have any, in the order in which forward needs them: the plan's last bucket first."""
    rows = [
        {number: layout.rows([*pieces]) for number, pieces in groupby(own, lambda piece: piece.bucket)} for own in owned
    ]
    found = []
    for number in reversed(range(len(layout.plan.buckets))):
        members = [i for i in layout.plan.buckets[number].indices if i in layout.parameters]
        if members:
            flats = [of_rank.get(number, []) for of_rank in rows]
            found.append(_OfBucket(flats, [layout.parameters[index] for index in members], number))
    return found


def _joined(flats: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A copy: what is sent must not change while the next step writes."""
    if not flats:
        return torch.empty(0, dtype=like.dtype, device=like.device)
    return torch.cat([*flats])


@torch.no_grad()
def _put(message: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
    if flats:
        torch._foreach_copy_([*flats], [*torch.split(message, [len(flat) for flat in flats])])
