"""Bound methods, held weakly, that are called when something happens anywhere in the process."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

Listener = Callable[..., None]


class Listeners:
    """The methods to call. They come and go on any thread, also while others are being called.

    What the garbage collector takes is swept when another one comes or goes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: tuple[weakref.WeakMethod[Listener], ...] = ()

    def __len__(self) -> int:
        return len(self._methods)

    def tell(self, *what: Any) -> None:
        """Call each."""
        for reference in self._methods:
            if (method := reference()) is not None:
                method(*what)

    def change(self, more: Listener | None = None, less: Listener | None = None) -> None:
        """Add one, drop one, and sweep those that are gone."""
        with self._lock:
            alive = (reference for reference in self._methods if (one := reference()) is not None and one != less)
            self._methods = (*alive, *([] if more is None else [weakref.WeakMethod(more)]))


def at_forks(**told: Callable[[], object]) -> None:
    """As :func:`os.register_at_fork`, where processes can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**told)


@functools.cache
def before_forks() -> Listeners:
    """Told before this process forks. Python keeps such an entry for good, so there is one for all."""
    listeners = Listeners()
    at_forks(before=listeners.tell)
    return listeners


@functools.cache
def in_children() -> Listeners:
    """Told in a child that was forked."""
    listeners = Listeners()
    at_forks(after_in_child=listeners.tell)
    return listeners
