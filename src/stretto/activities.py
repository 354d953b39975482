"""One pass of one rank cut into activities: what a picture of it is made of.

What a rank computed, without a gap from the beginning of its step to the end, in nanoseconds of its record's clock:

    |-- optimizer --|-- other --|-- forward --|-- backward: an activity a gradient, and launching --|-- waiting --|

Beside these are the buckets, each from its launch until its result was there. Launching and waiting are the exposed
time. The part of a bucket's way that coincides with backward is hidden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from .plan import BucketPlan
from .record import Computing, Launch, PassRecord, Span, merged

Kind = Literal["optimizer", "other", "forward", "backward", "launching", "waiting"]
OTHERS = "other ranks"
"""What a rank waits for amid backward, where gradients may be missing: see presence.py."""


@dataclass(frozen=True)
class Activity:
    """Something that a rank did. The next begins where it ends."""

    kind: Kind
    begin: int
    end: int
    name: str = ""
    """Of backward, the parameter whose gradient ended it; of launching and waiting, the bucket, or ``OTHERS``. May be
    empty."""


@dataclass(frozen=True)
class Transfer:
    """A bucket on its way."""

    launch: Launch
    """Its times and bytes."""
    parameters: tuple[str, ...]
    """In the order of the plan."""
    hidden: int
    """Nanoseconds of its way in which backward computed."""
    exposed: int
    """The rest of its way."""
    joined: int | None = None
    """When the last rank had launched it too; None if that is not known. Before, it waits for that rank."""


def transfers_of(record: PassRecord, plan: BucketPlan | None) -> tuple[Transfer, ...]:
    """The buckets on their way; without their parameters where the plan is not known."""
    computing = Computing(record)
    transfers = []
    for one in record.launches:
        names = () if plan is None else tuple(plan.parameters[index].name for index in plan.buckets[one.bucket].indices)
        hidden = computing.within(Span(one.begin, one.end))
        transfers.append(Transfer(one, names, hidden, one.end - one.begin - hidden))
    return tuple(transfers)


def activities_of(record: PassRecord) -> tuple[Activity, ...]:
    """Without a gap and without an overlap, whatever the record says."""
    known = [Activity("forward", one.begin, one.end) for one in record.forwards]
    known += [Activity("optimizer", one.begin, one.end) for one in record.optimizer]
    known += [Activity("backward", one.begin, one.end) for one in record.unsynchronized]
    steps = merged(record.optimizer)
    stops = [Activity("launching", one.begin, one.handed_over, f"bucket {one.bucket}") for one in record.launches]
    stops += [Activity("waiting", one.begin, one.end, OTHERS) for one in record.waits]
    known += [part for one in stops for part in _with_steps(one, steps)]
    activities: list[Activity] = []
    at = record.began
    for one in sorted(known, key=lambda activity: activity.begin):
        begin, end = max(at, one.begin), min(one.end, record.backward_ended)
        if end > begin:
            activities += _between(record, at, begin)
            activities.append(replace(one, begin=begin, end=end))
            at = end
    activities += _between(record, at, record.backward_ended)
    at = max(at, record.backward_ended)
    for launch in sorted(record.launches, key=lambda launch: launch.seen):
        if launch.seen > at:
            wait = Activity("waiting", at, min(launch.seen, record.settled), f"bucket {launch.bucket}")
            activities += _with_steps(wait, steps)
            at = wait.end
    return (*activities, *_with_steps(Activity("waiting", at, max(at, record.settled)), steps))


def _with_steps(stop: Activity, steps: Sequence[Span]) -> list[Activity]:
    """A stop with the optimizers that step in it, as where a comm hook runs them."""
    parts, at = [], stop.begin
    for step in steps:
        begin, end = max(step.begin, at), min(step.end, stop.end)
        if begin < end:
            parts += [replace(stop, begin=at, end=begin)] * (at < begin) + [Activity("optimizer", begin, end)]
            at = end
    return [*parts, replace(stop, begin=at)]


def _between(record: PassRecord, begin: int, end: int) -> list[Activity]:
    """What lies between forwards, optimizers and launches: backward, from the end of the last forward on."""
    first = record.backward_began
    activities: list[Activity] = []
    if begin < min(first, end):
        activities.append(Activity("other", begin, min(first, end)))
        begin = activities[-1].end
    after = bisect_right(record.gradients, begin, key=lambda one: one[1])
    for name, came in islice(record.gradients, after, None):
        if not begin < came <= end:
            break
        activities.append(Activity("backward", begin, came, name))
        begin = came
    return [*activities, Activity("backward", begin, end)] if begin < end else activities
