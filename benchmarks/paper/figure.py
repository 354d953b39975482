"""What every figure is: something measured that goes to JSON, and from there a table and a plot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.bench import Comparison, Contestant, Effort, compare
from stretto.bench.contestants import REPLICATE, naive, torch_variants
from stretto.bench.models import title_of
from stretto.bench.plots import canvas

Data = dict[str, Any]
"""``runs``: comparisons as JSON; more where a figure has more; ``skipped``: why there is nothing."""
Rows = list[list[str]]


@dataclass(frozen=True)
class Asked:
    """How much is measured."""

    effort: Effort
    quick: bool = False
    """One small workload, few rounds: to see that it runs. Its figures say nothing."""

    def workloads(self, *names: str) -> tuple[str, ...]:
        return ("policy",) if self.quick else names

    def compare(self, workload: str, seconds: float, **options: Any) -> Comparison:
        return compare(workload, effort=self.effort_for(seconds), progress=True, **options)

    def effort_for(self, seconds: float) -> Effort:
        """At most so many seconds of rounds."""
        return self.effort if self.quick else replace(self.effort, seconds=seconds)


@dataclass(frozen=True)
class Figure:
    """One figure of docs/benchmarks.md."""

    name: str
    title: str
    measure: Callable[[Asked], Data]
    table: Callable[[Data], Rows]
    """The first row holds the heads."""
    draw: Callable[[Data, Any], None]
    """On a matplotlib figure."""
    size: tuple[float, float] = (9.0, 4.5)
    """Of the plot, in inches."""
    minutes: float = 2.0
    """That measuring it takes on two quiet cores, about."""


def comparisons(data: Data) -> list[Comparison]:
    return [Comparison.from_dict(one) for one in data["runs"]]


def tuned_torch(cap: float | None = None, **more: Any) -> Contestant:
    """torch DDP with what helps on CPUs, at one size of buckets: where no short run chooses."""
    options = {**torch_variants()[-1].options, "bucket_cap_mb": 4 if cap is None else cap}
    options.pop("static_graph")  # it refuses to begin with a pass that is not synchronised
    return Contestant("torch DDP", "torch", options, **more)


def fixed_replicate(**more: Any) -> Contestant:
    """FSDP2 replicate with the module as a whole: where no short run chooses."""
    return Contestant(REPLICATE, "replicate", {"by_layer": False}, **more)


def baselines() -> list[Contestant]:
    """The ways to train that know nothing of what a figure varies."""
    return [*naive(), Contestant("torch DDP, default", "torch"), fixed_replicate()]


def cell(run: Comparison, name: str) -> str:
    """The ratio to the step without communication, where it took part."""
    return run.ratio(name).show() if name in run.seconds else "-"


def who_took_part(runs: list[Comparison], names: list[str]) -> list[str]:
    """Of these, in order: those that at least one run has."""
    return [name for name in names if any(name in run.seconds for run in runs)]


def remarks(data: Data) -> list[str]:
    """What all runs say besides their figures, each once, with the run's name unless all say it."""
    said: dict[str, list[str]] = {}
    runs = comparisons(data)
    for run in runs:
        where = title_of(run.workload) + ("" if run.network == "one host" else f", {run.network}")
        for text in run.remarks:
            said.setdefault(text, []).append(where)
    return [text if len(at) == len(runs) else f"{'; '.join(dict.fromkeys(at))}: {text}" for text, at in said.items()]


def markdown(figure: Figure, data: Data) -> str:
    """The table as it stands in docs/benchmarks.md, with what must be known to read it."""
    if "skipped" in data:
        return f"Not measured: {data['skipped']}\n"
    if not data["runs"]:
        return f"Not measured: {'; '.join(data['left_out'])}\n"
    rows = figure.table(data)
    runs = comparisons(data)
    lines = [rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    rounds = sorted({run.rounds for run in runs})
    count = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    missing = data.get("left_out", [])
    noisy = dict.fromkeys(run.title for run in runs if not run.machine.quiet)
    notes = [f"Medians [quartiles] of {count} rounds.", *remarks(data), *missing]
    notes += [f"**The machine was not quiet** when these began: {'; '.join(noisy)}."] if noisy else []
    return f"{table}\n\n" + "\n".join(f"- {note}" for note in notes) + f"\n\nMachine: {runs[0].machine}.\n"


def save(figure: Figure, data: Data, folder: Path) -> None:
    """JSON and, where there is something to draw, SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{figure.name}.json").write_text(as_json(data))
    plot = folder / f"{figure.name}.svg"
    plot.unlink(missing_ok=True)  # of an earlier run
    if data.get("runs"):
        with canvas(figure.size, plot) as paper:
            figure.draw(data, paper)


def as_json(data: Mapping[str, Any]) -> str:
    """Indented, but a list of numbers in one line."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[[-\d.e+,\s]+\]", lambda found: " ".join(found.group().split()), text) + "\n"
