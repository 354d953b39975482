"""The flat buffer of one plan entry.

    flat:  | slot of p0 | slot of p1 | ... | footer |
           └──────────── payload ──────────┘

``views[i]`` is the slot of the i-th parameter in the parameter's own shape and strides. ``.grad`` comes to lie in it,
so gradients exist once: see slots.py. A gradient is *taken* when it has been copied into its slot. Along the schedule,
``.grad`` becomes the slot at once, while both are in the cache. Where it is not known how often gradients arrive,
``.grad`` is None until the pass settles. A gradient that arrives again can then neither be lost nor disturb a sum that
is under way.

The footer is summed together with the payload: see footer.py.

Where gradients travel in another dtype than their own (``reduce_dtype``), the slots have a memory of their own. They
are cast into the payload when the bucket leaves, and cast back when it has been reduced.

[Note: weak parameters]  A parameter's hook holds the reducer, and Python's garbage collector cannot look through the
C++ object that holds the hook. So reducer and buckets hold parameters weakly; otherwise no model would ever be freed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from .footer import Footer, parts_of
from .parts import Part, fits, is_slot
from .plan import BucketPlan
from .scaling import Scaling
from .slots import Slots, hand_out, lies_in, which_lie_in
from .transport.base import Transport, Work
from .withheld import Withheld

_grad = operator.attrgetter("grad")
_FREED = torch.nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)


class Bucket:
    """A bucket of the plan with its memory, on this rank.

    ``pending`` counts parameters that have not been taken in this pass; the bucket is full at 0.
    """

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
        weight_words = scaling.weight_words(specs[0].reduce_dtype or specs[0].dtype)
        tail = parts_of(len(specs), weight_words, is_last=self.is_last)
        self.memory = Slots(specs, self.offsets, tail, transport.allocate, device)
        self.flat, self.payload = self.memory.flat, self.memory.payload
        self.footer = Footer(self.memory.footer, self.memory.tail)
        self.slots, self.views = self.memory.slots, self.memory.views
        self.payload_bytes = self.payload.nbytes
        self._scaling = scaling
        self._mean = transport.all_reduce_mean if scaling.is_plain_mean else None
        self._share = transport.reduce_shares
        self.withheld: Sequence[Withheld] = ()
        """The placeholders for ``.grad`` if this rank needs only its share of the mean, by place."""
        self.loose: set[int] = set()
        """Places of parameters that do not fit their slot (another dtype, another shape): sent as nothing, and
        ``.grad`` left alone. See rejoin.py."""
        self.in_place = False
        """Whether ``.grad`` of some parameter was its slot when the pass began."""
        self.missing: list[int] = []
        """Places of parameters for which this rank has nothing new in this pass."""
        self.aside: dict[int, torch.Tensor] = {}
        """What was ``.grad`` of these places, which is None while the pass runs, so that what comes late lies apart."""
        self.taken: list[Sequence[int]] = []
        self.work: Work | None = None
        self.filled = False
        """Whether something else than this pass's arrivals went in."""
        self.skipped = False
        """Whether its payload is not sent in this pass, since no rank has anything for it."""
        self.pending = self.arrived = 0
        """``arrived`` counts those of the pending that can be taken; outside the schedule only."""
        self._standing: dict[int, torch.Tensor] = {}
        """``.grad`` of places for which there was nothing new, or not yet, when the bucket was filled."""
        self._before: dict[int, torch.Tensor] = {}
        """What is to be averaged where the rest is summed, by place: see preset.py."""
        self._numel = self.offsets[-1]  # len() of a tensor runs Python
        self.reset()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters. One that was freed is an empty stand-in without a gradient."""
        return [_FREED if (alive := reference()) is None else alive for reference in self.references]

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The slots of another flat tensor that is laid out like the payload."""
        return self.memory.views_of(buffer)

    def keep_clear(self) -> None:
        """Others look at the slots: write over no gradient that a user keeps. See slots.py, [Note: other memory]."""
        gradients = [parameter.grad for parameter in self.parameters]
        inside = sum(which_lie_in(gradients, self.views))
        self.in_place = inside == self.memory.in_use() or inside == len(self.views)
        if not self.in_place:
            self.memory.move()

    def leave(self) -> None:
        """Overwrite no gradient at all, not even what is in ``.grad``."""
        if self.memory.in_use():
            self.memory.move()

    # Filling

    def take_rest(self) -> None:
        """Take what has not been taken; all of it has arrived."""
        Part(self, self.not_taken()).take()

    def not_taken(self) -> list[int]:
        """Places of what may still come, and of what came and was left."""
        dealt_with = self._taken_places().union(self.missing)
        return [place for place in range(len(self.indices)) if place not in dealt_with]

    def _taken_places(self) -> set[int]:
        return {place for places in self.taken for place in places}

    def expect_absent(self, places: Sequence[int]) -> None:
        """These parameters do not come in this pass."""
        self.pending -= len(places)
        self._fill_absent(places)

    def _fill_absent(self, places: Sequence[int]) -> None:
        """``.grad`` as it is, or zeros, goes in where this rank has nothing new."""
        self.filled = True
        parameters = self.parameters
        for place in places:
            gradient, view = parameters[place].grad, self.views[place]
            if gradient is None:
                view.zero_()
                continue
            if inside := lies_in(gradient, view):
                gradient.data = gradient.clone()
            if place in self.loose or not fits(parameters[place], view):
                view.zero_()
                continue
            if not inside:
                view.copy_(gradient)
            self._standing[place] = gradient
            self.put_aside(place, parameters[place])
        self.missing += places

    def put_aside(self, place: int, parameter: torch.nn.Parameter) -> None:
        """It has no ``.grad`` until the pass settles."""
        if parameter.grad is not None:
            self.aside.setdefault(place, parameter.grad)
        parameter.grad = None

    def fill(self, contributed: Collection[int]) -> None:
        """Take what has not been taken. Where this rank has nothing new, ``.grad`` as it is, or zeros, goes in.

        Args:
            contributed: parameter indices that this rank has something new to give for, in this pass or from backward
                passes without synchronisation before it.
        """
        self.filled = True
        rest = self.not_taken()
        self.add_late(self._taken_places().union(self.missing))
        Part(self, [place for place in rest if self.indices[place] in contributed]).take()
        self._fill_absent([place for place in rest if self.indices[place] not in contributed])

    def add_late(self, places: Iterable[int]) -> None:
        """What arrived again, or although it was not to, before the bucket leaves."""
        parameters = self.parameters
        for place in {*places}.intersection(self.late()):
            self.views[place].add_(parameters[place].grad)  # type: ignore[arg-type]  # late(): it is not None
            self.put_aside(place, parameters[place])
            if place in self.missing:
                self.missing.remove(place)

    def remember(self, before: Mapping[int, torch.Tensor | None]) -> None:
        """What ``.grad`` of these places held before, where a sum must not count it more than once."""
        new = {place: value for place, value in before.items() if value is not None and place not in self.missing}
        self._before = new | self._standing

    def send(self, transport: Transport, weight: float) -> None:
        """Hand it to the transport: cast, weighted, and divided before the sum unless the transport does that."""
        at_once = self._share if self.withheld and self._share is not None else self._mean
        if at_once is not None:
            if self.slots is not self.payload:
                self.payload.copy_(self.slots)
            self.work = at_once(self.flat, self._numel)
            return
        for place, value in self._before.items():
            self.views[place].sub_(value)
        if self.slots is not self.payload:
            self.payload.copy_(self.slots)
        self._scaling.before(self.payload, weight)
        if self._before:
            payload = self.views_of(self.payload)
            for place, value in self._before.items():
                payload[place].add_(value, alpha=self._scaling.share)
        self.work = transport.all_reduce(self.flat)

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
        """Places of gradients that arrived again, or although they were not to, after the bucket had left."""
        return [
            i
            for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True))
            if parameter.grad is not None
            and not (i in self.loose or lies_in(parameter.grad, view))
            and fits(parameter, view)
        ]

    def release(self, summed_footer: bool) -> None:
        """The result is in the slots: they become ``.grad``.

        A parameter that this rank had nothing for gets the mean if another rank had it. One that nobody had is left as
        it was.

        Args:
            summed_footer: False if a comm hook moved the payload alone; then it is not known who had what, and the
                parameter counts as had by another rank.
        """
        missing = set(self.missing)
        had = self.footer.had.tolist() if missing and summed_footer else [1] * len(self.indices)
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            before = self.aside.get(place, parameter.grad)
            if parameter is _FREED or place in self.loose:
                continue
            if place not in missing or (had[place] and fits(parameter, view)):
                hand_out(parameter, before, view)
            elif before is not None:
                parameter.grad = before

    def withhold(self) -> None:
        """``.grad`` holds the mean only in this rank's share, and must not be taken for the whole mean."""
        if not self.withheld:
            return
        parameters = self.parameters
        all_are_slots = all(which_lie_in([*map(_grad, parameters)], self.views))  # mostly; a look at each costs more
        for parameter, view, instead in zip(parameters, self.views, self.withheld, strict=True):
            if (all_are_slots or is_slot(parameter, view)) and parameter.numel():
                parameter.grad = instead

    # A pass that is given up

    def drop_gradients(self) -> None:
        """Forget gradients that lie in this bucket, since a reduction is overwriting them; put back what was aside."""
        taken = self._taken_places()
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if place in self.aside and place not in taken:
                parameter.grad = self.aside[place]
            elif is_slot(parameter, view):
                parameter.grad = None

    def clear(self, value: float) -> None:
        """Send ``value`` in place of gradients, and say that there are none."""
        self.missing, self._standing = list(range(len(self.indices))), {}
        self.slots.fill_(value)

    def reset(self) -> None:
        """Empty, for the next pass."""
        self.missing, self.aside, self._standing, self.taken = [], {}, {}, []
        if self._before:
            self._before = {}
        self.work = None
        self.pending = len(self.indices)
        self.arrived = 0
        self.filled = self.skipped = self.in_place = False


def drop_gradients(buckets: Iterable[Bucket]) -> None:
    """Of a pass that did not come to its end."""
    for bucket in buckets:
        bucket.drop_gradients()
