"""Parameters that a program writes in place between two steps, in memory that the ranks of a host share.

If every rank makes a change (``p.mul_(0.9)``), it happens once for each rank, while others may be reading. torch counts
this process's writes to each parameter, except those through ``p.data``. How many ranks have written is learnt in the
first meeting of the next step, see [Note: two meetings], so this costs no message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter

from ..errors import name_list
from ..specs import describe_ranks
from .layout import Layout

_EVERY = 1 << 10
"""At most so many steps from one check to the next. Checks follow steps 1, 2, 4, 8 and so on."""

_writes_of = attrgetter("_version")

log = logging.getLogger("stretto")


class Writings:
    """Writes to the parameters of one optimizer between its steps."""

    def __init__(self) -> None:
        self._steps, self._has_told = 0, False
        self._before: tuple[Layout, list[int]] | None = None

    def stepped(self, layout: Layout) -> None:
        """Remember the state after a step. Call this before shares are under way: reading would wait for them."""
        self._steps += 1
        looks = layout.is_shared and not self._has_told and not (self._steps & self._steps - 1 and self._steps % _EVERY)
        self._before = (layout, [*map(_writes_of, layout.parameters.values())]) if looks else None

    def found(self, layout: Layout) -> list[str]:
        """The names of parameters that this rank has written in the shared memory. Strayed ones lie elsewhere."""
        if self._before is None or self._before[0] is not layout:
            return []
        writes = zip(layout.parameters.items(), self._before[1], strict=True)
        written = [index for (index, one), before in writes if one._version != before]
        lying = [one for one in written if layout.parameters[one].data_ptr() == layout.views[one].data_ptr()]
        return [layout.plan.parameters[index].name for index in lying]

    def tell(self, count: int, names: Sequence[str], layout: Layout, where: str, *, speaks: bool) -> None:
        """Warn that several ranks have written in one memory, and check no more.

        Args:
            count: how many ranks have written.
            names: what this rank has written.
            layout: in use.
            where: how the message begins.
            speaks: whether this rank warns if all have written.
        """
        self._has_told = True
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
