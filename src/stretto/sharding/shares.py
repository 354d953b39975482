"""One optimizer, stepped in shares: the plan's layout, this rank's share, and the optimizer that steps it.

    step    ranks meet ──> plan, groups or memory changed? lay out anew, state goes along
            ──> gradients of this rank's stretches ──> the user's kind of optimizer ──> ranks meet, or spread

See meetings.py for [Note: two meetings] and [Note: half a step].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..errors import PeerError, StrettoError
from ..failing import refuse_to_send, wait_in_call
from ..peers import Peers
from ..reducer import Reducer
from ..report import Footprint
from .aliases import move
from .compiled import CompilerWatch
from .groups import Groups
from .inner import Inner
from .joining import Attendance, lent
from .keeping import Keeping
from .kinds import Kind, KindWatch, groups_of
from .layout import Layout
from .meetings import ALIKE, Meetings, Met
from .members import all_reduced, refuse_unreduced, refuse_where_one_cannot
from .memory import describe_shares, footprint_of
from .ownership import Piece, pieces_of, whole_pieces_of
from .spread import Spread
from .state import Kept, State, follow_dtype, refuse_unlike, shaped, whole_states
from .stretches import Stretches, most_elements, part_of_state, states_of_pieces
from .trial import misfit
from .withholding import Withholding


class Shares:
    """What this rank steps for an optimizer. Collective where it begins.

    Args:
        optimizer: the user's. Its groups say what is stepped how; it keeps no state.
        kind: how it can be divided.
        reducer: has the plan, and the gradients.
        peers: the other ranks.
        keep_grads: whether ``.grad`` is the mean on every rank; else each has its share alone.
        overlap: between hosts, let what was stepped travel while forward goes on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: Kind,
        reducer: Reducer,
        peers: Peers,
        *,
        keep_grads: bool,
        overlap: bool,
    ) -> None:
        self._optimizer, self._kind, self._overlap = optimizer, kind, overlap
        self._kinds, self._compiler = KindWatch(optimizer, kind), CompilerWatch()
        self._reducer, self._peers = reducer, peers
        self.transport, self.rank = reducer.transport, reducer.transport.rank
        self.meetings = Meetings(reducer.transport, peers, optimizer)
        self._groups = Groups(optimizer, reducer.queue)
        divisible = kind is Kind.ELEMENTWISE
        self.attendance = Attendance(self.meetings, reducer.queue, whole_grads=keep_grads or not divisible)
        self.withholding = Withholding(self._groups, reducer.queue, asked=not keep_grads, divisible=divisible)
        self._number, self._has_moved = len(peers.seat.steps), False  # groups, that were followed since the last step
        peers.seat.steps.append(0)
        self.withholding.follow()
        try:
            self._lay_out()
        except BaseException:
            self.withholding.end()
            raise
        try:
            self._divide(self._optimizer.state)
        except BaseException:
            self.release()
            raise
        self._optimizer.state.clear()  # Adagrad has one before its first step

    @property
    def reduced(self) -> list[torch.nn.Parameter]:
        """See :func:`~stretto.sharding.members.all_reduced`."""
        return all_reduced(self._reducer)

    # Laying out

    def _lay_out(self, lying: Sequence[torch.Tensor] = ()) -> None:
        """Lay the parameters out along the plan in use. Collective. ``lying``: see ``Layout.adopt``."""
        plan, transport = self._reducer.plan, self._reducer.transport
        known = {id(one) for one in self._groups.parameters}
        mine = {
            index: parameter
            for bucket in self._reducer.queue.buckets
            for index, parameter in zip(bucket.indices, bucket.parameters, strict=True)
            if id(parameter) in known and parameter.numel()
        }
        layout = Layout(plan, mine, transport, self._peers.wait_for)
        layout.fill()
        if layout.is_shared:
            self.meetings.meet("memory for parameters")
        layout.adopt(lying)
        divide = pieces_of if self._kind is Kind.ELEMENTWISE else whole_pieces_of
        owned = [divide(plan, rank, transport.world_size, mine.keys()) for rank in range(transport.world_size)]
        self.layout, self._pieces = layout, owned[transport.rank]
        if self._kind is Kind.ELEMENTWISE:
            self._pieces = [
                part for one in self._pieces for part in one.parts(most_elements(plan.buckets[one.bucket].dtype))
            ]
        told = self._peers.wait_for, self._lost, self._compare, self._compiler
        self._spread = Spread(layout, owned, transport, *told, overlap=self._overlap)
        self._groups.remember()
        inside = {id(parameter) for parameter in mine.values()}
        self._apart = [one for one in self._groups.parameters if id(one) not in inside]
        """Frozen ones, empty ones, and those with sparse gradients: every rank steps them, in memory of its own."""

    def _divide(self, states: Mapping[torch.Tensor, State]) -> None:
        """Make the stretches of this rank's share, and the optimizer that steps them.

        Args:
            states: what the optimizer keeps, as it would of whole parameters.
        """
        pieces = self._pieces if self._kind is Kind.ELEMENTWISE else []
        self._cut(states_of_pieces(pieces, self._optimizer, self.layout, states), states)

    def _cut(self, own: Mapping[Piece, State], whole: Mapping[torch.Tensor, State]) -> None:
        """The same with the state of each piece, and of the parameters that this rank steps whole.

        If it fails all is as it was.
        """
        mine, pieces, before = self.layout.parameters, self._pieces, getattr(self, "inner", None)
        is_whole, group_of = self._kind is Kind.WHOLE, groups_of(self._optimizer)
        stretches = Stretches(self.layout, self._reducer.queue.buckets)
        steps_whole = {id(one) for one in (*self._apart, *(mine[piece.index] for piece in pieces if is_whole))}
        try:
            stretches.cut(() if is_whole else pieces, {index: group_of[id(one)] for index, one in mine.items()}, own)
            self.inner = Inner(self._optimizer, self._groups, stretches, steps_whole, whole, before)
        except BaseException:
            stretches.forget()
            raise
        if before is not None:
            before.stretches.forget()
        self._groups.departed.clear()  # loaded states are all there are; whoever lays out again fills it anew

    def _follow(self) -> None:
        """The plan, or the groups, if they have changed since the last step."""
        try:
            self.lay_out_again()
        except BaseException as error:  # this rank's parameters lie where no rank has stepped
            self.meetings.fail(error)
            raise

    def lay_out_again(self) -> None:
        """Along the plan in use now; state goes with its elements. Collective.

        If it fails the parameters lie where they lay, since other ranks may go on and step what is new.
        """
        before, states = self.layout, dict[torch.Tensor, State](self.states(departed=True))
        dtypes = {id(one): self._groups.dtype_before(one) for one in states}
        lying = [(one, one.data) for one in self._groups.parameters]
        try:
            self._lay_out([*before.views.values(), *(one for pair in lying for one in pair)])
            for parameter, state in states.items():
                follow_dtype(state, dtypes[id(parameter)], parameter.dtype)
            self._divide(states)
        except BaseException:
            self.layout = before
            move(lying)
            raise
        lying.clear()
        self.layout.has_told |= before.has_told
        before.give_way(self.layout, self._reducer.members.all_parameters())
        self._groups.part_from(states, self._reducer.members.all_parameters())

    def _catch_up(self, *, ask: bool) -> None:
        """Follow plan and groups as they are now, as the next step would. Collective if they are others, or to ask."""
        has_moved, problem = self._groups.have_moved(), None
        lags = has_moved or self._reducer.plan is not self.layout.plan
        try:
            if lags:
                self._refuse(self.layout.strayed(), has_moved=has_moved)
        except StrettoError as error:
            problem = error
        if (lags or ask) and any(refuse_where_one_cannot(problem, lags, self._peers)):
            self._groups.refuse_others(self._peers)
            self._spread.finish()
            self._follow()
            self._has_moved |= has_moved

    # The step

    def step(self, *, joins: bool = False, idle: bool = False, turn: str = "") -> None:
        """Step this rank's share; all is stepped when this returns. Collective. See joining.py, turns.py."""
        refuse_to_send(self._peers, "step")
        self._spread.finish()
        self._peers.seat.steps[self._number] += 1
        meets = self.layout.is_shared or joins or idle
        with self.meetings.tell_in_time(self.layout.parameters.values(), meets=meets):
            has_moved = self._groups.have_moved()
            moves = has_moved or self._reducer.plan is not self.layout.plan
            strayed = self.layout.strayed()
            self._refuse(strayed, has_moved=has_moved, turn=turn)
            copies = {} if moves else self.layout.copies(strayed, self._pieces, self._reducer.members.all_parameters)
            number = self._groups.number(has_moved=has_moved, turn=turn)
        met = self._agree(number, moves=moves, meets=meets, idle=idle, call=turn or "step")
        told = self.transport, self._peers, self._fail
        with lent(self._groups, *told, idle=idle) if met.idle else contextlib.nullcontext():
            if moves:
                self._follow()
            said = self._groups.number(has_moved=False) if idle else number
            self._write([] if moves else strayed, copies, said, turn)
        self._has_moved |= has_moved
        if self._has_moved and not turn:  # not before: what is there now is in the shares of this pass
            self._has_moved = False
            self.withholding.follow()
            self.withholding.drop(self._everything())

    def _refuse(self, strayed: Sequence[int], *, has_moved: bool, turn: str = "load") -> None:
        """Raise what speaks against a step of this rank."""
        layout, where, plan = self.layout, self._peers.where, self._reducer.plan
        layout.refuse_other_sizes(strayed if plan is layout.plan else layout.parameters, where, plan)
        self._groups.refuse_other_dtypes(where)
        self._kinds.refuse_change(where, has_moved=has_moved, turn=turn)
        if has_moved or any(one.grad is not None for one in self._apart):
            refuse_unreduced(self._optimizer, self._reducer.parameters, self._reducer.members, where)

    def _agree(self, number: int, *, moves: bool, meets: bool, idle: bool, call: str) -> Met:
        """All have come, with groups that are alike: without shared memory that is seen in what they send."""
        met = self.attendance.meet(self._everything(), number, idle=idle) if meets else ALIKE
        if not met.idle and (not met.alike or (moves and not self.layout.is_shared)):
            self._groups.refuse_others(self._peers, call)
        return met

    def _write(self, strayed: Sequence[int], copies: Mapping[Piece, torch.Tensor], number: int, turn: str) -> None:
        """What makes another model of it: see [Note: half a step]."""
        try:
            self.layout.bring_back(strayed, copies)
            self._step_share(number, turn)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self.meetings.broken is None:
            self.meetings.fail(error, sent=self._spread.is_under_way)
            self._spoil(error)

    def _step_share(self, number: int, turn: str) -> None:
        self.inner.follow(turn)
        step = self.inner.step_in_turn if self._spread.in_turn and not turn else None
        if step is None:
            self.inner.step(turn)
        if self.layout.is_shared:
            self.meetings.meet("the optimizer's step")
        torch.autograd.graph.increment_version(self._everything())
        self._spread.send(number, self._peers.seat.key << 8 | self._number, step)
        self.withholding.drop([] if turn else self._everything())

    def _everything(self) -> list[torch.nn.Parameter]:
        return [*self.layout.parameters.values()]

    def _compare(self, stepped: Sequence[Sequence[int]]) -> None:
        """What each rank has stepped, and with which groups. Raises ``ModelMismatchError`` if that was not alike."""
        self._groups.refuse_patchwork(stepped, self.rank, self._peers.where)

    def _spoil(self, error: BaseException) -> None:
        self._spread.drop()
        self.meetings.spoil(error, self._everything())

    def _lost(self, error: BaseException) -> None:
        """What other ranks have stepped will not come; nor do they know, unless it was told them before."""
        if not isinstance(error, PeerError):
            self._peers.tell_failed("step", error, error.__traceback__, leaves=True)
        self._spoil(error)

    # State

    def _keeping(self) -> Keeping:
        return Keeping(self._optimizer, self.inner, self._kind, self.layout, self._pieces)

    def states(self, *, departed: bool = False) -> Iterator[tuple[torch.Tensor, State]]:
        """What the optimizer would hold of each; also of those ``departed``. Collective: exhaust it on every rank."""
        specs, known = dict(enumerate(self.layout.plan.parameters)), {id(one) for one in self._groups.parameters}
        common = self._reducer.transport, self._peers.gather, lambda *what: wait_in_call(self._peers, *what)
        for index, flats, rest in whole_states(self._keeping().held(), specs, *common):
            if id(parameter := self.layout.parameters[index]) in known or departed:
                yield parameter, {key: shaped(flat, specs[index]).clone() for key, flat in flats.items()} | rest
        for parameter in self._apart:
            if (id(parameter) in known or departed) and (kept := self.inner.state.get(parameter)):
                yield parameter, dict(kept)
        gone = self._groups.departed.items()
        yield from ((one, dict(state)) for one, (state, _) in gone if departed or id(one) in known)

    def kept(self) -> list[Kept]:
        """What this rank keeps of each parameter. Collective if groups or the plan have changed since the last step."""
        self._catch_up(ask=False)
        return self._keeping().kept(self._apart)

    def take(self, kept: Sequence[Kept]) -> None:
        """Keep this from here on, in place of what was kept."""
        self._spread.finish()
        by_id = {id(one.parameter): one for one in kept}
        own: dict[Piece, State] = {}
        for piece in self._pieces:
            if one := by_id.get(id(self.layout.parameters[piece.index])):
                first, numel = piece.first - one.held.first, one.held.numel
                own[piece] = part_of_state(one.state, numel, first, first + piece.numel)
        self._cut(own, {one.parameter: one.state for one in kept})

    def load(self, states: Mapping[torch.Tensor, State], problem: Exception | None = None) -> None:
        """Take what this rank owns of whole states, by parameter, or say what kept it from having any. Collective."""
        places = [place for place, one in enumerate(self._groups.parameters) if one in states]
        refuse_unlike(places, problem, self._peers.gather, self._peers.where)
        self._catch_up(ask=True)
        refuse_unlike(places, misfit(self._keeping(), states), self._peers.gather, self._peers.where)
        self._spread.finish()
        self._divide(states)
        self.inner.take_over(self._optimizer)

    def describe(self) -> str:
        """What is done with them, in plain words."""
        numels = sum(piece.numel for piece in self._pieces), sum(map(torch.numel, self.layout.views.values()))
        whole, late = self._kind is Kind.WHOLE, self._spread.is_late
        told = describe_shares(self.layout, numels, self.footprint()[0].state, whole=whole, late=late)
        return "; ".join(filter(None, (told, self.describe_gradients())))

    def describe_gradients(self) -> str:
        """How they arrive, if in shares was asked for."""
        return self.withholding.in_words(self.layout.hosts)

    def footprint(self) -> tuple[Footprint, Footprint]:
        """What this rank holds; and without shares, but for the state that other ranks have."""
        return footprint_of(self.layout, self.inner.state, self._apart)

    def release(self) -> None:
        """Parameters get memory of their own; after half a step they stay as they are, and refuse to be looked at."""
        self.withholding.end()
        with contextlib.suppress(StrettoError):  # told to whoever looks at a parameter
            self._spread.finish()
        if hasattr(self, "inner"):  # else it could not begin
            self.inner.stretches.forget()
        if not self.meetings.is_spoiled:
            self.layout.release(self._reducer.members.all_parameters())
            self.withholding.drop(self._everything())
