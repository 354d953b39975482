"""A timeline as a picture, PNG or SVG, by matplotlib (the extra ``plot``).

Each rank is a band. On top is what it computed; below, each bucket has a row, from its launch until its result was
there. Where both go on at once, the bucket costs no time: hidden. After backward has ended, the rank can only wait:
exposed.
"""

from __future__ import annotations

import importlib
import os
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .activities import Transfer
from .errors import StrettoError
from .looks import COLOURS, LEGEND, WAITS_FOR_ITS_TURN, about, captions, colour_of, parts_of, rows_of
from .record import NANO, Launch
from .timeline import RankPass, RankTimeline, Timeline
from .wording import one_line

FULL = "#8a8a8a"
WIDTH = 11.0
"""Inches."""
FORMATS = (".png", ".svg")
LEAST = 0.0005
"""Of the width: less is half a pixel, and no line is drawn there."""

Boxes = defaultdict[str, list[tuple[float, float, float, float]]]
"""By colour: left, width, top, height."""


class PictureError(StrettoError, RuntimeError):
    """A picture cannot be drawn or written. The message is one line."""


def save_picture(timeline: Timeline, path: str | os.PathLike[str], passes: Collection[int] | None = None) -> None:
    """Draw a timeline into a file. Not collective; needs matplotlib.

    Args:
        timeline: of all ranks.
        path: ends in ``.png`` or ``.svg``.
        passes: which to draw; default, the typical one.

    Raises:
        PictureError: matplotlib is missing, the ending is another one, or the file cannot be written.

    Example::

        save_picture(timeline_of(read_trace("trace")), "overlap.png")
    """
    kind = Path(path).suffix.lower()
    if kind not in FORMATS:
        raise PictureError(f"{path}: a picture ends in .png or .svg")
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PictureError(told_of_matplotlib("pictures", error)) from error
    settings = {"svg.fonttype": "none", "svg.hashsalt": "stretto", "font.size": 9.0, "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure = _draw(figures, timeline.only(passes))
        written = {"Date": None} if kind == ".svg" else {"Software": None}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands there, or SVG's text
                figure.savefig(path, format=kind[1:], dpi=100, metadata=written)
        except OSError as error:
            raise PictureError(f"the picture cannot be written: {error}") from error


def told_of_matplotlib(what: str, error: ImportError) -> str:
    """Why there are none of these: it is not installed, or broken."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "matplotlib":
        return f"{what} need matplotlib, which is not installed: pip install matplotlib"
    return f"{what} need matplotlib, which cannot be imported: {' '.join(str(error).split())}"


def _draw(figures: Any, shown: Timeline) -> Any:
    rows = [len(rows_of(rank.passes)) for rank in shown.ranks]
    heights = [1.6 + row * _row(row) for row in rows] or [1.6]
    body, head, foot = 0.36 * sum(heights), 0.85, 1.45 + 0.17 * len(shown.notes())
    figure = figures.Figure(figsize=(WIDTH, body + head + foot), facecolor="white")
    tall = body + head + foot
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights, "hspace": 0.12}
    )[:, 0]
    figure.subplots_adjust(left=0.115, right=0.985, top=1 - head / tall, bottom=foot / tall)
    figure.text(0.015, 1 - 0.16 / tall, shown.headline(), fontsize=14, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.50 / tall, about(shown), fontsize=9, color="#555555", va="top", parse_math=False)
    for place, rank in zip(axes, shown.ranks, strict=False):
        _band(place, rank, shown.end * NANO * 1e3)
    axes[-1].tick_params(axis="x", bottom=True, labelbottom=True)
    axes[-1].xaxis.set_major_formatter("{x:g} ms")
    _legend(figure, tall, shown)
    return figure


def _row(buckets: int) -> float:
    """The height of a bucket's row, where that of what a rank computed is 1."""
    return 0.62 if buckets <= 8 else 0.45 if buckets <= 16 else 0.3


def _band(axes: Any, rank: RankTimeline, until: float) -> None:
    axes.set_xlim(0, until * 1.004 or 1)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    rows = rows_of(rank.passes)
    most = len(rows)
    high = _row(most)
    axes.set_ylim(1.15 + most * high, -0.45)
    middles = {bucket: 1.1 + (place + 0.5) * high for place, bucket in enumerate(rows)}
    labels = [label if most <= 16 else label.partition(",")[0] for label in rows.values()]
    ticks = {0.5: f"rank {rank.rank}", **dict(zip(middles.values(), labels, strict=True))}
    boxes: Boxes = defaultdict(list)
    free = 0.0
    for one in rank.passes:
        _computed(axes, one, boxes)
        for transfer in one.transfers:
            middle = middles[transfer.launch.bucket]
            _bucket(axes, transfer, one, middle, high, boxes)
            if high > 0.4:
                _name(axes, transfer.launch, middle, free, alone=len(rank.passes) == 1)
        free = _ms(one.record.settled)
    for colour, several in boxes.items():
        _fill(axes, colour, several)
    axes.set_yticks([*ticks], [*ticks.values()])
    for label in axes.get_yticklabels():
        label.set_fontsize(8 if most <= 8 else 7 if most <= 16 else 5.5)
    first = axes.get_yticklabels()[0]
    first.set_fontsize(10)
    first.set_fontweight("bold")


def _fill(axes: Any, colour: str, boxes: Sequence[tuple[float, float, float, float]]) -> None:
    """As one path: hundreds of them would make an SVG large."""
    paths: Any = importlib.import_module("matplotlib.path")
    patches: Any = importlib.import_module("matplotlib.patches")
    around = [
        ((x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y)) for x, wide, y, high in boxes if wide > 0
    ]
    if around:
        codes = [paths.Path.MOVETO, *[paths.Path.LINETO] * 3, paths.Path.CLOSEPOLY] * len(around)
        path = paths.Path([corner for corners in around for corner in corners], codes)
        axes.add_patch(patches.PathPatch(path, facecolor=colour, linewidth=0, snap=True))


def _computed(axes: Any, one: RankPass, boxes: Boxes) -> None:
    for kind, group in groupby(one.activities, key=lambda activity: activity.kind):
        activities = [*group]
        boxes[COLOURS[kind]].append((_ms(activities[0].begin), _ms(activities[-1].end - activities[0].begin), 0, 1))
    for begin, end, text, kind in captions(one):
        if _ms(end - begin) > 0.011 * len(text) * axes.get_xlim()[1]:
            colour = "black" if kind in ("forward", "optimizer") else "white"
            behind = {"facecolor": COLOURS[kind], "linewidth": 0, "pad": 1.5}
            middle = {"ha": "center", "va": "center", "fontsize": 9, "clip_on": True}
            axes.text(_ms(begin + end) / 2, 0.5, text, color=colour, bbox=behind, **middle)
    ended = _ms(one.record.backward_ended)
    axes.axvline(ended, color="#333333", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.text(ended, -0.06, "backward ends ", ha="right", va="bottom", fontsize=7.5, color="#333333")


def _bucket(axes: Any, transfer: Transfer, one: RankPass, middle: float, high: float, boxes: Boxes) -> None:
    launch = transfer.launch
    low, thick = middle - 0.38 * high, 0.76 * high
    if launch.full is not None and _ms(launch.begin - launch.full) > LEAST * axes.get_xlim()[1]:
        axes.plot([_ms(launch.full), _ms(launch.begin)], [middle, middle], color=FULL, linewidth=1, linestyle=":")
    for begin, end, hidden, pale in parts_of(transfer, one):
        boxes[colour_of(hidden=hidden, pale=pale)].append((_ms(begin), _ms(end - begin), low, thick))
    if high > 0.5 and launch.full is not None:  # the gradient that let it go
        axes.plot([_ms(launch.full)] * 2, [0.72, low], color="#1b4f72", linewidth=0.8, alpha=0.6)
        axes.plot([_ms(launch.full)], [0.72], color="#ffffff", marker="o", markersize=2.5, zorder=4)  # over captions


def _name(axes: Any, launch: Launch, middle: float, free: float, *, alone: bool) -> None:
    """Of the parameter that closed it, on the side where there is room; nowhere if there is none.

    Args:
        axes: of the rank.
        launch: of the bucket.
        middle: of its row.
        free: from when on nothing else is drawn in that row, before the bucket.
        alone: whether there is no background either.
    """
    if not launch.closed_by:
        return
    text = "closed by " + shortened(one_line(launch.closed_by), 34)
    right = axes.get_xlim()[1]
    after = alone and _ms(launch.end) < 0.7 * right
    begin = launch.begin if launch.full is None else min(launch.full, launch.begin)  # the dotted line is before it
    at = _ms(launch.end) + 0.006 * right if after else _ms(begin) - 0.006 * right
    if not after and at - 0.006 * len(text) * right < free:
        return
    behind = {"facecolor": "white", "linewidth": 0, "pad": 0.6, "alpha": 0.85}
    side = "left" if after else "right"
    axes.text(at, middle, text, ha=side, va="center", fontsize=7, color="#444444", bbox=behind, parse_math=False)


def shortened(name: str, most: int) -> str:
    """A name of at most ``most`` characters, with something left of each of its parts as long as that can be."""
    if len(name) <= most:
        return name
    for kept in range(most, 2, -1):
        parts = [part if len(part) <= kept else part[: kept - 1] + "…" for part in name.split(".")]
        if len(".".join(parts)) <= most:
            return ".".join(parts)
    return "…" + name[1 - most :]


def _legend(figure: Any, tall: float, shown: Timeline) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    lines: Any = importlib.import_module("matplotlib.lines")
    handlers: Any = importlib.import_module("matplotlib.legend_handler")
    handles: list[Any] = [tuple(patches.Patch(facecolor=colour) for colour in colours) for colours, _ in LEGEND]
    handles.append(lines.Line2D([], [], color=FULL, linewidth=1, linestyle=":"))
    notes = len(shown.notes())
    figure.legend(
        handles=handles,
        labels=[*(text for _, text in LEGEND), WAITS_FOR_ITS_TURN],
        handler_map={tuple: handlers.HandlerTuple(ndivide=None, pad=0)},  # several colours side by side
        loc="lower left",
        bbox_to_anchor=(0.01, (0.1 + 0.17 * notes) / tall),
        ncols=2,
        frameon=False,
        fontsize=8.5,
        handlelength=1.6,
        columnspacing=2,
    )
    text = "\n".join(textwrap.shorten(note, 170) for note in shown.notes())
    figure.text(0.015, 0.08 / tall, text, fontsize=7.5, color="#555555", va="bottom", parse_math=False)


def _ms(time: int) -> float:
    return time * NANO * 1e3
