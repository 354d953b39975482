"""What a warm launcher starts is warm too: ranks of ``stretto run`` and of torchrun, at the cost of a fork.

torch's launcher starts each rank by ``subprocess.Popen``, which imports torch anew. In a program of warm_programs.py
the launcher forks instead, since ranks must be its own children. A rank forgets what the launcher has set up, has the
script for its main module, and ends as children of ``multiprocessing`` do: its exit handlers run, and then it is gone.
How an interpreter ends is seen by the programs that no launcher starts.
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
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from stretto.cli.launch import _TIED_TO_US

FILTERS = list(warnings.filters)


def use() -> None:
    """From here on launchers of this process fork."""
    SubprocessHandler._popen = _popen


def _popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = args[6:] if args[4:5] == (_TIED_TO_US,) else args[1:]
    if args[0] != sys.executable or command[0] != "-u":
        return _cold(handler, args, env)
    return Rank(command, env=env, stdout=handler._stdout, stderr=handler._stderr)


_cold = SubprocessHandler._popen


class Rank(subprocess.Popen):
    """As ``Popen(args, start_new_session=True, ...)`` of this interpreter, unbuffered."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        env, said, complained = others[5], others[12], others[14]
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become([*args[1:]], env, said, complained)
        self._child_created = True


def _become(args: list[str], env: dict[str, str], said: int, complained: int) -> NoReturn:
    code = 1
    try:
        _forget_launcher(env, said, complained)
        code = _run(args)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _forget_launcher(env: dict[str, str], said: int, complained: int) -> None:
    warm_spawn.die_with_parent()
    os.setsid()
    for fd, place in ((said, 1), (complained, 2)):
        if fd >= 0:
            os.dup2(fd, place)
    os.closerange(3, 1024)
    sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    sys.stdout.reconfigure(write_through=True)
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
