"""``stretto run``: a script on several ranks of this host."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..cores import threads_per_rank
from .console import AsJson, CommandError, note, say_json
from .ranks import check_descriptors, check_room, number_of_ranks

_USAGE = 2
"""Exit code of a program that is given an unknown option."""
_RANKS = ("--ranks", "-n", "--nproc-per-node", "--nproc_per_node")
_OPTIONS = (*_RANKS, "--json")
_HOSTS = ("--nnodes", "--node-rank", "--node_rank")
_MEETING = tuple(
    f"--{part}{mark}{rest}"
    for part, rests in (("rdzv", ("backend", "endpoint", "id", "conf")), ("master", ("addr", "port")))
    for rest in rests
    for mark in "-_"
)
"""torchrun's options for several hosts, and for where the ranks of one host meet."""
TAKE_A_VALUE = (*_RANKS, *_HOSTS, *_MEETING)
"""Options whose value follows as a word of its own, which is not the script."""


def _refuse_hosts(value: str | None) -> None:
    if value not in (None, "0", "1", "1:1"):
        raise CommandError(
            "stretto run starts ranks on this host only. For several hosts, run on each: torchrun --nnodes 2 "
            "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 script.py"
        )


def _refuse_meeting(value: str | None) -> None:
    if value is not None:
        raise CommandError("ranks on one host find each other by themselves: leave out --rdzv-... and --master-...")


def run(
    program: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the script unchanged.")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            *_RANKS,
            metavar="N|auto|cpu|gpu|xpu",
            help="Number of ranks, all on this host; auto: one for each accelerator, or core where there is none.",
        ),
    ] = "2",
    module: Annotated[bool, typer.Option("--module", "-m", help="PROGRAM is a module, as for python -m.")] = False,
    as_json: AsJson = False,
    _hosts: Annotated[str | None, typer.Option(*_HOSTS, hidden=True, callback=_refuse_hosts)] = None,
    _meeting: Annotated[str | None, typer.Option(*_MEETING, hidden=True, callback=_refuse_meeting)] = None,
    _standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
) -> int:
    """Run a script on several ranks of this host. Options come before the script.

    Started by torchrun's own launcher, so RANK, WORLD_SIZE and the rest are set. OMP_NUM_THREADS is set, unless it is
    set already, so that the threads of all ranks add up to the cores. Each line is printed with its rank before it.
    When a rank fails, all are ended, its traceback is printed last, and its exit code (or 128 + signal) is that of the
    command.
    """
    count = number_of_ranks(ranks)
    named = program if module or not program.startswith("-") else os.path.join(".", program)  # else python's own option
    command = [*(["-m"] if module else []), named, *(arguments or [])]
    if sys.platform == "win32":
        line = f"--nproc-per-node {count} {' '.join(command)}"
        raise CommandError(f"stretto run does not work on Windows: use torchrun {line}")
    check_room(count)
    check_descriptors(count)
    _check(program, module)
    from .launch import launch, signal_name  # torch's launcher takes a while to import

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(count)))
    sys.stdout.flush()
    out = sys.stderr.buffer if as_json else sys.stdout.buffer
    began = time.monotonic()
    outcome = launch(command, count, out, sys.stderr.buffer)
    if outcome.stopped_by is not None:
        note(f"stopped by {signal_name(outcome.stopped_by)}; all ranks have ended")
    elif (failure := outcome.failure) is not None:
        told = f"rank {failure.rank} failed first ({failure.how}, pid {failure.pid}); all were ended"
        if failure.starved:
            told += (
                "\n"
                "Meanwhile the kernel has killed a process on this machine because memory ran out, most likely this "
                "one (see dmesg). Smaller batches, fewer ranks per machine, or stretto.shard(optimizer, sync) need "
                "less."
            )
        if failure.exit_code == _USAGE and (ours := [one for one in arguments or () if one.split("=")[0] in _OPTIONS]):
            told += f"\n{ours[0]} comes after the script, which got it: write stretto run {ours[0]} ... {program}"
        note(told + (f"\n--- traceback of rank {failure.rank} ---\n{failure.traceback}" if failure.traceback else ""))
    if as_json:
        first = asdict(outcome.failure) if outcome.failure else None
        seconds = time.monotonic() - began
        say_json({"ranks": count, "exit_code": outcome.code, "seconds": seconds, "first_failure": first})
    return outcome.code


def _check(program: str, module: bool) -> None:
    if not module:
        path = Path(program)
        if not path.is_file() and not (path / "__main__.py").is_file():  # python runs folders too
            raise CommandError(f"{program}: {_why_not(path)}")
        return
    if program.endswith(".py"):  # find_spec would run side.py in search of a module py in it
        raise CommandError(f"{program} is a script, but -m takes a module: leave out -m")
    sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(program.partition(".")[0])  # of a submodule it would run the package here
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise CommandError(f"there is no module {program!r}")


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "a folder without a __main__.py to run"
    script, colon, name = str(path).partition(".py:")
    if colon and Path(f"{script}.py").is_file():
        return f"no such script; a function such as {name} is for stretto plan and stretto bench"
    return "no such script"
