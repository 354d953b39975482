"""A thread that puts what other hosts have sent into the memory of this one.

[Note: by itself]  A rank that reads a parameter must not depend on other ranks of its host being inside stretto: they
may be in a barrier, waiting for it. So each rank has a thread that waits for its messages, puts what arrives into place
and says so, whatever the rank itself is doing. The thread exists only while something is under way. Callbacks in Gloo's
own threads would not do: these outlive the interpreter, which ends a process whose thread asks for its lock then; and a
thread that frees its own group waits for itself. The end of the program waits for this thread.

[Note: doubt]  A rank that stops waiting, after Ctrl-C or because a rank has died, may read again, and other ranks of
its host still do. So messages go on. But when the transport is closed, or the program ends, all of them are waited for
``DOUBT_SECONDS`` and no longer, and the group that carries them is never freed. Without doubt, all ranks should have
stepped, so that all messages arrive: then each is waited for ``END_SECONDS``.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .base import done_within
from .exchange import Exchange
from .letting_go import never_free

DOUBT_SECONDS = 5.0
END_SECONDS = 60.0
_LOOK = datetime.timedelta(milliseconds=100)


@dataclass(frozen=True)
class Incoming:
    """A message between hosts."""

    exchange: Exchange
    received: torch.Tensor
    flats: Sequence[torch.Tensor]
    """Where the received data belongs, one tensor after the other."""
    say: Callable[[BaseException | None], None]
    """Called when it is in place, or with the error."""

    def put(self) -> None:
        """Copy it there. Not with torch, which would start a thread team for this thread."""
        source = self.received.data_ptr()
        for flat in self.flats:
            ctypes.memmove(flat.data_ptr(), source, flat.nbytes)
            source += flat.nbytes


class Courier:
    """The thread of one rank; messages arrive in the order in which they were sent.

    Args:
        groups: the groups that carry messages.
        patience: seconds that a message may take.
    """

    def __init__(self, groups: Sequence[Any], patience: float) -> None:
        self._groups = groups
        self.patience = patience
        """The same; it may be changed."""
        self._messages: deque[Incoming] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends_since: float | None = None
        self._has_given_up = False
        self._is_closing = self._is_in_doubt = False

    def take(self, message: Incoming) -> None:
        """Put a message's data into place when it has arrived."""
        with self._lock:
            self._messages.append(message)
            if self._thread is None:
                thread = threading.Thread(target=self._carry_all, name="stretto shares")
                try:
                    thread.start()
                except BaseException:
                    self._messages.pop()
                    raise
                self._thread = thread

    def doubt(self) -> None:
        """A rank has stopped waiting: see [Note: doubt]."""
        self._is_in_doubt = True

    def trust(self) -> None:
        """A round begins. Messages left from an earlier one stay in doubt."""
        if not self._messages:
            self._is_in_doubt = self._has_given_up = False

    def close(self) -> None:
        """Wait until nothing is under way, or the time is over."""
        self._is_closing = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _carry_all(self) -> None:
        is_over = False
        while not is_over:
            self._carry(self._messages[0])
            with self._lock:
                self._messages.popleft()
                if is_over := not self._messages:
                    self._thread = None

    def _carry(self, message: Incoming) -> None:
        try:
            for work in message.exchange.works:
                self._wait(work)
            message.put()
        except Exception as error:  # told to whoever waits
            message.say(error.with_traceback(None))
        else:
            message.say(None)

    def _wait(self, work: Any) -> None:
        """Wait in slices, and check in between whether the program ends."""
        began = time.monotonic()
        while not done_within(work, _LOOK):
            if self._has_given_up or self._takes_too_long(began, time.monotonic()):
                self._has_given_up = True
                with self._lock:  # the rank may send another meanwhile
                    under_way = [message.exchange for message in self._messages]
                for held in (*self._groups, *under_way):
                    never_free(held)
                raise RuntimeError(f"nothing came within {time.monotonic() - began:.0f} s")

    def _takes_too_long(self, began: float, now: float) -> bool:
        if now - began > self.patience:
            return True
        if self._ends_since is None and (self._is_closing or not threading.main_thread().is_alive()):
            self._ends_since = now
        if self._ends_since is None:
            return False
        since, limit = (self._ends_since, DOUBT_SECONDS) if self._is_in_doubt else (began, END_SECONDS)
        return now - max(since, self._ends_since) > limit
