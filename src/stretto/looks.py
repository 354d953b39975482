"""How pictures look and what they call things, so that all of them say the same."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from .activities import Kind, Transfer
from .record import Span, covered, stops_of
from .report import ms
from .timeline import RankPass, Timeline
from .wording import counted, format_bytes

HIDDEN, EXPOSED = "#2f9e6e", "#d55e00"
PALE_HIDDEN, PALE_EXPOSED = "#acd8c5", "#eebf99"
"""The same at 40 % on white."""
COLOURS: dict[Kind, str] = {  # close to Okabe and Ito's, which people who see fewer colours tell apart too
    "optimizer": "#bdbdbd",
    "other": "#ececec",
    "forward": "#a6cfe8",
    "backward": "#3a86b8",
    "launching": EXPOSED,
    "waiting": EXPOSED,
}
LEGEND = (
    ((COLOURS["other"],), "data, zeroing, anything else"),
    ((COLOURS["optimizer"],), "optimizer"),
    ((COLOURS["forward"],), "forward"),
    ((COLOURS["backward"],), "backward: computes gradients"),
    ((HIDDEN,), "a bucket of gradients on its way while backward computes: hidden, costs no time"),
    ((EXPOSED,), "communication while this rank computes nothing: exposed, costs time"),
    ((PALE_HIDDEN, PALE_EXPOSED), "pale: until the last rank has launched the bucket too"),
)
"""Colours and their meaning in plain words."""
WAITS_FOR_ITS_TURN = "full, and waits for its turn"
"""Of the dotted line in front of a bucket."""
MOST_CUTS = 100
"""A bar in which more buckets are handed over is drawn without those slices, which would be thinner than a pixel."""


def about(shown: Timeline) -> str:
    """What run and which passes are shown."""
    numbers = ", ".join(map(str, shown.numbers))
    over = ", ".join(sorted({rank.transport for rank in shown.ranks}))
    return f"pass {numbers} of a run on {counted(shown.world_size, 'ranks')} over {over}" if numbers else ""


def rows_of(passes: Sequence[RankPass]) -> dict[int, str]:
    """The buckets of some passes of a rank, a row each, with its label.

    Another plan cuts other buckets, so their sizes are left out where passes differ in them.
    """
    sizes: dict[int, set[int]] = {}
    for one in passes:
        for launch in one.record.launches:
            sizes.setdefault(launch.bucket, set()).add(launch.nbytes)
    return {
        bucket: f"bucket {bucket}" + ("" if len(of) > 1 else f", {format_bytes(*of)}")
        for bucket, of in sorted(sizes.items())
    }


def captions(one: RankPass) -> list[tuple[int, int, str, Kind]]:
    """Where something is that deserves a word: begin, end, the word, and on what it is written."""
    record = one.record
    ended, settled = record.backward_ended, record.settled
    return [
        *((span.begin, span.end, "forward", "forward") for span in record.forwards),
        *((span.begin, span.end, "optimizer", "optimizer") for span in record.optimizer),
        (record.backward_began, ended, "backward", "backward"),
        (ended, settled, f"waiting {ms(covered([Span(ended, settled)], but=record.optimizer))}", "waiting"),
    ]


def colour_of(*, hidden: bool, pale: bool) -> str:
    """Of a part of a bucket's way."""
    return (PALE_HIDDEN if pale else HIDDEN) if hidden else (PALE_EXPOSED if pale else EXPOSED)


def parts_of(transfer: Transfer, one: RankPass) -> list[tuple[int, int, bool, bool]]:
    """A bucket's way: begin, end, whether it is hidden there, and whether some rank had yet to launch it.

    Where this rank hands over a bucket, this one or another, or waits for other ranks, nothing is hidden.
    """
    launch, joined = transfer.launch, transfer.joined
    cut = min(max(launch.begin, one.record.backward_ended), launch.end)
    met = launch.begin if joined is None else min(max(joined, launch.begin), launch.end)
    stops = [span for span in stops_of(one.record) if span.end > launch.begin and span.begin < cut]
    if len(stops) > MOST_CUTS:
        stops = []
    inside = {min(max(at, launch.begin), cut) for span in stops for at in (span.begin, span.end)}
    edges = sorted({launch.begin, cut, met, launch.end} | inside)
    begins = [span.begin for span in stops]

    def computes(begin: int, end: int) -> bool:
        before = bisect_right(begins, begin) - 1
        return end <= cut and (before < 0 or stops[before].end <= begin)

    return [(begin, end, computes(begin, end), end <= met) for begin, end in itertools.pairwise(edges)]


def label_of(kind: Kind, name: str) -> str:
    """What an activity is, in plain words."""
    texts: dict[Kind, tuple[str, str]] = {
        "backward": (f"backward: the gradient of {name}", "backward: gradients are taken over"),
        "launching": (f"launch of {name}", "launch"),
        "waiting": (f"nothing to compute: waits for {name}", "gradients are handed out"),
    }
    named, nameless = texts.get(kind, (kind, kind))
    return named if name else nameless
