"""When ranks cannot share memory, and when there is not enough of it: what is used instead, and what is said."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import fork_ranks, in_warm_process

import stretto
from stretto import system_memory
from stretto.testing import run_ranks
from stretto.transport import choose, futex, memory, page
from stretto.transport.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.timeout(120)
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_PRIVATE = 16384, 1 << 18
NOBODY = 65534
CPU = torch.device("cpu")
Tell = Callable[[Any], None]


# What is asked for


def refusals(*asked: str) -> list[str]:
    """What each rank raises, or the name of the transport that it gets."""

    def worker(base: Any) -> str:
        try:
            return choose(base, asked[base.rank]).name
        except stretto.SetupError as error:
            return str(error)

    return run_ranks(worker, len(asked))


def test_what_can_be_asked_for() -> None:
    assert refusals("auto", "auto") == ["shared_memory"] * 2
    assert refusals("shared_memory", "shared_memory") == ["shared_memory"] * 2
    assert refusals("process_group", "process_group") == ["local (threads of one process)"] * 2
    for rank, text in enumerate(refusals("auto", "mpi")):
        assert text == (
            f'rank {rank}: transport=\'mpi\' is not known: use one of "auto", "shared_memory", "process_group", '
            "or an instance of a subclass of stretto.transport.Transport"
        )
    for rank, text in enumerate(refusals("auto", "shared_memory", "auto")):
        assert text == (
            f'rank {rank}: ranks ask for different transports: rank 0 "auto", rank 1 "shared_memory", rank 2 "auto".\n'
            "Give the same on all ranks."
        )


def test_a_rank_without_tensors_on_the_host_has_nothing_to_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stretto"):
        names = run_ranks(lambda base: choose(base, "auto", on_host=base.rank != 1).name, 2)
    assert names == ["local (threads of one process)"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "gradients go over local (threads of one process), not through shared memory: "
        "rank 1: its parameters and buffers are all on an accelerator"
    ]


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [
        ("darwin", "arm64", "darwin has no futex"),
        ("linux", "riscv64", "the memory order of riscv64 was not looked at"),
    ],
)
def test_machines_whose_memory_order_is_not_known(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, reason: str
) -> None:
    monkeypatch.setattr(futex.sys, "platform", system)
    monkeypatch.setattr(futex.platform, "machine", lambda: machine)
    assert futex.why_not() == reason


# What keeps one rank of three from it. Each is applied to rank 1 alone, once before and once after there is a group.


def nothing(rank: int) -> None:
    pass


def no_memfd(rank: int) -> None:
    del os.memfd_create


def forbidden_memfd(rank: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.memfd_create = refuse


def no_descriptors(rank: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    os.memfd_create = refuse


def no_memory(rank: int) -> None:
    memory.available_bytes = lambda: 0


def wrong_token(rank: int) -> None:
    make = page.Page.__init__

    def init(self: page.Page, of: int) -> None:
        make(self, of)
        self.address = replace(self.address, token=bytes(page.TOKEN_BYTES))

    page.Page.__init__ = init


def other_file(rank: int) -> None:
    """The descriptor that it announces is something else here, as in another container."""
    make = page.Page.__init__

    def init(self: page.Page, of: int) -> None:
        make(self, of)
        self.address = replace(self.address, fd=0)

    page.Page.__init__ = init


def no_proc(rank: int) -> None:
    libc = ctypes.CDLL(None)
    libc.unshare(CLONE_NEWNS)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    libc.mount(b"none", b"/proc", b"tmpfs", 0, None)


def another_user(rank: int) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def another_pid_namespace(rank: int) -> None:
    ctypes.CDLL(None).unshare(CLONE_NEWPID)
    if pid := os.fork():  # the child has the other namespace, and is the rank
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


NO_FILE = r"the memory of rank 1 cannot be opened: "
HANDICAPS = {
    "no memfd_create": (nothing, no_memfd, "rank 1: linux has no memfd_create"),
    "memfd_create forbidden": (nothing, forbidden_memfd, "rank 1: memfd_create: Operation not permitted"),
    "no descriptors left": (nothing, no_descriptors, "rank 1: memfd_create: Too many open files"),
    "no memory": (nothing, no_memory, "rank 1: memfd_create: 0 MiB asked for, 0 MiB available"),
    "another token": (nothing, wrong_token, "rank 0: the memory of rank 1 cannot be opened: process PID here is "),
    "another file": (nothing, other_file, "rank 0: the memory of rank 1 cannot be opened: is not stretto's"),
    "no /proc": (no_proc, nothing, "rank 1: the memory of rank 0 cannot be opened: No such file or directory"),
    "another user": (another_user, nothing, "rank 1: the memory of rank 0 cannot be opened: Permission denied"),
    "another pid namespace": (another_pid_namespace, nothing, "rank 0: the memory of rank 1 cannot be opened: "),
}


def attach_somehow(rank: int, tell: Tell, handicap: str, asked: str) -> Any:
    """How the handle describes itself and what was logged; or what was raised."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("stretto").addHandler(handler)
    logging.getLogger("stretto").setLevel(logging.INFO)
    if rank == 1:
        HANDICAPS[handicap][1](rank)
    model = torch.nn.Linear(3, 2)
    try:
        sync = stretto.attach(model, transport=asked)
    except stretto.SetupError as error:
        return str(error), lines
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    return sync.describe().splitlines()[0], lines


def ranks_with(folder: str, handicap: str, asked: str) -> list[Any]:
    def before(rank: int) -> None:
        if rank == 1:
            HANDICAPS[handicap][0](rank)

    os.chmod(folder, 0o777)
    ranks = fork_ranks(attach_somehow, 3, folder, handicap, asked, before=before)
    return [(*rank.hear(), rank.complaints.read_text(), rank.end()) for rank in ranks]


def open_to_others(folder: Path) -> None:
    """As pytest's folders are not, however many of them lie one in the other."""
    while not folder.stat().st_mode & 0o001:
        folder.chmod(0o755)
        folder = folder.parent


def skip_unless_permitted(handicap: str) -> None:
    if handicap in ("another user", "no /proc", "another pid namespace") and os.getuid() != 0:
        pytest.skip("only root can become another user or make a namespace")
    flag = {"no /proc": CLONE_NEWNS, "another pid namespace": CLONE_NEWPID}.get(handicap, 0)
    pid = os.fork()
    if not pid:
        os._exit(ctypes.CDLL(None).unshare(flag) != 0)
    if os.waitpid(pid, 0)[1]:
        pytest.skip("namespaces cannot be made here")


@pytest.mark.ranks
@pytest.mark.parametrize("handicap", HANDICAPS)
def test_what_one_rank_cannot_do_is_gone_around(tmp_path: Path, handicap: str) -> None:
    skip_unless_permitted(handicap)
    open_to_others(tmp_path.parent)
    found = in_warm_process(ranks_with, str(tmp_path), handicap, "auto")
    over, told = "process_group (gloo)", "gradients go over process_group (gloo), not through shared memory: "
    if handicap == "another user":  # the other two share theirs
        over = "hierarchical (3 ranks on 2 hosts)"
        told = "gradients are summed in the memory of each of 2 hosts, then over hosts: "
    for rank, (said, lines, complaint, code) in enumerate(found):
        assert (said, code) == (f"rank {rank} of 3 over {over}", 0)
        assert not complaint or (handicap == "no /proc" and "/proc/cpuinfo" in complaint)  # torch's own
        if rank == 0:
            (line,) = lines
            assert re.sub(r"process \d+", "process PID", line).startswith(told + HANDICAPS[handicap][2]), line
        else:
            assert lines == []


@pytest.mark.ranks
@pytest.mark.parametrize("handicap", ["no memfd_create", "another user"])
def test_all_ranks_raise_where_shared_memory_was_insisted_on(tmp_path: Path, handicap: str) -> None:
    skip_unless_permitted(handicap)
    open_to_others(tmp_path.parent)
    found = in_warm_process(ranks_with, str(tmp_path), handicap, "shared_memory")
    why = HANDICAPS[handicap][2]
    for rank, (text, lines, complaint, code) in enumerate(found):
        assert text == (
            f'rank {rank}: transport="shared_memory" is not available: {why}.\n'
            'Attach with transport="auto", which then uses the process group.'
        )
        assert (lines, complaint, code) == ([], "", 0)


def test_a_page_that_another_process_has_at_that_place() -> None:
    own = page.Page(0)
    with pytest.raises(OSError) as caught:
        page.Peer(3, replace(own.address, token=bytes(page.TOKEN_BYTES)))
    assert str(caught.value) == f"process {os.getpid()} here is not rank 3"
    with pytest.raises(OSError, match="is a different file now"):
        memory.open_peers(own.address.pid, own.address.fd, 2**30)
    assert not page.Peer(0, own.address).is_dead()


def test_only_the_same_user_can_open_an_arena(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    own = page.Page(0)
    assert os.fstat(own.address.fd).st_mode & 0o777 == 0o600
    pid = os.fork()
    if not pid:
        code = 0
        try:
            another_user(0)
            for path in (f"/proc/{os.getppid()}/fd/{own.address.fd}", f"/proc/self/fd/{own.address.fd}"):
                try:
                    os.open(path, os.O_RDONLY)
                except (PermissionError, FileNotFoundError):  # where hidepid= hides the other user's process
                    code += 1
        finally:  # else the child goes on as a second worker of pytest, beside the first
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


# Not enough memory


def test_what_is_available_is_read_from_the_system() -> None:
    available = memory.available_bytes()
    assert available is not None and 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_what_control_groups_leave_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that it has read, and reads no more, are given up for others; the narrowest of all groups counts."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def limit(group: str, most: object, used: int, read: int, *, version: int) -> None:
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        write(f"{group}/{names[0]}", f"{most}\n")
        write(f"{group}/{names[1]}", f"{used}\n")
        own = "" if version == 2 else f"total_inactive_file {read}\n"  # version 1 tells those of groups below apart
        write(f"{group}/memory.stat", f"anon 7\ninactive_file {read if version == 2 else 0}\n{own}")

    monkeypatch.setattr(system_memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert memory.available_bytes() is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert memory.available_bytes() == 5000 * 1024
    write("proc/self/cgroup", "4:cpu:/job\n3:memory,pids:/job\n0::/job/step\n")
    for group, most in [("job/step", "max"), ("job", 4_000_000), ("", 4_500_000)]:
        limit(f"sys/fs/cgroup/{group}", most, 2_000_000, 500_000, version=2)
    assert memory.available_bytes() == 2_500_000
    limit("sys/fs/cgroup/memory", 3_000_000, 2_000_000, 300_000, version=1)
    assert memory.available_bytes() == 1_300_000
    limit("sys/fs/cgroup/memory/job", 2_500_000, 2_000_000, 300_000, version=1)
    assert memory.available_bytes() == 800_000


NO_MEMORY = (
    "rank {0}: no shared memory for gradients: {1}.\n"
    "Free memory, raise the limits of this process (ulimit -n, -v, -f) or of the container, or attach with "
    'transport="process_group".'
)
TOLD = (
    "rank {0}, pass 1: what the old buckets did not carry could not be reduced over shared_memory: rank 1 cannot go "
    "on: no shared memory for gradients: {1}.\n"
    "Remove the cause and start again, on all ranks."
)


def one_without_memory(rank: int, tell: Tell, when: str, limit: str) -> Any:
    """What was raised, and when; rank 1 goes on living for a while."""

    def handicap() -> None:
        if rank == 1 and limit == "memory":
            memory.available_bytes = lambda: 18 * 1024 * 1024  # of which 16 are the program's
        elif rank == 1:
            no_descriptors(rank)

    if when == "while attaching":
        handicap()
    tell("ready")
    model = torch.nn.Sequential(torch.nn.Linear(1200, 1200), torch.nn.Linear(1200, 10))
    try:
        stretto.attach(model, transport="shared_memory")
        if when == "in training":
            handicap()
        for _ in range(6):
            model[0].weight = torch.nn.Parameter(torch.ones(1200, 1200))  # so that buckets are made anew
            model(torch.ones(1, 1200)).sum().backward()
    except stretto.CommunicationError as error:
        found = time.monotonic(), type(error).__name__, str(error)
        if rank == 1:
            time.sleep(5)
        return found


def ranks_of_which_one_has_no_memory(folder: str, when: str, limit: str) -> list[Any]:
    ranks = fork_ranks(one_without_memory, 3, folder, when, limit)
    for rank in ranks:
        rank.hear()
    return [(*rank.hear(), rank.complaints.read_text(), rank.end()) for rank in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("when", "limit", "reason"),
    [
        ("while attaching", "memory", "4 MiB asked for, 2 MiB available"),
        ("in training", "memory", "MiB asked for, 2 MiB available"),
        ("in training", "descriptors", "Too many open files"),
    ],
)
def test_one_rank_has_no_memory(tmp_path: Path, when: str, limit: str, reason: str) -> None:
    """The others learn of it at once, while it lives and says nothing."""
    found = in_warm_process(ranks_of_which_one_has_no_memory, str(tmp_path), when, limit)
    failed = found[1][0]
    for rank, (raised, kind, text, complaint, code) in enumerate(found):
        assert (complaint, code) == ("", 0)
        plain = re.sub(r"\d+ MiB asked", "MiB asked", text) if when == "in training" else text
        mine = NO_MEMORY.format(1, reason)
        if when == "while attaching":
            mine = mine.replace("rank 1:", "rank 1, attach: what ranks hold could not be gathered over shared_memory:")
        if rank == 1:
            assert (kind, plain) == ("CommunicationError", mine)
        elif when == "in training":
            assert (kind, plain) == ("PeerError", TOLD.format(rank, reason))
        else:
            assert (kind, re.sub(r"py:\d+", "py:LINE", plain)) == (
                "PeerError",
                f"rank {rank}, attach: rank 1 failed and left, so nobody can complete this attach.\n"
                f"  rank 1, attach: CommunicationError: {mine} "
                "(test_shared_memory_limits.py:LINE in one_without_memory)\n"
                "Remove the cause and start again, on all ranks.",
            )
        assert raised - failed < 3


def test_a_limit_of_descriptors_is_told_and_nothing_is_left() -> None:
    def worker(base: Any) -> str:
        transport = choose(base, "shared_memory")
        gc.collect()  # what other tests have left
        before = os.listdir("/proc/self/fd")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
        try:
            transport.allocate(10, torch.float32, CPU)
        except stretto.CommunicationError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            assert len(os.listdir("/proc/self/fd")) <= len(before)

    assert run_ranks(worker, 1) == [NO_MEMORY.format(0, "Too many open files")]


def test_memory_of_a_peer_that_cannot_be_mapped_is_told() -> None:
    """There may be descriptors and addresses for a rank's own memory, and none for that of all others."""

    def cannot(location: object, nbytes: int) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def worker(base: Any) -> str:
        transport: Any = choose(base, "shared_memory")
        tensor = transport.allocate(100_000, torch.float32, CPU)
        if base.rank == 1:
            transport.host.peers[0].memory.bytes_at = cannot
        with pytest.raises(stretto.CommunicationError) as caught:
            transport.all_reduce(tensor).wait()
        return f"{type(caught.value).__name__}: {caught.value}"

    assert run_ranks(worker, 2) == [
        "PeerError: rank 0: rank 1 cannot go on: the memory of another rank cannot be mapped: Too many open files.\n"
        "Remove the cause and start again, on all ranks.",
        "CommunicationError: rank 1: the memory of another rank cannot be mapped: Too many open files.\n"
        "Raise the limits of this process (ulimit -n, ulimit -v) or of the container, or attach with "
        'transport="process_group".',
    ]


# A control group that is really full


def group_of_memory() -> Path | None:
    """Where control groups for memory can be made, of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for group in (Path("/sys/fs/cgroup/memory") / path.lstrip("/"), Path("/sys/fs/cgroup/memory")):
                if os.access(group / "cgroup.procs", os.W_OK):
                    return group
    return None


def take_all(rank: int, tell: Tell) -> Any:
    """What was raised when there was no more, and how much there was."""
    transport = choose(stretto.transport.ProcessGroupTransport(), "shared_memory")
    assert isinstance(transport, SharedMemoryTransport)
    taken = []
    try:
        while True:
            taken.append(transport.allocate(16 * 1024 * 1024, torch.uint8, CPU))
    except stretto.CommunicationError as error:
        for tensor in taken:
            tensor.fill_(1)  # it was reserved
        return str(error), len(taken)


def fill_a_group(folder: str, group: str) -> list[Any]:
    Path(group, "memory.limit_in_bytes").write_text(str(400 * 1024 * 1024))
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    ranks = fork_ranks(take_all, 3, folder)
    return [(*rank.hear(60), rank.complaints.read_text(), rank.end()) for rank in ranks]


@pytest.mark.ranks
def test_a_full_control_group_gives_an_error_and_no_signal(tmp_path: Path) -> None:
    parent = group_of_memory()
    if parent is None:
        pytest.skip("no control group for memory can be made here (version 1, as root)")
    group = parent / f"stretto-{os.getpid()}"
    group.mkdir()
    try:
        found = in_warm_process(fill_a_group, str(tmp_path), str(group))
        assert "oom_kill 0" in (group / "memory.oom_control").read_text().splitlines()
    finally:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                group.rmdir()
                break
            except OSError:  # its processes are just ending
                time.sleep(0.05)
    for rank, (text, _, complaint, code) in enumerate(found):
        assert (complaint, code) == ("", 0)
        assert re.sub(r"\d+ MiB (\w)", r"N MiB \1", text) == NO_MEMORY.format(rank, "N MiB asked for, N MiB available")
    assert sum(taken for _, taken, _, _ in found) >= 8, "a good part of it could be had"
    assert signal.SIGBUS not in {-code for *_, code in found}
