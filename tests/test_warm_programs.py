"""A program of the warm interpreter is to its tests what a program of its own is to its user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_hosts
import warm_programs

from stretto.testing_network import EmulatedHosts, sent_bytes

SPAWNED = """
print(os.environ["X"], os.getcwd(), sys.argv, signal.pthread_sigmask(0, []), threading.active_count(), flush=True)
print("aside", file=sys.stderr, flush=True)
heard.put(os.getppid() > 1)
sys.exit(7)
"""
SPAWNS = f"""
import multiprocessing, os, signal, sys, threading
if __name__ == "__main__":
    os.environ["X"] = "mine"
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    context = multiprocessing.get_context("spawn")
    names = {{"heard": context.SimpleQueue()}}
    process = context.Process(target=exec, args=("import os, signal, sys, threading" + {SPAWNED!r}, names))
    process.start()
    process.join()
    print(process.exitcode, names["heard"].get(), multiprocessing.active_children())
"""
PROGRAMS = {
    "spawns": SPAWNS,
    "runs": "import sys; print(__name__, sys.argv, sys.path[0]); print('aside', file=sys.stderr)",
    "exit code": "import sys; sys.exit(3)",
    "a word at the end": "import sys; sys.exit('no')",
    "exit handlers": "import atexit; atexit.register(print, 'over')",
    "threads are waited for": "import threading; threading.Timer(0.05, print, ['late']).start()",
    "what is global is freed last": "class A:\n    def __del__(self): print('freed')\na = A()\nprint('end')",
    "ctrl-c": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
    "killed": "import os, signal; print('unsaid'); os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "hook": "import sys; sys.excepthook = lambda *e: print(e[0].__name__)\nraise KeyError('mine')",
    "children": "import multiprocessing as mp\nif __name__ == '__main__':\n    c = mp.get_context('fork')\n"
    "    p = c.Process(target=print, args=(1,)); p.start(); p.join(); print(p.exitcode)",
}


@pytest.mark.parametrize("how", ["-c", "script", "-m"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_as_one_of_its_own(tmp_path: Path, name: str, how: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    start = {"-c": ["-c", PROGRAMS[name]], "script": [str(tmp_path / "program.py")], "-m": ["-m", "program"]}[how]
    command = [*start, "one", "--two"]
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
    warm = warm_programs.run(command, cwd=tmp_path)
    assert (warm.returncode, warm.stdout) == (alone.returncode, alone.stdout)
    assert warm.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
    assert warm.stderr.count("Traceback") == alone.stderr.count("Traceback")


def test_an_exception_is_told_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("def work():\n    raise ValueError('bad')\n\nwork()\n")
    told = warm_programs.run([script]).stderr
    assert f'File "{script}", line 2, in work\n    raise ValueError' in told and told.endswith("ValueError: bad\n")


def test_environment_and_time_limit() -> None:
    running = warm_programs.start(["-c", "import time; time.sleep(60)"])
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        running.communicate(timeout=0.05)
    running.kill()
    assert running.wait() == -9 and time.monotonic() - began < 20
    told = warm_programs.run(["-c", "import os; print(dict(os.environ))"], env={"ONLY": "this"})
    assert told.stdout == "{'ONLY': 'this'}\n"


def end(rank: int, how: str) -> None:
    print("said", Path.cwd(), os.getpid() < 100, os.environ["GLOO_SOCKET_IFNAME"], sent_bytes(), flush=True)
    print("complained", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM) if how == "is killed" else os._exit(7)


@pytest.mark.network
@pytest.mark.parametrize(("how", "code"), [("exits", 7), ("is killed", -signal.SIGTERM)])
def test_a_rank_that_enters_a_host_by_itself_is_to_its_tests_what_nsenter_starts(
    how: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = []
    try:
        hosts = EmulatedHosts()
    except OSError as error:
        pytest.skip(f"{error}")
    with hosts:
        for start in (warm_hosts.start_cold, warm_hosts.start_warm):
            monkeypatch.setattr(EmulatedHosts, "_start_rank", start)
            with pytest.raises(RuntimeError) as caught:
                hosts.spawn_ranks(end, [0, 1], how, timeout=50)
            told.append((str(caught.value), *capfd.readouterr()))
    here = f"said {Path.cwd()} True stretto0 0\n"
    assert told == [(f"ranks died without a traceback, exit codes by rank: {{0: {code:d}}}", here, "complained\n")] * 2
