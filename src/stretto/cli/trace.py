"""``stretto trace``: what ``with sync.trace(folder)`` has written, as a report and as pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..analysis import reports_from
from ..trace import RankTrace, read_trace
from .console import FINE, WRONG, AsJson, CommandError, check_writable, note, progress, say, say_json, write

if TYPE_CHECKING:
    from ..timeline import Timeline

WIDTH = 100
"""Of the picture in the terminal."""


def trace(
    folder: Annotated[Path, typer.Argument(help="What sync.trace() was given.")],
    rank: Annotated[int, typer.Option(help="Whose report to print.")] = 0,
    chrome: Annotated[
        Path | None, typer.Option(help="Chrome Trace JSON, for https://ui.perfetto.dev. Default FOLDER/trace.json.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A page that needs nothing else.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A .png or .svg of one step; needs stretto[plot].")] = None,
    text: Annotated[bool, typer.Option("--text", help="A picture of one step in the terminal.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show where the time of the recorded steps went, and write it down for others to draw.

    Ends with 1 if a rank's file was cut off; what is there is shown all the same.
    """
    traces = read_trace(folder)
    if not 0 <= rank < len(traces):
        raise CommandError(f"--rank {rank}: the trace has ranks 0 to {len(traces) - 1}")
    outputs = {"chrome": chrome or folder / "trace.json", "html": html, "picture": picture}
    asked = {kind: path for kind, path in outputs.items() if path is not None}
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise CommandError(f"{picture}: a picture ends in .png or .svg")
    for path in asked.values():
        _spare_the_trace(path, folder)
        check_writable(path)
    notes, cut_off = _how_it_ended(traces)
    for one in notes:
        note(one)
    if not all(one.passes for one in traces):
        empty = [one.rank for one in traces if not one.passes]
        raise CommandError(f"{folder}: no pass has settled on ranks {empty}, so there is nothing to draw", WRONG)
    reports = reports_from(traces)
    timeline = _timeline_of(traces)
    _write_all(asked, timeline)
    if as_json:
        written = {kind: str(path) for kind, path in asked.items()}
        ends = {str(one.rank): one.end for one in traces}
        say_json({"reports": [one.to_dict() for one in reports], "ends": ends, "written": written, "notes": notes})
    else:
        say(str(reports[rank]))
        if text:
            say(f"\n{_sketch(timeline)}")
        say("\n" + "\n".join(f"{kind}: {path}" for kind, path in asked.items()))
    return WRONG if cut_off else FINE


def _how_it_ended(traces: Sequence[RankTrace]) -> tuple[list[str], bool]:
    """A line for each rank that has not ended well, and whether a file was cut off."""
    notes = []
    for one in traces:
        last = f"after pass {one.passes[-1].number}" if one.passes else "before the first pass settled"
        if one.end is None:
            notes.append(
                f"the trace of rank {one.rank} is cut off {last}: killed, still running, or not all was copied"
            )
        elif one.end != "closed":
            notes.append(f"the trace of rank {one.rank} ends {last} by {' '.join(one.end.split())}")
    return notes, any(one.end is None for one in traces)


def _spare_the_trace(path: Path, folder: Path) -> None:
    if path.resolve() in {one.resolve() for one in folder.glob("rank*.jsonl")}:
        raise CommandError(f"{path} is part of the trace: write to another file")


def _timeline_of(traces: Sequence[RankTrace]) -> Timeline:
    from ..timeline import timeline_of

    return timeline_of(traces)


def _sketch(timeline: Timeline) -> str:
    from ..sketch import sketch

    return sketch(timeline, WIDTH)


def _write_all(asked: dict[str, Path], timeline: Timeline) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "chrome": lambda path: path.write_text(_chrome(timeline)),
        "html": lambda path: path.write_text(_page(timeline), encoding="utf-8"),
        "picture": lambda path: _draw(timeline, path),
    }
    with progress("drawing", len(asked)) as done:
        for number, (kind, path) in enumerate(asked.items(), 1):
            write(path, writers[kind])
            done(number)


def _chrome(timeline: Timeline) -> str:
    from ..chrome import to_chrome

    value: Any = to_chrome(timeline)
    return json.dumps(value)


def _page(timeline: Timeline) -> str:
    from ..page import to_html

    return to_html(timeline)


def _draw(timeline: Timeline, path: Path) -> None:
    from ..plots import save_picture

    save_picture(timeline, path)
