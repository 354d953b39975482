"""The traces of all ranks laid side by side on one clock: what every picture draws.

    read_trace(folder) ──> timeline_of ──> Timeline ──> chrome.py (Perfetto), plots.py (PNG, SVG), page.py, sketch.py

All times are nanoseconds of rank 0's clock, counted from the first thing that is shown. Each rank has two tracks: what
it computed (activities), and its buckets on their way (transfers).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .activities import Activity, Transfer, activities_of, transfers_of
from .plan import BucketPlan
from .record import NANO, PassRecord, percent_hidden
from .report import UNTOLD, host_times, ms, share
from .trace import RankTrace
from .wording import one_line


@dataclass(frozen=True)
class Arrow:
    """From the gradient that filled a bucket to its launch and to its settle."""

    transfer: Transfer
    source: Activity | None
    """The activity of backward that ended with the gradient; None if some parameter of the bucket had none."""
    settle: Activity
    """The activity in which this rank had waited for the bucket."""


@dataclass(frozen=True)
class RankPass:
    """One pass on one rank, with the step before it. Only the record is kept; the rest is made when it is asked for."""

    record: PassRecord
    """By the timeline's clock."""
    plan: BucketPlan | None = None
    """The one in use; None if it is not known."""
    joined: Mapping[int, int] | None = None
    """By bucket, when the last rank had launched it; None if that is not known."""

    @property
    def activities(self) -> tuple[Activity, ...]:
        """What the rank computed, without a gap."""
        return activities_of(self.record)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """In launch order, which is that of the plan."""
        found = transfers_of(self.record, self.plan)
        joined = self.joined
        if joined is None:
            return found
        return tuple(
            replace(one, joined=min(joined[one.launch.bucket], one.launch.end)) if one.launch.bucket in joined else one
            for one in found
        )

    @property
    def arrows(self) -> tuple[Arrow, ...]:
        """One a bucket."""
        activities = self.activities
        named: dict[str, list[Activity]] = {}
        for one in activities:
            if one.kind == "backward":
                named.setdefault(one.name, []).append(one)
        arrows = []
        for transfer in self.transfers:
            launch = transfer.launch
            source = None
            if launch.full is not None:  # a gradient may come again when the bucket has left
                before = [one for one in named.get(launch.closed_by, ()) if one.end <= launch.full]
                source = before[-1] if before else _at(activities, launch.full)
            arrows.append(Arrow(transfer, source, _at(activities, launch.seen)))
        return tuple(arrows)

    def moved(self, by: int) -> RankPass:
        """So many nanoseconds later."""
        joined = None if self.joined is None else {bucket: at + by for bucket, at in self.joined.items()}
        return RankPass(self.record.moved(by), self.plan, joined)


def _at(activities: Sequence[Activity], time: int) -> Activity:
    """The activity that ends there or goes on."""
    place = bisect_left(activities, time, key=lambda one: one.end)
    return activities[min(place, len(activities) - 1)]


@dataclass(frozen=True)
class RankTimeline:
    """All that is shown of one rank."""

    rank: int
    transport: str
    host: str
    pid: int
    uncertainty: int | None
    """Nanoseconds by which its times may be off from rank 0's; None if the clocks could not be compared. Then it is
    placed so that its passes settle when rank 0's do."""
    end: str | None
    """How its trace ended: see :class:`~stretto.trace.RankTrace`."""
    passes: tuple[RankPass, ...]
    accelerators: tuple[str, ...] = ()
    """Kinds of devices whose times are not known: see :class:`~stretto.report.Report`."""


@dataclass(frozen=True)
class Timeline:
    """All ranks. ``passes`` of a rank may be empty, and a pass may be missing on some."""

    world_size: int
    ranks: tuple[RankTimeline, ...]

    @property
    def passes(self) -> tuple[RankPass, ...]:
        """Of all ranks."""
        return tuple(one for rank in self.ranks for one in rank.passes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the passes that some rank has, ascending."""
        return tuple(sorted({one.record.number for one in self.passes}))

    @property
    def end(self) -> int:
        """When the last thing ended; time begins at 0. 0 if nothing is there."""
        return max((one.record.settled for one in self.passes), default=0)

    @property
    def typical(self) -> int | None:
        """The pass whose step took as long as most, among those that all ranks have (or as many as possible)."""
        steps: dict[int, list[float]] = {}
        for one in self.passes:
            steps.setdefault(one.record.number, []).append(one.record.step)
        most = max(map(len, steps.values()), default=0)
        slowest = {number: max(times) for number, times in steps.items() if len(times) == most}
        middle = statistics.median_low(slowest.values()) if slowest else 0.0
        return next((number for number, time in slowest.items() if time == middle), None)

    def only(self, numbers: Collection[int] | None = None) -> Timeline:
        """Only these passes, with time starting at 0; default, the typical one: what a picture shows."""
        wanted = {self.typical} if numbers is None else {*numbers}
        kept = [[one for one in rank.passes if one.record.number in wanted] for rank in self.ranks]
        return _from_zero(self.world_size, [*zip(self.ranks, kept, strict=True)])

    @property
    def percent_hidden(self) -> float:
        """Of the communication of all ranks; 100 where there is none."""
        return percent_hidden(
            sum(one.record.hidden for one in self.passes), sum(one.record.exposed for one in self.passes)
        )

    @property
    def told(self) -> bool:
        """Whether it is known when each bucket's result was there; if not, hidden is a bound from above."""
        return all(one.record.told for one in self.passes)

    @property
    def exposed(self) -> float:
        """Seconds a pass that a rank did nothing but communicate, on average."""
        return statistics.fmean([one.record.exposed for one in self.passes]) if self.passes else 0.0

    def headline(self) -> str:
        """One sentence with the numbers."""
        if not any(one.record.launches for one in self.passes):
            return "no bucket was sent" if self.passes else "no pass was recorded"
        step = statistics.fmean([one.record.step for one in self.passes])
        return (
            f"{'' if self.told else 'at most '}{self.percent_hidden:.0f} % of communication hidden behind backward; "
            f"{ms(self.exposed)} exposed, {share(self.exposed, step)} of the step"
        )

    def notes(self) -> tuple[str, ...]:
        """What one has to know about what is missing or uncertain; mostly nothing."""
        said = []
        for rank in self.ranks:
            if not rank.passes:
                said.append(f"rank {rank.rank}: none of these passes was recorded")
            if rank.end is None:
                said.append(f"rank {rank.rank}: its trace was cut off, the process may have been killed")
            elif rank.end != "closed":
                said.append(f"rank {rank.rank}: ended with {one_line(rank.end)}")
            if rank.uncertainty is None:
                said.append(
                    f"rank {rank.rank}: its clock is not known, so its passes are drawn to settle with rank 0's"
                )
            elif rank.uncertainty:
                said.append(f"rank {rank.rank}: times are accurate to {ms(rank.uncertainty * NANO)} relative to rank 0")
        missing = sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks})
        if missing:
            said.append(f"there is no trace of ranks {missing}")
        if not self.told:
            said.append(UNTOLD)
        if accelerators := sorted({kind for rank in self.ranks for kind in rank.accelerators}):
            said.append(host_times(accelerators))
        return tuple(said)


Placed = tuple[RankTimeline, list[RankPass]]
"""A rank, yet without its passes, and these."""


def timeline_of(traces: Sequence[RankTrace]) -> Timeline:
    """All ranks on rank 0's clock.

    Args:
        traces: what :func:`~stretto.trace.read_trace` has read, one or more ranks of one run.

    Example::

        timeline = timeline_of(read_trace("trace"))
        print(timeline.headline())
        print(timeline.numbers, timeline.typical)
    """
    placed = []
    for trace in traces:
        about = (trace.rank, trace.transport, trace.host, trace.pid, trace.uncertainty, trace.end)
        rank = RankTimeline(*about, (), trace.accelerators)
        shift = 0 if trace.clock else _shift_by_ends(trace, traces[0])
        clock = trace.at if trace.clock else (lambda time, by=shift: time + by)
        placed.append((rank, [RankPass(one.by(clock), trace.plans.get(one.plan)) for one in trace.passes]))
    world_size = traces[0].world_size if traces else 0
    return _from_zero(world_size, _joined(world_size, placed))


def _shift_by_ends(trace: RankTrace, first: RankTrace) -> int:
    """To the first rank's time, by the passes that both have."""
    ends = {one.number: first.at(one.settled) for one in first.passes}
    apart = [ends[one.number] - one.settled for one in trace.passes if one.number in ends]
    if apart:
        return int(statistics.median_low(apart))
    both = first.passes and trace.passes
    return first.at(first.passes[0].settled) - trace.passes[0].settled if both else 0


def _from_zero(world_size: int, placed: Sequence[Placed]) -> Timeline:
    zero = min((one.record.began for _, passes in placed for one in passes), default=0)
    ranks = [replace(rank, passes=tuple(one.moved(-zero) for one in passes)) for rank, passes in placed]
    return Timeline(world_size, tuple(ranks))


def _joined(world_size: int, placed: Sequence[Placed]) -> list[Placed]:
    """With the time at which the last rank had launched each bucket, where all ranks are there and clocks known."""
    if world_size < 2 or len(placed) < world_size or any(rank.uncertainty is None for rank, _ in placed):
        return [*placed]
    begins: dict[int, dict[int, list[int]]] = {}
    for _, passes in placed:
        for one in passes:
            buckets = begins.setdefault(one.record.number, {})
            for launch in one.record.launches:
                buckets.setdefault(launch.bucket, []).append(launch.begin)
    last = {
        number: {bucket: max(launched) for bucket, launched in buckets.items() if len(launched) == len(placed)}
        for number, buckets in begins.items()
    }
    return [(rank, [replace(one, joined=last[one.record.number]) for one in passes]) for rank, passes in placed]
