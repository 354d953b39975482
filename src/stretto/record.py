"""What was seen of one pass on one rank: times, and what follows from them.

All times are nanoseconds of ``time.perf_counter_ns``, the host's steady clock. A record covers the step from the end of
the pass before to the end of this one:

    |-- optimizer --|-- other --|-- forward --|-- loss, backward ----------------|-- waiting --|
    began                                       launches, each some time ──>  backward_ended   settled
                                                hidden: ----- in flight -----    exposed: ------

Exposed is what this rank spent only on communication: handing buckets over, waiting amid backward for the map of what
ranks use (presence.py), and everything after backward. Hidden is the time in which buckets were in flight while
backward computed. Together they are the communication time as this rank experienced it. [Note: in flight] A bucket is
in flight from its launch until its result is there, including the time in which a peer had not come yet. Where the
transport does not tell when the result was there, the bucket counts as in flight until this rank had waited for it:
then hidden is an upper bound.

Report, pictures and summary all take hidden time from :class:`Computing`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

NANO = 1e-9

Clockwise = Callable[[int], int]
"""From a time by one clock to the same time by another; what was later stays later."""


@dataclass(frozen=True)
class Span:
    """From when to when."""

    begin: int
    end: int

    def by(self, clock: Clockwise) -> Span:
        """The same by another clock."""
        return Span(clock(self.begin), clock(self.end))


@dataclass(frozen=True)
class Launch:
    """One bucket on its way."""

    bucket: int
    """Index in the plan."""
    nbytes: int
    """Of payload, as it travels."""
    closed_by: str
    """The parameter whose gradient came last; empty if some had none in this pass."""
    full: int | None
    """When it came; None if some had none."""
    begin: int
    """When the bucket was about to be handed to the transport."""
    handed_over: int
    """When the transport had it."""
    end: int
    """When the result was there, as far as the transport tells; at the latest ``seen``."""
    seen: int
    """When this rank had waited for it."""
    told: bool = True
    """Whether the transport tells when a result is there. If not, ``end`` is ``seen``, and it may have been there long
    before."""

    def by(self, clock: Clockwise) -> Launch:
        """The same by another clock."""
        full = None if self.full is None else clock(self.full)
        times = (full, clock(self.begin), clock(self.handed_over), clock(self.end), clock(self.seen))
        return Launch(self.bucket, self.nbytes, self.closed_by, *times, self.told)


@dataclass(frozen=True)
class PassRecord:
    """One synchronised pass, with what came before it since the last."""

    number: int
    plan: str
    """The hash of the plan in use."""
    began: int
    """When the pass before had settled, or recording began."""
    started: int
    """The first gradient."""
    backward_ended: int
    """The outermost backward had run: from here on this rank only waits."""
    settled: int
    """Every ``.grad`` in place."""
    forwards: tuple[Span, ...] = ()
    """Calls of the attached module. Empty if another method ran forward."""
    optimizer: tuple[Span, ...] = ()
    """Steps of optimizers that hold parameters of the module."""
    gradients: tuple[tuple[str, int], ...] = ()
    """Names as their gradients came, and when; empty if single gradients were not recorded."""
    launches: tuple[Launch, ...] = ()
    """In launch order. Buckets that no rank used are not there."""
    buffers: int | None = None
    """When the module's buffers were put under way."""
    unsynchronized: tuple[Span, ...] = ()
    """Backwards under ``no_sync``, each from the forward before it to its last gradient."""
    waits: tuple[Span, ...] = ()
    """Amid backward, for the other ranks."""
    sparse_bytes: int = 0
    """Of rows of sparse gradients that this rank gave."""
    buffer_bytes: int = 0
    """Of the module's buffers that were put under way."""

    @property
    def launching(self) -> float:
        """Seconds of backward that went into handing buckets over."""
        return covered(launching_of(self), but=self.optimizer)

    @property
    def exposed(self) -> float:
        """Seconds in which this rank did nothing but communicate: no optimizer stepped either, as it may within."""
        return covered((*stops_of(self), Span(self.backward_ended, self.settled)), but=self.optimizer)

    @property
    def came(self) -> int:
        """When backward would have ended, had this rank not waited amid it for others."""
        return self.backward_ended - sum(one.end - one.begin for one in merged(self.waits))

    @property
    def hidden(self) -> float:
        """Seconds of backward in which buckets were in flight while it computed."""
        computing = Computing(self)
        return sum(computing.within(one) for one in merged(Span(one.begin, one.end) for one in self.launches)) * NANO

    @property
    def told(self) -> bool:
        """Whether it is known when each bucket's result was there; if not, ``hidden`` is a bound from above."""
        return all(one.told for one in self.launches)

    @property
    def backward_began(self) -> int:
        """When forward had ended, or else the first gradient came."""
        ended = [span.end for span in self.forwards if span.end <= self.started]
        return ended[-1] if ended else self.started

    @property
    def forward(self) -> float:
        """Seconds in the module's forward, of all micro-batches."""
        return covered(self.forwards)

    @property
    def backward(self) -> float:
        """Seconds from forward's end to the end of backward, of all micro-batches, without launching and waiting."""
        began = self.backward_began
        between = [one for one in (*self.forwards, *self.optimizer) if one.begin >= began]
        # What came under no_sync() from the same forward, as with retain_graph, lies behind that forward too.
        return covered((Span(began, self.backward_ended), *self.unsynchronized), but=(*between, *stops_of(self)))

    @property
    def stepping(self) -> float:
        """Seconds in optimizers."""
        return covered(self.optimizer)

    @property
    def step(self) -> float:
        """Seconds from one settled pass to the next."""
        return (self.settled - self.began) * NANO

    @property
    def other(self) -> float:
        """Seconds of the step outside all this: data, the zeroing of gradients, what is not seen."""
        return max(0.0, self.step - self.forward - self.backward - self.exposed - self.stepping)

    def by(self, clock: Clockwise) -> PassRecord:
        """The same by another clock."""
        return replace(
            self,
            began=clock(self.began),
            started=clock(self.started),
            backward_ended=clock(self.backward_ended),
            settled=clock(self.settled),
            forwards=tuple(one.by(clock) for one in self.forwards),
            optimizer=tuple(one.by(clock) for one in self.optimizer),
            unsynchronized=tuple(one.by(clock) for one in self.unsynchronized),
            gradients=tuple((name, clock(at)) for name, at in self.gradients),
            launches=tuple(one.by(clock) for one in self.launches),
            waits=tuple(one.by(clock) for one in self.waits),
            buffers=None if self.buffers is None else clock(self.buffers),
        )

    def moved(self, by: int) -> PassRecord:
        """The same by a clock that is so many nanoseconds ahead."""
        return self.by(lambda time: time + by)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PassRecord:
        """The reverse.

        Raises:
            TypeError: fields are missing, unknown or of another kind.
            KeyError: spans, gradients or launches are missing.
            ValueError: a gradient is no pair.
        """
        spans = {name: tuple(Span(**one) for one in value[name]) for name in _SPANS}
        spans["waits"] = tuple(Span(**one) for one in value.get("waits", ()))  # older traces have none
        gradients = tuple((name, at) for name, at in value["gradients"])
        launches = tuple(Launch(**one) for one in value["launches"])
        record = cls(**{**value, **spans, "gradients": gradients, "launches": launches})
        numbers = [record.number, record.began, record.started, record.backward_ended, record.settled]
        numbers += [record.sparse_bytes, record.buffer_bytes]
        numbers += [time for span in spans.values() for one in span for time in (one.begin, one.end)]
        numbers += [time for one in launches for time in (one.bucket, one.begin, one.handed_over, one.end, one.seen)]
        numbers += [at for _, at in gradients]
        numbers += [one.nbytes for one in launches] + [one.full for one in launches if one.full is not None]
        numbers += [] if record.buffers is None else [record.buffers]
        if not all(map(is_whole, numbers)):
            raise TypeError("a time is no number of nanoseconds")
        texts = [record.plan, *(one.closed_by for one in launches), *(name for name, _ in gradients)]
        if not all(type(text) is str for text in texts) or not all(type(one.told) is bool for one in launches):
            raise TypeError("a name is no text")
        return record


def is_whole(value: object) -> bool:
    """Whether it is a number as clocks and sizes have them, of 64 bits."""
    return type(value) is int and -_MOST < value < _MOST


_MOST = 2**63
_SPANS = ("forwards", "optimizer", "unsynchronized")


class Computing:
    """When backward computed although buckets could be in flight: all the time but that of its stops.

    Args:
        record: of one pass.
    """

    def __init__(self, record: PassRecord) -> None:
        self._ended = record.backward_ended
        stops = stops_of(record)
        self._begins = [one.begin for one in stops]
        self._ends = [one.end for one in stops]
        self._begun = [0, *accumulate(self._begins)]
        self._over = [0, *accumulate(self._ends)]

    def within(self, flight: Span) -> int:
        """How many nanoseconds of a flight are hidden. Takes no look at each launch."""
        begin, end = flight.begin, min(flight.end, self._ended)
        return end - begin - (self._stopped_until(end) - self._stopped_until(begin)) if begin < end else 0

    def _stopped_until(self, time: int) -> int:
        begun, over = bisect_right(self._begins, time), bisect_right(self._ends, time)
        return (begun - over) * time - self._begun[begun] + self._over[over]


def launching_of(record: PassRecord) -> list[Span]:
    """When backward stood still for buckets that were handed over, in order."""
    ended = record.backward_ended
    return merged(Span(one.begin, min(one.handed_over, ended)) for one in record.launches if one.begin < ended)


def stops_of(record: PassRecord) -> list[Span]:
    """The same, and for other ranks."""
    return merged(
        (*launching_of(record), *(Span(one.begin, min(one.end, record.backward_ended)) for one in record.waits))
    )


def percent_hidden(hidden: float, exposed: float) -> float:
    """Of communication; 100 where there is none. Rounded, so that no sum of floats is a percent beside another."""
    return round(100 * hidden / (hidden + exposed), 6) if hidden + exposed else 100.0


def merged(spans: Iterable[Span]) -> list[Span]:
    """What they cover, as spans that lie apart, in order."""
    apart: list[Span] = []
    for span in sorted(spans, key=lambda one: one.begin):
        if span.end <= span.begin:
            continue
        if apart and span.begin <= apart[-1].end:
            apart[-1] = Span(apart[-1].begin, max(apart[-1].end, span.end))
        else:
            apart.append(span)
    return apart


def covered(spans: Iterable[Span], but: Sequence[Span] = ()) -> float:
    """Seconds that at least one of them covers, and none of ``but``."""
    return (_length((*spans, *but)) - _length(but)) * NANO


def _length(spans: Iterable[Span]) -> int:
    return sum(one.end - one.begin for one in merged(spans))
