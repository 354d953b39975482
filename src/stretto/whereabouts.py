"""Who the ranks are, whether they still live, and where in their programs they are.

attach ──> who/RANK in the store            a waiting rank ──> ask/RANK/n ──> that rank's thread ──> at/RANK/n

[Note: the thread]  A rank that waits elsewhere cannot answer for itself, so a thread does. It polls once a second and
never blocks in the store: a daemon thread that returns from C++ while the interpreter shuts down aborts the process. It
is woken and joined at exit. Ranks that are threads of one process read each other's stacks, and need none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

POLL_SECONDS = 1.0
_LIBRARIES = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass
class Progress:
    """Passes that this rank has begun; the hot path sets it, and others read it."""

    passes: int = 0


@dataclass(frozen=True)
class Person:
    """A rank as a process: the kernel and pid namespace it lives in, and what tells it from a later one of its pid."""

    host: str
    pid: int
    started: str
    thread: int

    def is_dead(self) -> bool:
        """Whether it is known not to run any more; of another host, or where there is no /proc, nothing is known."""
        if not self.host or self.host != _host():
            return False
        state, started = _state_of(self.pid)
        return state in ("", "Z", "X") or started != self.started


def myself() -> Person:
    """This process, and the thread that calls."""
    return Person(_host(), os.getpid(), _state_of(os.getpid())[1], threading.get_ident())


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, str]:
    """State letter and start time; empty where there is no such process. A killed child that nobody reaped is ``Z``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


# Places


def _is_users(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (file.startswith(("<", *_LIBRARIES)) or standard)


def _describe(file: str, line: int, function: str) -> str:
    return f"{os.path.basename(file)}:{line} in {function}"


def place_of_frame(frame: FrameType | None) -> str:
    """The innermost line that the user wrote, ``train.py:34 in step``; of a library, where there is none."""
    innermost = frame
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    return _describe(found.f_code.co_filename, found.f_lineno, found.f_code.co_name) if found else "an unknown place"


def place_of_traceback(trace: TracebackType | None) -> str:
    """The same for where an exception was raised; empty where that is not known."""
    place, users = "", False
    while trace is not None:
        code = trace.tb_frame.f_code
        if (own := _is_users(code.co_filename)) or not users:
            place, users = _describe(code.co_filename, trace.tb_lineno, code.co_name), own
        trace = trace.tb_next
    return place


# Asking


class Whereabouts:
    """One rank's end: says who and where it is, and asks others.

    Args:
        store: seen by the ranks of one attached handle alone.
        rank: this one.
        world_size: how many there are.
        progress: told with the place.
        polled: called on the thread at each round, with its own connection to the store.
        answers: whether a thread is to answer others, which ranks in one process do not need.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        progress: Progress,
        polled: Callable[[Store], object],
        *,
        answers: bool,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._polled = polled
        self._me = myself()
        self._people = {rank: self._me}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        store.set(f"who/{rank}", json.dumps(asdict(self._me)))
        if answers:
            with contextlib.suppress(RuntimeError):  # a store that cannot be cloned has one connection, which we share
                own: Store = store.clone()  # type: ignore[attr-defined]  # torch has it, its stubs do not
                self._thread = threading.Thread(
                    target=self._answer, args=(own,), name=f"stretto rank {rank}", daemon=True
                )
                self._thread.start()

    def others(self) -> list[int]:
        """All ranks but this."""
        return [rank for rank in range(self._world_size) if rank != self._rank]

    def person(self, rank: int, store: Store | None = None) -> Person | None:
        """Who that is, if it has said so."""
        if rank not in self._people:
            store = store or self._store
            with contextlib.suppress(RuntimeError):
                if store.check([f"who/{rank}"]):
                    self._people[rank] = Person(**json.loads(store.get(f"who/{rank}")))
        return self._people.get(rank)

    def dead(self) -> list[tuple[int, int]]:
        """Rank and pid of those that are known not to run any more."""
        found = [(rank, self.person(rank)) for rank in self.others()]
        return [(rank, person.pid) for rank, person in found if person is not None and person.is_dead()]

    def ask(self) -> dict[int, str]:
        """Ask the others where they are; returns the key under which each will answer."""
        keys = {}
        for rank in self.others():
            number = self._store.add(f"ask/{rank}", 1)
            self._store.set(f"ask/{rank}/{number}", "")
            keys[rank] = f"at/{rank}/{number}"
        return keys

    def heard(self, keys: dict[int, str]) -> dict[int, str]:
        """What those who have answered so far say, as the end of a sentence that begins with the rank."""
        told = {}
        for rank, key in keys.items():
            person = self.person(rank)
            if person is not None and person.pid == self._me.pid and person.host == self._me.host:
                frame = sys._current_frames().get(person.thread)
                told[rank] = f"is at {place_of_frame(frame)}" if frame else "has ended"
            elif self._store.check([key]):
                told[rank] = self._store.get(key).decode()
        return told

    def gather(self, seconds: float) -> dict[int, str]:
        """Ask, and wait so long for answers."""
        with contextlib.suppress(RuntimeError):
            keys, until = self.ask(), time.monotonic() + seconds
            while len(told := self.heard(keys)) < len(keys) and time.monotonic() < until:
                time.sleep(0.05)
            return told
        return {}

    def store_is_gone(self) -> bool:
        """Whether the store's server is known to have ended with rank 0; calls would print warnings from C++."""
        host = self._people.get(0)
        return self.rank_0_has_store() and host is not None and host.is_dead()

    def rank_0_has_store(self) -> bool:
        """Whether the store's server lives in a rank, most likely rank 0, and not in torchrun's agent."""
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def stop(self) -> None:
        """End the thread. Harmless twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _answer(self, store: Store) -> None:
        """On the thread. Whoever is dead when the store is gone too must be known by then, so all are read early."""
        answered, unknown = 0, self.others()
        with contextlib.suppress(RuntimeError):  # the store has gone
            while not self._stop.wait(POLL_SECONDS) and not self.store_is_gone():
                for rank in unknown[:64]:
                    self.person(rank, store)
                unknown = [rank for rank in unknown if rank not in self._people]
                self._polled(store)
                while store.check([f"ask/{self._rank}/{answered + 1}"]):
                    answered += 1
                    place = place_of_frame(sys._current_frames().get(self._me.thread))
                    said = f"has begun {count(self._progress.passes)} and is at {place}"
                    store.set(f"at/{self._rank}/{answered}", said)


def count(passes: int) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{passes} pass" if passes == 1 else f"{passes} passes"
