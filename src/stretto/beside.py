"""What travels in a pass behind the last bucket: rows of sparse gradients, then buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .broadcast import CoalescedMessages
from .buffers import BufferPlaces
from .events import Events
from .launch import LaunchQueue
from .sparse import Share, SparseGradients


class Beside:
    """Both, of one reducer, with what a model does not have left out.

    Args:
        queue: has the transport, and waits.
        places: where buffers live.
        sparse: parameters in no bucket, if there are any.
        events: told when buffers leave.
    """

    def __init__(
        self, queue: LaunchQueue, places: BufferPlaces, sparse: SparseGradients | None, events: Events
    ) -> None:
        self.sparse = sparse
        self._queue = queue
        self._places = places
        self._events = events

    def hook(self, owner: object, arrived: Callable[[str], None]) -> None:
        """As :meth:`SparseGradients.hook`."""
        if self.sparse is not None:
            self.sparse.hook(owner, arrived)

    def remove(self) -> None:
        """Take the hooks off."""
        if self.sparse is not None:
            self.sparse.remove()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that lie in no bucket."""
        return [] if self.sparse is None else [*self.sparse.named_parameters().values()]

    @property
    def total_bytes(self) -> int:
        """Of this rank's sparse gradients, sent so far."""
        return 0 if self.sparse is None else self.sparse.total_bytes

    @property
    def given_up(self) -> int:
        """How many ranks said in this pass that they gave it up; no words say so beside ``noop_hook``."""
        return 0 if self.sparse is None else self.sparse.given_up

    def prepare(self) -> list[Share] | None:
        """What this rank has to give. What can fail on one rank alone fails here."""
        return None if self.sparse is None else self.sparse.prepare(self._queue.weight, self._queue.where)

    def send(self, shares: list[Share] | None) -> CoalescedMessages:
        """Put all of it under way; returns the buffers' messages. Collective; ``None`` if there is nothing to give."""
        if self.sparse is not None:
            self.sparse.exchange(shares, self._queue.wait_for)
        return self._send_buffers()

    def send_spoiled(self) -> CoalescedMessages:
        """The same for a rank that gives up the pass; waits for nobody."""
        if self.sparse is not None:
            self.sparse.forget()
            self.sparse.exchange_spoiled()
        return self._send_buffers()

    def _send_buffers(self) -> CoalescedMessages:
        sent = self._places.send(self._queue.transport)
        if sent.messages and self._events.buffers_sent:
            self._events.emit(self._events.buffers_sent, self._queue.pass_number, len(sent.messages), sent.nbytes)
        return sent

    def finish(self, buffers: CoalescedMessages, *, release: bool) -> None:
        """Wait for it. ``release``: put sparse gradients into ``.grad``."""
        if self.sparse is not None:
            factor = self._queue.scaling.after(self._queue.buckets[-1].weight)
            self.sparse.finish(factor, self._queue.wait_for, release=release)
        buffers.finish(self._queue.wait_for, "the buffers")

    def forget(self) -> None:
        """What has arrived so far is dealt with."""
        if self.sparse is not None:
            self.sparse.forget()

    def reset(self) -> None:
        """Nothing is under way, for the next pass."""
        if self.sparse is not None:
            self.sparse.reset()
