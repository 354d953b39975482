"""A timeline as Chrome Trace Event JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Each rank is a process. It has a thread for what it computed, where activities lie inside "backward" and these inside
"pass n", and a thread for its transport. [Note: lanes] Events of one thread must be nested or disjoint: Perfetto drops
events that only overlap. Asynchronous events may overlap, but take no flow arrows. So a bucket that is launched while
another is on its way goes to a further thread of the same transport.

Events come in the order of their times, enclosing ones first. They are made pass by pass, so that a trace of several
hours is written without ever being held as a whole.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import Any, TextIO

from .activities import OTHERS, Activity, Kind, Transfer
from .report import host_times
from .timeline import Arrow, RankPass, RankTimeline, Timeline

Event = dict[str, Any]


def compute_thread(world_size: int) -> int:
    """The thread of what a rank computed; its transport has those behind it. No rank, which is a process here, has such
    a number: a thread with its process's number would be the main one for Perfetto, and stand first; 0 the idle one."""
    return max(1, world_size)


COLOURS: dict[Kind, str] = {
    "optimizer": "grey",
    "other": "white",
    "forward": "thread_state_runnable",
    "backward": "good",
    "launching": "bad",
    "waiting": "terrible",
}
"""Names that the viewers know. Perfetto takes colours of its own."""


def write_chrome(timeline: Timeline, file: TextIO) -> None:
    """Event by event. Times in it are microseconds, as the format has them.

    Args:
        timeline: all its passes are written.
        file: open for text.

    Example::

        with open("trace.json", "w") as file:
            write_chrome(timeline_of(read_trace("trace")), file)
    """
    file.write('{"traceEvents": [\n')
    separator = ""
    for event in _events(timeline):
        file.write(separator + json.dumps(event, allow_nan=False))
        separator = ",\n"
    about = {"summary": timeline.headline(), "notes": list(timeline.notes()), "world_size": timeline.world_size}
    around = json.dumps({"displayTimeUnit": "ms", "otherData": about}, allow_nan=False)
    file.write("\n], " + around.removeprefix("{") + "\n")


def _events(timeline: Timeline) -> Iterator[Event]:
    """Those of all ranks by their times. What has no time, names of threads, comes before what it is about."""
    ids = count(1)
    compute = compute_thread(timeline.world_size)
    ranks = (_rank(rank, compute, ids) for rank in timeline.ranks)
    return (event for _, event in heapq.merge(*ranks, key=lambda one: one[0]))


def _rank(rank: RankTimeline, compute: int, ids: Iterator[int]) -> Iterator[tuple[float, Event]]:
    at = 0.0
    for event in _names(rank, compute):
        yield at, event
    free: list[int] = []
    for one in rank.passes:
        known = len(free)
        lanes = _lanes(one.transfers, free)
        for lane in range(max(1, known), len(free)):
            for event in _thread(rank.rank, compute + 1 + lane, f"{rank.transport}, {lane + 1} at once"):
                yield at, event
        events = _pass(rank.rank, compute, one, lanes, ids)
        for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", -1.0))):
            at = event["ts"]
            yield at, event


def _names(rank: RankTimeline, compute: int) -> Iterator[Event]:
    yield _about("process_name", rank.rank, compute, name=f"rank {rank.rank} ({rank.host}, pid {rank.pid})")
    yield _about("process_sort_index", rank.rank, compute, sort_index=rank.rank)
    if rank.accelerators:
        yield _about("process_labels", rank.rank, compute, labels=host_times(rank.accelerators))
    yield from _thread(rank.rank, compute, "compute")
    yield from _thread(rank.rank, compute + 1, rank.transport)


def _thread(rank: int, thread: int, name: str) -> Iterator[Event]:
    yield _about("thread_name", rank, thread, name=name)
    yield _about("thread_sort_index", rank, thread, sort_index=thread)


def _pass(rank: int, compute: int, one: RankPass, lanes: Sequence[int], ids: Iterator[int]) -> Iterator[Event]:
    yield from _computed(rank, compute, one)
    for arrow, lane in zip(one.arrows, lanes, strict=True):
        thread = compute + 1 + lane
        yield _transfer(rank, thread, one.record.number, arrow.transfer)
        yield from _flow(rank, compute, thread, next(ids), arrow)
    if one.record.buffers is not None:
        facts = {"bytes": one.record.buffer_bytes}
        yield _event("buffers sent", "i", one.record.buffers, rank, compute + 1, cat="buffers", s="t", args=facts)


def _lanes(transfers: Sequence[Transfer], free: list[int]) -> list[int]:
    """For each the first lane that is free when it is launched. See [Note: lanes].

    Args:
        transfers: of a pass.
        free: from when each lane is free; brought up to date.
    """
    lanes = []
    for one in transfers:
        lane = next((lane for lane, at in enumerate(free) if at <= one.launch.begin), len(free))
        free[lane : lane + 1] = [one.launch.end]
        lanes.append(lane)
    return lanes


def _computed(rank: int, compute: int, one: RankPass) -> Iterator[Event]:
    record, activities = one.record, one.activities
    numbers = {"hidden_ms": record.hidden * 1e3, "exposed_ms": record.exposed * 1e3, "plan": record.plan}
    yield _span(f"pass {record.number}", "pass", activities[0].begin, activities[-1].end, rank, compute, numbers)
    for part, group in groupby(activities, key=_part):
        inside = [*group]
        if part:
            yield _span(part, part, inside[0].begin, inside[-1].end, rank, compute, {})
        for activity in inside:
            span = _span(_label(activity), activity.kind, activity.begin, activity.end, rank, compute, {})
            yield span | {"cname": COLOURS[activity.kind]}


def _part(activity: Activity) -> str:
    """What the activity is a part of."""
    kind = "backward" if activity.name == OTHERS else activity.kind
    return {"backward": "backward", "launching": "backward", "waiting": "settle"}.get(kind, "")


def _label(activity: Activity) -> str:
    named = {"backward": activity.name, "launching": f"launch {activity.name}", "waiting": f"wait for {activity.name}"}
    nameless = {"backward": "(take gradients)", "waiting": "(hand out gradients)"}
    return named.get(activity.kind, activity.kind) if activity.name else nameless.get(activity.kind, activity.kind)


def _transfer(rank: int, thread: int, number: int, one: Transfer) -> Event:
    launch = one.launch
    facts: dict[str, Any] = {
        "pass": number,
        "bucket": launch.bucket,
        "bytes": launch.nbytes,
        "parameters": list(one.parameters),
        "closed_by": launch.closed_by,
        "full_us": None if launch.full is None else launch.full / 1e3,
        "launched_us": launch.begin / 1e3,
        "handed_over_us": launch.handed_over / 1e3,
        "last_rank_launched_us": None if one.joined is None else one.joined / 1e3,
        "ended_us": launch.end / 1e3,
        "end_known": launch.told,
        "seen_us": launch.seen / 1e3,
        "hidden_us": one.hidden / 1e3,
        "exposed_us": one.exposed / 1e3,
    }
    by = f" ({launch.closed_by})" if launch.closed_by else ""
    until = "" if launch.told else ", until it was seen"
    return _span(f"bucket {launch.bucket}{by}{until}", "bucket", launch.begin, launch.end, rank, thread, facts)


def _flow(rank: int, compute: int, thread: int, number: int, arrow: Arrow) -> Iterator[Event]:
    """Each end lies amid the span that it belongs to: viewers look for the span that is open then, and for none where
    nothing lasts. An arrow that would lead back in time is left out. Perfetto drops arrows whose id is not a number."""
    launch, source, settle = arrow.transfer.launch, arrow.source, arrow.settle
    stops = [] if source is None else [(source.begin, source.end, compute)]
    stops += [(launch.begin, launch.end, thread), (settle.begin, settle.end, compute)]
    times = [(begin + end) // 2 for begin, end, _ in stops if begin < end]
    if len(times) < len(stops) or times != sorted(times):
        return
    common = {"cat": "bucket", "id": number}
    phases = ["s", *"t" * (len(stops) - 2), "f"]
    for phase, time, (_, _, where) in zip(phases, times, stops, strict=True):
        binds = {} if phase == "s" else {"bp": "e"}
        yield _event(f"bucket {launch.bucket}", phase, time, rank, where, **binds, **common)


def _span(name: str, cat: str, begin: int, end: int, rank: int, thread: int, args: dict[str, Any]) -> Event:
    return _event(name, "X", begin, rank, thread, cat=cat, dur=(end - begin) / 1e3, args=args)


def _event(name: str, phase: str, time: int, rank: int, thread: int, **more: Any) -> Event:
    return {"name": name, "ph": phase, "ts": time / 1e3, "pid": rank, "tid": thread, **more}


def _about(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args}
