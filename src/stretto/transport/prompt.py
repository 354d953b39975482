"""Threads that carry bytes, and ranks that others wait for, run first on a core that also computes.

[Note: short slices]  A message through Gloo is handed from thread to thread: one reads the socket, one of two runs the
collective, which writes the next piece. On a busy core, a thread that wakes up waits until the time slice of the
running thread is over: 1.4 to 3 ms with Linux's scheduler since 6.6 (EEVDF, which lets a slice end before it decides
again). Meanwhile the link is idle. A thread that asks for a shorter slice runs first (since 6.12). It does not get more
of the processor, only gets it sooner; it needs no privilege; and on an older kernel nothing happens.

A rank that sleeps in shared memory asks for short slices only while it waits. A new thread has the slices of the one
that makes it: OpenMP's threads, which torch makes for the first large operation of a thread, would keep them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

SLICE_NANOSECONDS = 100_000
"""The shortest that Linux takes."""
_NUMBERS = {"x86_64": (314, 315), "AMD64": (314, 315), "aarch64": (274, 275), "arm64": (274, 275)}
"""Numbers of the system calls in ``_Calls``, which the C library does not have."""
_FAIR = (0, 3)
"""The policies that have slices: SCHED_OTHER and SCHED_BATCH."""
_GLOO = (b"gloo_", b"pt_gloo_")
"""How the names of Gloo's threads begin."""


class _Attributes(ctypes.Structure):
    """struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def let_gloo_go_first() -> None:
    """Give the present Gloo threads of this process the shortest slices. Not collective; harmless twice."""
    if _system_calls() is None:
        return
    with contextlib.suppress(OSError):  # without a free descriptor they keep their slices
        for comm in Path("/proc/self/task").glob("*/comm"):  # none without /proc
            with contextlib.suppress(OSError):  # a thread has ended
                if comm.read_bytes().startswith(_GLOO):
                    shorten(int(comm.parent.name))


def shorten(thread: int) -> None:
    """Give a thread of this process, by its number, the shortest slices. Its policy and niceness stay."""
    if (found := _attributes_of(thread)) is not None:
        _set(thread, found, SLICE_NANOSECONDS)


class WokenFirst:
    """From ``begin`` to ``end`` this thread has the shortest slices; afterwards its former ones."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        """Harmless twice."""
        if not self._before and (found := _attributes_of(0)) is not None:
            self._before = found.runtime
            _set(0, found, SLICE_NANOSECONDS)

    def end(self) -> None:
        """Harmless without ``begin``, which may follow again."""
        if self._before and (now := _attributes_of(0)) is not None:  # its niceness may have been changed meanwhile
            _set(0, now, self._before)
        self._before = 0


def _attributes_of(thread: int) -> _Attributes | None:
    """None if it has no slices, or the kernel is too old."""
    found = _Attributes()
    if (calls := _system_calls()) is None:
        return None
    done = calls.get(thread, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found if done and found.policy in _FAIR and found.runtime else None


def _set(thread: int, attributes: _Attributes, nanoseconds: int) -> None:
    attributes.size, attributes.runtime = ctypes.sizeof(attributes), nanoseconds
    if (calls := _system_calls()) is not None:  # refused in some sandboxes: then nothing changes
        calls.set(thread, ctypes.byref(attributes), 0, 0)


class _Calls(NamedTuple):
    set: Any
    get: Any


@functools.cache
def _system_calls() -> _Calls | None:
    """sched_setattr(2) and sched_getattr(2); None if their numbers are not known."""
    numbers = _NUMBERS.get(platform.machine()) if sys.platform.startswith("linux") else None
    if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:  # else they have other numbers
        return None
    call = ctypes.PyDLL(None).syscall  # keeps the interpreter's lock: another thread might have it for milliseconds
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    return _Calls(*[functools.partial(call, number) for number in numbers])
