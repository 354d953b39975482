"""From the records of all ranks to a report.

records of some passes ──> RankView (this rank) ──gather──> side by side ──> Report ──> advice.py
traces of all ranks ──> RankView of each ──────────────────────┘
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .advice import advise
from .clocks import Clock, ClockTalk
from .comm_hooks import carrier
from .plan import BucketPlan
from .record import NANO, Clockwise, Launch, PassRecord
from .reducer import Reducer
from .report import Breakdown, BucketReport, RankReport, Report
from .trace import RankTrace, accelerators

_NO_PLAN = BucketPlan((), (), 1, 0)


def report_of(reducer: Reducer, records: Collection[tuple[PassRecord, BucketPlan]], tied: Mapping[str, str]) -> Report:
    """Collective: what ranks have seen is gathered, and their clocks compared.

    Args:
        reducer: of this rank.
        records: of this rank, oldest first. Those made under another plan than the last are counted and left out.
        tied: names of parameters, and under what other name the module uses them too.

    Raises:
        CommunicationError: a rank does not come.
    """
    plan = max(records, key=lambda pair: pair[0].number)[1] if records else reducer.plan
    mine = [record for record, used in records if used == plan]
    transport = reducer.transport
    _, clocks = compare_clocks(reducer)
    everyone: list[RankView] = reducer.queue.peers.gather(_seen_lately(transport.rank, mine, clocks[transport.rank]))
    place = _Whose(
        transport.rank,
        transport.world_size,
        carrier(reducer.queue.comm_hook, transport.name),
        reducer.statistics.bucket_memory,
        accelerators(parameter.device.type for parameter in reducer.parameters),
    )
    report = _report(place, mine, len(records) - len(mine), plan, everyone, tied)
    return replace(report, averaged=reducer.statistics.passes or (None if reducer.queue.pass_number else 0))


def compare_clocks(reducer: Reducer) -> tuple[ClockTalk, list[Clock | None]]:
    """Every rank's clock against rank 0's, in rank order, and by whom they can be compared once more. Collective.

    Raises:
        CommunicationError: a rank does not come, or ends.
        SetupError: this rank waits in another call.
    """
    peers = reducer.queue.peers
    peers.refuse_misplaced()
    talk = ClockTalk(peers.line, reducer.transport.rank, peers.gather, peers.wait)
    try:
        return talk, talk.compare()
    except RuntimeError as error:
        peers.fail("the clocks of hosts could not be compared", error)


def reports_from(traces: Sequence[RankTrace]) -> list[Report]:
    """The report of each rank that there is, in rank order, over all passes that were made under its last plan.

    Args:
        traces: of ranks of one run. The memory that buckets hold is taken to be what they carry.
    """
    under_last = [_under_last_plan(one) for one in traces]
    everyone = [
        seen_in(trace.rank, records, trace.uncertainty, trace.at)
        for trace, (records, _) in zip(traces, under_last, strict=True)
    ]
    reports = []
    for trace, (records, plan) in zip(traces, under_last, strict=True):
        memory = sum(map(plan.sent_bytes, range(len(plan.buckets))))
        place = _Whose(trace.rank, trace.world_size, trace.transport, memory, trace.accelerators)
        reports.append(_report(place, records, len(trace.passes) - len(records), plan, everyone, trace.tied))
    return reports


def _under_last_plan(trace: RankTrace) -> tuple[list[PassRecord], BucketPlan]:
    if not trace.passes:
        return [], _NO_PLAN
    last = trace.passes[-1].plan
    return [record for record in trace.passes if record.plan == last], trace.plans.get(last, _NO_PLAN)


@dataclass(frozen=True)
class _Whose:
    """Of whom a report is."""

    rank: int
    world_size: int
    transport: str
    bucket_memory: int
    accelerators: tuple[str, ...]


def _report(
    place: _Whose,
    mine: Sequence[PassRecord],
    left_out: int,
    plan: BucketPlan,
    everyone: Sequence[RankView],
    tied: Mapping[str, str],
) -> Report:
    known = [one.uncertainty * NANO for one in everyone if one.uncertainty is not None]

    def usual(nbytes: Callable[[PassRecord], int]) -> int:
        return int(statistics.median(map(nbytes, mine))) if mine else 0

    report = Report(
        place.rank,
        place.world_size,
        place.transport,
        len(mine),
        breakdown_of(mine),
        buckets_of(mine, plan),
        side_by_side(everyone),
        nbytes=usual(lambda record: sum(one.nbytes for one in record.launches)),
        bucket_memory=place.bucket_memory,
        clock_uncertainty=max(known) if len(known) == len(everyone) else None,
        plan=plan.hash,
        sparse_nbytes=usual(lambda record: record.sparse_bytes),
        buffer_nbytes=usual(lambda record: record.buffer_bytes),
        left_out=left_out,
        accelerators=place.accelerators,
    )
    return replace(report, advice=advise(report, tied))


def nothing_seen(rank: int, world_size: int, plan: BucketPlan) -> Report:
    """Where there is one rank, or no reducer any more."""
    nothing = breakdown_of([])
    return Report(rank, world_size, "nothing", 0, nothing, (), (), 0, 0, None, plan.hash)


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several, and its second."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied.setdefault(first[id(parameter)], name)
    return tied


def breakdown_of(records: Sequence[PassRecord]) -> Breakdown:
    """Means over the middle half of one rank's passes by the time of a step, so that parts add up; zeros for none."""
    middle = _middle(records)

    def mean(value: Callable[[PassRecord], float]) -> float:
        return statistics.fmean(map(value, middle)) if middle else 0.0

    return Breakdown(
        forward=mean(lambda one: one.forward),
        backward=mean(lambda one: one.backward),
        exposed=mean(lambda one: one.exposed),
        launching=mean(lambda one: one.launching),
        hidden=mean(lambda one: one.hidden),
        optimizer=mean(lambda one: one.stepping),
        other=mean(lambda one: one.other),
        step=mean(lambda one: one.step),
    )


def _middle(records: Sequence[PassRecord]) -> list[PassRecord]:
    """The middle half of the passes, by the time of their steps."""
    ordered = sorted(records, key=lambda one: one.step)
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def torch_times(records: Sequence[PassRecord]) -> dict[str, int]:
    """The times that torch's DDP logs, by its keys, in nanoseconds: of the last record, and means (``avg_``).

    As in torch forward lasts until backward begins, communication from the first launch until the last bucket is
    there, and what overlaps is what lies before the end of backward.
    """
    known = [one for one in records if one.launches]
    if not known:
        return {}
    last = known[-1]
    starts = {
        "forward_compute_time_start": _forward_start(last),
        "backward_compute_time_start": last.started,
        "backward_comm_time_start": last.launches[0].begin,
        "backward_compute_time_end": last.backward_ended,
        "backward_comm_time_end": _reduced(last),
    }
    times = [_torch_times(one) for one in known]
    means = {f"avg_{name}": sum(one[name] for one in times) // len(times) for name in times[0]}
    return {**starts, **times[-1], **means}


def _torch_times(one: PassRecord) -> dict[str, int]:
    first = one.launches[0].begin
    return {
        "forward_compute_time": one.started - _forward_start(one),
        "backward_compute_time": one.backward_ended - one.started,
        "backward_comm_time": _reduced(one) - first,
        "backward_compute_comm_overlap_time": max(0, min(one.backward_ended, _reduced(one)) - first),
    }


def _forward_start(one: PassRecord) -> int:
    return one.forwards[0].begin if one.forwards else one.started


def _reduced(one: PassRecord) -> int:
    return max(launch.end for launch in one.launches)


def buckets_of(records: Sequence[PassRecord], plan: BucketPlan) -> tuple[BucketReport, ...]:
    """The buckets of a plan, in launch order, as far as they were sent."""
    seen: dict[int, list[_Seen]] = {}
    for record in records:
        came = {name: (at - record.started) * NANO for name, at in record.gradients}
        for one in record.launches:
            seen.setdefault(one.bucket, []).append((record, one, came))
    names = [tuple(plan.parameters[index].name for index in spec.indices) for spec in plan.buckets]
    return tuple(_bucket(seen[number], names[number]) for number in range(len(names)) if number in seen)


_Seen = tuple[PassRecord, Launch, Mapping[str, float]]
"""A bucket's launch in a pass, and when gradients came last in it, in seconds since its first."""


def _bucket(seen: Sequence[_Seen], names: tuple[str, ...]) -> BucketReport:
    def median(value: Callable[[Launch], int | None]) -> float | None:
        found = [(at - record.started) * NANO for record, one, _ in seen if (at := value(one)) is not None]
        return statistics.median(found) if found else None

    def always(value: Callable[[Launch], int]) -> float:
        return median(value) or 0.0

    arrivals = [sorted((came[name], name) for name in names if name in came) for _, _, came in seen]
    firsts = [times[0][0] for times in arrivals if times]
    before = [times[-2] for times in arrivals if len(times) > 1]
    last = seen[-1][1]
    return BucketReport(
        last.bucket,
        last.nbytes,
        names,
        statistics.mode(one.closed_by for _, one, _ in seen),
        first=statistics.median(firsts) if firsts else None,
        before_last=statistics.median(at for at, _ in before) if before else None,
        full=median(lambda one: one.full),
        launched=always(lambda one: one.begin),
        started=always(lambda one: one.handed_over),
        ended=always(lambda one: one.end),
        seen=always(lambda one: one.seen),
        told=all(one.told for _, one, _ in seen),
        before=statistics.mode(name for _, name in before) if before else "",
    )


# All ranks


class Ends(NamedTuple):
    """Of one pass, by rank 0's clock."""

    came: int
    """When its backward would have ended without waits amid it."""
    backward: int
    """When it had."""
    settled: int
    """When the pass had."""


@dataclass(frozen=True)
class RankView:
    """What a rank brings to a report."""

    rank: int
    breakdown: Breakdown
    ends: Mapping[int, Ends]
    """By pass."""
    middle: frozenset[int]
    """The passes that the breakdown averages."""
    uncertainty: int | None
    """Nanoseconds by which these times may be wrong; None if they are not by rank 0's clock."""


def seen_in(rank: int, records: Sequence[PassRecord], uncertainty: int | None, clock: Clockwise) -> RankView:
    """By one rank, whose times ``clock`` turns into rank 0's."""
    ends = {one.number: Ends(clock(one.came), clock(one.backward_ended), clock(one.settled)) for one in records}
    return RankView(rank, breakdown_of(records), ends, frozenset(one.number for one in _middle(records)), uncertainty)


def _seen_lately(rank: int, records: Sequence[PassRecord], clock: Clock | None) -> RankView:
    """By this rank, whose clock was compared just now."""
    if clock is None:
        return seen_in(rank, records, None, lambda time: time)
    oldest = min((one.began for one in records), default=clock.at)
    return seen_in(rank, records, clock.right_to(oldest), lambda time: time + clock.offset)


def side_by_side(everyone: Sequence[RankView]) -> tuple[RankReport, ...]:
    """How late each rank was, over the passes that all these ranks have recorded."""
    common = set.intersection(*(set(one.ends) for one in everyone)) if everyone else set()
    if not common or any(one.uncertainty is None for one in everyone):
        return tuple(RankReport(one.rank, one.breakdown, None, None) for one in everyone)
    came = {number: [one.ends[number].came for one in everyone] for number in common}
    first, last = ({number: pick(came[number]) for number in common} for pick in (min, max))
    over = {n: max(one.ends[n].backward for one in everyone) for n in common}  # who waited amid it ends later
    reports = []
    for one in everyone:
        behind = statistics.median((one.ends[number].came - first[number]) * NANO for number in common)
        was_last = statistics.fmean(one.ends[number].came == last[number] for number in common)
        # No pass settles before the last rank's backward has ended, unless by clocks that are a little apart.
        waits = [min(over[n], one.ends[n].settled) - one.ends[n].came for n in one.middle & common]
        waiting = statistics.fmean(waits) * NANO if waits else 0.0
        reports.append(RankReport(one.rank, one.breakdown, behind, was_last, min(waiting, one.breakdown.exposed)))
    return tuple(reports)
