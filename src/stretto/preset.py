"""What ``.grad`` held before the gradients of a pass were accumulated into it.

A program that trains without ``zero_grad`` accumulates. For a mean it does no harm that the old value travels along:
the mean of what all ranks hold alike is what they hold. But a sum over ranks would multiply it. So with
``reduce="sum"``, the old value is read before the first new gradient comes; it is averaged, while the new gradients are
summed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .arrivals import Hooked, hookable
from .engine import current_task, left_uncompiled


@dataclass
class _Before:
    value: torch.Tensor | None
    """None where there was no gradient."""
    gradient: weakref.ref[torch.Tensor] | None
    """Which tensor ``.grad`` is, None until something is accumulated. Where it is converted it stays the same."""
    version: int
    """Its version, as long as only autograd writes to it."""


class _Known(dict[int, _Before]):
    """By ``id()`` of the parameter."""

    running = False
    """Whether a synchronised pass is under way, in which ``.grad`` comes and goes by our own hands."""
    last = (0, -1)
    """The parameter that was looked at last, and in which of the engine's tasks."""


class Preset:
    """Looks at ``.grad`` of parameters just before autograd accumulates into it."""

    def __init__(self) -> None:
        self._hooks = Hooked()
        self._known = _Known()

    def follow(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hook these, which are not held, and no others."""
        self._hooks.follow([*parameters], self._hook)

    def _hook(self, parameter: torch.nn.Parameter) -> Any:
        look = functools.partial(_look, self._known, weakref.ref(parameter))
        with hookable(parameter):
            return parameter.register_hook(look)  # type: ignore[no-untyped-call]

    def before(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What ``.grad`` held before what is new since the last synchronised pass; None for nothing."""
        known = self._known.get(id(parameter))
        return None if known is None else known.value

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd has done so without synchronisation: into another tensor, maybe (``create_graph``).

        Where a program asks for gradients alone (``torch.autograd.grad``) it has not, though they were looked at.
        """
        gradient, before = parameter.grad, self._known.get(id(parameter))
        if before is not None and gradient is not None:
            before.gradient, before.version = weakref.ref(gradient), gradient._version

    def look(self, parameter: torch.nn.Parameter) -> None:
        """Something is about to be added that is no autograd's, before a pass begins."""
        if (newest := self._known.last) != (id(parameter), current_task()):  # else it was looked at
            _look(self._known, weakref.ref(parameter), parameter)
            self._known.last = newest

    def copy(self) -> Preset:
        """What it knows now, without hooks."""
        made = Preset()
        made.take_over(self)
        return made

    def take_over(self, other: Preset) -> None:
        """Know what another has seen."""
        self._known.update(other._known)

    def begin(self) -> None:
        """A synchronised pass begins, in a hook: if with a gradient of ours, with the one that was looked at last."""
        self._known.running = True
        newest, task = self._known.last
        if task != current_task():  # it is another handle's, and begins a pass of all
            newest = 0
        for key in [key for key in self._known if key != newest]:  # without synchronisation, before
            parameter = self._hooks[key][0]() if key in self._hooks else None
            if parameter is None or parameter.grad is None:
                del self._known[key]
            elif not _goes_on(self._known[key], parameter.grad):
                self._known[key].value = parameter.grad.detach().clone()

    def forget(self) -> None:
        """It is over: from now on its result is what ``.grad`` holds."""
        self._known.clear()
        self._known.running = False

    def remove(self) -> None:
        """Take the hooks off."""
        self.follow(())
        self.forget()


@left_uncompiled
def _look(known: _Known, reference: weakref.ref[torch.nn.Parameter], _: torch.Tensor) -> None:
    parameter = reference()
    if parameter is None or (known.running and id(parameter) in known):
        return
    known.last = id(parameter), current_task()
    gradient, before = parameter.grad, known.get(id(parameter))
    if gradient is None:
        known[id(parameter)] = _Before(None, None, 0)
    elif before is None or not _goes_on(before, gradient):
        known[id(parameter)] = _Before(gradient.detach().clone(), weakref.ref(gradient), gradient._version)


def _goes_on(before: _Before, gradient: torch.Tensor) -> bool:
    """Whether only autograd has written to the gradient since."""
    return before.gradient is not None and before.gradient() is gradient and before.version == gradient._version
