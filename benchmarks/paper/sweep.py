"""The size of buckets, from one message a parameter to one for everything (figures 7 and 8 of the paper)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Comparison, Contestant
from stretto.bench.contestants import ALONE, alone
from stretto.bench.models import title_of
from stretto.bench.plots import level, lines

from .figure import Asked, Data, Figure, Rows, baselines, cell, comparisons, tuned_torch

WORKLOADS = ("gpt2", "resnet18")
SECONDS = 4.0
SIZES = (0.25, 0.5, 1, 2, 4, 10, 25, 50)
A_PARAMETER = 1e-6
"""MiB: one byte, so that every parameter is a bucket."""
SHARED, GROUP, TORCH = "stretto", "stretto over the process group", "torch DDP"
SIZELESS = "without a size"


def label(cap: float) -> str:
    return "a parameter" if cap == A_PARAMETER else f"{cap:g} MB"


def contestants(kind: str, caps: tuple[float, ...]) -> list[Contestant]:
    if kind == SIZELESS:
        return baselines()
    if kind == TORCH:
        return [Contestant(label(cap), "torch", tuned_torch(cap).options) for cap in caps]
    transport = "shared_memory" if kind == SHARED else "process_group"
    return [Contestant(label(cap), "stretto", {"transport": transport, "bucket_cap_mb": cap}) for cap in caps]


def measure(asked: Asked) -> Data:
    caps = (A_PARAMETER, 1) if asked.quick else (A_PARAMETER, *SIZES)
    runs, kinds = [], []
    for workload in asked.workloads(*WORKLOADS):
        for kind in (SHARED, GROUP, TORCH, SIZELESS):
            run = asked.compare(workload, SECONDS, contestants=[alone(), *contestants(kind, caps)])
            runs.append(run.to_dict())
            kinds.append(kind)
    return {"runs": runs, "kinds": kinds}


def table(data: Data) -> Rows:
    """A column for each run in which sizes took part, and a row for each contestant that has no size."""
    pairs = [*zip(comparisons(data), data["kinds"], strict=True)]
    swept = [(run, kind) for run, kind in pairs if kind != SIZELESS]
    rows = [["size of buckets", *(f"{title_of(run.workload).split(',')[0]}: {kind}" for run, kind in swept)]]
    columns = [_column(run) for run, _ in swept]
    rows += [[name, *(column.get(name, "-") for column in columns)] for name in columns[0]]
    flat = {run.workload: run for run, kind in pairs if kind == SIZELESS}
    for one in baselines() if flat else []:
        cells = [cell(flat[run.workload], one.name) if kind == swept[0][1] else "" for run, kind in swept]
        rows.append([f"{SIZELESS}: {one.name}", *cells])
    return rows


def _column(run: Comparison) -> dict[str, str]:
    """By size, the best in bold."""
    sizes = [name for name in run.seconds if name != ALONE]
    best = min(sizes, key=lambda name: run.ratio(name).median)
    return {name: f"**{cell(run, name)}**" if name == best else cell(run, name) for name in sizes}


def draw(data: Data, paper: Any) -> None:
    runs, kinds = comparisons(data), data["kinds"]
    workloads = [*dict.fromkeys(run.workload for run in runs)]
    for axes, workload in zip(paper.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        mine = {kind: run for run, kind in zip(runs, kinds, strict=True) if run.workload == workload}
        flat = mine.pop(SIZELESS, None)
        sizes = [name for name in next(iter(mine.values())).seconds if name != ALONE]
        ticks = [name.removesuffix(" MB").replace(" ", "\n") for name in sizes]  # as wide as fits beside each other
        lines(axes, ticks, {kind: [run.ratio(name) for name in sizes] for kind, run in mine.items()})
        level(axes, {name: flat.ratio(name) for name in flat.seconds if name != ALONE} if flat else {})
        axes.set_title(title_of(workload), fontsize=9, loc="left")
        axes.set_xlabel("at most so many MB in a bucket")
        axes.set_ylabel("step over the step without communication")


SWEEP = Figure("sweep", "Size of buckets", measure, table, draw, (11.0, 4.0), minutes=1.5)
