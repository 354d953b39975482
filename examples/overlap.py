"""Watch one backward from inside: which bucket left when, and what was hidden behind the gradients still to come.

    python examples/overlap.py

Two processes on this machine, over a synthetic link of 200 MB/s (a delay added to each all-reduce).
"""

from __future__ import annotations

import time

import torch

import stretto
from stretto.testing import DelayTransport, spawn_ranks
from stretto.transport import ProcessGroupTransport

WIDTH = 64


class Stopwatch:
    """An observer: when gradients arrived and when the pass had settled."""

    def pass_started(self, number: int) -> None:
        self.arrivals: list[float] = []

    def gradient_ready(self, number: int, name: str) -> None:
        self.arrivals.append(time.perf_counter())

    def pass_settled(self, number: int) -> None:
        self.settled = time.perf_counter()


def draw(watch: Stopwatch, transfers: list[tuple[float, float]]) -> str:
    start, computed = watch.arrivals[0], watch.arrivals[-1]
    scale = WIDTH / (watch.settled - start)

    def line(label: str, begin: float, end: float, mark: str) -> str:
        first, last = round((begin - start) * scale), round((end - start) * scale)
        return f"{label:9} " + " " * first + mark * max(1, last - first)

    ends = [start, *(through for _, through in transfers[:-1])]
    lines = [line("backward", start, computed, "=")]
    for bucket, ((launched, through), before) in enumerate(zip(transfers, ends, strict=True)):
        lines.append(line(f"bucket {bucket}", max(launched, before), through, "-"))
    lines.append(line("exposed", computed, watch.settled, "#"))
    exposed = watch.settled - computed
    busy = sum(through - max(launched, before) for (launched, through), before in zip(transfers, ends, strict=True))
    lines.append(
        f"the link was busy for {busy * 1e3:.0f} ms, {(busy - exposed) * 1e3:.0f} ms of it hidden behind backward; "
        f"this rank waited {exposed * 1e3:.0f} ms"
    )
    return "\n".join(lines)


def train(rank: int) -> str:
    link = DelayTransport(ProcessGroupTransport(), lambda nbytes: nbytes / 200e6)
    model = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(12)))
    sync = stretto.attach(model, transport=link, bucket_cap_mb=1.2)
    watch = Stopwatch()
    sync.observe(watch)
    for _ in range(5):
        model.zero_grad()
        link.transfers.clear()
        model(torch.randn(512, 384)).square().mean().backward()
    return draw(watch, link.transfers)


if __name__ == "__main__":
    print(spawn_ranks(train, 2)[0])
