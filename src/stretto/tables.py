"""What lies in a module's tables of parameters and modules: the net for what is written there past registration.

``insert`` of torch's lists is looked for in every pass, whatever else in every ``EVERY``-th.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_WITH_INSERT = (torch.nn.ModuleList, torch.nn.Sequential)
EVERY = 16
FIRST = 4
"""The net is cast in the first passes and then in every ``EVERY``-th."""


class Tables:
    """Those of a module and all modules inside, held weakly.

    Args:
        modules: in order.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = [weakref.ref(one) for one in modules]
        self._lists = [weakref.ref(one) for one in modules if isinstance(one, _WITH_INSERT)]
        self._listed = self._listed_now()
        self._held = [None if one is None else weakref.ref(one) for one in self._now()]
        self._asked = 0

    @property
    def passes_before(self) -> int:
        """How many passes there were, before that in which it was last asked, since all was looked at."""
        return max(self._asked - 1, 0)

    def have_changed(self, number: int) -> bool:
        """Asked in pass ``number``."""
        self._asked += 1
        if self._lists and self._listed_now() != self._listed:
            return True
        if number > FIRST and number % EVERY:
            return False
        if not self._hold_others():
            self._asked = 0
            return False
        return True

    def inserted(self) -> list[torch.nn.Module]:
        """What lists have now and had not before: that is seen in the pass in which it comes."""
        before = {key for keys in self._listed for key in keys}
        alive = [one for reference in self._lists if (one := reference()) is not None]
        return [
            child for one in alive for child in one._modules.values() if child is not None and id(child) not in before
        ]

    def _hold_others(self) -> bool:
        """By reference: one that is gone leaves its ``id`` to the next."""
        now, held = self._now(), self._held
        return len(now) != len(held) or not all(map(_is_still, held, now))

    def _now(self) -> list[torch.nn.Parameter | torch.nn.Module | None]:
        alive = [one for reference in self._modules if (one := reference()) is not None]
        tables = (table for one in alive for table in (one._parameters, one._modules))
        return [*itertools.chain.from_iterable(table.values() for table in tables)]

    def _listed_now(self) -> list[list[int]]:
        alive = [one for reference in self._lists if (one := reference()) is not None]
        return [[*map(id, one._modules.values())] for one in alive]


def _is_still(was: weakref.ref[Any] | None, one: object) -> bool:
    return one is None if was is None else one is not None and was() is one
