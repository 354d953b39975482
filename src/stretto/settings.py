"""What a program may set on a handle between passes.

It is kept where nothing is reduced as well, with one rank and after ``detach()``, since a training loop may read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .buffers import BufferPlaces
from .comm_hooks import CommHook, Hook, refuse_hook, refuse_second_hook
from .events import Events
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

    __slots__ = ("_buffer_places", "_held", "_no_reducer", "_options", "comm_hooks", "observers", "rank")

    def __init__(self, rank: int, plan: BucketPlan, options: Options, places: BufferPlaces) -> None:
        self.rank = rank
        self._options = options
        self._buffer_places = places
        self._held: Reducer | None = None
        self._no_reducer = NoReducer(plan, Statistics())
        self.comm_hooks: list[tuple[Hook, Any]] = []  # as registered, with their states
        self.observers: list[object] = []

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

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Call ``hook(state, bucket)`` in place of the all-reduce of each bucket, by torch's contract.

        The hook gets undivided gradients and returns a ``torch.futures.Future`` of the reduced flat tensor, so it must
        also divide. All ranks must register the same hook before the same pass, and only once. Sparse gradients lie in
        no bucket and become their mean without the hook.

        Raises:
            SetupError: a hook is registered already, or an option needs stretto's own all-reduce.
            TypeError: ``hook`` cannot be called like this; or, raised by backward, it returned no future.

        Example::

            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            sync.register_comm_hook(None, fp16_compress_hook)
        """
        refuse_hook(hook, self._options, self.rank)
        refuse_second_hook(self.comm_hooks, self.rank)
        if self._reducer is not None:
            self._reducer.use(CommHook(state, hook))
        self.comm_hooks.append((hook, state))

    def observe(self, observer: object) -> None:
        """Call the observer's methods when events happen: see :class:`stretto.events.Observer`. Not collective.

        Raises ``SetupError`` if no method has the name of an event.
        """
        if self._reducer is None:
            Events(self.rank).add(observer)  # refused as with several ranks
        else:
            self._reducer.start_watching(observer)
        self.observers.append(observer)

    def stop_observing(self, observer: object) -> None:
        """Undo :meth:`observe`. Not collective; may be called twice."""
        if self._reducer is not None:
            self._reducer.stop_watching(observer)
        self.observers = [one for one in self.observers if one is not observer]

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
