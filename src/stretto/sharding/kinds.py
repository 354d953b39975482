"""How an optimizer can be divided over ranks: found out by trying it on a few numbers.

[Note: the probe]  Names say little about optimizers that others have written. So a copy with the options of each group
steps small parameters whole, cut into flat parts, and each by an optimizer of its own. If the parts come out alike,
each element is stepped by itself; if parameters by themselves do, each parameter is; else they depend on each other.
Some optimizers treat large parameters otherwise (in 8 bits, by rows and columns), so one is tried that is as large as
those of the group, within bounds; or large gradients (they clip), so the last ones are small and large. A number that
steps write into the group or on the optimizer (an estimate made of all gradients) may count later: it must be alike in
all parts. And what is kept for a part must be kept for each of its elements, or be the same for all: no share of a
state could be told from any other one (a list of buffers, a scale for every 256 elements).
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..errors import SetupError, UnsupportedError
from .attributes import are_same, become_ours, comparable, hand_on, is_plain, numbers_on
from .probe import equal, gradients, joined, numbers, random_state_kept
from .state import by_element
from .turns import refuse_to_step, turn

_STEPS = 7
"""Some optimizers begin otherwise than they go on (RAdam, for five steps)."""
_SCALES = (*[1.0] * _STEPS, 2.0**-13, 2.0**13)
"""Of the gradients in the steps of a trial; exact in float32."""


class Kind(Enum):
    """What an optimizer's step of one element depends on."""

    ELEMENTWISE = "elementwise"
    WHOLE = "whole"
    """All of its parameter."""


def kind_of(optimizer: torch.optim.Optimizer, name: str = "shard") -> Kind:
    """How the optimizer can be divided. See [Note: the probe].

    Args:
        optimizer: with its groups; nothing of it is stepped.
        name: how messages begin.

    Raises:
        UnsupportedError: it cannot be divided, or not be built again from its groups.
    """
    with random_state_kept():
        kinds = {_kind_of_group(optimizer, group, name) for group in optimizer.param_groups}
    return Kind.WHOLE if Kind.WHOLE in kinds else Kind.ELEMENTWISE


class KindWatch:
    """Whether an optimizer can still be divided as it was, whatever has been written into its groups.

    Args:
        optimizer: with its groups.
        kind: how it was divided.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._known, self._values = [self._characters()], self._looked_at()

    def _looked_at(self) -> list[Any]:
        return [*chain.from_iterable(group.values() for group in self._optimizer.param_groups)]

    def _characters(self) -> list[dict[str, Any]]:
        return [{key: _character(value) for key, value in group.items()} for group in self._optimizer.param_groups]

    def refuse_change(self, where: str, *, has_moved: bool, turn: str) -> None:
        """Try again, if options have changed by more than a number, or groups have other parameters.

        Args:
            where: how the message begins.
            has_moved: groups have other parameters: of other dimensions, maybe.
            turn: what follows; empty for a step.

        Raises:
            SetupError: an element's step depends on all of its parameter now, which is divided.
            UnsupportedError: parameters depend on each other now.
        """
        refuse_to_step(self._optimizer, where, turn)
        values = self._looked_at()
        if not has_moved and are_same(values, self._values):
            return
        found = self._characters()
        changed = has_moved or found not in self._known
        if changed and kind_of(self._optimizer, where) is Kind.WHOLE and self._kind is Kind.ELEMENTWISE:
            raise SetupError(
                f"{where}: with what the groups of {type(self._optimizer).__name__} hold now, the step of an element "
                "depends on its whole parameter, but parameters are divided by elements.\n"
                "Build the optimizer with these groups, shard it, and load the state_dict() of this one."
            )
        self._known, self._values = ([found] if has_moved else [*self._known, *[found] * changed]), values


def _character(value: object) -> object:
    """What of an option can decide what a step depends on: whether it is 0, not how much it is."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    return tuple(map(_character, value)) if isinstance(value, tuple) else type(value)


def build_like(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], name: str = "shard"
) -> torch.optim.Optimizer:
    """Another optimizer of the same class and options, for other groups.

    Raises:
        UnsupportedError: its constructor asks for what is not among its defaults; it keeps on itself what cannot be
            handed on.
    """
    kind = type(optimizer)
    options = {key: optimizer.defaults[key] for key in _keywords(kind, optimizer.defaults)}
    try:
        like = kind([dict(group) for group in groups], **options)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(
            f"{name}: {kind.__name__} cannot be built again for a part of its parameters: {error}.\n"
            "Its constructor must take parameter groups first, and its defaults as keywords, as torch's do."
        ) from error
    become_ours(like, optimizer)
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
    """All of a parameter group but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def tried_options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The same to try an optimizer with, which may write into them: a list of what it has computed, a tensor."""
    return {key: _copied(value) for key, value in options_of(group).items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, (torch.Tensor, list, dict, set, tuple, deque)):
        return value
    with_graphs = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and not one.is_leaf]
    return copy.deepcopy(value, {id(one): one.detach().clone() for one in with_graphs})  # torch copies none of these


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The number of the group of each parameter, by ``id``."""
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
    """What such an optimizer keeps for tensors after steps with zeros: which keys, of which shapes and dtypes.

    Args:
        optimizer: with its groups; nothing of it is stepped.
        tensors: of their shapes and dtypes; their values are not looked at.
        groups: the parameter group of each.
        states: from which it goes on, one for each, which may be written to; default, none.
        sparse: whether gradients come by rows.
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
        with random_state_kept():
            for _ in range(steps):
                bare_step(like)()
    return [like.state.get(one, {}) for one in parameters]


def keys_by_element(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, set[str]]:
    """What such an optimizer keeps for each element of a parameter, learnt from another size.

    Args:
        optimizer: with its groups; nothing of it is stepped.
        parameters: of its groups.
    """
    if not parameters:
        return {}
    group_of = groups_of(optimizer)
    like = [one.detach().new_empty(2) for one in parameters]
    states = states_after_steps(optimizer, like, [group_of[id(one)] for one in parameters], steps=_STEPS)
    return {
        one: {key for key, value in state.items() if torch.is_tensor(value) and value.shape == (2,)}
        for one, state in zip(parameters, states, strict=True)
    }


def _keywords(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> set[str]:
    """What the constructor takes by name of these; one that hands on ``**options`` takes what the next class does."""
    found: set[str] = set()
    for one in kind.__mro__:
        if one is torch.optim.Optimizer:  # which takes them all; this one torch puts there itself, in load_state_dict
            return {*defaults} - ({"differentiable"} - found)
        if "__init__" in vars(one):
            parameters = inspect.signature(one.__init__).parameters  # type: ignore[misc]
            found |= parameters.keys()
            if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                break
    return found & defaults.keys()


def _kind_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str) -> Kind:
    options = options_of(group)
    tried = {"lr": 0.01, "weight_decay": 0.1, "capturable": False}  # large enough to be seen; for accelerators
    options |= {key: value for key, value in tried.items() if key in options and (key == "lr" or options[key])}
    whole = numbers(group["params"])
    again = functools.partial(_stepped, optimizer, options, whole, [whole], name)
    try:
        together = again()
        alone = _stepped(optimizer, options, whole, [[one] for one in whole], name)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{name}: {type(optimizer).__name__} cannot be divided over ranks: a step with gradients alone "
            f"raised {type(error).__name__}: {error}\nUse it as it is, without stretto.shard()."
        ) from error
    if strange := [key for key in together.kept if not torch.is_tensor(key)]:
        raise UnsupportedError(
            f"{name}: {type(optimizer).__name__} cannot be divided over ranks: what it keeps in state under "
            f"{strange[0]!r} belongs to no parameter.\nUse it as it is, without stretto.shard()."
        )
    if together.takes_gradients:
        raise UnsupportedError(
            f"{name}: {type(optimizer).__name__} cannot be divided over ranks: its step sets gradients to None, and "
            "each rank would do so for its share only.\nCall zero_grad() after step(), and not in it."
        )
    if (key := _unlike(together, alone, again)) is not None:
        raise UnsupportedError(
            f"{name}: {type(optimizer).__name__} cannot be divided over ranks: its step makes {key} from all its "
            "parameters, and each rank would make it from its share only.\nUse it as it is, without stretto.shard()."
        )
    if [*together.kept.values()] != [*alone.kept.values()] or not equal(together.elements, alone.elements):
        raise UnsupportedError(
            f"{name}: {type(optimizer).__name__} cannot be divided over ranks: how it steps a parameter depends on "
            "the others.\nUse it as it is, without stretto.shard()."
        )
    flat = joined(whole)  # neighbours are stepped as one: see stretches.py
    cuts = {*range(20, min(len(flat), 260), 20), *(len(flat) * part // 5 for part in (2, 3))}
    parts = [*torch.tensor_split(flat, sorted(cuts))]
    try:
        divided = _stepped(optimizer, options, parts, [parts], name)
    except Exception:
        return Kind.WHOLE  # Muon takes matrices alone
    alike = equal(together.elements, divided.elements) and _unlike(together, divided, again) is None
    return Kind.ELEMENTWISE if divided.is_by_element and alike else Kind.WHOLE


class _Outcome(NamedTuple):
    elements: torch.Tensor
    """Of all parameters, before the scale of gradients changes, and at the end."""
    written: list[dict[str, float]]
    """What numbers the steps have written into the group, and on the optimizer, by each."""
    kept: dict[Any, set[Any]]
    """Which keys its state has, by parameter."""
    is_by_element: bool
    """Whether all of its state is."""
    takes_gradients: bool


def _unlike(one: _Outcome, other: _Outcome, again: Callable[[], _Outcome]) -> str | None:
    """The name of a number that steps have written otherwise, and which is no clock nor of chance."""
    first, *rest = (*one.written, *other.written)
    keys = [key for written in rest for key in first | written if first.get(key) != written.get(key)]
    anew = again().written[0] if keys else first
    return next((key for key in keys if first.get(key) == anew.get(key)), None)


def _stepped(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    divided: Sequence[Sequence[torch.Tensor]],
    name: str,
) -> _Outcome:
    """Of some steps, by one optimizer for each part of what is divided."""
    parameters = {id(value): torch.nn.Parameter(value.clone()) for value in values}
    given = [[{**tried_options_of(options), "params": [parameters[id(one)] for one in part]}] for part in divided]
    optimizers = [build_like(optimizer, groups, name) for groups in given]
    before, elements, steps = [*map(numbers_on, optimizers)], [], [*map(bare_step, optimizers)]
    turn("train", *optimizers)
    for number, scale in enumerate(_SCALES):
        if number == _STEPS:
            elements.append(joined(parameters.values()))
        for value, made in zip(values, gradients(values, number, scale), strict=True):
            parameters[id(value)].grad = made
        for step in steps:
            step()
    for one, part in zip(optimizers, divided, strict=True):  # as happens when shares are laid out anew
        build_like(one, [{**options, "params": [parameters[id(value)] for value in part]}], name)
    states = dict(chain.from_iterable(one.state.items() for one in optimizers))
    kept = {one: set[Any]() for one in parameters.values()} | {one: {*state} for one, state in states.items()}
    first: Mapping[str, Any] = next(iter(states.values()), {})
    is_by_element = all(
        torch.is_tensor(one)
        and (by_element(value, one.numel()) or (is_plain(value) and comparable(value) == comparable(first.get(key))))
        for one, state in states.items()
        for key, value in (state.items() if torch.is_tensor(one) else ())
    )
    takes_gradients = any(one.grad is None for one in parameters.values())
    for how in ("train", "eval", "train"):  # it is in the first: nothing moves, but in steps
        turn(how, *optimizers)
        elements.append(joined(parameters.values()))
    noted = zip(before, map(numbers_on, optimizers), strict=True)
    written = [{key: one for key, one in now.items() if then.get(key) != one} for then, now in noted]
    return _Outcome(torch.cat(elements), written, kept, is_by_element, takes_gradients)
