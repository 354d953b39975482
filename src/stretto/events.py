"""The interface through which a run can be observed.

An observer is any object that has some of the methods of :class:`Observer`. The reducer asks ``if events.bucket_full:``
before it calls anything, so an unobserved run pays only the test of an empty list. An observer that raises is dropped
with a log line, and training goes on.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .errors import SetupError

log = logging.getLogger("stretto")


class Observer(Protocol):
    """What can be observed; leave out what you do not need.

    Calls come from the thread that runs forward, backward or the shadow pass; on accelerators ``gradient_ready`` comes
    from autograd's threads, one a device.

    ``pass_number`` counts from 1; ``bucket`` is the index in the plan, which is also the launch order.

    Example::

        class PrintLaunches:
            def bucket_launched(self, pass_number, bucket, nbytes):
                print(f"pass {pass_number}: bucket {bucket} has left")


        sync.observe(PrintLaunches())
    """

    def forward_started(self, pass_number: int) -> None:
        """The attached module was called, in training mode; the pass has not begun. Other methods are not seen."""

    def forward_ended(self, pass_number: int) -> None:
        """It has returned."""

    def pass_started(self, pass_number: int) -> None:
        """The first gradient of a pass has arrived."""

    def gradient_ready(self, pass_number: int, name: str) -> None:
        """The gradient of parameter ``name`` is in ``.grad``."""

    def gradient_kept(self, pass_number: int) -> None:
        """A gradient has come that is not to be synchronised; it counts with the pass that begins next."""

    def bucket_full(self, pass_number: int, bucket: int, closed_by: str) -> None:
        """All gradients of the bucket are there; ``closed_by`` is the parameter that came last."""

    def launch_started(self, pass_number: int, bucket: int) -> None:
        """The bucket is about to be handed to the transport or the comm hook."""

    def bucket_launched(self, pass_number: int, bucket: int, nbytes: int) -> None:
        """It was handed over."""

    def work_under_way(self, pass_number: int, bucket: int, work: Any) -> None:
        """What the transport returned: a :class:`~stretto.transport.Work`, for observers of when it ends."""

    def backward_ended(self, pass_number: int) -> None:
        """The outermost backward has run; what has not left leaves now, and then this rank waits."""

    def bucket_reduced(self, pass_number: int, bucket: int) -> None:
        """The bucket holds the result on this rank."""

    def buffers_sent(self, pass_number: int, messages: int, nbytes: int) -> None:
        """The module's buffers were put under way, coalesced."""

    def pass_settled(self, pass_number: int) -> None:
        """Every ``.grad`` is in place; ``backward`` is about to return."""

    def plan_changed(self, pass_number: int, plan: Any) -> None:
        """A new ``BucketPlan`` was agreed in this pass and is used from the next one on."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


Subscription = tuple[object, Callable[..., None]]


class Events:
    """For each event, the methods to call; empty lists without observers."""

    forward_started: list[Subscription]
    forward_ended: list[Subscription]
    pass_started: list[Subscription]
    gradient_ready: list[Subscription]
    gradient_kept: list[Subscription]
    bucket_full: list[Subscription]
    launch_started: list[Subscription]
    bucket_launched: list[Subscription]
    work_under_way: list[Subscription]
    backward_ended: list[Subscription]
    bucket_reduced: list[Subscription]
    buffers_sent: list[Subscription]
    pass_settled: list[Subscription]
    plan_changed: list[Subscription]

    def __init__(self, rank: int) -> None:
        self.rank = rank
        for event in EVENTS:
            setattr(self, event, [])
        self._ended = 0

    def add(self, observer: object) -> None:
        """Call the observer's methods from the next event on.

        Raises:
            SetupError: the observer has none of these methods.
        """
        methods = {event: getattr(observer, event, None) for event in EVENTS}
        if not any(map(callable, methods.values())):
            raise SetupError(
                f"rank {self.rank}: observe() was given {reprlib.repr(observer)}, which has no method named after "
                "an event.\nGive it methods of stretto.events.Observer, such as pass_settled(self, pass_number)."
            )
        for event, method in methods.items():
            if callable(method):
                getattr(self, event).append((observer, method))

    def remove(self, observer: object) -> None:
        """Forget an observer; unknown ones are ignored."""
        for event in EVENTS:
            subscriptions = getattr(self, event)
            subscriptions[:] = [one for one in subscriptions if one[0] is not observer]

    def end_backward(self, pass_number: int) -> None:
        """Tell once a pass that backward has run: before the first handle waits, where several are in one backward."""
        if self._ended != pass_number:
            self._ended = pass_number
            self.emit(self.backward_ended, pass_number)

    def emit(self, subscriptions: Sequence[Subscription], *values: object) -> None:
        """Call each; an observer that raises is dropped."""
        for observer, method in list(subscriptions):
            try:
                method(*values)
            except Exception:
                log.exception(
                    "rank %s, pass %s: observer %r raised an exception and was removed; training goes on.\n"
                    "Fix it and pass it to sync.observe(...) again.",
                    self.rank,
                    values[0],
                    observer,
                )
                self.remove(observer)
