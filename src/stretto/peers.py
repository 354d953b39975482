"""When one rank fails, ends or does not come, the others learn of it within seconds, in its own words.

a rank fails or ends ──> Note in the store          a rank waits ──> in slices; between them it reads the notes
                                                                 └─> PeerError that quotes them

All waiting for other ranks goes through here; telling.py has what this rank tells them. The channel is the process
group's store, so that it works when collectives do not. Passes that go well never use it.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from . import blame
from .alarm import Alarm
from .channel import Channel
from .errors import CallsDifferError, CommunicationError, PeerError
from .inquiry import Inquiry, where_all_are, words_of
from .notes import Note, text_of
from .seat import nothing
from .telling import Teller
from .transport.base import Transport, Work, done_within, raised_by_handler
from .waiting import FIRST_SLICE, SLICE, equal_by_sums, gather_by_sums, takes_time, this_thread, wait_a_while
from .whereabouts import Person

GONE_SECONDS = 1.0  # how long, when a collective failed, for a note or for a process to be seen dead


class Introduction(NamedTuple):
    """What a rank brings where all agree on the handle's name."""

    offer: str
    """The name, if this is rank 0."""
    begun: int = 0
    """See :meth:`~stretto.channel.Channel.counted`."""
    attempts: int = 0
    person: Person | None = None


class Peers(Teller):
    """The other ranks of one attached handle, as far as they tell of themselves.

    Creating one is not collective. The first ``gather`` agrees on the handle's name, that which rank 0 brings.

    Args:
        transport: has the ``store``, and in ``patience`` how long a collective may take; see :class:`Transport`.
        occasion: what messages call the time before the first pass: ``"attach"`` or ``"reduce"``.
    """

    def __init__(self, transport: Transport, occasion: str = "attach") -> None:
        self.alarm = Alarm(self._blame)
        self._offer, self._pid = secrets.token_hex(8), os.getpid()
        super().__init__(transport, occasion)  # last: it begins to use the transport

    def use(self, transport: Transport) -> None:
        """Another transport of the same ranks from here on, with the same store."""
        super().use(transport)
        self._waits_on_host = transport.patience is not None
        self.seat.alarm = nothing if self._waits_on_host else self.alarm.look

    # Meeting

    def meet(self) -> list[tuple[int, int]]:
        """Agree on the handle's name, if that has not been done: the ``place`` of each rank's seat. Collective then."""
        return [] if self._channel is None or self.seat.handle else self.gather(self.seat.place)

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in order; ``CommunicationError`` if that will never be. Collective."""
        self.refuse_misplaced()
        self.seat.calls += 1
        has_name = bool(self.seat.handle)
        try:
            self.refuse_leftovers("waiting")
            self._come_together(sys._getframe(1))
            self.refuse_leftovers("waiting")  # of which it may have read meanwhile
            brought = self._introduction(), value  # also with a name: a rank in another call may have none yet
            if not self._waits_on_host:
                everyone: list[Any] = self._transport.all_gather_object(brought)
            else:
                everyone = gather_by_sums(brought, self._transport, self.wait if has_name else self._go)
            if not has_name:
                self._name([introduction for introduction, _ in everyone])
            elif self._channel is not None and self._occasion == "attach":
                self._channel.came(self.seat)
        except BaseException as error:
            if isinstance(error, RuntimeError) and not raised_by_handler(error):
                self.fail("what ranks hold could not be gathered", error)
            self.lose_place(error)
            raise
        finally:
            self.seat.meets = False  # one that came to nothing counts nowhere: some ranks did not come to it
            if not has_name:
                self._go()
        return [other for _, other in everyone]

    def _come_together(self, caller: FrameType) -> None:
        """Else what ranks send in two different calls would meet: Gloo ends the process if sizes differ, or sums it."""
        if (channel := self._channel) is None or self._occasion != "attach":
            return  # of others only those open the channel that wait long
        if not self.seat.handle:
            self.seat.meets = True
            channel.count_attempt(self.seat)
        patience = self._transport.patience
        if patience is None or not channel.can_meet():
            return
        blame.refuse_if_lost(self.where, self.left)
        try:
            word = channel.come(self.seat, caller, functools.partial(self._transport.flush, 0.0))
            if not self.seat.handle:
                return wait_a_while(word, patience, self.wait)
            self.wait(word)
            blame.refuse_other_calls(self.where, word.said())
        except BaseException as error:
            if not self.seat.handle:
                channel.go()  # at once: to find out why takes seconds, in which another would find this rank here
            self.lose_place(error)
            raise

    def _go(self, work: Work | None = None) -> None:
        """After the first of two messages all have come; a rank that completes the second knows that all have left."""
        if work is not None:
            self.wait(work)
        if self._channel is not None and self._occasion == "attach":
            self._channel.go()

    def all_equal(self, fingerprint: str) -> bool:
        """Whether all ranks bring the same fingerprint, hexadecimal. Collective; one small message."""
        if not self._waits_on_host:
            return len(set(self.gather(fingerprint))) == 1
        self.refuse_misplaced()
        try:
            self.refuse_leftovers("waiting")
            return equal_by_sums(fingerprint, self._transport, self.wait)
        except RuntimeError as error:
            self.fail("what ranks hold could not be gathered", error)

    def _introduction(self) -> Introduction:
        if (channel := self._channel) is None:
            return Introduction(self._offer)
        return Introduction(self._offer, channel.counted(), channel.attempts, channel.me)

    def _name(self, told: Sequence[Introduction]) -> None:
        self.seat.meets, self.seat.handle, self.seat.calls = False, told[0].offer, 1  # some may have tried before
        for place, one in enumerate(self.leftovers):
            one.come_together("" if place else self.seat.handle)
        notes, self.seat.unsent = self.seat.unsent, []
        if (channel := self._channel) is not None:
            channel.catch_up(max(one.begun for one in told), max(one.attempts for one in told))
            channel.know([one.person for one in told])
            for note in notes:
                channel.post(replace(note, handle=self.seat.handle))

    def refuse_leftovers(self, phase: str) -> None:
        """Raise, and tell, if what this rank sends now would meet another message (see ``Leftover``), or none."""
        self.alarm.refuse()
        try:
            blame.refuse_leftovers(self.where, self._transport.rank, self.seat.handle, self.leftovers)
        except CommunicationError as error:
            if self.seat.handle:  # else attaching fails, which tells
                self.tell_failed(phase, error, before=phase == "backward", leaves=True)
            raise (self._blame()[0] or error) from None

    def refuse_lost_sends(self) -> None:
        """Raise ``CommunicationError`` if this rank was stopped while it sent, so that it cannot tell what has left."""
        rank = self._transport.rank
        lost = [one for one in self.leftovers if one.is_sent_by(rank) and not one.handle]
        blame.refuse_leftovers(self.where, rank, self.seat.handle, lost)

    def refuse_misplaced(self) -> None:
        """Raise in a forked child, or during a wait of this thread, before anything is touched."""
        if self._pid != os.getpid() or this_thread.waits:
            blame.refuse_misplaced(self.where, self._transport.rank, self._pid)

    # Waiting

    def wait(self, work: Any, patience: float | None = None) -> None:
        """Wait for a collective, and look for news meanwhile. Work that is done costs one call.

        Args:
            work: to wait for.
            patience: seconds that it may take at most; default, the transport's, after which it is broken off.

        Raises:
            PeerError: it will never be done.
            RuntimeError: as the transport's; hand it to ``fail``.
        """
        if not self._waits_on_host or not takes_time(type(work)):  # type: ignore[arg-type]  # it is hashable
            work.wait()
            return
        waited = this_thread.waits  # so does a wait in a signal handler, for what is under way
        try:
            this_thread.waits = True
            if self._done_within(work, FIRST_SLICE):
                return
            limit = self._transport.patience if patience is None else patience  # not before: most are over by now
            assert limit is not None
            if self._comes(work, limit):
                return
            if patience is None:
                self._transport.break_off(blame.too_late(self._transport.rank, self.seat.when(self._occasion), limit))
            raise RuntimeError(f"not done within {limit:.0f} s")
        except BaseException as error:  # Ctrl-C too: others may wait for something else, and live on
            if not isinstance(error, Exception) and getattr(work, "waits_again", False):
                raise
            if getattr(work, "is_carried", True):  # and not by the store
                self._transport.abandon(work, self.seat.handle, text_of(error))
            if any(one.is_sent_by(self._transport.rank) for one in self.leftovers):
                self.tell_failed("waiting", error)
            raise
        finally:
            this_thread.waits = waited

    def wait_for(self, work: Work, what: str) -> None:
        """The same for ``what``, a noun; raises ``CommunicationError``, which says which rank did not come."""
        try:
            self.wait(work)
        except RuntimeError as error:
            self.fail(f"{what} could not be reduced", error, blame.EXPECTED.get(what))

    def _comes(self, work: Any, patience: float) -> bool:
        began = time.monotonic() - FIRST_SLICE.total_seconds()
        self.open()
        inquiry, suspected = Inquiry(self.seat), False
        while True:
            error, sure = self._blame(by_itself=getattr(work, "goes_on_by_itself", False))
            if error is not None and (sure or suspected):
                raise error
            suspected = error is not None  # it may have done all that was to be done before it left
            if (waited := time.monotonic() - began) > patience:
                return False
            if self._channel is not None:
                self._inquire(inquiry, self._channel, waited)
            if self._done_within(work, SLICE):
                return True

    def _done_within(self, work: Any, limit: timedelta) -> bool:
        try:
            return done_within(work, limit)
        except CommunicationError as error:  # it has seen a rank die, or go, and knows nothing of its last words
            self._look_for_blame(own=not isinstance(error, PeerError), by_itself=blame.is_told(error))
            if isinstance(error, CallsDifferError):
                now = where_all_are(self._channel, self.seat.handle)
                raise blame.unlike_calls(self.where, error, now) from None
            raise

    def _inquire(self, inquiry: Inquiry, channel: Channel, waited: float) -> None:
        """Where all are may explain it: raises ``PeerError``, which all but ``reduce`` quote."""
        try:
            inquiry.go_on(self.where, channel, channel.told(self.seat, others=True), waited)
        except PeerError as error:
            self.leave("waiting", error, sent=False)
            raise

    # Explaining

    def fail(self, what: str, error: RuntimeError, expected: str | None = None, by: str = "") -> NoReturn:
        """Raise ``PeerError`` with the rank to blame, or else ``CommunicationError`` with where the others are."""
        what = f"{self.where}: {what} {f'by {by}' if by else f'over {self._transport.name}'}"
        if raised_by_handler(error):
            raise error
        if isinstance(error, CommunicationError):
            cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            raise blame.told_of(error, what) from cause
        try:
            self.open()
            self._look_for_blame(own=True)
        except PeerError as found:
            raise found from None  # what the transport says of it is less, and may be something else
        now = where_all_are(self._channel, self.seat.handle)
        raise blame.not_done(what, error, now, expected or blame.EXPECTED[self.seat.kind(self._occasion)]) from error

    def _look_for_blame(self, *, own: bool, by_itself: bool = False) -> None:
        """Raise what is to blame, if it can be found soon. ``own``: this rank is what others may have failed for."""
        until = time.monotonic() + (0.0 if self._channel is None or self._channel.in_one_process else GONE_SECONDS)
        while (culprit := self._blame(own=own, by_itself=by_itself)[0]) is None:
            if time.monotonic() >= until:
                return
            time.sleep(0.05)
        raise culprit from None

    def failures(self, ranks: int, phases: Collection[str], *, early: bool = False) -> list[Note]:
        """See :func:`~stretto.inquiry.words_of`."""
        return words_of(self._channel, self.seat, ranks, phases, early=early)

    def _blame(self, *, by_itself: bool = False, own: bool = False, far: bool = False) -> tuple[PeerError | None, bool]:
        """See :func:`~stretto.blame.who_is_to_blame`. ``far``: it is a device that waits, for a pass."""
        channel, seat = self._channel, self.seat
        if channel is None:
            return None, False
        dead = channel.dead() if (known := self._transport.dead()) is None else known
        channel.read()  # last words were written before the death
        channel.look_again()
        left = [note for note in channel.told(seat, others=True) if note.leaves and not seat.has_refused(note)]
        if own:
            left, dead = blame.without_excused(self._transport.rank, left, dead)
        kind = "pass" if far and seat.passes else seat.kind(self._occasion)
        return blame.who_is_to_blame(self.where, kind, seat.passes, left, dead, channel.starved, by_itself=by_itself)
