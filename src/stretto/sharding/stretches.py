"""What the optimizer of this rank steps: stretches of its share, each one flat parameter with one flat gradient.

    bucket of the plan:      | p0       | p1   | p2         |          share of rank 0 | share of rank 1
    stretches of rank 1:                   | p1+p2, as long as their group and their state are alike |

A stretch is as long as possible, so that the optimizer has few tensors to go through. If parameters of a stretch must
be treated differently (one has no gradient in this pass, so its state must not change), it is split, and stays split.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ..bucket import Bucket
from ..slots import lies_in, which_lie_in
from ..withheld import Withheld
from .layout import Layout
from .ownership import Piece
from .rebuilt import keys_by_element
from .state import State, by_element, flat_state, laid_flat


@dataclass(eq=False)
class Stretch:
    """Consecutive pieces."""

    pieces: Sequence[Piece]
    group: int
    parameter: torch.nn.Parameter
    """Lies in the layout; ``.grad`` is the same stretch of the bucket's slots, or None."""
    slots: torch.Tensor
    """The same stretch of the slots; it follows when the slots move."""

    @property
    def start(self) -> int:
        """Its first element in the bucket."""
        return self.pieces[0].start

    @property
    def bucket(self) -> int:
        """Number of the bucket."""
        return self.pieces[0].bucket


def part_of_state(state: Mapping[str, Any], numel: int, first: int, count: int) -> State:
    """What belongs to ``count`` elements of a flat parameter. By-element tensors are views; the rest is copied.

    It is copied deeply: a dict shared by two stretches would be counted up by the step of each.
    """

    def part(value: Any) -> Any:
        if by_element(value, numel):
            return value[first : first + count]
        return value.clone() if torch.is_tensor(value) else copy.deepcopy(value)

    return {key: part(value) for key, value in state.items()}


def states_of_pieces(
    pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, layout: Layout, states: Mapping[torch.Tensor, State]
) -> dict[Piece, State]:
    """The part of each piece, from states in the form for whole parameters, if there is a state."""
    specs = layout.plan.parameters
    known = {index: one for index, one in layout.parameters.items() if one in states} if pieces else {}
    keys = keys_by_element(optimizer, [one for one in known.values() if not one.dim()])
    flat = {index: flat_state(states[one], specs[index], keys.get(one, ())) for index, one in known.items()}
    return {
        piece: part_of_state(flat[piece.index], specs[piece.index].numel, piece.first, piece.numel)
        for piece in pieces
        if piece.index in flat
    }


def _join(states: Sequence[State], numels: Sequence[int]) -> State:
    if len(states) == 1:
        return {key: _of_its_own(value) for key, value in states[0].items()}
    return {
        key: torch.cat([state[key] for state in states]) if by_element(value, numels[0]) else value
        for key, value in states[0].items()
    }


def _of_its_own(value: Any) -> Any:
    """A copy, since a view would keep the state of the whole parameter in memory."""
    if not torch.is_tensor(value) or value.untyped_storage().nbytes() <= value.nbytes:
        return value
    return value.clone()


def _go_together(one: State, numel: int, other: State, other_numel: int) -> bool:
    if one.keys() != other.keys():
        return False
    for key, value in one.items():
        flat = by_element(value, numel)
        if flat != by_element(other[key], other_numel) or type(value) is not type(other[key]):
            return False
        if not flat and not (torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]):
            return False
    return True


STRETCH_BYTES = 512 * 1024
"""At most so long, since an optimizer goes through its tensors several times: what it has just written is to be in the
processor's cache still. Two ranks, AdamW over 17 MB each: 16.5 ms so, 17.2 in halves of this, 18.8 in twice as much."""


def most_elements(dtype: torch.dtype) -> int:
    """Of a stretch."""
    return STRETCH_BYTES // dtype.itemsize


class Stretches:
    """The stretches of one rank, and their gradients.

    Args:
        layout: where parameters lie.
        buckets: where gradients lie, by number.
    """

    def __init__(self, layout: Layout, buckets: Sequence[Bucket]) -> None:
        self._layout = layout
        self._buckets = buckets
        self._places = {index: place for bucket in buckets for place, index in enumerate(bucket.indices)}
        self.all: list[Stretch] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._slots: list[torch.Tensor] = []
        """The parameters' slots; or the placeholder in ``.grad``, where each rank has only its share."""
        self._all_visible = True

    def cut(
        self, pieces: Sequence[Piece], group_of: Mapping[int, int], states: Mapping[Piece, State]
    ) -> dict[torch.Tensor, State]:
        """Make the longest stretches of these pieces, given in order. Returns the state of each, by its parameter.

        Args:
            pieces: this rank's.
            group_of: the parameter group, by index of the parameter.
            states: what the optimizer keeps, by piece.
        """
        runs: list[list[Piece]] = []
        for piece in pieces:
            last = runs[-1][-1] if runs else None
            alike = (
                last is not None
                and self._layout.follows(last, piece)
                and group_of[last.index] == group_of[piece.index]
                and piece.stop - runs[-1][0].start <= most_elements(self._layout.plan.buckets[piece.bucket].dtype)
                and _go_together(states.get(last, {}), last.numel, states.get(piece, {}), piece.numel)
            )
            if alike:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        found: dict[torch.Tensor, State] = {}
        for run in runs:
            stretch = self._stretch(run, group_of[run[0].index])
            self.all.append(stretch)
            found[stretch.parameter] = _join([states.get(piece, {}) for piece in run], [piece.numel for piece in run])
        self._look_at()
        return found

    def _stretch(self, pieces: Sequence[Piece], group: int) -> Stretch:
        first, last = pieces[0], pieces[-1]
        flat = self._layout.flat(first, last)
        slots = self._buckets[first.bucket].memory.stretch(first.start, last.stop)
        return Stretch(pieces, group, torch.nn.Parameter(flat), slots)

    def _look_at(self) -> None:
        """Remember which gradients must be checked before each step."""
        seen: dict[int, torch.Tensor] = {}
        for stretch in self.all:
            for piece in stretch.pieces:
                seen[piece.index] = self._in_grad(piece)
        self._parameters = [self._layout.parameters[index] for index in seen]
        self._slots = list(seen.values())
        self._all_visible = not any(isinstance(slot, Withheld) for slot in self._slots)

    def forget(self) -> None:
        """The stretches are no longer used."""
        for stretch in self.all:
            self._buckets[stretch.bucket].memory.forget_stretch(stretch.slots)
        self.all.clear()

    # Gradients

    def take_gradients(self, replaced: Callable[[Stretch, Sequence[Stretch]], None]) -> None:
        """Give each stretch its gradient as it is now.

        Args:
            replaced: called with a stretch that was split, and its parts.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if all(map(operator.is_, gradients, self._slots)) or (
            self._all_visible and all(which_lie_in(gradients, self._slots))
        ):
            for stretch in self.all:  # the optimizer may have replaced them
                if stretch.parameter.grad is not stretch.slots:
                    stretch.parameter.grad = stretch.slots
            return
        flat = functools.lru_cache(1)(self._laid_flat)  # pieces of one parameter follow each other
        for stretch in [*self.all]:
            for part in self._alike(stretch, replaced):
                part.parameter.grad = self._gradient(part, flat)
        self._look_at()  # other gradients may be withheld by now, since another optimizer was sharded

    def _alike(self, stretch: Stretch, replaced: Callable[[Stretch, Sequence[Stretch]], None]) -> Sequence[Stretch]:
        """The stretch, or the parts into which it is split: with gradients in their slots, elsewhere, or none."""
        runs = [[*run] for _, run in groupby(stretch.pieces, self._where)]
        if len(runs) == 1:
            return [stretch]
        parts = [self._stretch(run, stretch.group) for run in runs]
        place = self.all.index(stretch)
        self.all[place : place + 1] = parts
        self._buckets[stretch.bucket].memory.forget_stretch(stretch.slots)
        replaced(stretch, parts)
        return parts

    def _where(self, piece: Piece) -> bool | None:
        gradient = self._layout.parameters[piece.index].grad
        if gradient is None:
            return None
        slot = self._in_grad(piece)
        return gradient is slot or (not isinstance(slot, Withheld) and lies_in(gradient, slot))

    def _in_grad(self, piece: Piece) -> torch.Tensor:
        """What ``.grad`` of the piece's parameter is when its mean lies in the bucket."""
        gradient = self._layout.parameters[piece.index].grad
        if isinstance(gradient, Withheld):  # from a pass before the buckets were asked to be whole
            return gradient
        bucket, place = self._buckets[piece.bucket], self._places[piece.index]
        return bucket.withheld[place] if bucket.withheld else bucket.views[place]

    def _gradient(self, stretch: Stretch, flat: Callable[[int], torch.Tensor]) -> torch.Tensor | None:
        where = self._where(stretch.pieces[0])
        if where is None:
            return None
        if where:
            return stretch.slots
        return torch.cat([flat(piece.index)[piece.first : piece.end] for piece in stretch.pieces])

    def _laid_flat(self, index: int) -> torch.Tensor:
        """A gradient that the program has put in place of the slot, laid flat."""
        gradient = self._layout.parameters[index].grad
        assert gradient is not None, "asked by _where"
        return laid_flat(gradient, self._layout.plan.parameters[index])
