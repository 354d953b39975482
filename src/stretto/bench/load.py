"""Loads and calls what ``script.py:factory`` or ``package.module:factory`` names, for all commands that take one."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import SetupError
from ..whereabouts import is_users


class BrokenModelError(SetupError):
    """The user's code was found, and raised an error."""

    exit_code = 1
    """Exit code of a command that ends with this error."""


def load(source: str) -> Any:
    """Import what is before the colon, and return what is after it.

    A script is imported as if it was run from where it lies, under its own name instead of ``__main__``.

    Args:
        source: ``train.py:make_model`` or ``torchvision.models:resnet18``; dots for attributes, ``train:Nets.small``.

    Raises:
        SetupError: it has another form, or does not exist.
        BrokenModelError: its module raises.
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise SetupError(f"{source!r}: say where the model is made, script.py:factory or package.module:factory")
    if os.path.isfile(place) and _cannot_have(Path(place).read_text(errors="replace"), name.partition(".")[0]):
        raise SetupError(f"{place} has no {name!r}: write a function that returns the model")
    with _printing_aside():
        found: Any = _import(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SetupError(f"{place} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise SetupError(f"{source} is of type {type(found).__name__}, which cannot be called")
    return found


def _cannot_have(script: str, name: str) -> bool:
    """Found without running the script, which may train. If it cannot be read, running it says why."""
    try:
        ast.parse(script)
    except (SyntaxError, ValueError):
        return False
    return name not in script and not re.search(r"import\s*\*|__getattr__", script)


def call(factory: Any, source: str) -> Any:
    """What the factory makes; if it is a module already, the module itself.

    Args:
        factory: as :func:`load` gives it.
        source: its name.

    Raises:
        BrokenModelError: it raises.
    """
    if isinstance(factory, nn.Module):
        return factory
    try:
        with _printing_aside():
            return factory()
    except (Exception, SystemExit) as error:
        raise BrokenModelError(f"{source}() failed: {_told(error)}") from error


@contextlib.contextmanager
def _printing_aside() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is not our result
        yield


def _import(place: str) -> ModuleType:
    try:
        return _file(Path(place)) if place.endswith(".py") else _module(place)
    except SetupError:
        raise
    except (Exception, SystemExit) as error:
        text = f"importing {place} failed: {_told(error)}"
        if not isinstance(error, (ImportError, SyntaxError)):
            text += '; code other than definitions belongs under if __name__ == "__main__":'
        raise BrokenModelError(text) from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SetupError(f"{path}: no such file")
    _look_in(str(path.resolve().parent))  # as python path/to/file.py would
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    _look_in(os.getcwd())  # as python -m would
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise SetupError(f"there is no module {error.name!r}") from error
        raise


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _told(error: BaseException) -> str:
    """The error's class and text, and the last line of the user's program that it came from."""
    lines = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    mine = [(file, line) for file, line in lines if is_users(file)]
    where = f" ({mine[-1][0]}:{mine[-1][1]})" if mine else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
