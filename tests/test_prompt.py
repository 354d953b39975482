"""Gloo's threads, and ranks that are waited for, go first where Linux lets a thread choose how long its slices are."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.testing import spawn_ranks
from stretto.transport import ProcessGroupTransport, choose, prompt
from stretto.transport.prompt import SLICE_NANOSECONDS, WokenFirst, let_gloo_go_first, shorten

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has such slices")


def attributes(thread: int) -> tuple[int, int, int]:
    """Policy, niceness and slice in nanoseconds."""
    found = prompt._Attributes()
    _, ask = prompt._NUMBERS[platform.machine()]
    assert ctypes.CDLL(None).syscall(ask, thread, ctypes.byref(found), ctypes.sizeof(found), 0) == 0
    return found.policy, found.nice, found.runtime


class Sleeper:
    """A thread that does nothing."""

    def __enter__(self) -> int:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end.wait)
        self._thread.start()
        assert self._thread.native_id is not None
        return self._thread.native_id

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def slices_can_be_chosen() -> bool:
    with Sleeper() as thread:
        shorten(thread)
        return attributes(thread)[2] == SLICE_NANOSECONDS


def names_of_threads() -> list[str]:
    return [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]


def slices_of_threads(rank: int) -> dict[str, set[int]]:
    while sum("gloo" in name for name in names_of_threads()) < 3:
        time.sleep(0.01)  # each takes its name when it runs first, on a busy machine later than we get here
    ProcessGroupTransport()
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        kind = "Gloo's" if "gloo" in (task / "comm").read_text() else "others"
        found.setdefault(kind, set()).add(attributes(int(task.name))[2])
    return found


@pytest.mark.ranks
def test_threads_of_gloo_have_the_shortest_slices_and_no_others() -> None:
    if not slices_can_be_chosen():
        pytest.skip("this kernel has the same slices for all threads")
    for found in spawn_ranks(slices_of_threads, 2):
        assert found["Gloo's"] == {SLICE_NANOSECONDS}
        assert SLICE_NANOSECONDS not in found["others"]


def slices_asleep_and_awake(rank: int) -> tuple[int, int]:
    """Of a rank that waits for one which only goes on when it has seen it asleep, with the shortest slices."""
    transport = choose(ProcessGroupTransport(), "shared_memory")
    pids = transport.all_gather_object(os.getpid())
    before = attributes(0)[2]
    while rank == 0 and attributes(pids[1])[2] != SLICE_NANOSECONDS:
        time.sleep(0.01)
    transport.all_reduce(torch.ones(3)).wait()
    return before, attributes(0)[2]


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_a_rank_has_the_shortest_slices_only_while_it_sleeps() -> None:
    if not slices_can_be_chosen():
        pytest.skip("this kernel has the same slices for all threads")
    for before, behind in spawn_ranks(slices_asleep_and_awake, 2):
        assert before == behind != SLICE_NANOSECONDS


def slices_of_new_threads(rank: int, numel: int) -> tuple[int, set[int]]:
    """The first operation that is large enough for OpenMP's threads is what rank 1 does with a message it slept for."""
    transport = choose(ProcessGroupTransport(), "shared_memory")
    torch.set_num_threads(3)
    before, known = attributes(0)[2], {task.name for task in Path("/proc/self/task").iterdir()}
    if rank == 0:
        time.sleep(0.3)
    transport.broadcast(torch.empty(numel), 0).wait()
    new = {task.name for task in Path("/proc/self/task").iterdir()} - known
    return before, {attributes(int(one))[2] for one in new}


@pytest.mark.ranks
@pytest.mark.timeout(60)
def test_threads_that_are_made_for_what_a_rank_has_waited_for_have_ordinary_slices() -> None:
    """OpenMP's threads had the shortest ones, for good."""
    if not slices_can_be_chosen():
        pytest.skip("this kernel has the same slices for all threads")
    for before, new in spawn_ranks(slices_of_new_threads, 2, 1 << 20):
        assert new == {before}


def test_slices_are_those_of_before_at_the_end() -> None:
    before, first = attributes(0), WokenFirst()
    first.end()
    assert attributes(0) == before
    for _ in range(2):  # as it waits again
        for _ in range(2):  # as it sleeps again
            first.begin()
            assert attributes(0) == (*before[:2], SLICE_NANOSECONDS if slices_can_be_chosen() else before[2])
        first.end()
        assert attributes(0) == before


def test_niceness_that_is_changed_inside_stays() -> None:
    before = attributes(0)

    def nice() -> None:
        first = WokenFirst()
        first.begin()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), before[1] + 2)
        first.end()
        found.append(attributes(0))

    found: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=nice)
    thread.start()
    thread.join()
    assert found == [(before[0], before[1] + 2, before[2])]


KERNEL = prompt._system_calls()
REFUSED = prompt._Calls(set=lambda *_: -1, get=KERNEL and KERNEL.get)
"""A sandbox that lets nobody choose."""
UNKNOWN = prompt._Calls(set=lambda *_: -1, get=lambda *_: -1)
"""An old kernel."""


@pytest.mark.parametrize("calls", [UNKNOWN, REFUSED, None], ids=["unknown", "refused", "another processor"])
def test_where_slices_cannot_be_chosen_nothing_happens(monkeypatch: pytest.MonkeyPatch, calls: Any) -> None:
    before = attributes(0)
    monkeypatch.setattr(prompt, "_system_calls", lambda: calls)
    first = WokenFirst()
    first.begin()
    assert attributes(0) == before
    first.end()
    let_gloo_go_first()
    assert attributes(0) == before


def test_policy_and_niceness_stay() -> None:
    with Sleeper() as thread:
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + 3)
        before = attributes(thread)
        shorten(thread)
        assert attributes(thread)[:2] == before[:2]
        assert before[0] == os.SCHED_BATCH


def test_names_of_other_threads_may_be_anything() -> None:
    end = threading.Event()

    def named() -> None:
        assert ctypes.CDLL(None).prctl(15, b"\xff\xe4") == 0  # PR_SET_NAME
        set_up.set()
        end.wait()

    set_up, thread = threading.Event(), threading.Thread(target=named)
    thread.start()
    try:
        assert set_up.wait(5)
        let_gloo_go_first()
    finally:
        end.set()
        thread.join()


def test_a_thread_that_has_ended_is_passed_over() -> None:
    with Sleeper() as thread:
        pass
    shorten(thread)


def test_a_thread_that_has_ended_hides_none_of_gloo_s(monkeypatch: pytest.MonkeyPatch) -> None:
    if not slices_can_be_chosen():
        pytest.skip("this kernel has the same slices for all threads")
    with Sleeper() as gone:
        pass
    there = Path.read_bytes
    with Sleeper() as thread:
        Path(f"/proc/self/task/{thread}/comm").write_text("gloo_thread")
        first = min((int(task.name) for task in Path("/proc/self/task").iterdir()), default=0)

        def read(self: Path) -> bytes:
            return there(Path(f"/proc/self/task/{gone}/comm") if self.parent.name == str(first) else self)

        monkeypatch.setattr(Path, "read_bytes", read)
        let_gloo_go_first()
        assert attributes(thread)[2] == SLICE_NANOSECONDS


def test_without_a_free_descriptor_threads_keep_their_slices() -> None:
    """What then fails for want of one says so by name; this did not."""
    let_gloo_go_first()  # it has looked up the system's calls now
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        let_gloo_go_first()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_only_processors_whose_calls_are_known_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert prompt._system_calls.__wrapped__() is None
