"""Parameters that a program writes in place between two steps, in memory that the ranks of a host share.

If every rank makes a change (``p.mul_(0.9)``), it happens once for each rank, while others may be reading. torch counts
this process's writes to each parameter. How many ranks have written is learnt in the first meeting of the next step,
see [Note: two meetings], so this costs no message.

torch does not count what is written through ``p.data`` or from NumPy, and once a parameter has been given other memory,
its count does not say which of the two was written. Such a write shows only in the values, of which a few elements are
kept, and there every rank of the host sees it, whoever it was. So one of them tells of it. Values that a program moves
for a backward and puts back (SAM, weight noise) are those of before in the next step, so that rank also looks when a
backward has ended.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..reducer import Reducer
from ..wording import describe_ranks, name_list
from .layout import Layout

_EVERY = 1 << 10
"""At most so many steps from one look at all parameters to the next. These follow steps 1, 2, 4, 8 and so on."""
_FIRST = 12
"""And each of so many first steps: some programs write every five or ten steps (Lookahead), and in these first."""
_OFTEN = 4
"""Every so many steps a few are looked at. Programs that swap an average in to evaluate do so after a round number."""
_FEW = 16
"""So many, in turn: a look takes a microsecond, a step of a small model some hundred."""
_BOUNDS = 2
"""Different values that a write may leave and be harmless however often it is made: ``clamp_``, a mask, zeros."""

_BYTES = 256
"""Of a parameter that are looked at."""
_STRIDE = 61
"""From the elements of one look to those of the next; prime, since most numbers of looks are powers of two."""

_ONE_ALONE = (
    "If several ranks of a host change a parameter, the change is applied once for each of them, while others may be "
    "reading it.\n"
    "Let one rank of each host do it, between two calls of torch.distributed.barrier(); or let all assign "
    "parameter.data = ... (SAM: old = p.data; p.data = old + e, and p.data = old before the step). What a layer "
    "writes in its own forward is for an optimizer that is not sharded. See docs/sharding.md."
)

log = logging.getLogger("stretto")


def _some_of(view: torch.Tensor, number: int) -> bytes:
    """Of what lies dense on the host, other elements for each number. As tensors they would take ten times as long."""
    unit, numel = view.element_size(), view.numel()
    count = min(_BYTES // unit, numel)
    start = number * _STRIDE % (numel - count + 1)
    return ctypes.string_at(view.data_ptr() + start * unit, count * unit)


def _harms(was: bytes, now: bytes, unit: int) -> bool:
    """Whether elements of so many bytes have got other values than a bound or two, as by ``mul_``."""
    elements = [(was[at : at + unit], now[at : at + unit]) for at in range(0, len(now), unit)]
    values = {after for before, after in elements if after != before}
    if len(elements) <= _BOUNDS:  # too few to tell a bound from any other value
        return bool(values)
    return len(values) > _BOUNDS


@dataclass(frozen=True)
class _Behind:
    """What the parameters were after a step."""

    layout: Layout
    writes: Mapping[int, int]
    number: int
    some: Mapping[int, bytes]
    """Some elements of each, if all ranks share one memory: otherwise more arrives after the step."""
    of_all: bool
    """Parameters, or of a few."""
    whole: Mapping[int, bytes]
    """All of those that are small, on every rank, where all share one memory."""
    moved: dict[int, bytes] = field(default_factory=dict)
    """The elements of those that were others when a backward ended."""

    def look(self) -> None:
        """A backward has ended, and others cannot have stepped since."""
        for index, was in self.some.items():
            if (now := self._now(index)) != was:
                self.moved.setdefault(index, now)

    def changed(self) -> list[str]:
        """The names of those whose memory holds other values now, and not just a bound or two in some places.

        Other than behind the step, or than when a backward had ended: then values were moved for it and put back.
        """
        found = []
        for index, was in self.some.items():
            now, unit = self._now(index), self.layout.views[index].element_size()
            if any(past != now and _harms(past, now, unit) for past in (was, self.moved.get(index, now))):
                found.append(self.layout.plan.parameters[index].name)
        return found

    def stays(self, index: int) -> bool:
        """Whether a write has left every element as it was: the ``clamp_`` of a temperature within its bounds."""
        return index in self.whole and self._now(index) == self.whole[index]

    def _now(self, index: int) -> bytes:
        return _some_of(self.layout.views[index], self.number)


class _Observer:
    """See events.py. The reducer holds it, and would come round to itself by way of the parameters: survivors.py."""

    def __init__(self, before: _Behind) -> None:
        self._before = weakref.ref(before)

    def pass_settled(self, pass_number: int) -> None:
        if (before := self._before()) is not None:
            before.look()


class Writings:
    """Writes to the parameters of one optimizer between its steps.

    Args:
        reducer: tells of the end of each backward.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._steps, self._has_told = reducer, 0, False
        self._compares = not reducer.transport.rank
        """Whether this rank looks for writes that torch does not count."""
        self._before: _Behind | None = None
        self._observer: _Observer | None = None

    def stepped(self, layout: Layout) -> None:
        """Remember the state after a step. Call this before shares are under way: reading would wait for them."""
        self._steps += 1
        self.forget()
        of_all, one_host = self._looks_at_all(), len(layout.hosts) == 1
        of_some = one_host and not self._steps % _OFTEN
        if not layout.is_shared or self._has_told or not (of_all or of_some):
            return
        indices = [*layout.parameters]
        if not of_all:
            begin = self._steps // _OFTEN * _FEW % max(len(indices), 1)
            indices = indices[begin : begin + _FEW]
        writes = {index: layout.parameters[index]._version for index in indices}
        read = indices if self._compares and one_host else ()
        some = {index: _some_of(layout.views[index], self._steps) for index in read}
        small = [one for one in indices if one_host and layout.views[one].nbytes <= _BYTES]
        whole = {index: _some_of(layout.views[index], self._steps) for index in small}
        self._before = _Behind(layout, writes, self._steps, some, of_all, whole)
        if some and of_all:
            self._observer = _Observer(self._before)
            self._reducer.start_watching(self._observer)

    def forget(self) -> None:
        """Compare nothing until the next step: parameters move, or were written without harm."""
        self._before = None
        if self._observer is not None:
            self._reducer.stop_watching(self._observer)
            self._observer = None

    def _looks_at_all(self) -> bool:
        is_power_of_two = not self._steps & self._steps - 1
        return self._steps <= _FIRST or is_power_of_two or not self._steps % _EVERY

    def found(self, layout: Layout) -> list[str]:
        """The names of parameters that this rank has written in the shared memory. Strayed ones lie elsewhere."""
        behind = self._before
        if behind is None or behind.layout is not layout:
            return []
        written = [one for one, before in behind.writes.items() if layout.parameters[one]._version != before]
        lying = [one for one in written if layout.parameters[one].data_ptr() == layout.views[one].data_ptr()]
        return [layout.plan.parameters[index].name for index in lying if not behind.stays(index)]

    def uncounted(self, layout: Layout) -> list[str]:
        """The names of those that some rank has written in the shared memory, of use only if no rank counted a write.

        Call this before ranks meet: after that, others step.
        """
        before = self._before
        if before is None or before.layout is not layout or not self._compares:
            return []
        return before.changed()

    def tell(self, count: int, names: Sequence[str], layout: Layout) -> None:
        """Warn that several ranks have written in one memory, and check no more; where all were looked at.

        Args:
            count: how many ranks have written; if all have, the first one warns.
            names: what this rank has written.
            layout: in use.
        """
        if self._before is None or not self._before.of_all:
            return  # later on, all may have loaded the best weights so far, between barriers
        self._has_told = True
        self.forget()  # if this step is refused, the next one looks again
        if names and (not self._reducer.transport.rank or count < sum(map(len, layout.hosts))):
            log.warning(
                "%s: since the last step %d ranks have written in place to parameters that the ranks of a host share "
                "in one memory (nn.init, p.mul_(), an optimizer hook, a forward); this rank, of %s, has written to %s. "
                + _ONE_ALONE
                + " If each rank writes different parameters, or writing twice does no harm (clamp_, values copied in "
                "between barriers), ignore this. Shown once.",
                self._reducer.queue.where,
                count,
                describe_ranks(layout.host),
                name_list(names),
            )

    def tell_uncounted(self, names: Sequence[str]) -> None:
        """Warn that ranks may have written in one memory, once.

        Writes go on being counted: ``tell`` is about them, and all ranks must count for that.
        """
        self._compares = False
        log.warning(
            "%s: since the last step the values of %s have changed in the memory that the ranks of a host share, by "
            "writes that torch does not count: through .data (p.data.mul_(), an average that is swapped in to evaluate)"
            ", from NumPy, in a library's layer, or right before parameter.data = ... (SAM). "
            + _ONE_ALONE
            + " If one rank did it, or writing twice does no harm (clamp_, values copied in between barriers), ignore "
            "this. Shown once.",
            self._reducer.queue.where,
            name_list(names),
        )
