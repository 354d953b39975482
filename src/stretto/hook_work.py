"""The future that a comm hook returns, as a work like any other, and what is known of a hook that fails."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .bucket import Bucket
from .transport.base import as_reals
from .wording import counted

if TYPE_CHECKING:
    from .comm_hooks import CommHook

_OF_A_PROGRAM = {
    *("ArithmeticError", "AssertionError", "AttributeError", "IndexError", "KeyError", "NameError"),
    *("NotImplementedError", "OverflowError", "TypeError", "UnboundLocalError", "ValueError", "ZeroDivisionError"),
}
"""Errors of a callback that no collective in it raises, and so no other rank is the cause of."""


def collectives_begun() -> int | None:
    """How many this process has begun over any group; None if some backend does not count them."""
    begun, groups = 0, [*dist.distributed_c10d._world.pg_map]
    for group in groups:
        begun += getattr(group, "begun", 0)  # in memory: see backend.py
        try:
            backends: dict[int, Any] = {id(one): one for one in map(group._get_backend, group._device_types)}
            begun += sum(one._get_sequence_number_for_group() for one in backends.values())
        except RuntimeError:
            return None
    return begun


class HookWork:
    """The future that a hook returns, waited for like any other work."""

    __slots__ = ("behind", "bucket", "future", "hook", "is_taken")

    def __init__(self, bucket: Bucket, future: Any, hook: CommHook, behind: torch.Tensor | None = None) -> None:
        self.bucket = bucket
        self.future = future
        self.hook = hook
        self.behind = behind
        """What was behind the payload before, if that is to be compared."""
        self.is_taken = False
        """Whether the result is in the bucket."""

    def is_completed(self) -> bool:
        """Whether the hook will not communicate any more for this bucket."""
        return bool(self.future.done())

    def is_well(self) -> bool:
        """Whether it is completed, and has not failed. Makes no stream of an accelerator wait."""
        if not self.is_completed():
            return False
        value = getattr(self.future, "value", None)
        try:
            return value is not None and value() is not None
        except Exception:
            return False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Put the hook's result into the bucket, unless it is there already.

        Raises:
            RuntimeError: that lasts longer than ``timeout``; wait again.
        """
        if self.is_taken:
            return
        if timeout is not None and not self.future.done() and not self._comes_within(timeout.total_seconds()):
            raise RuntimeError(f"the comm hook is not done within {timeout.total_seconds():.1f} s")
        try:
            result = self.future.wait()
            if result is not self.bucket.payload:
                self._take(result)
            self.is_taken = True
        except BaseException as error:
            self.hook.blame(error)
            raise

    def _take(self, result: Any) -> None:
        payload = self.bucket.payload
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # Work.get_future() resolves to the list of a collective's tensors
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"the comm hook's future holds a {type(result).__name__} in place of the reduced flat tensor.\n"
                "Let its last callback return that tensor."
            )
        if not result.is_complex():
            payload = as_reals(payload)
        if result.numel() != payload.numel():
            raise ValueError(
                f"the comm hook's future holds {counted(result.numel(), 'elements')} in place of the "
                f"{payload.numel()} of the reduced flat tensor.\n"
                "Let its last callback return the whole tensor: that is future.value() of torch's own hooks, and "
                "future.value()[0] of Work.get_future()."
            )
        if result.data_ptr() != payload.data_ptr():
            payload.copy_(result.reshape(-1))

    def _comes_within(self, seconds: float) -> bool:
        """A hook may return what knows no callbacks; then it is waited for plainly."""
        if not hasattr(self.future, "add_done_callback"):
            return True
        came = threading.Event()
        self.future.add_done_callback(lambda _: came.set())
        return came.wait(seconds)


def is_of_hook(error: BaseException) -> bool:
    """Whether a future has failed with what no collective can have raised, and so no other rank."""
    found = re.findall(r"error when running the callback: (\w+)", str(error))  # one within the other
    return bool(found) and found[-1] in _OF_A_PROGRAM
