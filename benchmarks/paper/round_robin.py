"""Several process groups that take turns (figure 12 of the paper)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Contestant
from stretto.bench.contestants import ALONE, alone
from stretto.bench.models import title_of
from stretto.bench.plots import level, lines

from .figure import Asked, Data, Figure, Rows, baselines, cell, comparisons, tuned_torch, who_took_part

WORKLOADS = ("gpt2", "resnet18")
SECONDS = 5.0
GROUPS = (1, 3, 5)
CAP = 1.0
"""MiB of a bucket: enough buckets that several groups have something to do."""


def name_of(groups: int) -> str:
    return f"{groups} group{'s' if groups > 1 else ''}"


def others() -> list[Contestant]:
    """Who has one group, or none."""
    return [*baselines(), tuned_torch(CAP), Contestant("stretto", "stretto")]


def measure(asked: Asked) -> Data:
    turns = [Contestant(name_of(n), "stretto", {"groups": n, "bucket_cap_mb": CAP}) for n in GROUPS]
    who = [alone(), *turns, *others()]
    return {"runs": [asked.compare(one, SECONDS, contestants=who).to_dict() for one in asked.workloads(*WORKLOADS)]}


def table(data: Data) -> Rows:
    runs = comparisons(data)
    names = who_took_part(runs, [*map(name_of, GROUPS), *(one.name for one in others())])
    rows = [["over the step without communication", "ms without", *names]]
    for run in runs:
        alone_ms = f"{run.spread(ALONE).median * 1e3:.2f}"
        rows.append([title_of(run.workload), alone_ms, *(cell(run, name) for name in names)])
    return rows


def draw(data: Data, paper: Any) -> None:
    runs = comparisons(data)
    for axes, run in zip(paper.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        lines(axes, GROUPS, {"stretto, groups in turn": [run.ratio(name_of(n)) for n in GROUPS]})
        level(axes, {one.name: run.ratio(one.name) for one in others() if one.name in run.seconds})
        axes.set_title(title_of(run.workload), fontsize=9, loc="left")
        axes.set_xlabel("process groups (Gloo, loopback) in turn, buckets of 1 MB")
        axes.set_ylabel("step over the step without communication")


ROUND_ROBIN = Figure("round_robin", "Process groups in turn", measure, table, draw, (11.0, 3.8))
