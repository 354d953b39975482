"""The parameters of one optimizer, divided along one plan: where they lie, who owns what, what steps this rank's share.

    plan ──> layout ──> pieces of each rank ──> stretches of this rank's ──> the user's kind of optimizer over these
                                            └─> spread: what of them travels after a step

When the plan or the groups change, another division is made, which takes over once it is complete. Until then nothing
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch

from ..launch import LaunchQueue
from .aliases import move
from .groups import Groups
from .inner import Inner
from .kinds import Kind
from .layout import Layout
from .meetings import Meetings
from .ownership import Piece, pieces_of, whole_pieces_of
from .rebuilt import groups_of
from .spread import Spread
from .state import Kept, State
from .stretches import Stretches, most_elements, part_of_state, states_of_pieces


class Division:
    """What one optimizer steps, along the plan in use. Collective to make; if that fails, parameters have not moved.

    Args:
        kind: how it can be divided.
        groups: of the optimizer.
        queue: has the plan, and the gradients.
        meetings: of the optimizer.
        spread: makes what sends the pieces of each rank, given in rank order.
        others: all parameters of the module.
        states: what the optimizer keeps, in the form that it has for whole parameters.
        before: the division that this one replaces, if any: its stretches are dropped.
    """

    def __init__(
        self,
        kind: Kind,
        groups: Groups,
        queue: LaunchQueue,
        meetings: Meetings,
        spread: Callable[[Layout, Sequence[Sequence[Piece]]], Spread],
        others: Callable[[], Iterable[torch.nn.Parameter]],
        states: Mapping[torch.Tensor, State],
        before: Division | None,
    ) -> None:
        self.kind, self.groups, self.queue = kind, groups, queue
        self.layout = layout = Layout(queue, self._mine())
        layout.fill()
        if layout.is_shared:
            meetings.meet("memory for parameters")
        lying = [(one, one.data) for one in layout.parameters.values()]
        lain = (before.layout.views.values(), before.layout.parameters.values()) if before else ()
        try:
            layout.adopt([*chain(*lain), *chain.from_iterable(lying)])
            owned = [self._owned(rank) for rank in range(queue.transport.world_size)]
            self.pieces = owned[queue.transport.rank]
            self.parts = self.pieces if kind is Kind.ELEMENTWISE else []
            """Those of them that are stepped as flat parameters."""
            self.spread = spread(layout, owned)
            self.apart = self._apart()
            self.inner: Inner = self._cut(self._by_piece(states), states, before.inner if before else None)
            if before is not None:
                before.layout.give_way(layout, others())
        except BaseException:  # other ranks may go on, and step the new division
            move(lying)
            raise

    def _mine(self) -> dict[int, torch.nn.Parameter]:
        known = {id(one) for one in self.groups.parameters}
        return {
            index: parameter
            for bucket in self.queue.buckets
            for index, parameter in zip(bucket.indices, bucket.parameters, strict=True)
            if id(parameter) in known and parameter.numel()
        }

    def _owned(self, rank: int) -> list[Piece]:
        plan, transport = self.layout.plan, self.queue.transport
        divide = pieces_of if self.kind is Kind.ELEMENTWISE else whole_pieces_of
        pieces = divide(plan, rank, transport.world_size, self.layout.parameters.keys())
        if rank != transport.rank or self.kind is not Kind.ELEMENTWISE:
            return pieces
        return [part for one in pieces for part in one.parts(most_elements(plan.buckets[one.bucket].dtype))]

    def _apart(self) -> list[torch.nn.Parameter]:
        """Parameters that every rank steps in memory of its own: frozen, empty, or with sparse gradients."""
        inside = {id(parameter) for parameter in self.layout.parameters.values()}
        return [one for one in self.groups.parameters if id(one) not in inside]

    # This rank's share

    def load(self, states: Mapping[torch.Tensor, State]) -> None:
        """Step with these states from now on, given in the form for whole parameters."""
        self.inner = self._cut(self._by_piece(states), states, self.inner)

    def take(self, kept: Sequence[Kept]) -> None:
        """Step with these states from now on, instead of those that were kept."""
        by_id = {id(one.parameter): one for one in kept}
        own: dict[Piece, State] = {}
        for piece in self.parts:
            if one := by_id.get(id(self.layout.parameters[piece.index])):
                own[piece] = part_of_state(one.state, one.held.numel, piece.first - one.held.first, piece.numel)
        self.inner = self._cut(own, {one.parameter: one.state for one in kept}, self.inner)

    def _by_piece(self, states: Mapping[torch.Tensor, State]) -> dict[Piece, State]:
        return states_of_pieces(self.parts, self.groups.optimizer, self.layout, states)

    def _cut(self, own: Mapping[Piece, State], whole: Mapping[torch.Tensor, State], before: Inner | None) -> Inner:
        """Make the stretches of this rank's share, and the optimizer that steps them. If it fails, nothing changes.

        Args:
            own: the state of each piece.
            whole: the state of parameters that this rank steps undivided.
            before: what stepped the share until now; it loses its stretches if this succeeds.
        """
        mine, is_whole, group_of = self.layout.parameters, self.kind is Kind.WHOLE, groups_of(self.groups.optimizer)
        stretches = Stretches(self.layout, self.queue.buckets)
        steps_whole = {id(one) for one in (*self.apart, *(mine[piece.index] for piece in self.pieces if is_whole))}
        try:
            cut = stretches.cut(self.parts, {index: group_of[id(one)] for index, one in mine.items()}, own)
            made = Inner(self.groups, stretches, steps_whole, {**whole, **cut}, before)
        except BaseException:
            stretches.forget()
            raise
        if before is not None:
            before.stretches.forget()
        return made
