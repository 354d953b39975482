"""What lies in a module's tables of parameters and modules: the net for what is written there past registration.

``insert`` of torch's lists is looked for in every pass, whatever else in every ``EVERY``-th. Where all parameters of
the plan are replaced so, no hook is left to begin a pass; so one of them is looked at before each forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Sequence

import torch

STANDS_FOR = "_stretto_stands_for"
"""On what stands in a module's table for a parameter while forward runs: the parameter (ddp_substitutes.py)."""
_WITH_INSERT = (torch.nn.ModuleList, torch.nn.Sequential)
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
        self._modules = [weakref.ref(one) for one in modules]
        self._lists = [weakref.ref(one) for one in modules if isinstance(one, _WITH_INSERT)]
        self._listed = self._listed_now()
        self._held = [weakref.ref(one) for one in self._now()]
        self._probe = next(
            (
                (weakref.ref(module), name, weakref.ref(one))
                for module in modules
                for name, one in module._parameters.items()
                if id(one) in planned
            ),
            None,
        )

    def have_changed(self, number: int) -> bool:
        """Asked in pass ``number``."""
        inserted = bool(self._lists) and self._listed_now() != self._listed
        return inserted or ((number <= FIRST or not number % EVERY) and self._hold_others())

    def lack_one(self) -> bool:
        """Whether one parameter of the plan does not lie where it lay."""
        if self._probe is None:
            return False
        module, name, known = self._probe
        here = None if (alive := module()) is None else alive._parameters.get(name)
        return alive is not None and (here is None or vars(here).get(STANDS_FOR, here) is not known())

    def _hold_others(self) -> bool:
        """By reference: one that is gone leaves its ``id`` to the next."""
        now, held = self._now(), self._held
        return len(now) != len(held) or any(was() is not one for was, one in zip(held, now, strict=True))

    def _now(self) -> list[torch.nn.Parameter | torch.nn.Module]:
        alive = [one for reference in self._modules if (one := reference()) is not None]
        tables = (table for one in alive for table in (one._parameters, one._modules))
        return [one for one in itertools.chain.from_iterable(table.values() for table in tables) if one is not None]

    def _listed_now(self) -> list[list[int]]:
        alive = [one for reference in self._lists if (one := reference()) is not None]
        return [[*map(id, one._modules.values())] for one in alive]
