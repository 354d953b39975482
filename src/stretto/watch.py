"""Notifies those who ask for it when parameters, modules or new buffers are registered anywhere in the process.

[Note: one entry]  torch keeps registration hooks in a table of the process and iterates over it while modules are being
built, maybe on another thread; a change of the table meanwhile raises in the user's constructor. So all attached models
share one entry, which stays while there is such a model. A model's finalizer would change the table at any moment.

[Note: buffers]  torch also reports each buffer that is reassigned, as some layers do in every forward, and its compiler
traces into what is called. Hence a function that does nothing in that case. It is the same function for as long as the
process lives, since a compiled forward checks whether it still is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .engine import left_uncompiled
from .errors import SetupError
from .listeners import Listeners

ENTRY: Any = "stretto"

INSTEAD_OF_TORCHS = (
    "Use one of the two: attach the original module, and call that; or wrap it in stretto.DistributedDataParallel."
)

Listener = Callable[[torch.nn.Module, object], None]


class RegistrationWatch(Listeners):
    """The entry in torch's tables; it lives there and nowhere else."""

    @left_uncompiled
    def __call__(self, owner: torch.nn.Module, _: str, item: object) -> None:
        self.tell(owner, item)


def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    return torch_module._global_parameter_registration_hooks, torch_module._global_module_registration_hooks


def _buffer_registered(owner: torch.nn.Module, name: str, item: object) -> None:
    """See [Note: buffers]. Of what is new in a compiled forward the net tells: tables.py."""
    if name not in owner._buffers and not torch.compiler.is_compiling():
        watch = torch_module._global_parameter_registration_hooks.get(ENTRY)
        if watch is not None:
            watch(owner, name, item)


def listen(listener: Listener) -> None:
    """Call a bound method, held weakly, with the owner and what is about to be registered in it."""
    parameters, modules = _tables()
    watch = parameters.setdefault(ENTRY, RegistrationWatch())
    modules.setdefault(ENTRY, watch)
    torch_module._global_buffer_registration_hooks.setdefault(ENTRY, _buffer_registered)
    watch.change(more=listener)


def stop_listening(listener: Listener) -> None:
    """Undo ``listen``. With the last listener the entry goes."""
    parameters, modules = _tables()
    watch = parameters.get(ENTRY)
    if watch is None:
        return
    watch.change(less=listener)
    if not len(watch):
        parameters.pop(ENTRY, None)
        modules.pop(ENTRY, None)
        torch_module._global_buffer_registration_hooks.pop(ENTRY, None)


def torch_reduces(module: torch.nn.Module) -> bool:
    """Whether it is torch's wrapper, whose reducer reads and writes ``.grad`` while ours does; the drop-in has none."""
    classes = type(module).__mro__
    return TorchDDP in classes and not any(one.__module__.startswith(f"{__package__}.") for one in classes)


def taken_by_torch(wrapper: Any, module: torch.nn.Module) -> set[int]:
    """The parameters, by ``id``, whose gradients torch's wrapper around ``module`` averages.

    Its reducer goes by other names than ``named_parameters()``: one at the root is ``".scale"`` there, and one that is
    tied is reduced unless each of its names is ignored. Those that it delays are averaged as well, beside the reducer.
    """
    left_alone = getattr(wrapper, "parameters_to_ignore", ())
    delayed = getattr(wrapper, "_delay_all_reduce_params", ())
    reduced = (
        one
        for prefix, part in module.named_modules()
        for name, one in part.named_parameters(recurse=False)
        if one.requires_grad and f"{prefix}.{name}" not in left_alone
    )
    return {*map(id, reduced), *map(id, delayed)}


def refuse_torchs(owner: torch.nn.Module, item: object, attached: Iterable[object]) -> None:
    """Raise where torch's wrapper is about to take a module with a parameter that is attached."""
    if not isinstance(item, torch.nn.Module) or not torch_reduces(owner):
        return
    if not taken_by_torch(owner, item).isdisjoint(map(id, attached)):
        raise SetupError(
            "the module is attached: with torch's DistributedDataParallel around it two would average the same "
            f"gradients, and some would be lost.\n{INSTEAD_OF_TORCHS}"
        )


def refuse_around(wrapper: torch.nn.Module, attached: Iterable[object]) -> None:
    """The same for a wrapper that now runs forward around the attached module: it was there before."""
    refuse_torchs(wrapper, wrapper.module, attached)
