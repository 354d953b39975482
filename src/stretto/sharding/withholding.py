"""Of which gradients each rank is left with its share, because of one optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..launch import LaunchQueue
from ..withheld import Alive, Withheld
from .groups import Groups


class Withholding:
    """Those of an optimizer; several may ask.

    Args:
        groups: of the optimizer.
        queue: asked to leave them in shares.
        wanted: False to leave every gradient whole.
    """

    def __init__(self, groups: Groups, queue: LaunchQueue, *, wanted: bool) -> None:
        self._groups = groups
        self._queue = queue
        self._wanted = wanted
        self._mine = Alive()

    def follow(self) -> None:
        """Ask for what is in the groups now, in place of what was asked for."""
        if self._wanted:
            others = self._others()
            self._mine = Alive(self._groups.parameters)
            self._queue.withhold([*others, *self._mine])

    def end(self) -> None:
        """Ask for nothing any more."""
        if self._wanted:
            self._queue.withhold(self._others())

    def _others(self) -> list[torch.Tensor]:
        return [one for one in self._queue.in_shares if not self._mine.holds(one)]

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """What stands for gradients of these has been stepped with."""
        for parameter in parameters if self._wanted else ():
            if isinstance(parameter.grad, Withheld):
                parameter.grad = None
