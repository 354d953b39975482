"""The flat buffer of one plan entry.

    flat:  | slot of p0 | slot of p1 | ... | had p0 | had p1 | ... | control words | weight |
           └──────────── payload ──────────┘└──────────────────── footer ───────────────────┘

``views[i]`` is the slot of the i-th parameter in the parameter's own shape and strides, and becomes its ``.grad``: the
gradients exist once. A gradient is *taken* when it has been copied into its slot. Along the schedule ``.grad`` becomes
the slot at once, while both are in the cache. Where it is not known how often gradients arrive, ``.grad`` is None until
the pass settles, so that one that arrives again can neither be lost nor disturb a sum that is under way.

The footer is summed together with the payload, so that every rank learns, at the same pass and without another message,
which parameters any rank had and what some rank asks for. Only "zero or not" is read from it where the dtype is too
coarse to count: a sum of ones never falls back to zero.

Where gradients travel in another dtype than their own (``reduce_dtype``), the slots lie in a memory of their own, are
cast into the payload when the bucket leaves and cast back when it has been reduced.

[Note: weak parameters]  A parameter's hook holds the reducer, and Python's garbage collector cannot look through the
C++ object that holds the hook. So reducer and buckets hold parameters weakly; else no model would ever be freed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .plan import BucketPlan
from .scaling import Scaling, encode_weight
from .transport.base import Transport, Work
from .words import NOTHING_SAID, Control, ControlWords

_FREED = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Bucket:
    """A bucket of the plan with its memory, on this rank.

    ``pending`` counts parameters that have not been taken in this pass; the bucket is full at 0.
    """

    __slots__ = (
        "_complete",
        "_mean",
        "_scaling",
        "arrived",
        "control",
        "filled",
        "flat",
        "footer",
        "index",
        "indices",
        "is_last",
        "kept",
        "layout",
        "loose",
        "missing",
        "offsets",
        "payload",
        "payload_bytes",
        "pending",
        "references",
        "skipped",
        "slots",
        "taken",
        "views",
        "weight",
        "work",
    )

    def __init__(
        self,
        plan: BucketPlan,
        index: int,
        parameters: Sequence[weakref.ref[torch.nn.Parameter]],
        device: torch.device,
        transport: Transport,
        scaling: Scaling,
    ) -> None:
        self.index = index
        self.indices = plan.buckets[index].indices
        self.is_last = index == len(plan.buckets) - 1
        self.references = [parameters[i] for i in self.indices]
        self.offsets = plan.offsets(index)
        self.layout = plan.layout(index)
        specs = [plan.parameters[i] for i in self.indices]
        dtype = specs[0].reduce_dtype or specs[0].dtype
        numel, words = self.offsets[-1], len(specs) + len(Control) + scaling.weight_words(dtype)
        self.flat = transport.allocate(numel + words, dtype, device)
        self.payload = self.flat[:numel]
        self.payload_bytes = plan.bucket_bytes(index)
        self.footer = self.flat[numel:]
        self.control = self.footer[len(specs) : len(specs) + len(Control)]
        self.weight = self.footer[len(specs) + len(Control) :]
        own = specs[0].reduce_dtype is None
        self.slots = self.payload if own else torch.zeros(numel, dtype=specs[0].dtype, device=device)
        self.views = [
            self.slots.as_strided(spec.shape, spec.strides, offset + self.slots.storage_offset())
            for spec, offset in zip(specs, self.offsets, strict=False)
        ]
        self._scaling = scaling
        self._mean = getattr(transport, "all_reduce_mean", None) if scaling.is_plain_mean else None
        self.loose: set[int] = set()
        """Places of parameters that have left their slot (another dtype, other storage): sent as nothing, and
        ``.grad`` left alone. See rejoin.py."""
        self.missing: list[int] = []
        """Places of parameters for which this rank has nothing new in this pass."""
        self.kept: dict[int, torch.Tensor] = {}
        """What ``.grad`` of such a parameter held, to be restored if no rank had anything new."""
        self.taken: list[Sequence[int]] = []
        self.work: Work | None = None
        self.filled = False
        """Whether something else than this pass's arrivals went in."""
        self.skipped = False
        """Whether it is not sent in this pass, since no rank has anything for it."""
        self.pending = self.arrived = 0
        """``arrived`` counts those of the pending that can be taken; outside the schedule only."""
        self._complete = torch.ones_like(self.footer)
        self._complete[len(specs) :] = 0
        self.reset()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters. One that was freed is an empty stand-in without a gradient."""
        return [_FREED if (alive := reference()) is None else alive for reference in self.references]

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The slots of another flat tensor that is laid out like the payload."""
        return [
            buffer.as_strided(view.shape, view.stride(), offset + buffer.storage_offset())
            for view, offset in zip(self.views, self.offsets, strict=False)
        ]

    # Filling

    def take_rest(self) -> None:
        """Take what has not been taken; all of it has arrived."""
        Part(self, self._not_taken()).take()

    def _not_taken(self) -> list[int]:
        dealt_with = {place for places in self.taken for place in places} | set(self.missing)
        return [place for place in range(len(self.indices)) if place not in dealt_with]

    def expect_absent(self, places: Sequence[int]) -> None:
        """These parameters do not come in this pass."""
        self.pending -= len(places)
        self._fill_absent(places)

    def _fill_absent(self, places: Sequence[int]) -> None:
        """``.grad`` as it is, or zeros, goes in where this rank has nothing new."""
        self.filled = True
        self.missing += places
        parameters = self.parameters
        for place in places:
            gradient, view = parameters[place].grad, self.views[place]
            if place in self.loose:
                self.slots[self.offsets[place] :][: view.numel()].zero_()  # the view may be elsewhere by now
            elif gradient is None:
                view.zero_()
            elif gradient is view:
                self.kept[place] = gradient.clone()
            else:
                view.copy_(gradient)

    def fill(self, contributed: Collection[int]) -> None:
        """Take what has not been taken. Where this rank has nothing new, ``.grad`` as it is, or zeros, goes in.

        Args:
            contributed: parameter indices that this rank has something new to give for, in this pass or from backward
                passes without synchronisation before it.
        """
        self.filled = True
        taken = [place for places in self.taken for place in places]
        rest = self._not_taken()
        Part(self, [place for place in rest if self.indices[place] in contributed]).take()
        self._fill_absent([place for place in rest if self.indices[place] not in contributed])
        parameters = self.parameters
        for place in taken:  # arrived again before the bucket left
            gradient = parameters[place].grad
            if gradient is not None and gradient is not self.views[place]:
                self.views[place].add_(gradient)
                parameters[place].grad = None

    def send(self, transport: Transport, weight: float) -> None:
        """Hand it to the transport: cast, weighted, and divided before the sum unless the transport does that."""
        if self.slots is not self.payload:
            self.payload.copy_(self.slots)
        if self._mean is not None:
            self.work = self._mean(self.flat, len(self.payload))
        else:
            self._scaling.before(self.payload, weight)
            self.work = transport.all_reduce(self.flat)

    def write_footer(self, weight: float, says: Collection[Control]) -> None:
        """Whose gradients are in it, and what this rank has to say."""
        self.footer.copy_(self._complete)
        for place in self.missing:
            self.footer[place] = 0
        if self.is_last and len(self.weight):
            self.weight.copy_(torch.tensor(encode_weight(weight, len(self.weight))))
        for word in says:
            self.control[word] = 1

    # Settling

    def unpack(self, factor: torch.Tensor | float | None) -> None:
        """Put the sum into the slots, scaled by what the ranks' weights ask for."""
        if factor is not None:
            self.payload.mul_(factor)
        if self.slots is not self.payload:
            self.slots.copy_(self.payload)

    def lacks(self) -> bool:
        """Whether this rank has nothing new for some parameter, one that was freed aside."""
        return self.skipped or any(self.references[place]() is not None for place in self.missing)

    def late(self) -> list[int]:
        """Places of gradients that arrived again after the bucket had left."""
        if self.skipped:
            return []
        missing = self.loose.union(self.missing)
        return [
            i
            for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True))
            if parameter.grad is not None and parameter.grad is not view and i not in missing
        ]

    def release(self, summed_footer: bool) -> None:
        """The result is in the slots: they become ``.grad``.

        A parameter that this rank had nothing for gets the mean if another rank had it. One that nobody had is left as
        it was.

        Args:
            summed_footer: False if a comm hook moved the payload alone; then it is not known who had what, and the
                parameter counts as had by another rank.
        """
        if not self.missing:
            for reference, view in zip(self.references, self.views, strict=True):
                reference().grad = view  # type: ignore[union-attr]  # its gradient has just arrived: it is alive
            return
        missing = set(self.missing)
        had = self.footer[: len(self.indices)].tolist() if summed_footer else [1] * len(self.indices)
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter is _FREED or place in self.loose:
                continue
            if place not in missing or had[place]:
                parameter.grad = view
            elif place in self.kept:
                view.copy_(self.kept[place])

    def control_words(self, *, summed: bool) -> ControlWords:
        """What ranks said, after the bucket was reduced; nothing if the footer did not travel."""
        if not summed:
            return NOTHING_SAID
        if self.flat.device.type == "cpu":
            return ControlWords(self.control)
        words = torch.empty(len(Control), dtype=self.flat.dtype, pin_memory=True)
        words.copy_(self.control, non_blocking=True)
        arrival = torch.Event(self.flat.device)
        arrival.record()
        return ControlWords(words, arrival)

    # A pass that is given up

    def drop_gradients(self) -> None:
        """Forget gradients that lie in this bucket, since a reduction is overwriting them."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def clear(self, value: float) -> None:
        """Send ``value`` in place of gradients, and say that there are none."""
        self.missing = list(range(len(self.indices)))
        self.slots.fill_(value)

    def reset(self) -> None:
        """Empty, for the next pass."""
        self.missing, self.kept, self.taken = [], {}, []
        self.work = None
        self.pending = len(self.indices)
        self.arrived = 0
        self.filled = self.skipped = False


class Part:
    """Some parameters of a bucket that are taken together: one copy call for all, while they are in the cache."""

    __slots__ = ("bucket", "places", "references", "views")

    def __init__(self, bucket: Bucket, places: Sequence[int]) -> None:
        self.bucket = bucket
        self.places = places
        self.references = [bucket.references[place] for place in places]
        self.views = [bucket.views[place] for place in places]

    def take(self) -> None:
        """Copy the gradients into their slots."""
        parameters: list[Any] = [reference() for reference in self.references]
        take_gradients([parameter.grad for parameter in parameters], self.views)
        for parameter in parameters:
            parameter.grad = None
        self.mark()

    def mark(self) -> None:
        """They have been taken."""
        self.bucket.pending -= len(self.places)
        self.bucket.taken.append(self.places)


def take_gradients(gradients: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """Copy gradients into their slots at one call.

    Where ``.grad`` is the slot already (``zero_grad(set_to_none=False)``, or none at all), autograd has accumulated in
    place and there is nothing to copy.
    """
    if any(map(operator.is_, gradients, views)):
        fresh = [i for i, view in enumerate(views) if gradients[i] is not view]
        if fresh:
            torch._foreach_copy_([views[i] for i in fresh], [gradients[i] for i in fresh])
    elif gradients:
        torch._foreach_copy_(views, gradients)
