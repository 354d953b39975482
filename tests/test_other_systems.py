"""Systems with no memory that ranks could share. Emulated: this Python forgets what that of macOS or Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import execute

MACOS = """
import fcntl, mmap, os, select, sys, sysconfig
import rich.console, torch, typer  # what they need of this system they have

assert sysconfig.get_paths()  # read now: later it looks for a file by the system's name


def forget(module, *names):
    for name in names:
        vars(module).pop(name, None)


sys.platform = "darwin"
forget(os, *(name for name in vars(os).copy() if name.startswith(("sched_", "MFD_"))))
forget(os, "memfd_create", "pidfd_open", "posix_fallocate", "pipe2", "eventfd")
forget(select, "epoll", "POLLRDHUP")
forget(mmap, "MADV_HUGEPAGE", "MAP_POPULATE")
forget(fcntl, "F_ADD_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def without_proc(event, arguments):
    if event in ("open", "os.listdir") and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def readlink(path, read=os.readlink):
    without_proc("open", [path])
    return read(path)


sys.addaudithook(without_proc)
os.readlink = readlink
"""
WINDOWS = (
    MACOS
    + """
import signal

sys.platform = "win32"
sys.modules.update(dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios", "pty", "tty"]))
forget(os, "fork", "register_at_fork", "getuid", "geteuid", "setsid", "killpg", "uname", "sysconf", "WNOHANG")
forget(os, "getloadavg")
forget(signal, "SIGSTOP", "SIGCONT", "SIGALRM", "SIGUSR1", "SIGHUP", "SIGCHLD", "setitimer", "sigwait")
forget(select, "poll")
forget(mmap, "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE")
"""
)
PROGRAM = """
import logging

import torch.distributed as dist

import stretto
import stretto.cli.doctor, stretto.cli.machine, stretto.bench

rank, folder = int(sys.argv[1]), sys.argv[2]
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
sync = stretto.attach(model)
optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)


def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4) * (rank + torch.arange(3.0)[:, None])).sum().backward()
    optimizer.step()


for _ in range(3):
    step()
assert model[2].bias.grad.item() == 3.0
sync.check()
with sync.trace(folder + "/trace"):
    step()
sync.report()
sync.detach()
stretto.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
assert "whether it was quiet is not known" in str(stretto.bench.this_machine(0.01))
stretto.cli.machine.look_at_machine()
print("trained")
dist.destroy_process_group()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(("system", "lacks"), [("darwin", MACOS), ("win32", WINDOWS)], ids=["macOS", "Windows"])
def test_training_goes_over_the_process_group(tmp_path: Path, system: str, lacks: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(lacks + PROGRAM))
    lines = [[sys.executable, str(program), str(rank), str(tmp_path)] for rank in range(2)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(line, env=environment, **pipes) for line in lines]
    try:
        found = [one.communicate(timeout=90) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    why = f"gradients go over process_group (gloo), not through shared memory: rank 0: {system} has no memfd_create"
    assert [one.returncode for one in started] == [0, 0], found
    lines = [printed.splitlines() for printed, _ in found]
    assert [line for line in lines[0] if line.startswith("gradients go over")] == [why, why], found
    assert [one[-1] for one in lines] == ["trained"] * 2, found


def test_ranks_are_started_by_torchrun_on_windows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert execute(["run", "--ranks", "3", "-m", "train", "--lr", "1"]) == 2
    assert capsys.readouterr().err.removeprefix("stretto: ").strip() == (
        "stretto run does not work on Windows: use torchrun --nproc-per-node 3 -m train --lr 1"
    )
