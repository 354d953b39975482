"""Of ``script-or-module:factory`` the module that the factory makes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .console import WRONG, CommandError


def load_model(target: str) -> torch.nn.Module:
    """Import what stands before the colon, call what stands behind it.

    A script is imported as if it was run from where it lies, under its own name instead of ``__main__``.

    Args:
        target: ``train.py:make_model`` or ``torchvision.models:resnet18``; a module that is there already will do.

    Raises:
        CommandError: it has another form, does not exist, raises, or gives no ``torch.nn.Module``.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise CommandError(f"{target!r}: say where the model is made, script.py:factory or package.module:factory")
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is no result of ours
        found: Any = _import(place)
        for part in name.split("."):
            if not hasattr(found, part):
                raise CommandError(f"{place} has no {part!r}")
            found = getattr(found, part)
        if not isinstance(found, torch.nn.Module):
            found = _call(found, target)
    if not isinstance(found, torch.nn.Module):
        raise CommandError(f"{target} gives a {type(found).__name__}, not a torch.nn.Module")
    return found


def _import(place: str) -> ModuleType:
    try:
        return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"importing {place} failed: {_told(error)}", WRONG) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file .py has a loader"
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise CommandError(f"there is no module {error.name!r}") from error
        raise


def _call(factory: Any, target: str) -> Any:
    if not callable(factory):
        raise CommandError(f"{target} is a {type(factory).__name__}, which cannot be called")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise CommandError(f"{target}() failed: {_told(error)}", WRONG) from error


def _told(error: BaseException) -> str:
    """Its class, its text, and the last line of the program that it came from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    file = "" if frame is None else frame.tb_frame.f_code.co_filename
    where = f" ({file}:{frame.tb_lineno})" if frame is not None and file != __file__ else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
