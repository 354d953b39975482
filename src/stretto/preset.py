"""What ``.grad`` held before the gradients of a pass were accumulated into it.

A program that trains without ``zero_grad`` accumulates. For a mean it does no harm that the old value travels along:
the mean of what all ranks hold alike is what they hold. But a sum over ranks would multiply it. So with
``reduce="sum"``, the old value is read before the first new gradient comes; it is averaged, while the new gradients are
summed.

[Note: looked at in this task]  Each device has its own autograd thread. So when a pass begins with one gradient, others
may have been accumulated already whose hooks are still to come. What the same task of the engine has looked at is
therefore right as it was seen; only what was seen in earlier ones, without synchronisation, is compared with ``.grad``.
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
    task: int
    """The engine's task in which it was looked at."""


class _Known(dict[int, _Before]):
    """By ``id()`` of the parameter."""

    running = False
    """Whether a synchronised pass is under way, in which ``.grad`` comes and goes by our own hands."""


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
        known = self._known.get(id(parameter))
        if known is None or known.task != current_task():
            _look(self._known, weakref.ref(parameter), parameter)

    def copy(self) -> Preset:
        """What it knows now, without hooks."""
        made = Preset()
        made.take_over(self)
        return made

    def take_over(self, other: Preset) -> None:
        """Know what another has seen."""
        self._known.update(other._known)

    def begin(self) -> None:
        """A synchronised pass begins, in a hook: see [Note: looked at in this task]."""
        task = current_task()
        for key, before in [*self._known.items()]:  # at once: other threads look meanwhile
            if before.task == task:
                continue
            parameter = self._hooks[key][0]() if key in self._hooks else None
            if parameter is None or (gradient := parameter.grad) is None:
                if self._known.get(key) is before:  # else another thread has looked meanwhile
                    self._known.pop(key, None)
            elif not _goes_on(before, gradient) and before.task != task:  # still: it is added to only after a look
                before.value = gradient.detach().clone()
        self._known.running = True  # last: from here on what is known is not looked at again

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
    gradient, before, task = parameter.grad, known.get(id(parameter)), current_task()
    if gradient is None:
        known[id(parameter)] = _Before(None, None, 0, task)
    elif before is not None and _goes_on(before, gradient):
        before.task = task
    else:
        known[id(parameter)] = _Before(gradient.detach().clone(), weakref.ref(gradient), gradient._version, task)


def _goes_on(before: _Before, gradient: torch.Tensor) -> bool:
    """Whether only autograd has written to the gradient since."""
    return before.gradient is not None and before.gradient() is gradient and before.version == gradient._version
