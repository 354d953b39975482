"""What the benchmarks share: the library's paired timing, what a figure depends on, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench import this_machine
from stretto.bench.timing import Spread, interleave, worst_rank

__all__ = ["Spread", "interleave", "machine", "show_table", "worst_rank"]


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
