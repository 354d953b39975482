"""Waiting for what other ranks write into the store."""

from __future__ import annotations

import contextlib
import math
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store


class Word:
    """Keys of a store that other ranks will set, to be waited for as if it were a collective."""

    def __init__(self, store: Store, *keys: str) -> None:
        self._store = store
        self._keys = [*keys]

    def comes_soon(self) -> bool:
        """Wait for as long as it takes where all is well."""
        with contextlib.suppress(RuntimeError):
            self.wait(timedelta(seconds=0.2))
            return True
        return False

    def is_completed(self) -> bool:
        """Whether all are there."""
        return bool(self._store.check(self._keys))

    def wait(self, timeout: timedelta | None = None) -> None:
        """Ask the store again and again: its own wait takes a second at least, or warns from C++ when it is over.

        Raises:
            RuntimeError: the time is over; wait again.
        """
        seconds = math.inf if timeout is None else timeout.total_seconds()
        until, pause = time.monotonic() + seconds, 20e-6
        while not self.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"no answer within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(1.2 * pause, 5e-3)

    def said(self) -> list[str]:
        """What they say, when all are there."""
        return [self._store.get(key).decode() for key in self._keys]

    def take(self) -> bytes:
        """What the first says; then it is gone."""
        value = bytes(self._store.get(self._keys[0]))
        with contextlib.suppress(RuntimeError):  # some stores cannot forget
            self._store.delete_key(self._keys[0])
        return value
