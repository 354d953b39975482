"""Tensors over shared memory, and what messages keep of them from one time to the next.

In inference mode too they are ordinary ones. What is made in that mode can never be written outside of it: a sum or a
check amid an evaluation would end the training that follows.

[Note: past the end]  torch gives a buffer back to Python when the last tensor over it is gone. Of a backward that
raised, autograd keeps the rest of the graph in its thread, and so these tensors, until after the interpreter has
ended: to call Python then is the end by a signal of a program that had done its work. What is alive at the end of the
interpreter is never let go of, therefore.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def all_bytes(mapping: mmap.mmap) -> torch.Tensor:
    """Of a mapping, which lives as long as a tensor over it."""
    return tensor_over(memoryview(mapping), 0, len(mapping), torch.uint8)


def tensor_over(buffer: memoryview, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """So many elements from byte ``start`` of a mapping on, flat, as a tensor with a storage of its own."""
    held = buffer[start : start + numel * dtype.itemsize]  # by this storage alone
    with torch.inference_mode(False):
        tensor = torch.frombuffer(held, dtype=dtype)
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    weakref.finalize(held, _keep_for_ever, storage)
    return tensor


def _keep_for_ever(storage: StorageWeakRef) -> None:
    """See [Note: past the end]. Before the end of the interpreter it is called when the storage has gone."""
    alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if alive is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))


def elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as elements of ``dtype``."""
    with torch.inference_mode(False):
        return memory.view(dtype)


MOST_ROUTES = 4096
"""Buckets stay where they are. What passes through staging memory meets in any combination of the ranks' places, which
differs with every late rank: there would be no end of them."""


class Routes(dict[Any, Any]):
    """Views of where everybody's tensors lie (2 us each to cut anew), by all that makes two messages alike.

    When there are too many, one begins again.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MOST_ROUTES:
            self.clear()
        super().__setitem__(key, value)
