"""How an optimizer can be divided over ranks: found out by trying it on a few numbers.

[Note: the probe]  An optimizer's name says little about how it steps. So copies with the options of each group step
small parameters in three ways: whole, cut into flat parts, and each parameter by an optimizer of its own. If the flat
parts give the same result, each element is stepped independently; if single parameters do, each parameter is; otherwise
parameters depend on each other. Some optimizers treat large parameters differently (in 8 bits, by rows and columns), so
one parameter is tried that is as large as those of the group, within bounds. Others treat large gradients differently
(they clip), so the last gradients are small and large. A number that steps write into the group or into an attribute
(an estimate made of all gradients) may matter later: it must be the same in all parts. And what is kept for a part must
be one value for each of its elements, or the same for all; anything else (a list of buffers, a scale for every 256
elements) could not be divided into shares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..errors import SetupError, UnsupportedError
from .attributes import are_same, comparable, is_plain, numbers_on, values_of
from .probe import STEPS, equal, gradients, joined, numbers, random_state_kept
from .rebuilt import bare_step, build_like, options_of, tried_options_of
from .state import by_element
from .turns import turn

_SCALES = (*[1.0] * STEPS, 2.0**-13, 2.0**13)
"""The scales of gradients in the steps of a trial; exact in float32."""


class Kind(Enum):
    """What an optimizer's step of one element depends on."""

    ELEMENTWISE = "elementwise"
    WHOLE = "whole"
    """All of its parameter."""


def kind_of(optimizer: torch.optim.Optimizer, name: str = "shard") -> Kind:
    """Find out how the optimizer can be divided. See [Note: the probe].

    Args:
        optimizer: with its groups; nothing of it is stepped.
        name: how messages begin.

    Raises:
        UnsupportedError: it cannot be divided, or cannot be built again from its groups.
    """
    with random_state_kept:
        kinds = {_kind_of_group(optimizer, group, name) for group in optimizer.param_groups}
    return Kind.WHOLE if Kind.WHOLE in kinds else Kind.ELEMENTWISE


class KindWatch:
    """Checks that an optimizer can still be divided as it was, after changes of its groups.

    Args:
        optimizer: with its groups.
        kind: how it was divided.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._known = [self._characters()]
        self._values = values_of(optimizer)

    def _characters(self) -> list[dict[str, Any]]:
        return [{key: _character(value) for key, value in group.items()} for group in self._optimizer.param_groups]

    def refuse_change(self, where: str, *, has_moved: bool) -> None:
        """Try again, if options have changed by more than a number, or groups have other parameters.

        Args:
            where: how the message begins.
            has_moved: groups have other parameters, maybe of other dimensions.

        Raises:
            SetupError: an element's step now depends on its whole parameter, which is divided.
            UnsupportedError: parameters depend on each other now.
        """
        values = values_of(self._optimizer)
        if not has_moved and are_same(values, self._values):
            return
        found = self._characters()
        known = [] if has_moved else self._known
        is_new = found not in known
        if is_new and kind_of(self._optimizer, where) is Kind.WHOLE and self._kind is Kind.ELEMENTWISE:
            raise SetupError(
                f"{where}: with the current options of {type(self._optimizer).__name__}, the step of an element "
                "depends on its whole parameter, but parameters are divided by elements.\n"
                "Build the optimizer with these groups, shard it, and load the state_dict() of this one."
            )
        self._known = [*known, found] if is_new else known
        self._values = values


def _character(value: object) -> object:
    """The part of an option that can decide what a step depends on: of a number only whether it is 0."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    return tuple(map(_character, value)) if isinstance(value, tuple) else type(value)


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
        why = f"tried on small tensors, step() without a closure raised {type(error).__name__}: {error}"
        raise _refusal(optimizer, name, why) from error
    if strange := [key for key in together.kept if not torch.is_tensor(key)]:
        raise _refusal(optimizer, name, f"what it keeps in state under {strange[0]!r} belongs to no parameter.")
    if together.takes_gradients:
        why = "its step sets gradients to None, and each rank would do so for its share only."
        raise _refusal(optimizer, name, why, "Call zero_grad() after step(), not in it.")
    if (key := _unlike_number(together, alone, again)) is not None:
        why = f"its step makes {key} from all its parameters, but each rank would make it from its share only."
        raise _refusal(optimizer, name, why)
    if [*together.kept.values()] != [*alone.kept.values()] or not equal(together.elements, alone.elements):
        raise _refusal(optimizer, name, "how it steps a parameter depends on the others.")
    flat = joined(whole)  # neighbours are stepped as one tensor: see stretches.py
    cuts = {*range(20, min(len(flat), 260), 20), *(len(flat) * part // 5 for part in (2, 3))}
    parts = [*torch.tensor_split(flat, sorted(cuts))]
    try:
        divided = _stepped(optimizer, options, parts, [parts], name)
    except Exception:
        return Kind.WHOLE  # Muon takes matrices alone
    alike = equal(together.elements, divided.elements) and _unlike_number(together, divided, again) is None
    return Kind.ELEMENTWISE if divided.is_by_element and alike else Kind.WHOLE


def _refusal(
    optimizer: torch.optim.Optimizer,
    name: str,
    why: str,
    advice: str = "Use it as it is, without stretto.shard().",
) -> UnsupportedError:
    return UnsupportedError(f"{name}: {type(optimizer).__name__} cannot be divided over ranks: {why}\n{advice}")


class _Outcome(NamedTuple):
    elements: torch.Tensor
    """The values of all parameters, before the scale of gradients changes, and at the end."""
    written: list[dict[str, float]]
    """The numbers that steps have written into the group and into attributes, by optimizer."""
    kept: dict[Any, set[Any]]
    """The keys of the state, by parameter."""
    is_by_element: bool
    """Whether its whole state can be divided by elements."""
    takes_gradients: bool


def _unlike_number(one: _Outcome, other: _Outcome, again: Callable[[], _Outcome]) -> str | None:
    """The name of a number that the parts have written differently, and which is neither a time nor random."""
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
    """The outcome of some steps, with one optimizer for each part."""
    parameters = {id(value): torch.nn.Parameter(value.clone()) for value in values}
    given = [[{**tried_options_of(options), "params": [parameters[id(one)] for one in part]}] for part in divided]
    optimizers = [build_like(optimizer, groups, name) for groups in given]
    before, elements, steps = [*map(numbers_on, optimizers)], [], [*map(bare_step, optimizers)]
    turn("train", *optimizers)
    for number, scale in enumerate(_SCALES):
        if number == STEPS:
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
    for how in ("train", "eval", "train"):  # the first step is in it: values change only in steps
        turn(how, *optimizers)
        elements.append(joined(parameters.values()))
    noted = zip(before, map(numbers_on, optimizers), strict=True)
    written = [{key: one for key, one in now.items() if then.get(key) != one} for then, now in noted]
    return _Outcome(torch.cat(elements), written, kept, is_by_element, takes_gradients)
