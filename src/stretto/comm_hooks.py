"""What a user may put in place of the all-reduce of a bucket: torch's ``register_comm_hook`` contract.

A hook is called as ``hook(state, bucket)`` with a :class:`GradBucket` that is not yet divided by the world size, and
returns a ``torch.futures.Future`` of the reduced flat tensor. Hooks of
``torch.distributed.algorithms.ddp_comm_hooks`` serve as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .bucket import Bucket

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class GradBucket:
    """The face of a bucket that a comm hook sees, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.payload

    def index(self) -> int:
        """Place in the launch order, from 0."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients of this rank, undivided, without anything of stretto's behind them."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in place of ``buffer()``, for hooks that are chained."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of ``buffer()``, one a parameter, in the parameter's shape and strides."""
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the same order."""
        return [*self._bucket.parameters]

    def is_last(self) -> bool:
        """Whether this is the bucket that leaves last in a pass."""
        return self._bucket.is_last


@dataclass(frozen=True)
class CommHook:
    """A registered hook with its state."""

    state: Any
    hook: Hook

    def launch(self, bucket: Bucket) -> HookWork:
        """Hand the bucket to the hook."""
        return HookWork(self.hook(self.state, GradBucket(bucket)), bucket)


@dataclass
class HookWork:
    """The future that a hook returned, waited for like any other work."""

    future: torch.futures.Future[Any]
    bucket: Bucket

    def wait(self) -> None:
        """Put the hook's result into the bucket, unless it is there already."""
        result = self.future.wait()
        if isinstance(result, (list, tuple)):  # Work.get_future() resolves to the list of a collective's tensors
            result = result[0]
        if result.data_ptr() != self.bucket.payload.data_ptr():
            self.bucket.payload.copy_(result.view(-1))
