"""From 1 to 4 ranks on one host (figure 9 of the paper, in so far as a host of few cores can show it)."""

from __future__ import annotations

from typing import Any

from stretto.bench import Contestant
from stretto.bench.contestants import ALONE, alone
from stretto.bench.models import title_of
from stretto.bench.plots import lines

from .figure import Asked, Data, Figure, Rows, baselines, cell, comparisons, tuned_torch, who_took_part

WORKLOADS = ("mlp", "gpt2")
SECONDS = 3.0
WORLDS = (1, 2, 3, 4)
GROUP = "stretto over the process group"


def contestants() -> list[Contestant]:
    ours = [Contestant(GROUP, "stretto", {"transport": "process_group"}), Contestant("stretto", "stretto")]
    return [alone(), *baselines(), tuned_torch(), *ours]


def measure(asked: Asked) -> Data:
    worlds = WORLDS[:2] if asked.quick else WORLDS
    runs = [
        asked.compare(workload, SECONDS, ranks=world, contestants=contestants()).to_dict()
        for workload in asked.workloads(*WORKLOADS)
        for world in worlds
    ]
    return {"runs": runs}


def table(data: Data) -> Rows:
    runs = comparisons(data)
    names = who_took_part(runs, [one.name for one in contestants() if one.name != ALONE])
    rows = [["", "ranks", "ms without communication", *names]]
    for run in runs:
        told = [title_of(run.workload), str(run.ranks), run.spread(ALONE).show(1e-3)]
        rows.append([*told, *(cell(run, name) for name in names)])
    return rows


def draw(data: Data, paper: Any) -> None:
    runs = comparisons(data)
    workloads = [*dict.fromkeys(run.workload for run in runs)]
    for axes, workload in zip(paper.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        mine = [run for run in runs if run.workload == workload]
        cores = mine[0].machine.cores
        everywhere = [name for name in mine[0].seconds if all(name in run.seconds for run in mine)]
        lines(axes, [run.ranks for run in mine], {n: [run.spread(n) for run in mine] for n in everywhere}, 1e-3)
        if len(mine) > cores:
            axes.axvspan(cores - 0.5, len(mine) - 0.8, color="#eeeeee", zorder=0)
            axes.annotate(f"more ranks than the {cores} cores", (cores - 0.45, 0), fontsize=7, va="bottom")
        axes.set_ylim(bottom=0)
        axes.set_title(title_of(workload), fontsize=9, loc="left")
        axes.set_xlabel("ranks, each with its own batch")
        axes.set_ylabel("ms a step")


RANKS = Figure("ranks", "Ranks 1 to 4", measure, table, draw, (9.0, 3.8), minutes=3.0)
