"""Ranks that end with Ctrl-C, and leave all messages to the process that started them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.05


def quietly(
    spawn: Callable[..., list[T]],
    worker: Callable[..., T],
    ranks: Any,
    *args: Any,
    timeout: float,
    meanwhile: Callable[[], object] = lambda: time.sleep(_LOOK_SECONDS),
    end: Callable[[], object] | None = None,
) -> list[T]:
    """``spawn(worker, ranks, *args, timeout=timeout)`` in a thread: what it returns, or raises. Ctrl-C ends the ranks.

    A terminal sends Ctrl-C to all processes. Ranks do not get it, even while they are being started, and print no
    traceback: it is raised here alone.

    Args:
        spawn: such as :func:`~stretto.testing.spawn_ranks`; without ``end`` it is given ``started`` too.
        worker: can be imported by its name.
        ranks: how many, as ``spawn`` takes it.
        args: anything that can be pickled.
        timeout: seconds.
        meanwhile: called again and again while they run.
        end: ends them, called until they have; default, kill those that ``spawn`` has started, and no other child.
    """
    children: list[BaseProcess] = []
    told: dict[str, Any] = {} if end else {"started": children.append}
    if sys.platform != "win32":  # which has none
        resource_tracker.ensure_running()  # to start it later would unblock the signal again
    with ThreadPoolExecutor(1, initializer=_block_ctrl_c) as pool:
        found = pool.submit(spawn, _on_rank, ranks, worker, args, timeout=timeout, **told)
        try:
            while not found.done():
                meanwhile()
        except BaseException:
            while not found.done():
                _kill(children) if end is None else end()
                time.sleep(_LOOK_SECONDS)
            raise
        return found.result()


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in [*processes]:
        process.kill()


def _block_ctrl_c() -> None:
    if sys.platform != "win32":  # processes that this thread starts inherit it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _on_rank(rank: int, worker: Callable[..., T], args: tuple[Any, ...]) -> T:
    try:
        return worker(rank, *args)
    except BaseException:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # told by the parent, in one line, not by multiprocessing
        raise
