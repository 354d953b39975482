"""Which gradients of a pass have arrived, in order: the hooks on the parameters.

The engine calls a hook for every gradient of every pass, so a hook must cost next to nothing. Here the hook is the
``append`` of a list, called without any Python in between (on an accelerator, with a line or two of it: see
streams.py). Only two kinds of arrival run more Python:

- the first of a pass: its hook is a *gate* that all parameters share, and that is closed between passes;
- those after which it is worth looking at the list: see schedule.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from .streams import Streams


class Arrivals:
    """The list of arrivals, and the hooks that write it.

    Args:
        parameters: to hook; not held.
        owner: the object that put the hooks there, for ``owner_of``.
        first: called, instead of the append, with a parameter whose gradient arrives while the gate is closed.
        look: called, after the append, for the parameters that were named to ``look_at``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        owner: object,
        first: Callable[[torch.Tensor], None],
        look: Callable[[torch.Tensor], None],
    ) -> None:
        self.order: list[torch.Tensor] = []
        self.streams = Streams(())
        self.append: Callable[[torch.Tensor], None] = self.order.append
        self._first = first
        self._look = look
        self.owner = owner
        self._names = {"owner": owner}
        self.is_open = False
        """Whether a pass has begun, and no nested task has ended since."""
        # A partial's target can be exchanged, and calling it goes straight to C.
        self._gate: Any = functools.partial(first)
        self.close()
        self._handles = Hooked()
        self._looking: dict[int, Any] = {}
        self._seeing: dict[int, Any] = {}
        self.follow(parameters)

    def follow(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook these and no others. Those that had a hook keep it, and so their place among hooks of the user."""
        self._look_no_more()
        self.streams = Streams(parameter.device for parameter in parameters)
        self.append = self.streams.noting(self.order.append)
        self._handles.follow(parameters, lambda parameter: hook_gradient(parameter, self._gate))

    def open(self) -> None:
        """A pass has begun: from here on arrivals are appended."""
        if self.streams.any:
            self.streams.note_current()
        self._gate.__setstate__((self.append, (), {}, self._names))
        self.is_open = True

    def close(self) -> None:
        """The next arrival calls ``first``."""
        self._gate.__setstate__((self._first, (), {}, self._names))
        self.is_open = False

    def end(self) -> None:
        """The pass is over."""
        self.close()
        self.order.clear()
        if self.streams.any:
            self.streams.end()

    def look_at(self, parameters: Collection[tuple[int, torch.nn.Parameter]]) -> None:
        """Call ``look`` after arrivals of these parameters, given with their index, and of no others."""
        wanted = dict(parameters)
        for index in [index for index in self._looking if index not in wanted]:
            self._looking.pop(index).remove()
        for index, parameter in wanted.items():
            if index not in self._looking:
                self._looking[index] = hook_gradient(parameter, self._look, last=True)

    def is_last(self, parameter: torch.Tensor) -> bool:
        """Whether ``look`` is called after all hooks of the program, which must see the gradient as it arrived."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        return next(reversed(hooks.values())) is self._look

    def put_last(self, index: int, parameter: torch.Tensor) -> None:
        """Call ``look`` after them from the next arrival on. Only needed with a hook table that torch has made."""
        if (handle := self._looking.get(index)) is not None:
            handle.remove()
            self._looking[index] = hook_gradient(parameter, self._look, last=True)

    def see_first(self, index: int, parameter: torch.Tensor, see: Callable[[torch.Tensor], None]) -> None:
        """Call ``see`` before all hooks of the program, until other parameters are followed."""
        if index not in self._seeing:
            self._seeing[index] = handle = hook_gradient(parameter, see)
            hooks: Any = parameter._post_accumulate_grad_hooks
            for key in [key for key in hooks if key != handle.id]:
                hooks[key] = hooks.pop(key)

    def _look_no_more(self) -> None:
        self.look_at(())
        while self._seeing:
            self._seeing.popitem()[1].remove()

    def remove(self) -> None:
        """Take all hooks off."""
        self._look_no_more()
        self._handles.keep(())
        del self._first, self._look, self._gate  # else each circle of these waits for Python's collector


class Hooked(dict[int, tuple[weakref.ref[torch.Tensor], Any]]):
    """Parameters that have a hook, held weakly, by ``id()``: with each hook's handle."""

    def alive(self) -> list[Any]:
        """The parameters that live. More may come meanwhile, on another thread or from within the collector."""
        return [one for reference, _ in [*self.values()] if (one := reference()) is not None]

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the hooks off all others."""
        wanted = {id(parameter): parameter for parameter in parameters}
        for key in [key for key, (one, _) in [*self.items()] if one() is None or one() is not wanted.get(key)]:
            self.pop(key)[1].remove()

    def follow(self, parameters: Collection[Any], hook: Callable[[Any], Any]) -> None:
        """Hook these and no others. Those that had a hook keep it, and so their place among hooks of the user."""
        self.keep(parameters)
        for one in parameters:
            if id(one) not in self:
                self[id(one)] = weakref.ref(one), hook(one)


def owner_of(parameter: torch.Tensor) -> object | None:
    """The object that counts this parameter's arrivals, if any."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    for hook in (hooks or {}).values():
        if isinstance(hook, functools.partial) and "owner" in vars(hook):
            found: object = vars(hook)["owner"]
            return found
    return None


def has_other_hooks(parameter: torch.Tensor) -> bool:
    """Whether the program, too, looks at its gradients as they arrive, or may have taken them away."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    in_backward = hasattr(parameter, "_in_backward_optimizers")  # torch's hooks the node behind it, out of sight
    return in_backward or any([not _is_ours(hook) for hook in hooks.values()])


def _is_ours(hook: Any) -> bool:
    if isinstance(hook, functools.partial):
        return "owner" in vars(hook)
    return type(getattr(hook, "__self__", None)).__module__.startswith(f"{__package__}.")


def hook_for(parameter: torch.nn.Parameter, owner: object, call: Callable[[torch.Tensor], None]) -> Any:
    """Hook a parameter that is on no list of arrivals, so that ``owner_of`` finds ``owner``."""
    hook = functools.partial(call)
    vars(hook)["owner"] = owner
    return hook_gradient(parameter, hook)


class Hooks(dict[int, Any]):
    """Of one tensor. torch would make an ``OrderedDict``, to list whose values costs 0.1 us more at every gradient.

    One hook stays the last, whatever is registered after it.
    """

    __slots__ = ("__weakref__", "last")  # handles hold it weakly

    def __init__(self) -> None:
        self.last = -1

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if self.last in self and key != self.last:
            super().__setitem__(self.last, self.pop(self.last))


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None], *, last: bool = False) -> Any:
    """Call ``hook`` whenever the parameter's gradient is final for a graph task; ``last``: after all other hooks.

    A table of hooks that torch has made keeps none the last.
    """
    with hookable(parameter):
        if getattr(parameter, "_post_accumulate_grad_hooks", None) is None:
            parameter._post_accumulate_grad_hooks = Hooks()
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._post_accumulate_grad_hooks
    if last and isinstance(hooks, Hooks):
        hooks.last = handle.id
    return handle


@contextlib.contextmanager
def hookable(parameter: torch.Tensor) -> Iterator[None]:
    """torch refuses hooks on frozen parameters, but keeps those on one that is frozen later."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)
