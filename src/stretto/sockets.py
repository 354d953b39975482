"""Whether the other end of a store's connection has closed it, asked of the system.

A call to a store that has ended finds that out too, and torch prints a stack from C++ then: also where all is well, and
rank 0, which has the store, has only ended before the others.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store


def server_of(store: Store) -> Any:
    """What is beneath all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def cloned(store: Any) -> tuple[Store, int | None]:
    """A connection of its own to the same store, and the number of its socket, where that can be told.

    Raises:
        RuntimeError: as ``store.clone()``.
    """
    port = getattr(server_of(store), "port", None)
    before = _leading_to(port)
    clone = store.clone()
    found = [*(_leading_to(port) - before)]
    return clone, found[0] if len(found) == 1 else None  # another thread may have connected there meanwhile


def is_closed(number: int) -> bool:
    """Whether the other end has closed it, or it is broken."""
    waiting = select.poll()
    waiting.register(number, select.POLLRDHUP)
    return bool(waiting.poll(0))


def _leading_to(port: int | None) -> set[int]:
    """The numbers of sockets with that port at their other end."""
    try:
        numbers = [] if port is None else [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return set()
    return {number for number in numbers if _peer_port(number) == port}


def _peer_port(number: int) -> int | None:
    try:
        copy = socket.socket(fileno=os.dup(number))
    except OSError:  # it is closed, or no socket
        return None
    with copy:
        try:
            return int(copy.getpeername()[1])
        except (OSError, IndexError, TypeError, ValueError):  # of another family
            return None
