"""From gradient hook to settled ``.grad``: the stage where communication overlaps backward.

    autograd ──> gradient hook (counts down) ──> bucket full ──> launch, in plan order ──> Work
                                                                                            │
    outermost backward ends ──> launch what is left ──> buffers under way ──> wait ──> .grad in place ──> new plan?

[Note: launch order]  Collectives match between ranks by their order alone. A rank may *fill* buckets in any order, but
launches bucket k only after 0..k-1, and every pass launches every bucket: so no rank ever issues a collective that
another does not, whatever its graph did. Anything that changes the sequence (a new plan) is decided from words that
were summed with the buckets, hence known to all ranks in the same pass.

[Note: last bucket]  The last bucket leaves when the outermost backward has ended, although it may be full a moment
earlier: it carries the word that this rank's backward did not fail, and that can only be said then.

[Note: a pass given up]  If backward raises on this rank, peers may be waiting for its buckets. So the rest of the pass
is launched at once, marked as given up; the peers' backward raises ``PeerError``, and all ranks stay in step. Gradients
that lie in buckets are dropped (``.grad = None``): they are being overwritten.

See engine.py for [Note: end of a pass] and [Note: nested tasks].
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .broadcast import CoalescedBroadcast, start_broadcast
from .bucket import Bucket, Control, ControlWords
from .comm_hooks import CommHook
from .engine import NO_TASK, OutermostEnd, current_task, inside_custom_backward
from .errors import CommunicationError, PeerError, UnsupportedError, name_list
from .events import Events
from .plan import BucketPlan
from .replan import ReplanPolicy, complete_order, recut
from .transport.base import Transport


def reducer_of(parameter: torch.nn.Parameter) -> Reducer | None:
    """The reducer whose hook sits on the parameter, if any."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        owner = getattr(getattr(hook, "func", None), "__self__", None)
        if isinstance(owner, Reducer):
            return owner
    return None


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
    """Hooks on parameters, buckets, and the pass that is under way.

    Args:
        parameters: those to reduce, by name, in order of registration.
        plan: the first plan.
        transport: carries the buckets.
        events: told what happens.
        buffers: returns, without holding the module, the tensors that are to follow rank 0's at the end of every pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        events: Events,
        buffers: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self.names = list(parameters)
        self.transport = transport
        self.events = events
        self.synchronize = True
        self.comm_hook: CommHook | None = None
        self.pass_number = 0
        self._passes = self._buckets_sent = self._bytes_sent = self._plans = 0
        self.buckets: list[Bucket] = []
        self._buffers = buffers
        self._parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self._devices = [parameter.device for parameter in parameters.values()]
        self._lock = threading.RLock()  # each device has its own autograd thread, and all call the hooks
        self._arrived: list[int] = []
        self._last_arrived: list[int] = []
        self._unsynchronized: set[int] = set()
        self._task = NO_TASK
        self._hold = False
        self._launched = 0
        self._given_up: CoalescedBroadcast | None = None
        self._late_words: ControlWords | None = None
        self._end = OutermostEnd(self._settle, self._give_up)
        self._replan_policy = ReplanPolicy()
        self._adopt(plan)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_hook, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters.values())
        ]

    def _adopt(self, plan: BucketPlan) -> None:
        """Allocate the plan's buckets, and move gradients that lie in the old ones."""
        old = {id(view) for bucket in self.buckets for view in bucket.views}
        self.plan = plan
        self.buckets = [
            Bucket(plan, number, self._parameters, self._devices[spec.indices[0]], self.transport)
            for number, spec in enumerate(plan.buckets)
        ]
        bucket_of = {}
        for bucket in self.buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                bucket_of[index] = bucket
                if parameter.grad is not None and id(parameter.grad) in old:
                    view.copy_(parameter.grad)
                    parameter.grad = view
        self._bucket_of = [bucket_of[index] for index in range(len(self.names))]
        self._plans += 1

    def _gradient_hook(self, index: int, _: torch.Tensor) -> None:
        """The hot path, once a parameter and pass: a look at the task, an append and a count-down."""
        if current_task() != self._task and not self._enter_task(index):
            return
        self._arrived.append(index)
        if self.events.gradient_ready:
            self.events.emit(self.events.gradient_ready, self.pass_number, self.names[index])
        bucket = self._bucket_of[index]
        bucket.pending -= 1
        if not bucket.pending:
            self._bucket_full(bucket, self.names[index])

    @property
    def statistics(self) -> Statistics:
        """Counts since attaching."""
        return Statistics(self._passes, self._buckets_sent, self._bytes_sent, self._plans)

    def detach(self) -> None:
        """Remove the hooks. ``.grad`` stays as it is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Backward

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
        self.pass_number += 1
        self._hold = inside_custom_backward()
        self._end.watch()
        if self.events.pass_started:
            self.events.emit(self.events.pass_started, self.pass_number)

    def _bucket_full(self, bucket: Bucket, closed_by: str) -> None:
        with self._lock, torch.no_grad():
            if self.events.bucket_full:
                self.events.emit(self.events.bucket_full, self.pass_number, bucket.index, closed_by)
            while not self._hold and self._launched < len(self.buckets) - 1:  # See [Note: last bucket]
                bucket = self.buckets[self._launched]
                if bucket.pending:
                    return
                self._collect(bucket, None)
                self._launch(bucket)

    def _collect(self, bucket: Bucket, contributed: set[int] | None) -> None:
        """Copy gradients into the bucket: all of its own, or those that this rank has something to give for."""
        try:
            bucket.collect() if contributed is None else bucket.collect_some(contributed)
        except RuntimeError as error:
            sparse = [
                self.names[i] for i, p in zip(bucket.indices, bucket.parameters, strict=True) if _is_sparse(p.grad)
            ]
            if not sparse:
                raise
            raise UnsupportedError(
                f"{self._where}: the gradient of {name_list(sparse)} is sparse, which this version cannot reduce.\n"
                "Make it dense, nn.Embedding(..., sparse=False), or leave it out with attach(..., ignore={...})."
            ) from error

    def _launch(self, bucket: Bucket) -> None:
        """Hand over a bucket that has been filled. See [Note: launch order]."""
        if bucket.is_last and self._wants_replan():
            bucket.control[Control.WANTS_REPLAN] = 1
        if self.comm_hook is None:
            # Divide, then sum, as torch's DDP does: the same bits on two ranks, and fp16 sums do not overflow.
            bucket.payload.div_(self.transport.world_size)
            bucket.work = self.transport.all_reduce(bucket.flat)
        else:
            bucket.work = self.comm_hook.launch(bucket)
        self._launched += 1
        self._buckets_sent += 1
        self._bytes_sent += bucket.payload_bytes
        if self.events.bucket_launched:
            self.events.emit(self.events.bucket_launched, self.pass_number, bucket.index, bucket.payload_bytes)

    # The end of a pass

    def _settle(self) -> None:
        """Every gradient of the pass has arrived."""
        if self._task == NO_TASK:
            return
        with self._lock, torch.no_grad():
            try:
                self._launch_rest()
                buffers = self._send_buffers()
                for bucket in self.buckets:
                    self._finish(bucket)
                    bucket.release(summed_footer=self.comm_hook is None)
                buffers.finish()
                words = self.buckets[-1].control_words(summed=self.comm_hook is None)
            except BaseException:
                self._reset()
                raise
            self._reset()
            self._passes += 1
            if self.events.pass_settled:
                self.events.emit(self.events.pass_settled, self.pass_number)
            if words.on_host or self.pass_number == 1:
                self._act_on(words)
            else:
                self._late_words = words

    def _launch_rest(self) -> None:
        """The last bucket, those that lack gradients, and those that wait behind them."""
        contributed: set[int] | None = None
        for bucket in self.buckets[self._launched :]:
            if bucket.pending or self._hold:
                contributed = self._contributed() if contributed is None else contributed
                self._collect(bucket, contributed)
            else:
                self._collect(bucket, None)
            self._launch(bucket)

    def _contributed(self) -> set[int]:
        """Parameters that this rank has something to give for, from this pass or from unsynchronised ones before."""
        candidates = self._unsynchronized.union(self._arrived)
        parameters = {index: self._parameters[index]() for index in candidates}
        return {
            index for index, parameter in parameters.items() if parameter is not None and parameter.grad is not None
        }

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.work is not None, "every bucket is launched before any is waited for"
        try:
            bucket.work.wait()
        except RuntimeError as error:
            names = name_list(self.names[index] for index in bucket.indices)
            raise CommunicationError(
                f"{self._where}: bucket {bucket.index} ({names}) could not be reduced over {self.transport.name}: "
                f"{error}\n"
                "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
            ) from error
        if self.events.bucket_reduced:
            self.events.emit(self.events.bucket_reduced, self.pass_number, bucket.index)

    def _send_buffers(self) -> CoalescedBroadcast:
        broadcast = start_broadcast(self._buffers(), self.transport)
        if broadcast.messages and self.events.buffers_sent:
            self.events.emit(self.events.buffers_sent, self.pass_number, len(broadcast.messages), broadcast.nbytes)
        return broadcast

    def _reset(self) -> None:
        self._task = NO_TASK
        self._hold = False
        self._launched = 0
        self._last_arrived = self._arrived[:]
        self._arrived.clear()
        self._unsynchronized.clear()
        for bucket in self.buckets:
            bucket.reset()

    # A pass that failed on this rank: see [Note: a pass given up]

    def _give_up(self) -> None:
        with self._lock, torch.no_grad():
            for bucket in self.buckets:
                bucket.drop_gradients()
            for bucket in self.buckets[self._launched :]:
                bucket.spoil()
                self._launch(bucket)
            self._given_up = self._send_buffers()
            self._task = NO_TASK

    def _drain(self) -> None:
        """Before the next pass: wait for what the one that was given up left under way."""
        if self._given_up is None:
            return
        buffers, self._given_up = self._given_up, None
        with torch.no_grad():
            for bucket in self.buckets:
                self._finish(bucket)
            buffers.finish()
            words = self.buckets[-1].control_words(summed=self.comm_hook is None)
            self._reset()
            self._act_on(replace(words, own_failure=True))

    # What all ranks learn at the same pass

    def _act_on(self, words: ControlWords) -> None:
        said = words.read()
        if said[Control.GAVE_UP]:
            if words.own_failure:
                return
            raise PeerError(
                f"{self._where}: backward failed on another rank, so the mean of this pass lacks its gradients.\n"
                "Its own log has the error. Do not step with these gradients: zero_grad() and go on, on all ranks."
            )
        if said[Control.WANTS_REPLAN] or self.pass_number == 1:
            self._replan()

    def _wants_replan(self) -> bool:
        return self.transport.rank == 0 and self._replan_policy.drifted(self.plan, self._arrived, self.pass_number)

    def _replan(self) -> None:
        """Collective. Cut new buckets in the order in which rank 0's gradients arrived."""
        order = complete_order(self.plan, self._last_arrived)
        message = torch.tensor(order, dtype=torch.int64, device=self._devices[0])
        self.transport.broadcast(message).wait()
        plan = recut(self.plan, message.tolist())
        self._replan_policy.learnt(self._last_arrived, self.pass_number)
        if plan != self.plan:
            with torch.no_grad():
                self._adopt(plan)
            if self.events.plan_changed:
                self.events.emit(self.events.plan_changed, self.pass_number, plan)

    # Words for messages

    @property
    def _where(self) -> str:
        return f"rank {self.transport.rank}, pass {self.pass_number}"


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout != torch.strided
