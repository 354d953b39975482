"""Watch backward from inside: which bucket left when, and what was hidden behind the gradients still to come.

    python examples/overlap.py                                # a sketch of one backward, here in the terminal
    python examples/overlap.py --sizes 0.001 0.07 0.13 0.3 1  # what the size of buckets does to it
    python examples/overlap.py --pictures docs/pictures       # the four runs of docs/overlap.md, as pictures

Two processes on this machine. The link between them is emulated: each all-reduce takes 2 ms, and 5 ms more for each
0.1 MB. So is the work of a layer, 2 ms in forward and 5 ms in backward: what is seen is overlap, not what else runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import stretto
from stretto.plots import save_picture
from stretto.sketch import sketch
from stretto.testing import DelayTransport, spawn_ranks
from stretto.timeline import Timeline, timeline_of
from stretto.trace import read_trace
from stretto.transport import ProcessGroupTransport
from stretto.wording import counted

RUNS = {
    "naive": {"delay": True},  # one message, after backward
    "unbucketed": {"bucket_cap_mb": 1e-6},  # a message a parameter, as soon as there is its gradient
    "not-overlapped": {"delay": True, "bucket_cap_mb": 0.13},  # buckets, after backward
    "overlapped": {"bucket_cap_mb": 0.13},  # buckets, as soon as they are full
}


class Layer(torch.nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(2e-3)
        outputs = super().forward(inputs)
        outputs.register_hook(lambda gradient: time.sleep(5e-3))
        return outputs


def train(rank: int, folder: str, options: dict[str, float]) -> None:
    link = DelayTransport(ProcessGroupTransport(), lambda nbytes: 2e-3 + nbytes / 20e6)
    model = torch.nn.Sequential(*(Layer(128, 128) for _ in range(12)))
    sync = stretto.attach(model, transport=link, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()

    for _ in range(3):  # the order of gradients is learnt, memory gets warm
        step()
    with sync.trace(folder):
        for _ in range(9):
            step()


def traced(options: dict[str, float]) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(train, 2, folder, options)
        return timeline_of(read_trace(folder)).only()  # one pass, the typical one


def draw(folder: Path) -> dict[str, Timeline]:
    """The four runs, each as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, options in RUNS.items():
        drawn[name] = timeline = traced(options)
        save_picture(timeline, folder / f"{name}.svg")
        print(f"{name:14} {timeline.headline()}", flush=True)
    return drawn


def line_of(size: float) -> str:
    """What becomes of a run with buckets of that size, in MB."""
    timeline = traced({"bucket_cap_mb": size})
    buckets = counted(len(timeline.passes[0].transfers), "buckets")
    return f"bucket_cap_mb={size:<5g} {buckets:>11}: {timeline.headline()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of four runs")
    parser.add_argument("--sizes", type=float, nargs="+", default=[], help="bucket_cap_mb, one run each")
    asked = parser.parse_args()
    for size in asked.sizes:
        print(line_of(size), flush=True)
    if asked.pictures:
        draw(asked.pictures)
    if not asked.sizes and not asked.pictures:
        print(sketch(traced(RUNS["overlapped"])))


if __name__ == "__main__":
    main()
