"""The command line, run as a user runs it; and bad input, which is one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import tty
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_programs
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import stretto
from stretto.analysis import breakdown_of
from stretto.cli import agent, execute, launched
from stretto.cli.agent import Agent, Ends
from stretto.cli.console import CommandError, write
from stretto.cli.demo import ENOUGH
from stretto.cli.digits import drawn_digits, train_once
from stretto.cli.doctor import Findings, _network, _speed, advise, faults
from stretto.cli.launch import Failure, first_failure
from stretto.cli.launched import Launched, RanksOfHost, is_launched
from stretto.cli.link import Link, parse_bandwidth, parse_latency
from stretto.cli.machine import Interface, look_at_machine
from stretto.cli.ranks import number_of_ranks
from stretto.cli.reach import GlooInterface, Reached, reach_the_store, what_gloo_chooses
from stretto.cli.speed import Speed, Timing, _transports
from stretto.cli.streams import Streams, Traceback, last_traceback
from stretto.cores import cores
from stretto.system_memory import control_groups
from stretto.testing import run_ranks
from stretto.testing_network import INTERFACE, EmulatedHosts, SeparateHosts
from stretto.trace import read_trace

ROOT = Path(__file__).parent.parent


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return warm_programs.run(["-m", "stretto", *arguments], **options)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


# stretto run


def test_run_gives_ranks_arguments_threads_and_prefixes(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, dist.get_rank())
        print(sys.argv[1:], every, os.environ["OMP_NUM_THREADS"])
        print("to stderr, without a newline", end="", file=sys.stderr)
        dist.destroy_process_group()
        """,
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = command("run", "--ranks", 2, path, "--ranks", "7", "-m", env=env)
    threads = max(1, cores() // 2)
    text = f"['--ranks', '7', '-m'] [0, 1] {threads}"
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"[rank 0] {text}", f"[rank 1] {text}"])
    assert sorted(done.stderr.splitlines()) == [f"[rank {n}] to stderr, without a newline" for n in (0, 1)]


CRASHES = {
    "raises": ("raise ValueError('boom')", 1, "exit code 1", "ValueError: boom"),
    "exits at once": ("os._exit(7)", 7, "exit code 7", ""),
    "exits": ("sys.exit(7)", 7, "exit code 7", ""),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL", ""),
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", CRASHES)
def test_run_names_the_rank_that_failed_first(tmp_path: Path, what: str) -> None:
    """Also where the other one notices, raises and ends before it."""
    crash, code, how, last = CRASHES[what]
    path = script(
        tmp_path,
        f"""
        import os, signal, sys, torch, stretto
        import torch.distributed as dist

        class Crash(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                {crash}

        dist.init_process_group("gloo")
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model)
        model(torch.ones(1, 2)).sum().backward()
        x = torch.ones(1, 2, requires_grad=True)
        model(Crash.apply(x) if dist.get_rank() else x).sum().backward()
        """,
    )
    done = command("run", "--ranks", 2, "--json", path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"], told["ranks"]) == (code, code, 2)
    failure = Failure(**told["first_failure"])
    assert (failure.rank, failure.how, failure.code) == (1, how, code)
    lines = done.stderr.splitlines()
    told_at = lines.index(f"stretto: rank 1 failed first ({how}, pid {failure.pid}); all were ended")
    assert lines[told_at + 1 :] == (
        ["--- traceback of rank 1 ---", *failure.traceback.splitlines()] if failure.traceback else []
    )
    assert failure.traceback.endswith(last)


@pytest.mark.ranks
@pytest.mark.parametrize("option", ["--ranks", "--ranks=1", "--steps"])
def test_run_says_that_an_option_of_its_own_stands_behind_the_script(tmp_path: Path, option: str) -> None:
    path = script(tmp_path, "import argparse; argparse.ArgumentParser().parse_args()")
    done = command("run", "--ranks", 1, path, option)
    assert done.returncode == 2
    told = f"\n{option} comes after the script, which got it: write stretto run {option} ... {path}"
    assert (told in done.stderr) is ("ranks" in option)


@pytest.fixture
def narrow_group(tmp_path: Path) -> Iterator[Path]:
    """A control group in which a process can have 200 MiB."""
    limits = [limit for limit, _, _ in control_groups() if limit.exists()]
    if not limits:
        pytest.skip("no control group limits memory here")
    group = limits[0].parent / tmp_path.name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name, most in ((limits[0].name, "200M"), ("memory.swap.max", "0"), ("memory.memsw.limit_in_bytes", "200M")):
            if (file := group / name).exists():
                file.write_text(most)
            elif name == limits[0].name:
                pytest.skip("the control group has no memory controller")
        yield group
    finally:
        group.rmdir()


@pytest.mark.alone  # the kernel counts for the whole machine whom it has killed
@pytest.mark.ranks
def test_run_says_that_memory_was_short(tmp_path: Path, narrow_group: Path) -> None:
    path = script(
        tmp_path,
        f"""
        import os, time
        if os.environ["RANK"] == "1":
            open("{narrow_group}/cgroup.procs", "w").write("0")
            taken = bytearray(os.urandom(1024)) * 2**19
        time.sleep(60)
        """,
    )
    done = command("run", "--ranks", 2, "--json", path)
    failure = Failure(**json.loads(done.stdout)["first_failure"])
    assert (done.returncode, failure.rank, failure.how, failure.starved) == (137, 1, "killed by SIGKILL", True)
    assert done.stderr.splitlines()[-2:] == [
        f"stretto: rank 1 failed first (killed by SIGKILL, pid {failure.pid}); all were ended",
        "Meanwhile the kernel has killed a process on this machine because memory ran out, most likely this one "
        "(see dmesg). Smaller batches, fewer ranks per machine, or stretto.shard(optimizer, sync) need less.",
    ]


def test_run_ends_all_with_ctrl_c_and_even_when_it_is_killed(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, time\nprint(os.getpid())\ntime.sleep(60)")
    for sent, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        line = [sys.executable, "-m", "stretto", "run", "--ranks", "2", str(path)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None and launcher.stderr is not None
            pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
            launcher.send_signal(sent)
            assert launcher.wait(30) == code
            until = time.monotonic() + 10
            while any(alive(pid) for pid in pids) and time.monotonic() < until:
                time.sleep(0.01)
            assert not any(alive(pid) for pid in pids)
            if sent == signal.SIGINT:
                assert "stretto: stopped by SIGINT; all ranks have ended" in launcher.stderr.read().splitlines()


def test_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import os, signal\nprint(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\ninput()\nprint('done')"
    )
    run = [sys.executable, "-m", "stretto", "run", "--ranks", "1", str(path)]
    line = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *run]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, text=True, **pipes) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "[rank 0] True\n"
        launcher.send_signal(signal.SIGHUP)
        assert launcher.communicate("go on\n", 60) == ("[rank 0] done\n", "")
        assert launcher.returncode == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.ranks
def test_a_rank_that_is_stopped_keeps_no_run_from_its_end(tmp_path: Path) -> None:
    """The signal by which torch ends ranks waits until the rank goes on, and torch for the rank, 30 s."""
    path = script(
        tmp_path,
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
        raise ValueError("bad label")
        """,
    )
    began = time.monotonic()
    done = command("run", "--ranks", 2, "--json", path)
    assert json.loads(done.stdout)["first_failure"]["rank"] == 0
    assert time.monotonic() - began < 25


def test_a_rank_that_ignores_ctrl_c_is_named_and_a_second_one_kills_it(tmp_path: Path) -> None:
    """Torch waits for it 30 s, and after a second Ctrl-C would wait 30 s more."""
    text = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid())\ntime.sleep(80)"
    line = [sys.executable, "-m", "stretto", "run", "--ranks", "1", str(script(tmp_path, text))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        pid = int(launcher.stdout.readline().split()[-1])
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr.readline() == (
            f"stretto: still running 3 s after SIGINT: rank 0 (pid {pid}); killed 30 s after it, or now if you press "
            "Ctrl-C\n"
        )
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(15) == 130
        assert not alive(pid)
        assert launcher.stderr.read() == "stretto: stopped by SIGINT; all ranks have ended\n"


def test_a_second_signal_soon_after_the_first_is_the_same_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a wrapper that passes on what the terminal has sent already: ranks may be saving."""
    sent: list[signal.Signals] = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda _, number, timeout: sent.append(number))
    monkeypatch.setattr(Agent, "_running", lambda _: {})
    one: Any = Agent.__new__(Agent)
    one._first_end = None
    monkeypatch.setattr(agent, "TWICE", 1e9)
    one._shutdown(signal.SIGINT)
    one._shutdown()
    monkeypatch.setattr(agent, "TWICE", -1.0)
    one._shutdown()
    assert sent == [signal.SIGINT, signal.SIGINT, signal.SIGKILL]


def test_a_script_whose_name_begins_with_a_dash_is_no_option_of_python(tmp_path: Path) -> None:
    (tmp_path / "-c").write_text("import sys\nprint(sys.argv)")
    done = command("run", "--ranks", 1, "--", "-c", "-v", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[rank 0] ['./-c', '-v']\n")


def test_run_takes_modules(tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint(__name__, sys.argv[1:])")
    done = command("run", "--nproc-per-node", 1, "-m", "script", "--ranks", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[rank 0] __main__ ['--ranks']\n")


def test_a_package_is_imported_by_the_ranks_alone(tmp_path: Path) -> None:
    """It may read what only ranks have, and print."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import os\nprint('rank', os.environ['RANK'])")
    (tmp_path / "package" / "train.py").write_text("print('trained')")
    done = command("run", "--ranks", 1, "--json", "-m", "package.train", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "[rank 0] rank 0\n[rank 0] trained\n")
    assert json.loads(done.stdout)["exit_code"] == 0


def test_all_that_ranks_print_has_been_read_when_a_run_ends(tmp_path: Path) -> None:
    """To the end of their pipes: nobody else may hold them, or each run would wait in vain for more."""
    program = """
        import sys, threading
        from stretto.cli import launch, streams
        close = streams.Streams.close
        def watched(self):
            close(self)
            print([one.name for one in threading.enumerate() if one.name.startswith("what rank")])
        streams.Streams.close = watched
        assert launch.launch(["hi.py"], 2, sys.stdout.buffer, sys.stderr.buffer).code == 0
    """
    script(tmp_path, program)
    (tmp_path / "hi.py").write_text("")
    done = warm_programs.run(["script.py"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_run_needs_no_proc(tmp_path: Path) -> None:
    """It may be missing in a container or a chroot, and an open descriptor has no path then."""
    script(tmp_path, "import sys\nprint('fine')\nprint('here', file=sys.stderr)")
    hidden = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"']
    if subprocess.run([*hidden, "sh", "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here")
    line = [sys.executable, "-m", "stretto", "run", "-n", "1", "script.py"]
    done = subprocess.run([*hidden, "sh", *line], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[rank 0] fine\n", "[rank 0] here\n")


def test_run_refuses_what_there_are_no_descriptors_for(tmp_path: Path) -> None:
    """torch's store waited for more than a minute for those that it did not get, and said nothing."""
    script(tmp_path, "")
    line = f"ulimit -n 16; '{sys.executable}' -m stretto run -n 2 script.py"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    told = re.sub(r"\d+ of 16", "? of 16", done.stderr.removeprefix("stretto: "))
    assert told.splitlines() == ["--ranks 2: needs 34 more open files, and ? of 16 are left (ulimit -n)"]
    assert done.returncode == 2


@pytest.mark.parametrize(
    "given, device, count",
    [
        ("auto", "cuda", 8),
        ("gpu", "cuda", 8),
        ("xpu", "xpu", 8),
        ("cpu", "cuda", cores()),
        ("auto", None, cores()),
        ("3", "cuda", 3),
        ("gpu", "xpu", 0),
        ("gpu", None, 0),
        ("xpu", "cuda", 0),
    ],
)
def test_a_rank_for_each_device(given: str, device: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    if count:
        assert number_of_ranks(given) == count
        return
    with pytest.raises(CommandError) as refused:
        number_of_ranks(given)
    assert str(refused.value) == f"--ranks {given}: torch finds no such device here"


def read_until(fd: int, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        assert select.select([fd], [], [], 10)[0], f"{end!r} has not come after {found!r}"
        found += os.read(fd, 1000)
    return found


def test_progress_bars_are_forwarded_state_by_state() -> None:
    here, there = os.pipe()
    with open(there, "wb", buffering=0) as sink:
        streams = Streams(1, sink, sink)
        with open(streams.out[0].handed_out(), "wb", buffering=0) as out:
            out.write(b"\r1/3\r2/3\r3/")
            assert read_until(here, b"2/3\r") == b"[rank 0] 1/3\r[rank 0] 2/3\r"
            out.write(b"3\r\nfine\r")
            assert read_until(here, b"3/3\n") == b"[rank 0] 3/3\n"
            out.write(b"\n\rleft")
        streams.close()
    assert read_until(here, b"left\n") == b"[rank 0] fine\n[rank 0] left\n"
    os.close(here)


def test_a_terminal_shows_prompts_and_bars_below_the_lines_of_others() -> None:
    here, there = os.openpty()
    tty.setraw(there)
    again = b"\r\x1b[K"
    with open(there, "wb", buffering=0) as sink:
        streams = Streams(2, sink, sink)
        with (
            open(streams.out[0].handed_out(), "wb", buffering=0) as out,
            open(streams.err[1].handed_out(), "wb", buffering=0) as other,
        ):
            out.write(b"name")
            assert read_until(here, b"name") == b"[rank 0] name"
            out.write(b"? ")
            assert read_until(here, b"? ") == b"? "
            other.write(b"a line\n")
            assert read_until(here, b"? ") == again + b"[rank 1] a line\n[rank 0] name? "
            out.write(b"hello\n")
            assert read_until(here, b"\n") == b"hello\n"
            other.write(b"1/2")
            read_until(here, b"1/2")
            other.write(b"\r2/2")
            assert read_until(here, b"2/2") == again + b"[rank 1] 2/2"
            out.write(b"\r9")
            assert read_until(here, b"9") == again + b"[rank 0] 9"
            other.write(b"\n")
            assert read_until(here, b"9") == again + b"[rank 1] 2/2\n[rank 0] 9"
        streams.close()
        assert read_until(here, b"\n") == b"\n"
    os.close(here)


def test_cores_that_a_container_is_given(tmp_path: Path) -> None:
    there = len(os.sched_getaffinity(0))
    assert cores(tmp_path) == there
    for quota, expected in (("max", there), ("100000", 1), (str(there * 100_000 - 50_000), there), ("10000", 1)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert cores(tmp_path) == expected


def test_cores_of_the_groups_above_are_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.cores.Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu:/other\n0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    for group, quota, expected in (("", "800000", 8), ("job/step", "400000", 4), ("job", "200000", 2)):
        (tmp_path / group / "cpu.max").write_text(f"{quota} 100000\n")
        assert cores(tmp_path) == expected


BEGINNING = "Traceback (most recent call last):"


def test_the_last_traceback_comes_with_its_causes_and_nothing_of_cpp() -> None:
    cause = [BEGINNING, '  File "a"', "KeyError: 1", "", "During handling of the above exception, another", ""]
    lines = [BEGINNING, "OSError: logged", *cause, BEGINNING, "ValueError: 2", "[W1 a.cpp] left"]
    found = last_traceback(lines, [float(number) for number in range(len(lines))])
    assert found == Traceback("\n".join([*cause, BEGINNING, "ValueError: 2"]), 2.0)
    assert last_traceback(["fine"], [0.0]) is None


def test_a_group_of_exceptions_has_a_traceback_too() -> None:
    """As asyncio's ``TaskGroup`` raises; what it holds may only say that another rank has failed."""
    cause = [BEGINNING, "KeyError: 1", "", "During handling of the above exception, another", ""]
    group = [f"  + Exception Group {BEGINNING}", '  |   File "a"', "  | ExceptionGroup: x (1 sub-exception)"]
    held = ["  +-+---------------- 1 ----------------", f"    | {BEGINNING}", "    | ValueError: x"]
    lines = [*cause, *group, *held, "    +------------------------------------"]
    found = last_traceback(lines, [0.0] * len(lines))
    assert found == Traceback("\n".join(lines), 0.0) and not found.is_consequence
    found = last_traceback([*group, *held[:2], f"    | {OF_ANOTHER}"], [0.0] * 6)
    assert found is not None and found.is_consequence


def test_a_traceback_in_colours_is_known_for_one_that_speaks_of_another() -> None:
    """As Python prints it from 3.13 on where FORCE_COLOR or PYTHON_COLORS is set."""
    with open(os.devnull, "wb") as sink:
        streams = Streams(1, sink, sink)
        with open(streams.err[0].handed_out(), "wb", buffering=0) as err:
            err.write(f"[rank0]: {BEGINNING}\n".encode())
            err.write(b'[rank0]:   File \x1b[35m"a.py"\x1b[0m, line \x1b[35m1\x1b[0m, in \x1b[35m<module>\x1b[0m\n')
            err.write(b"[rank0]: \x1b[1;35mstretto.errors.PeerError\x1b[0m: \x1b[35mx\x1b[0m\n")
        streams.close()
    told = streams.err[0].traceback()
    assert told is not None and told.is_consequence
    assert told.text.splitlines() == [BEGINNING, '  File "a.py", line 1, in <module>', OF_ANOTHER]


def test_a_script_that_is_no_python_has_a_traceback_too(tmp_path: Path) -> None:
    done = command("run", "--ranks", 2, script(tmp_path, "x = (\n"))
    *_, begins, file, line, mark, error = done.stderr.splitlines()
    assert done.returncode == 1 and re.fullmatch(r"--- traceback of rank [01] ---", begins)
    assert file == f'  File "{tmp_path}/script.py", line 1' and "^" in mark and error.startswith("SyntaxError: "), line


class Ended:
    def __init__(self, exitcode: int) -> None:
        self.exitcode, self.pid = exitcode, 5


OF_ANOTHER = "stretto.errors.PeerError: x"


@pytest.mark.parametrize(
    "codes, texts, ended, rank, code",
    [
        ({0: 1, 1: 1}, {0: (1, OF_ANOTHER), 1: (2, "ValueError: x")}, {0: 3, 1: 4}, 1, 1),
        ({0: 1, 1: 1}, {0: (2, "ValueError: x"), 1: (1, "TypeError: x")}, {0: 3, 1: 4}, 1, 1),
        ({0: 1, 1: -15}, {0: (1, OF_ANOTHER), 1: (2, "ValueError: x")}, {0: 3}, 1, 1),
        ({0: -15, 1: -15}, {}, {1: 3}, 1, 143),
        ({0: -15, 1: 3}, {0: (1, OF_ANOTHER)}, {1: 3}, 1, 3),
        ({0: 1, 1: 3}, {0: (1, OF_ANOTHER)}, {0: 2, 1: 7}, 1, 3),
        ({0: 1, 1: 3}, {0: (4, "ValueError: the other one is gone")}, {0: 5, 1: 2}, 1, 3),
        ({0: 1, 1: -15}, {0: (1, OF_ANOTHER)}, {0: 2}, 0, 1),
        ({0: 1, 1: 1}, {0: (1, OF_ANOTHER), 1: (2, "stretto.errors.CommunicationError: x")}, {0: 2, 1: 3}, 1, 1),
        (
            {0: 1, 1: -9},
            {0: (1, "RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer")},
            {0: 2, 1: 1},
            1,
            137,
        ),
    ],
)
def test_who_failed_first(codes: dict, texts: dict, ended: dict, rank: int, code: int) -> None:
    told = [Traceback(f"{BEGINNING}\n{texts[n][1]}", texts[n][0]) if n in texts else None for n in (0, 1)]
    found = first_failure({rank: Ended(code) for rank, code in codes.items()}, told, ended)
    assert (found.rank, found.code) == (rank, code)


def test_ranks_are_ended_when_the_cause_is_known_or_cannot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends, one that fails and one that stays, seen and left to be reaped."""
    lines = ["pass", "raise SystemExit(3)", "import sys; sys.exit(len(sys.stdin.read()))"]
    pipes = [subprocess.DEVNULL, subprocess.DEVNULL, subprocess.PIPE]
    commands = [[sys.executable, "-S", "-c", one] for one in lines]
    started = [subprocess.Popen(one, stdin=pipe) for one, pipe in zip(commands, pipes, strict=True)]
    pids = {rank: process.pid for rank, process in enumerate(started)}
    told: dict[int, Traceback] = {1: Traceback(f"{BEGINNING}\n{OF_ANOTHER}", 1.0)}
    ends = Ends(told.get)
    while ends.running != {2}:
        ends.look(pids)
        time.sleep(0.01)
    assert [*ends.failed] == [1] and ends.cause_may_come
    told[1] = Traceback(f"{BEGINNING}\nValueError: x", 1.0)
    assert not ends.cause_may_come
    told.clear()
    monkeypatch.setattr("stretto.cli.agent.HEARD", 1e9)
    assert ends.cause_may_come, "what it has printed may be on its way"
    monkeypatch.setattr("stretto.cli.agent.HEARD", -1.0)
    assert not ends.cause_may_come, "it has printed nothing"
    told[1] = Traceback(f"{BEGINNING}\n{OF_ANOTHER}", 1.0)
    started[2].communicate(b"four")
    assert [one.wait() for one in started] == [0, 3, 4]
    ends.look(pids)
    assert not ends.cause_may_come, "nobody is left who could be the cause"


# stretto plan


def test_plan_shows_buckets_and_costs_of_a_script(tmp_path: Path) -> None:
    script(
        tmp_path,
        "import torch\nprint('hello')\ndef net():\n    return torch.nn.Sequential(*[torch.nn.Linear(512, 512)] * 1)",
    )
    options = ("--ranks", 4, "--bandwidth", "100MB/s", "--latency", "0.5ms", "--bucket-cap-mb", 1)
    done = command("plan", "script.py:net", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "hello\n")
    assert re.search(r"^plan [0-9a-f]{16}: 2 parameters, 1.0 MB, in 2 buckets of at most 1.0 MB", done.stdout)
    assert "ring all-reduce over 4 ranks on a link of 100MB/s, 0.5ms, computed:" in done.stdout
    told = json.loads(command("plan", "script.py:net", *options, "--json", cwd=tmp_path).stdout)
    sizes = [one["bytes"] for one in told["buckets"]]
    assert sum(sizes) == told["bytes"] == (512 * 512 + 512) * 4
    assert told["seconds"] == pytest.approx(len(sizes) * 6 * 0.5e-3 + 1.5 * told["bytes"] / 100e6)
    assert stretto.BucketPlan.from_json(json.dumps(told["plan"])).hash == told["hash"]
    assert sorted(told["by_cap_mb"]) == ["0.25", "1", "25", "4"]


def test_plan_of_one_bucket(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("one_bucket.py").write_text("import torch\ndef net():\n    return torch.nn.Linear(4, 1, bias=False)")
    assert execute(["plan", "one_bucket.py:net"]) == 0
    told = capsys.readouterr().out
    assert ": 1 parameter, 16 B, in 1 bucket\n" in told
    assert "\nBackward cannot hide any of it: the only bucket leaves when backward has ended.\n" in told


def test_plan_has_no_sparse_gradients_in_buckets(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel by rows, so that the size of the table says nothing of what is sent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    table = "torch.nn.Embedding(1000, 8, sparse=True)"
    Path("words.py").write_text(
        f"import torch\ndef both():\n    return torch.nn.Sequential({table}, torch.nn.Linear(8, 2))\n"
        f"def alone():\n    return {table}"
    )
    assert execute(["plan", "words.py:both"]) == 0
    told = capsys.readouterr().out
    assert ": 2 parameters, 72 B, in 1 bucket\n" in told
    assert "\nbeside it, by rows, since their gradients are sparse: 0.weight\n\n" in told
    assert execute(["plan", "words.py:both", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["bytes"] == 72 and value["sparse"] == ["0.weight"]
    assert execute(["plan", "words.py:alone"]) == 2
    assert "words.py:alone gives a module whose gradients are sparse: they are sent by rows, not in buckets" in (
        capsys.readouterr().err
    )


def test_plan_imports_a_script_from_where_it_lies_and_modules_from_here(tmp_path: Path) -> None:
    done = command("plan", ROOT / "examples" / "digits.py:digits_net", "--ranks", 1, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("One rank sends nothing.") == 1
    script(tmp_path, "import torch\nclass Made:\n    net = torch.nn.Linear(2, 1)")
    done = command("plan", "script:Made.net", cwd=tmp_path)
    assert done.returncode == 0 and "2 parameters, 12 B" in done.stdout


def test_cost_of_a_link() -> None:
    link = Link(parse_bandwidth("1gbit"), parse_latency("100us"), 2)
    assert link.all_reduce(125_000_000) == pytest.approx(1 + 200e-6)
    assert Link(1e9, 0.0, 4).sent(4) == 6
    for text, bits in (("100Mb/s", 1e8), ("125MB/s", 1e9), ("2.5 Gbps", 2.5e9), ("1e3bit", 1e3), ("10kbit/s", 1e4)):
        assert parse_bandwidth(text) == bits
    assert [parse_latency(text) for text in ("1s", "2 ms", "0us", "5ns", "3\u00b5s", "3 \u03bcs")] == [
        *(1.0, 2e-3, 0.0, 5e-9, 3e-6, 3e-6)
    ]


# stretto trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "trace"

    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=2e-3)
        model(torch.randn(3, 16)).sum().backward()
        with sync.trace(folder):
            for _ in range(3):
                model(torch.randn(3, 16)).sum().backward()
                optimizer.step()
        sync.detach()

    run_ranks(worker, 2)
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "trace"))


@pytest.mark.slow
@pytest.mark.parametrize("columns, most", [("60", 60), ("400", 100)])
def test_a_sketch_fits_the_terminal(recorded: Path, capsys, monkeypatch: pytest.MonkeyPatch, columns, most) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert execute(["trace", str(recorded), "--text"]) == 0
    rows = [
        line for line in capsys.readouterr().out.splitlines() if re.match(r"(backward|bucket \d|exposed) +[-=#]", line)
    ]
    assert rows and max(map(len, rows)) <= most and (most == 60) == all(len(row) <= 60 for row in rows)


def test_trace_tells_and_draws(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "a.html", tmp_path / "a.svg"
    done = command("trace", folder, "--text", "--html", page, "--picture", picture)
    assert (done.returncode, done.stderr) == (0, "")
    first = "rank 0 of 2 over local (threads of one process), means over the middle half of 3 passes\n"
    assert done.stdout.startswith(first)
    assert re.search(r"^bucket 3 ", done.stdout, re.MULTILINE) and re.search(r"^exposed ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(f"chrome: {folder / 'trace.json'}\nhtml: {page}\npicture: {picture}\n")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "<html" in page.read_text() and "<svg" in picture.read_text()
    assert sorted(one.name for one in folder.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "trace.json"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.html", "a.svg", "trace"]


def test_trace_as_json_has_a_report_of_each_rank(folder: Path, tmp_path: Path) -> None:
    done = command("trace", folder, "--json", "--chrome", tmp_path / "c.json")
    told = json.loads(done.stdout)
    assert [one["rank"] for one in told["reports"]] == [0, 1]
    assert (told["ends"], told["notes"]) == ({"0": "closed", "1": "closed"}, [])
    mine = read_trace(folder)[1].passes
    assert told["reports"][1]["passes"] == len(mine) == 3
    assert told["reports"][1]["breakdown"]["exposed"] == breakdown_of(mine).exposed
    assert told["written"] == {"chrome": str(tmp_path / "c.json")}
    assert json.loads((tmp_path / "c.json").read_text()) and not (folder / "trace.json").exists()


def test_a_trace_that_was_cut_off_is_shown_as_far_as_it_goes(folder: Path) -> None:
    whole = (folder / "rank1.jsonl").read_bytes()
    (folder / "rank1.jsonl").write_bytes(whole[:-200])
    last = read_trace(folder)[1].passes[-1].number
    done = command("trace", folder, "--rank", 1)
    assert done.returncode == 1
    assert done.stderr == (
        f"stretto: rank 1: its trace is cut off after pass {last} (killed, still running, or not copied completely)\n"
    )
    assert done.stdout.startswith("rank 1 of 2 ") and (folder / "trace.json").exists()
    assert (folder / "rank1.jsonl").read_bytes() == whole[:-200]


def test_a_rank_that_ended_before_the_last_passes_has_not_ended_before_its_first(folder: Path, capsys) -> None:
    lines = (folder / "rank1.jsonl").read_text().splitlines(keepends=True)
    (folder / "rank1.jsonl").write_text("".join(lines[:-2]))  # neither its last pass nor an end
    last = read_trace(folder)[1].passes[-1].number
    assert execute(["trace", str(folder), "--last", "1", "--text"]) == 1
    told = capsys.readouterr()
    assert told.err == (
        f"stretto: rank 1: its trace is cut off after pass {last} (killed, still running, or not copied completely)\n"
    )
    assert "rank 1: none of these passes was recorded" in told.out


def test_a_trace_of_which_a_part_is_missing_or_damaged_is_shown_as_far_as_it_goes(folder: Path, capsys) -> None:
    whole = (folder / "rank0.jsonl").read_text()
    (folder / "rank0.jsonl").write_text(whole.replace('{"pass":{"number":3,', '{"pass":{"number":3,,'))
    line = f"{folder}/rank0.jsonl: line 4 is not part of a trace: left out"
    assert execute(["trace", str(folder)]) == 1
    told = capsys.readouterr()
    assert told.err == f"stretto: {line}\n"
    assert told.out.startswith("rank 0 of 2 ") and ", means over the middle half of 2 passes\n" in told.out
    (folder / "rank0.jsonl").unlink()
    line = f"{folder}: no file of rank 0; copy those of all ranks into one folder"
    assert execute(["trace", str(folder), "--text"]) == 1
    told = capsys.readouterr()
    assert told.err == f"stretto: {line}\n"
    assert told.out.startswith("rank 1 of 2 ") and "\nthere is no trace of ranks [0]\n" in told.out
    assert "\nonly these of 2 ranks were seen: 1; another one may have been later still\n" in told.out
    assert execute(["trace", str(folder), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["notes"], [one["rank"] for one in said["reports"]]) == ([line], [1])
    assert execute(["trace", str(folder), "--rank", "0"]) == 2
    assert capsys.readouterr().err == "stretto: --rank 0: the trace has ranks 1\n"


@pytest.mark.parametrize("options, numbers", [
    ("--last 2", [3, 4]),
    ("--last 99", [2, 3, 4]),
    (f"--last {10**21}", [2, 3, 4]),
    ("--last 1", [4]),
])  # fmt: skip
def test_passes_of_a_trace_can_be_chosen(folder: Path, capsys, options: str, numbers: list[int]) -> None:
    page = folder / "a.html"
    assert execute(["trace", str(folder), "--html", str(page), *options.split()]) == 0
    told = capsys.readouterr()
    of = f"means over the middle half of {len(numbers)} passes" if len(numbers) > 1 else "one pass"
    assert told.err == "" and told.out.splitlines()[0].endswith(f", {of}")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {one["name"] for one in events if one.get("cat") == "pass"} == {f"pass {number}" for number in numbers}
    drawn = ", ".join(map(str, numbers))
    assert f"pass {drawn} of a run on 2 ranks" in page.read_text(), "three are few enough for a picture"


def test_of_many_passes_that_were_chosen_a_picture_shows_one(folder: Path, capsys) -> None:
    for rank in (0, 1):
        path = folder / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        at = next(number for number, line in enumerate(lines) if '"number":4,' in line)
        lines.insert(at + 1, lines[at].replace('"number":4,', '"number":5,'))
        path.write_text("".join(lines))
    assert execute(["trace", str(folder), "--html", str(folder / "a.html"), "--last", "4"]) == 0
    assert capsys.readouterr().err == ""
    assert re.search(r"pass \d of a run on 2 ranks", (folder / "a.html").read_text())


def test_a_trace_that_an_exception_ended_is_whole(folder: Path, capsys) -> None:
    path = folder / "rank0.jsonl"
    path.write_text(path.read_text().replace('"closed"', '"ValueError: a\\nb"'))
    assert execute(["trace", str(folder)]) == 0
    assert capsys.readouterr().err == "stretto: rank 0: its trace ends after pass 4 with ValueError: a b\n"


def test_a_folder_that_cannot_be_written_is_shown_all_the_same(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / "trace.json").mkdir()
    line = f"{folder}/trace.json cannot be written: it is a folder (--chrome takes another file)"
    assert execute(["trace", str(folder), "--text", "--html", str(tmp_path / "a.html")]) == 0
    told = capsys.readouterr()
    assert told.err == f"stretto: {line}\n"
    assert told.out.startswith("rank 0 of 2 ") and told.out.endswith(f"\n\nhtml: {tmp_path / 'a.html'}\n")
    assert execute(["trace", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["written"], said["notes"]) == ({}, [line])
    assert execute(["trace", str(folder), "--chrome", str(folder / "trace.json")]) == 2
    assert capsys.readouterr().err == f"stretto: {folder}/trace.json cannot be written: it is a folder\n"


# stretto doctor


@pytest.mark.ranks
def test_doctor_finds_this_machine_in_order() -> None:
    done = command("doctor", "--quick", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["broken"], done.stderr) == (0, [], "")
    assert told["machine"]["versions"]["torch"] == torch.__version__ and told["machine"]["backends"]["gloo"]
    assert {"through": "lo", "address": "127.0.0.1", "problem": ""} in told["network"]["store"]
    timings = told["speed"]["timings"]
    assert sorted(timings) == ["process_group", "shared_memory"]
    for one in [*timings["process_group"], *timings["shared_memory"]]:
        assert 0 < one["low"] <= one["median"] <= one["high"] < 10
    assert [one["nbytes"] for one in timings["process_group"]] == [4, 2**20, 25 * 2**20]
    assert told["launched"] is None


@pytest.mark.ranks
@pytest.mark.slow
def test_doctor_on_ranks_that_were_launched_speaks_once() -> None:
    done = command("run", "--ranks", 2, "-m", "stretto", "doctor", "--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert sum(line.startswith("[rank 0] ranks           0, 1: ") for line in lines) == 1
    assert "[rank 0] shared memory   yes: 2 ranks have read each other's memory" in lines
    assert "[rank 0] gradients take  shared_memory" in lines


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.network
def test_doctor_measures_between_hosts() -> None:
    """Three ranks, on two hosts that are emulated."""
    try:
        with EmulatedHosts() as hosts:
            told = [
                subprocess.Popen(
                    hosts.command(host, sys.executable, "-m", "stretto", "doctor", "--quick", "--interface", INTERFACE),
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"}
                    | {"MASTER_PORT": "29511", "PYTHONPATH": str(ROOT / "src")},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank, host in enumerate((0, 0, 1))
            ]
            first, *others = [one.communicate(timeout=100)[0] for one in told]
    except OSError as error:
        pytest.skip(f"{error}")
    assert [one.returncode for one in told] == [0, 0, 0] and others == ["", ""]
    name = socket.gethostname()
    for ranks, address in (("0, 1", "10.0.0.1"), ("2", "10.0.0.2")):
        assert f"\nranks           {ranks}: {name}, Gloo listens on {INTERFACE} ({address}), by GLOO_SOCKET_" in first
    assert re.search(r"^shared memory   rank 0: the memory of rank 2 cannot be opened: ", first, re.MULTILINE)
    assert "\ngradients take  hierarchical (3 ranks on 2 hosts)\n" in first
    assert f"\nprocess_group over {INTERFACE} " in first and "No shared memory" not in first


@pytest.mark.ranks
def test_doctor_says_what_is_broken() -> None:
    done = command("doctor", "--quick", env={**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"})
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.splitlines()[-1:] == [
        "BROKEN: Gloo cannot listen on nowhere0 (no address), by GLOO_SOCKET_IFNAME: Unable to find address for: "
        "nowhere0.",
    ]


LOOPBACK, OUTWARD = Interface("lo", ("127.0.0.1",), True), Interface("eth0", ("192.0.2.7",), True)


def findings(**changes: Any) -> Findings:
    machine = {"hostname": "here", "interfaces": (LOOPBACK, OUTWARD), "cores": 2, "threads": 2}
    machine |= {"omp_num_threads": None, "available_memory": 2**33, "backends": {"gloo": True}}
    machine |= {name: changes.pop(name) for name in [*changes] if name in machine}
    seen = {"gloo": GlooInterface("hostname", "eth0", "192.0.2.7"), "reached": (), "speed": Speed({})} | changes
    return Findings(machine=type(look_at_machine())(**{**vars(look_at_machine()), **machine}), **seen)


def test_an_environment_of_ranks_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(stretto.SetupError) as caught:
        is_launched()
    assert str(caught.value) == "WORLD_SIZE='two' in the environment is not a number: correct it, or unset it"


def test_ranks_that_do_not_come_are_waited_for_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another run has left in the environment kept the doctor silent for two minutes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def nobody_comes(*_: Any, **options: Any) -> None:
        raise RuntimeError(told.get(timeout=60))

    monkeypatch.setattr(launched, "SILENCE", 0.0)
    monkeypatch.setattr(launched, "note", told.put)
    monkeypatch.setattr(dist, "init_process_group", nobody_comes)
    with pytest.raises(RuntimeError) as caught:
        launched.look_together("here", "lo", quick=True)
    assert str(caught.value) == (
        "waiting for other ranks: the environment says RANK=0, WORLD_SIZE=2, MASTER_ADDR=here, MASTER_PORT=1; to look "
        "at this host alone, unset RANK"
    )


def test_advice_of_the_doctor() -> None:
    assert advise(findings()) == faults(findings()) == []
    assert advise(findings(gloo=GlooInterface("hostname", "lo", "127.0.1.1"))) == [
        "The host name here resolves to 127.0.1.1, where other hosts cannot reach Gloo: for several hosts, "
        "set GLOO_SOCKET_IFNAME=eth0."
    ]
    alone = findings(gloo=GlooInterface("nothing", "lo", "127.0.0.1"), interfaces=(LOOPBACK,))
    assert advise(alone) == [
        "The host name here has no address of this host, where other hosts cannot reach Gloo: for several hosts, "
        "give this host a network interface."
    ]
    assert advise(findings(speed=Speed({}, "rank 1: it is forbidden"))) == [
        "No shared memory because rank 1: it is forbidden: gradients go through Gloo inside this host."
    ]
    assert advise(findings(available_memory=2**28)) == ["Only 256 MB of memory is left for buckets: raise the limit."]
    assert advise(findings(omp_num_threads="8", threads=8)) == [
        "OMP_NUM_THREADS=8 on 2 cores: threads wait for each other; unset it, or lower it."
    ]
    assert advise(findings(threads=8)) == ["torch would use 8 threads on 2 cores: set OMP_NUM_THREADS."]


def test_speeds_say_over_what_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    once = (Timing(2**20, 0.001, 0.001, 0.002),)
    found = findings(speed=Speed({"process_group": once, "shared_memory": once}))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert [line.split("  ")[0] for line in _speed(found)[-1].splitlines()[1:]] == [
        "process_group over loopback",
        "shared_memory",
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "\nprocess_group over eth0  " in _speed(found)[-1]


def test_faults_that_the_doctor_finds() -> None:
    assert faults(findings(backends={"gloo": False})) == [
        "this torch has no Gloo, which ranks on CPUs need to connect: install one that has it."
    ]
    assert faults(findings(reached=(Reached("eth0", "192.0.2.7", "refused"), Reached("hostname", "x", "?")))) == [
        "a store on this host cannot be reached through eth0 (192.0.2.7): refused."
    ]
    assert faults(findings(speed=None, speed_problem="ranks died")) == ["ranks cannot exchange anything: ranks died."]


def test_each_interface_that_is_named_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    chosen = what_gloo_chooses("here", [LOOPBACK])
    assert (chosen.address, chosen.problem) == ("127.0.0.1", "Unable to find address for: nowhere0")


def test_the_doctor_says_why_ranks_share_no_memory() -> None:
    def worker(transport: Any) -> tuple[list[str], str]:
        found, problem = _transports(SeparateHosts(transport, [1, 1]))
        return [*found], problem

    nobody = "rank 0: the memory of rank 1 cannot be opened: No such file or directory"
    assert run_ranks(worker, 2) == [(["process_group"], nobody)] * 2


def test_advice_on_shared_memory_is_for_hosts_that_have_none() -> None:
    once = (Timing(2**20, 0.001, 0.001, 0.002),)
    there = Speed({"process_group": once, "hierarchical (3 ranks on 2 hosts)": once}, "rank 0: too far")
    here = Launched(0, 3, (RanksOfHost("a", "eth0", (0, 1)), RanksOfHost("b", "eth0", (2,))), there)
    assert advise(findings(speed=there, launched=here)) == []
    assert _network(findings(launched=here))[-2:] == [
        "ranks           0, 1: a, Gloo listens on eth0",
        "ranks           2: b, Gloo listens on eth0",
    ]


def test_a_store_is_not_reached_where_nobody_is() -> None:
    foreign = Interface("far0", ("255.255.255.255",), True)
    found = {one.through: one.problem for one in reach_the_store("no-such-host.invalid", [LOOPBACK, foreign])}
    assert found["lo"] == "" and found["far0"] and found["hostname"]


# stretto demo


@pytest.mark.ranks
@pytest.mark.slow
def test_demo_trains_and_gives_the_losses_of_ddp() -> None:
    done = command("demo", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["same_losses_as_ddp"], told["learnt"]) == (0, True, True), done.stderr
    assert sorted(told["runs"]) == ["after", "before", "torch DDP"]
    assert told["runs"]["torch DDP"]["losses"] == told["runs"]["after"]["losses"]
    assert told["reports"]["before"]["transport"].startswith("process_group")
    assert len(told["reports"]["before"]["buckets"]) == 1 < len(told["reports"]["after"]["buckets"])


@pytest.mark.ranks
@pytest.mark.slow
def test_demo_shows_what_it_promises() -> None:
    done = command("demo")
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("AFTER: stretto.attach(model)\n")
    assert "BEFORE: one all-reduce over Gloo when backward has ended\n\nbackward " in before
    assert "0 % of communication hidden behind backward; " in before
    assert re.search(r"^plan [0-9a-f]{16}: 12 parameters, 635 KB, in 2 buckets of at most ", after, re.MULTILINE)
    assert "All 160 losses are the same numbers as those of torch DDP.\n" in after
    (shares,) = re.findall(r"^unseen digits read right +([\d.]+)% +([\d.]+)% +([\d.]+)%$", after, re.MULTILINE)
    assert shares[0] == shares[2] and all(float(one) >= 100 * ENOUGH for one in shares)


def test_a_demo_that_cannot_run_is_one_line(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("rank 0:\nTraceback (most recent call last):\nMemoryError: too much\n")

    monkeypatch.setattr(importlib.import_module("stretto.cli.demo"), "work", fails)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert execute(["demo"]) == 1
    text = "the demo failed: MemoryError: too much"
    assert capsys.readouterr() == ("", f"stretto: {text}\n")


def test_digits_are_drawn_alike_and_can_be_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = drawn_digits(300)
    again, _ = drawn_digits(300)
    assert torch.equal(images, again) and images.shape == (300, 8, 8) and sorted(set(labels.tolist())) == [*range(10)]
    assert images.min() >= 0 and images.max() <= 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    here, there = Pipe(duplex=False)
    trained = train_once("after", 0, 1, str(tmp_path), there)
    assert here.recv() == 0
    assert trained.data == "drawn digits (scikit-learn, with handwritten ones, is not installed)"
    assert trained.accuracy >= ENOUGH and trained.losses[-1] < 0.2 < trained.losses[0]


# Bad input


@pytest.mark.parametrize("sink, code", [("/dev/full", 1), ("/dev/null", 0)])
def test_a_full_disk_is_one_line(sink: str, code: int) -> None:
    line = [sys.executable, "-m", "stretto", "--help"]
    with open(sink, "w") as out:
        done = subprocess.run(line, stdout=out, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code
    assert re.fullmatch(r"stretto: .*No space left on device.*\n" if code else "", done.stderr)


FULL = "No space left on device"
LOST = f"what ranks print from here on is lost, but they keep running: {FULL}"


@pytest.mark.parametrize(
    "unbuffered, asked, code, told",
    [
        ("1", "plan policy", 1, f"the result cannot be written: {FULL}"),
        ("1", "run -n 1 script.py", 1, LOST),
        ("", "run -n 1 script.py 7", 7, LOST),
        ("", "plan nowhere 2>/dev/full", 2, ""),
        ("1", "run -n 1 script.py 7 2>/dev/full", 7, ""),
    ],
)
def test_a_full_disk_is_told_of_and_costs_no_other_exit_code(
    tmp_path: Path, unbuffered: str, asked: str, code: int, told: str
) -> None:
    """Whether Python keeps what it writes until the end or not, as in containers; ranks run on."""
    script(tmp_path, "import sys\nprint('a')\nopen('end', 'w').close()\nsys.exit(int((sys.argv + ['0'])[1]))")
    line = f"'{sys.executable}' -m stretto {asked} >/dev/full"
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == code and done.stderr.startswith(f"stretto: {told}\n" if told else "")
    assert len(done.stderr.splitlines()) <= 2 and Path(tmp_path, "end").exists() == ("run" in asked)


@pytest.mark.parametrize(
    "asked, code",
    [
        ("-h", 0),
        ("--help", 0),
        ("plan -h", 0),
        ("plan policy", 0),
        ("run -n 1 script.py --help", 7),
        ("fly", 2),
    ],
)
def test_the_exit_code_is_the_same_where_nobody_reads(tmp_path: Path, asked: str, code: int) -> None:
    """As behind ``| head`` in a container, where PYTHONUNBUFFERED is set: each line meets the closed pipe."""
    script(tmp_path, "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise SystemExit(7) from error")
    here, there = os.pipe()
    os.close(here)
    line, unbuffered = [sys.executable, "-m", "stretto", *asked.split()], os.environ | {"PYTHONUNBUFFERED": "1"}
    with open(there, "wb") as sink:
        assert subprocess.run(line, stdout=sink, stderr=sink, env=unbuffered, cwd=tmp_path).returncode == code


def test_a_command_that_is_left_keeps_its_code_whatever_its_program_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(*_: object) -> None:
        raise SystemExit(7)

    monkeypatch.setattr("stretto.cli.launch.launch", left)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert execute(["run", "-n", "1", str(script(tmp_path, "")), "--help"]) == 7


def test_names_that_a_terminal_cannot_show_cost_no_result(tmp_path: Path) -> None:
    script(tmp_path, "import torch\ndef net():\n    return torch.nn.ModuleDict({'größe': torch.nn.Linear(2, 1)})")
    line = [sys.executable, "-m", "stretto", "plan", "script.py:net", "-n", "1"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "") and "gr\\xf6\\xdfe.bias .. gr\\xf6\\xdfe.weight" in done.stdout


@pytest.mark.parametrize("asked, code", [("--version >&-", 0), ("fly 2>&-", 2), ("fly <&- >&- 2>&-", 2)])
def test_streams_that_are_closed_cost_no_traceback(asked: str, code: int) -> None:
    line = f"'{sys.executable}' -m stretto {asked}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "No such command" not in done.stdout


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")

    def half(unfinished: Path) -> None:
        unfinished.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(CommandError) as caught:
        write(path, half)
    assert str(caught.value) == f"{path} cannot be written: No space left on device"
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(CommandError) as caught:
        write(path, lambda unfinished: unfinished.write_text("new"))
    assert str(caught.value) == f"{path} cannot be written: permission denied"
    assert path.read_text() == "old"


def test_what_is_no_file_is_written_to_and_not_replaced(folder: Path, tmp_path: Path, capsys) -> None:
    """As ``--chrome /dev/null``, which root may replace, and nobody else could write."""
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, lambda path: path.write_text("new"))
    assert os.read(reading, 10) == b"new" and pipe.is_fifo()
    os.close(reading)
    assert execute(["trace", str(folder), "--chrome", str(link)]) == 0
    assert capsys.readouterr().out.endswith(f"\nchrome: {link}\n")
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == sorted([pipe, link, folder])


def test_without_a_command_there_is_help(capsys) -> None:
    assert execute([]) == 2
    assert capsys.readouterr().out.startswith("Usage: stretto ")


def test_the_version(capsys) -> None:
    assert execute(["--version"]) == 0
    assert capsys.readouterr() == (f"stretto {stretto.__version__}\n", "")


def test_help_and_version_of_the_entry_point() -> None:
    done = command("--help")
    assert done.returncode == 0 and "..." not in done.stdout.partition("Commands:")[2]
    for name in ("demo", "run", "plan", "trace", "doctor", "bench"):
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)


def test_the_entry_point_is_there() -> None:
    """What pyproject.toml names; the package as it was installed may be older than these files."""
    (name,) = re.findall(
        r'^\[project.scripts\]\nstretto = "([\w.:]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    module, _, function = name.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert f'py-modules = ["{module}"]' in (ROOT / "pyproject.toml").read_text()


def test_ctrl_c_while_torch_is_imported_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()")
    program = "import _stretto_command as command; command.main()"
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        assert (*running.communicate(timeout=30), running.returncode) == ("", "", 130)


def test_a_terminal_shows_that_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nsys.stdin.readline()")
    here, there = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", "import _stretto_command as command; command.main()"],
        stdin=subprocess.PIPE,
        stderr=there,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")]), "TERM": "xterm"},
    ) as running:
        os.close(there)
        shown = b""
        while b"importing torch" not in shown:
            shown += os.read(here, 1000)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    with contextlib.suppress(OSError):  # that is how a terminal ends
        while more := os.read(here, 1000):
            shown += more
    os.close(here)
    assert b"\x1b[?25h" in shown, "the cursor is back"
    assert b"Traceback" not in shown


def test_a_log_that_is_made_while_torch_is_imported_is_not_cut_into_lines(tmp_path: Path) -> None:
    (tmp_path / "stretto").mkdir()
    (tmp_path / "stretto/__init__.py").touch()
    program = "import logging\nlog = logging.StreamHandler()\ndef main(): log.stream.write('long' * 100)"
    (tmp_path / "stretto/cli.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    code, shown = on_a_terminal(PYTHONPATH=path, TERM="xterm", COLUMNS="80")
    assert code == 0 and b"importing torch" in shown and b"long" * 100 in shown


def test_a_terminal_that_cannot_erase_gets_the_result_alone() -> None:
    """rich leaves an empty line there for each bar."""
    assert on_a_terminal("plan", "nowhere.py:net", TERM="dumb") == (2, b"stretto: nowhere.py: no such file\r\n")


def on_a_terminal(*arguments: str, **environment: str) -> tuple[int, bytes]:
    """The command's exit code, and all that a terminal is given to show."""
    here, there = os.openpty()
    line = [sys.executable, "-c", "import _stretto_command as command; command.main()", *arguments]
    with subprocess.Popen(line, stdout=there, stderr=there, env=os.environ | environment) as running:
        os.close(there)
        shown = b""
        with contextlib.suppress(OSError):  # that is how a terminal ends
            while more := os.read(here, 1000):
                shown += more
        code = running.wait(30)
    os.close(here)
    return code, shown


def test_ctrl_c_as_a_command_begins_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "stretto").mkdir()
    (tmp_path / "stretto/__init__.py").touch()
    (tmp_path / "stretto/cli.py").write_text("def main(): raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", "import _stretto_command as command; command.main()"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])},
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)


BROKEN_MODEL = """
import torch
number = 3
def fails(): raise KeyError("lost")
def none(): return number
def frozen(): return torch.nn.Linear(1, 1).requires_grad_(False)
def fine(): return torch.nn.Linear(1, 1)
def lazy(): return torch.nn.LazyLinear(1)
"""

REFUSED = [
    ("run --ranks 0 script.py", 2, "--ranks 0: must be 1 or more"),
    ("run --ranks 2.5 script.py", 2, "--ranks 2.5: must be a number, or auto, cpu, gpu or xpu"),
    ("run nowhere.py", 2, "nowhere.py: no such script"),
    (
        "run script.py:fine",
        2,
        "script.py:fine: no such script; a function such as fine is for stretto plan and stretto bench",
    ),
    ("run trace", 2, "trace: a folder without a __main__.py to run"),
    *(
        (
            f"run {option} 2 script.py",
            2,
            "stretto run starts ranks on this host only. For several hosts, run on each: torchrun --nnodes 2 "
            "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 script.py",
        )
        for option in ("--nnodes", "--node_rank")
    ),
    *(
        (
            f"run {option} 2 script.py",
            2,
            "ranks on one host find each other by themselves: leave out --rdzv-... and --master-...",
        )
        for option in ("--rdzv-endpoint", "--rdzv_id", "--master_addr", "--master-port")
    ),
    ("run --standalone --nnodes=1 --node-rank 0 nowhere.py", 2, "nowhere.py: no such script"),
    ("run -m no.such.module", 2, "there is no module 'no.such.module'"),
    ("run -m side.py", 2, "side.py is a script, but -m takes a module: leave out -m"),
    ("run", 2, None),
    ("run --rank 2 script.py", 2, None),
    ("fly", 2, None),
    (
        "plan no.script.py",
        2,
        "'no.script.py' is neither a built-in model (policy, layers, mlp, gpt2, gpt2x8, resnet18) nor a "
        "function of yours, script.py:factory or package.module:factory",
    ),
    ("plan script.py", 2, "script.py: say which function in it returns the model, as script.py:make_model"),
    ("plan :net", 2, "':net': say where the model is made, script.py:factory or package.module:factory"),
    ("plan nowhere.py:net", 2, "nowhere.py: no such file"),
    ("plan no_such_package.models:net", 2, "there is no module 'no_such_package'"),
    ("plan script.py:missing", 2, "script.py has no 'missing': write a function that returns the model"),
    ("plan script.py:torch.missing", 2, "script.py has no 'missing'"),
    ("plan script.py:number", 2, "script.py:number is of type int, which cannot be called"),
    (
        "plan script.py:none",
        2,
        "script.py:none gives a int: return model, (model, batch) or (model, batch, loss), with a "
        "torch.nn.Module and loss(model, batch)",
    ),
    (
        "bench script.py:none",
        2,
        "script.py:none gives a int: return model, (model, batch) or (model, batch, loss), with "
        "a torch.nn.Module and loss(model, batch)",
    ),
    ("bench script.py:fails", 1, "script.py:fails() failed: KeyError: 'lost' ({folder}/script.py:4)"),
    ("plan script.py:frozen", 2, "script.py:frozen gives a module without a parameter that requires a gradient"),
    ("plan script.py:fails", 1, "script.py:fails() failed: KeyError: 'lost' ({folder}/script.py:4)"),
    ("plan syntax.py:net", 1, "importing syntax.py failed: SyntaxError: invalid syntax (syntax.py, line 1)"),
    (
        "plan script.py:lazy",
        2,
        "script.py:lazy gives a module whose weight, bias have no size yet: run one forward in the factory",
    ),
    (
        "plan script.py:fine --bandwidth 1e999bit",
        2,
        "--bandwidth 1e999bit: give a bandwidth such as 1gbit, 100mbit or 125MB/s",
    ),
    (
        "plan script.py:fine --bandwidth 1e308tbit",
        2,
        "--bandwidth 1e308tbit: give a bandwidth such as 1gbit, 100mbit or 125MB/s",
    ),
    ("plan script.py:fine --latency 1e999s", 2, "--latency 1e999s: give a time such as 100us or 0.2ms"),
    (
        "run --ranks 9999999 script.py",
        2,
        "--ranks 9999999: each takes 64.0 MB of memory or more, and {error} is available",
    ),
    (
        "bench script.py:fine --ranks 9999999",
        2,
        "--ranks 9999999: each takes 64.0 MB of memory or more, and {error} is available",
    ),
    ("trace trace --html x.svg --picture x.svg", 2, "x.svg is asked for twice: give each picture a file of its own"),
    (
        "plan bad.py:net",
        1,
        "importing bad.py failed: ZeroDivisionError: division by zero ({folder}/bad.py:1); code other "
        'than definitions belongs under if __name__ == "__main__":',
    ),
    ("plan script.py:fine --ranks 0", 2, "--ranks 0: must be 1 or more"),
    ("plan script.py:fine --bucket-cap-mb 0", 2, "--bucket-cap-mb 0: must be positive"),
    (
        "plan script.py:fine --bandwidth fast",
        2,
        "--bandwidth fast: give a bandwidth such as 1gbit, 100mbit or 125MB/s",
    ),
    ("plan script.py:fine --bandwidth 0bit", 2, "--bandwidth 0bit: give a bandwidth such as 1gbit, 100mbit or 125MB/s"),
    ("bench script.py:fine --rounds 0", 2, "--rounds 0: must be 1 or more"),
    ("bench script.py:fine --threads 0", 2, "threads=0 must be 1 or more"),
    ("bench script.py:frozen", 2, "script.py:frozen gives a module without a parameter that requires a gradient"),
    ("bench script.py:fine --seconds -1", 2, "--seconds -1: must be positive"),
    ("bench script.py:fine --network 3", 2, "--network 3: give a bandwidth such as 1gbit, 100mbit or 125MB/s"),
    ("plan script.py:fine --latency ..s", 2, "--latency ..s: give a time such as 100us or 0.2ms"),
    ("plan script.py:fine --latency 1..2s", 2, "--latency 1..2s: give a time such as 100us or 0.2ms"),
    ("plan script.py:fine --ranks two", 2, None),
    ("trace nowhere", 2, "nowhere: no such folder"),
    ("trace trace/rank0.jsonl", 2, "trace/rank0.jsonl: this is a file; give the folder that was given to sync.trace()"),
    ("trace empty", 2, "empty: no trace in it (rank0.jsonl, rank1.jsonl, ...)"),
    ("trace other", 1, "other/rank0.jsonl: line 1 is not part of a trace"),
    ("trace without", 1, "without/rank0.jsonl: is empty"),
    ("trace begun", 1, "begun: no pass has settled in it, so there is nothing to show"),
    ("trace trace --rank 2", 2, "--rank 2: the trace has ranks 0 to 1"),
    ("trace trace --pass 9", 2, "--pass 9: the trace has passes 2 to 4"),
    ("trace trace --last 0", 2, "--last 0: must be 1 or more"),
    ("trace trace --picture a.gif", 2, "a.gif: a picture ends in .png or .svg"),
    ("trace trace --chrome trace/rank1.jsonl", 2, "trace/rank1.jsonl is part of the trace: write to another file"),
    ("trace trace --html empty", 2, "empty cannot be written: it is a folder"),
    ("trace trace --html no/a.html", 2, "no/a.html cannot be written: there is no folder no"),
    ("trace trace --html /proc/a.html", 2, "/proc/a.html cannot be written: {error}"),
    ("doctor --interface no0", 2, "there is no network interface 'no0' here; there are {names}"),
]


@pytest.mark.parametrize("line, code, text", REFUSED, ids=[line for line, _, _ in REFUSED])
def test_bad_input_is_one_line(
    line: str, code: int, text: str | None, folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("script.py").write_text(BROKEN_MODEL)
    Path("bad.py").write_text("net = 1 / 0\n")
    Path("syntax.py").write_text("net = = 1\n")
    for name in ("empty", "other", "without", "begun"):
        Path(name).mkdir()
    Path("other", "rank0.jsonl").write_text("hello\n")
    Path("without", "rank0.jsonl").write_text("")
    header = (folder / "rank0.jsonl").read_text().splitlines()[0].replace('"world_size":2', '"world_size":1')
    Path("begun", "rank0.jsonl").write_text(header + "\n")
    before = [(folder / f"rank{rank}.jsonl").read_bytes() for rank in (0, 1)]
    assert execute(line.split()) == code
    for name in ("script", "bad", "syntax"):
        sys.modules.pop(name, None)
    told = capsys.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    last = told.err.splitlines()[-1]
    assert last.startswith("stretto: ") and told.err.endswith("\n")
    assert len(told.err.splitlines()) == (2 if "begun" in line else 1)
    if text is not None:
        pattern = re.escape(text).replace(r"\{error\}", ".+").replace(r"\{names\}", ".*lo.*")
        assert re.fullmatch("stretto: " + pattern.replace(r"\{folder\}", re.escape(str(folder.parent))), last), last
    assert [(folder / f"rank{rank}.jsonl").read_bytes() for rank in (0, 1)] == before
    assert not [one for one in folder.parent.rglob(".*")], "nothing half written"


@pytest.mark.parametrize(
    "line, error",
    [
        ("trace nowhere --json", "nowhere: no such folder"),
        ("plan policy --json --foo", "No such option: --foo (stretto plan --help)"),
        ("run --ranks 0 --json script.py", "--ranks 0: must be 1 or more"),
        ("run --nproc-per-node 0 --json script.py", "--ranks 0: must be 1 or more"),
        ("run -m --json no.such.module", "there is no module 'no.such.module'"),
        ("run -n 2 nowhere.py --json", None),
        ("run --foo nowhere.py --json", None),
        ("fly --jason", None),
    ],
)
def test_a_program_that_asks_for_json_is_told_of_errors_in_json(line: str, error: str | None, capsys: Any) -> None:
    """What stands behind the script of a run is the script's."""
    assert execute(line.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith("stretto: ") and len(told.err.splitlines()) == 1
    if error is None:
        assert told.out == ""
    else:
        assert (json.loads(told.out), told.err) == ({"error": error}, f"stretto: {error}\n")


def test_json_that_cannot_be_written_is_told_of_once() -> None:
    line = [sys.executable, "-m", "stretto", "plan", "policy", "--json"]
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, env=unbuffered)
    assert (done.returncode, done.stderr) == (1, f"stretto: the result cannot be written: {FULL}\n")


@pytest.mark.parametrize(
    "words, told",
    [
        ("bench --foo", "No such option: --foo (stretto bench --help)"),
        ("--foo", "No such option: --foo (stretto --help)"),
        ("plan policy --bandwidth", "Option '--bandwidth' requires an argument. (stretto plan --help)"),
    ],
)
def test_an_option_that_is_not_there_or_has_no_value_says_where_help_is(words: str, told: str, capsys: Any) -> None:
    assert execute(words.split()) == 2
    assert capsys.readouterr().err == f"stretto: {told}\n"
