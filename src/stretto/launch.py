"""The buckets of a plan on their way: filled in any order, launched and waited for in plan order.

[Note: launch order]  Collectives match between ranks by their order alone. A rank may *fill* buckets in any order, but
launches bucket k only after 0..k-1, and every pass launches every bucket: so no rank ever issues a collective that
another does not, whatever its graph did. Anything that changes the sequence (a new plan) is decided from words that
were summed with the buckets, hence known to all ranks in the same pass.

[Note: last bucket]  The last bucket leaves when the outermost backward has ended, although it may be full a moment
earlier: it carries the word that this rank's backward did not fail, and that can only be said then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from .bucket import NOTHING_SAID, Bucket, Control, ControlWords
from .comm_hooks import CommHook
from .errors import CommunicationError, SetupError, UnsupportedError, name_list
from .events import Events
from .plan import BucketPlan
from .scaling import Scaling
from .specs import dtype_name
from .transport.base import Transport


class LaunchQueue:
    """Buckets, and how many of them have left in this pass.

    Args:
        parameters: those of the plan, by name, in order of registration.
        plan: the first plan.
        transport: carries the buckets, unless a comm hook does.
        events: told what happens.
        scaling: what is done to gradients besides summing them.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport,
        events: Events,
        scaling: Scaling,
    ) -> None:
        self.transport = transport
        self.lock = threading.RLock()  # each device has its own autograd thread, and all of them fill and launch
        self.events = events
        self.scaling = scaling
        self.weight = 1.0
        self.comm_hook: CommHook | None = None
        self.pass_number = 0
        self.launched = 0
        self.total_launched = 0
        self.total_bytes = 0
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.rebuild(parameters, plan)

    def rebuild(self, parameters: Mapping[str, torch.nn.Parameter], plan: BucketPlan) -> None:
        """Hold these parameters, in buckets of a plan for them."""
        self.names = list(parameters)
        self.parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self.devices = [parameter.device for parameter in parameters.values()]
        self.loose: set[int] = set()  # parameters that have left their slot: see rejoin.py
        self.adopt(plan)

    def adopt(self, plan: BucketPlan) -> None:
        """Allocate the plan's buckets, and move gradients that lie in the old ones."""
        old = {id(view) for bucket in self.buckets for view in bucket.views}
        self.plan = plan
        self.buckets = [
            Bucket(plan, number, self.parameters, self.devices[spec.indices[0]], self.transport, self.scaling)
            for number, spec in enumerate(plan.buckets)
        ]
        home = {}
        for bucket in self.buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                home[index] = bucket
                if parameter.grad is not None and id(parameter.grad) in old:
                    view.copy_(parameter.grad)
                    parameter.grad = view
        self.bucket_of = [home[index] for index in range(len(self.names))]
        of_module = {name.rpartition(".")[0]: index for index, name in enumerate(self.names)}
        self._sentinels = [self.view_of(index) for index in of_module.values()]
        self._addresses = [*map(torch.Tensor.data_ptr, self._sentinels)]

    # Do parameters still fit?

    def fits(self, index: int, parameter: torch.Tensor) -> bool:
        """Whether its gradients can go into its slot."""
        spec = self.plan.parameters[index]
        return (
            parameter.dtype is spec.dtype and parameter.shape == spec.shape and parameter.device == self.devices[index]
        )

    def view_of(self, index: int) -> torch.Tensor:
        """Its slot, as it becomes ``.grad``."""
        bucket = self.bucket_of[index]
        return bucket.views[bucket.indices.index(index)]

    def may_have_strayed(self) -> bool:
        """Whether ``strayed`` is worth asking. One slot of each module tells: ``module.to()`` takes all that it has."""
        return [*map(torch.Tensor.data_ptr, self._sentinels)] != self._addresses

    def strayed(self, indices: Iterable[int]) -> set[int]:
        """Those whose slot lies elsewhere: a slot is ``.grad``, and ``module.to()`` exchanges the memory of that."""
        found = set()
        for index in indices:
            bucket = self.bucket_of[index]
            place = bucket.indices.index(index)
            view, offset = bucket.views[place], bucket.offsets[place] * bucket.slots.element_size()
            if view.numel() and (
                view.dtype is not bucket.slots.dtype or view.data_ptr() != bucket.slots.data_ptr() + offset
            ):
                found.add(index)
        return found

    def set_loose(self, indices: Iterable[int]) -> None:
        """Carry nothing for them any more."""
        for index in indices:
            self.loose.add(index)
            self.bucket_of[index].loose.add(self.bucket_of[index].indices.index(index))

    # Launching

    def launch_full(self) -> None:
        """Launch what is full and has nothing unfilled before it, but for the last: see [Note: last bucket]."""
        while self.launched < len(self.buckets) - 1 and not self.buckets[self.launched].pending:
            self._launch(self.buckets[self.launched])

    def launch_rest(self, contributed: set[int], says: Collection[Control]) -> None:
        """Launch the last bucket, those that lack gradients, and those that wait behind them.

        Args:
            contributed: parameters for which this rank has something; where nothing is pending it may be empty.
            says: what the last bucket is to tell.
        """
        for bucket in self.buckets[self.launched :]:
            if bucket.pending or contributed:
                self.guard(bucket.fill, contributed)
            self._launch(bucket, says if bucket.is_last else ())

    def launch_spoiled(self) -> None:
        """This rank's backward failed: launch what is left all the same, marked, and drop gradients in the buckets."""
        for bucket in self.buckets:
            bucket.drop_gradients()
        for bucket in self.buckets[self.launched :]:
            bucket.clear(float("nan"))
            self._launch(bucket, [Control.GAVE_UP] if bucket.is_last else (), weight=0.0)

    def launch_idle(self) -> None:
        """This rank has run out of batches: launch zeros that say so, and drop gradients in the buckets."""
        for bucket in self.buckets:
            bucket.drop_gradients()
            bucket.clear(0.0)
            self._launch(bucket, weight=0.0)

    def has_late(self) -> bool:
        """Whether a gradient arrived again after its bucket had left."""
        return any(bucket.late() for bucket in self.buckets[: self.launched])

    def wait(self, *, release: bool, handed_out: bool = False) -> ControlWords:
        """Wait for every bucket, put ``.grad`` of every parameter in place, and return what ranks said.

        Args:
            release: False if the pass was given up, and ``.grad`` is to be left alone.
            handed_out: the slots of what has arrived are ``.grad`` already.
        """
        summed = self.comm_hook is None
        for bucket in self.buckets:
            self._wait_for(bucket)
        last = self.buckets[-1]
        words = last.control_words(summed=summed)
        second_round = False
        if words is not NOTHING_SAID and (words.on_host or self.pass_number == 1):
            said = words.read()
            second_round = bool(said[Control.LATE] and not said[Control.GAVE_UP])
        factor = self.scaling.after(last.weight) if summed else None
        for bucket in self.buckets if release else ():
            bucket.unpack(factor)
        if second_round:
            self._second_round(factor)
        for bucket in self.buckets if release else ():
            if bucket.filled or not handed_out:
                self.guard(bucket.release, summed)
        return words

    def _second_round(self, factor: torch.Tensor | float | None) -> None:
        """Sum what came late, and add it: see engine.py, [Note: nested tasks]. Collective."""
        works = []
        for bucket in self.buckets:
            flat = torch.zeros_like(bucket.flat)
            views, parameters = bucket.views_of(flat), bucket.parameters
            for place in bucket.late():
                views[place].copy_(parameters[place].grad)  # type: ignore[arg-type]  # late(): it is not None
            self.scaling.before(flat, self.weight)
            works.append((bucket, flat, self.transport.all_reduce(flat)))
        for bucket, flat, work in works:
            work.wait()
            late = flat[: len(bucket.payload)]
            bucket.slots.add_(late if factor is None else late.mul_(factor))

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
            self._refuse_new_dtypes()
            gradients = [
                (name, getattr(reference(), "grad", None))
                for name, reference in zip(self.names, self.parameters, strict=True)
            ]
            sparse = [name for name, grad in gradients if grad is not None and grad.layout != torch.strided]
            if not sparse:
                raise
            raise UnsupportedError(
                f"{self.where}: the gradient of {name_list(sparse)} is sparse, which this version cannot reduce.\n"
                "Make it dense, nn.Embedding(..., sparse=False), or leave it out with attach(..., ignore={...})."
            ) from error

    def _refuse_new_dtypes(self) -> None:
        changed = [
            f"{spec.name} ({dtype_name(spec.dtype)}, now {dtype_name(parameter.dtype)})"
            for spec, reference in zip(self.plan.parameters, self.parameters, strict=True)
            if (parameter := reference()) is not None and parameter.dtype != spec.dtype
        ]
        if changed:
            raise SetupError(
                f"{self.where}: {name_list(changed)} changed dtype after the module was attached.\n"
                "Attach again after .to(dtype): sync.detach(); sync = stretto.attach(model)"
            )

    def _launch(self, bucket: Bucket, says: Collection[Control] = (), weight: float | None = None) -> None:
        if self.comm_hook is None:
            bucket.pack(self.weight if weight is None else weight)
            for word in says:
                bucket.control[word] = 1
            bucket.work = self.transport.all_reduce(bucket.flat)
        else:
            if bucket.slots is not bucket.payload:
                bucket.payload.copy_(bucket.slots)
            bucket.work = self.comm_hook.launch(bucket)
        self.launched += 1
        self.total_launched += 1
        self.total_bytes += bucket.payload_bytes
        if self.events.bucket_launched:
            self.events.emit(self.events.bucket_launched, self.pass_number, bucket.index, bucket.payload_bytes)

    def _wait_for(self, bucket: Bucket) -> None:
        assert bucket.work is not None, "every bucket is launched before any is waited for"
        try:
            bucket.work.wait()
        except RuntimeError as error:
            names = name_list(self.names[index] for index in bucket.indices)
            raise CommunicationError(
                f"{self.where}: bucket {bucket.index} ({names}) could not be reduced over {self.transport.name}: "
                f"{error}\n"
                "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs."
            ) from error
        if self.events.bucket_reduced:
            self.events.emit(self.events.bucket_reduced, self.pass_number, bucket.index)

    @property
    def where(self) -> str:
        """How messages begin."""
        return f"rank {self.transport.rank}, pass {self.pass_number}"
