"""What ranks print: each line with its rank before it, through pipes, and the end of each stderr kept.

No file is written. A pipe's writing end is handed to the launcher as ``/proc/self/fd/N``, since it wants a path.
"""

from __future__ import annotations

import collections
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

KEPT_LINES = 400
_BEGINNING = "Traceback (most recent call last):"
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_OF_TORCH = re.compile(rb"\[rank\d+\]: ")  # torch puts the rank before each line of an exception, as we do
_OF_CPP = re.compile(r"\[[IWEF]\d")  # torch's C++ log, which goes on after the exception
_CONSEQUENCE = re.compile(
    r"^(stretto\.errors\.(PeerError|CommunicationError)|torch\.distributed\.\w*DistBackendError|RuntimeError: .*"
    r"(gloo|Gloo|Connection (reset|closed|refused)))"
)


@dataclass(frozen=True)
class Traceback:
    """The last that a rank has printed."""

    text: str
    at: float
    """When its first line came, by ``time.monotonic``."""

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank has failed."""
        return any(_CONSEQUENCE.match(line) for line in self.text.splitlines())


class Stream:
    """One pipe out of one rank, forwarded by a thread of its own.

    Args:
        rank: whose.
        sink: where its lines go.
        lock: held while a line is written, so that lines stay whole.
    """

    def __init__(self, rank: int, sink: BinaryIO, lock: threading.Lock) -> None:
        self._reading, self._writing = os.pipe()
        self._prefix = f"[rank {rank}] ".encode()
        self._sink: BinaryIO | None = sink
        self._lock = lock
        self._kept: collections.deque[tuple[float, str]] = collections.deque(maxlen=KEPT_LINES)
        self._closed = False
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """Opening it in this process gives the writing end."""
        return f"/proc/self/fd/{self._writing}"

    def close(self, seconds: float) -> None:
        """Wait until all is forwarded, but not for ever: what a rank has left running may hold the pipe."""
        if not self._closed:
            self._closed = True
            os.close(self._writing)
        self._thread.join(seconds)

    def traceback(self) -> Traceback | None:
        """The last one in what was kept."""
        with self._lock:
            kept = list(self._kept)
        return last_traceback([line for _, line in kept], [at for at, _ in kept])

    def _forward(self) -> None:
        left = b""
        while chunk := os.read(self._reading, 1 << 16):
            *lines, left = (left + chunk).split(b"\n")
            self._write(lines)
        self._write([left] if left else [])
        os.close(self._reading)

    def _write(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            shown = line.removesuffix(b"\r").rpartition(b"\r")[2]  # of a progress bar, its last state
            if found := _OF_TORCH.match(shown):
                shown = shown[found.end() :]
            with self._lock:
                self._kept.append((time.monotonic(), shown.decode(errors="replace")))
                self._show(shown)

    def _show(self, line: bytes) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(self._prefix + line + b"\n")
            self._sink.flush()
        except (OSError, ValueError):  # nobody reads any more; the rank must not notice
            self._sink = None


def last_traceback(lines: Sequence[str], times: Sequence[float]) -> Traceback | None:
    """The last one, with those that it names as its cause, without what C++ printed after it."""
    beginnings = [number for number, line in enumerate(lines) if line.startswith(_BEGINNING)]
    if not beginnings:
        return None
    first = beginnings[-1]
    for earlier in reversed(beginnings[:-1]):
        if not any(line.startswith(_LINKS) for line in lines[earlier:first]):
            break
        first = earlier
    text = [line for line in lines[first:] if not _OF_CPP.match(line)]
    return Traceback("\n".join(text).rstrip(), times[first])


class Streams:
    """Both pipes of all ranks.

    Args:
        ranks: how many.
        out: where their stdout goes.
        err: where their stderr goes.
    """

    def __init__(self, ranks: int, out: BinaryIO, err: BinaryIO) -> None:
        lock = threading.Lock()
        self.out = [Stream(rank, out, lock) for rank in range(ranks)]
        self.err = [Stream(rank, err, lock) for rank in range(ranks)]

    def close(self, seconds: float = 2.0) -> None:
        """Forward what is left. Harmless twice."""
        until = time.monotonic() + seconds
        for stream in (*self.out, *self.err):
            stream.close(max(0.0, until - time.monotonic()))
