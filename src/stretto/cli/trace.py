"""``stretto trace``: what ``with sync.trace(folder)`` has written, as a report and as pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..analysis import reports_from
from ..chrome import to_chrome
from ..page import to_html
from ..plots import save_picture
from ..sketch import sketch
from ..timeline import Timeline, timeline_of
from ..trace import RankTrace, read_trace
from .console import FINE, WRONG, AsJson, CommandError, check_writable, note, progress, say, say_json, write

WIDTH = 100
"""Of the picture in the terminal."""
PICTURES = (".png", ".svg")


def trace(
    folder: Annotated[Path, typer.Argument(help="What sync.trace() was given.")],
    rank: Annotated[int, typer.Option(help="Whose report to print.")] = 0,
    number: Annotated[int | None, typer.Option("--pass", help="Draw this pass. Default, a typical one.")] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Chrome Trace JSON, for https://ui.perfetto.dev. Default FOLDER/trace.json.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A page that needs nothing else.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A .png or .svg; needs matplotlib: stretto[plot].")] = None,
    text: Annotated[bool, typer.Option("--text", help="A picture in the terminal.")] = False,
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
    _check(asked, folder)
    notes, cut_off = _how_it_ended(traces)
    for one in notes:
        note(one)
    timeline = timeline_of(traces)
    if not timeline.passes:
        raise CommandError(f"{folder}: no pass has settled in it, so there is nothing to show", WRONG)
    if number is not None and number not in timeline.numbers:
        known = f"{timeline.numbers[0]} to {timeline.numbers[-1]}"
        raise CommandError(f"--pass {number}: the trace has passes {known}")
    drawn = None if number is None else [number]
    _write_all(asked, timeline, drawn)
    reports = reports_from(traces)
    if as_json:
        written = {kind: str(path) for kind, path in asked.items()}
        ends = {str(one.rank): one.end for one in traces}
        say_json({"reports": [one.to_dict() for one in reports], "ends": ends, "written": written, "notes": notes})
    else:
        pictures = [sketch(timeline, WIDTH, drawn)] if text else []
        files = "\n".join(f"{kind}: {path}" for kind, path in asked.items())
        say("\n\n".join([str(reports[rank]), *pictures, files]))
    return WRONG if cut_off else FINE


def _check(asked: Mapping[str, Path], folder: Path) -> None:
    """Before anything is computed, and before a trace is lost."""
    recorded = {one.resolve() for one in folder.glob("rank*.jsonl")}
    for kind, path in asked.items():
        if kind == "picture" and path.suffix.lower() not in PICTURES:
            raise CommandError(f"{path}: a picture ends in .png or .svg")
        if path.resolve() in recorded:
            raise CommandError(f"{path} is part of the trace: write to another file")
        check_writable(path)


def _how_it_ended(traces: Sequence[RankTrace]) -> tuple[list[str], bool]:
    """A line for each rank that has not ended well, and whether a file was cut off."""
    notes = []
    for one in traces:
        last = f"after pass {one.passes[-1].number}" if one.passes else "before a pass has settled"
        if one.end is None:
            notes.append(f"rank {one.rank}: its trace is cut off {last} (killed, still running, or not all was copied)")
        elif one.end != "closed":
            notes.append(f"rank {one.rank}: its trace ends {last} by {' '.join(one.end.split())}")
    return notes, any(one.end is None for one in traces)


def _write_all(asked: Mapping[str, Path], timeline: Timeline, drawn: Collection[int] | None) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        "chrome": lambda path: path.write_text(json.dumps(to_chrome(timeline)), encoding="utf-8"),
        "html": lambda path: path.write_text(to_html(timeline, drawn), encoding="utf-8"),
        "picture": lambda path: save_picture(timeline, path, drawn),
    }
    with progress("drawing", len(asked)) as done:
        for number, (kind, path) in enumerate(asked.items(), 1):
            write(path, writers[kind])
            done(number)
