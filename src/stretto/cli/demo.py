"""``stretto demo``: shows what this library does, on a model that really learns, in less than half a minute."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis import reports_from
from ..cores import cores
from ..report import Report, ms, share
from ..sketch import sketch
from ..timeline import timeline_of
from ..trace import read_trace
from ..wording import columns
from .console import FINE, WRONG, AsJson, CommandError, note, say, say_json
from .digits import STEPS, WAYS, Trained, train
from .ranks import RANKS, work

ENOUGH = 0.9
"""The share of unseen digits that must be read correctly; guessing gives a tenth."""
TIMEOUT = 300.0
BUSY = 0.5
"""With more running programs per core than this, the times are called doubtful."""


def demo(as_json: AsJson = False) -> int:
    """Train a small network on two processes, with and without overlap.

    It shows where the time of a step goes, in three runs over the same batches of digits: torch's DDP; everything sent
    when backward has ended, as one would write it by hand (before); and stretto.attach(model) with its defaults
    (after). The exit code is 1 if they do not learn, or if stretto's losses are not those of DDP.
    """
    began = time.monotonic()
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * cores():
        note("other programs are busy on this machine: the times below are worth little")
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        runs = _train(folder)
        reports, sketches = _look_at(folder)
    same = largest_difference(runs["after"].losses, runs["torch DDP"].losses) == 0
    learnt = min(one.accuracy for one in runs.values()) >= ENOUGH
    seconds = time.monotonic() - began
    if as_json:
        say_json(_as_value(runs, reports, same=same, learnt=learnt, seconds=seconds))
    else:
        _show(runs, reports, sketches, same=same, learnt=learnt, seconds=seconds)
    return FINE if same and learnt else WRONG


def _train(folder: str) -> dict[str, Trained]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        found = work("training three times", STEPS * len(WAYS), train, folder, RANKS, timeout=TIMEOUT)
    except (RuntimeError, TimeoutError) as error:
        raise CommandError(f"the demo failed: {str(error).strip().splitlines()[-1]}", WRONG) from error
    return {one.way: one for one in found[0]}


def _look_at(folder: str) -> tuple[dict[str, Report], dict[str, str]]:
    reports, sketches = {}, {}
    for way in ("before", "after"):
        traces = read_trace(Path(folder, way))
        reports[way] = reports_from(traces)[0]
        sketches[way] = sketch(timeline_of(traces))
    return reports, sketches


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The distance of two loss curves. A nan must not count as equal, so it is infinitely far from everything."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)


def _show(
    runs: Mapping[str, Trained],
    reports: Mapping[str, Report],
    sketches: Mapping[str, str],
    *,
    same: bool,
    learnt: bool,
    seconds: float,
) -> None:
    ddp, before, after = (runs[way] for way in ("torch DDP", "before", "after"))
    say(f"Two processes trained one network on {after.data}, each on its part of every batch.\n")
    say("BEFORE: one all-reduce over Gloo when backward has ended\n")
    say(f"{sketches['before']}\n")
    say("AFTER: stretto.attach(model)\n")
    say(f"{sketches['after']}\n\n{reports['after']}\n\n{after.plan}\n")
    rows: list[tuple[str, ...]] = [("", "torch DDP", "before", "after")]
    for name, cells in (
        ("first loss", [f"{one.losses[0]:.6f}" for one in (ddp, before, after)]),
        ("last loss", [f"{one.losses[-1]:.6f}" for one in (ddp, before, after)]),
        ("unseen digits read right", [f"{one.accuracy:.1%}" for one in (ddp, before, after)]),
        ("median time of a step", [ms(one.seconds_per_step) for one in (ddp, before, after)]),
    ):
        rows.append((name, *cells))
    say(columns(rows))
    exposed = [f"{share(reports[way].breakdown.exposed, reports[way].breakdown.step)}" for way in ("before", "after")]
    words = "are the same numbers as" if same else "DIFFER from"
    say(f"\nAll {len(after.losses)} losses {words} those of torch DDP.")
    say(f"Communication that nothing hides: {exposed[0]} of a step before, {exposed[1]} after.")
    say(f"All this took {seconds:.0f} s. One run of each is a first look at the times, not a measurement.")
    if not learnt:
        note(f"the network has not learnt: less than {ENOUGH:.0%} of unseen digits are read right")


def _as_value(
    runs: Mapping[str, Trained], reports: Mapping[str, Report], *, same: bool, learnt: bool, seconds: float
) -> dict[str, Any]:
    return {
        "runs": {way: vars(one) for way, one in runs.items()},
        "reports": {way: one.to_dict() for way, one in reports.items()},
        "same_losses_as_ddp": same,
        "learnt": learnt,
        "seconds": seconds,
    }
