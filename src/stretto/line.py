"""Calls to the store that end whoever has it: its process may be stopped or cut off, and a socket waits for ever.

    a rank's call ──> a job of the thread that polls, over a connection of its own ──> the answer, or Silent

[Note: the thread]  A rank that waits elsewhere cannot answer for itself, so a thread does, which polls once a second.
While the store answers it blocks there no longer than a call takes: a daemon thread that returns from C++ while the
interpreter shuts down aborts the process. It is woken and joined at exit. Ranks that are threads of one process read
each other's stacks, and need none. The thread is also how the channel of a store is found again: nothing else keeps a
list of them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .word import Silent

if TYPE_CHECKING:
    from .channel import Channel

T = TypeVar("T")
Job = tuple[Callable[[Any], Any], "futures.Future[Any]"]
POLL_SECONDS = 1.0
CONNECT_SECONDS = 30.0
"""How long the thread may take to connect: torch looks up the name of the other end, 5 s where DNS is silent."""
ANSWER_SECONDS = 3.0
"""How long the store may take to answer."""
_GONE = "the process group's store has gone"


class Line:
    """A store as :class:`~stretto.channel.Channel` calls it: through the thread, as soon as that is connected.

    Its methods are those of the store, and raise ``Silent`` too.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lookout: Lookout | None = None
        self.has_gone = False
        """Whether the connection is broken. Each further call would print a stack from C++."""
        self._unanswered: futures.Future[Any] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it owes an answer, or has gone."""
        return self.has_gone or (self._unanswered is not None and not self._unanswered.done())

    def run(self, job: Callable[[Any], T], *, later: bool = False) -> T:
        """What the job returns.

        Args:
            job: is given the store.
            later: if the store is silent, the job is done when it answers again.

        Raises:
            Silent: the store does not answer.
            RuntimeError: as the job.
        """
        if self.has_gone:
            raise RuntimeError(_GONE)
        try:
            return self._run(job, later=later)
        except dist.DistNetworkError:
            self.has_gone = True
            raise

    def _run(self, job: Callable[[Any], T], *, later: bool) -> T:
        lookout = self.lookout
        if lookout is None or lookout.connection is None or not lookout.is_alive():
            return job(self.store)
        if lookout is threading.current_thread():  # a handle is collected there
            return job(lookout.connection)
        waits = not self.is_silent
        if waits or later:
            lookout.jobs.put((job, future := futures.Future[T]()))
        if waits:
            try:
                return future.result(ANSWER_SECONDS)
            except futures.TimeoutError:
                self._unanswered = future
        raise Silent("the process group's store does not answer")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.run(lambda store: getattr(store, name)(*arguments))


class Lookout(threading.Thread):
    """See [Note: the thread]."""

    def __init__(self, channel: Channel, store: Store) -> None:
        super().__init__(name="stretto", daemon=True)
        self.channel = channel
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.connection: Store | None = None
        self._shared = store
        self._connected = threading.Event()
        self.start()

    def run(self) -> None:
        """Poll until told to stop."""
        try:
            with contextlib.suppress(RuntimeError):  # one that cannot be cloned is not to be shared: a call could block
                self.connection = self._shared.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
        finally:
            self._connected.set()
        if self.connection is None:
            self.jobs.get()
            return
        self.channel.watch(self.connection, self._is_over)
        while not self.jobs.empty():  # the store has gone meanwhile
            if (asked := self.jobs.get()) is not None:
                asked[1].set_exception(RuntimeError(_GONE))

    def _is_over(self) -> bool:
        """Do what is asked for until it is time for the next look; whether to end."""
        until = time.monotonic() + POLL_SECONDS
        while (left := until - time.monotonic()) > 0:
            try:
                asked = self.jobs.get(timeout=left)
            except queue.Empty:
                break
            if asked is None:
                return True
            job, future = asked
            try:
                future.set_result(job(self.connection))
            except BaseException as error:
                future.set_exception(error)
        return False

    def stop(self, *, has_gone: bool = False) -> None:
        """End, soon. Harmless twice. ``has_gone``: the store, to which it may go on connecting in vain."""
        self.jobs.put(None)
        if self is not threading.current_thread():
            self._connected.wait(0.0 if has_gone else CONNECT_SECONDS)
            self.join(2.0)
