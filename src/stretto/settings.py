"""What a program may set on a handle between passes.

It is kept where nothing is reduced as well, with one rank and after ``detach()``, since a training loop may read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from .buffers import BufferPlaces
from .options import Buffers, Options, refuse_unlisted, weight_of
from .plan import BucketPlan
from .reducer import Reducer
from .usage import Statistics


@dataclass
class NoReducer:
    """Stands for a reducer with one rank, and after ``detach()``."""

    plan: BucketPlan
    statistics: Statistics
    synchronize: bool = True
    weight: float = 1.0
    has_weight: bool = False


class Settings:
    """The part of a handle that is set.

    Args:
        rank: for messages.
        plan: the first one.
        options: what was asked of ``attach``.
        places: the module's buffers.
    """

    __slots__ = ("_buffer_places", "_held", "_no_reducer", "_options", "rank")

    def __init__(self, rank: int, plan: BucketPlan, options: Options, places: BufferPlaces) -> None:
        self.rank = rank
        self._options = options
        self._buffer_places = places
        self._held: Reducer | None = None
        self._no_reducer = NoReducer(plan, Statistics())

    @property
    def _reducer(self) -> Reducer | None:
        """None with one rank, and after ``detach()``, which may come from a wrapper around the same module."""
        return None if self._held is None or self._held.detached else self._held

    @property
    def buffers(self) -> Buffers:
        """``"rank0"``, ``"mean"`` or ``"none"``. Set the same on all ranks; it counts from the next pass on."""
        return self._buffer_places.policy

    @buffers.setter
    def buffers(self, policy: Buffers) -> None:
        refuse_unlisted("buffers", policy, Buffers)
        if self._reducer is not None:  # while each kept its own, they were not compared
            self._reducer.members.suspect |= self.buffers == "none" != policy
        self._buffer_places.use(policy)

    @property
    def weight(self) -> float:
        """The weight of this rank's gradients in the next pass: its number of samples or tokens, below 2**31.

        Set it before ``backward``, with ``weighted=True``. It keeps its value; with ``no_sync`` the last one counts.

        Example::

            sync = stretto.attach(model, weighted=True)
            sync.weight = len(x)
            model(x).mean().backward()
        """
        return (self._reducer.queue if self._reducer else self._no_reducer).weight

    @weight.setter
    def weight(self, value: float) -> None:
        told = self._reducer.queue if self._reducer else self._no_reducer
        told.weight, told.has_weight = weight_of(value, self._options, self.rank), True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate in ``.grad`` without communication.

        What counts is where ``backward()`` runs; forward may be inside or outside. The next backward outside reduces
        the sum, including parameters that only earlier passes reached. Not collective, but use it alike on all ranks.

        Example::

            for i, batch in enumerate(micro_batches):
                with sync.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
                    loss(batch).backward()
            optimizer.step()
        """
        before = self.synchronize
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = before

    @property
    def synchronize(self) -> bool:
        """Whether the next backward reduces. ``no_sync`` sets it to False while it lasts."""
        return (self._reducer or self._no_reducer).synchronize

    @synchronize.setter
    def synchronize(self, value: bool) -> None:
        (self._reducer or self._no_reducer).synchronize = value

    @property
    def plan(self) -> BucketPlan:
        """The plan in use. ``print(sync.plan)`` shows a table."""
        return (self._held or self._no_reducer).plan

    @property
    def statistics(self) -> Statistics:
        """Counts since attaching, on this rank."""
        return (self._held or self._no_reducer).statistics

    def _end(self) -> None:
        """Keep what was set and counted; the reducer lets go of everything."""
        if self._held is not None:
            held, queue = self._held, self._held.queue
            self._no_reducer = NoReducer(held.plan, held.statistics, held.synchronize, queue.weight, queue.has_weight)
            held.detach()
            self._held = None
