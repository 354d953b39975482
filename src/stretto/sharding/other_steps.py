"""Another optimizer that steps what a sharded one has, where the ranks of a host have that in one memory.

Each rank would step it once more, in silence: the values are the same on all ranks. Those of ``torch.optim`` are
refused before they step. Others may be wrappers, whose step calls that of the sharded one: they are told of behind it,
if it did not.
"""

from __future__ import annotations

import weakref

import torch

from ..errors import SetupError
from ..steps import listen, stepped_by, stop_listening
from .elsewhere import Elsewhere


class OtherSteps:
    """Looks at the steps of all optimizers of the process.

    Args:
        optimizer: the one that was sharded, held weakly.
        where: how messages begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._where = where
        self._is_amid = False
        self._steps = 0
        self._harmless = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        """With how many parameters they were."""
        self._begun = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        """After how many steps of the sharded one."""
        listen(self._stepping)

    def stop(self) -> None:
        """It is not sharded any more."""
        stop_listening(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if isinstance(optimizer.state, Elsewhere):
            if getattr(optimizer, "original", None) is self._optimizer():
                self._is_amid = begins
                self._steps += begins
        elif not begins:
            if self._begun.pop(optimizer, None) == self._steps:
                raise self._refusal(optimizer, "has stepped", "has stepped them once more.\nLoad what was before. ")
        elif not self._is_amid and self._steps_ours(optimizer):
            if type(optimizer).__module__.startswith("torch.optim."):
                raise self._refusal(optimizer, "steps", "would step them once more.\n")
            self._begun[optimizer] = self._steps

    def _steps_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = self._optimizer()
        if mine is None:
            return False
        number = sum(len(group["params"]) for one in (optimizer, mine) for group in one.param_groups)
        if self._harmless.get(optimizer) == number:
            return False
        ours = {id(one) for one in stepped_by(mine)}
        common = [one for one in stepped_by(optimizer) if id(one) in ours]
        if not common:
            self._harmless[optimizer] = number
        return any(one.grad is not None for one in common)

    def _refusal(self, optimizer: torch.optim.Optimizer, steps: str, would: str) -> SetupError:
        return SetupError(
            f"{self._where}: this {type(optimizer).__name__} {steps} parameters of a sharded "
            f"{type(self._optimizer()).__name__}, which the ranks of this host have in one memory, so each rank {would}"
            "Call unshard() of the sharded one before, on all ranks; then shard this one, or step it as it is."
        )
