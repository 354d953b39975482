"""Shares of ranks on several hosts, sent into memory that the ranks of a host have in common.

    place p of each host ──all-to-all──> place p of the others ──> into its host's memory ──> its word says so
    whoever reads sleeps on the words of all places of its host

A thread does the last two steps, see courier.py. If the data will never arrive, the word is set to ``_FAILED``.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from .base import Work
from .common import common_memory
from .courier import Courier, Incoming
from .futex import Futex

if TYPE_CHECKING:
    from .hierarchical import Team

_FAILED = 2**32 - 1
_ROUNDS = _FAILED - 1
_SLICE_SECONDS = 0.2


class Spreading:
    """Messages that are sent repeatedly, one round after every step. Collective to make.

    Args:
        team: of all ranks; on each host equally many.
        messages: how many in a round.
        wait_for: waits for a collective, named by a noun.
    """

    def __init__(self, team: Team, messages: int, wait_for: Callable[[Work, str], None]) -> None:
        self.hosts = team.hosts
        self.local_rank = team.host.local_rank
        self._team = team
        self._messages = messages
        count = messages * len(team.host.peers)
        memory = common_memory(team.host, 4 * count, wait_for, "words about shares")
        self._words = Words(memory.words(count), team.host.page.futex)
        self._round = 0

    def begin(self) -> None:
        """A round begins; all messages of the last one have arrived. Collective."""
        self._round = self._round % _ROUNDS + 1
        self._team.counterparts.courier.trust()

    def doubt(self) -> None:
        """Nobody waits for this round any more."""
        self._team.counterparts.courier.doubt()

    def send(
        self, message: int, share: torch.Tensor, numels: Sequence[int], others: Sequence[torch.Tensor]
    ) -> SharesUnderWay:
        """Send this rank's share to its place on the other hosts; theirs go into this host's memory. Collective.

        Args:
            message: its number in the round.
            share: flat.
            numels: elements of the shares of this place, by host.
            others: where the shares of the other hosts belong.
        """
        places = [self._messages * place + message for place in range(len(self._team.host.peers))]
        say = self._words.sayer(places[self.local_rank], self._round)
        if any(numels):
            received = share.new_empty(sum(numels) - len(share))
            exchange = self._team.counterparts.spread(received, share, numels)
            self._team.counterparts.courier.take(Incoming(exchange, received, others, say))
        else:
            say(None)
        ranks = dict(zip(places, self.hosts[self._team.host_number], strict=True))
        return SharesUnderWay(self._words, ranks, self._round, self._team.counterparts.courier, self._team.host.abroad)


class Words:
    """Numbers that the ranks of a host tell each other, each with one writer.

    Args:
        numbers: in common memory.
        futex: to sleep on them.
    """

    def __init__(self, numbers: memoryview, futex: Futex) -> None:
        self._numbers = numbers
        self._futex = futex
        self._address = torch.frombuffer(numbers, dtype=torch.int32).data_ptr() if len(numbers) else 0
        self.problems: dict[int, BaseException] = {}
        """Why this rank's own words are ``_FAILED``, by place."""

    def sayer(self, place: int, number: int) -> Callable[[BaseException | None], None]:
        """To be called once, by whatever thread."""

        def say(problem: BaseException | None) -> None:
            if problem is not None:
                self.problems[place] = problem
            self._futex.fence()
            self._numbers[place] = number if problem is None else _FAILED
            self._futex.wake(self._address + 4 * place)

        return say

    def seen(self, place: int) -> int:
        """What is said."""
        return self._numbers[place]

    def fence(self) -> None:
        """Orders the read of a word before reads of the data that it announces."""
        self._futex.fence()

    def sleep(self, place: int, seen: int, seconds: float) -> None:
        """Sleep until the word changes, or for so long."""
        self._futex.wait(self._address + 4 * place, seen, seconds)


@dataclass(eq=False)
class SharesUnderWay:
    """One message from the ranks of all hosts, arriving in this host's memory.

    ``goes_on_by_itself``: a rank that has finished and ends stays until others have what they need from it.
    """

    goes_on_by_itself = True

    _words: Words
    """Say whether the data is there."""
    _ranks: Mapping[int, int]
    """Which rank says it, by the word's place."""
    _number: int
    """The value that the words will have."""
    _courier: Courier
    _abroad: str
    """The ranks with which this one exchanges."""

    def is_completed(self) -> bool:
        """Whether waiting would return, or raise, at once."""
        return self._missing() is None or bool(self._failed())

    def _missing(self) -> tuple[int, int] | None:
        """A word that does not say so yet, and its value."""
        said = ((place, self._words.seen(place)) for place in self._ranks)
        return next((one for one in said if one[1] == _FAILED or self._is_behind(one[1])), None)

    def _is_behind(self, round_: int) -> bool:
        """Another thread may have begun the next round."""
        return (round_ - self._number) % _ROUNDS >= _ROUNDS // 2

    def _failed(self) -> list[int]:
        return [place for place in self._ranks if self._words.seen(place) == _FAILED]

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until all of it is there. Raises ``RuntimeError`` if it takes longer; may then be called again.

        It also raises if a part will never arrive, and then at once, whatever else is under way.
        """
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while (missing := self._missing()) is not None:
            if failed := self._failed():
                self._refuse(failed)
            left = _SLICE_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                raise RuntimeError("not done in time")
            self._words.sleep(*missing, min(left, _SLICE_SECONDS))
        self._words.fence()

    def _refuse(self, failed: list[int]) -> NoReturn:
        for place in failed:
            if (problem := self._words.problems.get(place)) is not None:
                raise RuntimeError(
                    f"the exchange of rank {self._ranks[place]} with {self._abroad} has failed: {problem}"
                )
        raise RuntimeError(f"the exchange of rank {self._ranks[failed[0]]} with other hosts has failed")

    def doubt(self) -> None:
        """The rank that waited for it has stopped waiting."""
        self._courier.doubt()
