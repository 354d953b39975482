"""A timeline as one HTML page that needs nothing else: no network, no server, no installed program but a browser.

The page is ``page.html`` with four places filled in. Names are inserted as text or as JSON and never as HTML, and the
page forbids itself to load anything.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from .activities import Activity, Transfer
from .looks import COLOURS, LEGEND, WAITS_FOR_ITS_TURN, about, captions, colour_of, label_of, parts_of, rows_of
from .record import NANO
from .report import ms
from .timeline import RankPass, RankTimeline, Timeline
from .wording import counted, format_bytes

MOST_NAMES = 12
"""Of the parameters of a bucket, shown when one points at it."""


def to_html(timeline: Timeline, passes: Collection[int] | None = None) -> str:
    """The whole page.

    Args:
        timeline: of all ranks.
        passes: which to draw; default, the typical one.

    Example::

        with open("overlap.html", "w", encoding="utf-8") as file:
            file.write(to_html(timeline_of(read_trace("trace"))))
    """
    shown = timeline.only(passes)
    filled = {
        "HEADLINE": html.escape(shown.headline()),
        "ABOUT": html.escape(about(shown)),
        "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in shown.notes()),
        "TIMELINE": _json(_timeline(shown)),
    }
    page = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda place: filled[place[1]], page)  # at once: what is filled in is not searched


def _json(value: Any) -> str:
    """JSON in which nothing ends a script or opens a comment."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _timeline(shown: Timeline) -> dict[str, Any]:
    ranks = [_rank(rank) for rank in shown.ranks]
    legend = [*LEGEND, ((), WAITS_FOR_ITS_TURN)]
    return {"end": _us(shown.end), "ranks": ranks, "colours": COLOURS, "legend": legend}


def _rank(rank: RankTimeline) -> dict[str, Any]:
    rows = rows_of(rank.passes)
    places = {bucket: place for place, bucket in enumerate(rows)}
    passes = [_pass(one, places) for one in rank.passes]
    return {"rank": rank.rank, "rows": [*rows.values()], "passes": passes}


def _pass(one: RankPass, places: Mapping[int, int]) -> dict[str, Any]:
    written = [
        (_us(begin), _us(end), text, kind not in ("forward", "optimizer")) for begin, end, text, kind in captions(one)
    ]
    return {
        "backward_ended": _us(one.record.backward_ended),
        "activities": [_activity(activity) for activity in one.activities],
        "captions": written,
        "buckets": [_bucket(transfer, one, places[transfer.launch.bucket]) for transfer in one.transfers],
    }


def _activity(activity: Activity) -> dict[str, Any]:
    times = f"{ms((activity.end - activity.begin) * NANO)}, from {_at(activity.begin)} to {_at(activity.end)}"
    tip = f"{label_of(activity.kind, activity.name)}\n{times}"
    return {"kind": activity.kind, "begin": _us(activity.begin), "end": _us(activity.end), "tip": tip}


def _bucket(transfer: Transfer, one: RankPass, row: int) -> dict[str, Any]:
    launch = transfer.launch
    return {
        "row": row,
        "begin": _us(launch.begin),
        "full": None if launch.full is None else _us(launch.full),
        "tip": _tip(transfer),
        "parts": [
            {"begin": _us(begin), "end": _us(end), "colour": colour_of(hidden=hidden, pale=pale)}
            for begin, end, hidden, pale in parts_of(transfer, one)
        ],
    }


def _tip(transfer: Transfer) -> str:
    launch, names = transfer.launch, transfer.parameters
    lines = [f"bucket {launch.bucket}, {format_bytes(launch.nbytes)}, {counted(len(names), 'parameters')}"]
    if launch.full is not None:
        lines.append(f"full at {_at(launch.full)}, closed by {launch.closed_by}")
    lines.append(f"launched at {_at(launch.begin)}, handed over at {_at(launch.handed_over)}")
    if transfer.joined is not None and transfer.joined > launch.begin:
        lines.append(f"launched by the last rank at {_at(transfer.joined)}")
    there = f"result there at {_at(launch.end)}, " if launch.told else "when the result was there is not known, "
    lines.append(f"{there}seen at {_at(launch.seen)}")
    most = "" if launch.told else "at most "
    lines.append(f"{most}{ms(transfer.hidden * NANO)} hidden, {ms(transfer.exposed * NANO)} exposed")
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return "\n".join([*lines, "", *names[:MOST_NAMES], *more])


def _at(time: int) -> str:
    return f"{time / 1e6:.3f} ms"


def _us(time: int) -> float:
    return time / 1e3
