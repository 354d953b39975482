"""What one rank tells the others of one handle: who it is, that a pass has failed, that it leaves."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

from .channel import Channel, channel_of
from .errors import CommunicationError
from .line import Line
from .notes import text_of
from .seat import Seat, nothing
from .transport.base import Transport
from .whereabouts import of_group, place_of_failure


class Teller:
    """This rank's side of :class:`~stretto.peers.Peers`, which says what the arguments are."""

    def __init__(self, transport: Transport, occasion: str) -> None:
        self.seat = Seat(group=of_group(transport))
        self.left = ""
        """What this rank told the others when it could take part in passes no more."""
        self._occasion = occasion
        self._channel: Channel | None = None
        self.line: Line | None = None  # to the store, once this is open
        self.use(transport)

    def use(self, transport: Transport) -> None:
        """Another transport of the same ranks from here on, with the same store."""
        self._transport, self.leftovers = transport, transport.leftovers

    def open(self) -> None:
        """Announce this rank to the others; a long wait does so. Harmless twice."""
        if self._channel is None and self._transport.world_size > 1 and (store := self._transport.store) is not None:
            self._channel = channel_of(store, self._transport.rank, self._transport.world_size)
            self.line = self._channel.line
            self._parting = weakref.finalize(self, self._channel.close, self.seat, "dropped")
            self._parting.atexit = False  # the channel knows when the process ends
            self._channel.open(self.seat, self.leftovers[:1])

    def close(self, *, failed: bool = False) -> None:
        """Tell that this rank has done its passes, or has failed before the first. Harmless twice."""
        if self._channel is not None and self._parting.detach():
            self._channel.close(self.seat, "detached", stays=failed)

    @property
    def where(self) -> str:
        """How messages begin."""
        return f"rank {self._transport.rank}, {self.seat.when(self._occasion)}"

    def tell_failed(
        self,
        phase: str,
        error: BaseException | None,
        trace: TracebackType | None = None,
        *,
        before: bool = False,
        leaves: bool = False,
        refuses: bool = False,
    ) -> None:
        """Others will quote it. Never raises: an exception is on its way already.

        Args:
            phase: in which part of a step.
            error: if it could be seen.
            trace: says where.
            before: the failure is of the next pass, which has not begun.
            leaves: this rank cannot take part in passes any more, or, where it ``refuses``, in this step alone.
            refuses: a step.
        """
        if refuses:
            self.seat.refused = sum(self.seat.steps)
        elif leaves:
            self.left, self.seat.alarm = text_of(error) or phase, nothing
        if self._channel is None:
            return
        place = "" if trace is None else place_of_failure(trace, sys._getframe())
        note = self.seat.note(self._transport.rank, phase, text_of(error), place, before=before)
        leftover = next(([one.handle, *one.used] for one in self.leftovers if one.is_sent_by(note.rank)), [])
        attempts = leaves and not note.handle and self._occasion == "attach"
        attempt = self._channel.count_attempt(self.seat) if attempts else 0
        note = replace(note, leaves=leaves, refused=refuses * self.seat.refused, leftover=leftover, attempt=attempt)
        if note.of_process:
            self.seat.unsent.append(note)
        else:
            self._channel.post(note)

    def leave(self, phase: str, error: BaseException, trace: TracebackType | None = None, *, sent: bool = True) -> None:
        """Tell the others that this rank has lost its place. ``sent``: it may have sent what no rank waits for."""
        for one in self.leftovers:
            one.is_of(self._transport.rank, self.seat.handle, text_of(error), is_sent=sent)
        self.tell_failed(phase, error, trace, leaves=True)

    def fall_behind(self, error: BaseException) -> None:
        """This rank has lost its place; the others are to be told by ``tell_failed``, when it is seen why."""
        self.left = text_of(error)
        for one in self.leftovers:
            one.is_of(self._transport.rank, self.seat.handle, self.left, is_sent=False)

    def lose_place(self, error: BaseException) -> None:
        """After Ctrl-C, say: the others wait for nothing, and would meet another call here."""
        if self.seat.handle and not (self.left or isinstance(error, CommunicationError)):
            self.leave("waiting", error)

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Between or amid messages that all ranks send: one that fails there tells the others, who wait, or go on."""
        try:
            yield
        except BaseException as error:
            self.lose_place(error)
            raise
