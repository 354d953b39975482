"""Tensors over shared memory, and what messages cache of them.

They are ordinary tensors even if made in inference mode. An inference tensor can never be written outside of that mode:
a sum or a check during an evaluation would make later training fail.

[Note: past the end]  torch gives a buffer back to Python when the last tensor over it is gone. After a backward that
raised, autograd keeps the rest of the graph, and so these tensors, in its thread until after the interpreter has ended.
Calling Python then ends the program by a signal, although it had done its work. Therefore buffers that are alive when
the interpreter ends are never released.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def all_bytes(mapping: mmap.mmap) -> torch.Tensor:
    """The bytes of a mapping, which lives as long as a tensor over it."""
    return tensor_over(memoryview(mapping), 0, len(mapping), torch.uint8)


def tensor_over(buffer: memoryview, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """``numel`` elements from byte ``start`` of a mapping on, flat, as a tensor with a storage of its own."""
    held = buffer[start : start + numel * dtype.itemsize]  # by this storage alone
    with torch.inference_mode(False):
        tensor = torch.frombuffer(held, dtype=dtype)
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    weakref.finalize(held, _keep_for_ever, storage)
    return tensor


def _keep_for_ever(storage: StorageWeakRef) -> None:
    """See [Note: past the end]. Called when the storage is gone, unless the interpreter has ended."""
    alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if alive is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))


def elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as elements of ``dtype``."""
    with torch.inference_mode(False):
        return memory.view(dtype)


MOST_ROUTES = 4096
"""At most so many views are kept. Buckets stay where they are, but staging memory occurs in any combination of the
ranks' places, which changes with every late rank: their number would have no limit."""


class Routes(dict[Any, Any]):
    """Views of all ranks' tensors (cutting one takes 2 us), by everything that makes two messages alike.

    When there are too many, all are dropped.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MOST_ROUTES:
            self.clear()
        super().__setitem__(key, value)
