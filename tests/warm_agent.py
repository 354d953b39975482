"""Programs of Python that a warm program starts are warm too: launchers, and the ranks that these start.

``subprocess.Popen`` would import torch anew. In a program of warm_programs.py it forks instead: launchers look for
children of their own. The child forgets what its parent has set up, has the script for its main module, and ends as
those of ``multiprocessing`` do: its exit handlers run, and then it is gone. How an interpreter ends is seen by programs
that no other starts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
import warnings
from typing import Any, NoReturn

import warm_spawn
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from stretto.cli.launch import _TIED_TO_US

FILTERS = list(warnings.filters)


def use() -> None:
    """From here on programs that this process starts are forks of it."""
    subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc]


class Popen(subprocess.Popen):
    """Another program is started as ever, and so is Python with other options than ``-u``."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        command = [*map(str, args)] if isinstance(args, list | tuple) else [args]
        tied = command[4:5] == [_TIED_TO_US]
        words = command[6:] if tied else command[1:]
        if command[0] != sys.executable or not words or not (words[0] in ("-u", "-m") or words[0].endswith(".py")):
            return super()._execute_child(args, *others)
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(words, *others, tied=tied)
        self._child_created = True
        self._close_pipe_fds(*others[9:15])


def _become(args: list[str], *others: Any, tied: bool) -> NoReturn:
    code = 1
    try:
        if tied:
            warm_spawn.die_with_parent()
        if others[20]:
            os.setsid()
        os.chdir(others[4] or ".")
        _forget_parent(os.environ.copy() if others[5] is None else others[5], (others[9], others[12], others[14]))
        if args[0] == "-u":
            sys.stdout.reconfigure(write_through=True)
        code = _run(args[args[0] == "-u" :])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _forget_parent(env: dict[str, str], streams: tuple[int, int, int]) -> None:
    for place, fd in enumerate(streams):
        if fd >= 0:
            os.dup2(fd, place)
    os.closerange(3, 1024)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, "rww"[fd], 1, closefd=False) for fd in range(3))  # noqa: SIM115
    for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    logging.disable(logging.NOTSET)
    warnings.filters[:] = FILTERS
    os.environ.clear()
    os.environ.update(env)
    warm_spawn.set_threads()


def _run(args: list[str]) -> int:
    """The exit code."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if args[0] == "-m":
            sys.argv, sys.path[0] = args[1:], os.getcwd()
            runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]
        else:
            sys.argv, sys.path[0], main.__file__ = args, os.path.dirname(os.path.abspath(args[0])), args[0]
            with open(args[0], "rb") as file:
                code = compile(file.read(), args[0], "exec", dont_inherit=True)
            exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        return 1
    return 0
