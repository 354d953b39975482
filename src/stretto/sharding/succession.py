"""The successive divisions of one optimizer: a new one whenever the plan or the groups have changed.

State moves with its elements. What happens to the model if a rank fails, during a change or in a step: see meetings.py,
[Note: half a step].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import PeerError
from ..reducer import Reducer
from ..seat import nothing
from .compiled import CompilerWatch
from .division import Division
from .groups import Groups
from .keeping import put_together
from .kinds import Kind
from .layout import Layout
from .meetings import Meetings
from .ownership import Piece
from .spread import Spread
from .state import State, follow_dtype


class Succession:
    """Has the division in use. Collective to make.

    Args:
        kind: how the optimizer can be divided.
        groups: of the optimizer.
        reducer: has the plan, and the gradients.
        meetings: of the optimizer.
        overlap: between hosts, let what was stepped travel while forward goes on.
    """

    def __init__(self, kind: Kind, groups: Groups, reducer: Reducer, meetings: Meetings, *, overlap: bool) -> None:
        self._kind, self._groups, self._meetings, self._overlap = kind, groups, meetings, overlap
        self._queue, self._members, self._compiler = reducer.queue, reducer.members, CompilerWatch()
        self.has_followed = nothing
        """Called when parameters lie elsewhere."""
        self.now = self._divide(groups.optimizer.state, None)

    def _divide(self, states: Mapping[torch.Tensor, State], before: Division | None) -> Division:
        """Make a division for the plan in use, and remember the groups. Collective.

        Args:
            states: what the optimizer keeps, in the form for whole parameters.
            before: the division that is replaced, if any.
        """
        made = Division(
            self._kind,
            self._groups,
            self._queue,
            self._meetings,
            self._new_spread,
            self._members.all_parameters,
            states,
            before,
        )
        self._groups.remember()
        return made

    def _new_spread(self, layout: Layout, owned: Sequence[Sequence[Piece]]) -> Spread:
        return Spread(
            layout,
            owned,
            self._queue,
            self._lost,
            self._groups.refuse_patchwork,
            self._compiler,
            overlap=self._overlap,
        )

    @property
    def lags(self) -> bool:
        """Whether there is a new plan."""
        return self._queue.plan is not self.now.layout.plan

    def follow(self) -> None:
        """Follow a changed plan or changed groups. Collective."""
        before = self.now
        try:
            self.lay_out_again()
        except BaseException as error:  # its parameters lie where no rank steps, or where others will
            self._meetings.fail(error)
            layout = self.now.layout
            if layout.is_shared and (self.now is not before or layout.strayed()):
                self._spoil(error)
            raise

    def lay_out_again(self) -> None:
        """Along the plan in use now."""
        before, forgotten = self.now, self._groups.forgotten
        states = {one: state for one, state in put_together(before, departed=True) if one not in forgotten}
        for parameter, state in states.items():
            follow_dtype(state, self._groups.dtype_before(parameter), parameter.dtype)
        self.now = self._divide(states, before)
        self._groups.part_from(states, self._members.all_parameters())
        self.has_followed()

    # Failures

    def fail(self, error: BaseException) -> None:
        """A failure of this rank, where others may have stepped. Does nothing after an earlier failure."""
        if self._meetings.broken is None:
            self._meetings.fail(error, sent=self.now.spread.is_under_way)
            self._spoil(error)

    def _spoil(self, error: BaseException) -> None:
        self.now.spread.drop()
        self._meetings.spoil(error, self.now.layout.parameters.values())

    def _lost(self, error: BaseException) -> None:
        """What other ranks have stepped will not arrive. They are told, unless they know already."""
        if not isinstance(error, PeerError):
            self._queue.peers.tell_failed("step", error, error.__traceback__, leaves=True)
        self._spoil(error)
