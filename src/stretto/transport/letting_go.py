"""What a process group may go on with is never freed, where nobody waits for it any more.

[Note: letting go]  The last to let go of a tensor that Python has seen takes the interpreter's lock. So does the last
to let go of a collective that was sent in backward: torch keeps with it what the sending thread had, and autograd
leaves its context variables there. A thread of Gloo that asks for the lock while the interpreter ends aborts the
process: "terminate called without an active exception". So the program ends when nothing is under way (under_way.py).
What does not end before another rank's sockets close is held by Python for ever, and Gloo's thread is not the last.
Callbacks of a comm hook's future ask for the lock all the same.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, TypeVar

_W = TypeVar("_W")


def never_free(held: object) -> None:
    """Keep it to the end of the process: what Python alone holds it lets go at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class InFlight:
    """What was sent over one process group, as far as somebody holds it. What nobody holds has been waited for."""

    def __init__(self) -> None:
        self._works = weakref.WeakSet[Any]()

    def add(self, work: _W) -> _W:
        """Among them from now on."""
        self._works.add(work)
        return work

    def never_free(self, group: object) -> None:
        """Neither what is under way nor the group, which would wait for that."""
        for work in [*self._works]:
            if not work.is_completed():
                never_free(work)
        never_free(group)
