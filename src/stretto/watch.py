"""Word of parameters and modules that are registered anywhere in the process, for those who ask for it.

[Note: one entry]  torch keeps registration hooks in a table of the process and iterates over it while modules are being
built, maybe on another thread; a table that changes meanwhile raises in the user's constructor. So there is one entry
for all attached models, which stays while there is one. A finalizer of a model would change the table at any moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from .engine import left_uncompiled
from .listeners import Listeners

ENTRY: Any = "stretto"

Listener = Callable[[torch.nn.Module, object], None]


class RegistrationWatch(Listeners):
    """The entry in torch's tables; it lives there and nowhere else."""

    @left_uncompiled
    def __call__(self, owner: torch.nn.Module, _: str, item: object) -> None:
        self.tell(owner, item)


def _tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    return torch_module._global_parameter_registration_hooks, torch_module._global_module_registration_hooks


def listen(listener: Listener) -> None:
    """Call a bound method, held weakly, with the owner and what is about to be registered in it."""
    parameters, modules = _tables()
    watch = parameters.setdefault(ENTRY, RegistrationWatch())
    modules.setdefault(ENTRY, watch)
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
