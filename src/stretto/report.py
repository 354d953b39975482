"""Where the time of a step went: the breakdown of VLDB 2020 (figure 6), each bucket's way, and who was late.

This file has the values and their text; analysis.py makes the values, and advice.py says what follows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .record import percent_hidden
from .wording import counted, format_bytes


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on one rank: means over the middle half of the recorded passes, so that parts add up."""

    forward: float
    """In the attached module; 0 if another method ran forward, which is not seen."""
    backward: float
    """Loss and backward, without what communication took of it."""
    exposed: float
    """Communication during which this rank computed nothing."""
    launching: float
    """The part of exposed that lies in backward: buckets being handed over."""
    hidden: float
    """Communication that went on while backward computed: no time of its own. The most that it can have been where the
    transport does not tell when a result was there."""
    optimizer: float
    """In ``step()`` of optimizers that hold parameters of the module."""
    other: float
    """Data, zeroing, whatever else."""
    step: float
    """From one settled pass to the next."""

    @property
    def communication(self) -> float:
        """Hidden and exposed together."""
        return self.exposed + self.hidden

    @property
    def percent_hidden(self) -> float:
        """Of communication; 100 where there is none."""
        return percent_hidden(self.hidden, self.exposed)


@dataclass(frozen=True)
class BucketReport:
    """One bucket's way, in seconds since the first gradient of the pass; medians."""

    bucket: int
    nbytes: int
    parameters: tuple[str, ...]
    closed_by: str
    """The parameter whose gradient most often came last; empty if that never happened."""
    first: float | None
    """Its first gradient; None if single gradients were not recorded."""
    before_last: float | None
    """The last gradient but one; None where ``first`` is."""
    full: float | None
    """All its gradients were there; None if some had none."""
    launched: float
    """It was about to be handed over."""
    started: float
    """The transport had it."""
    ended: float
    """The result was there."""
    seen: float
    """This rank had waited for it."""
    told: bool = True
    """Whether the transport tells when a result is there. If not, ``ended`` is ``seen``, which may be long after."""
    before: str = ""
    """The parameter whose gradient most often came last but one, as far as single gradients were recorded."""


@dataclass(frozen=True)
class RankReport:
    """One rank compared with the others."""

    rank: int
    breakdown: Breakdown
    behind: float | None
    """Seconds by which its backward ended after that of the first rank to end it, median over passes; None if clocks
    cannot be compared."""
    last: float | None
    """The share of passes in which it was the last."""
    waiting: float | None = None
    """The part of exposed in which it waited for ranks whose backward had not ended, which is no matter of the link."""


@dataclass(frozen=True)
class Footprint:
    """Bytes for the parameters that sharded optimizers step. What ranks share counts for each of them with its part."""

    parameters: int
    gradients: int
    """Dense ones: the buckets that they lie in, whichever ranks have the mean."""
    state: int
    """Of the optimizer, but for single numbers such as counts of steps."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.state


@dataclass(frozen=True)
class Report:
    """What :meth:`Synchronizer.report` returns. ``print(report)`` is made to be read; ``to_dict`` is for programs."""

    rank: int
    world_size: int
    transport: str
    passes: int
    """So many were recorded; all figures are of them."""
    breakdown: Breakdown
    """Of this rank."""
    buckets: tuple[BucketReport, ...]
    ranks: tuple[RankReport, ...]
    nbytes: int
    """Bytes of gradients in buckets that this rank hands over in a pass."""
    bucket_memory: int
    """Bytes that buckets hold on this rank."""
    clock_uncertainty: float | None
    """Seconds by which times of different hosts may be wrong; None if they could not be compared."""
    plan: str
    """The plan's hash."""
    advice: tuple[str, ...] = ()
    """At most three sentences, most important first: what to change, and why."""
    sparse_nbytes: int = 0
    """Bytes of sparse gradients that this rank sends in a pass, in addition to the buckets."""
    buffer_nbytes: int = 0
    """Bytes of the module's buffers that travel in a pass."""
    left_out: int = 0
    """Passes that were recorded under an earlier plan, with other buckets: no figure is of them."""
    accelerators: tuple[str, ...] = ()
    """Kinds of devices whose times are not known: all times are the host's, which runs ahead of them."""
    unsharded: Footprint | None = None
    """What each rank would hold without :func:`stretto.shard`; None if no optimizer is sharded."""
    sharded: tuple[Footprint, ...] = ()
    """What each holds, in rank order."""
    arriving: tuple[str, ...] = ()
    """How gradients arrive that were asked for in shares (``keep_grads=False``), and why, for each such optimizer."""
    averaged: int | None = None
    """Passes that have settled so far, recorded or not; None where that is not known, as of a trace."""

    @property
    def told(self) -> bool:
        """Whether the transport tells when each bucket's result is there; if not, hidden is a bound from above."""
        return all(one.told for one in self.buckets)

    @property
    def straggler(self) -> RankReport | None:
        """The rank that the others wait for: the last in most passes, and not just by chance."""
        late = [one for one in self.ranks if one.behind is not None and one.last is not None and one.last > 0.6]
        slowest = max(late, key=lambda one: one.behind or 0.0, default=None)
        least = max(0.02 * self.breakdown.step, self.clock_uncertainty or 0.0)
        return slowest if slowest and (slowest.behind or 0.0) > least else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds, sizes in bytes."""
        return asdict(self) | {"percent_hidden": self.breakdown.percent_hidden}

    def __str__(self) -> str:
        if self.world_size == 1:
            return "rank 0 of 1: there is no other rank, so nothing is sent and no pass is recorded."
        if self.transport == "nothing":
            return f"rank {self.rank} of {self.world_size}: report() after detach() has nothing to show.\n{_BEFORE}"
        where = f"rank {self.rank} of {self.world_size} over {self.transport}"
        if self.averaged == 0:
            return f"{where}: no backward has reached the attached module so far, outside no_sync().\n{_UNTRAINED}"
        if not self.passes:
            return (
                f"{where}: no pass has been recorded so far.\n"
                "Passes 4 to 8 are recorded, then one in a hundred; inside `with sync.trace(folder)` all of them."
                + "".join(f"\n{line}" for line in self._memory())
            )
        parts = [*self._headline(), "", *_steps(self.ranks), "", *self._buckets(), *self._memory(), *self._end()]
        return "\n".join(parts)

    def _headline(self) -> list[str]:
        mine = self.breakdown
        of = f"means over the middle half of {self.passes} passes" if self.passes > 1 else "one pass"
        of += f", of {self.averaged} so far" if self.averaged else ""
        beside = [(self.sparse_nbytes, "of sparse gradients"), (self.buffer_nbytes, "of the module's buffers")]
        more = " and ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in beside if nbytes)
        return [
            f"rank {self.rank} of {self.world_size} over {self.transport}, {of}",
            f"a step takes {ms(mine.step)}; buckets are on their way for {ms(mine.communication)}: backward hides "
            f"{'' if self.told else 'at most '}{mine.percent_hidden:.0f} %, {ms(mine.exposed)} exposed, "
            f"{share(mine.exposed, mine.step)} of the step",
            f"{format_bytes(self.nbytes)} of gradients in {counted(len(self.buckets), 'buckets')}, "
            f"with {format_bytes(self.bucket_memory)} of memory{more and f'; beside them {more}'}",
        ]

    def _buckets(self) -> list[str]:
        if not self.buckets:
            return []
        head = "bucket      size      full  launched   started     ended      seen  closed by"
        rows = []
        for one in self.buckets:
            ended = ms(one.ended) if one.told else "(seen)"
            cells = (format_bytes(one.nbytes), ms(one.full), ms(one.launched), ms(one.started), ended, ms(one.seen))
            rows.append("  ".join([f"{one.bucket:6}", *(f"{cell:>8}" for cell in cells), one.closed_by or "-"]))
        return ["buckets of this rank, times since its first gradient, medians", head, *rows]

    def _memory(self) -> list[str]:
        if self.unsharded is None:
            return []
        named = [("unsharded", self.unsharded), *((f"rank {n}", one) for n, one in enumerate(self.sharded))]
        rows = [
            f"{name:>9}  {format_bytes(one.parameters):>10}  {format_bytes(one.gradients):>9}  "
            f"{format_bytes(one.state):>15}  {format_bytes(one.total):>8}  {share(one.total, self.unsharded.total):>5}"
            for name, one in named
        ]
        head = "   memory  parameters  gradients  optimizer state       all"
        return ["", "what each rank holds for sharded optimizers, and would hold without", head, *rows, *self.arriving]

    def _end(self) -> list[str]:
        lines = []
        if self.left_out:
            number = counted(self.left_out, "passes")
            lines.append(f"{number} recorded under an earlier plan, with other buckets: left out")
        if not self.told:
            lines.append(UNTOLD)
        if self.accelerators:
            lines.append(host_times(self.accelerators))
        if self.clock_uncertainty is None and len(self.ranks) > 1:
            lines.append("clocks of different hosts could not be compared: who was late is not known")
        elif self.clock_uncertainty:
            lines.append(f"times of different hosts are accurate to {ms(self.clock_uncertainty)}")
        if len(self.ranks) < self.world_size and self.ranks:
            there = ", ".join(str(one.rank) for one in self.ranks)
            lines.append(
                f"only these of {self.world_size} ranks were seen: {there}; another one may have been later still"
            )
        return ["", *lines, *self.advice] if lines or self.advice else []


_BEFORE = "Call it before detach(), on all ranks."
_UNTRAINED = (
    "If training has begun, it trains another module, or a copy of this one: attach what you train. Gradients that "
    "torch.autograd.grad returns are averaged only by stretto.reduce()."
)

UNTOLD = (
    "the transport does not tell when a result is there: buckets end when their rank has finished waiting for them, "
    "and hidden is an upper bound"
)
"""What is to be said wherever such times are shown."""


def host_times(accelerators: Sequence[str]) -> str:
    """What is to be said of times on accelerators, wherever they are shown."""
    kinds = ", ".join(accelerators)
    return f"times are the host's, not those of the device ({kinds}): what was queued there counts as done"


def _steps(ranks: Sequence[RankReport]) -> list[str]:
    head = "rank   forward  backward   exposed  (waiting)  (hidden)  optimizer    other      step    behind"
    rows = []
    for one in ranks:
        b = one.breakdown
        late, waiting = ("?" if seconds is None else ms(seconds) for seconds in (one.behind, one.waiting))
        rows.append(
            f"{one.rank:4}  {ms(b.forward):>8}  {ms(b.backward):>8}  {ms(b.exposed):>8}  {waiting:>9}  "
            f"{ms(b.hidden):>8}  {ms(b.optimizer):>9}  {ms(b.other):>7}  {ms(b.step):>8}  {late:>8}"
        )
    return [head, *rows]


def ms(seconds: float | None) -> str:
    """Milliseconds for people, three digits."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} ms"


def share(part: float, whole: float) -> str:
    """``12 %``."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
