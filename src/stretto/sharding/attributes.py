"""What an optimizer keeps as attributes, besides groups and state: an option (``self.twice = twice``), or a count.

The optimizer that is built for a share must have the same attributes, and so must the next one when shares are laid out
again. What is neither plain nor made by the constructor cannot be handed on: buffers kept as attributes belong to the
optimizer's own parameters.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Number
from types import MappingProxyType
from typing import Any

import torch

_OF_TORCH = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "step",  # schedulers put a wrapper there
        "_opt_called",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)
_SEQUENCES = (tuple, list, set, frozenset)


def values_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What its groups hold, options and lists of parameters, to find out whether any of it is another object now."""
    return [value for group in optimizer.param_groups for value in group.values()]


def are_same(values: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether they are the same objects, not only equal ones: asked of all options before every step."""
    return len(values) == len(known) and all(map(operator.is_, values, known))


def comparable(value: Any) -> Any:
    """A value that is equal for equal programs in any process: plain values and tensors as they are, others by type."""
    if isinstance(value, torch.Tensor) and _has_values(value):
        return comparable(value.tolist())
    if isinstance(value, Mapping):
        return {str(comparable(key)): comparable(one) for key, one in value.items()}
    if isinstance(value, _SEQUENCES) and not (value and all(isinstance(one, torch.nn.Parameter) for one in value)):
        found = [*map(comparable, value)]
        if isinstance(value, (set, frozenset)):
            return sorted(found, key=str)
        return tuple(found) if isinstance(value, tuple) else found
    if is_scalar(value):
        differs_from_itself = isinstance(value, Number) and value != value
        return str(value) if differs_from_itself or isinstance(value, (Enum, torch.dtype, torch.device)) else value
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def given(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its attributes now, to find out later what it has changed."""
    return {key: comparable(value) for key, value in _attributes(optimizer).items()}


def numbers_on(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers that are not counts, among its attributes and in its first group."""
    found = {f"self.{key}": value for key, value in given(optimizer).items()}
    found |= {key: comparable(value) for key, value in optimizer.param_groups[0].items()}
    found = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in found.items()}
    return {key: value for key, value in found.items() if isinstance(value, float)}


def hand_on(
    optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer, but: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Give the other optimizer this one's attributes.

    Returns:
        The name of an attribute that cannot be handed on, or None.
    """
    theirs = _attributes(other)
    for key, value in _attributes(optimizer).items():
        if key in but and but[key] == comparable(value):
            continue  # its steps have not changed it: the other's may be newer
        if key in theirs and comparable(theirs[key]) == comparable(value):
            continue
        if not is_plain(value):
            return key
        vars(other)[key] = copy.deepcopy(value)
    return None


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _OF_TORCH and not key.startswith("_optimizer_")
    }


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or made of these: nothing that there is one of for each element."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and _has_values(value)
    if isinstance(value, Mapping):
        return all(map(is_plain, (*value, *value.values())))
    return is_scalar(value) or (isinstance(value, _SEQUENCES) and all(map(is_plain, value)))


def is_scalar(value: Any) -> bool:
    """Whether it is one plain value, whose text distinguishes it from others."""
    return value is None or isinstance(value, (Number, str, bytes, Enum, torch.dtype, torch.device))


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.requires_grad or tensor.is_meta) and tensor.layout is torch.strided
