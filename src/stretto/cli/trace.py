"""``stretto trace``: what ``with sync.trace(folder)`` has written, as a report and as pictures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..analysis import reports_from
from ..chrome import write_chrome
from ..page import to_html
from ..plots import FORMATS, save_picture
from ..sketch import sketch
from ..terminal import progress
from ..timeline import Timeline, timeline_of
from ..trace import RankTrace, TraceError, files_of, read_trace
from ..wording import one_line
from .console import BAD_INPUT, FINE, WRONG, AsJson, CommandError, check_writable, note, say, say_json, write

WIDTH = 100
"""Greatest width of the picture in the terminal: a line that wraps cannot be read as a bar."""
MOST_DRAWN = 3
"""Most passes in a picture; if there are more, the typical one is drawn."""


def trace(
    folder: Annotated[Path, typer.Argument(help="The folder given to sync.trace().")],
    rank: Annotated[
        int | None, typer.Option(help="The rank whose report to print. Default: the first in the trace.")
    ] = None,
    number: Annotated[int | None, typer.Option("--pass", help="Draw this pass. Default: a typical one.")] = None,
    last: Annotated[int | None, typer.Option(help="Read only the last N passes. Default: all.")] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Chrome Trace JSON, for https://ui.perfetto.dev. Default: FOLDER/trace.json.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="A page that needs nothing else.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A .png or .svg; needs matplotlib.")] = None,
    text: Annotated[bool, typer.Option("--text", help="A picture in the terminal.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show where the time of recorded steps went, and draw it.

    The exit code is 1 if a rank's file is missing, cut off or damaged; what is there is shown all the same.
    """
    if last is not None and last < 1:
        raise CommandError(f"--last {last}: must be 1 or more")
    traces, notes = _read(folder, last, rank)
    damaged = bool(notes)
    outputs = {"chrome": chrome or folder / "trace.json", "html": html, "picture": picture}
    asked = {kind: path for kind, path in outputs.items() if path is not None}
    _check(asked, folder, needed=chrome is not None)
    ends, cut_off = _how_it_ended(traces)
    notes += ends
    for one in notes:
        note(one)
    with progress("aligning ranks"):
        timeline = timeline_of(traces)
        reports = reports_from(traces) if timeline.passes else []
    _check_passes(timeline, folder, number)
    few = last is not None and len(timeline.numbers) <= MOST_DRAWN
    drawn = [number] if number is not None else timeline.numbers if few else None
    notes += _write_all(asked, timeline, drawn, needed=chrome is not None)
    if as_json:
        written = {kind: str(path) for kind, path in asked.items()}
        ended = {str(one.rank): one.end for one in traces}
        say_json({"reports": [one.to_dict() for one in reports], "ends": ended, "written": written, "notes": notes})
    else:
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns)
        pictures = [sketch(timeline, width, drawn)] if text else []
        files = ["\n".join(f"{kind}: {path}" for kind, path in asked.items())] if asked else []
        mine = reports[0] if rank is None else next(one for one in reports if one.rank == rank)
        say("\n\n".join([str(mine), *pictures, *files]))
    return WRONG if cut_off or damaged else FINE


def _read(folder: Path, last: int | None, rank: int | None) -> tuple[list[RankTrace], list[str]]:
    """What can be read, and a line for each thing that cannot."""
    notes: list[str] = []
    with progress(f"reading {folder}"):
        try:
            traces = read_trace(folder, last, notes.append)
        except TraceError as error:
            raise CommandError(str(error), WRONG if files_of(folder) else BAD_INPUT) from error
    ranks = [one.rank for one in traces]
    if rank is not None and rank not in ranks:
        raise CommandError(f"--rank {rank}: the trace has ranks {_listed(ranks)}")
    return traces, notes


def _check_passes(timeline: Timeline, folder: Path, number: int | None) -> None:
    """Is there anything to show?"""
    if not timeline.passes:
        raise CommandError(f"{folder}: no pass has settled in it, so there is nothing to show", WRONG)
    if number is not None and number not in timeline.numbers:
        known = f"{timeline.numbers[0]} to {timeline.numbers[-1]}"
        raise CommandError(f"--pass {number}: the trace has passes {known}")


def _listed(ranks: Sequence[int]) -> str:
    """``0 to 3``, or the ranks that there are."""
    whole = len(ranks) > 1 and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]
    return f"{ranks[0]} to {ranks[-1]}" if whole else ", ".join(map(str, ranks))


def _check(asked: Mapping[str, Path], folder: Path, *, needed: bool) -> None:
    """Check the paths before anything is computed, and before a trace is overwritten."""
    recorded = {one.resolve() for one in folder.glob("rank*.jsonl")}
    places = [one.resolve() for one in asked.values()]
    for kind, path in asked.items():
        if places.count(path.resolve()) > 1:
            raise CommandError(f"{path} is asked for twice: give each picture a file of its own")
        if kind == "picture" and path.suffix.lower() not in FORMATS:
            raise CommandError(f"{path}: a picture ends in .png or .svg")
        if path.resolve() in recorded:
            raise CommandError(f"{path} is part of the trace: write to another file")
        if needed or kind != "chrome":
            check_writable(path)


def _how_it_ended(traces: Sequence[RankTrace]) -> tuple[list[str], bool]:
    """A line for each rank that has not ended well, and whether a file was cut off."""
    notes = []
    for one in traces:
        last = f"after pass {one.until}" if one.until is not None else "before a pass has settled"
        if one.end is None:
            notes.append(
                f"rank {one.rank}: its trace is cut off {last} (killed, still running, or not copied completely)"
            )
        elif one.end != "closed":
            notes.append(f"rank {one.rank}: its trace ends {last} with {one_line(one.end)}")
    return notes, any(one.end is None for one in traces)


def _write_all(asked: dict[str, Path], timeline: Timeline, drawn: Collection[int] | None, *, needed: bool) -> list[str]:
    """Write the files. If the default one for Chrome cannot be written, it is left out, and a note says so.

    Args:
        asked: what to write, by kind.
        timeline: of all ranks.
        drawn: passes in pictures.
        needed: whether the file for Chrome was asked for.
    """
    writers: dict[str, Callable[[Path], object]] = {
        "chrome": lambda path: _write_chrome(timeline, path),
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


def _write_chrome(timeline: Timeline, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        write_chrome(timeline, file)
