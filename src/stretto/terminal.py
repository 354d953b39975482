"""What commands and benchmarks show on a terminal: progress bars, and the cursor behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str, total: float | None = None, *, wanted: bool = True) -> Iterator[Callable[[float], None]]:
    """A bar on stderr if that is a terminal that can erase it; what is yielded is told how much has been done.

    Args:
        title: of the bar.
        total: of all that there is to do; None if unknown.
        wanted: False for none at all, as on all ranks but one.
    """
    if not wanted:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def show_cursor() -> None:
    """After a bar that could not end by itself."""
    from rich.console import Console

    Console(stderr=True).show_cursor()  # does nothing where there is no terminal
