"""Two ranks of this host at work for a command, beneath a progress bar."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ..testing import spawn_ranks
from .console import progress

T = TypeVar("T")
RANKS = 2
_LOOK_SECONDS = 0.05


def work(title: str, total: float, worker: Callable[..., T], *args: Any, timeout: float) -> list[T]:
    """Run ``worker(rank, *args, tell)`` on each rank; what they return. Ctrl-C ends them.

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
    with ThreadPoolExecutor(1) as pool, progress(title, total) as done:
        ranks = pool.submit(spawn_ranks, _on_rank, RANKS, worker, args, there, timeout=timeout)
        try:
            while not ranks.done():
                if here.poll(_LOOK_SECONDS):
                    done(here.recv())
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise
        return ranks.result()


def _on_rank(rank: int, worker: Callable[..., T], args: tuple[Any, ...], tell: Connection) -> T:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent ends us
    try:
        return worker(rank, *args, tell)
    except BaseException:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # told by the parent, in one line, not by multiprocessing
        raise
