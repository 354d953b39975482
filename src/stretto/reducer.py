"""From gradient hook to settled ``.grad``: the stage where communication overlaps backward.

    autograd ──> arrivals.py ──> tracker.py: gradients taken into buckets ──> launch.py, in plan order ──> Work
                                                                                                              │
    outermost backward ends ──> launch what is left ──> buffers under way ──> wait ──> .grad in place ──> new plan?

As long as gradients arrive in the order of the last pass, schedule.py says which buckets are complete at which arrival.
In any other order each arrival is looked at, which costs more and is right for every graph. Sparse gradients lie beside
the buckets: sparse.py. For [Note: end of a pass] and [Note: nested tasks] see engine.py.

[Note: a pass given up]  If backward raises on this rank, peers may be waiting for its buckets. So the rest of the pass
is launched at once, marked as given up; the peers' backward raises ``PeerError``, and all ranks stay in step. Gradients
that lie in buckets are dropped (``.grad = None``), since they are being overwritten.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping

import torch

from . import void
from .arrivals import owner_of
from .beside import Beside
from .broadcast import CoalescedMessages
from .buffers import BufferPlaces
from .changes import Followers
from .check import Inspection
from .comm_hooks import CommHook
from .consensus import Consensus
from .engine import OutermostEnd, left_uncompiled, refuse_compiled, without_graph
from .events import Events
from .failing import Failing, refuse_to_send
from .family import Family
from .forward import ForwardWatch
from .launch import LaunchQueue
from .membership import Membership
from .peers import Peers
from .plan import BucketPlan
from .rejoin import Rejoin
from .scaling import Scaling
from .sparse import SparseGradients
from .stepped_alone import SteppedAlone
from .tracker import ArrivalTracker
from .transport.base import Transport
from .uneven import Uneven
from .usage import NeverUsed, Statistics, statistics_of, used_by
from .words import Control, ControlWords


class Reducer:
    """Hooks on parameters, and the pass that is under way.

    Args:
        parameters, sparse: those of the plan, by name, in order of registration; those outside it.
        plan, transport, peers: the first plan, what carries its buckets, and the other ranks.
        members, places: which parameters the module has, and what was asked for; the buffers that all are to follow.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        sparse: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        members: Membership,
        places: BufferPlaces,
        peers: Peers,
    ) -> None:
        options, self._events = members.options, Events(transport.rank)
        scaling = Scaling(transport.world_size, options.reduce, options.predivide_factor, options.weighted)
        self.queue = LaunchQueue(parameters, plan, transport, self._events, scaling, peers)
        """The buckets of the plan in use."""
        self.sparse = SparseGradients(sparse, transport, scaling, options.reduce_dtypes(sparse))
        self.inspection = Inspection(members, places, peers.gather)
        self.stop_watching, self.members, self.transport = self._events.remove, members, transport
        self.delay = self.always_delays = options.delay  # all till after backward: so asked, or behind another
        self.synchronize, self.kept, self._passes = True, 0, 0
        self.running = self.waits = self.detached = self._is_idle = False  # waits: as delay, in this pass
        self._beside = Beside(self.queue, places, self.sparse)
        self._given_up: void.GivenUp | None = None
        self.failing = Failing(self.queue, self._stop, members.everything)
        self.tracker = ArrivalTracker([*parameters.values()], self.queue, self, self._first_arrival, self._progressed)
        self._arrivals = self.tracker.arrivals
        self._rejoin = Rejoin(Followers(members, places, self.queue, self.tracker, self.sparse))
        dropped = functools.partial(self.failing.in_engine, lambda given_up: self.family.give_up(given_up))
        self._end = OutermostEnd(lambda: self.family.settle(), self._arrivals.close, dropped)
        self._forward = ForwardWatch(members.module(), self, self.queue, self.failing, self._end)
        self._consensus = Consensus(self.queue, self.tracker, self._rejoin, self._forward, self._beside, members)
        self._never_used, self._stepped_alone = NeverUsed(self.queue), SteppedAlone(self.queue, members, self.tracker)
        self.family: Family = Family([self])  # of models inside this one and around it
        self.inside: list[weakref.ref[Reducer]] = []  # who have parameters of its module
        self.uneven: Uneven | None = None  # inside torch's Join
        self._beside.hook(self, self._outsider_arrived)
        members.follow({**parameters, **sparse})
        members.watch(self._outsider_arrived, self._let_go, self.queue.preset)

    @property
    def plan(self) -> BucketPlan:
        """The plan in use."""
        return self.queue.plan

    @property
    def statistics(self) -> Statistics:
        """Counts since attaching."""
        return statistics_of(self.queue, self._passes, self.sparse.total_bytes)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are reduced and still alive."""
        alive = [parameter for reference in self.queue.references if (parameter := reference()) is not None]
        return [*alive, *self.sparse.named_parameters().values()]

    @property
    def used_by(self) -> dict[str, int]:
        """How many ranks had a gradient for each parameter in the last pass."""
        return used_by(self.queue) | self.sparse.used_by

    def use(self, hook: CommHook) -> None:
        """Call it in place of the all-reduce. Once."""
        self.queue.use(hook)
        self.family.part()

    def detach(self) -> None:
        """Remove the hooks; ``.grad`` stays. Raises ``SetupError`` if another has left parameters to this."""
        if self.detached:  # by a wrapper around the same module, say
            return
        self.family.leave(self)
        self.detached = True
        self._consensus.stop()
        self._stepped_alone.stop()
        self._forward.remove()
        self.members.stop()
        self.queue.close()
        self._let_go()

    def _let_go(self) -> None:
        """Cut the circles of references to this: survivors.py. Maybe in two threads at once, one of which detaches."""
        if (arrivals := vars(self).pop("_arrivals", None)) is not None:
            arrivals.remove()
            self.sparse.unhook()
            self.members.let_go()
            del self.tracker, self._end, self._rejoin, self._consensus, self._stepped_alone

    def start_watching(self, observer: object) -> None:
        """Tell it of events from now on. An observer of single gradients sees each when it arrives."""
        with self.queue.lock:  # another thread may be amid a pass
            self._events.add(observer)
            if self._events.gradient_ready:
                self.tracker.watch_all()

    def join(self, uneven: Uneven | None, *, afresh: bool) -> None:
        """As the handle's."""
        self.uneven = self._consensus.uneven = uneven
        self._beside.places.follows = None
        if afresh:
            self._forward.forget()

    # Backward

    @left_uncompiled
    def _first_arrival(self, parameter: torch.Tensor) -> None:
        """The gate was closed: a pass begins, or goes on after a nested task, or is not to be synchronised."""
        with self.queue.lock:
            if self._arrivals.is_open or self._enter():  # open by now, where another device's thread began the pass
                self._arrivals.append(parameter)
            else:
                self.tracker.keep(parameter)
                if self.queue.preset is not None:
                    self.queue.preset.accumulated(parameter)
                if self._events.gradient_kept:
                    self._events.emit(self._events.gradient_kept, self.queue.pass_number + 1)

    def _enter(self) -> bool:
        """Begin a pass or go on with it, and open the gate. False if the pass is not to be synchronised."""
        if self.running:
            self.tracker.meet_nested()
            self._end.watch()
            self._arrivals.open()
        elif self.synchronize:
            self.family.begin()
        else:
            if not self.kept:
                self._stepped_alone.kept()
            self.kept += 1
        return self.running

    def _outsider_arrived(self) -> bool:
        """One outside the plan, sparse or new, has got a gradient, maybe alone. Returns whether it is of a pass."""
        with self.queue.lock:
            return self._arrivals.is_open or self._enter()

    def _next_pass(self, *, idle: bool = False) -> None:
        """Deal with what the last pass left, and count."""
        self.queue.peers.refuse_misplaced()
        self.queue.peers.seat.in_pass = True
        refuse_compiled(self.queue)
        refuse_to_send(self.queue.peers, "backward")
        if self._given_up is not None:
            self._drain(self._given_up)
        if self.uneven is not None:
            self.uneven.begin(self.queue, self._beside.places)
        if not self.queue.pass_number:
            self._consensus.meet()
        self._consensus.catch_up(idle=idle)
        self.queue.pass_number += 1
        self.queue.peers.seat.begins(self.queue.pass_number)

    def begin(self) -> None:
        """A pass begins. From a gradient hook."""
        with self.failing:
            self._next_pass()
            self.running = True
            self._end.watch()  # from here on a failure is seen, and the pass given up: the others have counted it
        self.queue.begin()
        self.tracker.begin()
        self._arrivals.open()
        if self.queue.presence.active:
            self._rejoin.noticing.drop_withheld()
            with self.failing:  # interrupted there: unknown whether the map has left
                self.queue.announce(self.tracker.foresee(), later=self.waits)
        if self._events.pass_started:
            self._events.emit(self._events.pass_started, self.queue.pass_number)

    def _progressed(self) -> None:
        if not (self.delay or self.waits):
            self.queue.launch_full()

    # The end of a pass

    def settle(self) -> None:
        """Every gradient of the pass has arrived. Collective."""
        with self.failing, self.queue.lock:
            self._end.ends()
            without_graph(self._settle)
            self.queue.peers.seat.in_pass = False

    def _settle(self) -> None:
        queue, tracker, beside = self.queue, self.tracker, self._beside
        carries = beside.sparse.any or beside.places.any or queue.preset is not None  # else no call: each runs cold
        try:
            rows, scheduled = beside.prepare() if carries else None, tracker.as_scheduled()
            contributed = tracker.contributed(scheduled=scheduled)  # first: what is loose, is looked at next
            noticed = self._rejoin.noticing.look()
            says = self._consensus.says(scheduled=scheduled) + [Control.CHANGED] * (noticed is not None)
            queue.launch_rest(contributed - queue.loose, says)
        except BaseException as error:
            self.failing.at_the_end(error, self.give_up)
            raise
        try:
            sent = beside.send(rows) if carries else None
            words = self._wait(sent, scheduled and tracker.hands_out, release=True)
            if self._never_used.looking and noticed is None:
                self._never_used.look(tracker.gone)
        finally:
            tracker.unsynchronized.clear()
            if carries:
                beside.forget()
            self._reset()
        self._passes += 1
        if self._events.pass_settled:
            self._events.emit(self._events.pass_settled, queue.pass_number)
        if noticed is not None and not queue.tells:
            self._rejoin.refuse()
        inspected, given_up = self.inspection.due(queue.pass_number), self.sparse.given_up if carries else 0
        self._consensus.hear(words, noticed, at_once=inspected, given_up=given_up)
        if inspected:
            self.inspection.run(queue.pass_number)

    def _wait(self, sent: CoalescedMessages | None, handed_out: bool = False, *, release: bool) -> ControlWords:
        words = self.queue.wait(release=release, handed_out=handed_out)
        if sent is not None:
            self._beside.finish(sent, words, release=release)
        return words

    def _reset(self) -> None:
        self.running = False
        self.tracker.end()
        self.queue.reset()
        if self.sparse.any:
            self.sparse.reset()

    def begin_idle(self) -> None:
        """Begin a pass of the other ranks with nothing to give. Collective."""
        queue = self.queue
        with queue.lock, torch.no_grad(), self.failing:
            self._next_pass(idle=True)
            queue.presence.announce_nothing(len(queue.buckets), later=queue.waits_within and queue.peers.seat.all_know)
        self._is_idle = True

    def shadow(self) -> None:
        """Take part in one to its end, begun or not; not the rest of the family. Collective."""
        if not self._is_idle:
            self.begin_idle()
        self._is_idle = False
        with self.queue.lock, torch.no_grad(), self.failing:
            try:
                self.queue.launch_idle(self._consensus.says_idle())
                words = self._wait(self._beside.send(None), release=False)
            finally:
                self._reset()
            inspected = self.inspection.due(self.queue.pass_number)
            self._consensus.hear(words, None, at_once=inspected or self.sparse.given_up > 0, idle=True)
            if inspected and not self.sparse.given_up:
                self.inspection.run(self.queue.pass_number, idle=True)
            self.queue.peers.seat.in_pass = False

    # A pass that failed on this rank: see [Note: a pass given up]

    def give_up(self) -> None:
        """Launch the rest of the pass, marked. Where others need this rank for it, it is to stay: ``failing.stay``."""
        with self.failing.giving_up(), self.queue.lock, torch.no_grad():
            self._stop()
            known = self.sparse.any or self.uneven is not None or self.inspection.due(self.queue.pass_number)
            self._forward.says(self.queue.pass_number)  # to nobody: giving up says all
            self.queue.peers.refuse_lost_sends()
            self._given_up = void.GivenUp(known, self.family.steps_in_shares())  # now there is something to drain
            self.queue.launch_given_up()
            self._given_up.buffers = self._beside.send_given_up()
            if not self.queue.tells and self.queue.pass_number == 1:
                self._consensus.replanning.send_order()  # peers do not know of the failure

    def outlast(self) -> None:
        """Wait until all of a pass that was given up is there."""
        if (given_up := self._given_up) is not None and not self.failing.is_lost:
            with self.queue.lock, torch.no_grad(), self.failing:
                given_up.outlast(self._wait)

    def _stop(self) -> None:
        self.running = self.queue.peers.seat.in_pass = False
        self.tracker.stop()
        self.tracker.unsynchronized.clear()
        self._beside.forget()

    def _drain(self, given_up: void.GivenUp) -> None:
        """Before the next pass: wait for what the one that was given up left under way."""
        self._given_up = None
        with torch.no_grad():
            try:
                words = given_up.outlast(self._wait)
            finally:
                self._reset()
            self._consensus.hear_of_own_failure(words, known=given_up.known, crosses=given_up.crosses)


def reducer_of(parameter: torch.nn.Parameter) -> Reducer | None:
    """The reducer whose hook sits on the parameter, if any."""
    return owner if isinstance(owner := owner_of(parameter), Reducer) else None
