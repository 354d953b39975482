"""What the benchmarks share: the library's paired timing, what a figure depends on, a table for people or in a
page, and how they end: bad input and whatever fails is one line, Ctrl-C none."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench import this_machine
from stretto.bench.timing import Quartiles, interleave, steps_in, worst_rank
from stretto.cli.console import CommandError, check_writable
from stretto.errors import StrettoError
from stretto.quiet import quietly
from stretto.terminal import show_cursor
from stretto.testing import spawn_ranks

__all__ = [
    "Quartiles",
    "count",
    "ends_well",
    "interleave",
    "machine",
    "output",
    "put_into",
    "show_table",
    "spawn",
    "steps_in",
    "worst_rank",
]


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def output(text: str) -> Path:
    """A file that can be written, for argparse: not found out when all has been measured."""
    try:
        check_writable(Path(text))
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def put_into(page: Path, name: str, text: str) -> bool:
    """Replace what stands between the markers of a figure; False if the page has none."""
    before = page.read_text() if page.exists() else ""
    pattern = re.compile(rf"(<!-- figure: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    after, found = pattern.subn(lambda match: f"{match[1]}\n{text}\n{match[2]}", before)
    if found:
        page.write_text(after)
    return bool(found)


def spawn(worker: Callable[..., Any], ranks: int, *args: Any, timeout: float) -> list[Any]:
    """:func:`stretto.testing.spawn_ranks`, whose ranks print nothing when they fail or are stopped."""
    return quietly(spawn_ranks, worker, ranks, *args, timeout=timeout)


def ends_well(main: Callable[[], object]) -> None:
    """Run a benchmark. What fails is one line and 1, Ctrl-C is 130."""
    try:
        main()
    except KeyboardInterrupt:
        show_cursor()
        raise SystemExit(130) from None
    except (StrettoError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # of a rank, with its traceback
        if "STRETTO_TRACEBACK" in os.environ:
            raise
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise SystemExit(f"{Path(sys.argv[0]).name}: {last[0]} (STRETTO_TRACEBACK=1 shows where)") from None


def machine() -> dict[str, Any]:
    """What a figure depends on, for JSON."""
    return this_machine().to_dict()


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if not number else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
