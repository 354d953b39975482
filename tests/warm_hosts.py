"""Ranks on emulated hosts that cost little: a warm program enters the host, where else ``nsenter`` starts Python there.

It becomes a process of the host and then runs what a rank runs there otherwise, as a program of its own, through its
interpreter's own end. The process in between stands for it: it ends as the rank does, and the rank with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys

import warm_programs
import warm_spawn

from stretto import testing_network
from stretto.testing_network import EmulatedHosts

start_cold = EmulatedHosts._start_rank
"""The real way."""
_ENTER = "import warm_hosts; warm_hosts.enter({pid})\n"


def start_warm(hosts: EmulatedHosts, host: int, *arguments: str) -> object:
    """In the place of ``EmulatedHosts._start_rank``. To be root in a namespace of users takes the real way."""
    if os.geteuid() != 0:
        return start_cold(hosts, host, *arguments)
    text = _ENTER.format(pid=hosts._inside[host]) + testing_network._PROGRAM
    command = ["-c", text, pickle.dumps(sys.path).hex(), *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": testing_network.INTERFACE}
    return warm_programs.start(command, environment, says_here=True)


# In a warm program, which can start no other, but what it spawns is warm


def start_spawned(hosts: EmulatedHosts, host: int, *arguments: str) -> object:
    """The same for programs that emulate hosts. These ranks end as processes of ``multiprocessing`` do."""
    if os.geteuid() != 0:
        return start_cold(hosts, host, *arguments)
    return Spawned(hosts._inside[host], arguments)


class Spawned:
    """What of ``subprocess.Popen`` the hosts need."""

    returncode: int | None = None

    def __init__(self, pid: int, arguments: tuple[str, ...]) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_take_part, args=(pid, arguments))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """Harmless to one that has ended."""
        self._process.kill()


def _take_part(pid: int, arguments: tuple[str, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = testing_network.INTERFACE
    enter(pid)
    testing_network.take_part(*arguments)


# In the process that becomes a rank


def enter(pid: int) -> None:
    """Go on in a child, in the network, among the processes and the mounts of this one. The caller waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python's own setns() is of 3.12
    for fd in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("net", "pid", "mnt")]:
        if libc.setns(fd, 0):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        os.close(fd)
    if rank := os.fork():  # a namespace of processes takes children alone
        _end_as(rank)
    warm_spawn.die_with_parent()


def _end_as(child: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is the child's to end by it
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
