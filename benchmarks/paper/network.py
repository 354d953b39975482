"""Two hosts, emulated: over a cable as fast as the machine, and over one of 1 Gb/s."""

from __future__ import annotations

from typing import Any

from stretto.bench import everybody
from stretto.bench.compare import UNLIMITED
from stretto.bench.contestants import ALONE
from stretto.bench.models import title_of
from stretto.bench.plots import bars

from .figure import Asked, Data, Figure, Rows, comparisons

WORKLOADS = ("gpt2x8", "resnet18")
SECONDS = 8.0
RATE = "1gbit"
FEW = ["one message", "stretto"]


def measure(asked: Asked) -> Data:
    runs = []
    try:
        for workload in asked.workloads(*WORKLOADS):
            for network in (UNLIMITED, RATE):
                options = {"network": network, "only": FEW if asked.quick else []}
                runs.append(asked.compare(workload, SECONDS, **options).to_dict())
    except OSError as error:
        return {"skipped": f"hosts cannot be emulated on this machine ({error})"}
    return {"runs": runs}


def table(data: Data) -> Rows:
    runs = comparisons(data)
    names = [one.name for one in everybody(network=True)]
    rows = [["ms a step; over the step without communication", *(f"{title_of(r.workload)}: {r.network}" for r in runs)]]
    for name in names:
        cells = [
            f"{run.spread(name).show(1e-3, 0)}; {run.ratio(name).median:.2f}" if name in run.seconds else "-"
            for run in runs
        ]
        rows.append([name, *cells])
    return rows


def draw(data: Data, paper: Any) -> None:
    runs = comparisons(data)
    for place, (axes, run) in enumerate(zip(paper.subplots(1, len(runs), squeeze=False)[0], runs, strict=True)):
        bars(axes, run, names=not place)
        axes.set_title(f"{title_of(run.workload)}\n{run.network}", fontsize=7, loc="left")
        axes.set_xlabel(f"over {run.spread(ALONE).median * 1e3:.0f} ms without communication", fontsize=7)
    paper.suptitle("two emulated hosts with one rank each", fontsize=10)


NETWORK = Figure("network", "Two emulated hosts", measure, table, draw, (14.0, 3.4), minutes=1.5)
