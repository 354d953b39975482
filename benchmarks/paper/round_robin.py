"""Several process groups that take turns (figure 12 of the paper)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Contestant
from stretto.bench.contestants import ALONE, alone
from stretto.bench.models import title_of
from stretto.bench.plots import lines

from .figure import Asked, Data, Figure, Rows, comparisons

WORKLOADS = ("gpt2", "resnet18")
SECONDS = 6.0
GROUPS = (1, 3, 5)
CAP = 1.0
"""MiB of a bucket: enough buckets that several groups have something to do."""


def name_of(groups: int) -> str:
    return f"{groups} group{'s' if groups > 1 else ''}"


def measure(asked: Asked) -> Data:
    who = [alone(), *(Contestant(name_of(n), "stretto", {"groups": n, "bucket_cap_mb": CAP}) for n in GROUPS)]
    return {"runs": [asked.compare(one, SECONDS, contestants=who).to_dict() for one in asked.workloads(*WORKLOADS)]}


def table(data: Data) -> Rows:
    names = [name_of(n) for n in GROUPS]
    rows = [["over the step without communication", "ms without", *names]]
    for run in comparisons(data):
        cells = [run.ratio(name).show() if name in run.seconds else "-" for name in names]
        rows.append([title_of(run.workload), f"{run.spread(ALONE).median * 1e3:.2f}", *cells])
    return rows


def draw(data: Data, paper: Any) -> None:
    axes = paper.subplots()
    runs = {title_of(run.workload): run for run in comparisons(data)}
    lines(axes, GROUPS, {name: [run.ratio(name_of(n)) for n in GROUPS] for name, run in runs.items()})
    axes.set_xlabel("process groups (Gloo, loopback) in turn, buckets of 1 MB")
    axes.set_ylabel("step over the step without communication")


ROUND_ROBIN = Figure("round_robin", "Process groups in turn", measure, table, draw, (6.0, 3.6))
