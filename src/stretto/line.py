"""Calls to the store that always end. Its process may be stopped or cut off, and a socket would wait for ever.

    a rank's call ──> a job of the thread that polls, over a connection of its own ──> the answer, or Silent

[Note: the thread]  A rank that waits elsewhere cannot answer questions, so a thread does, which polls once a second.
While the store answers, the thread blocks there no longer than a call takes, because a daemon thread that returns from
C++ while the interpreter shuts down aborts the process. At exit it is woken and joined. If the store owes it an answer,
its socket is shut first, where that is known, and torch prints a stack from C++. Connecting may take seconds, or for
ever where the store is stopped. So another thread connects, and until then this one calls the store that it was given.
Ranks that are threads of one process read each other's stacks, and need no such thread. The thread is also how the
channel of a store is found again: nothing else keeps a list of channels.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .awaited_keys import Silent
from .sockets import cloned, is_closed, shut

if TYPE_CHECKING:
    from .channel import Channel

T = TypeVar("T")
log = logging.getLogger("stretto")
POLL_SECONDS = 1.0
CONNECT_SECONDS = 30.0
"""How long it may take to connect: torch looks up the name of the other end, 5 s where DNS is silent."""
TELL_SECONDS = 7.0
"""After so long a line says that it is waited for."""
ANSWER_SECONDS = 3.0
"""How long the store may take to answer."""
HANG_UP_SECONDS = 2.0
"""How long a thread that was told to end may take."""
_GONE = "the process group's store has gone"


class Job(NamedTuple):
    """What the thread is asked for."""

    do: Callable[[Any], Any]
    """Is given the store."""
    answers: queue.SimpleQueue[tuple[Any, Exception | None]]
    """Gets one. No lock of Python's is held while it is waited for: a handle may be collected meanwhile."""


class Line:
    """A store as :class:`~stretto.channel.Channel` calls it: through the thread, where there is one.

    Its methods are those of the store, and raise ``Silent`` too.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lookout: Lookout | None = None
        self.socket: int | None = None
        """Of the thread's connection, while there is one and this is known."""
        self._has_gone = False
        self._unanswered: queue.SimpleQueue[Any] | None = None

    @property
    def has_gone(self) -> bool:
        """Whether the connection is broken. Each further call would print a stack from C++."""
        self._has_gone = self._has_gone or ((number := self.socket) is not None and is_closed(number))
        return self._has_gone

    @has_gone.setter
    def has_gone(self, gone: bool) -> None:
        self._has_gone = gone

    @property
    def is_silent(self) -> bool:
        """Whether it owes an answer, or has gone."""
        return self.has_gone or (self._unanswered is not None and self._unanswered.empty())

    def run(self, do: Callable[[Any], T], *, later: bool = False) -> T:
        """What ``do`` returns.

        Args:
            do: is given the store.
            later: if the store is silent, it is done when the store answers again.

        Raises:
            Silent: the store does not answer.
            RuntimeError: as ``do``.
        """
        if self.has_gone:
            raise RuntimeError(_GONE)
        try:
            return self._run(do, later=later)
        except dist.DistNetworkError:
            self.has_gone = True
            raise

    def _run(self, do: Callable[[Any], T], *, later: bool) -> T:
        lookout = self.lookout
        if lookout is None or lookout.is_ending or lookout.has_no_connection:
            return do(self.store)
        if lookout is threading.current_thread():  # a handle is collected there
            return do(lookout.store)
        waits, answers = not self.is_silent, queue.SimpleQueue[tuple[Any, Exception | None]]()
        if waits or later:
            lookout.jobs.put(Job(do, answers))
        if waits:
            try:
                found: T = _answer(*answers.get(timeout=ANSWER_SECONDS))
                return found
            except queue.Empty:
                self._unanswered = answers
        raise Silent("the process group's store does not answer")

    def put(self, key: str, value: str | bytes) -> None:
        """Write it, where the store is silent as soon as it answers again."""
        with contextlib.suppress(Silent):
            self.run(lambda store: store.set(key, value), later=True)

    def hang_up(self) -> None:
        """This process ends, and before it a thread that did not when it was told to; see [Note: the thread]."""
        if (lookout := self.lookout) is None or lookout.is_current() or not lookout.is_alive():
            return
        if (number := self.socket) is not None:
            shut(number)
            lookout.join(HANG_UP_SECONDS)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.run(lambda store: getattr(store, name)(*arguments))


def _answer(found: Any, error: Exception | None) -> Any:
    if error is None:
        return found
    try:
        raise error
    finally:
        del error  # or its frames, the model in them, would live until a garbage collection


class Lookout(threading.Thread):
    """See [Note: the thread]."""

    def __init__(self, channel: Channel, line: Line) -> None:
        super().__init__(name="stretto", daemon=True)
        self.channel = channel
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.connection: Store | None = None
        self._line = line
        self._tried = threading.Event()
        self._is_told_to_end = False  # not is_stopped: Python's own class has that
        self._connects = threading.Thread(target=self._connect, name="stretto connects", daemon=True)
        self._connects.start()
        try:
            self.start()
        except RuntimeError:  # no more threads: the connection goes with this, and its number may be another's soon
            self._is_told_to_end, line.socket = True, None
            raise

    @property
    def is_ending(self) -> bool:
        """Whether it may do nothing more that is asked for."""
        return self._is_told_to_end or not self.is_alive()

    @property
    def has_no_connection(self) -> bool:
        """Whether it has tried to connect, and failed."""
        return self._tried.is_set() and self.connection is None

    @property
    def store(self) -> Store:
        """The given one, until there is a connection of its own."""
        return self._line.store if self.connection is None else self.connection

    def _connect(self) -> None:
        try:
            self.connection, self._line.socket = cloned(self._line.store)
        except dist.DistNetworkError:
            self._line.has_gone = True
        except RuntimeError:
            pass  # one that cannot be cloned is not to be shared: a call could block
        finally:
            if self._is_told_to_end:  # meanwhile: nobody else forgets a number that may be another's soon
                self._line.socket = None
            self._tried.set()
            self.jobs.put(Job(lambda store: None, queue.SimpleQueue()))  # it is waited for

    def run(self) -> None:
        """Do what is asked for, and poll as soon as there is a connection, until told to stop."""
        while not (self._tried.is_set() or self._is_told_to_end):
            self._do(self.jobs.get())
        if not (self._is_told_to_end or self.has_no_connection):
            try:
                self.channel.watch(self.store, self._is_over)
            except dist.DistNetworkError:
                self._line.has_gone = True
        while not (self._is_told_to_end and self.jobs.empty()):
            if not self._is_over() and self.channel.store_is_gone():
                self.channel.alarm()  # who has died shows without it
        self._line.socket = None
        self._line.lookout = None  # else the connection would stay until Python's collector finds that circle

    def _do(self, asked: Job | None) -> None:
        if asked is None:
            self._is_told_to_end = True
            return
        try:
            if self._line.has_gone:
                raise RuntimeError(_GONE)
            asked.answers.put((asked.do(self.store), None))
        except Exception as error:
            asked.answers.put((None, error))

    def _is_over(self) -> bool:
        """Do what is asked for until the next check is due; returns whether to end."""
        until = time.monotonic() + POLL_SECONDS
        while not (self._is_told_to_end and self.jobs.empty()) and (left := until - time.monotonic()) > 0:
            try:
                self._do(self.jobs.get(timeout=left))
            except queue.Empty:
                break
        return self._is_told_to_end

    def stop(self, *, waits: bool = True) -> None:
        """End, soon. Harmless twice. ``waits``: for the connection, where the store is not known to be silent."""
        self.jobs.put(None)
        if not self.is_current():
            self._await_connection(CONNECT_SECONDS if waits else 0.0)
            self.join(HANG_UP_SECONDS)

    def is_current(self) -> bool:
        """Whether it, or what connects for it, runs this: a handle may be collected there."""
        return threading.current_thread() in (self, self._connects)

    def _await_connection(self, seconds: float) -> None:
        if self._tried.wait(min(seconds, TELL_SECONDS)) or not seconds:
            return
        log.warning(
            "rank %s: nothing is attached any more, but a connection to the process group's store is still being "
            "made. This rank waits for it, %s s at most: DNS does not answer, or no file descriptors are left, here "
            "or on the host of the store (ulimit -n).",
            self.channel.rank,
            round(seconds),
        )
        self._tried.wait(seconds - TELL_SECONDS)
