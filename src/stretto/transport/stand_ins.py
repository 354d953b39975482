"""Tensors without memory of their own, which torch's C++ takes apart before a backend of C++ sees them.

The backend of Python gets them as the program has them, and Gloo, if handed one, reads and writes at address 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..engine import left_uncompiled
from ..errors import UnsupportedError
from .collectives import Done

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def on_values(collective: Callable[..., Work]) -> Callable[..., Work]:
    """A method of a backend that is given tensors with memory, whatever it is called with, and is not compiled.

    The backend has ``rank``. Raises ``UnsupportedError`` for a tensor whose values lie in others, before anything is
    sent.
    """

    @left_uncompiled  # torch's C++ may call it while the compiler listens
    @functools.wraps(collective)
    def call(self: Any, *arguments: Any, **more: Any) -> Work:
        if any([_is_fake(tensor) for tensor in _tensors_in(arguments)]):
            return Done(_tensors_in(arguments[0]))
        values = _values(arguments)
        _refuse_stand_ins(self.rank(), collective.__name__, _tensors_in(values))
        return collective(self, *values, **more)

    return call


def _values(argument: Any) -> Any:
    """An argument of a collective, with results of functional collectives waited for, also in lists."""
    if isinstance(argument, torch.Tensor):
        return argument if type(argument) in _ORDINARY else _waited_for(argument)
    return [_values(one) for one in argument] if isinstance(argument, (list, tuple)) else argument


def _waited_for(tensor: Any) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # imported already, if there is one

    is_result = isinstance(tensor, AsyncCollectiveTensor)
    waited: torch.Tensor = tensor.trigger_wait() if is_result else tensor
    return waited


def _tensors_in(argument: Any) -> list[torch.Tensor]:
    """All of them, from lists of lists too."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for one in argument for tensor in _tensors_in(one)] if isinstance(argument, (list, tuple)) else []


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape alone: with these a program is tried out, and nothing is sent."""
    if type(tensor) in _ORDINARY:
        return tensor.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _refuse_stand_ins(rank: int, what: str, tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        if type(tensor) not in _ORDINARY and is_traceable_wrapper_subclass(tensor):
            raise UnsupportedError(
                f"rank {rank}: {what} takes no {type(tensor).__name__}: its values lie in other tensors.\n"
                "Hand it those instead, one by one; the part of a DTensor that a rank has is to_local()."
            )
