"""Other tensors that show a parameter's memory: ``p.detach()``, ``p.data``, what a library has stored.

[Note: aliases]  In a plain program such a tensor follows the steps of its parameter, since both are one memory. So when
a parameter is given other memory, all Python tensors that show its old memory move with it. That includes parameters of
other models, but not those that a handle reduces, which are laid out separately. To find these tensors, all Python
objects are searched, which takes as long as a garbage collection; it is done only if the storage has more users than
are known. Graphs that are still alive are users too, but not Python objects: tensors that only they hold keep the old
memory.

The search asks which objects refer to a class of tensors, as each instance does. A loop over ``gc.get_objects()`` finds
the same, but holds every object meanwhile: CPython cannot complete a tuple that another thread has begun and somebody
else holds (``SystemError: Objects/tupleobject.c``).
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..arrivals import owner_of
from ..slots import use_count

_IMMOVABLE = "_stretto_immovable"


def immovable(view: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that keeps its memory even if a parameter comes to lie there and moves away. Returns it."""
    setattr(view, _IMMOVABLE, True)
    return view


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    storage: int
    begin: int
    """Its first byte in the storage."""
    end: int
    """After its last byte; equal to ``begin`` if it has no elements."""
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        """Raises if it has no memory (if it is sparse, say). The tensor's class may override these methods."""
        shape, stride, size = tensor.shape, torch.Tensor.stride(tensor), torch.Tensor.element_size(tensor)
        begin = int(torch.Tensor.storage_offset(tensor)) * size
        extent = 1 + sum((number - 1) * step for number, step in zip(shape, stride, strict=True))
        end = begin if 0 in shape else begin + extent * size
        return cls(torch.Tensor.untyped_storage(tensor)._cdata, begin, end, shape, stride)


def move(moves: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Iterable[torch.Tensor] = ()) -> None:
    """Give each parameter the memory of another tensor, with the values there, and take its aliases along.

    Args:
        moves: parameters, and what they are to be.
        known: tensors that show the same memory as some of them, and stay.
    """
    if not moves:  # as in most steps
        return
    stay = {id(one): one for one in (*known, *(parameter for parameter, _ in moves))}
    with torch._C.DisableTorchFunctionSubclass():
        users = Counter(one.untyped_storage()._cdata for one in stay.values())
        held = {number for number, uses in users.items() if use_count(number) > uses + 1}  # one is the storage's object
        found = _aliases(held, stay.keys()) if held else {}
        going = list[tuple[torch.Tensor, torch.Tensor]]()
        for parameter, new in moves if found else ():
            lies = _Place.of(parameter)
            shown = [(one, _shown(one, place, lies, new)) for one, place in found.get(lies.storage, ())]
            going += [(one, there) for one, there in shown if there is not None]
        for parameter, new in moves:
            parameter.data = new
        for one, there in going:
            with contextlib.suppress(RuntimeError):  # torch refuses other memory for some classes
                torch.Tensor.data.__set__(one, there)  # type: ignore[attr-defined]  # its class may have another


def _aliases(held: set[int], stay: Collection[int]) -> Mapping[int, Sequence[tuple[torch.Tensor, _Place]]]:
    """The other tensors that show these storages, by storage."""
    found = defaultdict[int, list[tuple[torch.Tensor, _Place]]](list)
    for one in gc.get_referrers(*_with_subclasses(torch.Tensor)):
        if issubclass(type(one), torch.Tensor) and id(one) not in stay:
            with contextlib.suppress(Exception):  # any tensor of the program: without a place, or broken
                number = torch.Tensor.untyped_storage(one)._cdata  # asked for more, a symbolic one guards its shapes
                if number in held and owner_of(one) is None and _IMMOVABLE not in vars(one):
                    found[number].append((one, _Place.of(one)))
    return found


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _shown(alias: torch.Tensor, place: _Place, of: _Place, new: torch.Tensor) -> torch.Tensor | None:
    """What an alias of a parameter will show in its new memory; None if it shows more than that parameter."""
    if not of.begin <= place.begin <= place.end <= of.end:
        return None
    begin = new.storage_offset() * new.element_size() + place.begin - of.begin
    if of.stride != new.stride():  # it had gaps between its elements, now gone
        whole = (place.begin, place.shape, place.stride) == (of.begin, of.shape, of.stride)
        return new if whole and alias.dtype is new.dtype else None
    if begin % alias.element_size():
        return None
    shown = torch.empty(0, dtype=alias.dtype, device=new.device)
    shown.set_(new.untyped_storage(), begin // alias.element_size(), place.shape, place.stride)
    shown = shown.conj() if alias.is_conj() else shown
    return shown._neg_view() if alias.is_neg() else shown
