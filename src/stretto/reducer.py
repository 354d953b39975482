"""From gradient hook to settled ``.grad``: the stage where communication overlaps backward.

    autograd ──> gradient hook (counts down) ──> bucket full ──> launch.py, in plan order ──> Work
                                                                                               │
    outermost backward ends ──> launch what is left ──> buffers under way ──> wait ──> .grad in place ──> new plan?

[Note: a pass given up]  If backward raises on this rank, peers may be waiting for its buckets. So the rest of the pass
is launched at once, marked as given up; the peers' backward raises ``PeerError``, and all ranks stay in step. Gradients
that lie in buckets are dropped (``.grad = None``): they are being overwritten.

See engine.py for [Note: end of a pass] and [Note: nested tasks], launch.py for [Note: launch order].
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .broadcast import CoalescedMessages, start_broadcast, start_mean
from .bucket import Bucket, Control, ControlWords
from .comm_hooks import CommHook
from .engine import NO_TASK, OutermostEnd, current_task, inside_custom_backward
from .errors import PeerError, SetupError
from .events import Events
from .launch import LaunchQueue
from .plan import BucketPlan
from .replan import ReplanPolicy, complete_order, recut
from .scaling import Scaling
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
        buffers: returns, without holding the module, the tensors that are to follow rank 0's at the end of every pass,
            and those that are to become the mean over ranks.
        scaling: what is done to gradients besides summing them.
        delay: launch nothing before backward ends.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        events: Events,
        buffers: Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        scaling: Scaling,
        *,
        delay: bool = False,
    ) -> None:
        self.synchronize = True
        self._queue = LaunchQueue(parameters, plan, transport, events, scaling)
        self._names = self._queue.names
        self._events = events
        self._buffers = buffers
        self._delay = delay
        self._lock = threading.RLock()  # each device has its own autograd thread, and all call the hooks
        self._arrived: list[int] = []
        self._last_arrived: list[int] = []
        self._unsynchronized: set[int] = set()
        self._task = NO_TASK
        self._hold = False
        self._buffers_of_given_up: CoalescedMessages | None = None
        self._late_words: ControlWords | None = None
        self._end = OutermostEnd(self._settle, self._give_up)
        self._replan_policy = ReplanPolicy()
        self._passes, self._plans = 0, 1
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_hook, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters.values())
        ]

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
        return Statistics(self._passes, self._queue.total_launched, self._queue.total_bytes, self._plans)

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
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Backward

    def _gradient_hook(self, index: int, _: torch.Tensor) -> None:
        """The hot path, once a parameter and pass: a look at the task, an append and a count-down."""
        if current_task() != self._task and not self._enter_task(index):
            return
        self._arrived.append(index)
        if self._events.gradient_ready:
            self._events.emit(self._events.gradient_ready, self._queue.pass_number, self._names[index])
        bucket = self._queue.bucket_of[index]
        bucket.pending -= 1
        if not bucket.pending:
            self._bucket_full(bucket, self._names[index])

    def _enter_task(self, index: int) -> bool:
        """A gradient arrives in a graph task that is new to us. False if this pass is not to be synchronised."""
        with self._lock:
            if self._task != NO_TASK:
                self._hold = True  # See [Note: nested tasks]
                self._end.watch_nested()
            elif not self.synchronize:
                self._unsynchronized.add(index)
                return False
            else:
                self._begin_pass()
            self._task = current_task()
            return True

    def _begin_pass(self) -> None:
        self._drain()
        if self._late_words is not None:
            words, self._late_words = self._late_words, None
            self._act_on(words)
        self._queue.pass_number += 1
        self._hold = inside_custom_backward()
        self._end.watch()
        if self._events.pass_started:
            self._events.emit(self._events.pass_started, self._queue.pass_number)

    def _bucket_full(self, bucket: Bucket, closed_by: str) -> None:
        with self._lock, torch.no_grad():
            if self._events.bucket_full:
                self._events.emit(self._events.bucket_full, self._queue.pass_number, bucket.index, closed_by)
            if not self._hold and not self._delay:
                self._queue.launch_full()

    # The end of a pass

    def _settle(self) -> None:
        """Every gradient of the pass has arrived."""
        if self._task == NO_TASK:
            return
        with self._lock, torch.no_grad():
            try:
                self._queue.launch_rest(
                    self._contributed, trust_counts=not self._hold, wants_replan=self._wants_replan()
                )
                buffers = self._send_buffers()
                words = self._queue.wait(release=True)
                buffers.finish()
            finally:
                self._reset()
            self._passes += 1
            if self._events.pass_settled:
                self._events.emit(self._events.pass_settled, self._queue.pass_number)
            if words.on_host or self._queue.pass_number == 1:
                self._act_on(words)
            else:
                self._late_words = words

    def _contributed(self) -> set[int]:
        """Parameters that this rank has something to give for, from this pass or from unsynchronised ones before."""
        candidates = self._unsynchronized.union(self._arrived)
        parameters = {index: self._queue.parameters[index]() for index in candidates}
        return {
            index for index, parameter in parameters.items() if parameter is not None and parameter.grad is not None
        }

    def _send_buffers(self) -> CoalescedMessages:
        follow, average = self._buffers()
        sent = start_broadcast(follow, self.transport)
        sent.add(start_mean(average, self.transport))
        if sent.messages and self._events.buffers_sent:
            self._events.emit(self._events.buffers_sent, self._queue.pass_number, len(sent.messages), sent.nbytes)
        return sent

    def _reset(self) -> None:
        self._task = NO_TASK
        self._hold = False
        self._last_arrived = self._arrived[:]
        self._arrived.clear()
        self._unsynchronized.clear()
        self._queue.reset()

    # A pass that failed on this rank: see [Note: a pass given up]

    def _give_up(self) -> None:
        with self._lock, torch.no_grad():
            self._queue.launch_spoiled()
            self._buffers_of_given_up = self._send_buffers()
            self._task = NO_TASK

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
        self._act_on(replace(words, own_failure=True))

    # What all ranks learn at the same pass

    def _act_on(self, words: ControlWords) -> None:
        said = words.read()
        if said[Control.GAVE_UP]:
            if words.own_failure:
                return
            raise PeerError(
                f"{self._queue.where}: backward failed on another rank, so the mean of this pass lacks its gradients.\n"
                "Its own log has the error. Do not step with these gradients: zero_grad() and go on, on all ranks."
            )
        if said[Control.WANTS_REPLAN] or self._queue.pass_number == 1:
            self._replan()

    def _wants_replan(self) -> bool:
        return self.transport.rank == 0 and self._replan_policy.drifted(
            self.plan, self._arrived, self._queue.pass_number
        )

    def _replan(self) -> None:
        """Collective. Cut new buckets in the order in which rank 0's gradients arrived."""
        order = complete_order(self.plan, self._last_arrived)
        message = torch.tensor(order, dtype=torch.int64, device=self._queue.devices[0])
        self.transport.broadcast(message).wait()
        plan = recut(self.plan, message.tolist())
        self._replan_policy.learnt(self._last_arrived, self._queue.pass_number)
        if plan == self.plan:
            return
        with torch.no_grad():
            self._queue.adopt(plan)
        self._plans += 1
        if self._events.plan_changed:
            self._events.emit(self._events.plan_changed, self._queue.pass_number, plan)


def reducer_of(parameter: torch.nn.Parameter) -> Reducer | None:
    """The reducer whose hook sits on the parameter, if any."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        owner = getattr(getattr(hook, "func", None), "__self__", None)
        if isinstance(owner, Reducer):
            return owner
    return None
