"""What a process group may still work on is never freed if nobody waits for it any more.

[Note: letting go]  A thread that drops the last reference to a tensor that Python has seen takes the interpreter's
lock. The same holds for the last reference to a collective that was sent in backward: torch keeps the sending thread's
state with it, and autograd leaves its context variables there. A Gloo thread that asks for the lock while the
interpreter ends aborts the process: "terminate called without an active exception". So the program ends only when
nothing is under way (under_way.py). What does not end before another rank's sockets close is referenced by Python for
ever, so that Gloo's thread never drops the last reference. Callbacks of a comm hook's future ask for the lock all the
same.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, TypeVar

_W = TypeVar("_W")


def never_free(held: object) -> None:
    """Keep it to the end of the process: Python would drop its own references when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class InFlight:
    """What was sent over one process group and is still referenced. The rest has been waited for."""

    def __init__(self) -> None:
        self._works = weakref.WeakValueDictionary[int, Any]()

    def add(self, work: _W) -> _W:
        """Among them from now on."""
        self._works[id(work)] = work
        return work

    def _referenced(self) -> list[Any]:
        """In one go: another thread may send meanwhile, which a loop over weak references does not survive."""
        return [work for reference in self._works.valuerefs() if (work := reference()) is not None]

    def is_under_way(self) -> bool:
        """Whether any of it is."""
        return not all(work.is_completed() for work in self._referenced())

    def never_free(self, group: object) -> None:
        """Never free what is under way, nor the group, which would wait for it."""
        for work in self._referenced():
            if not work.is_completed():
                never_free(work)
        never_free(group)
