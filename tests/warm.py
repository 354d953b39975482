"""Ranks as processes that cost little: forked from one warm process, in which torch is imported once.

spawn_ranks(worker, 2)                      # of stretto.testing: its ranks too are forked, from a server
in_warm_process(scenario, folder)           # from a test; runs scenario(folder) in a new process and returns its result
    ranks = fork_ranks(worker, 3, folder)   # there, as often as wanted: each runs worker(rank, tell)
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import multiprocessing as mp
import multiprocessing.forkserver
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1


PRELOAD = ["stretto.testing", "torch.optim", "torch._dynamo", "pytest", "hypothesis"]
"""Seconds of import, each time a rank starts. torch's optimizers and its wrapper's forward import the compiler."""


class Ranks:
    """In the place of ``multiprocessing`` in stretto.testing."""

    def get_context(self, method: str) -> Ranks:
        """Whatever was asked for."""
        return self

    def Process(self, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """One that begins with this process's environment of now, not with that of the server."""
        context = fork_server(PRELOAD)
        return context.Process(target=_in_environment, args=(dict(os.environ), target, args))


def fork_server(preload: list[str]) -> Any:
    """A context whose processes have these modules. One server at a time: for others it starts anew."""
    server = multiprocessing.forkserver._forkserver
    if server._preload_modules != preload:
        server._stop()
        server.set_forkserver_preload(preload)
    return mp.get_context("forkserver")


def _in_environment(variables: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(*args)


def in_warm_process(scenario: Callable[..., Any], *args: Any, timeout: float = 110.0) -> Any:
    """What ``scenario(*args)`` returns in a process of its own, whose forks are safe: it has run nothing before."""
    ours, theirs = mp.Pipe(duplex=False)
    process = Ranks().Process(target=_warm, args=(theirs, scenario, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError(f"{scenario.__name__} did not end within {timeout:.0f} s")
        failure, value = ours.recv()
    except EOFError:
        raise RuntimeError(f"the process of {scenario.__name__} died") from None
    finally:
        process.kill()
        process.join()
    if failure:
        raise AssertionError(failure)
    return value


def _warm(pipe: Connection, scenario: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _die_with_parent()
    gc.freeze()  # else each rank's collector touches, and so copies, all of torch's modules
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        pipe.send(("", scenario(*args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Rank:
    """A rank, seen from the process that forked it."""

    pid: int
    pipe: Connection
    complaints: Path
    """What it wrote to stderr."""

    def hear(self, seconds: float = 20.0) -> Any:
        """The next thing that it tells; its failure is raised."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"process {self.pid} told nothing within {seconds:.0f} s")
        failure, value = self.pipe.recv()
        if failure:
            raise AssertionError(failure)
        return value

    def end(self, seconds: float = 20.0) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        until = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pipe.close()
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"process {self.pid} did not end within {seconds:.0f} s")
            time.sleep(0.002)


def fork_ranks(
    worker: Callable[..., Any],
    world: int,
    folder: str,
    *args: Any,
    before: Callable[[int], None] = lambda rank: None,
) -> list[Rank]:
    """Ranks with a process group over Gloo, each running ``worker(rank, tell, *args)``; ``tell`` is heard here.

    What the worker returns is told too. A rank ends without running any handler. ``before(rank)`` is called in each
    before it has a process group.
    """
    meeting = f"{folder}/{uuid.uuid4().hex}"
    Path(meeting).touch()
    os.chmod(meeting, 0o666)  # for ranks that become another user
    ranks = []
    for rank in range(world):
        here, there = mp.Pipe(duplex=False)
        complaints = Path(f"{meeting}.{rank}")
        pid = os.fork()
        if not pid:
            _die_with_parent()
            here.close()
            os.dup2(os.open(complaints, os.O_WRONLY | os.O_CREAT), 2)
            os._exit(_rank(worker, rank, world, meeting, there, args, before))
        there.close()
        ranks.append(Rank(pid, here, complaints))
    return ranks


def _rank(
    worker: Callable[..., Any],
    rank: int,
    world: int,
    meeting: str,
    pipe: Connection,
    args: tuple[Any, ...],
    before: Callable[[int], None],
) -> int:
    try:
        before(rank)
        store = dist.FileStore(meeting, world)
        patience = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
        store.add("connected", 1)
        while store.add("connected", 0) < world:  # one that dies before would end the others in torch's own start
            time.sleep(0.001)
        pipe.send(("", worker(rank, lambda value: pipe.send(("", value)), *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        return 1
    sys.stdout.flush()
    return 0
