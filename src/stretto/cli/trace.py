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
    """Show where the time of recorded steps went, and draw it.

    Ends with 1 if a rank's file was cut off; what is there is shown all the same.
    """
    with progress(f"reading {folder}"):
        traces = read_trace(folder)
    if not 0 <= rank < len(traces):
        raise CommandError(f"--rank {rank}: the trace has ranks 0 to {len(traces) - 1}")
    outputs = {"chrome": chrome or folder / "trace.json", "html": html, "picture": picture}
    asked = {kind: path for kind, path in outputs.items() if path is not None}
    _check(asked, folder, needed=chrome is not None)
    notes, cut_off = _how_it_ended(traces)
    for one in notes:
        note(one)
    with progress("laying ranks side by side"):
        timeline = timeline_of(traces)
        reports = reports_from(traces) if timeline.passes else []
    if not timeline.passes:
        raise CommandError(f"{folder}: no pass has settled in it, so there is nothing to show", WRONG)
    if number is not None and number not in timeline.numbers:
        known = f"{timeline.numbers[0]} to {timeline.numbers[-1]}"
        raise CommandError(f"--pass {number}: the trace has passes {known}")
    drawn = None if number is None else [number]
    notes += _write_all(asked, timeline, drawn, needed=chrome is not None)
    if as_json:
        written = {kind: str(path) for kind, path in asked.items()}
        ends = {str(one.rank): one.end for one in traces}
        say_json({"reports": [one.to_dict() for one in reports], "ends": ends, "written": written, "notes": notes})
    else:
        pictures = [sketch(timeline, WIDTH, drawn)] if text else []
        files = ["\n".join(f"{kind}: {path}" for kind, path in asked.items())] if asked else []
        say("\n\n".join([str(reports[rank]), *pictures, *files]))
    return WRONG if cut_off else FINE


def _check(asked: Mapping[str, Path], folder: Path, *, needed: bool) -> None:
    """Before anything is computed, and before a trace is lost."""
    recorded = {one.resolve() for one in folder.glob("rank*.jsonl")}
    for kind, path in asked.items():
        if kind == "picture" and path.suffix.lower() not in PICTURES:
            raise CommandError(f"{path}: a picture ends in .png or .svg")
        if path.resolve() in recorded:
            raise CommandError(f"{path} is part of the trace: write to another file")
        if needed or kind != "chrome":
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


def _write_all(asked: dict[str, Path], timeline: Timeline, drawn: Collection[int] | None, *, needed: bool) -> list[str]:
    """Write the files. Where the default one for Chrome cannot be written, it is taken out, and a note says so.

    Args:
        asked: what to write, by kind.
        timeline: of all ranks.
        drawn: passes in pictures.
        needed: whether the one for Chrome was asked for.
    """
    writers: dict[str, Callable[[Path], object]] = {
        "chrome": lambda path: path.write_text(json.dumps(to_chrome(timeline)), encoding="utf-8"),
        "html": lambda path: path.write_text(to_html(timeline, drawn), encoding="utf-8"),
        "picture": lambda path: save_picture(timeline, path, drawn),
    }
    notes = []
    with progress("drawing", len(asked)) as done:
        for number, (kind, path) in enumerate([*asked.items()], 1):
            try:
                write(path, writers[kind])
            except CommandError as error:
                if needed or kind != "chrome":
                    raise
                notes.append(f"{error} (--chrome takes another file)")
                del asked[kind]
            done(number)
    for one in notes:
        note(one)
    return notes
