"""Reducers that one backward reaches together: an attached model inside another one, or beside it.

[Note: one family, one pass]  Collectives match between ranks by their order alone. Two reducers that act independently
would issue them in whatever order their gradients come in, which can differ between ranks. So the members of a family
begin, settle and give up together, in the order in which they were attached. A gradient of any member begins a pass of
all, and a member that this backward does not reach says "absent" in its buckets, as for any parameter. While backward
runs, only the first member on a channel launches; the others' buckets leave when it has settled. A channel is a process
group, or the transport itself where it has a channel of its own. A member whose comm hook is waited for within backward
does not launch behind another member on any channel either: a rank that has ended backward waits for that other first.

[Note: strangers]  Handles that were attached side by side, such as any two drop-ins, are families of their own, because
models trained in turns should not send for each other. But in a backward that reaches several on the same ranks, they
are one family for that pass: the first gradient asks which are reached; these begin in the order of attaching, and of
those that share a channel only the first sends before backward ends. This requires that all ranks reach the same
handles in one backward, just as all ranks run the same passes. While a reentrant checkpoint is alive, an absence cannot
be foreseen, so every handle but the first waits. Nor can a backward be foreseen that the program's own autograd
function starts inside backward: if it meets a handle after a later one has sent, a warning says so, and that one then
waits.

[Note: given up in turn]  A rank whose backward has failed gives up all that this backward has reached, on any process
group, in the order in which the others end them; where one failed as it ended, those behind it. Between hosts, sums go
on only while their ranks wait for them. So where a later one makes its rank wait (a comm hook, a map of absences), this
rank first waits for those before it, as the others do.

[Note: other groups]  Handles on other process groups, say dense layers on all ranks and experts on some, do not mix.
But each waits at its end for ranks that may be at the end of another. So the handle that ends first ends all that this
backward has reached, in the order of attaching. Some handles already wait within backward: for a map of absences on a
process group, or for the future of a comm hook. These send nothing before the end in their first pass, and again from
the pass on that follows one in which some rank has reached handles on several groups. (That is said behind the last
bucket, since all ranks of a group must send alike.) Handles that have met begin together from then on, because backward
may fail before it has reached one of them.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .crossing import goes_behind, share_channel, waits_for_others
from .engine import ReentrantCheckpoints, current_task, will_arrive
from .errors import SetupError
from .failing import Failing
from .uneven import announce_all
from .wording import name_list

if TYPE_CHECKING:
    from .reducer import Reducer
    from .seat import Seat

log = logging.getLogger("stretto")
_number: Callable[[Reducer], int] = operator.attrgetter("queue.peers.seat.number")
"""Of a member: its place in the order of attaching."""
_NONE = (-1, -1)
"""No backward: the engine's task, and the thread."""
_begin, _begin_idle, _shadow = map(operator.methodcaller, ("begin", "begin_idle", "shadow"))


class Family:
    """Members in the order in which they were attached, which is the same on all ranks."""

    def __init__(self, members: Iterable[Reducer]) -> None:
        in_order = sorted(members, key=_number)
        self._members = [weakref.ref(member) for member in in_order]  # [Note: weak parameters] in bucket.py
        self._warned, self._backward = False, _NONE
        self._met: weakref.WeakSet[Family] = weakref.WeakSet()  # in one backward, on other process groups
        self._has_met = False  # the set's own answer runs Python, in every pass
        self._checkpoints = ReentrantCheckpoints()
        for member in self.members():
            member.family = self
            member.queue.peers.seat.whose = weakref.ref(member)
        self.part()

    def members(self) -> list[Reducer]:
        """Those that are alive."""
        return [alive for reference in self._members if (alive := reference()) is not None]

    def part(self) -> None:
        """Find out who may launch while backward runs; again after a new comm hook, or when a member has left."""
        members = self.members()
        for place, member in enumerate(members):
            before = [one.queue for one in members[:place]]
            member.delay = member.always_delays or goes_behind(member.queue, before)

    def leave(self, member: Reducer) -> None:
        """It acts for itself from now on. All ranks must do so between the same passes.

        Raises:
            SetupError: another member has left parameters to this one; backward is running.
        """
        if current_task() != -1:
            raise SetupError(
                f"{member.queue.where}: detach() was called while backward runs.\n"
                "Call it when backward has returned, and not from a hook."
            )
        if any(reference() is member for other in self.members() for reference in other.inside):
            raise SetupError(
                f"rank {member.queue.transport.rank}: another attached model holds this one and has left its "
                "parameters to this handle.\nCall detach() on the outer handle first."
            )
        self._members = [reference for reference in self._members if reference() is not member]
        member.family = Family([member])
        self.part()

    def begin(self) -> None:
        """A gradient of one of them has arrived. From its hook."""
        if not self._has_met and (alone := self._alone()) is not None:
            if alone.synchronize and not alone.running:
                self._backward, alone.waits = (current_task(), threading.get_ident()), waits_for_others(alone.queue)
                amid().add(self)
                alone.begin()
            return
        if self._is_running():
            all_of(self._due(), _begin)
            return
        company = [*dict.fromkeys((*self._company(), *self._met))]
        backward = (current_task(), threading.get_ident())
        coming = [family for family in company if family is self or family._comes(backward)]
        for family in coming:
            if family._is_running():
                family._look_back(coming)
        due: list[Reducer] = []
        for family in coming:
            if not family._is_running() and (new := family._due()):
                unforeseen = self._checkpoints.alive() or family._warned
                family._set_out(backward, company if unforeseen else coming)
                due += new
        announce_all(due)
        all_of(sorted(due, key=_number), _begin)

    def _set_out(self, backward: tuple[int, int], company: Sequence[Family]) -> None:
        """Begin a pass, in that backward, and see which members must send nothing before its end."""
        self._backward = backward
        amid().add(self)
        others = [one.queue for family in company if family is not self for one in family.members()]
        for member in self.members():
            member.waits = waits_for_others(member.queue) or (bool(others) and goes_behind(member.queue, others))

    def _due(self) -> list[Reducer]:
        """Those that are to begin."""
        return [member for member in self._present() if member.synchronize and not member.running]

    def settle(self) -> None:
        """The outermost backward has ended. Collective. If one fails here, the later ones give up."""
        running = self._reached()
        for member in running[1:]:
            member.queue.events.end_backward(member.queue.pass_number)
        try:
            for place, member in enumerate(running):
                try:
                    member.settle()
                except BaseException as error:
                    self.lose_with(member, error)
                    turn = [member, *[one for one in running[place:] if one.running]]
                    give_up = functools.partial(all_of, turn, functools.partial(_give_up, turn, error=error))
                    try:
                        member.failing.behind(error, give_up, [one.failing for one in turn])
                    finally:
                        all_of(turn[1:], lambda one: one.failing.stay())
                    raise
        finally:
            _part(running)

    def steps_in_shares(self) -> list[tuple[Seat, list[int]]]:
        """How often sharded optimizers have stepped, for each handle of this backward that has some."""
        together = [family for family in self._company() if family is self or family._is_of(self._backward)]
        seats = [member.queue.peers.seat for family in together for member in family.members()]
        return [(seat, seat.steps.copy()) for seat in seats if seat.sharded]

    def give_up(self, given_up: list[Failing]) -> None:
        """Backward has failed on this rank. The list gets those with whose passes it is to stay."""
        running = self._reached()
        try:
            given_up += [member.failing for member in running]
            all_of(running, functools.partial(_give_up, running))
        finally:
            _part(running)

    def shadow(self) -> None:
        """Take part in one pass of the other ranks, all members if it has not lost its place. Collective."""
        members = self._present()
        announce_all(members)
        try:
            if len(self._company()) == 1:  # what strangers have sent by then an idle rank cannot know
                all_of(members, _begin_idle)  # as in a pass: all have told what will come before the first sends
        except BaseException:
            all_of([one for one in members if not one.failing.is_lost], _shadow)
            raise
        all_of(members, _shadow)

    def lose_with(self, member: Reducer, error: BaseException) -> bool:
        """One has failed. If this rank has lost its place there, it sends nothing for others on that channel either:
        what they send would be summed with what the other ranks are amid."""
        if not member.failing.is_lost:
            return False
        for other in (*self.members(), *self._running()):
            if not other.failing.is_lost and share_channel(member.queue, other.queue):
                other.failing.lose(error, error.__traceback__)
        return True

    def _present(self) -> list[Reducer]:
        """Those whose model was not dropped: the same on all ranks, whenever their collectors come by. A module that is
        there counts whatever parameters it has, since who holds old ones differs; else it may have been a container."""
        members = self.members()
        if len(members) == 1:
            return members
        return [one for one in members if one.members.module() is not None or one.parameters]

    # Families that do not know each other: see [Note: strangers]

    def _company(self) -> list[Family]:
        """This one and all others that have a member on one of its process groups."""
        found: dict[Family, None] = {}
        for member in self.members():
            seats = member.queue.peers.seat.row
            if len(seats) > 1:
                handles = [seat.whose() for seat in [*seats]]  # meanwhile one may be dropped
                found.update(dict.fromkeys(other.family for other in handles if other is not None))
        return [*found] if self in found else [self]

    def _is_running(self) -> bool:
        return any(member.running for member in self.members())

    def _alone(self) -> Reducer | None:
        """The member that is alone in this family, and on its process group."""
        members = self._members  # read once: another thread may detach them meanwhile
        member = members[0]() if len(members) == 1 else None
        return None if member is None or len(member.queue.peers.seat.row) > 1 else member

    def _running(self) -> list[Reducer]:
        """All on its process groups that this backward has reached."""
        if (alone := self._alone()) is not None:
            return [alone] if alone.running else []
        reached = [family for family in self._company() if family is self or family._is_of(self._backward)]
        return [member for family in reached for member in family.members() if member.running]

    def _reached(self) -> list[Reducer]:
        """All that this backward has reached, on any process group: see [Note: other groups]. Their pass is over."""
        if amid() == {self} and len(members := self._members) == 1:  # read once, as above
            amid().discard(self)
            member = members[0]()
            return [member] if member is not None and member.running else []
        found = {family for family in self._company() if family is self or family._is_of(self._backward)}
        found |= {family for family in amid().copy() if family._is_beside(self)}
        amid().difference_update(found)
        running = sorted({one for family in found for one in family.members() if one.running}, key=_number)
        met = {member.family for member in running}
        if any([one.queue.peers.seat.row is not running[0].queue.peers.seat.row for one in running]):
            for member in running:
                member.family._has_met = True
                member.family._met.update(met - {member.family})
                member.queue.peers.seat.with_others = True
        return running

    def _is_of(self, backward: tuple[int, int]) -> bool:
        """Whether its pass, if it runs, is of that backward and not of another thread's."""
        return any(one == other for one, other in zip(self._backward, backward, strict=True))

    def _is_beside(self, other: Family) -> bool:
        """Whether it is in one backward with another on other process groups, where threads may train at once.

        Then on devices a thread tells nothing: the engine has one for each, for all backwards.
        """
        on_host = all(bucket.flat.is_cpu for member in self.members() for bucket in member.queue.buckets)
        return self._is_of(other._backward) and (on_host or self._backward[0] == other._backward[0])

    def _comes(self, backward: tuple[int, int]) -> bool:
        """Whether that backward, which is running, reaches it."""
        if self._is_running():
            return self._is_of(backward)
        members = [member for member in self.members() if member.synchronize]
        return any(will_arrive([p for one in members for p in (*one.parameters, *one.members.outsiders())]))

    def _look_back(self, coming: Sequence[Family]) -> None:
        """It runs, and one that goes before it begins only now: nothing may have left."""
        sent = [member.queue for member in self.members() if member.running and member.queue.launched]
        new = [[one.queue for one in family.members()] for family in coming if not family._is_running()]
        late = [others for others in new if any(goes_behind(one, others) for one in sent)]
        if self._warned or not late:
            return
        self._warned = True
        log.warning(
            "rank %s, pass %s: one backward has reached two attached models on one process group, from inside a "
            "custom autograd function: the one attached later (%s) has sent gradients before it was known that "
            "backward reaches the earlier one (%s). Unless it reaches both in this order on every rank, their "
            "gradients of this pass are mixed.\n"
            "Attach the later one with stretto.attach(module, beside=[the earlier one's handle]), or wrap both in "
            "one DistributedDataParallel(torch.nn.ModuleList([...])).",
            sent[0].transport.rank,
            sent[0].pass_number,
            name_list(sent[0].names),
            name_list(late[0][0].names),
        )


@functools.cache
def amid() -> set[Family]:
    """Families of this process with a pass under way, in any thread: one backward may have reached several."""
    return set()


def _part(members: Iterable[Reducer]) -> None:
    """Their backward is over: else the next one on this thread would count as the same."""
    for member in members:
        member.family._backward = _NONE


def _give_up(members: Sequence[Reducer], member: Reducer, error: BaseException | None = None) -> None:
    """One of them, if it is not yet, before those behind: see [Note: given up in turn]. ``error``: if it is known."""
    behind = members[members.index(member) + 1 :]
    hooked = any([hook.one_at_a_time for one in behind if (hook := one.queue.comm_hook) is not None])
    mapped = [one for one in behind if one.queue.presence.active]
    if member.running:
        member.give_up()
        if hooked or any([one.waits for one in mapped]):  # for others, who come when they know of this failure
            member.queue.peers.tell_failed("backward", error, None if error is None else error.__traceback__)
    if hooked or mapped:
        member.outlast()


def all_of(members: Sequence[Reducer], call: Callable[[Reducer], None]) -> None:
    """Call it for each, even after one that fails, as other ranks do, but not if this rank has lost its place."""
    for place, member in enumerate(members):
        try:
            call(member)
        except BaseException as error:
            rest = members[place + 1 :]
            if member.family.lose_with(member, error):
                strangers = [one for one in rest if one.family is not member.family]
                rest = [one for one in strangers if not share_channel(one.queue, member.queue)]
            all_of(rest, call)
            raise


def unite(inside: Sequence[Reducer], beside: Sequence[Reducer], newcomer: Reducer) -> None:
    """``newcomer`` was attached around or beside others: from now on they and their families are one.

    Args:
        inside: members that have parameters of the newcomer's module, in an order that is the same on all ranks.
        beside: others that one backward may reach together with it; the same on all ranks.
        newcomer: comes last.
    """
    newcomer.inside = [weakref.ref(member) for member in inside]
    united = dict.fromkeys(one for member in (*inside, *beside) for one in member.family.members())
    if united:
        Family([*united, newcomer])
