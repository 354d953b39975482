"""The buckets of a plan on their way: filled in any order, launched and waited for in plan order.

[Note: launch order]  Collectives match between ranks by their order alone. A rank may *fill* buckets in any order, but
launches bucket k only after 0..k-1. It skips a bucket only if a summed map shows all ranks that none has anything for
it (presence.py). So no rank ever issues a collective that another does not, whatever its graph did. Changes of the
sequence (a new plan) are decided from words that were summed too, hence by all ranks in the same pass.

[Note: last bucket]  The last bucket leaves when the outermost backward has ended, although it may be full a moment
earlier: it carries the word that this rank's backward did not fail, which can be said only then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .bucket import Bucket, drop_gradients
from .comm_hooks import CommHook, Footers, fixes_plan
from .events import Events
from .late import second_round
from .parts import is_slot, refuse_sparse
from .peers import Peers
from .plan import BucketPlan
from .presence import Presence
from .preset import Preset
from .scaling import Scaling
from .slots import hand_out
from .specs import has_strides
from .streams import synchronize
from .transport.base import Transport, Work
from .withheld import Alive, complete, leave_in_shares
from .wording import name_list
from .words import Control, ControlWords

TIDY_EVERY = 16
"""Passes after which memory that was left to users, and is free, goes back."""


class LaunchQueue:
    """Buckets, and how many of them have left in this pass.

    Args:
        parameters: those of the plan, by name, in order of registration.
        plan: the first plan.
        transport: carries the buckets, unless a comm hook does.
        events: told what happens.
        scaling: what is done to gradients besides summing them.
        peers: the other ranks, by which one waits.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        events: Events,
        scaling: Scaling,
        peers: Peers,
    ) -> None:
        self.transport = transport
        self.peers, self.wait_for = peers, peers.wait_for
        self.lock = threading.RLock()  # each device has its own autograd thread, and all of them fill and launch
        self.events = events
        self.scaling, self._scales_after = scaling, not scaling.is_plain_mean
        self.weight, self.weight_now, self.has_weight = 1.0, 1.0, False  # of the next pass, of this one; once it is set
        self.comm_hook: CommHook | None = None
        self.tells = True
        """Whether ranks learn which had what; not with torch's ``noop_hook``, which stands for no communication."""
        self.pass_number = self.launched = self.total_launched = self.total_bytes = self.replans = self.sent_before = 0
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.in_shares = Alive()  # parameters of whose gradients each rank needs its share alone
        self.has_left_shares = False
        """Whether there ever were such: then what one rank has in ``.grad`` does not tell what others have."""
        self.presence = Presence(transport)
        self._footers: Footers | None = None
        self.says: Collection[int] = ()  # what its last bucket tells
        self.preset = Preset() if scaling.reduce == "sum" else None
        self.rebuild(parameters, plan)

    def rebuild(self, parameters: Mapping[str, torch.nn.Parameter], plan: BucketPlan) -> None:
        """Hold these parameters, in buckets of a plan for them."""
        self.names, self.references = [*parameters], [weakref.ref(parameter) for parameter in parameters.values()]
        self.devices = [parameter.device for parameter in parameters.values()]
        self.loose: set[int] = set()  # parameters that have left their slot: see rejoin.py
        self.presence.forget()
        self.adopt(plan)

    def adopt(self, plan: BucketPlan) -> None:
        """Allocate the plan's buckets, and move gradients that lie in the old ones."""
        complete(self.buckets, self.transport, self.wait_for)
        inside = {
            id(parameter): view
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if is_slot(parameter, view)
        }
        self.plan = plan
        self.buckets = [
            Bucket(plan, number, self.references, self.devices[spec.indices[0]], self.transport, self.scaling)
            for number, spec in enumerate(plan.buckets)
        ]
        home = {}
        for bucket in self.buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                home[index] = bucket
                if id(parameter) in inside:
                    view.copy_(inside[id(parameter)])
                    hand_out(parameter, parameter.grad, view)
        synchronize(self.devices if inside else ())  # autograd may add to them on another stream, unasked
        self.bucket_of = [home[index] for index in range(len(self.names))]
        self._unpacks = self._scales_after or any([bucket.slots is not bucket.payload for bucket in self.buckets])
        self.buckets[-1].footer.bear(self.peers.seat.key, self.transport.world_size)
        self.withhold(self.in_shares)

    def withhold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Of the gradients of these each rank needs its share alone."""
        self.in_shares = Alive(parameters if self.scaling.is_plain_mean and self.comm_hook is None else ())
        self.has_left_shares |= leave_in_shares(self.buckets, self.names, self.in_shares, self.transport.rank)

    def fits(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether its gradients can go into its slot."""
        spec, any_strides = self.plan.parameters[index], fixes_plan(self.comm_hook)
        alike = parameter.dtype is spec.dtype and parameter.shape == spec.shape
        return alike and parameter.device == self.devices[index] and (any_strides or has_strides(parameter, spec))

    def set_loose(self, indices: Iterable[int]) -> None:
        """Carry nothing for them any more."""
        for index in indices:
            self.loose.add(index)
            self.bucket_of[index].loose.add(self.bucket_of[index].indices.index(index))

    def begin(self) -> None:
        """A pass begins."""
        self.weight_now, self.says, self.sent_before = self.weight, (), self.total_launched
        if self.preset is not None:
            self.preset.begin()
        tidies = not self.pass_number % TIDY_EVERY
        for bucket in self.buckets:
            if bucket.memory.in_use():
                bucket.keep_clear()
            if tidies:
                bucket.memory.tidy()

    # Launching

    @property
    def waits_within(self) -> bool:
        """Whether it may wait for other ranks while backward runs."""
        hook_waits = self.comm_hook is not None and self.comm_hook.one_at_a_time
        return hook_waits or (self.presence.active and not self.has_own_channel)

    @property
    def has_own_channel(self) -> bool:
        """Whether no other collectives can come between its buckets; a comm hook's go over the process group."""
        return self.comm_hook is None and self.transport.own_channel

    def launch_full(self) -> None:
        """Launch what is full and has nothing unfilled before it, but for the last: see [Note: last bucket]."""
        while self.launched < len(self.buckets) - 1 and not self.buckets[self.launched].pending:
            bucket = self.buckets[self.launched]
            if self.presence.active:
                if self.has_own_channel and self.presence.under_way():
                    return  # asked again at the next gradient, and waited for when backward has ended
                if self._skip(bucket):
                    continue
            self._launch(bucket)

    def announce(self, coming: set[int], *, later: bool) -> None:
        """At the first gradient of a pass: what will come on this rank, by index. Collective; see presence.py."""
        self.presence.announce([not coming.isdisjoint(bucket.indices) for bucket in self.buckets], later=later)
        for bucket in self.buckets:
            if absent := [place for place, index in enumerate(bucket.indices) if index not in coming]:
                bucket.expect_absent(absent)

    def launch_rest(self, contributed: set[int], says: Collection[int]) -> None:
        """Launch the last bucket, those that lack gradients, and those that wait after them.

        Args:
            contributed: parameters for which this rank has something; where nothing is pending it may be empty.
            says: what the last bucket is to tell.
        """
        self.says, self.peers.seat.ended = says, self.pass_number
        if self.events.backward_ended:
            self.events.end_backward(self.pass_number)
        for bucket in self.buckets[self.launched :]:
            if self.presence.active and self._skip(bucket):
                continue
            if bucket.pending or contributed:
                self.guard(bucket.fill, contributed)
            if bucket.is_last and any([one.lacks() for one in self.buckets if one.skipped or one.missing]):
                self.says = [*says, Control.ABSENT]
            self._launch(bucket)

    def launch_given_up(self) -> None:
        """This rank's backward failed: launch what is left all the same, marked, and drop gradients in the buckets."""
        # Should anything hide the word, a mean of NaN is noticed; but comm hooks may keep what they are given.
        self.peers.seat.void = self.pass_number
        self._launch_nothing(float("nan") if self.comm_hook is None else 0.0, [Control.GAVE_UP])

    def launch_idle(self, says: Collection[int]) -> None:
        """This rank has run out of batches: launch zeros that say so. ``.grad`` stays as it is."""
        self.sent_before = self.total_launched
        for bucket in self.buckets:
            bucket.leave()
        self._launch_nothing(0.0, says)

    def _launch_nothing(self, value: float, says: Collection[int]) -> None:
        self.weight_now, self.says, self.peers.seat.ended = 0.0, says, self.pass_number
        self.presence.announce_nothing(len(self.buckets))
        drop_gradients(self.buckets)
        for bucket in self.buckets[self.launched :]:
            if not bucket.taken:  # the pass may have failed before kept gradients were checked
                bucket.leave()
            bucket.clear(value)
            if not (self.presence.active and self._skip(bucket)):
                self._launch(bucket)

    def _skip(self, bucket: Bucket) -> bool:
        """Leave the bucket out if no rank has anything for it. Of the last one the words leave all the same."""
        bucket.skipped = self.presence.unused(bucket.index, self.wait_for)
        if bucket.is_last or not bucket.skipped:
            return False
        bucket.footer.flat.zero_()
        self.launched += 1
        return True

    def wait(self, *, release: bool, handed_out: bool = False) -> ControlWords:
        """Wait for every bucket, put ``.grad`` of every parameter in place, and return what ranks said.

        Args:
            release: False if ``.grad`` is to be left alone: this rank has given up the pass, or had no part in it.
            handed_out: the slots of what has arrived are ``.grad`` already.
        """
        self._await_all()
        words, mine = self.buckets[-1].footer.read(summed=self.tells), self.buckets if release else ()
        late = words.ask_for_second_round(is_first=self.pass_number == 1)
        if self._unpacks:
            self._unpack(mine)
        if late:
            second_round(self, idle=not release)
        for bucket in mine:
            if bucket.filled or not handed_out:
                bucket.release(self.tells)
            bucket.withhold()
        if self.presence.active:
            self.presence.record(self.buckets)
        return words

    def _await_all(self) -> None:
        try:
            for bucket in self.buckets:
                if bucket.work is not None:
                    self._wait_for_work(bucket.work, bucket)
                    if self.events.bucket_reduced:
                        self.events.emit(self.events.bucket_reduced, self.pass_number, bucket.index)
            if self._footers is not None:
                self._footers.finish(self.wait_for)
                self._footers = None
        except BaseException:  # none of them shall be taken for a mean
            drop_gradients(self.buckets)
            raise

    def _unpack(self, buckets: Iterable[Bucket]) -> None:
        """Sums into slots, scaled as the ranks' weights ask for, which have come behind the last of them."""
        scales = self._scales_after and self.comm_hook is None
        factor = self.scaling.after(self.buckets[-1].footer.weight) if scales else None
        for bucket in buckets:
            if not bucket.skipped and (factor is not None or bucket.slots is not bucket.payload):
                bucket.unpack(factor)

    def reset(self) -> None:
        """Empty, for the next pass."""
        self.launched = 0
        for bucket in self.buckets:
            bucket.reset()

    def guard(self, copy: Callable[..., None], *arguments: Any) -> None:
        """Copy gradients into buckets; say which is to blame if that cannot be done."""
        try:
            copy(*arguments)
        except RuntimeError as error:
            refuse_sparse(dict(zip(self.names, self.references, strict=True)), self.where, error)
            raise

    def _launch(self, bucket: Bucket) -> None:
        nbytes = bucket.payload_bytes
        if self.events.launch_started:
            self.events.emit(self.events.launch_started, self.pass_number, bucket.index)
        if self.tells:
            bucket.footer.write(bucket.missing, self.weight_now, self.says if bucket.is_last else ())
        if self.comm_hook is None and bucket.skipped:
            nbytes = 0
            bucket.work = self.transport.all_reduce(bucket.footer.flat)
        elif self.comm_hook is None:
            self.send(bucket)
        else:
            if bucket.slots is not bucket.payload:
                bucket.payload.copy_(bucket.slots)
            bucket.work = self.comm_hook.launch(bucket, self._wait_for_work)
            if bucket.is_last and self.tells:
                self._footers = Footers(self.buckets, self.transport)
        self.launched += 1
        self.total_launched += 1
        self.total_bytes += nbytes
        if self.events.bucket_launched:
            self.events.emit(self.events.bucket_launched, self.pass_number, bucket.index, nbytes)
        if self.events.work_under_way:
            self.events.emit(self.events.work_under_way, self.pass_number, bucket.index, bucket.work)

    def send(self, bucket: Bucket) -> None:
        """Hand it to the transport."""
        if self.preset is not None:
            bucket.remember({place: self.preset.before(one) for place, one in enumerate(bucket.parameters)})
        try:
            bucket.send(self.transport, self.weight_now)
        except dist.DistBackendError as error:  # NCCL's, where a rank has gone
            self._fail(bucket, error)

    def _wait_for_work(self, work: Work, bucket: Bucket) -> None:
        try:
            self.peers.wait(work)
        except RuntimeError as error:
            self._fail(bucket, error)

    def _fail(self, bucket: Bucket, error: RuntimeError) -> NoReturn:
        names = name_list(self.names[index] for index in bucket.indices)
        self.peers.fail(f"bucket {bucket.index} ({names}) could not be reduced", error, by=str(self.comm_hook or ""))

    def use(self, hook: CommHook) -> None:
        """Have buckets carried by a comm hook from here on."""
        hook.use(self.peers)
        self.comm_hook, self.tells, self.peers.leftovers = hook, not hook.silent, self.transport.leftovers_for_hooks
        self.withhold(self.in_shares)  # no bucket is left in shares from here on

    def close(self) -> None:
        """Nothing follows any more."""
        self.peers.close()
        if self.preset is not None:
            self.preset.remove()

    @property
    def where(self) -> str:
        """How messages begin."""
        return self.peers.where
