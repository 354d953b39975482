"""Another optimizer that steps what a sharded one has, where the ranks of a host have that in one memory.

Each rank would step it once more, in silence: the values are the same on all ranks. Those of ``torch.optim`` are
refused before they step. Others may be wrappers, whose step calls that of the sharded one, or does nothing yet: they
are told of behind it, if values have changed without.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from ..errors import SetupError
from ..steps import listen, stepped_by, stop_listening
from .elsewhere import Elsewhere

_SAMPLES = 64
"""Values of each parameter that are compared, at most."""


class OtherSteps:
    """Looks at the steps of all optimizers of the process.

    Args:
        optimizer: the one that was sharded, held weakly.
        where: how messages begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._where = where
        self._steps = 0
        self._harmless = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        """With how many parameters they were."""
        self._begun = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Begun]()
        listen(self._stepping)

    def stop(self) -> None:
        """It is not sharded any more."""
        stop_listening(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if isinstance(optimizer.state, Elsewhere):
            if getattr(optimizer, "original", None) is self._optimizer():
                self._steps += begins
        elif not begins:
            begun = self._begun.pop(optimizer, None)
            if begun is not None and begun.steps == self._steps and begun.have_changed():
                raise self._refusal(optimizer, "has stepped", "has stepped them once more.\nLoad what was before. ")
        elif ours := self._ours(optimizer):
            if type(optimizer).__module__.startswith("torch.optim."):
                raise self._refusal(optimizer, "steps", "would step them once more.\n")
            self._begun[optimizer] = _Begun(self._steps, ours, _samples(ours))

    def _ours(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """What the sharded one has and this one is to step."""
        mine = self._optimizer()
        if mine is None or mine is optimizer:  # which elsewhere.py refuses
            return []
        number = sum(len(group["params"]) for one in (optimizer, mine) for group in one.param_groups)
        if self._harmless.get(optimizer) == number:
            return []
        known = {id(one) for one in stepped_by(mine)}
        ours = [one for one in stepped_by(optimizer) if id(one) in known]
        if not ours:
            self._harmless[optimizer] = number
        return ours if any(one.grad is not None for one in ours) else []

    def _refusal(self, optimizer: torch.optim.Optimizer, steps: str, would: str) -> SetupError:
        return SetupError(
            f"{self._where}: this {type(optimizer).__name__} {steps} parameters of a sharded "
            f"{type(self._optimizer()).__name__}, which the ranks of this host have in one memory, so each rank {would}"
            "Call unshard() of the sharded one before, on all ranks; then shard this one, or step it as it is."
        )


@dataclass(frozen=True)
class _Begun:
    steps: int
    """Of the sharded one, by then."""
    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor]
    """Some of their values."""

    def have_changed(self) -> bool:
        now = zip(self.before, _samples(self.parameters), strict=True)
        return not all(one.shape == other.shape and torch.equal(*_without_nans(one, other)) for one, other in now)


def _samples(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    flat = [one.detach().reshape(-1) for one in parameters]
    return [one[_spread(len(one)).to(one.device)] for one in flat]


def _spread(number: int) -> torch.Tensor:
    """Places in so many values; of a matrix they lie in many of its columns: one may never have a gradient."""
    return torch.linspace(0, number - 1, min(number, _SAMPLES), dtype=torch.float64, device="cpu").long()


def _without_nans(*values: torch.Tensor) -> list[torch.Tensor]:
    """Which equal themselves."""
    return [torch.where(one == one, one, 0) for one in values]
