"""A whole step with AdamW, and what the optimizer adds to it: its time, its time over a network, its memory.

    python benchmarks/step.py host [--rounds 30] [--only gpt2 policy] [--json FILE]
    python benchmarks/step.py network [--rounds 5] [--rate 1gbit] [--json FILE]
    python benchmarks/step.py memory [--ranks 2] [--megabytes 64] [--json FILE]

host:    two ranks of one thread on five models: a step over the same step without communication, where each rank steps
         its own copy with plain AdamW; and the geometric mean over the models. The floor in shares is the least that
         this memory and two meetings allow whoever divides the step (src/stretto/bench/floor.py).
network: ResNet18, batch 16 of 64 x 64, one rank on each of two hosts that are emulated (network namespaces): a step
         over max(compute alone, communication alone), which no method that sends all gradients in a step can beat.
         Communication alone is one all-reduce of all gradients with nothing to compute. Beside it, what these layers
         on this link take at least, calculated (least.py): forward needs parameters before backward gives gradients.
memory:  what parameters and optimizer state take of a rank's proportional set size (/proc/self/smaps_rollup), that is,
         memory that ranks share is divided among them. "Over unsharded" is of the rank that has most.

Contestants take turns within a round; figures are medians over rounds with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stretto.bench import Comparison, Contestant, Effort, Quartiles, compare
from stretto.bench.contestants import ALONE, MESSAGES, alone, least, sharded, steppers, stepping, torch_tuned
from stretto.bench.factory import workload_of
from stretto.bench.models import title_of
from stretto.bench.result import geometric_mean

sys.path.insert(0, str(Path(__file__).parent))
from common import count, ends_well, machine, output, show_table
from least import Profile, least_seconds, profile
from memory import measure_memory
from workloads import RESNET18X16

WORKLOADS = ("policy", "layers", "mlp", "gpt2", "resnet18")
TIMEOUT = 1800.0
MANY_STEPS = 10.0
"""Seconds of steps without communication that a contestant makes at a time over a network: what travels behind the last
of them is waited for, with nothing to hide behind, and should count as little as in training. In blocks of a quarter of
this it was 10 of 420 ms a step."""


def effort(rounds: int, block: float = Effort.block) -> Effort:
    """As many rounds as were asked for, whatever they take."""
    return Effort(rounds, float("inf"), block, warm_up=2 if rounds > 2 and block < MANY_STEPS else 1)


# host


def run_host(rounds: int, only: Sequence[str]) -> dict[str, Any]:
    names = [one for one in WORKLOADS if not only or one in only]
    who = (*steppers(), *sharded(), least())
    runs = [compare(one, contestants=who, effort=effort(rounds), progress=True, timeout=TIMEOUT) for one in names]
    shown = [one.name for one in who if one.name != ALONE]
    rows = [[ALONE, *(f"{run.spread(ALONE).median * 1e3:.2f} ms" for run in runs), ""]]
    means = {name: geometric_mean(runs, name) for name in shown}
    for name in shown:
        cells = [run.ratio(name).show() if name in run.seconds else "-" for run in runs]
        rows.append([name, *cells, f"{means[name]:.3f}" if means[name] else "-"])
    heads = ["AdamW, two ranks", *(title_of(run.workload).split(",")[0] for run in runs), "geometric mean"]
    show_table("Whole step over the same step without communication: median (and quartiles)", heads, rows)
    say_remarks(runs)
    return {"runs": [run.to_dict() for run in runs], "geometric mean": means}


def say_remarks(runs: Sequence[Comparison]) -> None:
    for run in runs:
        for remark in run.remarks:
            print(f"{title_of(run.workload).partition(':')[0]}: {remark}")
    print(runs[0].machine)


# network


def bound(run: Comparison) -> list[float]:
    """The longer of computing and sending, alone, round by round."""
    return [max(pair) for pair in zip(run.seconds[ALONE], run.seconds[MESSAGES], strict=True)]


def over_bound(run: Comparison, name: str) -> Quartiles:
    return Quartiles.of([one / least for one, least in zip(run.seconds[name], bound(run), strict=True)])


def profile_of(workload: str) -> Profile:
    torch.set_num_threads(1)
    model, loss = workload_of(workload)()
    return profile(model, loss, torch.optim.AdamW(model.parameters()))


def run_network(rounds: int, rate: str, workload: str) -> dict[str, Any]:
    plain = [alone(), Contestant(MESSAGES, "messages"), torch_tuned(), Contestant("stretto", "stretto")]
    who = [*(stepping(one, "adamw") for one in plain), *sharded()]
    step = profile_of(workload)
    run = compare(
        workload,
        contestants=who,
        effort=effort(rounds, MANY_STEPS if rounds > 2 else Effort.block),
        network=rate,
        progress=True,
        timeout=TIMEOUT,
    )
    rows = [
        [name, run.spread(name).show(1e-3, 1), over_bound(run, name).show() if name not in (ALONE, MESSAGES) else ""]
        for name in run.seconds
    ]
    least = least_of(step, run)
    longer = statistics.median(bound(run))
    rows += [[name, f"{seconds * 1e3:.1f}", f"{seconds / longer:.2f}"] for name, seconds in least.items()]
    show_table(f"AdamW, {run.network}, one rank each", ["", "ms a step", "over the longer of both alone"], rows)
    say_remarks([run])
    ratios = {name: vars(over_bound(run, name)) for name in run.seconds}
    return {"runs": [run.to_dict()], "over max(compute, communication)": ratios, "calculated": least}


def least_of(step: Profile, run: Comparison) -> dict[str, float]:
    """Seconds of a step on a link that is as fast as one message of everything was."""
    nbytes = sum(layer.nbytes for layer in step.layers)
    link = run.spread(MESSAGES).median
    return {
        title: least_seconds(step, lambda part: link * part / nbytes, shares=shares)
        for title, shares in (
            ("calculated least, all gradients before the step", False),
            ("calculated least, in shares", True),
        )
    }


# memory


def run_memory(ranks: int, megabytes: int) -> dict[str, Any]:
    found = measure_memory(ranks, megabytes)
    rows = []
    for name, by_rank in found.items():
        parts = {part: statistics.mean(one[part] for one in by_rank) for part in by_rank[0]}
        rows.append([name, *(f"{value / 2**20:.1f}" for value in parts.values()), f"{share(found, name):.3f}"])
    heads = ["MB a rank", *next(iter(found.values()))[0], "over unsharded"]
    title = f"{ranks} ranks, {megabytes} MB of parameters, AdamW: proportional set size, mean over ranks"
    show_table(title, heads, rows)
    print(f"1/{ranks} and 5 % more: {1 / ranks + 0.05:.3f}")
    return {"bytes": found, "over unsharded": {name: share(found, name) for name in found}}


def share(found: dict[str, list[dict[str, int]]], name: str) -> float:
    """Parameters and state, of the rank that has most, over those of the first contestant."""
    most = {who: max(one["parameters"] + one["state"] for one in ranks) for who, ranks in found.items()}
    return most[name] / most[next(iter(most))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["host", "network", "memory"])
    parser.add_argument("--rounds", type=count, help="default: 30 on a host, 5 over a network")
    parser.add_argument("--only", nargs="*", default=[], choices=WORKLOADS, help="host: these workloads")
    parser.add_argument("--rate", default="1gbit", help="network: of the link between the hosts (default: 1gbit)")
    parser.add_argument("--workload", default=RESNET18X16, help="network: another, as stretto bench takes it")
    parser.add_argument("--ranks", type=count, default=2, help="memory: how many (default: 2)")
    parser.add_argument("--megabytes", type=count, default=64, help="memory: of parameters (default: 64)")
    parser.add_argument("--json", type=output, help="write what was found to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}  # before it is kept busy
    if options.mode == "host":
        found |= run_host(options.rounds or 30, options.only)
    elif options.mode == "network":
        try:
            found |= run_network(options.rounds or 5, options.rate, options.workload)
        except OSError as error:
            parser.exit(1, f"not measured: {error}\n")
    else:
        found |= run_memory(options.ranks, options.megabytes)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    ends_well(main)
