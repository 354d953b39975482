"""Tensors that show the memory of a parameter beside it: ``p.detach()``, ``p.data``, what a library has put by.

[Note: aliases]  In a plain program such a tensor follows the steps of its parameter, since both are one memory. So
where a parameter is given other memory, what Python has of the old one is taken along. It is looked for among all
objects, which takes as long as a garbage collection, and only where the storage has more users than are known. Graphs
that are still alive are users, too, but no objects of Python: what they hold stays as it was.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

from ..slots import use_count


def move(moves: Sequence[tuple[torch.Tensor, torch.Tensor]], known: Iterable[torch.Tensor] = ()) -> None:
    """Give each parameter the memory of another tensor, with the values there, and take its aliases along.

    Args:
        moves: parameters, and what they are to be.
        known: tensors that show the same memory as some of them, and stay.
    """
    stay = {id(one): one for one in (*known, *(parameter for parameter, _ in moves))} if moves else {}
    with torch._C.DisableTorchFunctionSubclass():
        users = Counter(one.untyped_storage()._cdata for one in stay.values() if one.is_cpu)
        held = {number for number, uses in users.items() if use_count(number) > uses + 1}  # one is the storage's object
        begins = [(one.untyped_storage()._cdata, one.storage_offset()) for one, _ in moves]
        found = _aliases(held, stay.keys()) if held else ()
        for (parameter, new), (number, begin) in zip(moves, begins, strict=True):
            numel, stride = parameter.numel(), parameter.stride()
            parameter.data = new
            for one, its_number, offset in found if stride == new.stride() else ():
                first = offset - begin
                inside = its_number == number and first >= 0 and first + _extent(one) <= numel
                if inside and one.dtype is new.dtype:
                    one.data = new.as_strided(one.shape, one.stride(), new.storage_offset() + first)


def _aliases(held: set[int], stay: Collection[int]) -> list[tuple[torch.Tensor, int, int]]:
    """With their storage, and where they begin in it. No parameters: those are others' own, see ``Layout.copies``; nor
    what a graph has made."""
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, torch.nn.Parameter) or id(one) in stay:
            continue
        try:
            number = one.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # of no strided memory
            continue
        if number in held and one.is_leaf:
            found.append((one, number, one.storage_offset()))
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Elements from its first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
