"""The user's own model: from ``module:function`` or ``path/to/file.py:function`` to a model and a loss.

The function takes nothing and returns one of

    model, batch            the loss is what the model returns if that is a number, its ``.loss``, or its mean square
    model, batch, loss      loss(model, batch) returns the loss, and runs the model however it likes

``batch`` goes to the model as it is, a tuple or list as positional and a dict as keyword arguments. Where ``batch`` is
a function, it is called without arguments in every step, for batches that differ.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import SetupError
from .models import BUILT_IN, Workload

SEED = 0


def workload_of(source: str) -> Callable[[], Workload]:
    """What makes the model and its loss, alike on every call: the weights are seeded.

    Args:
        source: the name of a built-in workload, ``module:function`` or ``path/to/file.py:function``.

    Raises:
        SetupError: there is no such thing; in one line or two.
    """
    if source in BUILT_IN:
        return _seeded(BUILT_IN[source])
    factory = load(source)
    return _seeded(lambda: _understood(source, factory()))


def _seeded(make: Callable[[], Workload]) -> Callable[[], Workload]:
    def made() -> Workload:
        torch.manual_seed(SEED)
        return make()

    return made


def load(source: str) -> Callable[[], Any]:
    """The function that ``source`` names. Runs the module that holds it.

    Raises:
        SetupError: it cannot be found, or its module cannot be imported.
    """
    where, _, name = source.rpartition(":")
    if not where or not name:
        raise SetupError(
            f"{source!r} is neither a built-in workload ({', '.join(BUILT_IN)}) nor a function of yours.\n"
            "Name that as module:function or path/to/file.py:function."
        )
    try:
        module = _file(Path(where)) if where.endswith(".py") else _module(where)
    except SetupError:
        raise
    except (Exception, SystemExit) as error:
        raise SetupError(
            f"{where} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SetupError(f"{where} has no function {name}")
    return function  # type: ignore[no-any-return]


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SetupError(f"there is no file {path}")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # as python path/to/file.py would
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m would
    return importlib.import_module(name)


def _understood(source: str, made: Any) -> Workload:
    parts = tuple(made) if isinstance(made, (tuple, list)) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module) or (len(parts) == 3 and not callable(parts[2])):
        raise SetupError(
            f"{source} returned {_shape_of(made)}.\n"
            "Return (model, batch) or (model, batch, loss), where loss(model, batch) is the loss of a step."
        )
    model, batch = parts[:2]
    loss = parts[2] if len(parts) == 3 else _default_loss
    give = batch if callable(batch) and not isinstance(batch, torch.Tensor) else lambda: batch
    return model, lambda called: loss(called, give())


def _shape_of(made: Any) -> str:
    names = [type(one).__name__ for one in made] if isinstance(made, (tuple, list)) else []
    return f"({', '.join(names)})" if names else type(made).__name__


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        made = model(**batch)
    elif isinstance(batch, (tuple, list)):
        made = model(*batch)
    else:
        made = model(batch)
    made = getattr(made, "loss", made)
    while isinstance(made, (tuple, list)):
        made = made[0]
    if not isinstance(made, torch.Tensor):
        raise SetupError(
            f"the model returns {type(made).__name__}, of which no loss can be made.\n"
            "Return (model, batch, loss) from the factory, where loss(model, batch) is the loss of a step."
        )
    return made if made.dim() == 0 else made.square().mean()
