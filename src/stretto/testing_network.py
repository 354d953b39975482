"""Several hosts on one machine, for tests and measurements: pretended ones, and ones with a network between them.

SeparateHosts(transport, [2, 2])        ranks that do not see each other's memory; everything else as it is
with EmulatedHosts() as hosts:          two network and process namespaces joined by a cable
    hosts.spawn_ranks(worker, [2, 2])
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .testing import RecordingTransport, read_results, run_rank
from .transport import Transport
from .transport.choose import Offer

T = TypeVar("T")
INTERFACE = "stretto0"
"""Of the cable, on either host."""
_NOBODY = 2**31 - 1  # no process has this number
_PROGRAM = "import pickle, sys; sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1])); import stretto.testing_network"
_PROGRAM += "; stretto.testing_network.take_part(*sys.argv[2:])"


class SeparateHosts(RecordingTransport):
    """``inner``, whose ranks are as if on several hosts: ``choose`` finds that memory ends where a host ends.

    Args:
        inner: of all ranks.
        sizes: so many ranks are on each host, in rank order.

    Example::

        transport = choose(SeparateHosts(ProcessGroupTransport(), [2, 2]), "auto")
        sync = stretto.attach(model, transport=transport)
    """

    def __init__(self, inner: Transport, sizes: Sequence[int]) -> None:
        super().__init__(inner)
        self._host_of = [host for host, size in enumerate(sizes) for _ in range(size)]

    @property
    def process_group(self) -> Any:
        """The inner one's."""
        return self.inner.process_group

    def all_gather_object(self, value: Any) -> list[Any]:
        """Recorded. Addresses from other hosts lead nowhere."""
        gathered = super().all_gather_object(value)
        return [self._seen_from_here(rank, one) for rank, one in enumerate(gathered)]

    def _seen_from_here(self, rank: int, value: Any) -> Any:
        here = self._host_of[rank] == self._host_of[self.rank]
        if here or not isinstance(value, Offer) or value.address is None:
            return value
        return replace(value, address=replace(value.address, pid=_NOBODY))


class EmulatedHosts:
    """Two hosts on this Linux: network, process and mount namespaces of their own, joined by a cable (veth).

    Needs ``ip`` (iproute2), ``unshare`` and ``nsenter`` (util-linux), and root or a system that lets users make
    namespaces. Nothing has a name outside, and all of it ends with ``close()`` or with this process, however that ends:
    each host lives as long as a process that reads from a pipe.

    Raises:
        OSError: it is not possible or not permitted here; with the reason.

    Example::

        with EmulatedHosts() as hosts:
            results = hosts.spawn_ranks(train, [2, 2])
            print(hosts.sent_bytes(0))
    """

    def __init__(self) -> None:
        missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
        if missing:
            raise OSError(f"hosts cannot be emulated: {', '.join(missing)} is not installed")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._inside: list[int] = []  # a process in each host, by its number outside
        try:
            for number in range(2):
                self._start_host(number)
            self._plug_in()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EmulatedHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Making

    def _start_host(self, number: int) -> None:
        command = ["unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "sh", "-c", "echo; exec cat"]
        if os.geteuid() != 0:  # root inside a user namespace, which both hosts share
            owner = ["unshare", "--user", "--map-root-user"]
            command = (self._enter(0) if number else owner) + command
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        self._processes.append(process)
        if not process.stdout.read(1):
            raise OSError(f"hosts cannot be emulated: {process.stderr.read().decode().strip()}")
        self._inside.append(_innermost(process.pid))

    def _enter(self, host: int, *namespaces: str) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._inside[host]), *namespaces, *user]

    def _plug_in(self) -> None:
        self._on(0, "ip", "link", "add", INTERFACE, "type", "veth", "peer", INTERFACE, "netns", str(self._inside[1]))
        for host in range(2):
            self._on(host, "ip", "link", "set", INTERFACE, "addrgenmode", "none")  # IPv4 alone
            self._on(host, "ip", "address", "add", f"10.0.0.{host + 1}/24", "dev", INTERFACE)
            self._on(host, "ip", "link", "set", INTERFACE, "up")
            self._on(host, "ip", "link", "set", "lo", "up")

    def _on(self, host: int, *command: str) -> None:
        """Run a command in the network of a host, and elsewhere as if outside."""
        done = subprocess.run([*self._enter(host, "--net"), *command], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"emulated host {host}: {' '.join(command)}: {done.stderr.strip()}")

    def limit(self, rate: str) -> None:
        """Slow the cable down, both ways, to what ``tc`` calls ``rate`` (``"1gbit"``).

        Raises:
            OSError: ``tc`` is missing, or refuses it.
        """
        if shutil.which("tc") is None:
            raise OSError("the cable cannot be slowed down: tc is not installed")
        for host in range(2):
            shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
            self._on(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)

    # Using

    def sent_bytes(self, host: int) -> int:
        """What has left the host through the cable since it was plugged in, with headers."""
        return _sent(Path(f"/proc/{self._inside[host]}/net/dev"))

    def command(self, host: int, *command: str) -> list[str]:
        """The command that runs this one on a host."""
        return [*self._enter(host, "--net", "--pid", "--mount"), *command]

    def spawn_ranks(self, worker: Callable[..., T], sizes: Sequence[int], *args: Any, timeout: float = 90.0) -> list[T]:
        """Run ``worker(rank, *args)`` on so many ranks of each host, with a Gloo group over the cable, in this folder.

        Args:
            worker: can be imported by its name.
            sizes: how many ranks are on the first host, and on the second.
            args: anything that can be pickled.
            timeout: seconds, for all together.

        Raises:
            RuntimeError: a rank failed; with the traceback of each that did.
            TimeoutError: some rank did not end; all are killed.
        """
        world, hosts = sum(sizes), [host for host, size in enumerate(sizes) for _ in range(size)]
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            Path(folder, "work").write_bytes(pickle.dumps((worker, args, os.getcwd())))
            ranks = [self._start_rank(host, folder, str(rank), str(world)) for rank, host in enumerate(hosts)]
            late = _wait(ranks, timeout)
            codes = [process.returncode for process in ranks]
            return read_results(folder, codes, late, timeout)

    def _start_rank(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", _PROGRAM, pickle.dumps(sys.path).hex(), *arguments]
        return subprocess.Popen(self.command(host, *program), env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE})

    def close(self) -> None:
        """End both hosts, and all that runs there. Harmless twice."""
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]  # a pipe, as stdout and stderr
        for process in self._processes:
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
            process.stderr.close()  # type: ignore[union-attr]
        self._processes.clear()


def sent_bytes() -> int:
    """The same, asked by a rank of its own host."""
    return _sent(Path("/proc/self/net/dev"))


def take_part(folder: str, rank: str, world_size: str) -> None:
    """What the process of a rank does; see :meth:`EmulatedHosts.spawn_ranks`."""
    worker, args, here = pickle.loads(Path(folder, "work").read_bytes())
    os.chdir(here)  # entering a mount namespace leads to its root
    run_rank(worker, int(rank), int(world_size), folder, args)


def _sent(table: Path) -> int:
    line = next(line for line in table.read_text().splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


def _innermost(pid: int) -> int:
    """The last of a chain of single children."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Until all have ended; kill those that have not, and say which."""
    until, late = time.monotonic() + seconds, []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        processes[rank].kill()
        processes[rank].wait()
    return late
