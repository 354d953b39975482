"""Whether a process of this host still lives."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

from . import memory


def started_at(pid: int) -> str:
    """Distinguishes a process from a later one with its pid; empty if there is none, or no /proc."""
    return _state_of(pid)[1]


def is_over(pid: int, started: str) -> bool:
    """Whether that process has ended, reaped or not. A killed child that was not reaped has state ``Z``."""
    state, now = _state_of(pid)
    if not state:
        return not _exists(pid)
    return state in ("Z", "X") or (started != "" and now != started)  # unknown where it could not be read


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped that process, as far as can be read."""
    return _state_of(pid)[0] in ("T", "t")


class Life:
    """The life of one process, which is checked often."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd: int | None = None
        self._started = started_at(pid)
        with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3, or forbidden in this sandbox
            self._fd = os.pidfd_open(pid)
            memory.close_with(self, self._fd)

    def is_over(self) -> bool:
        """Whether it has ended."""
        if self._fd is None:
            return is_over(self._pid, self._started)
        look = select.poll()  # a new one, which no other thread uses: Python refuses two at once
        look.register(self._fd, select.POLLIN)
        return bool(look.poll(0))


def _exists(pid: int) -> bool:
    """For when nothing of it can be read: /proc hides other users' processes, or no descriptor is left."""
    try:
        os.kill(pid, 0)  # never on Windows, where this would end it
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and is another user's
        pass
    return True


def _state_of(pid: int) -> tuple[str, str]:
    """State letter and start time; empty if there is no such process, or it cannot be read.

    They are read from its first thread: if qemu runs programs for another processor, ``/proc/PID/stat`` of the process
    itself is qemu's own, with another time than its peers read.
    """
    try:
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
    except OSError:
        return "", ""
    fields = stat.rpartition(b")")[2].decode().split()  # before it, the name: any bytes
    return fields[0], fields[19]
