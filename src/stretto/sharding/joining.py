"""torch's ``Join`` over a sharded optimizer: a rank that has run out of batches goes on stepping its share.

    without batches  shadow pass ──> meet ──> options and gradients of the lowest rank that has batches ──> step
    with batches     backward, clipping, schedules ──> meet ──> lend them ──> step

torch's ``ZeroRedundancyOptimizer`` steps with what each rank has: if the others clip, or change the learning rate, the
share of a rank without batches is stepped differently. Here the groups of such a rank follow the others'.

[Note: a step a pass]  A rank without batches waits for a step after each pass. If another rank leaves a step out, as
gradient scalers do, it finds out in its next pass and fails. There is no other way: ``Join``'s own messages begin
before the waiting rank could be told, and over a process group two messages that cross end the process.

[Note: parted]  A refused step ends ``Join`` on ranks without batches: the error leaves the ``with`` block there. Other
ranks may catch the error inside the block, and would wait in their next pass for ranks that are gone: they are told to
leave as well.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ..broadcast import broadcast_coalesced
from ..errors import ModelMismatchError, SetupError
from ..launch import LaunchQueue
from .groups import Groups, unlike_groups
from .meetings import Coming, Meetings, Met
from .rebuilt import options_of

if TYPE_CHECKING:
    from .shares import Shares


class Joins(Joinable):
    """What ``Join`` asks of a sharded optimizer: ``with Join([model, optimizer]): ...``, the drop-in first."""

    _shares: Shares | None
    beside: Any
    """All sharded optimizers of the model, this one included."""
    _hook: Any = None
    """Held weakly: an object that ``Join`` keeps while this rank is inside, see uneven.py, [Note: left]."""
    joins_over: Any = None
    """The drop-in's group. The drop-in sets it when ``Join`` asks it for its hook, before this optimizer is asked."""

    @abstractmethod
    def _usable(self) -> Shares:
        """This rank's shares. Raises if no step can follow."""

    @property
    def joins(self) -> bool:
        """Whether it is inside ``Join``, as all ranks see it. Raises ``SetupError`` if it is first in the list."""
        config: Any = self._join_config
        if config.enable and config.is_first_joinable:
            raise SetupError("Join: a sharded optimizer must come after its model: with Join([model, optimizer]).")
        return bool(config.enable)

    @property
    def is_inside(self) -> bool:
        """Whether it is inside ``Join``, as far as this rank can see: see uneven.py, [Note: left]."""
        return self.joins and self._hook is not None and self._hook() is not None

    def step_shares(self, shares: Shares) -> None:
        """A step. Collective.

        Raises:
            SetupError: inside ``Join`` no pass came before it, or the optimizer is the first in the list.
        """
        if not self._join_config.enable:
            shares.step()
            return
        joins = self.joins
        if self.is_inside:
            for one in self.beside:
                if one.is_inside and one._shares is not None:
                    one._shares.attendance.refuse_parted()
            shares.attendance.refuse_without_pass()
        try:
            shares.step(joins=joins)
        except Exception:
            shares.attendance.part()
            raise

    def join_hook(self, **_: Any) -> JoinHook:
        """Called by ``Join``. Raises ``SetupError`` if gradients are not kept: there would be none to lend."""
        if self._shares is None:
            return JoinHook()
        shares = self._usable()
        shares.withholding.refuse_to_lend()
        shares.attendance.begins()
        hook = _StepHook(self)
        self._hook = weakref.ref(hook)
        return hook

    def leave(self) -> None:
        """``Join`` is over, on all ranks."""
        Joinable.__init__(self)
        self._hook = None

    @property
    def join_device(self) -> torch.device:
        """Where its first parameter is."""
        found: torch.device = self.param_groups[0]["params"][0].device  # type: ignore[attr-defined]
        return found

    @property
    def join_process_group(self) -> Any:
        """That of the model."""
        return self.joins_over

    def refuse_to_leave_out(self) -> None:
        """A pass begins: see [Note: a step a pass]."""
        if self.is_inside and self._shares is not None:
            self._shares.attendance.refuse_to_leave_out()


class Attendance:
    """Keeps track of who comes to a step, and of whether a step has followed each pass.

    Args:
        meetings: where ranks meet.
        queue: counts passes.
    """

    def __init__(self, meetings: Meetings, queue: LaunchQueue) -> None:
        self._meetings = meetings
        self._queue = queue
        self._answered = 0
        self._have_parted = False
        """Whether ranks without batches are gone: see [Note: parted]."""

    def begins(self) -> None:
        """``Join`` begins."""
        self._answered = self._queue.pass_number
        self._have_parted = False

    def part(self) -> None:
        """A step that has begun on this rank failed, or was refused."""
        self._have_parted = self._meetings.idle > 0

    def meet(self, parameters: Sequence[torch.nn.Parameter], number: int, *, idle: bool, has_written: bool) -> Met:
        """Before a step. Collective; see :meth:`Meetings.meet_before`."""
        self._answered = self._queue.pass_number
        coming = idle * Coming.IDLE + has_written * Coming.HAS_WRITTEN
        return self._meetings.meet_before(parameters, coming, number)

    @property
    def is_void(self) -> bool:
        """Whether the last pass failed on some rank, so that no rank must step."""
        return self._queue.pass_number == self._queue.peers.seat.void

    def refuse_without_pass(self) -> None:
        """Raise ``SetupError`` if no pass came before this step, so that ranks without batches do not come to it."""
        if self._queue.pass_number == self._answered or self.is_void:
            what = "follows a pass that has failed" if self.is_void else "follows no pass of its own"
            error = SetupError(
                f"{self._queue.where}: this step of the sharded optimizer {what}: inside Join, ranks without batches "
                "step once after each pass.\n"
                "Step once after each backward outside of no_sync(); after one that has raised, call zero_grad() "
                "and go on."
            )
            self._meetings.fail(error)
            raise error

    def refuse_parted(self) -> None:
        """Raise ``SetupError`` if ranks without batches are gone. The others raise the same; nothing is lost."""
        if self._have_parted:
            raise SetupError(
                f"{self._queue.where}: the last step was refused inside Join, and ranks without batches have left Join "
                "with that error.\nAfter an error of step(), leave Join on all ranks; then all can go on."
            )

    def refuse_to_leave_out(self) -> None:
        """Raise ``SetupError`` if no step followed the last pass, of which the others are told, or see above."""
        self.refuse_parted()
        if self._queue.pass_number > self._answered and not self.is_void:
            error = SetupError(
                f"{self._queue.where} was not followed by a step of the sharded optimizer: inside Join, ranks "
                "without batches wait for a step after each pass.\n"
                "Step after each backward; accumulate inside no_sync()."
            )
            self._meetings.fail(error)
            raise error


class _StepHook(JoinHook):
    def __init__(self, optimizer: Joins) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        shares = self.optimizer._usable()
        if not shares.attendance.is_void:
            with torch.no_grad():
                shares.step(idle=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        if self.optimizer._shares is not None:  # the drop-in has just copied one rank's model to all
            self.optimizer._shares.writings.forget()
        self.optimizer.leave()


@contextlib.contextmanager
def lent(groups: Groups, queue: LaunchQueue, failed: Callable[[BaseException], None], *, idle: bool) -> Iterator[None]:
    """Inside, a rank without batches has the options and the ``.grad`` of a rank that has batches. Collective.

    Args:
        groups: of the optimizer.
        queue: has the transport, and the other ranks.
        failed: told of any other error, here or inside: others may have stepped.
        idle: whether this rank has no batches.

    Raises:
        ModelMismatchError: ranks have different groups; options are compared among ranks with batches. On all ranks.
    """
    try:
        with _lent(groups, queue, idle=idle):
            yield
    except ModelMismatchError:
        raise
    except BaseException as error:
        failed(error)
        raise


@contextlib.contextmanager
def _lent(groups: Groups, queue: LaunchQueue, *, idle: bool) -> Iterator[None]:
    own = [one.grad for one in groups.parameters]
    offer = ([options_of(group) for group in groups.all], [None if one is None else one.is_sparse for one in own])
    offers = queue.peers.gather((idle, groups.facts(), None if idle else offer))
    lender = next(rank for rank, (is_idle, *_) in enumerate(offers) if not is_idle)
    _, wanted, (options, are_sparse) = offers[lender]
    for rank, (is_idle, stated, _) in enumerate(offers):
        if stated[1:] != wanted[1:] or (stated != wanted and not is_idle):
            raise unlike_groups(queue.where, rank, stated, wanted, lender, idle=sum(one for one, *_ in offers))
    gradients = _broadcast(groups.parameters, are_sparse, queue, lender)
    if not idle:
        yield
        return
    for group, theirs in zip(groups.all, options, strict=True):
        for gone in options_of(group).keys() - theirs.keys():
            del group[gone]
        for key, value in theirs.items():
            if torch.is_tensor(value) and torch.is_tensor(mine := group.get(key)) and mine.shape == value.shape:
                mine.copy_(value)  # the program may hold it, and it may lie on this rank's accelerator
            else:
                group[key] = value
    try:
        for one, gradient in zip(groups.parameters, gradients, strict=True):
            one.grad = gradient
        yield
    finally:
        for one, gradient in zip(groups.parameters, own, strict=True):
            one.grad = gradient


def _broadcast(
    parameters: Sequence[torch.nn.Parameter], are_sparse: Sequence[bool | None], queue: LaunchQueue, lender: int
) -> list[torch.Tensor | None]:
    """The lender's gradients. ``are_sparse``: those that are; None where there is no gradient."""
    lends, found = queue.transport.rank == lender, list[torch.Tensor | None]([None] * len(parameters))
    if any(are_sparse):  # which is rare
        rows = [one.grad if sparse else None for one, sparse in zip(parameters, are_sparse, strict=True)]
        found = queue.peers.gather(rows if lends else None)[lender]
    for place, (one, sparse) in enumerate(zip(parameters, are_sparse, strict=True)):
        if sparse is False:
            found[place] = one.grad if lends else torch.empty_like(one)
    dense = [one.detach() for one in found if one is not None and not one.is_sparse]
    broadcast_coalesced(dense, queue.transport, queue.wait_for, root=lender)
    return found
