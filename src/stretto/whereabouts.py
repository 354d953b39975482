"""Who a rank is as a process, whether it still lives, and where in its program it is."""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch.distributed import c10d_logger, distributed_c10d

from .transport.base import Transport
from .transport.life import is_over, is_stopped, started_at
from .wording import name_list

_LIBRARIES = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
IN_TORCHS = "in torch.distributed."
"""Where a rank stands that waits in a collective of torch's; the name follows."""
_FOR_ALL = ("barrier", "all_", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base")
"""How the names of those begin that nobody gets through before all ranks of the group have come."""
_FROM_ONE = ("broadcast", "scatter")
"""How the names of those begin that nobody gets through before one rank has come, whose tensor it is."""
_WRITTEN = {"__enter__": "trace", "__init__": "DistributedDataParallel"}
"""What the user has written, for the method that Python calls."""
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True)
class Person:
    """A rank as a process: the kernel and pid namespace it lives in, and what tells it from a later one of its pid."""

    host: str
    pid: int
    started: str
    thread: int
    name: str
    """Random: tells it from all others, and from this process after it was without a handle for a while."""

    def is_dead(self) -> bool:
        """Whether it is known to have ended; nothing is known of other hosts, or without /proc."""
        return self.is_here() and is_over(self.pid, self.started)

    def is_stopped(self) -> bool:
        """Whether it is known to be stopped until it is continued from outside."""
        return self.is_here() and is_stopped(self.pid)

    def is_here(self) -> bool:
        """Whether it is known to be of this host."""
        return bool(self.host) and self.host == _host()

    def shares_network(self) -> bool:
        """Whether it is known to have this process's addresses, ``127.0.0.1`` too: a container may have its own."""
        try:
            return os.readlink(f"/proc/{self.pid}/ns/net") == os.readlink("/proc/self/ns/net")
        except OSError:
            return False


def myself() -> Person:
    """This process, and the thread that calls."""
    return Person(_host(), os.getpid(), started_at(os.getpid()), threading.get_ident(), secrets.token_hex(8))


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


# Places


def is_users(file: str) -> bool:
    """Whether it is neither of a library, Python's own included, nor made up, as ``<string>``."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (file.startswith(("<", *_LIBRARIES)) or standard)


def _is_packages(file: str) -> bool:
    """Whether it is of an installed package: in ``site-packages``, or Debian's ``dist-packages``."""
    return "-packages" + os.sep in file


def _describe(file: str, line: int, function: str) -> str:
    return f"{base_name(file)}:{line} in {function}"


def base_name(file: str) -> str:
    """The last part of a path, fit for a store, which refuses what Python has for bytes that it cannot decode."""
    return os.path.basename(file).encode(errors="surrogateescape").decode(errors="replace")


def others_work() -> bool:
    """Whether another thread of this process is in the user's code, and so may call what this one does not.

    Daemons too (``multiprocessing.pool.ThreadPool``), but not those of installed packages, which mostly show progress:
    a pool that a framework has by itself is not seen.
    """
    frames = sys._current_frames()
    if _users(frames.pop(threading.get_ident(), None)) is None:  # the engine's own: who called backward waits for it
        graph = torch.autograd.graph.__file__
        frames = {one: frame for one, frame in frames.items() if frame.f_code.co_filename != graph}
    files = (one.f_code.co_filename for frame in frames.values() for one, _ in traceback.walk_stack(frame))
    return any(is_users(file) and not _is_packages(file) for file in files)


def place_of_frame(frame: FrameType | None) -> str:
    """The innermost line that the user wrote, ``train.py:34 in step``; of a library, where there is none.

    One of an installed package (a progress bar, a trainer) does not say where in the program it is: the user's own line
    that led there follows. It does not replace it, since the program itself may be installed, and begin in a script.
    """
    if (found := _users(frame) or frame) is None:
        return "an unknown place"
    own, place = _users(found, installed=False), _at(found)
    return place if own is None or own is found else f"{place} (from {_at(own)})"


def _at(frame: FrameType) -> str:
    return _describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _users(frame: FrameType | None, *, installed: bool = True) -> FrameType | None:
    """The innermost frame that is the user's, if any is; ``installed``: or that of a package."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file) and (installed or not _is_packages(file)):
            break
        frame = frame.f_back
    return frame


def standing(frame: FrameType | None) -> str:
    """``at train.py:34 in step``; ``in report() at ...`` where that line calls this library, or a collective."""
    innermost = frame
    while frame is not None and frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES[1]):
        return "at the end of its program"  # where the interpreter calls what is left to do
    if (call := _called(innermost)) is None:
        return f"at {place_of_frame(innermost)}"
    name = call.f_code.co_name
    begins = IN_TORCHS + name if _is_torchs(call) else f"in {_WRITTEN.get(name, name)}"
    return f"{begins}() at {place_of_frame(innermost)}"


def awaited_in_torchs(frame: FrameType | None) -> tuple[list[int], int | None]:
    """Ranks, of all, that are to make the collective of torch's in which this rank waits, this one too; or none.

    And the one of them whose tensor all are to receive, if it is such a collective: only that one is waited for.
    """
    call = _called(frame)
    if call is None or not _is_torchs(call) or not call.f_code.co_name.startswith((*_FOR_ALL, *_FROM_ONE)):
        return [], None
    try:
        ranks = distributed_c10d.get_process_group_ranks(call.f_locals.get("group"))
        if call.f_code.co_name.startswith(_FOR_ALL):
            return ranks, None
        return ranks, ranks[call.f_locals["group_src"]]
    except (LookupError, RuntimeError, TypeError, ValueError):  # no group, or just destroyed; no source so far
        return [], None


def _called(frame: FrameType | None) -> FrameType | None:
    """What the innermost line of the user's calls: of this library, or a collective of torch's; else None."""
    call = None
    while frame is not None and not is_users(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if _is_torchs(frame) or file.startswith(_LIBRARIES[1]):
            call = frame
        elif file.startswith(_LIBRARIES[0]) and file != c10d_logger.__file__:
            call = None  # backward, say, and its hooks; that logger wraps each collective
        frame = frame.f_back
    return None if frame is None else call


def _is_torchs(call: FrameType) -> bool:
    return call.f_code.co_filename == distributed_c10d.__file__


def place_of_traceback(trace: TracebackType | None) -> str:
    """The same line of where an exception was raised, a package's or the user's; empty where that is not known."""
    place, users = "", False
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        if (own := is_users(code.co_filename)) or not users:
            place, users = _describe(code.co_filename, line, code.co_name), own
    return place


def place_of_failure(trace: TracebackType | None, frame: FrameType | None) -> str:
    """That of an exception that is still on its way up through ``frame``, whose callers may be the user's."""
    users = [one for one, _ in traceback.walk_tb(trace) if is_users(one.f_code.co_filename)]
    above = None if users else _users(frame)
    return place_of_traceback(trace) if above is None else place_of_frame(above)


def of_group(transport: Transport) -> str:
    """Its process group, to follow a noun; empty for the default group, whose ranks need no translation."""
    ranks = transport.global_ranks
    return "" if [*ranks] == [*range(len(ranks))] else f" over process group [{name_list(map(str, ranks))}]"
