"""What the benchmarks share: paired, interleaved timing and a table with medians and spread."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some seconds or ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)

    def show(self, unit: float = 1.0, digits: int = 2) -> str:
        low, median, high = (f"{value / unit:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} [{low} .. {high}]"


def interleave(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 5, title: str = ""
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. In a round all run once, in an order that all ranks share."""
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    with Progress(console=Console(stderr=True), disable=not first_rank, transient=True) as progress:
        task = progress.add_task(title, total=rounds + warm_up)
        for number in range(rounds + warm_up):
            names = list(contestants)
            shuffle.shuffle(names)
            for name in names:
                if dist.is_initialized():
                    dist.barrier()
                start = time.perf_counter()
                contestants[name]()
                if number >= warm_up:
                    seconds[name].append(time.perf_counter() - start)
            progress.advance(task)
    return seconds


def worst_rank(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """The slower rank's time of each round: what a training loop would see. Collective."""
    everyone: list[dict[str, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return {name: [max(times) for times in zip(*(one[name] for one in everyone), strict=True)] for name in seconds}


def machine() -> dict[str, str]:
    """What a figure depends on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads a rank": str(torch.get_num_threads()),
    }


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(header):
        table.add_column(column, justify="left" if not number else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
