"""A hook that runs optimizer steps in backward, for ``torch.distributed.optim._apply_optimizer_in_backward``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .comm_hooks import sum_hook


class StepInBackward:
    """A comm hook, and an observer.

    When a bucket's mean is there, its parameters' optimizers step; when the pass has settled, those of parameters in no
    bucket do, and ``.grad`` is None.

    Args:
        parameters: that are stepped in backward.
        beside: of these the ones in no bucket, whose gradients are sparse.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], beside: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._beside = [weakref.ref(parameter) for parameter in beside]

    def __repr__(self) -> str:
        return "torch.distributed.optim._apply_optimizer_in_backward"

    def __call__(self, process_group: Any, bucket: Any) -> Any:
        """The hook's contract; what it returns can only be waited for."""
        return _StepOnce(sum_hook(process_group, bucket), bucket, dist.get_world_size(process_group))

    def pass_settled(self, *_: object) -> None:
        """Use up what came in no bucket, and forget the gradients."""
        for reference in self._beside:
            if (parameter := reference()) is not None and parameter.grad is not None:
                for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                    optimizer.step()
        for reference in self._parameters:
            if (parameter := reference()) is not None:
                parameter.grad = None


class _StepOnce:
    """Steps in the first ``wait``, on the thread that trains, not in a callback on the backend's."""

    def __init__(self, future: torch.futures.Future[Any], bucket: Any, world_size: int) -> None:
        self.done = future.done
        self.add_done_callback = future.add_done_callback
        self._future = future
        self._bucket = bucket
        self._world_size = world_size
        self._stepped = False
        self._failure: BaseException | None = None

    def wait(self) -> torch.Tensor:
        mean: torch.Tensor = self._bucket.buffer()
        if self._failure is not None:
            raise self._failure
        if not self._stepped:
            self._future.wait()
            self._stepped = True
            try:
                self._step(mean)
            except BaseException as error:
                self._failure = error
                raise
        return mean

    def _step(self, mean: torch.Tensor) -> None:
        mean.div_(self._world_size)
        for parameter, gradient in zip(self._bucket.parameters(), self._bucket.gradients(), strict=True):
            if optimizers := getattr(parameter, "_in_backward_optimizers", ()):  # others keep their mean
                parameter.grad = gradient.to(parameter.dtype)  # of reduce_dtype until here
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None
