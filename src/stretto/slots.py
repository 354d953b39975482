"""The memory of one bucket, the tensors cut from it, and whether somebody outside still uses it.

[Note: handed out]  What becomes ``.grad`` is not a view that the bucket keeps, but the tensor that autograd made, moved
into its slot: ``gradient.data = slot``. So whatever a user does to ``.grad`` (``.data =``, ``detach_()``,
``module.to()``) affects only that tensor and never the bucket. And one number, the use count of the storage, shows
whether anybody holds gradients, as they were or by some view: while it is the bucket's own count, nobody does.

[Note: other memory]  Gradients of a pass may be kept while ``.grad`` is set to None (one loss, then another), and the
next pass must not overwrite them. The bucket then takes other memory and leaves the old to its holders; it takes the
old memory back when they have let go. Its tensors stay the same objects, so code that works with them need not know.
Where ``.grad`` still is the slot, autograd accumulates in place, and everyone who looks at it should see that: then
nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import is_lazy

from .specs import ParameterSpec
from .withheld import Withheld

use_count: Callable[[int], int] = torch._C._storage_Use_Count

LEFT = 3
"""So many pieces of memory that were left to others are remembered, to be used again."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in one memory: not where it is sparse, say, or not made yet."""
    return not is_lazy(tensor) and tensor.layout is torch.strided


class Memory:
    """A flat tensor, and how many users its storage has."""

    __slots__ = ("_idle", "_storage", "flat", "number")

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._storage = self.flat.untyped_storage()  # the object itself is a use, as soon as anybody has asked for it
        self.number = self._storage._cdata
        self._idle = self.uses()

    def uses(self) -> int:
        """How many tensors, of anybody, lie in the memory; and some more, the same number at any time."""
        return use_count(self.number)

    def idle(self) -> bool:
        """Whether nobody uses it."""
        return self.uses() <= self._idle


class Slots:
    """A bucket's tensors: ``flat``, its parts ``payload`` and ``tail``, and ``views``, the slots.

    Args:
        specs: the parameters of the bucket.
        offsets: where their slots begin, in elements; one more, where the last ends.
        tail: for each part after the payload, its number of elements.
        allocate: returns so many elements of a dtype on a device.
        device: where the slots are.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        offsets: Sequence[int],
        tail: Sequence[int],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._specs = specs
        self._offsets = offsets
        self._tail = tail
        self._device = device
        self._allocate = allocate
        own, wire = specs[0].dtype, specs[0].reduce_dtype
        self._wire = None if wire is None else allocate(offsets[-1] + sum(tail), wire, device).data
        """What travels, where that is not the slots themselves."""
        self.dtype = own
        self._memory = self._new()
        self._left: list[Memory] = []
        self._moved = False
        cut = self._cut()
        self.flat, self.payload, self.footer, *self.tail = cut[: 3 + len(tail)]
        self.slots = self.payload if self._wire is None else cut[3 + len(tail)]
        self.views = cut[-len(specs) :]
        self._tensors = cut
        self._regions: list[tuple[torch.Tensor, int, int, int]] = []
        self._stretches: list[tuple[torch.Tensor, int, int]] = []
        del cut
        self._own = self._memory.uses()

    def _new(self) -> Memory:
        numel = self._offsets[-1]
        if self._wire is not None:
            return Memory(torch.zeros(numel, dtype=self.dtype, device=self._device))
        # Autograd's views would hold their base.
        return Memory(self._allocate(numel + sum(self._tail), self.dtype, self._device).data)

    def _cut(self) -> list[torch.Tensor]:
        """Everything that lies in the memory now, in a fixed order."""
        numel = self._offsets[-1]
        flat = self._memory.flat if self._wire is None else self._wire
        payload, footer = flat[:numel], flat[numel:]
        slots = payload if self._wire is None else self._memory.flat
        apart = [] if self._wire is None else [slots]
        parts = [flat, payload, footer, *torch.split(footer, [*self._tail]), *apart, *self.views_of(slots)]
        return [part.data for part in parts]

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The slots of any flat tensor that is laid out like the payload."""
        start = buffer.storage_offset()
        return [
            buffer.as_strided(spec.shape, spec.strides, offset + start)
            for spec, offset in zip(self._specs, self._offsets, strict=False)
        ]

    # Runs of slots

    def region(self, first: int, last: int, rows: int) -> torch.Tensor:
        """The slots from one place to another as one tensor of so many rows, one slot after the other."""
        region = self._region(first, last, rows)
        self._regions.append((region, first, last, rows))
        return region

    def _region(self, first: int, last: int, rows: int) -> torch.Tensor:
        stop = self._offsets[last] + self._specs[last].numel
        return self.slots[self._offsets[first] : stop].view(rows, *self._specs[first].shape[1:]).data

    def forget_regions(self) -> None:
        """They are not used any more."""
        self._regions.clear()

    def stretch(self, start: int, stop: int) -> torch.Tensor:
        """So many elements of the slots, flat, wherever the slots go; until it is forgotten."""
        stretch = self.slots[start:stop].data
        self._stretches.append((stretch, start, stop))
        return stretch

    def forget_stretch(self, stretch: torch.Tensor) -> None:
        """It is not used any more."""
        self._stretches = [one for one in self._stretches if one[0] is not stretch]

    # Who else looks

    @property
    def nbytes(self) -> int:
        """Bytes held, of earlier passes too where users keep their gradients."""
        wire = [] if self._wire is None else [self._wire]
        return sum(flat.nbytes for flat in (*wire, *(memory.flat for memory in (self._memory, *self._left))))

    def in_use(self) -> int:
        """How many tensors of others lie in the slots: ``.grad`` of parameters, and whatever users keep."""
        return use_count(self._memory.number) - self._own - len(self._regions) - len(self._stretches)

    def move(self) -> None:
        """Take other memory: see [Note: other memory]. What the slots held is not carried over."""
        self._moved = True
        free = next((memory for memory in self._left if memory.idle()), None)
        self._left = [*[memory for memory in self._left if memory is not free][1 - LEFT :], self._memory]
        self._memory = self._new() if free is None else free
        for tensor, part in zip(self._tensors, self._cut(), strict=True):
            tensor.data = part
        for region, *where in self._regions:
            region.data = self._region(*where)
        for stretch, start, stop in self._stretches:
            stretch.data = self.slots[start:stop]

    def tidy(self) -> None:
        """Called now and then: free what is not used, unless it was used since the last call."""
        if not self._moved:
            self._left = [memory for memory in self._left if not memory.idle()]
        self._moved = False


def lies_in(gradient: torch.Tensor, slot: torch.Tensor) -> bool:
    """Whether a gradient is its slot, element by element."""
    if isinstance(gradient, Withheld) or isinstance(slot, Withheld):
        return gradient is slot
    if gradient.layout is not torch.strided or gradient.dtype is not slot.dtype:
        return False
    return gradient.data_ptr() == slot.data_ptr() and bool(gradient.is_set_to(slot))


def which_lie_in(gradients: Sequence[torch.Tensor | None], slots: Sequence[torch.Tensor]) -> list[bool]:
    """The same for many, in one call where all are there."""
    try:
        return [*map(torch.Tensor.is_set_to, gradients, slots)]  # type: ignore[arg-type]  # see below
    except (TypeError, RuntimeError):  # some are None, or sparse
        return [one is not None and lies_in(one, slot) for one, slot in zip(gradients, slots, strict=True)]


def hand_out(parameter: torch.Tensor, gradient: torch.Tensor | None, slot: torch.Tensor) -> None:
    """Let the slot be ``parameter.grad``, as the tensor ``gradient`` where there is one: see [Note: handed out]."""
    if (
        gradient is None
        or isinstance(gradient, Withheld)
        or gradient.requires_grad
        or gradient.layout is not torch.strided
    ):
        parameter.grad = slot.data
        return
    gradient.data = slot
    if parameter.grad is not gradient:
        parameter.grad = gradient
