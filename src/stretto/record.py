"""What was seen of one pass on one rank: times, and what follows from them.

All times are nanoseconds of ``time.perf_counter_ns``, the host's steady clock. A record covers the step from the end of
the pass before to the end of this one:

    |-- optimizer --|-- other --|-- forward --|-- loss, backward ----------------|-- waiting --|
    began                                       launches, each some time ──>  backward_ended   settled
                                                hidden: ----- in flight -----    exposed: ------

Exposed is what this rank spent on communication and on nothing else: handing buckets over, and everything after
backward. Hidden is the time in which buckets were in flight while backward computed. Both together are the time of
communication as this rank lived it: [Note: in flight] a bucket is from its launch until its result is there, which
includes the time in which a peer had not come yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NANO = 1e-9


@dataclass(frozen=True)
class Span:
    """From when to when."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        """How long."""
        return (self.end - self.begin) * NANO

    def moved(self, by: int) -> Span:
        """So many nanoseconds later."""
        return Span(self.begin + by, self.end + by)


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

    def moved(self, by: int) -> Launch:
        """So many nanoseconds later."""
        full = None if self.full is None else self.full + by
        times = (full, self.begin + by, self.handed_over + by, self.end + by, self.seen + by)
        return Launch(self.bucket, self.nbytes, self.closed_by, *times)


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
    launches: tuple[Launch, ...] = field(default=())
    """In launch order. Buckets that no rank used are not there."""
    buffers: int | None = None
    """When the module's buffers were put under way."""
    unsynchronized: tuple[Span, ...] = ()
    """Backwards under ``no_sync``, each from the forward before it to its last gradient."""

    @property
    def launching(self) -> float:
        """Seconds of backward that went into handing buckets over."""
        return sum(min(one.handed_over, self.backward_ended) - one.begin for one in self._in_backward()) * NANO

    @property
    def exposed(self) -> float:
        """Seconds in which this rank did nothing but communicate."""
        return self.launching + (self.settled - self.backward_ended) * NANO

    @property
    def hidden(self) -> float:
        """Seconds of backward in which buckets were in flight while it computed."""
        flights = [Span(one.begin, min(one.end, self.backward_ended)) for one in self._in_backward()]
        return max(0.0, covered(flights) - self.launching)

    def _in_backward(self) -> list[Launch]:
        return [one for one in self.launches if one.begin < self.backward_ended]

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
        """Seconds from forward's end to the end of backward, of all micro-batches, without launching."""
        began = self.backward_began
        between = [one for one in (*self.forwards, *self.optimizer) if one.begin >= began]
        last = (self.backward_ended - began) * NANO - covered(between) - self.launching
        return max(0.0, last) + covered(self.unsynchronized)

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

    def moved(self, by: int) -> PassRecord:
        """The same by a clock that is so many nanoseconds ahead."""
        return replace(
            self,
            began=self.began + by,
            started=self.started + by,
            backward_ended=self.backward_ended + by,
            settled=self.settled + by,
            forwards=tuple(one.moved(by) for one in self.forwards),
            optimizer=tuple(one.moved(by) for one in self.optimizer),
            unsynchronized=tuple(one.moved(by) for one in self.unsynchronized),
            gradients=tuple((name, at + by) for name, at in self.gradients),
            launches=tuple(one.moved(by) for one in self.launches),
            buffers=None if self.buffers is None else self.buffers + by,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PassRecord:
        """The reverse.

        Raises:
            TypeError: fields are missing or unknown.
        """
        spans = {name: tuple(Span(**one) for one in value[name]) for name in _SPANS}
        gradients = tuple((name, at) for name, at in value["gradients"])
        launches = tuple(Launch(**one) for one in value["launches"])
        return cls(**{**value, **spans, "gradients": gradients, "launches": launches})


_SPANS = ("forwards", "optimizer", "unsynchronized")


def covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of them covers."""
    total, until = 0, 0
    for span in sorted(spans, key=lambda one: one.begin):
        total += max(0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total * NANO
