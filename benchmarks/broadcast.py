"""Rank 0's state to another rank: flat messages of 10 MB against one broadcast a tensor.

    python benchmarks/broadcast.py [--megabytes 100] [--tensors 1000] [--rounds 20] [--json FILE]

Two ranks, Gloo on loopback. The contestants alternate in one run; the coalescing of torch's DDP is
beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.broadcast import broadcast_coalesced
from stretto.transport import ProcessGroupTransport

sys.path.insert(0, str(Path(__file__).parent))
from common import Quartiles, count, ends_well, interleave, machine, output, show_table, spawn, worst_rank


def measure(rank: int, megabytes: int, count: int, rounds: int) -> dict[str, list[float]]:
    tensors = [torch.full((megabytes * 250_000 // count,), float(rank)) for _ in range(count)]
    transport = ProcessGroupTransport()

    def one_by_one() -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def one_by_one_async() -> None:
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]:
            work.wait()

    contestants = {
        "one broadcast a tensor": one_by_one,
        "one broadcast a tensor, all under way at once": one_by_one_async,
        "torch's coalescing, 250 MiB": lambda: dist._broadcast_coalesced(
            dist.group.WORLD, tensors, 250 * 1024 * 1024, 0
        ),
        "stretto, messages of 10 MB": lambda: broadcast_coalesced(tensors, transport, lambda work, what: work.wait()),
    }
    return worst_rank(interleave(contestants, rounds, title=f"{megabytes} MB in {count} tensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=count, default=100)
    parser.add_argument("--tensors", type=count, default=1000)
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--json", type=output)
    options = parser.parse_args()
    seconds = spawn(measure, 2, options.megabytes, options.tensors, options.rounds, timeout=580)[0]
    spreads = {name: Quartiles.of(times) for name, times in seconds.items()}
    ours = list(spreads.values())[-1]
    rows = [[name, spread.show(1e-3, 1), f"{spread.median / ours.median:.2f}x"] for name, spread in spreads.items()]
    title = f"{options.megabytes} MB in {options.tensors} tensors to one other rank: median (and quartiles)"
    show_table(title, ["", "ms", "over stretto"], rows)
    if options.json:
        found = {name: vars(spread) for name, spread in spreads.items()}
        options.json.write_text(json.dumps({"machine": machine(), "seconds": found}, indent=1))


if __name__ == "__main__":
    ends_well(main)
