"""Pictures of comparisons, by matplotlib, which is imported only when one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SetupError
from ..plots import told_of_matplotlib
from .contestants import ALONE
from .result import Comparison
from .timing import Quartiles

COLOURS = {
    ALONE: "#555555",
    "stretto": "#c0392b",
    "stretto over the process group": "#e08a7d",
    "torch DDP": "#2c5f9e",
    "torch DDP, tuned": "#2c5f9e",
    "torch DDP, default": "#8fb3dd",
    "FSDP2 replicate": "#6a4c93",
    "a message a parameter, after backward": "#b08d57",
    "one message, after backward": "#6f9f66",
}
OTHERS = "#9a9a9a"
FORMATS = (".svg", ".png", ".pdf")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stretto",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@contextmanager
def canvas(size: tuple[float, float], file: Path) -> Iterator[Any]:
    """A matplotlib figure that is written to ``file`` afterwards, in the format of its suffix.

    Args:
        size: inches.
        file: ends in one of FORMATS.

    Raises:
        SetupError: as in :func:`check`.
    """
    check(file)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        undated: Any = {"Date": None} if file.suffix == ".svg" else None  # the same file from the same figures
        figure.savefig(file, dpi=130, metadata=undated)


def check(file: Path) -> None:
    """Check that a plot can be written as such a file.

    Raises:
        SetupError: matplotlib is not installed or cannot be imported, or the file ends in something else.
    """
    if file.suffix.lower() not in FORMATS:
        raise SetupError(f"{file}: a plot ends in .svg, .png or .pdf")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise SetupError(told_of_matplotlib("plots", error)) from error


def plot(comparison: Comparison, file: Path) -> None:
    """Bars of a comparison.

    Raises:
        SetupError: as in :func:`canvas`.
    """
    with canvas((8.0, 1.2 + 0.32 * len(comparison.seconds)), file) as figure:
        axes = figure.subplots()
        bars(axes, comparison)
        figure.text(0.0, -0.03, str(comparison.machine), fontsize=6, color="#666666")


def bars(axes: Any, comparison: Comparison, *, names: bool = True) -> None:
    """The ratio of each contestant's step to the step without communication, with quartiles."""
    shown = [name for name in comparison.seconds if name != ALONE][::-1]
    spreads = [comparison.ratio(name) for name in shown]
    medians = [one.median for one in spreads]
    errors = [[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]]
    colours = [COLOURS.get(name, OTHERS) for name in shown]
    axes.barh(range(len(shown)), medians, xerr=errors, color=colours, height=0.7, error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(shown)), shown if names else [""] * len(shown))
    for at, one in enumerate(spreads):
        axes.annotate(f"{one.median:.2f}", (one.high, at), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.margins(x=0.12)
    axes.set_title(comparison.title, fontsize=9, loc="left")
    axes.set_xlabel("time of a step over the step without communication", fontsize=8)


def lines(axes: Any, x: Sequence[Any], by_name: Mapping[str, Sequence[Quartiles]], unit: float = 1.0) -> None:
    """One line for each name, with its quartiles as a band, at equal distances along ``x``."""
    at = range(len(x))
    for name, spreads in by_name.items():
        colour = COLOURS.get(name)
        line = axes.plot(at, [one.median / unit for one in spreads], marker="o", markersize=3, label=name, color=colour)
        low, high = (
            [value / unit for value in values] for values in zip(*((s.low, s.high) for s in spreads), strict=True)
        )
        axes.fill_between(at, low, high, alpha=0.2, linewidth=0, color=line[0].get_color())
    axes.set_xticks(at, [str(one) for one in x])
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=7)


def level(axes: Any, by_name: Mapping[str, Quartiles]) -> None:
    """A dotted line for each name, at its median: for values that do not change along x."""
    for number, (name, one) in enumerate(by_name.items()):
        colour = COLOURS.get(name, OTHERS)
        axes.axhline(one.median, color=colour, linewidth=0.9, linestyle=(number, (2, 2)), label=name)
    axes.legend(fontsize=7)
