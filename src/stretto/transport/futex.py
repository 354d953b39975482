"""Sleeping until a 32-bit word in shared memory changes, and waking who sleeps: futex(2), through the C library.

[Note: memory order]  A rank writes data, then a word that says so; another reads the word, then the data. On x86-64
stores become visible in the order of the program, and loads happen in it, so plain loads and stores do; the calls of
the interpreter in between keep the compiler from exchanging them. aarch64 promises neither. There ``fence()`` stands
between: a futex call that wakes nobody. Waking must not miss a sleeper that has just looked at the word, so the kernel
passes a full memory barrier before it looks for sleepers (kernel/futex: "smp_mb(); (A)" pairs with the sleeper's), at
every wake. A word itself is four aligned bytes, which both processors write and read in one piece. No sleep is lost:
the kernel compares the word with what the sleeper saw, under the lock that a wake takes.

[Note: nobody sleeps]  A wake costs 2 us, so one is spared where nobody sleeps: a rank writes its word, then looks who
says to be asleep; a sleeper says so, then the kernel looks at the word for it. One of the two sees the other, if on
both sides what is written is seen by all before anything is read. The sleeper has the kernel's barrier for that; the
other takes and gives back a lock, whose instructions are a full barrier on x86-64. On aarch64 they are not: there
everybody is woken without a look.
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
    """Why this machine has no futex that we can use; None if it has."""
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
        """Whether ``fence`` has anything to do: it is asked first where a call would cost too much."""
        self._lock = threading.Lock()

    def wake(self, address: int) -> None:
        """Wake everybody who sleeps on the word."""
        self._wake(self._number, address, _WAKE, _EVERYBODY, None, None, 0)

    def wait(self, address: int, seen: int, seconds: float) -> None:
        """Sleep until somebody wakes the word, unless it is no longer ``seen``. Returns early on signals."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        self._sleep(self._number, address, _WAIT, seen, ctypes.byref(limit), None, 0)

    def fence(self) -> None:
        """What was read and written before is so for all processors, before anything that follows."""
        if self.fenced:
            self._wake(self._number, ctypes.addressof(self._nobody), _WAKE, 1, None, None, 0)

    def may_look(self) -> bool:
        """Whether what is read from here on is read after what was written before is seen by all processors."""
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
