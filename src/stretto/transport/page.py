"""What a rank shows the other ranks of its host, and how they see it.

    | token | published | finished | retired | asleep | broken | table of segments | ring of entries |

An entry says where the tensor of a message lies, or holds two numbers instead.

Only the rank itself writes its page; the others read. The two counters are the words that ranks sleep on. ``asleep``
says that this rank sleeps or is about to, ``retired`` counts changes of the table, ``broken`` says why this rank will
never go on. Fields that are polled for different purposes lie in different cache lines.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from . import memory
from .futex import Futex
from .life import Life
from .mapped import PeersMemory
from .memory import LINE_BYTES, Arena, Location

TOKEN_BYTES = 16
PUBLISHED, FINISHED, RETIRED, ASLEEP, _BROKEN = (n * LINE_BYTES for n in range(1, 6))
SEQUENCE = 2**32
"""Counters restart from 0 at this value."""
ENTRIES = 1024
_REASON_BYTES = 8 * LINE_BYTES
_END = b"\x03"
"""Ends the reason. It may be seen before the text, or the text with gaps: cache lines arrive in any order."""
_TABLE = _BROKEN + _REASON_BYTES
_RING = -(-(_TABLE + memory.TABLE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
DYING_SECONDS = 0.5
"""How long a process that is being killed may still look alive."""
_ENTRY_BYTES = 64
_PAGE_BYTES = _RING + ENTRIES * _ENTRY_BYTES


@dataclass(frozen=True)
class Entry:
    """What a rank publishes about a message."""

    action: bytes
    """At most 16 bytes."""
    numel: int
    location: Location

    LAYOUT = struct.Struct("<16sQQQQ")
    SIZE = LAYOUT.size
    SAME = slice(0, 24)
    """The packed action and number of elements, which all ranks give alike."""

    @classmethod
    def unpack(cls, packed: bytes) -> Entry:
        """Read it."""
        action, numel, *place = cls.LAYOUT.unpack(packed)
        return cls(action.rstrip(bytes(1)), numel, Location(*place))

    @staticmethod
    def numbers(packed: bytes) -> tuple[int, int]:
        """The two that stand for a location."""
        _, _, first, second, _ = Entry.LAYOUT.unpack(packed)
        return first, second

    def __str__(self) -> str:
        action = self.action.decode(errors="replace")
        return _CALLS.get(action, f"{action} of {self.numel} elements")


_CALLS = {"optimizer.step": "optimizer.step()", "optimizer.turn": "optimizer.step(), train() or eval()"}
"""What to call these actions in messages; their number of elements does not matter."""


@dataclass(frozen=True)
class Address:
    """How the other ranks find a rank's page, and recognise it."""

    pid: int
    fd: int
    token: bytes


class Page:
    """This rank's page and arena, made before the other ranks of the host are known.

    Raises:
        OSError: the system does not give such memory.
    """

    def __init__(self, rank: int) -> None:
        fd, self.mapping = memory.create(_PAGE_BYTES)
        memory.close_with(self, fd)
        token = secrets.token_bytes(TOKEN_BYTES)
        self.mapping[:TOKEN_BYTES] = token
        self.address = Address(os.getpid(), fd, token)
        self.futex = Futex()
        self._words = memoryview(self.mapping).cast("I")
        table = memoryview(self.mapping)[_TABLE : _TABLE + memory.TABLE_BYTES]
        self.arena = Arena(table, weakref.WeakMethod(self._segment_retired), rank)

    def _segment_retired(self) -> None:
        self.futex.fence()
        self.set(RETIRED, self._words[RETIRED // 4] + 1)

    def set(self, word: int, value: int) -> None:
        """Write one of the words."""
        self._words[word // 4] = value % SEQUENCE

    def publish(self, number: int, action: bytes, numel: int, at: Location) -> None:
        """Write where the tensor of message ``number`` lies; the counter ``PUBLISHED`` then announces it."""
        Entry.LAYOUT.pack_into(self.mapping, _RING + number % ENTRIES * _ENTRY_BYTES, action, numel, *at)

    def say_broken(self, reason: str) -> None:
        """Say why this rank will never go on. Only the first reason is kept."""
        if not self.mapping[_BROKEN]:
            text = reason.encode(errors="replace").replace(bytes(1), b" ")[: _REASON_BYTES - 1] + _END
            self.mapping[_BROKEN : _BROKEN + len(text)] = text


class Peer:
    """One rank as its peers on the host see it: its page, its memory, its life.

    Raises:
        OSError: the page cannot be opened, or is not the one that was announced.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.pid = address.pid
        self.address = address
        self._life = Life(address.pid)  # first: if it is another process by now, the token tells
        self._mapping = memory.open_peers(address.pid, address.fd, _PAGE_BYTES)
        if self._mapping[:TOKEN_BYTES] != address.token:
            raise OSError(f"process {address.pid} here is not rank {rank}")
        self.words = memoryview(self._mapping).cast("I")
        """The page as words: index ``PUBLISHED // 4`` and so on."""
        self.base = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        """The address of the page here."""
        self.memory = PeersMemory(address.pid, memoryview(self._mapping)[_TABLE : _TABLE + memory.TABLE_BYTES])
        self.retired = 0
        """The value of its ``RETIRED`` word at the last check."""

    def packed_entry(self, number: int) -> bytes:
        """What it has published about the message, as bytes, which compare fast."""
        at = _RING + number % ENTRIES * _ENTRY_BYTES
        return self._mapping[at : at + Entry.SIZE]

    def has_moved(self) -> bool:
        """Whether memory was retired since the last check."""
        retired = self.words[RETIRED // 4]
        if retired == self.retired:
            return False
        self.retired = retired
        return True

    def reason(self) -> str:
        """Why it will never go on; empty if it has not said so, or if the text is not complete yet."""
        text, end, _ = self._mapping[_BROKEN:_TABLE].partition(_END)
        return text.decode(errors="ignore") if end and 0 not in text else ""

    def is_dead(self) -> bool:
        """Whether the process has ended, reaped or not."""
        return self._life.is_over()


Missing = tuple[Peer, int, int]
"""A rank that must go on first, the word that will say so, and the word's present value."""
Whose = TypeVar("Whose", Peer, Address)


def behind(peers: Sequence[Peer], word: int, number: int) -> Missing | None:
    """The first rank whose word has not reached the number of a message, if any."""
    for peer in peers:
        seen = peer.words[word // 4]
        if (seen - number) % SEQUENCE >= SEQUENCE // 2:
            return peer, word, seen
    return None


def first_dead(those: Sequence[Whose]) -> Whose | None:
    """A rank whose process has ended. Its files and sockets go a moment earlier, so this waits for a moment."""
    until = time.monotonic() + DYING_SECONDS
    while True:
        for one in those:
            if Life(one.pid).is_over():
                return one
        if time.monotonic() > until:
            return None
        time.sleep(0.001)
