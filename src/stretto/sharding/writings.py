"""Parameters that a program writes in place between two steps, where the ranks of a host have them in one memory.

A change that every rank makes is made as often as there are ranks (``p.mul_(0.9)``), and amid what others read. torch
counts the writes of this process to each parameter, but for those through ``p.data``; how many ranks have written is
told in the first meeting of the next step, see [Note: two meetings], so nothing is sent for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter

from ..errors import name_list
from ..specs import describe_ranks
from .layout import Layout

_EVERY = 1 << 10
"""Steps, at most, from one look to the next. There is one behind steps 1, 2, 4, 8 and so on."""

_writes_of = attrgetter("_version")

log = logging.getLogger("stretto")


class Writings:
    """What the parameters of one optimizer suffer between its steps."""

    def __init__(self) -> None:
        self._steps, self._has_told = 0, False
        self._before: tuple[Layout, list[int]] | None = None

    def stepped(self, layout: Layout) -> None:
        """They are as a step has left them. To be called before any is under way: a look would wait for it."""
        self._steps += 1
        looks = layout.is_shared and not self._has_told and not (self._steps & self._steps - 1 and self._steps % _EVERY)
        self._before = (layout, [*map(_writes_of, layout.parameters.values())]) if looks else None

    def found(self, layout: Layout) -> list[str]:
        """The names of those that this rank has written where all have them. What strayed lies elsewhere."""
        if self._before is None or self._before[0] is not layout:
            return []
        writes = zip(layout.parameters.items(), self._before[1], strict=True)
        written = [index for (index, one), before in writes if one._version != before]
        lying = [one for one in written if layout.parameters[one].data_ptr() == layout.views[one].data_ptr()]
        return [layout.plan.parameters[index].name for index in lying]

    def tell(self, count: int, names: Sequence[str], layout: Layout, where: str, *, speaks: bool) -> None:
        """Of several ranks that have written in one memory, and look for no more.

        Args:
            count: of the ranks that have written.
            names: what this one has.
            layout: in use.
            where: how the message begins.
            speaks: this rank tells where all have written.
        """
        self._has_told = True
        if names and (speaks or count < sum(map(len, layout.hosts))):
            log.warning(
                "%s: since the last step %d ranks have written parameters in place that the ranks of a host share "
                "in one memory (nn.init, p.mul_(), an optimizer hook, a forward); this rank, of %s, has written %s. "
                "If several ranks of a host change a parameter, it changes once for each of them, while others may "
                "be reading it.\n"
                "Let one rank do it, between two calls of torch.distributed.barrier(); or let all assign "
                "parameter.data = ...; see docs/sharding.md. If each rank writes different parameters, or writing "
                "twice does no harm (clamp_, values that are copied in between barriers), all is well. Told once.",
                where,
                count,
                describe_ranks(layout.host),
                name_list(names),
            )
