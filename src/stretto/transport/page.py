"""What a rank shows the other ranks of its host, and how they see it.

    | token | published | finished | retired | table of segments | ring of entries: where message n's tensor lies |

Only the rank itself writes its page; the others read. The two counters are the words that ranks sleep on, ``retired``
counts changes of the table. What different ranks look at lies in different cache lines.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import struct
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from . import memory
from .memory import Arena, Location, PeersMemory

TOKEN_BYTES = 16
_LINE_BYTES = 128  # two cache lines: processors fetch them in pairs
PUBLISHED, FINISHED, RETIRED = 1 * _LINE_BYTES, 2 * _LINE_BYTES, 3 * _LINE_BYTES
SEQUENCE = 2**32
"""Counters begin again at 0 when they have come here."""
ENTRIES = 1024
_TABLE = 4 * _LINE_BYTES
_RING = -(-(_TABLE + memory.TABLE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_ENTRY_BYTES = 64
_PAGE_BYTES = _RING + ENTRIES * _ENTRY_BYTES


@dataclass(frozen=True)
class Entry:
    """What a rank publishes of a message."""

    action: bytes
    """At most 16 bytes."""
    numel: int
    location: Location

    _LAYOUT = struct.Struct("<16sQQQQ")
    SIZE = _LAYOUT.size
    SAME = slice(0, 24)
    """The packed action and number of elements, which all ranks give alike."""

    def pack_into(self, buffer: mmap.mmap, number: int) -> None:
        """Write it as that of message ``number``."""
        at = self.location
        self._LAYOUT.pack_into(buffer, _at(number), self.action, self.numel, at.line, at.segment, at.offset)

    @classmethod
    def unpack(cls, packed: bytes) -> Entry:
        """Read it."""
        action, numel, *place = cls._LAYOUT.unpack(packed)
        return cls(action.rstrip(bytes(1)), numel, Location(*place))

    def __str__(self) -> str:
        return f"{self.action.decode(errors='replace')} of {self.numel} elements"


def _at(number: int) -> int:
    return _RING + (number % ENTRIES) * _ENTRY_BYTES


@dataclass(frozen=True)
class Address:
    """By which the others find a rank's page, and know that it is this one."""

    pid: int
    fd: int
    token: bytes


class Page:
    """This rank's page and arena, before it is known who else is on the host.

    Raises:
        OSError: the system does not give such memory.
    """

    def __init__(self, rank: int) -> None:
        fd, self.mapping = memory.create(_PAGE_BYTES)
        weakref.finalize(self, os.close, fd).atexit = False
        token = secrets.token_bytes(TOKEN_BYTES)
        self.mapping[:TOKEN_BYTES] = token
        self.address = Address(os.getpid(), fd, token)
        self._words = memoryview(self.mapping).cast("I")
        table = memoryview(self.mapping)[_TABLE : _TABLE + memory.TABLE_BYTES]
        self.arena = Arena(table, weakref.WeakMethod(self._segment_retired), rank)

    def _segment_retired(self) -> None:
        self.set(RETIRED, self._words[RETIRED // 4] + 1)

    def set(self, word: int, value: int) -> None:
        """Write one of the words."""
        self._words[word // 4] = value % SEQUENCE

    def publish(self, number: int, entry: Entry) -> None:
        """Say where the tensor of message ``number`` lies; ``PUBLISHED`` then says that this was said."""
        entry.pack_into(self.mapping, number)


class Peer:
    """One rank as its peers on the host see it: its page, its memory, its life.

    Raises:
        OSError: the page cannot be opened, or is not the one that was announced.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.pid = address.pid
        self._alive = _open_pidfd(address.pid)
        self._mapping = memory.open_peers(address.pid, address.fd, _PAGE_BYTES)
        if self._mapping[:TOKEN_BYTES] != address.token:
            raise OSError(f"process {address.pid} here is another one than rank {rank}")
        self.words = memoryview(self._mapping).cast("I")
        """Read at ``PUBLISHED // 4`` and so on."""
        self.base = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        """The address of the page here."""
        self.memory = PeersMemory(address.pid, memoryview(self._mapping)[_TABLE : _TABLE + memory.TABLE_BYTES])
        self._retired = 0

    def packed_entry(self, number: int) -> bytes:
        """What it has published of the message, as bytes, which compare fast."""
        at = _at(number)
        return self._mapping[at : at + Entry.SIZE]

    def has_moved(self) -> bool:
        """Whether memory was retired since the last look. What is mapped of it here is dropped."""
        retired = self.words[RETIRED // 4]
        if retired == self._retired:
            return False
        self._retired = retired
        self.memory.forget_retired()
        return True

    def is_dead(self) -> bool:
        """Whether the process has ended, reaped or not."""
        if self._alive is None:
            return not os.path.exists(f"/proc/{self.pid}")
        poll = select.poll()
        poll.register(self._alive.fileno(), select.POLLIN)
        return bool(poll.poll(0))


def _open_pidfd(pid: int) -> Any:
    try:
        return os.fdopen(os.pidfd_open(pid), "rb", buffering=0)
    except (AttributeError, OSError):  # Linux before 5.3, or forbidden in this sandbox
        return None
