"""Everybody on five models: what a step costs over the same step without communication."""

from __future__ import annotations

from typing import Any

from stretto.bench.contestants import ALONE
from stretto.bench.models import title_of
from stretto.bench.plots import bars
from stretto.bench.result import Comparison, geometric_mean

from .figure import Asked, Data, Figure, Rows, comparisons

WORKLOADS = ("policy", "layers", "mlp", "gpt2", "resnet18")
SECONDS = 8.0


def measure(asked: Asked) -> Data:
    return {"runs": [asked.compare(one, SECONDS).to_dict() for one in asked.workloads(*WORKLOADS)]}


def table(data: Data) -> Rows:
    runs = comparisons(data)
    rows = [["over the step without communication", *(title_of(run.workload) for run in runs), "geometric mean"]]
    alone = [f"{run.spread(ALONE).median * 1e3:.2f} ms" for run in runs]
    rows.append([f"{ALONE}, one step", *alone, ""])
    for name in names_of(runs):
        mean = geometric_mean(runs, name)
        cells = [run.ratio(name).show() if name in run.seconds else "-" for run in runs]
        rows.append([name, *cells, f"**{mean:.3f}**" if mean else "-"])
    return rows


def names_of(runs: list[Comparison]) -> list[str]:
    return [name for name in dict.fromkeys(name for run in runs for name in run.seconds) if name != ALONE]


def draw(data: Data, paper: Any) -> None:
    runs = comparisons(data)
    for place, (axes, run) in enumerate(zip(paper.subplots(1, len(runs), squeeze=False)[0], runs, strict=True)):
        bars(axes, run, names=not place)
        axes.set_title(title_of(run.workload), fontsize=8, loc="left")
        axes.set_xlabel("")
    paper.suptitle("a step over the same step without communication: 2 ranks, one host", fontsize=10)


CONTEST = Figure("contest", "Everybody on five models", measure, table, draw, (15.0, 3.6), minutes=2.5)
