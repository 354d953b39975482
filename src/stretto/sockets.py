"""Asks the system whether the other end of a store's connection has closed it.

A call to a store that has ended would find that out too, but torch then prints a stack from C++. It would do so even
where all is well, and rank 0, which has the store, has only ended before the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store


def server_of(store: Store) -> Any:
    """The store under all prefixes."""
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


def shut(number: int) -> None:
    """Whoever waits for the other end fails at once."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        one.shutdown(socket.SHUT_RDWR)


def _leading_to(port: int | None) -> set[int]:
    """The numbers of this process's sockets with that port at their other end.

    Read in /proc, which touches none of them: a socket object around one could change whether it blocks.
    """
    if port is None:
        return set()
    sockets = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(table, port)}
    return {number for number in _numbers() if _is_one_of(number, sockets)} if sockets else set()


def _inodes(table: str, port: int) -> list[str]:
    try:
        lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
    except OSError:  # no /proc, or no such table
        return []
    return [columns[9] for columns in map(str.split, lines) if columns[2].endswith(f":{port:04X}")]


def _numbers() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []


def _is_one_of(number: int, sockets: set[str]) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") in sockets
    except OSError:  # it is closed by now
        return False
