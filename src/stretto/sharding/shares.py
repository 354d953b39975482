"""One optimizer, stepped in shares: what all ranks do together in a step, and for its state.

    step    ranks meet ──> plan, groups or memory changed? lay out anew, see succession.py
            ──> gradients of this rank's stretches ──> the user's kind of optimizer ──> ranks meet, or spread

See meetings.py for [Note: two meetings] and [Note: half a step].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..errors import SetupError, StrettoError
from ..failing import refuse_to_send
from ..reducer import Reducer
from ..report import Footprint
from . import keeping
from .division import Division
from .groups import Groups
from .inner import Inner
from .joining import Attendance, lent
from .kinds import Kind, KindWatch
from .layout import Layout, warn_of_other_processes
from .meetings import ALIKE, Meetings, Met
from .members import all_reduced, refuse_duplicates, refuse_unreduced, wanted_by_any
from .memory import describe_shares, footprint_of
from .spread import Spread
from .state import Kept, State, handed_on, refuse_unlike_states
from .strays import mark_of, refuse_strays
from .succession import Succession
from .trial import misfit
from .turns import refuse_to_step
from .withholding import Withholding
from .writings import Writings


class Shares:
    """What this rank steps for an optimizer. Collective to make.

    Args:
        optimizer: the user's. Its groups say what is stepped, and with which options; it keeps no state.
        kind: how it can be divided.
        reducer: has the plan, and the gradients.
        keep_grads: whether ``.grad`` is the mean on every rank; else each rank has only its share.
        overlap: between hosts, let what was stepped travel while forward goes on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: Kind,
        reducer: Reducer,
        *,
        keep_grads: bool,
        overlap: bool,
    ) -> None:
        queue = reducer.queue
        self._optimizer, self._reducer, self.peers, self.rank = optimizer, reducer, queue.peers, reducer.transport.rank
        self._groups, self._kinds = Groups(optimizer, queue), KindWatch(optimizer, kind)
        self.meetings = Meetings(queue, optimizer)
        self.writings = Writings(reducer)
        self.attendance = Attendance(self.meetings, queue)
        self.withholding = Withholding(self._groups, queue, asked=not keep_grads, divisible=kind is Kind.ELEMENTWISE)
        self._number, self._has_moved = len(self.peers.seat.steps), False
        """Place of its count of steps; whether groups were followed since the last step."""
        self.peers.seat.steps.append(0)
        self.has_begun = any(optimizer.state.values())  # as Adagrad's before its first step; a look-up leaves {}
        """Whether there may be a state: the same on all ranks, also where one has no share of it."""
        self._has_told = False
        """Of parameters in memory shared with other processes."""
        self.withholding.follow()
        try:
            self._succession = Succession(kind, self._groups, reducer, self.meetings, overlap=overlap)
        except BaseException:
            self.withholding.end()
            raise
        optimizer.state.clear()
        self.peers.seat.sharded.add(self._number)

    @property
    def reduced(self) -> list[torch.nn.Parameter]:
        """See :func:`~stretto.sharding.members.all_reduced`."""
        return all_reduced(self._reducer)

    @property
    def layout(self) -> Layout:
        """Where the parameters lie."""
        return self._succession.now.layout

    @property
    def inner(self) -> Inner:
        """What steps this rank's share."""
        return self._succession.now.inner

    def refuse_replaced(self) -> None:
        """Raise ``SetupError`` where the module was wrapped again, and the new handle would have to be followed."""
        if self._reducer.detached:
            raise SetupError(
                f"{self.peers.where}: the module was wrapped again since this optimizer was sharded. It goes on "
                "stepping what it has, but cannot follow parameters that are added or converted.\n"
                "Call unshard(), on all ranks; then shard a new optimizer with the new wrapper, and load the state."
            )

    @property
    def _spread(self) -> Spread:
        return self._succession.now.spread

    @property
    def _division(self) -> Division:
        return self._succession.now

    def when_followed(self, call: Callable[[], None]) -> None:
        """Call it whenever parameters have been laid out anew."""
        self._succession.has_followed = call

    def _catch_up(self, *, ask: bool) -> None:
        """Follow the current plan and groups, as the next step would. Collective if they changed, or with ``ask``."""
        has_moved, problem = self._groups.have_moved(), None
        lags = has_moved or self._succession.lags
        try:
            if lags:
                self._refuse(self.layout.strayed(), has_moved=has_moved)
        except StrettoError as error:
            problem = error
        if (lags or ask) and wanted_by_any(problem, lags, self.peers):
            self._groups.refuse_others()
            if self.layout.is_shared:
                refuse_strays(self.layout, self.layout.strayed(), self.peers)
            self._spread.finish()
            self.writings.forget()
            self._succession.follow()
            self._has_moved |= has_moved

    # The step

    def step(self, *, joins: bool = False, idle: bool = False, turn: str = "") -> None:
        """Step this rank's share; the whole model is stepped on return. Collective. See joining.py, turns.py."""
        refuse_to_send(self.peers, "step")
        self._spread.finish()
        self.peers.seat.steps[self._number] += 1
        meets = self.layout.is_shared or joins or idle
        with self.meetings.tell_in_time(self.layout.parameters.values(), meets=meets):
            has_moved = self._groups.have_moved()
            moves = has_moved or self._succession.lags
            strayed = self.layout.strayed()
            if not turn:
                refuse_to_step(self._optimizer, self.peers.where)
            self._refuse(strayed, has_moved=has_moved)
            others, queue = self._reducer.members.all_parameters, self._reducer.queue
            copies = {} if moves else self.layout.copies(strayed, self._division.pieces, others)
            number = self._groups.number(has_moved=has_moved, turn=turn)
        begun = False
        try:
            met = self._agree(number, strayed, moves=moves, meets=meets, idle=idle, call=turn or "step")
            with lent(self._groups, queue, self._succession.fail, idle=idle) if met.idle else contextlib.nullcontext():
                begun = True
                if moves:
                    self._succession.follow()
                said = self._groups.number(has_moved=False) if idle else number
                self.layout.bring_back([] if moves else strayed, copies)
                self._step_share(said, turn)
        except BaseException as error:  # see [Note: half a step]; also Ctrl-C right after the meeting
            is_ours_alone = not isinstance(error, StrettoError)
            if begun or (meets and is_ours_alone):
                self._succession.fail(error)
            elif is_ours_alone:  # nothing was written or sent, and the others wait for it
                self.meetings.fail(error)
            raise
        self.has_begun |= not turn  # which makes no state
        self._has_moved |= has_moved
        if self._has_moved and not turn:  # not earlier: the present gradients are in this pass's shares
            self._has_moved = False
            self.withholding.follow()
            self.withholding.drop(self._everything())

    def _refuse(self, strayed: Sequence[int], *, has_moved: bool) -> None:
        """Raise if this rank cannot follow its parameters and groups."""
        layout, where, plan = self.layout, self.peers.where, self._reducer.plan
        try:
            layout.refuse_other_sizes(strayed if plan is layout.plan else layout.parameters, where, plan)
        except SetupError:
            self.refuse_replaced()  # the plan is its last, whatever passes follow
            raise
        if layout.moved and not self._has_told:
            warn_of_other_processes(where, [layout.plan.parameters[index].name for index in layout.moved])
            self._has_told = True
        layout.refuse_tied(strayed, where)
        self._groups.refuse_other_dtypes()
        self._kinds.refuse_change(where, has_moved=has_moved)
        if has_moved:
            refuse_duplicates(self._optimizer, self._reducer.members.everything().items(), where)
        if has_moved or any(one.grad is not None for one in self._division.apart):
            refuse_unreduced(self._optimizer, self._reducer, where)

    def _agree(self, number: int, strayed: Sequence[int], *, moves: bool, meets: bool, idle: bool, call: str) -> Met:
        """Check that all ranks step with equal groups; without shared memory this is seen in what they send."""
        written = self.writings.found(self.layout)
        uncounted = [] if written else self.writings.uncounted(self.layout)
        number ^= mark_of(strayed)
        met = self.attendance.meet(self._everything(), number, idle=idle, has_written=bool(written)) if meets else ALIKE
        if met.have_written > len(self.layout.hosts):  # one rank for each memory is fine
            self.writings.tell(met.have_written, written, self.layout)
        elif uncounted and not met.have_written:
            self.writings.tell_uncounted(uncounted)
        if not met.idle and (not met.alike or (moves and not self.layout.is_shared)):
            self._groups.refuse_others(call)
        if met.idle or not met.alike:  # a rank without batches brings no number, and assigns nothing
            refuse_strays(self.layout, strayed, self.peers, met.idle)
        return met

    def _step_share(self, number: int, turn: str) -> None:
        self.inner.follow(turn)
        step = self.inner.step_in_turn if self._spread.in_turn and not turn else None
        if step is None:
            self.inner.step(turn)
        if self.layout.is_shared:
            self.meetings.meet("the optimizer's step")
        torch.autograd.graph.increment_version(self._everything())
        self.writings.stepped(self.layout)
        self._spread.send(number, self.peers.seat.key << 8 | self._number, step)
        self.withholding.drop([] if turn else self._everything())

    def _everything(self) -> list[torch.nn.Parameter]:
        return [*self.layout.parameters.values()]

    # State

    def states(self, *, departed: bool = False) -> Iterator[tuple[torch.Tensor, State]]:
        """The whole state by parameter. Collective: exhaust it. Do so ``in_call``: a failure meanwhile must be told.

        With ``departed``, also of parameters that have left the groups, unless they have left the module too.
        """
        alive = {*self._groups.parameters, *self._reducer.members.all_parameters()} - self._groups.forgotten
        return ((one, state) for one, state in keeping.put_together(self._division, departed=departed) if one in alive)

    def forget(self, parameter: torch.Tensor) -> State | None:
        """The program drops the state of one that has left the groups: what this rank has of it whole, else None."""
        groups, stepped = self._groups, (*self.layout.parameters.values(), *self._division.apart)
        if parameter in groups.departed:
            return groups.departed.pop(parameter)[0]
        if parameter in groups.forgotten or all(one is not parameter for one in stepped):
            return None
        groups.forgotten.add(parameter)
        return {}

    @torch.inference_mode(False)
    def kept(self) -> list[Kept]:
        """What this rank keeps of each parameter. Collective if groups or the plan have changed since the last step."""
        self._catch_up(ask=False)
        with self.peers.in_call():  # torch's calls follow, where the others would wait
            return keeping.kept(self._division)

    @torch.inference_mode(False)
    def take(self, kept: Sequence[Kept]) -> None:
        """Keep this from now on, instead of what was kept."""
        with self.peers.in_call():  # the others have taken theirs
            self._spread.finish()
            self._division.take(kept)
            self._groups.departed.clear()  # what is kept is all there is
            self.has_begun = True
            self.writings.forget()  # weights that belong to a state are copied in on all ranks

    @torch.inference_mode(False)
    def load(self, states: Mapping[torch.Tensor, State], problem: Exception | None = None) -> None:
        """Take this rank's part of whole states, by parameter, or say why this rank could load none. Collective.

        If only rank 0 has any, the others get them from it.
        """
        only_rank_0_has_them = refuse_unlike_states(self._places(states), problem, self.peers)
        self._catch_up(ask=True)
        if only_rank_0_has_them:
            with self.peers.in_call():
                states = handed_on(states, self._groups.parameters, self._reducer.queue)
        refuse_unlike_states(self._places(states), misfit(self._division, states), self.peers)
        with self.peers.in_call():
            self._spread.finish()
            try:
                self._division.load(states)
                self.inner.take_over(self._optimizer)
                self._groups.departed.clear()
            except Exception as error:
                problem = error
            failed = self.peers.gather(problem is not None)
            if problem is not None and not all(failed):
                raise problem
        if problem is not None:  # on all ranks, and what they step with is as it was
            raise problem
        self.has_begun = bool(states)
        self.writings.forget()  # as in take()

    def _places(self, states: Mapping[torch.Tensor, State]) -> list[int]:
        return [place for place, one in enumerate(self._groups.parameters) if one in states]

    def describe(self) -> str:
        """What is done with them, in plain words."""
        return "; ".join(filter(None, (describe_shares(self._division), self.describe_gradients())))

    def describe_gradients(self) -> str:
        """How gradients arrive, if shares were asked for."""
        return self.withholding.in_words(self.layout.hosts)

    def footprint(self) -> tuple[Footprint, Footprint]:
        """What this rank holds; and what it would hold without shares, less the state that other ranks have."""
        return footprint_of(self._division)

    @torch.inference_mode(False)
    def release(self) -> None:
        """Parameters get memory of their own; after half a step they stay where they are, and reads raise."""
        self.peers.seat.sharded.discard(self._number)
        self.withholding.end()
        self.writings.forget()
        with contextlib.suppress(StrettoError):  # a read of the parameter raises it
            self._spread.finish()
        self.inner.stretches.forget()
        if not self.meetings.is_spoiled:
            self.layout.release(self._reducer.members.all_parameters())
            self.withholding.drop(self._everything())
