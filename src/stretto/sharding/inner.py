"""What steps this rank's share: an optimizer of the user's class, over stretches and over whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .groups import Groups
from .kinds import build_like, options_of
from .state import State
from .stretches import Stretch, part_of_state


class Inner:
    """It has the state of this rank's share, and in each step the options that the user's groups have then.

    Args:
        optimizer: the user's.
        groups: its groups.
        stretches: of parameters that are divided.
        whole: parameters that this rank steps as they are, by ``id``.
        states: of those, where there is one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        stretches: Sequence[Stretch],
        whole: set[int],
        states: Mapping[torch.Tensor, State],
    ) -> None:
        self._groups = groups
        parameters: list[list[torch.nn.Parameter]] = [[] for _ in groups.all]
        first: dict[torch.Tensor, State] = {}
        for stretch in stretches:
            parameters[stretch.group].append(stretch.parameter)
            first[stretch.parameter] = stretch.state
        for own, group in zip(parameters, groups.all, strict=True):
            for one in group["params"]:
                if id(one) in whole:
                    own.append(one)
                    first[one] = states.get(one, {})
        built = [{**options_of(group), "params": own} for group, own in zip(groups.all, parameters, strict=True)]
        self._optimizer = build_like(optimizer, built)
        self.state.update({parameter: state for parameter, state in first.items() if state})
        step = type(self._optimizer).step  # torch's wrapper calls hooks for every optimizer, and has called them by now
        self._step = getattr(step, "__wrapped__", step)

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """Of stretches, and of parameters that are stepped as they are."""
        return self._optimizer.state

    def follow(self) -> None:
        """Take the options of the user's groups."""
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            own.update(options_of(group))

    def step(self) -> None:
        """Step what has a gradient."""
        self._step(self._optimizer)
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            group.update(options_of(own))  # some keep numbers there

    def split(self, stretch: Stretch, parts: Sequence[Stretch]) -> None:
        """A stretch was split into these: so is its state."""
        state = self.state.pop(stretch.parameter, {})
        numel = stretch.parameter.numel()
        for part in parts:
            first = part.start - stretch.start
            own = part_of_state(state, numel, first, first + part.parameter.numel())
            if own:
                self.state[part.parameter] = own
        parameters = self._optimizer.param_groups[stretch.group]["params"]
        place = next(i for i, one in enumerate(parameters) if one is stretch.parameter)
        parameters[place : place + 1] = [part.parameter for part in parts]
