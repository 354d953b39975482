"""Refuses steps by another optimizer of parameters that a sharded one has in the memory of a host.

Each rank would step them once more, and nothing would show it, since all ranks see the same values. Optimizers of
``torch.optim`` are refused before they step. Others may be wrappers whose step calls that of the sharded one, or does
nothing yet: these are refused after their step, if values have changed without a step of the sharded one.

A program may also drop the sharded optimizer, and its handle, without ``unshard()``. Then nobody steps the parameters
in that memory any more, and each gets memory of its own before another optimizer steps it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import SetupError
from ..steps import listen, stepped_by, stop_listening
from .aliases import move
from .elsewhere import Elsewhere

if TYPE_CHECKING:
    from .shares import Shares

_SAMPLES = 64
"""At most so many values of each parameter are compared."""

_watchers = WeakTensorKeyDictionary()
"""By what lies in shared memory, or did: they live as long, since the sharded optimizer may go before."""


class OtherSteps:
    """Watches the steps of all optimizers of the process.

    Args:
        optimizer: the one that was sharded, held weakly.
        shares: has its parameters in memory, also those that have left its groups since its last step. Held weakly.
        where: how messages begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shares: Shares, where: str) -> None:
        self._optimizer, self._shares = weakref.ref(optimizer), weakref.ref(shares)
        self._where = where
        self._steps = 0
        self._begun = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Begun]()
        self._lying: dict[int, int] = {}
        """Addresses in that memory, by ``id`` of the parameter there."""
        self._follow()
        shares.when_followed(self._follow)
        listen(self._stepping)

    def _follow(self) -> None:
        if (shares := self._shares()) is None:
            return
        layout = shares.layout
        self._lying = {id(one): layout.views[index].data_ptr() for index, one in layout.parameters.items()}
        for one in layout.parameters.values():
            _watchers[one] = self

    def stop(self) -> None:
        """The optimizer is no longer sharded."""
        stop_listening(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        if isinstance(optimizer.state, Elsewhere):
            if getattr(optimizer, "original", None) is self._optimizer():
                self._steps += begins
        elif not begins:
            begun = self._begun.pop(optimizer, None)
            if begun is not None and begun.steps == self._steps and begun.have_changed():
                raise self._refusal(
                    optimizer, "has stepped", "has stepped them once more.\nLoad the values from before that step. "
                )
        elif self._shares() is None:
            self._part_from(optimizer)
        elif ours := self._ours(optimizer):
            if type(optimizer).__module__.startswith("torch.optim."):
                raise self._refusal(optimizer, "steps", "would step them once more.\n")
            self._begun[optimizer] = _Begun(self._steps, ours, _samples(ours))

    @torch.inference_mode(False)
    def _part_from(self, optimizer: torch.optim.Optimizer) -> None:
        """The sharded one is gone: what this one is about to step leaves the memory that the ranks share."""
        known = [one for one in stepped_by(optimizer) if id(one) in self._lying]
        own = [one for one in known if one.data_ptr() == self._lying[id(one)]]
        move([(one, one.data.clone(memory_format=torch.preserve_format)) for one in own])

    def _ours(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """The sharded one's parameters that this one is about to step."""
        mine = self._optimizer()
        if mine is None or mine is optimizer:  # which elsewhere.py refuses
            return []
        known = {*map(id, stepped_by(mine)), *self._lying}  # each time: groups may get others, as many as before
        ours = [one for one in stepped_by(optimizer) if id(one) in known]
        return ours if any(one.grad is not None for one in ours) else []

    def _refusal(self, optimizer: torch.optim.Optimizer, steps: str, would: str) -> SetupError:
        return SetupError(
            f"{self._where}: this {type(optimizer).__name__} {steps} parameters of a sharded "
            f"{type(self._optimizer()).__name__}, which the ranks of this host share in one memory, so each rank "
            f"{would}"
            "Call unshard() of the sharded one first, on all ranks; then shard this one, or step it as it is. What has "
            "left the groups of the sharded one is in that memory until its next step: let it step first."
        )


@dataclass(frozen=True)
class _Begun:
    steps: int
    """Steps of the sharded one at that time."""
    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor]
    """Some of their values."""

    def have_changed(self) -> bool:
        now = zip(self.before, _samples(self.parameters), strict=True)
        return not all(one.shape == other.shape and torch.equal(*_without_nans(one, other)) for one, other in now)


def _samples(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    flat = [one.detach().reshape(-1) for one in parameters]
    return [one[_places(len(one)).to(one.device)] for one in flat]


def _places(number: int) -> torch.Tensor:
    """Indices of samples; in a matrix they fall into many columns, since one may never have a gradient."""
    return torch.linspace(0, number - 1, min(number, _SAMPLES), dtype=torch.float64, device="cpu").long()


def _without_nans(*values: torch.Tensor) -> list[torch.Tensor]:
    """Which equal themselves."""
    return [torch.where(one == one, one, 0) for one in values]
