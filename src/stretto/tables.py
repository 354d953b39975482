"""What lies in a module's tables: finds changes that bypass registration.

``insert`` of torch's lists is looked for in every pass, all other changes in every ``EVERY``-th. Where all parameters
of the plan are replaced that way, no hook is left to begin a pass; so one of them is looked at before each forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import stateless

from .engine import left_uncompiled, running

_WITH_INSERT = (torch.nn.ModuleList, torch.nn.Sequential)
_LENDS = stateless._functional_call.__code__
EVERY = 16
FIRST = 4
"""The net is cast in the first passes and then in every ``EVERY``-th."""


class Tables:
    """Those of a module and all modules inside, held weakly.

    Args:
        modules: in order.
        planned: ``id()`` of the parameters that are reduced.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], planned: Collection[int]) -> None:
        self._gone: list[Any] = []
        """Those that have been freed: each leaves its ``id`` to the next, as where layers are popped and inserted."""
        self._modules = [weakref.ref(one, self._gone.append) for one in modules]
        parameters = [here for one in modules for here in one._parameters.values() if here is not None]
        self._freed: list[Any] = []  # the same of parameters
        self._parameters = [weakref.ref(one, self._freed.append) for one in parameters]
        self._lists = [weakref.ref(one) for one in modules if isinstance(one, _WITH_INSERT)]
        self._listed = [[*map(id, one._modules.values())] for one in modules if isinstance(one, _WITH_INSERT)]
        self._held = self._now()
        self._buffers = self._buffers_now()
        self._asked = 0
        places = ((one, name, here) for one in modules for name, here in one._parameters.items())
        found = ((weakref.ref(one), name, weakref.ref(here)) for one, name, here in places if id(here) in planned)
        self._probe = next(found, None)

    @property
    def passes_before(self) -> int:
        """How many passes there were, before that in which it was last asked, since all was looked at."""
        return max(self._asked - 1, 0)

    def have_changed(self, number: int) -> bool:
        """Asked in pass ``number``."""
        self._asked += 1
        if self._lists and self._gone:
            return True
        for reference, listed in zip(self._lists, self._listed, strict=True):
            if (one := reference()) is None or [*map(id, one._modules.values())] != listed:
                return True
        if number > FIRST and number % EVERY:
            return False
        if not self._hold_others():
            self._asked = 0
            return False
        return True

    def came(self, registered: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """What was registered since, or lists have now and had not before: seen in the pass in which it comes."""
        before = {id(one) for reference in self._modules if (one := reference()) is not None}
        alive = [one for reference in self._lists if (one := reference()) is not None]
        now = itertools.chain(registered, *(one._modules.values() for one in alive))
        return [one for one in now if one is not None and id(one) not in before]

    @left_uncompiled
    def lack_one(self, stands_for: str) -> bool:
        """Whether one parameter of the plan does not lie where it lay; what has it as ``stands_for`` lies there too."""
        if self._probe is None:
            return False
        module, name, known = self._probe
        here = None if (alive := module()) is None else alive._parameters.get(name)
        return alive is not None and (here is None or vars(here).get(stands_for, here) is not known())

    def _hold_others(self) -> bool:
        """As long as all live, their ``id`` tells them apart."""
        return bool(self._gone or self._freed) or self._now() != self._held or self._buffers_now() != self._buffers

    def _now(self) -> list[int]:
        alive = [one for reference in self._modules if (one := reference()) is not None]
        tables = [table.values() for one in alive for table in (one._parameters, one._modules)]
        return [*map(id, itertools.chain.from_iterable(tables))]

    def _buffers_now(self) -> list[int]:
        """How many: what lies in a place that is known is looked at in every pass."""
        return [len(one._buffers) for reference in self._modules if (one := reference()) is not None]


def lent() -> bool:
    """Whether ``functional_call`` is under way, which puts others into tables for so long."""
    return running(_LENDS) is not None
