"""Shares of ranks on several hosts, on their way into memory that the ranks of a host have in common.

    place p of each host ──all-to-all──> place p of the others ──> into its host's memory ──> its word says so
    whoever reads sleeps on the words of all places of its host

[Note: by itself]  A rank that reads must not need the others to be inside stretto: they may be in a barrier, waiting
for it. So the last two arrows are drawn by Gloo's thread, in the callback of the message's future, whatever the rank
itself is doing. A word that will never say so says ``_FAILED``.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .base import Work
from .common import Offered
from .exchange import Exchange

if TYPE_CHECKING:
    from .hierarchical import Team

_FAILED = 2**32 - 1
_ROUNDS = _FAILED - 1
_SLICE_SECONDS = 0.2


class Spreading:
    """Messages that are sent again and again, a round of them after every step. Collective where it begins.

    Args:
        team: of all ranks; on each host equally many.
        messages: so many in a round.
        wait_for: waits for a collective, named by a noun.
    """

    def __init__(self, team: Team, messages: int, wait_for: Callable[[Work, str], None]) -> None:
        self.hosts = team.hosts
        self.place = team.host.place
        self._team = team
        self._messages = messages
        offered = Offered.by(team.host, 4 * messages * len(team.host.peers))
        wait_for(offered.work, "words about shares")
        words = offered.memory.tensor(0, messages * len(team.host.peers), torch.int32)
        self._address = words.data_ptr()
        self._words = offered.memory.words(0, len(words))
        self._round = 0
        self._problem: BaseException | None = None
        self._incoming: list[Incoming] = []

    def begin(self) -> None:
        """A round begins; all messages of the last one have come. Collective."""
        self._round = self._round % _ROUNDS + 1
        self._incoming.clear()

    def abandon(self) -> bool:
        """Nobody waits any more: what still comes is put nowhere. Whether anything does."""
        return any([incoming.drop() for incoming in self._incoming])

    def send(
        self, message: int, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int], put: Callable[[], None]
    ) -> SharesUnderWay:
        """This rank's share to those of its place, and theirs into ``received``. Collective.

        Args:
            message: its number in the round.
            received: flat, as long as the other hosts' shares together.
            share: flat, of the same dtype.
            numels: of the shares of this place, by host.
            put: called from another thread when all is there; puts it into the host's memory.
        """
        places = [self._messages * place + message for place in range(len(self._team.host.peers))]
        own, current, futex = places[self.place], self._round, self._team.host.page.futex

        def say(problem: BaseException | None) -> None:  # from another thread
            self._problem = self._problem or problem
            futex.fence()
            self._words[own] = current if problem is None else _FAILED
            futex.wake(self._address + 4 * own)

        if any(numels):
            exchange = self._team.counterparts.spread(received, share, numels)
            self._incoming.append(Incoming(exchange, put, say))
        else:
            say(None)
        return SharesUnderWay(self, places, current)

    def seen(self, place: int) -> int:
        """What a word says."""
        return self._words[place]

    def refuse(self, place: int) -> NoReturn:
        """Raise ``RuntimeError`` for a word that says so."""
        rank = self.hosts[self._team.home][place // self._messages]
        told = "" if self._problem is None else f": {self._problem}"
        raise RuntimeError(f"the exchange of rank {rank} with other hosts has failed{told}")

    def sleep(self, place: int, seen: int, seconds: float) -> None:
        """Until the word says something else, or for so long."""
        self._team.host.page.futex.wait(self._address + 4 * place, seen, seconds)


class Incoming:
    """A message between hosts. Calls ``put`` when it is complete, then ``say``, with what was the matter if it failed.

    Nothing that it was given outlives that.
    """

    def __init__(
        self, exchange: Exchange, put: Callable[[], None], say: Callable[[BaseException | None], None]
    ) -> None:
        self._under_way: tuple[Any, ...] = exchange, put, say
        self._left = len(exchange.works)
        self._lock = threading.Lock()
        for work in exchange.works:
            work.get_future().add_done_callback(self._one_has_come)

    def _one_has_come(self, future: Any) -> None:
        with self._lock:
            self._left -= 1
            if not self._under_way:
                return
            _, put, say = self._under_way
            try:
                future.value()  # to wait for the work would wait for this very call to end
                if self._left:
                    return
                put()
            except BaseException as error:  # told to whoever waits
                say(error.with_traceback(None))
            else:
                say(None)
            self._under_way = ()

    def drop(self) -> bool:
        """Call nobody any more. Whether anybody was to be called."""
        with self._lock:
            under_way, self._under_way = self._under_way, ()
        return bool(under_way)


class SharesUnderWay:
    """What the ranks of all hosts have sent with one message, in this host's memory.

    Args:
        spreading: has the words.
        places: of the words.
        number: what they will say.
    """

    def __init__(self, spreading: Spreading, places: Sequence[int], number: int) -> None:
        self._spreading = spreading
        self._places = places
        self._number = number

    def abandon(self) -> bool:
        """As :meth:`Spreading.abandon`."""
        return self._spreading.abandon()

    def is_completed(self) -> bool:
        """Whether waiting would return, or raise, at once."""
        return self._missing() is None or self._failed() is not None

    def _missing(self) -> tuple[int, int] | None:
        """A word that does not say so yet, and what it says."""
        said = ((place, self._spreading.seen(place)) for place in self._places)
        return next((one for one in said if one[1] != self._number), None)

    def _failed(self) -> int | None:
        return next((place for place in self._places if self._spreading.seen(place) == _FAILED), None)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Until all of it is there. Raises ``RuntimeError`` if it lasts longer, and can be called again then.

        It also raises if something will never come, and then at once, whatever else is on its way.
        """
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while (missing := self._missing()) is not None:
            if (failed := self._failed()) is not None:
                self._spreading.refuse(failed)
            left = _SLICE_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                raise RuntimeError("not done in time")
            self._spreading.sleep(*missing, min(left, _SLICE_SECONDS))
