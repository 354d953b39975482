"""From gradient hook to settled ``.grad``: the stage where communication overlaps backward.

    autograd ──> arrivals.py ──> tracker.py: gradients taken into buckets ──> launch.py, in plan order ──> Work
                                                                                                              │
    outermost backward ends ──> launch what is left ──> buffers under way ──> wait ──> .grad in place ──> new plan?

As long as gradients arrive in the order of the last pass, schedule.py says what is complete when. In any other order
each arrival is looked at, which costs more and is right for every graph.

[Note: a pass given up]  If backward raises on this rank, peers may be waiting for its buckets. So the rest of the pass
is launched at once, marked as given up; the peers' backward raises ``PeerError``, and all ranks stay in step. Gradients
that lie in buckets are dropped (``.grad = None``): they are being overwritten.

See engine.py for [Note: end of a pass] and [Note: nested tasks], launch.py for [Note: launch order].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from .arrivals import owner_of
from .broadcast import CoalescedMessages, start_broadcast, start_reduce
from .bucket import Control
from .buffers import BufferPlaces
from .comm_hooks import CommHook
from .consensus import Consensus
from .engine import OutermostEnd, without_graph
from .errors import SetupError
from .events import Events
from .launch import LaunchQueue
from .membership import Membership
from .plan import BucketPlan
from .rejoin import Rejoin
from .scaling import Scaling
from .tracker import ArrivalTracker
from .transport.base import Transport


@dataclass(frozen=True)
class Statistics:
    """Counts since attaching, on this rank."""

    passes: int = 0
    """Synchronised passes that settled."""
    buckets: int = 0
    """Buckets launched, one collective each."""
    payload_bytes: int = 0
    """Gradient bytes handed to the transport or the comm hook."""
    plans: int = 0
    """Plans used, the first one included."""


class Reducer:
    """Hooks on parameters, and the pass that is under way.

    Args:
        parameters: those to reduce, by name, in order of registration.
        plan: the first plan.
        transport: carries the buckets.
        events: told what happens.
        places: the buffers that are made equal at the end of every pass.
        members: which parameters the module has.
        scaling: what is done to gradients besides summing them.
        delay: launch nothing before backward ends.
        inspect: called with the pass number when a pass has settled.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        events: Events,
        places: BufferPlaces,
        members: Membership,
        scaling: Scaling,
        *,
        delay: bool = False,
        inspect: Callable[[int], None] | None = None,
    ) -> None:
        self.synchronize = True
        self._queue = LaunchQueue(parameters, plan, transport, events, scaling)
        self._events = events
        self._places = places
        self._members = members
        self._delay = delay
        self._inspect = inspect
        self._running = False
        self._unsynchronized: set[int] = set()
        self._buffers_of_given_up: CoalescedMessages | None = None
        self._passes = 0
        hooked = list(parameters.values())
        self._tracker = ArrivalTracker(hooked, self._queue, events, self, self._first_arrival, self._progressed)
        self._arrivals = self._tracker.arrivals
        self._rejoin = Rejoin(members, places, self._queue, self._tracker, events)
        self._consensus = Consensus(self._queue, self._tracker, events, self._rejoin)
        members.follow(parameters)
        members.watch(self._outsider_arrived)
        self._end = OutermostEnd(self._settle, self._arrivals.close, self._give_up)

    @property
    def plan(self) -> BucketPlan:
        """The plan in use."""
        return self._queue.plan

    @property
    def transport(self) -> Transport:
        """What carries the buckets."""
        return self._queue.transport

    @property
    def statistics(self) -> Statistics:
        """Counts since attaching."""
        return Statistics(self._passes, self._queue.total_launched, self._queue.total_bytes, self._consensus.plans)

    @property
    def weight(self) -> float:
        """What this rank's gradients count for."""
        return self._queue.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._queue.weight = value

    @property
    def comm_hook(self) -> CommHook | None:
        """What is called in place of the all-reduce. Can be set once."""
        return self._queue.comm_hook

    @comm_hook.setter
    def comm_hook(self, hook: CommHook) -> None:
        if self._queue.comm_hook is not None:
            raise SetupError(
                f"rank {self.transport.rank}: a comm hook is registered already ({self._queue.comm_hook.hook!r}).\n"
                "Detach and attach again to use another one: sync.detach(); sync = stretto.attach(model)"
            )
        self._queue.comm_hook = hook

    def detach(self) -> None:
        """Remove the hooks. ``.grad`` stays as it is."""
        self._arrivals.remove()
        self._members.stop()

    def observers_changed(self) -> None:
        """Whoever observes single gradients wants to see each when it arrives."""
        if self._events.gradient_ready:
            self._tracker.watch_all()

    # Backward

    def _first_arrival(self, parameter: torch.Tensor) -> None:
        """The gate was closed: a pass begins, or goes on after a nested task, or is not to be synchronised."""
        with self._queue.lock:
            if self._running:
                self._end.watch()
            elif self.synchronize:
                self._begin_pass()
            else:
                self._unsynchronized.add(self._tracker.index_of[id(parameter)])
                return
            self._arrivals.order.append(parameter)
            self._arrivals.open()

    def _outsider_arrived(self) -> None:
        """A parameter outside the plan has got a gradient; maybe nothing else does in this pass."""
        with self._queue.lock:
            if self._running or not self.synchronize:
                if self._running and not self._arrivals.is_open:
                    self._end.watch()
                    self._arrivals.open()
                return
            self._begin_pass()
            self._arrivals.open()

    def _next_pass(self) -> None:
        """Deal with what the last pass left, and count."""
        self._drain()
        self._consensus.catch_up()
        self._queue.pass_number += 1

    def _begin_pass(self) -> None:
        self._next_pass()
        self._running = True
        self._tracker.begin()
        self._end.watch()
        if self._events.pass_started:
            self._events.emit(self._events.pass_started, self._queue.pass_number)

    def _progressed(self) -> None:
        if not self._delay:
            self._queue.launch_full()

    # The end of a pass

    def _settle(self) -> None:
        """Every gradient of the pass has arrived."""
        if not self._running:
            return
        with self._queue.lock, without_graph():
            try:
                contributed = self._tracker.contributed(self._unsynchronized)
                changed = self._rejoin.noticed(self._unsynchronized)
                says = self._consensus.says() + [Control.CHANGED] * changed
                self._queue.launch_rest(contributed - self._queue.loose, says)
            except BaseException:
                self._give_up()
                raise
            try:
                buffers = self._send_buffers()
                words = self._queue.wait(release=True, handed_out=self._tracker.handed_out())
                buffers.finish()
            finally:
                self._unsynchronized.clear()
                self._reset()
            self._passes += 1
            if self._events.pass_settled:
                self._events.emit(self._events.pass_settled, self._queue.pass_number)
            if changed and self.comm_hook is not None:
                self._rejoin.refuse()
            self._consensus.hear(words, at_once=changed)
            if self._inspect is not None:
                self._inspect(self._queue.pass_number)

    def _send_buffers(self) -> CoalescedMessages:
        follow, average = self._places.to_send()
        sent = CoalescedMessages()
        if follow:
            sent.add(start_broadcast(follow, self.transport))
        if average:
            sent.add(start_reduce(average, self.transport, self.transport.world_size))
        if sent.messages and self._events.buffers_sent:
            self._events.emit(self._events.buffers_sent, self._queue.pass_number, len(sent.messages), sent.nbytes)
        return sent

    def _reset(self) -> None:
        self._running = False
        self._tracker.end()
        self._queue.reset()

    def shadow_pass(self) -> None:
        """Take part in one pass of the other ranks with nothing to give; ``.grad`` stays as it is. Collective."""
        with self._queue.lock, torch.no_grad():
            self._next_pass()
            try:
                self._queue.launch_idle()
                buffers = self._send_buffers()
                words = self._queue.wait(release=False)
                buffers.finish()
            finally:
                self._reset()
            self._consensus.act_on(words, release=False)

    # A pass that failed on this rank: see [Note: a pass given up]

    def _give_up(self) -> None:
        with self._queue.lock, torch.no_grad():
            self._running = False
            self._tracker.stop()
            self._unsynchronized.clear()
            self._buffers_of_given_up = CoalescedMessages()  # from here on there is something to drain
            self._queue.launch_spoiled()
            self._buffers_of_given_up = self._send_buffers()
            if self.comm_hook is not None and self._queue.pass_number == 1:
                # A hook moves no words, so peers do not know of the failure and wait for the order.
                self._consensus.send_order()

    def _drain(self) -> None:
        """Before the next pass: wait for what the one that was given up left under way."""
        if self._buffers_of_given_up is None:
            return
        buffers, self._buffers_of_given_up = self._buffers_of_given_up, None
        with torch.no_grad():
            try:
                words = self._queue.wait(release=False)
                buffers.finish()
            finally:
                self._reset()
        self._consensus.act_on(replace(words, own_failure=True))


def reducer_of(parameter: torch.nn.Parameter) -> Reducer | None:
    """The reducer whose hook sits on the parameter, if any."""
    owner = owner_of(parameter)
    return owner if isinstance(owner, Reducer) else None
