"""What steps this rank's share: an optimizer of the user's class, over stretches and over whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .attributes import given, hand_on
from .groups import Groups
from .kinds import bare_step, build_like, options_of
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
        before: what stepped the share so far, which may count its steps on itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Groups,
        stretches: Sequence[Stretch],
        whole: set[int],
        states: Mapping[torch.Tensor, State],
        before: Inner | None = None,
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
        self._optimizer: torch.optim.Optimizer = build_like(before._optimizer if before else optimizer, built)
        self.state.update({parameter: state for parameter, state in first.items() if state})
        self._given = given(self._optimizer)
        self._step = bare_step(self._optimizer)  # hooks have been called by now

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """Of stretches, and of parameters that are stepped as they are."""
        return self._optimizer.state

    def follow(self) -> None:
        """Take the options of the user's groups."""
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            own.update(options_of(group))

    def step(self, turn: str) -> None:
        """Step what has a gradient; or call its method of this name, see turns.py."""
        if turn:
            getattr(self._optimizer, turn)()
        else:
            self._step()
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            group.update(options_of(own))  # some keep numbers there

    def hand_back(self, optimizer: torch.optim.Optimizer) -> None:
        """What it keeps on itself, to the user's, which goes on without it."""
        hand_on(self._optimizer, optimizer, but=self._given)

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """What the user's keeps on itself, which may have been loaded."""
        hand_on(optimizer, self._optimizer)
        self._given = given(self._optimizer)

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
