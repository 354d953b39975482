"""Tensors over shared memory, and what messages keep of them from one time to the next.

In inference mode too they are ordinary ones. What is made in that mode can never be written outside of it: a sum or a
check amid an evaluation would end the training that follows.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch


def all_bytes(mapping: mmap.mmap) -> torch.Tensor:
    """Of a mapping, which lives as long as a tensor over it."""
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


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
