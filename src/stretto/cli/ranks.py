"""Runs ranks on this host for a command, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..cores import cores
from ..quiet import quietly
from ..system_memory import available_bytes
from ..terminal import progress
from ..testing import spawn_ranks
from ..wording import format_bytes
from .console import CommandError
from .machine import most_open_files

T = TypeVar("T")
STORE_FILES, RANK_FILES = 20, 7
"""Files that torch's store opens; and for each rank four pipe ends, and up to three connections to that store."""
RANKS = 2
_LOOK_SECONDS = 0.05
LEAST = 64 * 2**20
"""Least memory, in bytes, of a process that has imported torch."""
_DEVICES = {"gpu": "cuda", "xpu": "xpu"}


def number_of_ranks(given: str) -> int:
    """How many ``--ranks`` asks for: a number or, as for torchrun, a word.

    ``auto`` is one for each accelerator of this host, or for each core if there is none; ``gpu`` and ``xpu`` insist on
    such a device, ``cpu`` on cores.

    Raises:
        CommandError: it is neither, less than 1, or there is no such device.
    """
    if given not in ("auto", "cpu", *_DEVICES):
        try:
            number = int(given)
        except ValueError:
            raise CommandError(f"--ranks {given}: must be a number, or auto, cpu, gpu or xpu") from None
        if number < 1:
            raise CommandError(f"--ranks {number}: must be 1 or more")
        return number
    found = torch.accelerator.current_accelerator(check_available=True)
    if given == "cpu" or (given == "auto" and found is None):
        return cores()
    if found is None or _DEVICES.get(given, found.type) != found.type:
        raise CommandError(f"--ranks {given}: torch finds no such device here")
    return torch.accelerator.device_count()


def check_room(ranks: int) -> None:
    """Refuse to start more processes than this machine's memory can hold.

    Raises:
        CommandError: there is not enough memory for so many processes.
    """
    room = available_bytes()
    if room is not None and ranks * LEAST > room:
        least, there = format_bytes(LEAST), format_bytes(room)
        raise CommandError(f"--ranks {ranks}: each takes {least} of memory or more, and {there} is available")


def check_descriptors(ranks: int) -> None:
    """Check first: torch's store would silently wait more than a minute for files that it cannot open.

    Raises:
        CommandError: this process may not open so many files.
    """
    needed, held = STORE_FILES + RANK_FILES * ranks, []
    try:
        for _ in range(needed):
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        limit = most_open_files() or "all"
        raise CommandError(
            f"--ranks {ranks}: needs {needed} more open files, and {len(held)} of {limit} are left (ulimit -n)"
        ) from error
    finally:
        for one in held:
            os.close(one)


def work(title: str, total: float, worker: Callable[..., T], *args: Any, timeout: float) -> list[T]:
    """Run ``worker(rank, *args, tell)`` on each of two ranks, and return their results. Ctrl-C ends them.

    Args:
        title: of the bar.
        total: of what rank 0 sends through ``tell``.
        worker: can be imported by its name.
        args: anything that can be pickled.
        timeout: seconds.

    Raises:
        RuntimeError: a rank failed; with its traceback.
        TimeoutError: they did not end.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    with progress(title, total) as done:

        def look() -> None:
            if here.poll(_LOOK_SECONDS):
                done(here.recv())

        return quietly(spawn_ranks, worker, RANKS, *args, there, timeout=timeout, meanwhile=look)
