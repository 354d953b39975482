"""The size of buckets, from one message a parameter to one for everything (figures 7 and 8 of the paper)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Contestant
from stretto.bench.contestants import ALONE, alone
from stretto.bench.models import title_of
from stretto.bench.plots import lines

from .figure import Asked, Data, Figure, Rows, comparisons, tuned_torch

WORKLOADS = ("gpt2", "resnet18")
SECONDS = 7.0
SIZES = (0.25, 0.5, 1, 2, 4, 10, 25, 50)
A_PARAMETER = 1e-6
"""MiB: one byte, so that every parameter is a bucket."""
SHARED, GROUP, TORCH = "stretto", "stretto over the process group", "torch DDP"


def label(cap: float) -> str:
    return "a parameter" if cap == A_PARAMETER else f"{cap:g} MB"


def contestants(kind: str, caps: tuple[float, ...]) -> list[Contestant]:
    if kind == TORCH:
        return [Contestant(label(cap), "torch", tuned_torch(cap).options) for cap in caps]
    transport = "shared_memory" if kind == SHARED else "process_group"
    return [Contestant(label(cap), "stretto", {"transport": transport, "bucket_cap_mb": cap}) for cap in caps]


def measure(asked: Asked) -> Data:
    caps = (A_PARAMETER, 1) if asked.quick else (A_PARAMETER, *SIZES)
    runs, kinds = [], []
    for workload in asked.workloads(*WORKLOADS):
        for kind in (SHARED, GROUP, TORCH):
            run = asked.compare(workload, SECONDS, contestants=[alone(), *contestants(kind, caps)])
            runs.append(run.to_dict())
            kinds.append(kind)
    return {"runs": runs, "kinds": kinds}


def table(data: Data) -> Rows:
    runs, kinds = comparisons(data), data["kinds"]
    heads = [f"{title_of(run.workload).split(',')[0]}: {kind}" for run, kind in zip(runs, kinds, strict=True)]
    sizes = [name for name in runs[0].seconds if name != ALONE]
    rows = [["size of buckets", *heads]]
    best = [min(run.ratio(name).median for name in sizes if name in run.seconds) for run in runs]
    for name in sizes:
        cells = []
        for run, least in zip(runs, best, strict=True):
            ratio = run.ratio(name) if name in run.seconds else None
            text = ratio.show() if ratio else "-"
            cells.append(f"**{text}**" if ratio and ratio.median == least else text)
        rows.append([name, *cells])
    return rows


def draw(data: Data, paper: Any) -> None:
    runs, kinds = comparisons(data), data["kinds"]
    workloads = [*dict.fromkeys(run.workload for run in runs)]
    for axes, workload in zip(paper.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        mine = {kind: run for run, kind in zip(runs, kinds, strict=True) if run.workload == workload}
        sizes = [name for name in next(iter(mine.values())).seconds if name != ALONE]
        lines(axes, sizes, {kind: [run.ratio(name) for name in sizes] for kind, run in mine.items()})
        axes.set_title(title_of(workload), fontsize=9, loc="left")
        axes.set_xlabel("at most so much in a bucket")
        axes.set_ylabel("step over the step without communication")


SWEEP = Figure("sweep", "Size of buckets", measure, table, draw, (11.0, 4.0))
