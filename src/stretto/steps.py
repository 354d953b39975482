"""Notifies those who ask for it of steps of optimizers anywhere in the process.

[Note: one entry of steps]  torch keeps such hooks in a table of the process and iterates over it in every ``step()``,
maybe on another thread; a change of the table meanwhile raises in the user's training. Recorders come and go every
hundred passes, so there is one entry for all of them, as in watch.py. It is found again in torch's table, since nothing
else keeps it. It costs one call a step, and stays until a handle is detached and nobody listens any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer as torch_optimizer

from .engine import left_uncompiled
from .listeners import Listeners

ENTRY: Any = "stretto"
_FEW = 64

OURS = "_optimizer_is_ours"
"""An attribute of what ``shard`` builds to step a share, or to try one: these are no steps of the program's."""

IN_SHARES = "_ranks_step_shares"
"""An attribute of what ``shard`` returns: after its step all ranks hold the same, whatever they held before."""

Listener = Callable[[torch.optim.Optimizer, bool], None]
"""Is told which optimizer, and whether its step begins or has ended."""


class StepWatch(Listeners):
    """What the entries in torch's two tables share."""

    def __init__(self) -> None:
        super().__init__()
        self.told = weakref.WeakSet[torch.optim.Optimizer]()
        """Those of which some handle has told what they step beside it: others would tell the same."""
        self.averaged: dict[Any, weakref.WeakSet[torch.optim.Optimizer]] = {}
        """Where the values lie that ``stretto.reduce`` was given, which views share, and who has stepped with them."""
        self.elements, self._sweep_at = 0, _FEW
        """How many elements it was given so far."""

    @left_uncompiled
    def begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """torch's hook before a step; it must return None."""
        if OURS not in vars(optimizer):
            self.tell(optimizer, True)

    @left_uncompiled
    def ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """And behind it."""
        if OURS not in vars(optimizer):
            self.tell(optimizer, False)
            if 0 < len(self.averaged) <= _FEW:  # more are swept as more come, or each step would look at all of them
                self._sweep()
            for one in stepped_by(optimizer) if self.averaged else ():
                if (used := self.averaged.get(_place_of(one.grad))) is not None:
                    used.add(optimizer)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """``stretto.reduce`` has averaged these."""
        for one in tensors:
            count = one.numel()
            self.elements += count
            if (place := _place_of(one)) is not None:
                self.averaged[place] = weakref.WeakSet()
        if len(self.averaged) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        for gone in [place for place in [*self.averaged] if place.expired()]:
            self.averaged.pop(gone, None)
        self._sweep_at = max(_FEW, 2 * len(self.averaged))


def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    return torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def _watch() -> StepWatch | None:
    hook = _tables()[0].get(ENTRY)
    return None if hook is None else hook.__self__


def stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The parameters of all its groups."""
    return (one for group in optimizer.param_groups for one in group["params"])


def name_in(group: Mapping[str, Any], number: int, place: int) -> str:
    """What a parameter is called in an optimizer's group: as it was given, or else by place, and by its shape."""
    names, parameters = group.get("param_names") or (), group["params"]
    if len(names) == len(parameters):
        return str(names[place])
    return f"param_groups[{number}]['params'][{place}] {(*parameters[place].shape,) or ''}".rstrip()


def listen(listener: Listener) -> None:
    """Call a bound method, held weakly, at each step of any optimizer."""
    before, behind = _tables()
    hook = before.setdefault(ENTRY, StepWatch().begins)
    behind.setdefault(ENTRY, hook.__self__.ended)
    hook.__self__.change(more=listener)


def tells_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no other handle has told what it steps beside it. Asked within its step."""
    watch = _watch()
    assert watch is not None, "it has called the listener"
    is_first = optimizer not in watch.told
    watch.told.add(optimizer)
    return is_first


def stop_listening(listener: Listener) -> None:
    """Undo ``listen``. Harmless twice."""
    if (watch := _watch()) is not None:
        watch.change(less=listener)


def were_averaged(tensors: Iterable[torch.Tensor]) -> None:
    """``stretto.reduce`` has averaged these, gradients maybe."""
    if (watch := _watch()) is not None:
        watch.take(tensors)


def elements_averaged() -> int:
    """How many elements ``stretto.reduce`` was given so far."""
    return 0 if (watch := _watch()) is None else watch.elements


def is_averaged(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this tensor, or one in the same memory, was, after the optimizer's last step with it."""
    used = None if (watch := _watch()) is None else watch.averaged.get(_place_of(tensor))
    return used is not None and optimizer not in used


def _place_of(tensor: torch.Tensor | None) -> Any:
    """None for one that has no memory of its own, as sparse ones."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:  # inside a transform of torch.func
        return None


def leave() -> None:
    """A handle ends: remove the entry from torch's tables if no listener is left."""
    if (watch := _watch()) is None:
        return
    watch.change()
    if not len(watch):
        for table in _tables():
            table.pop(ENTRY, None)
