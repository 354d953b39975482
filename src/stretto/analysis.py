"""From the records of all ranks to a report.

records of some passes ──> Seen (this rank) ──gather──> side by side ──> Report ──> advice.py
traces of all ranks ──> Seen of each ───────────────────────┘
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .advice import advise
from .clocks import Clock, compare_clocks
from .peers import Peers
from .plan import BucketPlan
from .record import NANO, Launch, PassRecord
from .reducer import Reducer
from .report import Breakdown, BucketReport, RankReport, Report
from .trace import RankTrace

_NO_PLAN = BucketPlan((), (), 1, 0)


def report_of(
    reducer: Reducer, peers: Peers, records: Collection[tuple[PassRecord, BucketPlan]], tied: Mapping[str, str]
) -> Report:
    """Collective: what ranks have seen is gathered, and their clocks compared.

    Args:
        reducer: of this rank.
        peers: by whom one gathers.
        records: of this rank, oldest first. Those made under another plan than the last are left out.
        tied: names of parameters, and under what other name the module uses them too.

    Raises:
        CommunicationError: a rank does not come.
    """
    plan = max(records, key=lambda pair: pair[0].number)[1] if records else reducer.plan
    mine = [record for record, used in records if used == plan]
    everyone: list[Seen] = peers.gather(seen_in(mine))
    transport = reducer.transport
    clocks = compare_clocks(getattr(transport, "store", None), transport.rank, peers.gather)
    return _report(
        _Place(transport.rank, transport.world_size, transport.name, reducer.statistics.bucket_memory),
        mine,
        plan,
        everyone,
        clocks,
        tied,
    )


def reports_from(traces: Sequence[RankTrace]) -> list[Report]:
    """The report of each rank, in rank order, over all passes of its trace that were made under the last plan.

    Args:
        traces: of all ranks of one run. The memory that buckets hold is taken to be what they carry.
    """
    under_last = [_under_last_plan(one) for one in traces]
    everyone = [seen_in(records) for records, _ in under_last]
    clocks = [one.clock for one in traces]
    reports = []
    for trace, (records, plan) in zip(traces, under_last, strict=True):
        memory = sum(map(plan.bucket_bytes, range(len(plan.buckets))))
        place = _Place(trace.rank, trace.world_size, trace.transport, memory)
        reports.append(_report(place, records, plan, everyone, clocks, trace.tied))
    return reports


def _under_last_plan(trace: RankTrace) -> tuple[list[PassRecord], BucketPlan]:
    if not trace.passes:
        return [], _NO_PLAN
    last = trace.passes[-1].plan
    return [record for record in trace.passes if record.plan == last], trace.plans.get(last, _NO_PLAN)


@dataclass(frozen=True)
class _Place:
    """Of whom a report is."""

    rank: int
    world_size: int
    transport: str
    bucket_memory: int


def _report(
    place: _Place,
    mine: Sequence[PassRecord],
    plan: BucketPlan,
    everyone: Sequence[Seen],
    clocks: Sequence[Clock | None],
    tied: Mapping[str, str],
) -> Report:
    known = [clock.uncertainty * NANO for clock in clocks if clock is not None]
    report = Report(
        place.rank,
        place.world_size,
        place.transport,
        len(mine),
        breakdown_of(mine),
        buckets_of(mine, plan),
        side_by_side(everyone, clocks),
        nbytes=int(statistics.median(sum(one.nbytes for one in record.launches) for record in mine)) if mine else 0,
        bucket_memory=place.bucket_memory,
        clock_uncertainty=max(known) if len(known) == len(clocks) else None,
        plan=plan.hash,
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
    ordered = sorted(records, key=lambda one: one.step)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]

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

    arrivals = [sorted(came[name] for name in names if name in came) for _, _, came in seen]
    firsts = [times[0] for times in arrivals if times]
    before = [times[-2] for times in arrivals if len(times) > 1]
    last = seen[-1][1]
    return BucketReport(
        last.bucket,
        last.nbytes,
        names,
        statistics.mode(one.closed_by for _, one, _ in seen),
        first=statistics.median(firsts) if firsts else None,
        before_last=statistics.median(before) if before else None,
        full=median(lambda one: one.full),
        launched=always(lambda one: one.begin),
        ended=always(lambda one: one.end),
        seen=always(lambda one: one.seen),
    )


# All ranks


@dataclass(frozen=True)
class Seen:
    """What a rank brings to a report."""

    breakdown: Breakdown
    ends: Mapping[int, int]
    """By pass: when its backward ended, by its own clock."""


def seen_in(records: Sequence[PassRecord]) -> Seen:
    """By this rank."""
    return Seen(breakdown_of(records), {one.number: one.backward_ended for one in records})


def side_by_side(everyone: Sequence[Seen], clocks: Sequence[Clock | None]) -> tuple[RankReport, ...]:
    """Who was how late, over the passes that all ranks have recorded."""
    common = set.intersection(*(set(one.ends) for one in everyone))
    if not common or any(clock is None for clock in clocks):
        return tuple(RankReport(rank, one.breakdown, None, None) for rank, one in enumerate(everyone))
    ends = [
        {number: one.ends[number] + clock.offset for number in common}
        for one, clock in zip(everyone, clocks, strict=True)
        if clock is not None
    ]
    reports = []
    for rank, one in enumerate(everyone):
        behind = [(ends[rank][number] - min(other[number] for other in ends)) * NANO for number in common]
        last = [ends[rank][number] == max(other[number] for other in ends) for number in common]
        ahead = [(max(other[number] for other in ends) - ends[rank][number]) * NANO for number in common]
        waiting = min(statistics.fmean(ahead), one.breakdown.exposed)
        reports.append(RankReport(rank, one.breakdown, statistics.median(behind), sum(last) / len(last), waiting))
    return tuple(reports)
