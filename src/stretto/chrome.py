"""A timeline as Chrome Trace Event JSON, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A process a rank; a thread for what it computed, where pieces lie inside of "backward" and these inside of "pass n"; and
a thread for its transport. [Note: lanes] Events of one thread must lie one inside the other or apart: Perfetto drops
what only overlaps. Asynchronous events may overlap but take no flow arrows. So a bucket that is launched while another
is on its way goes to a further thread of the same transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from .pieces import Kind, Piece, Transfer
from .timeline import Arrow, RankPass, RankTimeline, Timeline

Event = dict[str, Any]

COMPUTE = 1
"""The thread of what a rank computed; its transport has those behind it. (Perfetto takes thread 0 for the idle one.)"""

COLOURS: dict[Kind, str] = {
    "optimizer": "grey",
    "other": "white",
    "forward": "thread_state_runnable",
    "backward": "good",
    "launching": "bad",
    "waiting": "terrible",
}
"""Names that the viewers know. Perfetto takes colours of its own."""


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """For ``json.dump``. Times in it are microseconds, as the format has them.

    Args:
        timeline: all its passes are written.

    Example::

        with open("trace.json", "w") as file:
            json.dump(to_chrome(timeline_of(read_trace("trace"))), file)
    """
    events = [event for rank in timeline.ranks for event in _rank(rank)]
    about = {"summary": timeline.headline(), "notes": list(timeline.notes()), "world_size": timeline.world_size}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank(rank: RankTimeline) -> Iterator[Event]:
    lanes = _lanes([transfer for one in rank.passes for transfer in one.transfers])
    names = ["compute", rank.transport]
    names += [f"{rank.transport}, {number} at once" for number in range(2, max(lanes, default=0) + 2)]
    yield _about("process_name", rank.rank, COMPUTE, name=f"rank {rank.rank} ({rank.host}, pid {rank.pid})")
    yield _about("process_sort_index", rank.rank, COMPUTE, sort_index=rank.rank)
    for thread, name in enumerate(names, COMPUTE):
        yield _about("thread_name", rank.rank, thread, name=name)
        yield _about("thread_sort_index", rank.rank, thread, sort_index=thread)
    used = iter(lanes)
    for one in rank.passes:
        yield from _computed(rank.rank, one)
        for arrow in one.arrows:
            thread = COMPUTE + 1 + next(used)
            yield _transfer(rank.rank, thread, one.record.number, arrow.transfer)
            yield from _flow(rank.rank, thread, one.record.number, arrow)
        if one.record.buffers is not None:
            yield _event("buffers sent", "i", one.record.buffers, rank.rank, COMPUTE + 1, cat="buffers", s="t")


def _lanes(transfers: Sequence[Transfer]) -> list[int]:
    """For each the first lane that is free when it is launched. See [Note: lanes]."""
    free: list[int] = []
    lanes = []
    for one in transfers:
        lane = next((lane for lane, at in enumerate(free) if at <= one.launch.begin), len(free))
        free[lane : lane + 1] = [one.launch.end]
        lanes.append(lane)
    return lanes


def _computed(rank: int, one: RankPass) -> Iterator[Event]:
    record, pieces = one.record, one.pieces
    numbers = {"hidden_ms": record.hidden * 1e3, "exposed_ms": record.exposed * 1e3, "plan": record.plan}
    yield _span(f"pass {record.number}", "pass", pieces[0].begin, pieces[-1].end, rank, COMPUTE, numbers)
    for part, group in groupby(pieces, key=_part):
        inside = [*group]
        if part:
            yield _span(part, part, inside[0].begin, inside[-1].end, rank, COMPUTE, {})
        for piece in inside:
            yield _span(_label(piece), piece.kind, piece.begin, piece.end, rank, COMPUTE, {}) | {
                "cname": COLOURS[piece.kind]
            }


def _part(piece: Piece) -> str:
    """What the piece is a part of."""
    return {"backward": "backward", "launching": "backward", "waiting": "settle"}.get(piece.kind, "")


def _label(piece: Piece) -> str:
    named = {"backward": piece.name, "launching": f"launch {piece.name}", "waiting": f"wait for {piece.name}"}
    nameless = {"backward": "(take gradients)", "waiting": "(hand out gradients)"}
    return named.get(piece.kind, piece.kind) if piece.name else nameless.get(piece.kind, piece.kind)


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
        "seen_us": launch.seen / 1e3,
        "hidden_us": one.hidden / 1e3,
        "exposed_us": one.exposed / 1e3,
    }
    by = f" ({launch.closed_by})" if launch.closed_by else ""
    return _span(f"bucket {launch.bucket}{by}", "bucket", launch.begin, launch.end, rank, thread, facts)


def _flow(rank: int, thread: int, number: int, arrow: Arrow) -> Iterator[Event]:
    """Each end lies amid the span that it belongs to: viewers look for the span that is open then."""
    launch = arrow.transfer.launch
    common = {"cat": "bucket", "id": f"{rank}.{number}.{launch.bucket}"}
    name = f"bucket {launch.bucket}"
    if arrow.source is not None:
        yield _event(name, "s", _amid(arrow.source.begin, arrow.source.end), rank, COMPUTE, **common)
    on_its_way = "t" if arrow.source is not None else "s"
    yield _event(name, on_its_way, _amid(launch.begin, launch.end), rank, thread, bp="e", **common)
    yield _event(name, "f", _amid(arrow.settle.begin, arrow.settle.end), rank, COMPUTE, bp="e", **common)


def _amid(begin: int, end: int) -> int:
    return (begin + end) // 2


def _span(name: str, cat: str, begin: int, end: int, rank: int, thread: int, args: dict[str, Any]) -> Event:
    return _event(name, "X", begin, rank, thread, cat=cat, dur=(end - begin) / 1e3, args=args)


def _event(name: str, phase: str, time: int, rank: int, thread: int, **more: Any) -> Event:
    return {"name": name, "ph": phase, "ts": time / 1e3, "pid": rank, "tid": thread, **more}


def _about(what: str, rank: int, thread: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args}
