"""torchrun's own agent on one host, changed so that the rank that caused a failure ends by itself.

torchrun ends all ranks as soon as it sees one that has failed. But the rank that fails first seldom ends first: it
stays until the others have heard of its failure, and these raise and are gone before it. If it were ended then, its
exit code would be lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ..transport.life import is_stopped
from .console import note
from .streams import Traceback

PATIENCE = 10.0
"""Seconds: a rank stays up to 5 until the others have heard why it fails, and then takes some time to end."""
HEARD = 0.5
"""Seconds after its end in which a rank's output arrives."""
SILENCE = 3.0
"""Seconds for which ranks are expected to end before a word is said of them."""
TWICE = 0.5
"""A signal that comes within so many seconds of the first is the same Ctrl-C, passed on by a wrapper."""
LOOK_SECONDS = 0.01
_LOOK_AGAIN = 0.05
Told = Callable[[int], Traceback | None]


@dataclass
class Ends:
    """Which processes have ended by themselves, and when, by ``time.monotonic``; checks without reaping them.

    Args:
        told: what a rank has printed last.
    """

    told: Told
    failed: dict[int, float] = field(default_factory=dict)
    """End times by rank, in the order in which they were seen."""
    running: set[int] = field(default_factory=set)

    def look(self, pids: Mapping[int, int]) -> None:
        """Now.

        Args:
            pids: children of this process, by rank.
        """
        self.running = {
            rank for rank, pid in pids.items() if rank not in self.failed and not self._has_ended(rank, pid)
        }

    def _has_ended(self, rank: int, pid: int) -> bool:
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped already, which only happens to ranks that did not fail
            return True
        if end is None:
            return False
        if end.si_status:
            self.failed[rank] = time.monotonic()
        return True

    @property
    def cause_may_come(self) -> bool:
        """Whether all that have failed blame another rank, which is not among them."""
        return bool(self.failed and self.running) and not any(map(self._speaks_of_itself, self.failed))

    def _speaks_of_itself(self, rank: int) -> bool:
        told = self.told(rank)
        if told is None:
            return time.monotonic() > self.failed[rank] + HEARD
        return not told.is_consequence


class Meeting(StaticTCPRendezvous):
    """Of a single agent, at any free port. torch's other one looks through all of its stack, eighteen times a run."""

    def __init__(self) -> None:
        super().__init__("localhost", 0, rank=0, world_size=1, run_id=str(uuid.uuid4()), timeout=60)

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and where it is."""
        info = super().next_rendezvous()
        assert isinstance(self._store, TCPStore)
        return RendezvousInfo(
            info.store, info.rank, info.world_size, RendezvousStoreInfo("localhost", self._store.port)
        )


class Agent(LocalElasticAgent):
    """Runs a command on every rank, and ends all when one has failed; see the file's first lines.

    Args:
        command: of a rank.
        ranks: how many, all on this host.
        logs: where their output goes.
        told: what a rank has printed last.
    """

    def __init__(self, command: Sequence[str], ranks: int, logs: LogsSpecs, told: Told) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks,
            rdzv_handler=Meeting(),
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=0,
            monitor_interval=_LOOK_AGAIN,
            local_addr="localhost",
        )
        super().__init__(spec, logs)
        self.ends = Ends(told)
        self._first_end: tuple[float, signal.Signals] | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """torch keeps the ranks' output files open until it is gone itself: the pipes would not end with the ranks."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        handlers = self._pcontext.subprocess_handlers if isinstance(self._pcontext, SubprocessContext) else {}
        for handler in handlers.values():
            for file in filter(None, (handler._stdout, handler._stderr)):
                file.close()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """torch calls this repeatedly, and its own version ends all ranks when it sees one that has failed."""
        pids = {worker.global_rank: worker.id for worker in worker_group.workers}
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.ends.look(pids)
            if not self.ends.cause_may_come:
                break
            time.sleep(LOOK_SECONDS)
        if self.ends.failed:
            self._wake_stopped(self._running())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """torch calls it again where a second signal comes while it waits, and would wait for as long once more."""
        self._wake_stopped(self._running())
        began, sent = self._first_end = self._first_end or (time.monotonic(), death_sig)
        death_sig = signal.SIGKILL if time.monotonic() - began > TWICE else sent
        reminder = threading.Timer(SILENCE, self._name_those_left, (death_sig, timeout))
        reminder.daemon = True
        if death_sig != signal.SIGKILL:
            with contextlib.suppress(RuntimeError):  # no more threads
                reminder.start()
        try:
            super()._shutdown(death_sig, timeout)
        finally:
            reminder.cancel()

    def _running(self) -> dict[int, int]:
        """Ranks by pid; those that torch has reaped are left out, as their pid may belong to another process now."""
        return {one.id: one.global_rank for one in self._worker_group.workers if one.id and _is_running(one.id)}

    def _name_those_left(self, sent: signal.Signals, timeout: int) -> None:
        if left := ", ".join(f"rank {rank} (pid {pid})" for pid, rank in self._running().items()):
            note(
                f"still running {SILENCE:.0f} s after {sent.name}: {left}; killed {timeout} s after it, or now if you "
                "press Ctrl-C"
            )

    @staticmethod
    def _wake_stopped(pids: Iterable[int]) -> None:
        """Torch ends ranks by a signal that a stopped process does not handle, and waits 30 s for it."""
        for pid in pids:
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)


def _is_running(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
