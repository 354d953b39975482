"""The flat buffer of one plan entry.

    flat:  | slot of p0 | slot of p1 | ... | had p0 | had p1 | ... | control words | weight |
           └──────────── payload ──────────┘└──────────────────── footer ───────────────────┘

``views[i]`` is the slot of ``parameters[i]`` in the parameter's own shape and strides, and becomes its ``.grad``: the
gradients exist once. The footer is summed together with the payload, so that every rank learns, at the same pass and
without another message, which parameters any rank had and what some rank asks for. Only "zero or not" is read from it
where the dtype is too coarse to count: a sum of ones never falls back to zero.

Where gradients travel in another dtype than their own (``reduce_dtype``), the slots lie in a memory of their own, are
cast into the payload when the bucket leaves and cast back when it has been reduced.

[Note: weak parameters]  A parameter's hook holds the reducer, and Python's garbage collector cannot look through the
C++ object that holds the hook. So reducer and buckets hold parameters weakly; else no model would ever be freed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from .plan import BucketPlan
from .scaling import Scaling, encode_weight
from .transport.base import Transport, Work


class Control(IntEnum):
    """Words behind the last bucket's payload; each counts the ranks that say so."""

    GAVE_UP = 0
    """This rank's backward failed; what it sent is not a gradient."""
    WANTS_REPLAN = 1
    """Rank 0 saw gradients arrive in another order than planned."""


_FREED = torch.nn.Parameter(torch.empty(0), requires_grad=False)


@dataclass(frozen=True)
class ControlWords:
    """What ranks said in the last bucket of a pass, readable without stopping the host.

    On CPU the words are there. On an accelerator they are on their way to pinned memory, and are read when the next
    pass begins, on all ranks alike.
    """

    words: torch.Tensor
    arrival: torch.Event | None = None
    own_failure: bool = False
    """This rank gave up the pass itself and need not be told."""

    @property
    def on_host(self) -> bool:
        """Whether ``read`` returns without waiting for a device."""
        return self.arrival is None

    def read(self) -> list[float]:
        """A count for each member of :class:`Control`."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return [abs(word) for word in self.words.tolist()]


class Bucket:
    """A bucket of the plan with its memory, on this rank.

    ``pending`` counts gradients that have not arrived in this pass; the bucket is full at 0.
    """

    __slots__ = (
        "_complete",
        "_parameters",
        "_scaling",
        "control",
        "flat",
        "footer",
        "index",
        "indices",
        "is_last",
        "kept",
        "missing",
        "offsets",
        "payload",
        "payload_bytes",
        "pending",
        "slots",
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
        self._parameters = [parameters[i] for i in self.indices]
        self.pending = len(self.indices)
        self.offsets = plan.offsets(index)
        specs = [plan.parameters[i] for i in self.indices]
        dtype = specs[0].reduce_dtype or specs[0].dtype
        weight_words = scaling.weight_words(dtype)
        numel, words = self.offsets[-1], len(specs) + len(Control) + weight_words
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
        self._complete = torch.ones_like(self.footer)
        self._complete[len(specs) :] = 0
        self.missing: list[int] = []
        """Places of parameters without a contribution from this rank in this pass."""
        self.kept: dict[int, torch.Tensor] = {}
        """What ``.grad`` of such a parameter held, to be restored if no rank had a contribution."""
        self.work: Work | None = None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters. One that was freed is an empty stand-in without a gradient."""
        return [_FREED if (alive := reference()) is None else alive for reference in self._parameters]

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The slots of another flat tensor that is laid out like the payload."""
        return [
            buffer.as_strided(view.shape, view.stride(), offset + buffer.storage_offset())
            for view, offset in zip(self.views, self.offsets, strict=False)
        ]

    def collect(self) -> None:
        """Every gradient has arrived: copy them in at one call; ``.grad`` becomes the slot.

        Where ``.grad`` is the slot already (``zero_grad(set_to_none=False)``, or none at all), autograd has
        accumulated in place and there is nothing to copy.
        """
        parameters = self.parameters
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if any(map(operator.is_, gradients, self.views)):
            self._copy([i for i, gradient in enumerate(gradients) if gradient is not self.views[i]])
            self.footer.copy_(self._complete)
            return
        torch._foreach_copy_([*self.views, self.footer], [*gradients, self._complete])
        for parameter, view in zip(parameters, self.views, strict=True):
            parameter.grad = view

    def collect_some(self, contributed: Collection[int]) -> None:
        """Some gradients did not arrive: what ``.grad`` holds, or zeros, goes in their place, and the footer says so.

        Args:
            contributed: parameter indices that this rank has something new to give for, in this pass or from backward
                passes without synchronisation before it.
        """
        parameters = self.parameters
        places = range(len(parameters))
        self.missing = [i for i in places if self.indices[i] not in contributed]
        if not self.missing:
            self.collect()
            return
        self._copy([i for i in places if i not in set(self.missing)])
        for i in self.missing:
            gradient, view = parameters[i].grad, self.views[i]
            if gradient is None:
                view.zero_()
            elif gradient is view:
                self.kept[i] = gradient.clone()
            else:
                view.copy_(gradient)
        self.footer.copy_(self._complete)
        for i in self.missing:
            self.footer[i] = 0

    def _copy(self, places: Sequence[int]) -> None:
        parameters = self.parameters
        fresh = [i for i in places if parameters[i].grad is not self.views[i]]
        gradients: list[Any] = [parameters[i].grad for i in fresh]
        if fresh:
            torch._foreach_copy_([self.views[i] for i in fresh], gradients)
        for i in fresh:
            parameters[i].grad = self.views[i]

    def pack(self, weight: float) -> None:
        """Make the slots ready for the sum: cast, divided, weighted."""
        if self.slots is not self.payload:
            self.payload.copy_(self.slots)
        self._scaling.before(self.payload, weight)
        if self.is_last and len(self.weight):
            self.weight.copy_(torch.tensor(encode_weight(weight, len(self.weight))))

    def unpack(self, factor: torch.Tensor | float | None) -> None:
        """Put the sum into the slots, scaled by what the ranks' weights ask for."""
        if factor is not None:
            self.payload.mul_(factor)
        if self.slots is not self.payload:
            self.slots.copy_(self.payload)

    def release(self, *, summed_footer: bool) -> None:
        """The result is in the slots: settle the parameters that this rank had nothing for.

        One that another rank had gets the mean. One that nobody had is left as it was.

        Args:
            summed_footer: False if a comm hook moved the payload alone; then it is not known who had what, and the
                parameter counts as had by another rank.
        """
        if not self.missing:
            return
        parameters = self.parameters
        had = self.footer[: len(parameters)].tolist() if summed_footer else [1] * len(parameters)
        for i in self.missing:
            if had[i] and parameters[i] is not _FREED:
                parameters[i].grad = self.views[i]
            elif i in self.kept:
                self.views[i].copy_(self.kept[i])

    def control_words(self, *, summed: bool) -> ControlWords:
        """What ranks said, after the bucket was reduced; nothing if the footer did not travel."""
        if not summed:
            return ControlWords(torch.zeros(len(Control)))
        if self.flat.device.type == "cpu":
            return ControlWords(self.control)
        words = torch.empty(len(Control), dtype=self.flat.dtype, pin_memory=True)
        words.copy_(self.control, non_blocking=True)
        arrival = torch.Event(self.flat.device)
        arrival.record()
        return ControlWords(words, arrival)

    def spoil(self) -> None:
        """This rank gives up the pass: say so, and send NaN, so that nobody takes it for gradients."""
        self.flat.zero_()
        if self.flat.is_floating_point() or self.flat.is_complex():
            self.slots.fill_(float("nan"))
        if self.is_last:
            self.control[Control.GAVE_UP] = 1

    def drop_gradients(self) -> None:
        """Forget gradients that lie in this bucket, since a reduction is overwriting them."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None

    def reset(self) -> None:
        """Empty, for the next pass."""
        self.missing, self.kept = [], {}
        self.work = None
        self.pending = len(self.indices)
