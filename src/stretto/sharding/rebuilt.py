"""Builds an optimizer of the same class and options again: to step a share, or to find out what its step does."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedError
from ..steps import OURS
from ..wording import counted
from .attributes import hand_on
from .probe import STEPS, random_state_kept
from .turns import turn


def build_like(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], name: str = "shard"
) -> torch.optim.Optimizer:
    """Another optimizer of the same class and options, for other groups.

    Raises:
        UnsupportedError: its constructor needs something that is not in its defaults; or it has an attribute that
            cannot be handed on.
    """
    kind = type(optimizer)
    options = {key: optimizer.defaults[key] for key in _keywords(kind, optimizer.defaults)}
    try:
        like = kind([dict(group) for group in groups] or [{"params": []}], **options)  # torch refuses an empty list
        if not groups:
            like.param_groups.clear()
        if len(like.param_groups) != len(groups):
            raise ValueError(f"of {counted(len(groups), 'groups')} it makes {len(like.param_groups)}")
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(
            f"{name}: {kind.__name__} cannot be built again for a part of its parameters: {error}.\n"
            "Its constructor must take parameter groups first, and its defaults as keywords, as torch's do. One that "
            "wraps another optimizer (SAM, Lookahead) is used without stretto.shard()."
        ) from error
    like.defaults = dict(optimizer.defaults)
    vars(like)[OURS] = True  # its steps are not steps of the program
    if (other := hand_on(optimizer, like)) is not None:
        raise UnsupportedError(
            f"{name}: {kind.__name__} cannot be built again for a part of its parameters: what it keeps as {other} "
            "is not a plain value, and not what its constructor makes from its defaults.\n"
            "Keep options in the parameter groups, and what belongs to a parameter in state, as torch's do."
        )
    return like


def bare_step(optimizer: torch.optim.Optimizer) -> functools.partial[Any]:
    """Its step, without torch's wrapper around it, which calls the hooks of all optimizers."""
    step = type(optimizer).step
    wrapped = getattr(step, "__code__", None) is _WRAPPER
    return functools.partial(step.__wrapped__ if wrapped else step, optimizer)  # type: ignore[attr-defined]


_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def tried_options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The same, copied, to try an optimizer with, since it may write into them (a list, a tensor)."""
    return {key: _copied(value) for key, value in options_of(group).items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, list, dict, set, tuple, deque)):
        return value
    with_graphs = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and not one.is_leaf]
    return copy.deepcopy(value, {id(one): one.detach().clone() for one in with_graphs})  # torch copies none of these


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The number of each parameter's group, by ``id``."""
    return {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}


def states_after_steps(
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[torch.Tensor],
    groups: Sequence[int],
    states: Sequence[dict[str, Any]] = (),
    *,
    sparse: bool = False,
    steps: int = 1,
) -> list[dict[str, Any]]:
    """What such an optimizer keeps for tensors after steps with zero gradients: keys, shapes and dtypes.

    Args:
        optimizer: with its groups; nothing of it is stepped.
        tensors: give the shapes and dtypes; their values are not used.
        groups: the parameter group of each.
        states: the states to start from, one for each tensor; they may be written to. Default: none.
        sparse: whether gradients are sparse.
        steps: how many.
    """
    parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in tensors]
    for one in parameters:
        one.grad = torch.zeros_like(one).to_sparse(1) if sparse else torch.zeros_like(one)
    divided: list[dict[str, Any]] = [{**tried_options_of(group), "params": []} for group in optimizer.param_groups]
    for one, group in zip(parameters, groups, strict=True):
        divided[group]["params"].append(one)
    like = build_like(optimizer, divided)
    like.state.update({one: state for one, state in zip(parameters, states, strict=bool(states)) if state})
    if parameters:
        turn("train", like)
        with random_state_kept:
            for _ in range(steps):
                bare_step(like)()
    return [like.state.get(one, {}) for one in parameters]


def keys_by_element(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, set[str]]:
    """The keys of state that an optimizer keeps for each element of a parameter, found by trying another size.

    Args:
        optimizer: with its groups; nothing of it is stepped.
        parameters: of its groups.
    """
    if not parameters:
        return {}
    group_of = groups_of(optimizer)
    like = [one.detach().new_empty(2) for one in parameters]
    states = states_after_steps(optimizer, like, [group_of[id(one)] for one in parameters], steps=STEPS)
    return {
        one: {key for key, value in state.items() if torch.is_tensor(value) and value.shape == (2,)}
        for one, state in zip(parameters, states, strict=True)
    }


def _keywords(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> set[str]:
    """Those of these that the constructor takes by name; if it passes on ``**options``, also its base class's."""
    found: set[str] = set()
    for one in kind.__mro__:
        if one is torch.optim.Optimizer:  # which takes all; this one is added by torch, in load_state_dict
            return {*defaults} - ({"differentiable"} - found)
        if "__init__" in vars(one):
            parameters = inspect.signature(one.__init__).parameters  # type: ignore[misc]
            found |= parameters.keys()
            if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                break
    return found & defaults.keys()
