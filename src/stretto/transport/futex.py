"""Sleeping until a 32-bit word in shared memory changes, and waking the sleepers: futex(2), through the C library.

[Note: memory order]  A rank writes data, then a word that says so; another reads the word, then the data. On x86-64
stores become visible, and loads happen, in program order, so plain loads and stores suffice; the interpreter's calls in
between keep the compiler from reordering them. aarch64 promises neither. There ``fence()`` is called in between: a
futex call that wakes nobody. Since a wake must not miss a sleeper that has just looked at the word, the kernel executes
a full memory barrier before it looks for sleepers (kernel/futex: "smp_mb(); (A)" pairs with the sleeper's), at every
wake. A word itself is four aligned bytes, which both processors write and read in one piece. No sleep is lost: the
kernel compares the word with what the sleeper saw, under the lock that a wake takes.

[Note: nobody sleeps]  A wake costs 2 us, so it is left out if nobody sleeps. A rank writes its word, then checks which
ranks say that they sleep; a sleeper says so, then the kernel checks the word for it. One of the two sees the other,
provided that on both sides the write is visible to all before the read. For the sleeper, the kernel's barrier sees to
that; the other rank takes and releases a lock, whose instructions are a full barrier on x86-64. On aarch64 they are
not: there all are woken without a check.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str | None:
    """Why this machine has no usable futex; None if it has one."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no futex"
    if platform.machine() not in _NUMBERS or ctypes.sizeof(ctypes.c_void_p) != 8:
        return f"the memory order of {platform.machine()} was not looked at"
    return None


class Futex:
    """The two calls, bound once. Words are given by address; any process that maps the memory can be woken."""

    def __init__(self) -> None:
        # Waking keeps the interpreter's lock, since it returns at once; sleeping must let other threads run.
        self._wake = _bind(ctypes.PyDLL(None, use_errno=True))
        self._sleep = _bind(ctypes.CDLL(None, use_errno=True))
        self._number = _NUMBERS[platform.machine()]
        self._nobody = ctypes.c_uint32()
        self.fenced = platform.machine() not in ("x86_64", "AMD64")
        """Whether ``fence`` does anything: checked first where a call would cost too much."""
        self._lock = threading.Lock()

    def wake(self, address: int) -> None:
        """Wake all that sleep on the word."""
        self._wake(self._number, address, _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, address: int, seen: int, seconds: float) -> None:
        """Sleep until the word is woken, unless its value is no longer ``seen``. Returns early on signals."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._sleep(self._number, address, _WAIT, seen, ctypes.byref(limit), None, 0)

    def fence(self) -> None:
        """A memory barrier: earlier reads and writes take effect, on all processors, before any that follow."""
        if self.fenced:
            self._wake(self._number, ctypes.addressof(self._nobody), _WAKE, 1, None, None, 0)

    def may_look(self) -> bool:
        """Whether later reads happen only after earlier writes are visible to all processors."""
        if self.fenced:
            return False
        with self._lock:
            return True


def _bind(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    call = library.syscall
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    call.argtypes += [ctypes.c_uint32]
    return call
