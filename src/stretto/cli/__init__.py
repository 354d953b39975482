"""The command line: ``stretto``, and ``python -m stretto``. One file a command; this one puts them together.

Exit codes: 0, success; 1, what was asked about has failed or is broken; 2, wrong usage; 130, Ctrl-C. ``stretto run``
ends with the exit code of the rank that failed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core

from ..errors import StrettoError
from .bench import bench
from .console import BAD_INPUT, FINE, WRONG, CommandError, note, say, say_json
from .demo import demo
from .doctor import doctor
from .plan import plan
from .run import TAKE_A_VALUE, run
from .trace import trace

INTERRUPTED = 130


class _Group(typer.core.TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _said(super().get_help_option(ctx))


class _Command(typer.core.TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _said(super().get_help_option(ctx))


def _said(option: Any) -> Any:
    """Help as any other result: the parser's own way to write it ends with 1 if the reader stops early."""
    option.callback = _say_help
    return option


def _say_help(context: typer.Context, _: object, wanted: bool) -> None:
    if wanted:
        say(context.get_help())
        raise typer.Exit


def make_app() -> typer.Typer:
    """All commands."""
    made = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in (demo, plan, trace, doctor, bench):
        made.command(cls=_Command)(command)
    made.callback()(_options)
    made.command(cls=_Command, context_settings={"allow_interspersed_args": False})(run)
    return made


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"stretto {version('stretto')}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """Data-parallel training for PyTorch: start it, look into it, find out what is wrong."""


app = make_app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code.

    Args:
        arguments: default, those of the process.
    """
    _open_streams()
    fails = ("strict", "surrogateescape")  # with a name that it cannot encode, say
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in fails:
        sys.stdout.reconfigure(errors="backslashreplace")
    code = execute(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            # As in `stretto plan ... | head`, which is fine; an exit code other than 0 stays.
            if stream is sys.stdout and not isinstance(error, BrokenPipeError) and code == FINE:
                note(f"the result cannot be written: {error.strerror}")
                code = WRONG
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes again when it ends
    raise SystemExit(code)


def _open_streams() -> None:
    """Python has None for streams that were closed before it started, as `>&-` and some services do."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115


def execute(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors become one line on stderr."""
    if not arguments:
        execute(["--help"])
        return BAD_INPUT
    try:
        told = app(args=[*arguments], prog_name="stretto", standalone_mode=False)
        return told if isinstance(told, int) else FINE
    except StrettoError as error:
        return _refused(arguments, str(error), getattr(error, "exit_code", BAD_INPUT))
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else WRONG
    except Exception as error:
        if type(error).__name__ == "Abort":  # what older parsers make of Ctrl-C
            return INTERRUPTED
        if hasattr(error, "format_message"):  # of the parser, whose classes have no public name in all its versions
            asked = f"stretto {arguments[0]}" if not arguments[0].startswith("-") else "stretto"
            command = getattr(getattr(error, "ctx", None), "command_path", asked)
            return _refused(arguments, f"{_one_line(error.format_message())} ({command} --help)", BAD_INPUT)
        if "STRETTO_TRACEBACK" in os.environ:
            raise
        told = f"{type(error).__name__}: {_one_line(str(error))} (STRETTO_TRACEBACK=1 shows where)"
        return _refused(arguments, told, WRONG)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _refused(arguments: Sequence[str], text: str, code: int) -> int:
    """Say why there is no result, in JSON too: on empty input ``jq`` ends with 0, which is then a pipe's exit code."""
    told = text.replace("\n", " ")
    note(told)
    if _asks_for_json(arguments):
        with contextlib.suppress(CommandError):  # it may be what is told of
            say_json({"error": told})
    return code


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """A guess, for when the parser has read nothing, or complains."""
    command, *rest = arguments
    words = iter(rest)
    for word in words:
        if word == "--json":
            return True
        if command == "run" and word in TAKE_A_VALUE:
            next(words, None)
        elif command == "run" and not word.startswith("-"):  # the script: the rest is its own
            return False
    return False
