"""Output of the commands: errors of one line, JSON, files that are never half written.

Results go to stdout, everything else to stderr. With ``--json``, stdout holds one JSON value and nothing else, also for
an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import StrettoError

FINE, WRONG, BAD_INPUT = 0, 1, 2
"""Exit codes: success; what was asked about has failed or is broken; wrong usage."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on stdout, and nothing else there.")]


class CommandError(StrettoError):
    """The command cannot be done. The message is one line.

    Args:
        message: what is wrong, with the name of the thing.
        exit_code: ``BAD_INPUT`` or ``WRONG``.
    """

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(text: str = "") -> None:
    """Print a result. A reader may stop early (``| head``): the exit code is about the result only.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        print(text)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise CommandError(f"the result cannot be written: {error.strerror}", WRONG) from error


def note(text: str) -> None:
    """Print progress on stderr. It is not a result, so failing to write it does not matter."""
    with contextlib.suppress(OSError):
        print(f"stretto: {text}", file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """The result, for programs."""
    say(json.dumps(value, indent=2))


def check_writable(path: Path) -> None:
    """Check a path before anything is computed.

    Raises:
        CommandError: a file cannot be written there.
    """
    folder = path.parent
    if path.is_dir():
        raise CommandError(f"{path} cannot be written: it is a folder")
    if not folder.is_dir():
        raise CommandError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
        raise CommandError(f"{path} cannot be written: {'read-only file system' if read_only else 'permission denied'}")


def write(path: Path, make: Callable[[Path], object]) -> None:
    """Have ``make`` write a file next to ``path``, then move it there: until then an existing file stays.

    Only files are replaced. A device, a pipe or a link is written to: otherwise, as root in a container, ``--chrome
    /dev/null`` would turn that device into a file for all programs.

    Raises:
        CommandError: it cannot be written.
    """
    check_writable(path)
    is_file = not path.is_symlink() and (path.is_file() or not path.exists())
    unfinished = path.with_name(f".{secrets.token_hex(4)}-{path.name}")  # the suffix tells plots what to draw
    try:
        make(unfinished if is_file else path)
        if is_file:
            os.replace(unfinished, path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
