"""From events to records: a stopwatch that is there only while somebody looks.

events ──> Recorder ──> PassRecord ──> analysis.py, writing.py
Sampler ── switches a Recorder on for a few passes, so that ``report()`` has something to say without being asked
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .engine import current_task
from .flights import Flight, now
from .plan import BucketPlan
from .record import Launch, PassRecord, Span
from .reducer import Reducer
from .steps import listen, stepped_by, stop_listening
from .withheld import Alive

FIRST_PASSES = range(4, 9)
"""Looked at without being asked: the plan is learnt by then, memory is warm."""
EVERY = 100
"""And then one pass in so many."""
KEPT = 20
"""So many records are kept for a report."""


class Recorder:
    """An observer that makes a :class:`PassRecord` of each pass that settles. One rank, not collective.

    Args:
        watched: whose passes; held weakly.
        keep: called with each record, and the plan it was made under.
    """

    def __init__(self, watched: Reducer, keep: Callable[[PassRecord, BucketPlan], object]) -> None:
        self._watched = weakref.ref(watched)
        self._keep = keep
        self.listens = False
        """Whether passes are being recorded."""
        self._parameters = Alive()
        self._forget()

    def start(self) -> None:
        """From now on. Harmless twice."""
        watched = self._watched()
        if self.listens or watched is None:
            return
        self._forget()
        self._parameters = Alive(watched.parameters)
        self.listens = True
        listen(self._stepping)
        watched.start_watching(self)

    def stop(self) -> None:
        """Look no more. Harmless twice, and then it costs nothing."""
        if not self.listens:
            return
        self.listens = False
        stop_listening(self._stepping)
        if (watched := self._watched()) is not None:
            watched.stop_watching(self)

    def _forget(self) -> None:
        self._began = now()
        self._started = self._ended = 0
        self._forwards: list[Span] = []
        self._optimizer: list[Span] = []
        self._kept: dict[int, Span] = {}  # by the forward's end, or if another method ran it by the engine's task
        self._open: list[tuple[Any, int]] = []  # what has begun and not ended: optimizers, and None for a forward
        self._empty()

    def _empty(self) -> None:
        """Of what belongs to the pass alone."""
        self.gradients: list[tuple[str, int]] = []
        self._full: dict[int, tuple[str, int]] = {}
        self._flights: dict[int, Flight] = {}
        self._under_way: list[Flight] = []
        self._buffers: int | None = None
        self._buffer_bytes = self._sparse_before = 0

    # The step around the pass

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if not begins:
            self._close(optimizer, self._optimizer)
        elif any(map(self._parameters.holds, stepped_by(optimizer))):
            self._open.append((optimizer, now()))

    def _close(self, what: Any, spans: list[Span]) -> None:
        found = [one for one in self._open if one[0] is what]  # no places: another thread, of another model, comes by
        if not found:
            return
        begin = found[-1][1]
        self._open = [one for one in self._open if one is not found[-1]]
        while spans and spans[-1].begin >= begin:  # a sharded optimizer steps one inside
            spans.pop()
        spans.append(Span(begin, now()))

    def forward_started(self, pass_number: int) -> None:
        """See :class:`~stretto.events.Observer`, as for the methods below."""
        self._open.append((None, now()))

    def forward_ended(self, pass_number: int) -> None:
        """An inner call of the module's own forward is part of the outer one."""
        self._close(None, self._forwards)

    # The pass

    def pass_started(self, pass_number: int) -> None:
        """A pass before may have been given up; what it left is no part of this one."""
        if self._started:
            self._forget_failed()
        self._empty()
        if (watched := self._watched()) is not None:
            self._sparse_before = watched.sparse.total_bytes
        self._started = now()
        self._ended = 0

    def _forget_failed(self) -> None:
        for spans in (self._forwards, self._optimizer):
            spans[:] = [span for span in spans if span.begin > self._started]
        self._kept = {which: span for which, span in self._kept.items() if span.begin > self._started}
        self._open = [one for one in self._open if one[0] is not None and one[1] > self._started]
        self._began = self._forwards[0].begin if self._forwards else now()

    def gradient_kept(self, pass_number: int) -> None:
        """The backward of a micro-batch: from the forward before it, or its first gradient, to its last."""
        at, ended = now(), self._forwards[-1].end if self._forwards else 0
        before = self._kept.get(which := ended or current_task())
        self._kept[which] = Span(before.begin if before else ended or at, at)

    def bucket_full(self, pass_number: int, bucket: int, closed_by: str) -> None:
        """Its gradients are there; earlier buckets may still be missing some."""
        self._full[bucket] = closed_by, now()

    def launch_started(self, pass_number: int, bucket: int) -> None:
        """The transport is called."""
        self._flights[bucket] = Flight(now())

    def bucket_launched(self, pass_number: int, bucket: int, nbytes: int) -> None:
        """The call has returned, and may have moved earlier buckets too."""
        flight = self._flights[bucket]
        flight.handed_over, flight.nbytes = now(), nbytes
        self._look()

    def work_under_way(self, pass_number: int, bucket: int, work: Any) -> None:
        """Ask it to tell when it ends."""
        flight = self._flights[bucket]
        flight.follow(work)
        if flight.tells:
            self._under_way.append(flight)

    def bucket_reduced(self, pass_number: int, bucket: int) -> None:
        """This rank has waited for it. What was launched by a pass given up before one looked is unknown."""
        if bucket in self._flights:
            self._flights[bucket].seen = now()
        self._look()

    def backward_ended(self, pass_number: int) -> None:
        """What leaves from here on leaves exposed."""
        self._ended = now()

    def buffers_sent(self, pass_number: int, messages: int, nbytes: int) -> None:
        """Behind the last bucket."""
        self._buffers, self._buffer_bytes = now(), nbytes

    def plan_changed(self, pass_number: int, plan: BucketPlan) -> None:
        """The module may have other parameters now."""
        if (watched := self._watched()) is not None:
            self._parameters = Alive(watched.parameters)

    def pass_settled(self, pass_number: int) -> None:
        """The record is complete. If recording began during the pass, there is none."""
        settled, watched = now(), self._watched()
        assert watched is not None, "it has just settled"
        whole = self._started and self._ended and all(one.seen for one in self._flights.values())
        if whole and self._started >= self._began:
            self._keep(self._record(pass_number, settled, watched), watched.plan)
        self._forget()
        self._began = settled

    def _look(self) -> None:
        for flight in self._under_way:
            flight.look()
        self._under_way = [flight for flight in self._under_way if not flight.end]

    def _record(self, number: int, settled: int, watched: Reducer) -> PassRecord:
        waited, launches = Span(*watched.queue.presence.waited), []
        for bucket, flight in self._flights.items():
            name, full = self._full.get(bucket, ("", None))
            end = max(flight.handed_over, min(flight.end or flight.seen, flight.seen))
            times = (full, flight.begin, flight.handed_over, end, flight.seen)
            launches.append(Launch(bucket, flight.nbytes, name, *times, told=flight.tells))
        return PassRecord(
            number=number,
            plan=watched.plan.hash,
            began=self._began,
            started=self._started,
            backward_ended=self._ended,
            settled=settled,
            forwards=tuple(self._forwards),
            optimizer=tuple(self._optimizer),
            gradients=tuple(self.gradients),
            launches=tuple(launches),
            buffers=self._buffers,
            unsynchronized=tuple(self._kept.values()),
            waits=(waited,) if self._started <= waited.begin < self._ended else (),
            sparse_bytes=watched.sparse.total_bytes - self._sparse_before,
            buffer_bytes=self._buffer_bytes,
        )


class GradientRecorder(Recorder):
    """The same, with the time of each gradient: then each is looked at when it arrives, some microseconds each."""

    def gradient_ready(self, pass_number: int, name: str) -> None:
        """See :class:`~stretto.events.Observer`."""
        self.gradients.append((name, now()))


class Sampler:
    """Records a few passes by itself: the first after learning, then one in a hundred.

    An observer of nothing but the ends of passes: what a run pays while no pass is recorded.

    Args:
        watched: whose passes.
    """

    def __init__(self, watched: Reducer) -> None:
        self.every = EVERY
        self._records: dict[int, tuple[PassRecord, BucketPlan]] = {}
        self.keep = functools.partial(_keep_last, self._records)
        """Called with a record, also by others that have made one, and its plan."""
        self._recorder = Recorder(watched, self.keep)

    @property
    def records(self) -> list[tuple[PassRecord, BucketPlan]]:
        """The last ones, oldest first, each with its plan."""
        return [*self._records.values()]

    def pass_settled(self, pass_number: int) -> None:
        """Is the next one to be looked at?"""
        following = pass_number + 1
        if following in FIRST_PASSES or not following % self.every:
            self._recorder.start()
        elif self._recorder.listens:
            self._recorder.stop()

    def stop(self) -> None:
        """Look no more. Harmless twice."""
        self._recorder.stop()


def _keep_last(records: dict[int, tuple[PassRecord, BucketPlan]], record: PassRecord, plan: BucketPlan) -> None:
    """Of two records of one pass the one that saw single gradients."""
    if record.gradients or record.number not in records:
        records[record.number] = record, plan
    while len(records) > KEPT:
        del records[next(iter(records))]
