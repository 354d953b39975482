"""What parameters and optimizer state take of a rank's memory, stage by stage; see step.py."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from common import spawn

WIDTH = 1024
Prepared = tuple[nn.Module, Callable[[], torch.optim.Optimizer]]
"""What is called, and what makes the optimizer when gradients have their memory."""
Stages = Callable[[str], None]
"""Called at the end of each stage with its name: what the rank's memory has grown by is its."""


def proportional_bytes() -> int:
    """Of this process; what several processes map counts in equal parts for each. All ranks look at one time."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed would be found again in a later stage
    dist.barrier()
    line = next(one for one in Path("/proc/self/smaps_rollup").read_text().splitlines() if one.startswith("Pss:"))
    dist.barrier()
    return int(line.split()[1]) * 1024


def plain(model: nn.Module) -> Prepared:
    """Every rank steps all of its own parameters."""
    stretto.attach(model)
    return model, lambda: torch.optim.AdamW(model.parameters())


def zero(model: nn.Module) -> Prepared:
    """torch DDP and its ZeroRedundancyOptimizer: the state is divided, parameters are not."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = TorchDDP(model, gradient_as_bucket_view=True)
    return wrapped, lambda: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


def sharded(model: nn.Module) -> Prepared:
    """Parameters in memory that all ranks map, state for this rank's part of them."""
    sync = stretto.attach(model)
    return model, lambda: stretto.shard(torch.optim.AdamW(model.parameters()), sync)


CONTESTANTS = {"stretto": plain, "stretto, sharded step": sharded, "torch DDP with ZeroRedundancyOptimizer": zero}


def stages_of(rank: int, name: str, megabytes: int) -> dict[str, int]:
    """Bytes by stage. ``parameters`` is what the model takes and what preparing the step adds to that; ``gradients``
    come with attaching and with backward; ``state`` with the first steps."""
    _train(name, 8, 1, lambda part: None)  # what is imported and set up once is nobody's
    found = dict.fromkeys(("parameters", "gradients", "state"), 0)
    before = proportional_bytes()

    def stage(part: str) -> None:
        nonlocal before
        now = proportional_bytes()
        found[part] += now - before
        before = now

    _train(name, WIDTH, max(1, megabytes * 2**20 // (4 * WIDTH * WIDTH)), stage)
    return found


def _train(name: str, width: int, layers: int, stage: Stages) -> None:
    inputs = torch.randn(1, width)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    stage("parameters")
    called, make = CONTESTANTS[name](model)
    called(inputs).square().mean().backward()  # so that what sets up attaching is over, and counted
    model.zero_grad()
    stage("gradients")
    optimizer = make()
    stage("parameters")
    for _ in range(3):
        called(inputs).square().mean().backward()
        stage("gradients")
        optimizer.step()
        stage("state")
        optimizer.zero_grad()


def measure_memory(ranks: int, megabytes: int) -> dict[str, list[dict[str, int]]]:
    """By contestant, in new processes each: bytes of each rank by stage."""
    return {name: spawn(stages_of, ranks, name, megabytes, timeout=600) for name in CONTESTANTS}
