"""Waiting for what other ranks write into the store."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .line import Line

_HURRY_SECONDS = 0.4
"""After so long one asks more rarely: with many ranks the store has a key of each to look for, for each of them."""


class Silent(RuntimeError):
    """A store has not answered for a while, and may yet."""


class AwaitedKeys:
    """Keys of a store that other ranks will set, to be waited for as if it were a collective.

    Args:
        line: to a store that all ranks see.
        keys: the keys that are waited for.
        meanwhile: called again and again while one waits.
        reads: it is complete when it has been read as well: a store may fall silent between the two.
    """

    is_carried = False
    """By a transport: nothing is under way in one that is given up."""

    def __init__(self, line: Line, *keys: str, meanwhile: Callable[[], object] = bool, reads: bool = True) -> None:
        self._store: Any = line
        self._reads = reads
        self._said: list[bytes] = []
        self._keys = [*keys]
        self._meanwhile = meanwhile
        self._began = math.inf
        self._pause = 20e-6

    def comes_soon(self) -> bool:
        """Wait for as long as it takes where all is well."""
        with contextlib.suppress(RuntimeError):
            self.wait(timedelta(seconds=0.2))
            return True
        return False

    def is_completed(self) -> bool:
        """Whether all are there, as far as is known."""
        if self._said:
            return True
        try:
            is_there = bool(self._store.check(self._keys))
            if is_there and self._reads:
                self._said = self._read()
            return is_there
        except Silent:
            return False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Ask the store again and again: its own wait takes a second at least, or warns from C++ when it is over.

        Raises:
            RuntimeError: the time is over; wait again.
        """
        seconds = math.inf if timeout is None else timeout.total_seconds()
        until = (now := time.monotonic()) + seconds
        self._began = min(now, self._began)  # one may wait in slices
        while not self.is_completed():
            if (now := time.monotonic()) > until:
                raise RuntimeError(f"no answer within {seconds:.0f} s")
            self._meanwhile()
            time.sleep(self._pause)
            self._pause = min(1.2 * self._pause, 5e-3 if now - self._began < _HURRY_SECONDS else 50e-3)

    def _read(self) -> list[bytes]:
        several: bool = len(self._keys) > 1 and self._store.has_extended_api()
        return [*(self._store.multi_get(self._keys) if several else map(self._store.get, self._keys))]

    def said(self) -> list[str]:
        """What they say, when all are there."""
        return [one.decode() for one in self._said]

    def take(self) -> bytes:
        """What the first says; then it is gone."""
        with contextlib.suppress(RuntimeError):  # some stores cannot forget
            self._store.delete_key(self._keys[0])
        return self._said[0]
