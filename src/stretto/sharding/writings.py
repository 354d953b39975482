"""Parameters that a program writes in place between two steps, in memory that the ranks of a host share.

If every rank makes a change (``p.mul_(0.9)``), it happens once for each rank, while others may be reading. torch counts
this process's writes to each parameter. How many ranks have written is learnt in the first meeting of the next step,
see [Note: two meetings], so this costs no message.

torch does not count what is written through ``p.data`` or from NumPy, and once a parameter has been given other memory,
its count does not say which of the two was written. Such a write shows only in the values, of which a few elements are
kept, and there every rank of the host sees it, whoever it was. So one of them tells of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..check import words_of
from ..errors import name_list
from ..specs import describe_ranks
from ..spot_checks import few_of
from .layout import Layout

_EVERY = 1 << 10
"""At most so many steps from one check to the next. Checks follow steps 1, 2, 4, 8 and so on."""
_FIRST = 12
"""And each of so many first steps: some programs write every five or ten steps (Lookahead), and in these first."""
_BOUNDS = 2
"""Different values that a write may leave and be harmless however often it is made: ``clamp_``, a mask, zeros."""

log = logging.getLogger("stretto")


@dataclass(frozen=True)
class _Behind:
    """What the parameters were after a step."""

    layout: Layout
    writes: list[int]
    number: int
    few: list[torch.Tensor]
    """Some elements of each, if all ranks share one memory: otherwise more arrives after the step."""

    def changed(self) -> list[str]:
        """The names of those whose memory holds other values now, and not just a bound or two in some places."""
        found = []
        views = ((index, view) for index, view in self.layout.views.items() if view.numel())
        for (index, view), was in zip(views, self.few, strict=True):
            now = words_of(few_of(view, self.number))
            changed = now[now != was]
            bounds = _BOUNDS * max(1, view.element_size() // now.element_size())
            if len(changed) and (len(now) <= bounds or len({*changed.tolist()}) > bounds):
                found.append(self.layout.plan.parameters[index].name)
        return found


class Writings:
    """Writes to the parameters of one optimizer between its steps.

    Args:
        compares: this rank looks for writes that torch does not count.
    """

    def __init__(self, *, compares: bool) -> None:
        self._steps, self._has_told, self._compares = 0, False, compares
        self._before: _Behind | None = None

    def stepped(self, layout: Layout) -> None:
        """Remember the state after a step. Call this before shares are under way: reading would wait for them."""
        self._steps += 1
        self._before = None
        if layout.is_shared and not self._has_told and self._looks():
            writes = [one._version for one in layout.parameters.values()]
            read = layout.views.values() if self._compares and len(layout.hosts) == 1 else ()
            few = [words_of(few_of(view, self._steps)).clone() for view in read if view.numel()]
            self._before = _Behind(layout, writes, self._steps, few)

    def _looks(self) -> bool:
        return self._steps <= _FIRST or not (self._steps & self._steps - 1 and self._steps % _EVERY)

    def found(self, layout: Layout) -> list[str]:
        """The names of parameters that this rank has written in the shared memory. Strayed ones lie elsewhere."""
        if self._before is None or self._before.layout is not layout:
            return []
        writes = zip(layout.parameters.items(), self._before.writes, strict=True)
        written = [index for (index, one), before in writes if one._version != before]
        lying = [one for one in written if layout.parameters[one].data_ptr() == layout.views[one].data_ptr()]
        return [layout.plan.parameters[index].name for index in lying]

    def uncounted(self, layout: Layout) -> list[str]:
        """The names of those that some rank has written in the shared memory, of use only if no rank counted a write.

        Call this before ranks meet: after that, others step.
        """
        before = self._before
        if before is None or before.layout is not layout or not (self._compares and before.few):
            return []
        return before.changed()

    def tell(self, count: int, names: Sequence[str], layout: Layout, where: str, *, speaks: bool) -> None:
        """Warn that several ranks have written in one memory, and check no more.

        Args:
            count: how many ranks have written.
            names: what this rank has written.
            layout: in use.
            where: how the message begins.
            speaks: whether this rank warns if all have written.
        """
        self._has_told, self._before = True, None  # if this step is refused, the next one looks again
        if names and (speaks or count < sum(map(len, layout.hosts))):
            log.warning(
                "%s: since the last step %d ranks have written in place to parameters that the ranks of a host share "
                "in one memory (nn.init, p.mul_(), an optimizer hook, a forward); this rank, of %s, has written to %s. "
                "If several ranks of a host change a parameter, the change is applied once for each of them, while "
                "others may be reading it.\n"
                "Let one rank do it, between two calls of torch.distributed.barrier(); or let all assign "
                "parameter.data = ...; see docs/sharding.md. If each rank writes different parameters, or writing "
                "twice does no harm (clamp_, values copied in between barriers), ignore this. Shown once.",
                where,
                count,
                describe_ranks(layout.host),
                name_list(names),
            )

    def tell_uncounted(self, names: Sequence[str], where: str) -> None:
        """Warn that ranks may have written in one memory, once. ``names``, ``where``: as above.

        Writes go on being counted: ``tell`` is about them, and all ranks must count for that.
        """
        self._compares = False
        log.warning(
            "%s: since the last step the values of %s have changed in the memory that the ranks of a host share, by "
            "writes that torch does not count: through .data (p.data.mul_()), from NumPy, in a library's layer, or "
            "right before parameter.data = ... (SAM). If several ranks of a host change a parameter, the change is "
            "applied once for each of them, while others may be reading it.\n"
            "Let one rank do it, between two calls of torch.distributed.barrier(); or let all assign "
            "parameter.data = ...; see docs/sharding.md. If one rank did it, or writing twice does no harm (clamp_, "
            "values copied in between barriers), ignore this. Shown once.",
            where,
            name_list(names),
        )
