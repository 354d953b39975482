"""When is it worth cutting new buckets? Rank 0 decides, from the order in which its gradients arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .plan import BucketPlan, plan_buckets

WORTH_IT = 0.02
"""Replan where bytes would leave earlier by this part of backward; smaller gains do not pay for new buffers."""
MOST_PATIENCE = 1024
"""Look at a drifting order at least once in so many passes."""


def complete_order(plan: BucketPlan, arrived: Sequence[int]) -> list[int]:
    """First arrivals, and parameters that did not arrive after the one that they follow in the plan."""
    seen = dict.fromkeys(arrived)
    behind: dict[int | None, list[int]] = {}
    anchor = None
    for index in plan.order:
        if index in seen:
            anchor = index
        else:
            behind.setdefault(anchor, []).append(index)
    order = behind.get(None, [])
    for index in seen:
        order += [index, *behind.get(index, [])]
    return order


def recut(plan: BucketPlan, order: Sequence[int], cuts: Iterable[int] = ()) -> BucketPlan:
    """The plan for the same parameters and caps in another order of arrival, with more cuts."""
    return plan_buckets(
        plan.parameters,
        order,
        cap_bytes=plan.cap_bytes,
        last_cap_bytes=plan.last_cap_bytes,
        cut_after=sorted({*plan.cut_after, *cuts}),
    )


class ReplanPolicy:
    """Compares each pass's arrivals with the last ones that it knows.

    A graph whose order changes in every pass must cause neither a new plan nor a costly look in every pass: each change
    that comes soon after the one before doubles the number of passes until the next look.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._looked_at = 0
        self._patience = 1
        self.deferred = False
        """Whether an order is waiting to be looked at."""

    def drifted(self, plan: BucketPlan, arrived: Sequence[int], pass_number: int) -> bool:
        """Whether a plan made from ``arrived`` (parameter indices of one pass) would let bytes leave earlier."""
        known = arrived == self._known
        self.deferred = not known and pass_number < self._looked_at + self._patience
        if known or self.deferred:
            return False
        soon = pass_number < self._looked_at + 2 * self._patience
        self._patience = min(2 * self._patience, MOST_PATIENCE) if soon else 1
        self.learnt(arrived, pass_number)
        order = complete_order(plan, arrived)
        return plan.lag(order) - recut(plan, order).lag(order) > WORTH_IT

    def learnt(self, arrived: Sequence[int], pass_number: int) -> None:
        """A plan was made from ``arrived`` in this pass."""
        self._known = list(arrived)
        self._looked_at = pass_number
