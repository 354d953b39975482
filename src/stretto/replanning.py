"""New buckets for the same parameters, from the next pass on, by all ranks at the end of the same pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .comm_hooks import fixes_plan
from .launch import LaunchQueue
from .plan import BucketPlan
from .replan import ReplanPolicy, complete_order, recut
from .tracker import ArrivalTracker
from .transport.base import Work
from .usage import carry_over, ranks_that_had


class Replanning:
    """Asks for another plan, and makes it.

    Args:
        queue: has the plan.
        tracker: knows what has arrived in which order.
    """

    def __init__(self, queue: LaunchQueue, tracker: ArrivalTracker) -> None:
        self._queue = queue
        self._tracker = tracker
        self._policy = ReplanPolicy()
        self._order_under_way: tuple[torch.Tensor, Work] | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether an order is waiting to be looked at."""
        return self._policy.deferred

    def wants(self) -> bool:
        """Whether this rank asks for new buckets: only rank 0 does."""
        queue = self._queue
        if queue.transport.rank != 0 or fixes_plan(queue.comm_hook):
            return False
        return self._policy.drifted(queue.plan, self._tracker.arrival_order(), queue.pass_number)

    def begin_anew(self) -> None:
        """The parameters have changed."""
        self._policy = ReplanPolicy()

    def send_order(self) -> None:
        """Put rank 0's order of arrival under way, which ``follow_order`` waits for. Collective."""
        if self._order_under_way is None:
            order = complete_order(self._queue.plan, self._tracker.last_order)
            message = torch.tensor(order, dtype=torch.int64, device=self._queue.devices[0])
            self._order_under_way = message, self._queue.transport.broadcast(message)

    def follow_order(self) -> None:
        """Cut new buckets in the order in which rank 0's gradients arrived. Collective."""
        self.send_order()
        assert self._order_under_way is not None
        (message, work), self._order_under_way = self._order_under_way, None
        self._queue.wait_for(work, "the order of gradients")
        self._policy.learnt(self._tracker.last_order, self._queue.pass_number)
        self._adopt(recut(self._queue.plan, message.tolist()))

    def cut(self, after: Iterable[int]) -> None:
        """Cut the buckets also after these parameters, given alike on all ranks."""
        self._adopt(recut(self._queue.plan, self._queue.plan.order, after))

    def _adopt(self, plan: BucketPlan) -> None:
        queue = self._queue
        if plan == queue.plan:
            return
        counts = ranks_that_had(queue.buckets)
        with torch.no_grad():
            queue.adopt(plan)
            carry_over(counts, queue.buckets)
        queue.replans += 1
        self._tracker.follow_again()
        if queue.events.plan_changed:
            queue.events.emit(queue.events.plan_changed, queue.pass_number, plan)
