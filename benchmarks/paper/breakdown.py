"""Where the time of a step goes (figure 6 of the paper), for everybody by the same rule.

Each rank takes the time of forward, backward and the optimizer's step by the clock, for every contestant in turn; all
figures are means over the ranks.

    backward   that of the same model without communication in the same round
    exposed    the contestant's backward, until every gradient is in place, less that: all that communicating adds,
               copies and hooks included
    hidden     what its messages take alone (same sizes, same order, same transport, nothing to compute), less exposed
               communication, and not less than 0; 0 for those that send nothing before backward has ended, or wait for
               each message where they send it

What ``sync.report()`` says of stretto stands beside it in the JSON: measured from inside, by another rule.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stretto.bench import Contestant, Quartiles
from stretto.bench.build import Training, transport_of
from stretto.bench.compare import Job, enter, fastest, letting_go, run_rounds, spawn, words_for
from stretto.bench.contestants import ALONE, TUNED, everybody
from stretto.bench.factory import workload_of
from stretto.bench.machine import this_machine
from stretto.bench.models import title_of
from stretto.bench.result import Comparison
from stretto.bench.timing import steps_in

from .figure import Asked, Data, Figure, Rows, comparisons

CASES = (("gpt2", None), ("resnet18", None), ("gpt2x8", "1gbit"))
SECONDS = 8.0
PARTS = ("forward", "backward", "exposed", "hidden", "optimizer")
OVERLAPPING = ("torch DDP, default", TUNED, "stretto over the process group", "stretto")
"""Those that send while backward goes on."""


class Segments:
    """Seconds of forward, backward and the optimizer's step, by block of steps."""

    def __init__(self, training: Training, steps: int) -> None:
        self._training, self._steps = training, steps
        self.blocks: list[tuple[float, float, float]] = []

    def run(self) -> None:
        training, sums = self._training, [0.0, 0.0, 0.0]
        for _ in range(self._steps):
            times = [time.perf_counter()]
            loss = training.loss(training.called)
            times.append(time.perf_counter())
            loss.backward()
            training.after()
            times.append(time.perf_counter())
            training.optimizer.step()
            training.optimizer.zero_grad()
            times.append(time.perf_counter())
            sums = [total + end - begin for total, begin, end in zip(sums, times, times[1:], strict=False)]
        self.blocks.append(tuple(total / self._steps for total in sums))  # type: ignore[arg-type]


def messages(contestant: Contestant, training: Training) -> Callable[[], None]:
    """What it sends in a step, and nothing else. Collective."""
    if training.handle is not None:
        plan = training.handle.plan
        sizes = [sum(plan.parameters[index].numel for index in bucket.indices) for bucket in plan.buckets]
    else:
        told = training.called._get_ddp_logging_data()
        sizes = [int(size) // 4 for size in str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")]
    transport = transport_of(contestant)
    buffers = [transport.allocate(size, torch.float32, torch.device("cpu")) for size in sizes]

    def send() -> None:
        for work in [transport.all_reduce(buffer) for buffer in buffers]:
            work.wait()

    return send


def measure_on_rank(rank: int, job: Job) -> dict[str, Any]:
    """One rank's part; the same answer on all."""
    torch.set_num_threads(1)
    make = workload_of(job.workload)
    who, stands_for = [], {}
    steps = 0
    for one in job.contestants:
        if not steps:
            first = enter([one], make)[0]
            steps = steps_in(job.effort.block, lambda first=first: first[ALONE].steps(1))
        best = fastest(one, make, steps, job) if one.candidates else one
        if isinstance(best, Contestant):
            if one.candidates:
                stands_for[one.name] = best.name
            who.append(Contestant(one.name, best.kind, best.options))
    entrants, skipped = enter(who, make)
    segments = {name: Segments(training, steps) for name, training in entrants.items()}
    blocks: dict[str, Callable[[], None]] = {name: one.run for name, one in segments.items()}
    for one in who:
        if one.name in entrants and one.name in OVERLAPPING:
            send = messages(one, entrants[one.name])
            blocks[f"messages of {one.name}"] = functools.partial(_repeat, send, steps)
    gc.collect()
    gc.freeze()
    with letting_go(entrants):
        title = f"breakdown, {title_of(job.workload)}"
        seconds = run_rounds(blocks, job, job.effort.rounds, title)
        handles = {name: one.handle for name, one in entrants.items() if one.handle is not None}
        reported = {name: vars(handle.report().breakdown) for name, handle in handles.items()}
        handles.clear()
    rounds = len(seconds[ALONE])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: one.blocks[-rounds:] for name, one in segments.items()})
    return {
        "seconds": {name: [round(s / steps, 9) for s in times] for name, times in seconds.items()},
        "parts": {name: parts_of(name, everyone, seconds, steps) for name in segments},
        "reported": reported,
        "stands_for": stands_for,
        "skipped": skipped,
        "steps": steps,
    }


def _repeat(send: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        send()


def parts_of(name: str, everyone: list[Any], seconds: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    """Of one contestant, round by round."""

    def mean(who: str, part: int) -> list[float]:
        return [
            sum(one[part] for one in blocks) / len(blocks) for blocks in zip(*(e[who] for e in everyone), strict=True)
        ]

    backward = mean(ALONE, 1)
    exposed = [mine - base for mine, base in zip(mean(name, 1), backward, strict=True)]
    alone = [s / steps for s in seconds.get(f"messages of {name}", [])] or [0.0] * len(exposed)
    hidden = [max(0.0, sent - max(0.0, seen)) for sent, seen in zip(alone, exposed, strict=True)]
    return dict(zip(PARTS, (mean(name, 0), backward, exposed, hidden, mean(name, 2)), strict=True)) | {
        "messages": alone
    }


def measure(asked: Asked) -> Data:
    runs, parts, reported, left_out = [], [], [], []
    for workload, network in (("policy", None),) if asked.quick else CASES:
        who = tuple(one for one in everybody(network is not None) if one.kind not in ("lockstep", "floor"))
        if asked.quick:
            who = tuple(one for one in who if not one.candidates)
        job = Job(workload, who, asked.effort_for(SECONDS), progress=True)
        machine = this_machine()
        try:
            found = spawn(measure_on_rank, 2, job, network=network)[0]
        except OSError as error:
            left_out.append(f"{title_of(workload)} over {network}: hosts cannot be emulated on this machine ({error})")
            continue
        told = (found["stands_for"], found["skipped"])
        run = Comparison(workload, 2, words_for(network), 1, found["steps"], machine, found["seconds"], *told)
        runs.append(run.to_dict())
        parts.append(
            {name: {part: _short(values) for part, values in one.items()} for name, one in found["parts"].items()}
        )
        reported.append(found["reported"])
    return {"runs": runs, "parts": parts, "reported": reported, "left_out": left_out}


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def spreads(parts: dict[str, list[float]]) -> dict[str, Quartiles]:
    return {part: Quartiles.of(parts[part]) for part in PARTS}


def table(data: Data) -> Rows:
    rows = [["ms", *PARTS, "step, slower rank"]]
    for run, parts in zip(comparisons(data), data["parts"], strict=True):
        rows.append([f"**{title_of(run.workload)}**, {run.network}", *[""] * 6])
        for name, one in parts.items():
            rows.append([name, *(s.show(1e-3) for s in spreads(one).values()), run.spread(name).show(1e-3)])
    return rows


def draw(data: Data, paper: Any) -> None:
    colours = {"forward": "#b7d3b0", "backward": "#6f9f66", "exposed": "#c0392b", "optimizer": "#c9b458"}
    runs = comparisons(data)
    everyone = [*dict.fromkeys(name for parts in data["parts"] for name in parts)][::-1]
    every_axes = paper.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    every_axes[0].set_yticks(range(len(everyone)), everyone)
    for axes, run, parts in zip(every_axes, runs, data["parts"], strict=True):
        names = [name for name in everyone if name in parts]  # the row of who took no part stays empty
        rows, left = [everyone.index(name) for name in names], [0.0] * len(names)
        for part, colour in colours.items():
            widths = [max(0.0, spreads(parts[name])[part].median * 1e3) for name in names]
            axes.barh(rows, widths, left=left, color=colour, height=0.6, label=part)
            if part == "exposed":  # hidden communication lies below backward and ends where that ends
                hidden = [spreads(parts[name])["hidden"].median * 1e3 for name in names]
                ends = [at - size for at, size in zip(left, hidden, strict=True)]
                below = [at - 0.36 for at in rows]
                axes.barh(below, hidden, left=ends, color="#e8a79f", height=0.14, label="hidden")
            left = [at + width for at, width in zip(left, widths, strict=True)]
        axes.set_title(f"{title_of(run.workload)}\n{run.network}", fontsize=8, loc="left")
        axes.set_xlabel("ms a step")
    paper.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)


BREAKDOWN = Figure("breakdown", "Latency breakdown", measure, table, draw, (13.0, 4.0), minutes=1.0)
