"""What a rank keeps of an optimizer's state, by parameter: assembled over all ranks, and as each rank writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from .division import Division
from .kinds import Kind
from .rebuilt import groups_of, states_after_steps
from .state import Held, Kept, State, by_element, shaped, whole_states
from .stretches import part_of_state


def held(division: Division) -> dict[int, list[Held]]:
    """What this rank keeps, by index of the parameter, where there is anything; by-element tensors are views."""
    inner, layout, found = division.inner, division.layout, dict[int, list[Held]]()
    for stretch in inner.stretches.all:
        state, numel = inner.state.get(stretch.parameter, {}), stretch.parameter.numel()
        for piece in stretch.pieces if state else ():
            own = part_of_state(state, numel, piece.start - stretch.start, piece.numel)
            found.setdefault(piece.index, []).append(_held(piece.first, piece.numel, own))
    if division.kind is Kind.WHOLE:
        for piece in division.pieces:
            if state := inner.state.get(layout.parameters[piece.index]):
                found[piece.index] = [Held(0, piece.numel, {}, dict(state))]
    return found


@torch.inference_mode(False)  # tensors made here are used after an evaluation
def put_together(division: Division, *, departed: bool = False) -> Iterator[tuple[torch.Tensor, State]]:
    """The whole state by parameter, in the order of the groups, as a plain optimizer has it. Collective: exhaust it.

    Behind them come those that are not divided (sparse ones, say), and with ``departed`` those that left the groups.
    """
    layout, groups = division.layout, division.groups
    specs, known = layout.plan.parameters, {id(one): place for place, one in enumerate(groups.parameters)}

    def place_of(index: int) -> int:
        return known.get(id(layout.parameters[index]), len(known))

    for index, flats, rest in whole_states(held(division), specs, division.queue, place_of):
        if id(parameter := layout.parameters[index]) in known or departed:
            yield parameter, rest | {key: shaped(flat, specs[index]).clone() for key, flat in flats.items()}
    for parameter in division.apart:
        if (id(parameter) in known or departed) and (state := division.inner.state.get(parameter)):
            yield parameter, dict(state)
    gone = groups.departed.items()
    yield from ((one, dict(state)) for one, (state, _) in gone if departed or id(one) in known)


def kept(division: Division) -> list[Kept]:
    """What this rank keeps for each parameter of which it steps any part, including those without a state so far."""
    layout, inner, mine, found = division.layout, division.inner, held(division), list[Kept]()
    is_flat = division.kind is Kind.ELEMENTWISE
    for index, pieces in groupby(division.pieces, lambda piece: piece.index):
        spec, one = layout.plan.parameters[index], layout.parameters[index]
        parts = mine.get(index) or [Held(piece.first, piece.numel, {}, {}) for piece in pieces]
        found.append(Kept(one, spec.shape, spec.strides, _joined(parts), is_new=index not in mine, is_flat=is_flat))
    others = [kept_whole(one, inner.state.get(one)) for one in division.apart]
    found += [one for one in others if not one.is_new or one.parameter.requires_grad]
    return with_first_states(division.groups.optimizer, found)


def _joined(parts: Sequence[Held]) -> Held:
    """Consecutive elements of one parameter, which were stepped in several stretches."""
    first = parts[0]
    if len(parts) == 1:
        return first
    flat = {key: torch.cat([part.flat[key] for part in parts]) for key in first.flat}
    return Held(first.first, sum(part.numel for part in parts), flat, first.rest)


def kept_whole(parameter: torch.nn.Parameter, state: State | None) -> Kept:
    """What is held for a parameter that is stepped undivided."""
    whole = Held(0, parameter.numel(), {}, dict(state or {}))
    return Kept(parameter, parameter.shape, parameter.stride(), whole, is_new=not state, is_flat=False)


def with_first_states(optimizer: torch.optim.Optimizer, found: Sequence[Kept]) -> list[Kept]:
    """Give those without a state so far the keys that they would have. ``optimizer``: with its groups."""
    group_of = groups_of(optimizer)
    new = [one for one in found if one.is_new]
    like = [one.parameter.detach() for one in new]
    like = [it.new_empty(one.held.numel) if one.is_flat else it for it, one in zip(like, new, strict=True)]
    states = iter(states_after_steps(optimizer, like, [group_of[id(one.parameter)] for one in new]))
    return [_with_state(one, next(states)) if one.is_new else one for one in found]


def _with_state(one: Kept, state: State) -> Kept:
    first, numel = one.held.first, one.held.numel
    return one._replace(held=_held(first, numel, state) if one.is_flat else Held(first, numel, {}, state))


def _held(first: int, numel: int, own: State) -> Held:
    flat = {key: value for key, value in own.items() if by_element(value, numel)}
    return Held(first, numel, flat, {key: value for key, value in own.items() if key not in flat})
