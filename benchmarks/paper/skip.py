"""What is saved by synchronising every 2nd, 4th, 8th backward pass only (figure 10 of the paper)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Comparison, Contestant, Quartiles
from stretto.bench.contestants import alone
from stretto.bench.models import title_of
from stretto.bench.plots import lines

from .figure import Asked, Data, Figure, Rows, baselines, comparisons, tuned_torch

WORKLOADS = ("mlp", "gpt2")
SECONDS = 6.0
EVERY = (1, 2, 4, 8)
WHO = [
    *baselines(),
    tuned_torch(),
    Contestant("stretto over the process group", "stretto", {"transport": "process_group"}),
    Contestant("stretto", "stretto"),
]
KINDS = {one.name: one for one in WHO}


def name_of(kind: str, every: int) -> str:
    return f"{kind}, every {every}"


def measure(asked: Asked) -> Data:
    many = EVERY[:2] if asked.quick else EVERY
    who = [alone(every) for every in many]
    who += [
        Contestant(name_of(kind, every), one.kind, one.options, every) for kind, one in KINDS.items() for every in many
    ]
    runs = [asked.compare(one, SECONDS, contestants=who).to_dict() for one in asked.workloads(*WORKLOADS)]
    return {"runs": runs, "every": [*many]}


def of(run: Comparison, kind: str, every: int) -> Quartiles | None:
    """To the model without communication whose optimizer steps as often."""
    name = name_of(kind, every)
    return run.ratio(name, alone(every).name) if name in run.seconds else None


def table(data: Data) -> Rows:
    rows = [["one pass over the same without communication", *(f"every {every}" for every in data["every"])]]
    for run in comparisons(data):
        passes = [f"{run.spread(alone(every).name).median * 1e3:.2f} ms" for every in data["every"]]
        rows.append([f"{title_of(run.workload)}: no communication, one pass", *passes])
        for kind in KINDS:
            cells = [of(run, kind, every) for every in data["every"]]
            if any(cells):
                rows.append([f"{kind}", *(one.show() if one else "-" for one in cells)])
    return rows


def draw(data: Data, paper: Any) -> None:
    runs, many = comparisons(data), data["every"]
    for axes, run in zip(paper.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        found = {kind: [one for every in many if (one := of(run, kind, every))] for kind in KINDS}
        lines(axes, many, {kind: spreads for kind, spreads in found.items() if len(spreads) == len(many)})
        axes.set_title(title_of(run.workload), fontsize=9, loc="left")
        axes.set_xlabel("passes from one synchronisation to the next")
        axes.set_ylabel("a pass over one without communication")


SKIP = Figure("skip", "Skipping synchronisation", measure, table, draw, (9.0, 3.8))
