"""Whether an optimizer can step with states that it was given to load: found out by trying.

torch loads any state with the same groups, and fails only in the next step, when there is no way back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from .division import Division
from .kinds import Kind
from .rebuilt import groups_of, keys_by_element, states_after_steps
from .state import State


def misfit(division: Division, states: Mapping[torch.Tensor, State]) -> Exception | None:
    """Why no step could follow, or None. Not collective.

    Args:
        division: of the optimizer. Nothing of it is stepped.
        states: whole ones, by parameter. For a parameter without one, the optimizer starts from nothing.
    """
    whole, optimizer = division.kind is Kind.WHOLE, division.groups.optimizer
    own = {piece.index for piece in division.pieces} if whole else division.layout.parameters.keys()
    parameters = {division.layout.plan.parameters[index].name: division.layout.parameters[index] for index in own}
    given = {name: one for name, one in parameters.items() if states.get(one)}
    groups = groups_of(optimizer)
    try:
        if not whole:
            _try_one_element_each(optimizer, given, states)
        apart = groups.keys() - {id(one) for one in division.layout.parameters.values()}  # stepped by every rank
        for name, one in given.items() if whole else ():
            _try(optimizer, groups[id(one)], one, states[one], name)
        for other in (one for one in states if id(one) in apart and states[one]):
            _try_either_way(optimizer, groups[id(other)], other, states[other], "a parameter")
    except Exception as error:  # whatever it is: the other ranks are to hear of it
        return error
    return None


def _try_one_element_each(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    states: Mapping[torch.Tensor, State],
) -> None:
    """Try one element of each parameter, once for all states of a kind."""
    groups = groups_of(optimizer)
    keys: dict[int, set[str]] = {}
    tried = set[Hashable]()
    for name, one in parameters.items():
        group = groups[id(one)]
        if group not in keys:
            keys[group] = keys_by_element(optimizer, [one])[one]
        for key in keys[group] & states[one].keys():
            value = states[one][key]
            if torch.is_tensor(value) and value.shape != one.shape:
                found, asked = tuple(value.shape), tuple(one.shape)
                raise ValueError(f"the state of {name} has {key} of shape {found}, for a parameter of {asked}")
        state = {key: _one_element(value, one.shape) for key, value in states[one].items()}
        if (what := (group, one.dtype, one.device, _what_it_is(state))) not in tried:
            tried.add(what)
            _try(optimizer, group, _one_element(one.detach(), one.shape), state, name)


def _one_element(value: Any, shape: torch.Size) -> Any:
    """One element of what is kept for each element; anything else as it is."""
    by_element = isinstance(value, torch.Tensor) and value.shape == shape and value.dim()
    return value.flatten()[:1] if by_element else value


def _what_it_is(state: State) -> Hashable:
    return frozenset(
        (key, type(value), (value.dtype, value.shape) if torch.is_tensor(value) else None)
        for key, value in state.items()
    )


def _try_either_way(optimizer: torch.optim.Optimizer, group: int, like: torch.Tensor, state: State, name: str) -> None:
    """Try with dense, then with sparse gradients: with these the state may be sparse too."""
    try:
        _try(optimizer, group, like, state, name)
    except ValueError:
        if not like.dim():
            raise
        with contextlib.suppress(ValueError):
            return _try(optimizer, group, like, state, name, sparse=True)
        raise


def _try(
    optimizer: torch.optim.Optimizer, group: int, like: torch.Tensor, state: State, name: str, *, sparse: bool = False
) -> None:
    try:
        states_after_steps(optimizer, [like], [group], [copy.deepcopy(state)], sparse=sparse)
    except KeyError as error:
        raise ValueError(f"the state of {name} lacks {error.args[0] if error.args else 'a part'}") from error
    except Exception as error:
        raise ValueError(
            f"with the state of {name} a step of {type(optimizer).__name__} fails: {type(error).__name__}: {error}"
        ) from error
