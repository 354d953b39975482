"""A transformer with LayerDrop: bytes sent and time a step, beside torch DDP with ``find_unused_parameters=True``.

    python benchmarks/layerdrop.py [--rounds 60] [--drop 0.2] [--json FILE]

Two ranks, one thread each, stretto through shared memory and torch over Gloo on loopback; 12 encoder layers of width
128, batch 4 x 64, SGD. In each step layers are dropped with the given probability (Fan et al., 2019), the same on both
ranks or on each by itself. Contestants run the same layers in the same round. Ratios are to the model without any
communication.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto

sys.path.insert(0, str(Path(__file__).parent))
from common import Quartiles, count, ends_well, interleave, machine, output, show_table, spawn, worst_rank

LAYERS, WIDTH = 12, 128
TORCH = {
    f"torch, find_unused, {cap} MB": {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": cap,
    }
    for cap in (1, 4, 25)
}


class LayerDrop(torch.nn.Module):
    """Encoder layers of which each forward runs those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor, use: list[int]) -> torch.Tensor:
        for number in use:
            inputs = self.layers[number](inputs)
        return self.head(inputs).square().mean()


def step(model: torch.nn.Module, drop: float, seed: int) -> Callable[[], None]:
    inputs = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dice = random.Random(seed)

    def run() -> None:
        use = [number for number in range(LAYERS) if dice.random() >= drop]
        optimizer.zero_grad(set_to_none=True)
        model(inputs, use).backward()
        optimizer.step()

    return run


def counting_hook(count, bucket):  # without annotations: torch compares them with its own, which are strings here
    """torch's own all-reduce hook; counts what it sends."""
    count[0] += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)


def bytes_a_step(drop: float, seed: int, steps: int) -> dict[str, float]:
    """Gradient bytes that a rank hands over in a step, in passes that are not timed."""
    sent: dict[str, float] = {}
    for name, options in TORCH.items():
        model, count = TorchDDP(LayerDrop(), **options), [0]
        model.register_comm_hook(count, counting_hook)
        run = step(model, drop, seed)
        for _ in range(steps):
            run()
        sent[name] = count[0] / steps
        del model, run
        gc.collect()
    model = LayerDrop()
    sync = stretto.attach(model, check_every=0)
    run = step(model, drop, seed)
    for _ in range(steps):  # learns what comes and goes
        run()
    before = sync.statistics.payload_bytes
    for _ in range(steps):
        run()
    sent["stretto"] = (sync.statistics.payload_bytes - before) / steps
    sync.detach()
    return sent


def measure(rank: int, drop: float, alike: bool, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """One rank's part; the slower rank's seconds of every round, and the bytes."""
    seed = 1 if alike else 1 + rank
    contestants = {"no communication": step(LayerDrop(), drop, seed)}
    attached = LayerDrop()
    stretto.attach(attached, check_every=0)  # all on one batch, where they drop alike
    contestants["stretto"] = step(attached, drop, seed)
    for name, options in TORCH.items():
        contestants[name] = step(TorchDDP(LayerDrop(), **options), drop, seed)
    title = f"layers dropped {'alike' if alike else 'by each rank'}"
    seconds = worst_rank(interleave(contestants, rounds, warm_up=12, title=title))
    contestants.clear()
    gc.collect()
    return seconds, bytes_a_step(drop, seed, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=60)
    parser.add_argument("--drop", type=float, default=0.2)
    parser.add_argument("--json", type=output)
    options = parser.parse_args()
    if not 0 <= options.drop < 1:
        parser.error(f"--drop {options.drop:g}: a share of layers, from 0 to less than 1")
    found: dict[str, Any] = {}
    for alike in (True, False):
        seconds, sent = spawn(measure, 2, options.drop, alike, options.rounds, timeout=580)[0]
        bare = seconds.pop("no communication")
        rows = []
        for name, times in seconds.items():
            spread = Quartiles.of(times)
            ratio = Quartiles.of([one / base for one, base in zip(times, bare, strict=True)])
            rows.append([name, spread.show(1e-3, 1), ratio.show(), f"{sent[name] / 2**20:.2f}"])
            found[f"{name}, {'alike' if alike else 'by rank'}"] = {
                "seconds": vars(spread),
                "ratio": vars(ratio),
                "bytes": sent[name],
            }
        title = f"LayerDrop {options.drop}, layers dropped {'alike on both ranks' if alike else 'by each rank itself'}"
        show_table(title, ["", "ms a step", "ratio to no communication", "MB sent a step"], rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "found": found}, indent=1))


if __name__ == "__main__":
    ends_well(main)
