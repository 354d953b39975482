"""What stretto asks of torch's autograd engine, all in one place.

[Note: end of a pass]  ``queue_callback`` runs a function at the end of the *current* graph task. Inside a reentrant
checkpoint that is a nested one: there the enclosing autograd node is not None, and we queue again from that node's
post hook, until the outermost task ends. If backward raises, the engine drops its callbacks unrun: the callback object
dies, a weak reference tells us at once, and the pass is given up while the exception is still on its way to the user.

[Note: nested tasks]  Within one graph task a parameter's gradient is final when its hook fires. A reentrant checkpoint
runs tasks of its own, and a layer used in two of them fires twice. So a pass in which a nested task shows up launches
nothing more before its end; then every gradient is final.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

NO_TASK = -2
"""No graph task has this id, so the first hook of every pass finds a task that it does not know."""

current_task: Callable[[], int] = torch._C._current_graph_task_id


class _Callback:
    """Handed to the engine and held by nobody else, so that its death means that the engine dropped it."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        self._call()


class OutermostEnd:
    """Tells when the outermost backward that is running ends, or that it was dropped because something raised.

    Args:
        ended: called on the thread that called backward; what it raises comes out of ``backward()``.
        dropped: called instead when backward raised.
    """

    def __init__(self, ended: Callable[[], None], dropped: Callable[[], None]) -> None:
        self._ended = ended
        self._dropped = dropped
        self._held: weakref.ref[_Callback] | None = None
        self._waits_for_enclosing = False

    def watch(self) -> None:
        """Call from a gradient hook, at the first of a pass."""
        self._waits_for_enclosing = False
        self._hold(Variable._execution_engine.queue_callback, self._task_ended)

    def watch_nested(self) -> None:
        """Call from the first gradient hook of another task in the same pass.

        If an earlier nested task has ended, all depends on its enclosing node; should that have failed while the user
        kept its graph, nobody would tell us. So watch this task too; ``ended`` may then be called twice.
        """
        if self._waits_for_enclosing:
            self.watch()

    def _hold(self, give: Callable[[_Callback], object], call: Callable[[], None]) -> Any:
        callback = _Callback(call)
        self._held = weakref.ref(callback, self._died)
        return give(callback)

    def _died(self, reference: weakref.ref[_Callback]) -> None:
        if reference is self._held:
            self._held = None
            self._dropped()

    def _task_ended(self) -> None:
        self._held = None
        enclosing: Any = torch._C._current_autograd_node()
        if enclosing is None:
            self._ended()
            return

        def again() -> None:
            self.watch()
            handle.remove()

        self._waits_for_enclosing = True
        handle = self._hold(enclosing.register_hook, again)


def inside_custom_backward() -> bool:
    """Whether the calling hook runs in a backward inside a backward. A walk up the frames: once a pass, about 1 us."""
    frame: FrameType | None = sys._getframe(1)
    code = BackwardCFunction.apply.__code__
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
