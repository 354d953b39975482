"""What a pass sends behind the last bucket: rows of sparse gradients, then buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .broadcast import CoalescedMessages
from .buffers import BufferPlaces
from .launch import LaunchQueue
from .sparse import GivenRows, SparseGradients
from .words import Control, ControlWords


class Beside:
    """Both, of one reducer, with what a model does not have left out.

    Args:
        queue: has the transport, and waits; its events tell when buffers leave.
        places: where buffers live.
        sparse: parameters in no bucket; mostly none.
    """

    def __init__(self, queue: LaunchQueue, places: BufferPlaces, sparse: SparseGradients) -> None:
        self.sparse = sparse
        self.places = places
        self._queue = queue
        self._events = queue.events
        if queue.preset is not None:
            sparse.before = queue.preset.before

    def hook(self, owner: object, arrived: Callable[[], bool]) -> None:
        """As :meth:`SparseGradients.hook`; ``arrived`` returns whether it was in a pass."""
        preset, queue, events = self._queue.preset, self._queue, self._events

        def came(name: str, parameter: torch.Tensor) -> None:
            if arrived() and events.gradient_ready:
                events.emit(events.gradient_ready, queue.pass_number, name)
            if preset is not None:
                preset.accumulated(parameter)

        self.sparse.hook(owner, came)

    def prepare(self) -> list[GivenRows] | None:
        """What this rank contributes. Whatever can fail on one rank only fails here."""
        return self.sparse.prepare(self._queue.weight_now) if self.sparse.any else None

    def send(self, rows: list[GivenRows] | None) -> CoalescedMessages:
        """Send all of it, and return the buffers' messages. Collective; ``None`` if there is nothing to give."""
        if self.sparse.any:
            self.sparse.exchange(rows, self._queue.wait_for)
        return self._send_buffers()

    def send_given_up(self) -> CoalescedMessages:
        """The same for a rank that gives up the pass; does not wait.

        Its own buffers stay unchanged: the received values are dealt with in the next pass, after another forward has
        written them.
        """
        if self.sparse.any:
            self.sparse.forget()
            self.sparse.exchange_given_up()
        return self._send_buffers().for_others()

    def _send_buffers(self) -> CoalescedMessages:
        if not self._queue.tells:
            self.places.wake()  # nobody can say that they have changed
        sent = self.places.send(self._queue.transport)
        if sent.messages and self._events.buffers_sent:
            self._events.emit(self._events.buffers_sent, self._queue.pass_number, len(sent.messages), sent.nbytes)
        return sent

    def finish(self, buffers: CoalescedMessages, words: ControlWords, *, release: bool) -> None:
        """Wait for it.

        Buffers stay unchanged if the pass met that of another handle, or if it is known that a rank gave up: that rank
        keeps its own, which would count twice in the next mean. They also stay if the module has changed, since
        stand-ins may be among them; rejoin.py sends the present ones.

        Args:
            buffers: their messages under way.
            words: what ranks said.
            release: put sparse gradients into ``.grad``.
        """
        mixed = words.on_host and words.are_mixed
        if self.sparse.any:
            factor = self._queue.scaling.after(self._queue.buckets[-1].footer.weight)
            self.sparse.finish(factor, self._queue.wait_for, release=release and not mixed)
        if buffers.messages:
            keep = not (mixed or self.sparse.given_up or (words.on_host and words.decide_nothing))
            buffers.finish(self._queue.wait_for, "the buffers", keep=keep)

    def says(self) -> list[Control]:
        """What this rank reports about its buffers."""
        return [Control.BUFFERS] if self.places.have_moved() else []

    def hear(self, *, some_have_moved: bool) -> None:
        """Send all buffers if those of some rank are no longer what all had. Collective."""
        if self.places.hear(self._queue.pass_number, some_have_moved=some_have_moved):
            self._send_buffers().finish(self._queue.wait_for, "the buffers")

    def forget(self) -> None:
        """What has arrived so far is dealt with."""
        if self.sparse.any:
            self.sparse.forget()
        if self._queue.preset is not None:
            self._queue.preset.forget()
