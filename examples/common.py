"""What both examples need beside the training itself: flags, ranks, checkpoints, a progress bar."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Before any process group exists: its functions take the group of the moment of import as a default and never let go.
# An optimizer would import it later; Gloo's threads then outlive destroy_process_group() and can abort the exit.
import torch.distributed.nn
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn


class Here(NamedTuple):
    rank: int
    world_size: int
    device: torch.device


def parser(description: str, *, epochs: int) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument(
        "--reducer", choices=["stretto", "ddp", "none"], default="stretto", help="who averages gradients"
    )
    flags.add_argument(
        "--epochs", type=at_least_one, default=epochs, help="passes over the data (default: %(default)s)"
    )
    flags.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: %(default)s)")
    flags.add_argument(
        "--checkpoint", type=in_a_folder, help="resume from this file if it exists; saved after each epoch"
    )
    flags.add_argument(
        "--json", type=in_a_folder, help="write losses, result, step time and plan of rank 0 to this file"
    )
    return flags


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def in_a_folder(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():  # told now, not after the training
        raise argparse.ArgumentTypeError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: it is a folder")
    return path


@contextmanager
def ranks() -> Iterator[Here]:
    """Join the process group that torchrun announces in the environment; alone without it."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield Here(0, 1, device)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Here(dist.get_rank(), dist.get_world_size(), device)
    finally:
        # First whatever else holds the group, such as a DDP wrapper whose training function has returned: were torch's
        # reducer its last owner, freeing the group would wait for a Gloo thread that waits for the interpreter's lock.
        gc.collect()
        dist.destroy_process_group()


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what rank 0 finds at `path` on every rank; the number of epochs done.

    Rank 0 reads and sends: the others may be on machines that do not see the file, or see it too late.
    """
    if path is None:
        return 0
    found: list[Any] = [None]
    if (not dist.is_initialized() or dist.get_rank() == 0) and path.exists():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return 0
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    return int(found[0]["epochs"])


def save(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, rank: int) -> None:
    if path is None or rank != 0:
        return
    unfinished = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, unfinished)
    os.replace(unfinished, path)  # a run killed while it saves leaves the previous checkpoint whole


class Record:
    """Losses and step times of this rank, and a bar for them on rank 0."""

    def __init__(self, title: str, rank: int, steps: int) -> None:
        self.losses: list[float] = []
        self._seconds: list[float] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), disable=rank != 0)
        self._task = self._progress.add_task(title, total=max(steps, 0), loss=float("nan"))

    def __enter__(self) -> Record:
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._progress.update(self._task, advance=1, loss=self.losses[-1])
        self._last = time.perf_counter()

    def recent_loss(self) -> float:
        return statistics.fmean(self.losses[-50:] or [float("nan")])

    def write(self, path: Path | None, rank: int, **more: Any) -> None:
        if path is not None and rank == 0:
            seconds = statistics.median(self._seconds) if self._seconds else None
            path.write_text(json.dumps({"losses": self.losses, "seconds_per_step": seconds, **more}))
