"""The ranks' output: each line with its rank before it, through pipes; the end of each stderr is kept.

A progress bar is forwarded state by state, each with the carriage return by which the next one replaces it. On a
terminal, a line without an end is shown too.

No file is written. A pipe's writing end is given to torch's launcher as a number, since it calls ``open`` on what it
gets: ``open`` takes a number instead of a path, and ``/proc/self/fd/N`` would need ``/proc``.
"""

from __future__ import annotations

import collections
import os
import re
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from .console import note

KEPT_LINES = 400
SILENCE_MS = 100
"""Seconds until a terminal shows what a rank has printed without an end of line, such as a prompt."""
_ERASE = b"\r\x1b[K"
_BEGINNING = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):")
_NO_PYTHON = re.compile(r'  File ".*", line \d+')
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_OF_TORCH = re.compile(rb"\[rank\d+\]: ")  # torch puts the rank before each line of an exception, as we do
_COLOURS = re.compile(r"\x1b\[[\d;]*m")  # of tracebacks too, from Python 3.13 on, where FORCE_COLOR is set
_OF_CPP = re.compile(r"\[[IWEF]\d")  # torch's C++ log, which goes on after the exception
_CONSEQUENCE = re.compile(
    r"^( *\| )?"  # of what a group holds
    r"(stretto\.errors\.(PeerError|CommunicationError)|torch\.distributed\.\w*DistBackendError|RuntimeError: .*"
    r"(gloo|Gloo|Connection (reset|closed|refused)))"
)


@dataclass(frozen=True)
class Traceback:
    """The end of a rank's output."""

    text: str
    at: float
    """When its first line arrived, by ``time.monotonic``."""

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank has failed."""
        return any(_CONSEQUENCE.match(line) for line in self.text.splitlines())

    @property
    def names_another(self) -> bool:
        """Whether it says which rank has failed, so that this one has not."""
        return any(line.lstrip(" |").startswith("stretto.errors.PeerError") for line in self.text.splitlines())


class LastLine:
    """The unfinished line at the bottom of a terminal, a progress bar or a prompt; other lines go above it."""

    def __init__(self) -> None:
        self._whose: object = None
        self._text = b""

    def ended(self, whose: object, line: bytes) -> bytes:
        """What to write for a line that has ended."""
        if self._whose is not whose:
            return (_ERASE if self._text else b"") + line + b"\n" + self._text
        begun, self._whose, self._text = self._text, None, b""
        return _after(begun, line) + b"\n"

    def begun(self, whose: object, line: bytes) -> bytes:
        """What to write for one that may go on, or be rewritten."""
        before, self._text = self._text, line
        same, self._whose = self._whose is whose, whose
        return _after(before, line) if same or not before else _ERASE + line


def _after(begun: bytes, line: bytes) -> bytes:
    return line[len(begun) :] if line.startswith(begun) else _ERASE + line


class Sink:
    """Where lines of all ranks go. If it cannot be written any more, the ranks go on and do not notice.

    Args:
        file: a terminal, a pipe, a file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.is_terminal = file.isatty()
        self.is_full = False
        """Whether it is full or otherwise failed; not if the reader has stopped (``| head``)."""
        self._file: BinaryIO | None = file

    def write(self, text: bytes) -> None:
        """At once."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except (BrokenPipeError, ValueError):
            self._file = None
        except OSError as error:
            self._file, self.is_full = None, True
            note(f"what ranks print from here on is lost, but they keep running: {error.strerror}")


class Stream:
    """One output pipe of one rank, forwarded by a thread of its own.

    Args:
        rank: whose.
        sink: where its lines go.
        lock: held while a line is written, so that lines stay whole.
        last: the terminal's unfinished line, if the sink is a terminal.
    """

    def __init__(self, rank: int, sink: Sink, lock: threading.Lock, last: LastLine) -> None:
        self._reading, self._writing = os.pipe()
        self._prefix = f"[rank {rank}] ".encode()
        self._sink = sink
        self._lock = lock
        self._last = last if sink.is_terminal else None
        self._line = bytearray()
        self._returned = self._shown = False
        self._kept: collections.deque[tuple[float, str]] = collections.deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._forward, name=f"what rank {rank} prints", daemon=True)
        self._thread.start()

    def handed_out(self) -> int:
        """A copy of the writing end, to be closed by the code that opens it."""
        return os.dup(self._writing)

    def close(self, seconds: float) -> None:
        """Wait until all is forwarded, but not for ever: a process that a rank has left running may hold the pipe."""
        os.close(self._writing)
        self._thread.join(seconds)

    def traceback(self) -> Traceback | None:
        """The last one in what was kept."""
        with self._lock:
            kept = list(self._kept)
        return last_traceback([line for _, line in kept], [at for at, _ in kept])

    def _forward(self) -> None:
        more = select.poll()
        more.register(self._reading)
        while True:
            if self._last is not None and self._line and not more.poll(SILENCE_MS):
                self._show_state()
            chunk = os.read(self._reading, 1 << 16)
            if not chunk:
                break
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                self._take(line)
                self._end_line()
            self._take(rest)
        if self._line:
            self._end_line()
        os.close(self._reading)

    def _take(self, part: bytes) -> None:
        for number, piece in enumerate(part.split(b"\r")):
            self._returned = self._returned or number > 0
            if self._returned and piece:  # else a newline may follow the return
                self._show_state()
                self._line.clear()
                self._returned = False
            if piece:
                self._line += piece
                self._shown = False

    def _show_state(self) -> None:
        """The part of a progress bar or prompt that may continue on the same line."""
        if self._line and not self._shown:
            self._shown = True
            state = self._prefix + self._line
            with self._lock:
                self._sink.write(state + b"\r" if self._last is None else self._last.begun(self, state))

    def _end_line(self) -> None:
        line = bytes(self._line)
        self._line.clear()
        self._returned = False
        if found := _OF_TORCH.match(line):
            line = line[found.end() :]
        whole = self._prefix + line
        with self._lock:
            self._kept.append((time.monotonic(), _COLOURS.sub("", line.decode(errors="replace"))))
            self._sink.write(whole + b"\n" if self._last is None else self._last.ended(self, whole))


def last_traceback(lines: Sequence[str], times: Sequence[float]) -> Traceback | None:
    """The last one, with those that it names as its cause, without what C++ printed after it."""
    beginnings = [number for number, line in enumerate(lines) if _BEGINNING.match(line)]
    if not beginnings:  # a script that is not Python has none of these lines
        beginnings = [number for number, line in enumerate(lines) if _NO_PYTHON.fullmatch(line)][-1:]
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
        lock, last = threading.Lock(), LastLine()
        self.sinks = Sink(out), Sink(err)
        self.out, self.err = ([Stream(rank, sink, lock, last) for rank in range(ranks)] for sink in self.sinks)

    def close(self, seconds: float = 2.0) -> None:
        """Forward what is left."""
        until = time.monotonic() + seconds
        for stream in (*self.out, *self.err):
            stream.close(max(0.0, until - time.monotonic()))
