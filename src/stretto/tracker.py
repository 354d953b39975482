"""From arrivals to full buckets: along the schedule as long as it holds, one by one otherwise."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

import torch

from .arrivals import Arrivals, Hooks, has_other_hooks
from .bucket import Bucket
from .comm_hooks import fixes_plan
from .engine import ReentrantCheckpoints, current_task, left_uncompiled, will_arrive, without_graph
from .errors import UnsupportedError
from .launch import LaunchQueue
from .parts import MisfitError
from .schedule import Chunk, schedule
from .wording import name_list

log = logging.getLogger("stretto")
_pending = operator.attrgetter("pending")


class ArrivalTracker:
    """Takes gradients into their buckets as they arrive, and learns in which order and how often they do.

    Args:
        parameters: to hook; not held.
        queue: has the buckets.
        owner, first: as in :class:`Arrivals`.
        progressed: called when gradients were taken.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        queue: LaunchQueue,
        owner: object,
        first: Callable[[torch.Tensor], None],
        progressed: Callable[[], None],
    ) -> None:
        self.arrivals = Arrivals(parameters, owner, first, self._look)
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.last_order: list[int] = []
        """Indices of the arrivals of the last pass that did not go as scheduled."""
        self.graph_changed = False
        """Whether two passes in succession have reached different parameters."""
        self._queue, self._events, self._progressed = queue, queue.events, progressed
        self._running, self._task, self._next_chunk = False, -1, 0
        self._schedule: list[Chunk] | None = None
        self.hands_out = False
        """Whether all chunks of the schedule make the slots ``.grad`` when they are taken."""
        self._expected: dict[int, int] = {}
        """How often those arrived in the last pass that arrived more than once."""
        self._in_order = False
        """Whether this pass has followed the schedule so far."""
        self._looked_at = 0
        """How many arrivals of this pass have been dealt with."""
        self.nested = False
        """Whether gradients have come from nested tasks, in any pass so far."""
        self._checkpoints = ReentrantCheckpoints()
        self._careful = False
        """Whether gradients may come from nested tasks, so that none is known to be the last of its parameter."""
        self._absent: frozenset[int] = frozenset()
        """Parameters that are expected not to come in this pass."""
        self._seen: set[int] = set()
        """What had a gradient in this pass before hooks of the program came to it."""
        self.unsynchronized: set[int] = set()
        """What has come in passes without synchronisation, since the last that was."""
        self.gone: set[int] = set()
        """What has come without a gradient, and has a hook of the program, which may have taken it away."""
        self._count: dict[int, int] = {}
        """How often parameters have arrived in this pass; kept only outside the schedule."""
        self.watch_all()

    def rebuild(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The plan holds other parameters: hook those, and learn again, but for how often the old ones arrive."""
        waiting = [key for key, index in self.index_of.items() if index in self.unsynchronized]
        counts = {key: self._expected[index] for key, index in self.index_of.items() if index in self._expected}
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._expected = {self.index_of[key]: n for key, n in counts.items() if key in self.index_of}
        self.unsynchronized = {self.index_of[key] for key in waiting if key in self.index_of}
        self._schedule, self.hands_out, self.last_order = None, False, []
        self.gone.clear()
        self.arrivals.follow(parameters)
        self.watch_all()

    # Which arrivals are looked at

    def watch_all(self) -> None:
        """Handle each arrival: the order is not known, or is being observed, maybe from amid a pass on."""
        if not self._running:
            self._schedule = None
        elif self._in_order:  # kept till the pass ends: overtaken() asks it what was handed out
            self._leave_schedule()
        self.arrivals.look_at(self.alive(range(len(self.index_of))))

    def follow_again(self) -> None:
        """The plan has changed: schedule the last order for its buckets."""
        if self._schedule is not None:
            self._follow()

    def _follow(self) -> None:
        """Look only where the schedule for the last order says so."""
        once, follows = not (self._careful or self.graph_changed), not fixes_plan(self._queue.comm_hook)
        ids, bucket_of = [*self.index_of], self._queue.bucket_of
        self._schedule = schedule(self.last_order, ids, bucket_of, hands_out=once, follows_formats=follows)
        self.hands_out = all(chunk.views is not None for chunk in self._schedule)
        self.arrivals.look_at(self.alive(chunk.closer for chunk in self._schedule))

    def alive(self, indices: Iterable[int]) -> list[tuple[int, torch.nn.Parameter]]:
        """Those parameters that were not freed, with their index."""
        return [(index, one) for index in indices if (one := self._queue.references[index]()) is not None]

    # During a pass

    def begin(self) -> None:
        """A pass begins. A schedule would take even what is loose, since a pass that was given up."""
        self._running = True
        self._task = current_task()
        if not self._careful:
            self._careful = self._checkpoints.alive()
        self._in_order = self._schedule is not None and not (self._queue.loose or (self._careful and self.hands_out))

    def foresee(self) -> set[int]:
        """Which come, or came without synchronisation before; see presence.py, [Note: nested tasks and absence]."""
        everything = set(range(len(self._queue.references)))
        if self.nested:
            return everything
        alive = self.alive(everything)
        there = will_arrive([parameter for _, parameter in alive])
        coming = {index for (index, _), comes in zip(alive, there, strict=True) if comes}
        coming |= {index for index, parameter in self.alive(self.unsynchronized) if parameter.grad is not None}
        self._absent = frozenset(everything - coming)
        return coming

    def _came_unforeseen(self, arrived: Iterable[int]) -> bool:
        """Whether one of these, by ``id``, was not to come: what is in its slot waits for the sum with it."""
        return not self._absent.isdisjoint([self.index_of[i] for i in arrived])

    def unforeseen(self) -> bool:
        """Whether parameters came in this pass although they were not to."""
        if came := bool(self._absent) and self._came_unforeseen(map(id, self.arrivals.order)):
            self.nested = self._careful = True
        return came

    def stop(self) -> None:
        """The pass is over or given up: nothing more is taken."""
        self._running = False
        self._seen.clear()
        self._absent = frozenset()
        self.arrivals.end()

    @left_uncompiled
    def _look(self, parameter: torch.Tensor) -> None:
        if not self._running or id(parameter) not in self.index_of:  # a hook before it returned something: torch raises
            return
        if current_task() != self._task:
            self.meet_nested()
        if type(parameter._post_accumulate_grad_hooks) is Hooks or self.arrivals.is_last(parameter):
            with self._queue.lock:
                if torch.is_grad_enabled():
                    without_graph(self._take, True)
                else:
                    self._take(False)
            return
        self.arrivals.put_last(self.index_of[id(parameter)], parameter)
        self._see(parameter)

    @left_uncompiled
    def _see(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._seen.add(self.index_of[id(parameter)])

    def keep(self, parameter: torch.Tensor) -> None:
        """The gradient stays here, and may be dropped before the next pass."""
        self._seen.discard(self.index_of[id(parameter)])
        self.unsynchronized.add(self.index_of[id(parameter)])

    def meet_nested(self) -> None:
        """A gradient has come from a nested task: what this pass has got already may come again."""
        self.nested = self._careful = True
        if self.hands_out and self._in_order:
            self._leave_schedule()

    def _take(self, with_graph: bool) -> None:
        streams, until = self.arrivals.streams, len(self.arrivals.order)  # first: another device's thread goes on
        if streams.any:
            streams.join()
        while self._in_order and self._looked_at < until and self._take_chunk(until, with_graph):
            pass
        if not self._in_order:
            self._take_one_by_one(until)
        if self._in_order or not self._careful:  # else gradients may come again, and it is not known which
            self._progressed()
        if streams.any:
            streams.part()

    def _take_chunk(self, until: int, with_graph: bool) -> bool:
        """Take the next chunk of the schedule, if it is complete. Leaves the schedule if something else has arrived."""
        assert self._schedule is not None
        if self._next_chunk == len(self._schedule):
            return self._leave_schedule()
        chunk = self._schedule[self._next_chunk]
        stop = min(self._looked_at + len(chunk.arrivals), until)
        parameters = self.arrivals.order[self._looked_at : stop]
        arrived, expected = [*map(id, parameters)], chunk.arrivals
        if not (complete := len(arrived) == len(expected)):
            expected = expected[: len(arrived)]
        if arrived != expected or (self._absent and self._came_unforeseen(arrived)):
            return self._leave_schedule()
        if not complete:
            return False
        try:
            self._queue.guard(chunk.take, parameters, with_graph)
        except MisfitError:  # an undefined gradient, or one that does not fit its slot any more
            return self._leave_schedule()
        self._looked_at = stop
        self._next_chunk += 1
        if self._events.bucket_full:
            for bucket in chunk.full:
                self._tell_full(bucket, chunk.closer)
        return True

    def _leave_schedule(self) -> bool:
        """Count one by one for the rest of the pass."""
        self._in_order = False
        self._count = dict(Counter(self.index_of[id(p)] for p in self.arrivals.order[: self._looked_at]))
        return False

    def _take_one_by_one(self, until: int) -> None:
        """Count arrivals, and take a bucket when all of it has arrived as often as in the last pass."""
        for parameter in self.arrivals.order[self._looked_at : until]:
            index = self.index_of[id(parameter)]
            if index in self._absent:  # it comes late
                continue
            if not self._queue.fits(index, parameter):
                self._queue.set_loose([index])
            if parameter.grad is None or index in self._queue.loose:  # an undefined gradient, or one that fits no slot
                continue
            self._count[index] = self._count.get(index, 0) + 1
            if self._events.gradient_ready:
                name = self._queue.names[index]
                self._events.emit(self._events.gradient_ready, self._queue.pass_number, name)
            if self._count[index] == self._expected.get(index, 1):
                bucket = self._queue.bucket_of[index]
                bucket.arrived += 1
                if bucket.arrived == bucket.pending:
                    self._refuse_gone(self._count.keys(), [bucket])
                    self._queue.guard(bucket.take_rest)
                    if self._events.bucket_full:
                        self._tell_full(bucket, index)
        self._looked_at = until

    def _refuse_gone(self, arrived: Set[int], buckets: Iterable[Bucket]) -> None:
        """Refuse gradients that hooks of the program have taken away, if that is sure: they were there at arrival.

        Else their graph may be so: the program is told, and they are looked at before its hooks from the next pass on.
        """
        queue = self._queue
        left = {bucket.indices[place] for bucket in buckets for place in bucket.not_taken()}
        gone = {index for index, one in self.alive(left & arrived) if one.grad is None}
        if not gone:
            return
        if not gone.isdisjoint(self._seen | self._count.keys()):
            raise UnsupportedError(
                f"{queue.where}: the gradient of {self._names(gone)} was taken away before it was averaged: a hook "
                "of your program steps or clears it as soon as it arrives.\n"
                "Step after backward; or hand the optimizer to torch's _apply_optimizer_in_backward and wrap the "
                "module in stretto.DistributedDataParallel."
            )
        hooked = {index: one for index, one in self.alive(gone - self.gone) if has_other_hooks(one)}
        for index, one in hooked.items():
            self.arrivals.see_first(index, one, self._see)
        if hooked:
            log.warning(
                "%s: parameters with a hook of your program (register_post_accumulate_grad_hook) had no gradient "
                "when it was to be averaged: %s.\n"
                "If the hook steps and clears .grad, each rank trains by itself. Step after backward; or hand the "
                "optimizer to torch's _apply_optimizer_in_backward and wrap the module in "
                "stretto.DistributedDataParallel.",
                queue.where,
                self._names(hooked),
            )
        self.gone |= hooked.keys()

    def _names(self, indices: Iterable[int]) -> str:
        return name_list([self._queue.names[index] for index in sorted(indices)])

    def _tell_full(self, bucket: Bucket, index: int) -> None:
        if not bucket.pending:
            self._events.emit(self._events.bucket_full, self._queue.pass_number, bucket.index, self._queue.names[index])

    # At its end

    def arrival_order(self) -> list[int]:
        """Indices as they arrived in this pass."""
        return [self.index_of[id(parameter)] for parameter in self.arrivals.order]

    def as_scheduled(self) -> bool:
        """Whether the pass was what the schedule foresaw, with nothing twice that was not to be."""
        return self._in_order and self._looked_at == len(self.arrivals.order)

    def contributed(self, *, scheduled: bool) -> set[int]:
        """What has a ``.grad``, of this pass or kept before it, unless all was taken. What fits no slot is loose."""
        if scheduled and not any(map(_pending, self._queue.buckets)):
            return set()
        arrived = set(self.arrival_order())
        self._refuse_gone(arrived, self._queue.buckets)
        found = {index: one for index, one in self.alive(self.unsynchronized | arrived) if one.grad is not None}
        self._queue.set_loose([index for index, one in found.items() if not self._queue.fits(index, one)])
        return set(found)

    def overtaken(self) -> list[str]:
        """Names of parameters that came again, unforeseen, after their slot had become ``.grad`` and had left.

        The gradient was accumulated into a sum under way.
        """
        if self.as_scheduled():
            return []
        count = Counter(self.arrival_order())
        left = self._queue.buckets[: self._queue.launched]
        launched = {index for bucket in left for index in bucket.indices}
        hot = {i for chunk in (self._schedule or ())[: self._next_chunk] if chunk.views for i in chunk.arrivals}
        again = [index for index, n in count.items() if n > self._expected.get(index, 1) and index in launched]
        return [self._queue.names[index] for index in again if id(self._queue.references[index]()) in hot]

    def end(self) -> None:
        """The pass is over, or given up. If it was not as scheduled, learn from it."""
        order = None if self.as_scheduled() else self.arrival_order()
        self.stop()
        if order is not None:
            self._learn(order)
        self._count.clear()
        self._next_chunk = self._looked_at = 0

    def _learn(self, order: list[int]) -> None:
        """Follow an order once it was seen twice, or at once if it is the first."""
        before, self.last_order = self.last_order, order
        self._expected = {index: n for index, n in Counter(order).items() if n > 1}
        stable = order == before or not before
        if not self.graph_changed and order and before:
            self.graph_changed = set(order) != set(before)
        if stable and order and not self._events.gradient_ready:
            self._follow()
        elif self._schedule is not None:
            self.watch_all()
