"""What steps this rank's share: an optimizer of the user's class, over stretches and over whole parameters.

[Note: in turn]  With torch's own optimizers, stepping some of the parameters does to them what a step of all would do,
since they count steps by parameter. (A fused SGD with momentum looks at all, and fails where some have their first
gradient later.) So buckets can be stepped one by one, and the first is sent while the others are stepped. An optimizer
that counts steps in its groups or attributes would count each of these; so it steps everything at once, and so does a
torch optimizer whose ``step`` the program has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .attributes import given, hand_on
from .groups import Groups
from .rebuilt import bare_step, build_like, options_of
from .state import State
from .stretches import Stretch, Stretches, part_of_state


class Inner:
    """Has the state of this rank's share, and takes the current options of the user's groups in each step.

    Args:
        groups: of the user's optimizer.
        stretches: of parameters that are divided.
        whole: parameters that this rank steps undivided, by ``id``.
        states: by parameter, of stretches and of whole ones; those of others are not used.
        before: what stepped the share until now; it may count its steps in an attribute.
    """

    def __init__(
        self,
        groups: Groups,
        stretches: Stretches,
        whole: set[int],
        states: Mapping[torch.Tensor, State],
        before: Inner | None,
    ) -> None:
        self._groups = groups
        self.stretches = stretches
        parameters: list[list[torch.nn.Parameter]] = [[] for _ in groups.all]
        for stretch in stretches.all:
            parameters[stretch.group].append(stretch.parameter)
        for own, group in zip(parameters, groups.all, strict=True):
            own += [one for one in group["params"] if id(one) in whole]
        built = [{**options_of(group), "params": own} for group, own in zip(groups.all, parameters, strict=True)]
        self._optimizer: torch.optim.Optimizer = build_like(before._optimizer if before else groups.optimizer, built)
        self.state.update({one: states[one] for own in parameters for one in own if states.get(one)})
        self._given = given(self._optimizer)
        self._step = bare_step(self._optimizer)  # hooks have been called by now
        methods = type(self._optimizer), self._step.func
        self._is_of_torch = all(one.__module__.startswith("torch.optim.") for one in methods)
        self._by_bucket: dict[int | None, list[list[torch.Tensor]]] = {}
        """What is stepped with each bucket, by group; made on demand."""

    @property
    def step_in_turn(self) -> Callable[[int | None], None] | None:
        """Steps a bucket, given its number, or (None) what is in no bucket. None if impossible: see [Note: in turn]."""
        return self._step_bucket if self._is_of_torch and self.stretches.all else None

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """By parameter: of stretches, and of parameters that are stepped undivided."""
        return self._optimizer.state

    def follow(self, turn: str) -> None:
        """Take the options of the user's groups and, unless another method than ``step`` follows, the gradients."""
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            for gone in own.keys() - group.keys():  # or the step would hand it back, as initial_lr to a new schedule
                del own[gone]
            own.update(options_of(group))
        if not turn:
            self.stretches.take_gradients(self._split)

    def step(self, turn: str) -> None:
        """Step what has a gradient; or call the optimizer's method of this name, see turns.py."""
        if turn:
            getattr(self._optimizer, turn)()
        else:
            self._step()
        for own, group in zip(self._optimizer.param_groups, self._groups.all, strict=True):
            group.update(options_of(own))  # some keep numbers there

    def _step_bucket(self, bucket: int | None) -> None:
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        if not self._by_bucket:
            bucket_of = {stretch.parameter: stretch.bucket for stretch in self.stretches.all}
            for place, parameters in enumerate(everything):
                for one in parameters:
                    of_groups = self._by_bucket.setdefault(bucket_of.get(one), [[] for _ in groups])
                    of_groups[place].append(one)
        if bucket not in self._by_bucket:
            return  # this rank has no share of it
        try:
            for group, parameters in zip(groups, self._by_bucket[bucket], strict=True):
                group["params"] = parameters
            self._step()
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

    def hand_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Give its attributes to the user's optimizer, which goes on without it."""
        hand_on(self._optimizer, optimizer, but=self._given)

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the attributes of the user's optimizer, which may have been loaded."""
        hand_on(optimizer, self._optimizer)
        self._given = given(self._optimizer)

    def _split(self, stretch: Stretch, parts: Sequence[Stretch]) -> None:
        """A stretch was split into these: split its state too."""
        state = self.state.pop(stretch.parameter, {})
        self._by_bucket = {}
        numel = stretch.parameter.numel()
        for part in parts:
            if own := part_of_state(state, numel, part.start - stretch.start, part.parameter.numel()):
                self.state[part.parameter] = own
        parameters = self._optimizer.param_groups[stretch.group]["params"]
        place = next(i for i, one in enumerate(parameters) if one is stretch.parameter)
        parameters[place : place + 1] = [part.parameter for part in parts]
