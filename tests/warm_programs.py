"""Programs as a user starts them, at the cost of a fork: an interpreter that has imported torch becomes the program.

    program = start([script, "--epochs", "2"])           # as ``python script --epochs 2``; also -c and -m
    output, complaint = program.communicate(timeout=50)

To import torch takes seconds of a core, for every rank of every test. So one interpreter does it, once, and forks at
its outermost line: the child runs the program there and ends as any other does, through the interpreter's own end,
with its exit handlers, its traceback and its exit code. What it spawns is forked too (warm_spawn.py). What a program
imports first, and the interpreter's options
(``-W``, ``-X``), need a real start.

At its end torch takes its operators apart, one by one, on pages that a fork must copy first: a third of a second. So,
unless a program goes ``to_the_end``, modules that were there before it are left as they are, but for those of
torch.distributed and stretto, and C++ takes nothing apart.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

import warm_spawn

PRELOAD = ["stretto.testing", "torch._dynamo", "torch.utils.data", "torch.distributed.optim", "matplotlib.figure"]
PRELOAD += ["warm_hosts", "warm_agent", "stretto.cli", "torch.distributed.run"]
PRELOAD += ["sklearn.datasets", "sklearn.model_selection"]  # of the examples
_interpreter: tuple[subprocess.Popen[bytes], socket.socket] | None = None


class Program:
    """What of ``subprocess.Popen`` the tests need. Output goes to files, so that nobody has to read meanwhile.

    Args:
        arguments: what would follow ``python``.
        env: its environment; default, that of now.
        cwd: where it runs; default, here.
        says_here: it writes where this process does, and there is nothing to ``communicate``.
        to_the_end: all that it has is taken apart at its end, torch too.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: object = None,
        *,
        says_here: bool = False,
        to_the_end: bool = False,
    ) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self._output: list[IO[str]] = []
        if not says_here:
            self._output = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # until it was read
        self._news, theirs = os.pipe()
        request = {"args": self.args, "env": dict(os.environ if env is None else env), "cwd": str(cwd or os.getcwd())}
        request["to the end"] = to_the_end
        text = json.dumps(request).encode()
        fds = [*([1, 2] if says_here else [file.fileno() for file in self._output]), theirs]
        control = _running()
        socket.send_fds(control, [len(text).to_bytes(4, "little")], fds)
        control.sendall(text)
        os.close(theirs)
        self.pid = self._hear(60.0)

    def _hear(self, seconds: float | None) -> int:
        ready = select.poll()
        ready.register(self._news, select.POLLIN)
        if not ready.poll(None if seconds is None else 1000 * seconds):
            raise subprocess.TimeoutExpired(self.args, seconds or 0.0)
        told = os.read(self._news, 8)
        assert told, "the warm interpreter has died"
        return int.from_bytes(told, "little", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            self.returncode = self._hear(timeout)
            os.close(self._news)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait; what it has printed, and what it has complained of."""
        self.wait(timeout)
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return texts[0], texts[1]

    def complaint(self) -> str:
        """What it has complained of until now."""
        return os.pread(self._output[1].fileno(), 1_000_000, 0).decode()  # the place where it writes on is the file's

    def kill(self) -> None:
        """Harmless to one that has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(20)
        for file in self._output:
            file.close()


def start(
    arguments: Sequence[object],
    env: Mapping[str, str] | None = None,
    cwd: object = None,
    *,
    says_here: bool = False,
    to_the_end: bool = False,
) -> Program:
    """Start ``python *arguments``."""
    return Program(arguments, env, cwd, says_here=says_here, to_the_end=to_the_end)


def run(
    arguments: Sequence[object],
    *,
    timeout: float = 110.0,
    env: Mapping[str, str] | None = None,
    cwd: object = None,
    to_the_end: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``."""
    program = start(arguments, env, cwd, to_the_end=to_the_end)
    try:
        said, complained = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        sys.stderr.write(program.complaint())  # it may say what it waits for
        raise
    finally:
        program.kill()
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.args, program.returncode, said, complained)


def run_ranks(
    arguments: Sequence[object], world: int, *, timeout: float = 60.0, cwd: object = None, to_the_end: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """The same program on every rank, with the variables that torchrun gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    programs = [start(arguments, os.environ | shared | mine, cwd, to_the_end=to_the_end) for mine in own]
    try:
        said = [program.communicate(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [
        subprocess.CompletedProcess(program.args, program.wait(), *texts)
        for program, texts in zip(programs, said, strict=True)
    ]


def _running() -> socket.socket:
    global _interpreter
    if _interpreter is None or _interpreter[0].poll() is not None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        path = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path})
        theirs.close()
        _interpreter = process, ours
    return _interpreter[1]


def stop() -> None:
    """End the interpreter, if there is one."""
    global _interpreter
    if _interpreter is not None:
        process, control = _interpreter
        control.close()
        process.wait(20)
        _interpreter = None


# In the interpreter


def _become_one() -> tuple[Any, dict[str, Any]]:
    """Fork for every request; returns in the children alone, with the program and the names of its ``__main__``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    left_alone: list[str] = []
    atexit.register(_forget, left_alone)  # first, so the last to be called
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # else each child's collector touches, and so copies, all of torch's modules
    server = warm_spawn.serve()
    ready = select.poll()
    ready.register(control, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}  # by pidfd: pid, where its end is told
    while True:
        for fd, _ in ready.poll():
            if fd != control.fileno():
                pid, news = children.pop(fd)
                ready.unregister(fd)
                os.close(fd)
                with contextlib.suppress(BrokenPipeError):
                    os.write(news, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]).to_bytes(8, "little", signed=True))
                os.close(news)
                continue
            head, fds, _, _ = socket.recv_fds(control, 4, 3)
            if not head:
                os._exit(0)  # the tests are over; children follow
            request = json.loads(_exactly(control, int.from_bytes(head, "little")))
            said, complained, news = fds
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                for one in [*children, *(other for _, other in children.values()), news]:
                    os.close(one)
                control.close()
                if not request["to the end"]:
                    left_alone += _leave_alone()
                return _prepare(request, said, complained, parent, server)
            os.write(news, pid.to_bytes(8, "little", signed=True))
            os.close(said), os.close(complained)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, news
            ready.register(pidfd, select.POLLIN)


def _leave_alone() -> list[str]:
    """Names of modules that are not taken apart, and C++ is not either."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called before what was registered when torch was loaded, with the exit code
    names = [name for name in sys.modules if name.partition(".")[0] not in KEPT and not name.startswith("torch.distr")]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([sys.modules[name] for name in names]))
    return names


KEPT = {"__main__", "stretto", *sys.stdlib_module_names}


def _forget(names: list[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)


def _exactly(control: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        text += control.recv(length - len(text))
    return text


def _prepare(
    request: dict[str, Any], said: int, complained: int, parent: int, server: warm_spawn.Server
) -> tuple[Any, dict[str, Any]]:
    warm_spawn.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(said, 1), os.dup2(complained, 2)
    os.close(said), os.close(complained)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    warm_spawn.set_threads()
    warm_spawn.use(server, request["cwd"])
    sys.modules["warm_agent"].use()
    warm_hosts = sys.modules["warm_hosts"]
    warm_hosts.EmulatedHosts._start_rank = warm_hosts.start_spawned
    kind, *rest = request["args"]
    if kind in ("-c", "-m"):
        text = rest[0] if kind == "-c" else f"__import__('runpy')._run_module_as_main({rest[0]!r})"
        sys.argv, sys.path[0], path = [kind, *rest[1:]], "" if kind == "-c" else os.getcwd(), "<string>"
    else:
        with open(kind) as file:
            text = file.read()
        sys.argv, sys.path[0], path = [kind, *rest], os.path.dirname(os.path.abspath(kind)), kind
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # a new one, held by nobody else: it dies as ever
    if path != "<string>":
        module.__file__ = path
    return compile(text, path, "exec", dont_inherit=True), module.__dict__


if __name__ == "__main__":
    exec(*_become_one())
