"""What a warm program spawns is warm too: ``multiprocessing``'s "spawn", at the cost of a fork.

The interpreter of warm_programs.py forks a server before it becomes any program. A program that spawns asks that server
for a process. It runs ``multiprocessing``'s own code for one that begins anew: it unpickles what it is to do, imports
the program's main module under another name, and has its parent's environment, folder, output and blocked signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import popen_forkserver, reduction, resource_tracker, spawn, util
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1


class Server(NamedTuple):
    """Where it listens, and what its clients hold open."""

    address: str
    alive: int


def serve() -> Server:
    """Fork the server. Called where nothing has run yet."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name of its own, in no folder
    listener.listen()
    ours, theirs = os.pipe()
    if not os.fork():
        with contextlib.suppress(SystemExit):
            die_with_parent()
            os.close(theirs)
            multiprocessing.forkserver.main(listener.detach(), ours, [])
        os._exit(0)
    os.close(ours)
    address = "\0" + listener.getsockname()[1:].decode()
    listener.close()
    return Server(address, theirs)


def use(server: Server, folder: str) -> None:
    """From here on "spawn" asks the server. ``folder`` is where this program began."""
    CLIENT._forkserver_address, CLIENT._forkserver_alive_fd = server
    CLIENT.ensure_running = resource_tracker.ensure_running  # it is, and it is no child of ours to be waited for
    multiprocessing.process.ORIGINAL_DIR = folder
    multiprocessing.context._concrete_contexts["spawn"] = Spawn()


CLIENT = multiprocessing.forkserver.ForkServer()
"""Not the one of "forkserver", which a program may use too."""


class Popen(popen_forkserver.Popen):
    """Its own, which asks the one server of a program, with ours in its place."""

    def _launch(self, process: Any) -> None:
        text = io.BytesIO()
        multiprocessing.context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process._name), text)
            reduction.dump(process, text)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        self.sentinel, write = CLIENT.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(write), self.sentinel))  # the child sees our end
        with open(write, "wb") as file:
            file.write(text.getbuffer())
        self.pid = multiprocessing.forkserver.read_signed(self.sentinel)


class Process(multiprocessing.context.ForkServerProcess):
    """Started by it."""

    _Popen = staticmethod(Popen)


class Spawn(multiprocessing.context.ForkServerContext):
    """In the place of ``multiprocessing``'s own."""

    _name = "spawn"

    def Process(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> Any:
        """One that begins as if this process had started it."""
        all_args = (Here(), target, tuple(args), dict(kwargs or {}))
        return Process(group, _call, name, all_args, daemon=daemon)


class Here:
    """What a process inherits; unpickled, it has."""

    def __reduce__(self) -> Any:
        blocked = [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        return _begin, (dict(os.environ), os.getcwd(), reduction.DupFd(1), reduction.DupFd(2), blocked)


def _begin(environment: dict[str, str], folder: str, said: Any, complained: Any, blocked: list[int]) -> None:
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for fd, place in ((said.detach(), 1), (complained.detach(), 2)):
        os.dup2(fd, place)
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    set_threads()


def _call(_: None, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target(*args, **kwargs)


def set_threads() -> None:
    """As torch does when it is imported, which it has been already."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))


def die_with_parent() -> None:
    """If the tests are killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
