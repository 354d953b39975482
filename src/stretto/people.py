"""Who the ranks are as processes, by what they say in the store, and whether all have said it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from .line import Line
from .sockets import server_of
from .system_memory import kills_for_want_of_memory
from .whereabouts import Person

T = TypeVar("T")
HAS_NOT_COME = "has not come here so far"
LINGER_SECONDS = 2.0
"""How long the rank that has the store stays for the others to read its last note."""


class People:
    """All ranks of one store, as this one knows them.

    Args:
        store: that all ranks see.
        rank: this one.
        world_size: how many there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.in_one_process = isinstance(store, HashStore)
        self._given = store
        self.line = Line(PrefixStore("stretto", store))
        """All calls to the store, but those of its own thread, go this way."""
        self.rank = rank
        self._world_size = world_size
        self._people: dict[int, Person] = {}
        self._goes_at = math.inf
        """When the store goes, by ``time.monotonic()``, if rank 0 has it and has told its last words."""
        self._kills = kills_for_want_of_memory()

    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self._world_size) if rank != self.rank]

    def know(self, people: Sequence[Person | None]) -> None:
        """All ranks' identities, from a gather: later the store may be gone, together with the rank that has it."""
        self._people.update((rank, one) for rank, one in enumerate(people) if one is not None)

    def person(self, rank: int, store: Store | None = None, *, fresh: bool = False) -> Person | None:
        """The identity of a rank, if it has announced itself and has a handle."""
        if fresh or rank not in self._people:
            over = store or self.line
            with contextlib.suppress(RuntimeError):
                if said := over.get(f"who/{rank}") if over.check([f"who/{rank}"]) else b"":
                    self._people[rank] = Person(**json.loads(said))  # at once: the thread looks here too
                else:
                    self._people.pop(rank, None)
        return self._people.get(rank)

    def is_still(self, rank: int, name: str) -> bool:
        """Whether that is the rank's process, as far as is known."""
        person = self._people.get(rank)
        return person is None or person.name == name

    def dead(self) -> list[tuple[int, int]]:
        """Rank and pid of those that are known not to run any more."""
        seem = [rank for rank in self.others() if (one := self.person(rank)) is not None and one.is_dead()]
        gone = self.store_is_gone()
        # It may have gone in peace, or another process may be that rank by now.
        sure = [(rank, self.person(rank, fresh=not gone)) for rank in seem]
        return [(rank, person.pid) for rank, person in sure if person is not None and person.is_dead()]

    def starved(self) -> bool:
        """Whether the kernel has killed a process of this machine for want of memory since this was made."""
        return kills_for_want_of_memory() > self._kills

    def store_is_gone(self) -> bool:
        """Whether the store's server is known to have ended, as with rank 0; calls would print warnings from C++."""
        host = self._people.get(0)
        if self.line.has_gone or time.monotonic() > self._goes_at:
            return True
        if self.rank == 0 or host is None or not self.rank_0_has_store():
            return False
        if host.is_here() and _nobody_listens(server_of(self._given), host):
            self.line.has_gone = True  # never back to False: the thread may have found it broken meanwhile
        return self.line.has_gone or host.is_dead()

    def rank_0_has_store(self) -> bool:
        """Whether the store's server lives in a rank, most likely rank 0, and not in torchrun's agent."""
        return isinstance(server_of(self._given), TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _stay_until(self, done: Callable[[], bool]) -> None:
        """The store ends with this process, which stays a little."""
        until = time.monotonic() + LINGER_SECONDS
        while not done() and time.monotonic() < until:
            time.sleep(0.02)

    def attempts_of(self, rank: int) -> int:
        """How often that rank has tried to attach so far; 0 where the store is silent."""
        key = f"attempts/{rank}"
        return self._try(lambda store: int(store.get(key)) if store.check([key]) else 0) or 0

    def _try(self, do: Callable[[Any], T], *, later: bool = False) -> T | None:
        """What ``do`` returns; None where the store is gone, or silent. Arguments as of :meth:`Line.run`."""
        if not self.store_is_gone():
            with contextlib.suppress(RuntimeError):
                return self.line.run(do, later=later)
        return None

    def _set(self, key: str, value: str) -> None:
        self._try(lambda store: store.set(key, value), later=True)

    def _forget(self, key: str) -> None:
        """If the store can: some cannot."""
        self._try(lambda store: store.delete_key(key), later=True)

    def _all_have_tried(self, attempt: int) -> bool:
        """Whether all others have made that attempt to attach, read why this rank has failed in it, and left."""
        dead = {rank for rank, _ in self.dead()}
        return all(rank in dead or self._has_tried(rank, attempt) for rank in self.others())

    def _has_tried(self, rank: int, attempt: int) -> bool:
        made = self.attempts_of(rank)  # it may have come and left between two looks, or be here for the next
        return made > attempt or (made == attempt and self.person(rank, fresh=True) is None)

    def why_silent(self, rank: int) -> str:
        """Of a rank that does not answer; the end of a sentence that begins with it."""
        if (person := self.person(rank)) is None:
            return "does not answer" if self.line.is_silent else HAS_NOT_COME
        stopped = person.is_stopped()
        return f"is stopped by a signal or a debugger (pid {person.pid})" if stopped else "does not answer"


def _nobody_listens(server: Any, owner: Person) -> bool:
    """Rank 0 may have destroyed its groups, and let go of the store, while its process goes on, or ends.

    A name is not looked up, which takes 5 s where DNS is silent: a store listens on all addresses of its host.
    """
    address = server.host
    if not address.replace(".", "").isdecimal():
        if not owner.shares_network():
            return False
        address = "127.0.0.1"
    try:
        socket.create_connection((address, server.port), timeout=0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
