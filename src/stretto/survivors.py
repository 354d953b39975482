"""Whether anything is left of some objects: of what was attached, or of the parameters of a plan (membership.py).

    module, its parameters, all that has a hook ──(held weakly)──> the last one goes ──> the reducer cuts its circles

The memory of gradients, descriptors and the thread go with the last reference to a reducer. But its own parts refer
back to it, and Python's collector finds such circles late, since it counts objects and not bytes. A program that
attaches one model after the other would hold several. So the circles are cut when a handle is detached, and when
nothing is left that could call the reducer: a handle holds its module, and gradient hooks live with their parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable


class Survivors:
    """Some objects, held weakly.

    Args:
        none_left: called when the last of them is gone; held weakly. That may be at any moment, in any thread, the
            collector's moments too: it must take no lock and change no table of the process, nor raise.
    """

    def __init__(self, none_left: Callable[[], None]) -> None:
        self._none_left = weakref.WeakMethod(none_left)
        self._alive: dict[int, weakref.ref[object]] = {}

    def follow(self, objects: Iterable[object]) -> None:
        """These and no others; none, to be called no more."""
        self._alive = {}
        for one in objects:
            self.also(one)

    def also(self, one: object) -> None:
        """This one, too."""
        self._alive[id(one)] = weakref.ref(one, functools.partial(self._gone, id(one)))

    def _gone(self, key: int, _: object) -> None:
        followed = self._alive.pop(key, None) is not None  # not if the collector had found it before ``follow``
        if followed and not self._alive and (none_left := self._none_left()) is not None:
            none_left()
