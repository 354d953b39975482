"""Local ranks through torchrun's own launcher, and which of them failed first.

The ranks run ``python script.py`` as they would alone. Before that, one line of Python asks the kernel to kill the rank
when the launcher ends, in whatever way: prctl(2), PR_SET_PDEATHSIG, which survives exec.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..system_memory import kills_for_want_of_memory
from .agent import Agent
from .streams import Streams, Traceback

_TIED_TO_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
_TOLD_TO_END = -signal.SIGTERM


@dataclass(frozen=True)
class Failure:
    """The rank that failed first."""

    rank: int
    pid: int
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    """Its number."""
    traceback: str
    starved: bool = False
    """Whether it was SIGKILL, and the kernel has killed a process for lack of memory."""

    @property
    def how(self) -> str:
        """In words."""
        return f"killed by {signal_name(self.signal)}" if self.signal else f"exit code {self.exit_code}"

    @property
    def code(self) -> int:
        """As a shell would have it."""
        if self.signal is not None:
            return 128 + self.signal
        return self.exit_code or 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    failure: Failure | None = None
    stopped_by: int | None = None
    """The signal that this process received."""
    is_lost: bool = False
    """Whether some output of ranks could not be written."""

    @property
    def code(self) -> int:
        """What to exit with."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return self.failure.code if self.failure else int(self.is_lost)


class _Pipes(LogsSpecs):
    """Where torch's launcher sends the ranks' output."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """Called once, since there are no restarts."""
        out: dict[int, Any] = {rank: self._streams.out[rank].handed_out() for rank in envs}  # numbers for paths
        err: dict[int, Any] = {rank: self._streams.err[rank].handed_out() for rank in envs}
        return LogsDest(out, err, error_files=dict.fromkeys(envs, ""))

    @property
    def root_log_dir(self) -> str:
        """None of ours."""
        return ""


def launch(program: Sequence[str], ranks: int, out: BinaryIO, err: BinaryIO) -> Outcome:
    """Run ``python PROGRAM`` on ``ranks`` ranks of this host until all end, or one has failed and all were ended.

    Args:
        program: what follows ``python`` on the command line.
        ranks: at least one.
        out: gets their stdout.
        err: gets their stderr.
    """
    streams, kills = Streams(ranks, out, err), kills_for_want_of_memory()
    command = ["-u", *program]
    if sys.platform.startswith("linux"):
        command = ["-I", "-S", "-c", _TIED_TO_US, str(os.getpid()), *command]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup: torch would handle it all the same
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the launcher's own lines; ranks have their own logging
    agent = Agent([sys.executable, *command], ranks, _Pipes(streams), lambda rank: streams.err[rank].traceback())
    try:
        failures = agent.run().failures
    except SignalException as stop:
        return Outcome(stopped_by=int(stop.sigval))
    finally:
        logging.disable(before)
        streams.close()
    if not failures:
        return Outcome(is_lost=any(sink.is_full for sink in streams.sinks))
    failure = first_failure(failures, [stream.traceback() for stream in streams.err], agent.ends.failed)
    return Outcome(replace(failure, starved=failure.signal == signal.SIGKILL and kills_for_want_of_memory() > kills))


def first_failure(
    failures: Mapping[int, ProcessFailure], tracebacks: Sequence[Traceback | None], ended: Mapping[int, float]
) -> Failure:
    """Which rank is to blame: rather one that reports its own error than one that blames others; then the earliest.

    Of those that could not communicate, rather one that names no other: the system may have refused it something.

    Args:
        failures: by rank; also those that were told to end because others had failed.
        tracebacks: what each rank has printed last, by rank.
        ended: when those that ended by themselves did, by ``time.monotonic``.
    """

    def order(rank: int) -> tuple[bool, bool, bool, float]:
        told = tracebacks[rank]
        silent = told is None
        when = told.at if told is not None else ended.get(rank, float("inf"))
        blames, names = (told.is_consequence, told.names_another) if told is not None else (False, False)
        return silent and rank not in ended, blames, names, when

    rank = min(failures, key=order)
    found, told = failures[rank], tracebacks[rank]
    code: int = found.exitcode
    if rank not in ended and code == _TOLD_TO_END:
        code = 1  # it had printed its exception and was on its way out
    killed = code < 0
    text = told.text if told is not None else ""
    return Failure(rank, found.pid, None if killed else code, -code if killed else None, text)


def signal_name(number: int) -> str:
    """``SIGKILL``; the number where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
