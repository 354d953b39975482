"""Whether a process of this host still lives."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from . import memory


def started_at(pid: int) -> str:
    """What tells a process from a later one of its pid; empty where there is none, or no /proc."""
    return _state_of(pid)[1]


def is_over(pid: int, started: str) -> bool:
    """Whether that process has ended, reaped or not. A killed child that nobody reaped is ``Z``."""
    state, now = _state_of(pid)
    if not state:
        return not _exists(pid)
    return state in ("Z", "X") or (started != "" and now != started)  # unknown where it could not be read


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped that process, as far as can be read."""
    return _state_of(pid)[0] in ("T", "t")


class Life:
    """Of one process, which is looked at often."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._poll: select.poll | None = None
        self._started = started_at(pid)
        with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3, or forbidden in this sandbox
            fd = os.pidfd_open(pid)
            memory.close_with(self, fd)
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)

    def is_over(self) -> bool:
        """Whether it has ended."""
        return is_over(self._pid, self._started) if self._poll is None else bool(self._poll.poll(0))


def _exists(pid: int) -> bool:
    """Where nothing of it can be read: /proc may hide it, as another user's, or there is no descriptor left."""
    try:
        os.kill(pid, 0)  # never on Windows, where this ends it: there nobody is known to be of this host
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and another user's
        pass
    return True


def _state_of(pid: int) -> tuple[str, str]:
    """State letter and start time; empty where there is no such process, or it cannot be read.

    Those of its first thread: where qemu runs programs of another processor, ``/proc/PID/stat`` of the asking process
    is qemu's own, with another time than its peers read.
    """
    try:
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
    except OSError:
        return "", ""
    fields = stat.rpartition(b")")[2].decode().split()  # before it, the name: any bytes
    return fields[0], fields[19]
