"""Sums and copies through memory that ranks share, bit by bit; most of it on ranks that are threads of this process."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from warm import fork_ranks, in_warm_process

import stretto
from stretto.testing import run_ranks
from stretto.transport import LocalTransport, ProcessGroupTransport, SharedMemoryTransport, choose
from stretto.transport.futex import Futex
from stretto.transport.memory import CHUNK_BYTES, SEGMENTS
from stretto.transport.page import ASLEEP, ENTRIES, FINISHED, PUBLISHED, SEQUENCE, Page
from stretto.transport.sums import BLOCK_BYTES, PIECE_BYTES, SMALL_BYTES

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64, torch.complex128]
PATIENCE = 30.0


def shared(worker: Callable[[SharedMemoryTransport], Any], world: int) -> list[Any]:
    """What ``worker`` returns on each rank; ranks are threads, and open each other's memory as processes do."""

    def run(base: LocalTransport) -> Any:
        transport = choose(base, "shared_memory")
        assert isinstance(transport, SharedMemoryTransport)
        return worker(transport)

    return run_ranks(run, world, timeout=PATIENCE)


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, dtype=torch.float32, generator=generator).mul_(3).to(dtype)
    return torch.randint(0, 20, (numel,), dtype=dtype, generator=generator)


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum as it is promised: half types in float32, rounded once."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def placed(transport: SharedMemoryTransport, tensor: torch.Tensor, inside: bool) -> torch.Tensor:
    """The same values, in shared memory or not; there neither at the beginning nor at the end of what was allocated."""
    if not inside:
        return tensor.clone()
    room = transport.allocate(tensor.numel() + 24, tensor.dtype, CPU)
    return room[8 : 8 + tensor.numel()].copy_(tensor)


# Right


@dataclass(frozen=True)
class Call:
    kind: str
    numel: int
    dtype: torch.dtype
    inside: bool
    root: int


def sizes(dtype: torch.dtype) -> st.SearchStrategy[int]:
    edges = [edge // dtype.itemsize + more for edge in (SMALL_BYTES, BLOCK_BYTES) for more in (-1, 0, 1)]
    return st.sampled_from([0, 1, 63, 64, 65, *edges]) | st.integers(0, 3000) | st.integers(0, 70_000)


@st.composite
def programs(draw: Any) -> tuple[int, list[Call], int]:
    world = draw(st.integers(1, 8))
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from(DTYPES))
        kind = draw(st.sampled_from(["all_reduce", "all_reduce", "broadcast"]))
        calls.append(Call(kind, draw(sizes(dtype)), dtype, draw(st.booleans()), draw(st.integers(0, world - 1))))
    return world, calls, draw(st.integers(0, 2**20))


def play(transport: SharedMemoryTransport, calls: Sequence[Call], seed: int, salt: int = 0) -> list[torch.Tensor]:
    """Post all calls, at times and with waits in an order that differ from rank to rank."""
    mine = random.Random(100 * seed + transport.rank)
    tensors, waiting = [], []
    for number, call in enumerate(calls):
        if mine.random() < 0.3:
            time.sleep(mine.random() * 0.002)
        tensor = placed(transport, values(transport.rank, call.numel, call.dtype, salt + number), call.inside)
        tensors.append(tensor)
        reduces = call.kind == "all_reduce"
        waiting.append(transport.all_reduce(tensor) if reduces else transport.broadcast(tensor, call.root))
        while waiting and mine.random() < 0.4:
            work = waiting.pop(mine.randrange(len(waiting)))
            work.wait(*mine.choice([[], [timedelta(seconds=PATIENCE)]]))
            assert work.is_completed()
    mine.shuffle(waiting)
    for work in waiting:
        work.wait()
    return tensors


def wanted(calls: Sequence[Call], world: int, salt: int = 0) -> list[torch.Tensor]:
    found = []
    for number, call in enumerate(calls):
        parts = [values(rank, call.numel, call.dtype, salt + number) for rank in range(world)]
        found.append(in_rank_order(parts) if call.kind == "all_reduce" else parts[call.root])
    return found


def assert_all_have(
    wanted: Sequence[torch.Tensor], of_ranks: Sequence[Sequence[torch.Tensor]], calls: Sequence[Call]
) -> None:
    for rank, tensors in enumerate(of_ranks):
        for call, found, expected in zip(calls, tensors, wanted, strict=True):
            assert same(found, expected), (rank, call)


@settings(max_examples=200)
@given(programs())
def test_random_programs_of_collectives(program: tuple[int, list[Call], int]) -> None:
    world, calls, seed = program
    assert_all_have(wanted(calls, world), shared(lambda transport: play(transport, calls, seed), world), calls)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["in shared memory", "elsewhere"])
def test_every_dtype_at_every_edge(dtype: torch.dtype, inside: bool) -> None:
    edges = [0, 1, 63, 64, 65] + [
        edge // dtype.itemsize + more
        for edge in (SMALL_BYTES, BLOCK_BYTES, 3 * BLOCK_BYTES, PIECE_BYTES)
        for more in (-1, 0, 1)
    ]
    calls = [Call(kind, numel, dtype, inside, 1) for numel in edges for kind in ("all_reduce", "broadcast")]
    assert_all_have(wanted(calls, 3), shared(lambda transport: play(transport, calls, 0), 3), calls)


def test_half_types_are_rounded_once() -> None:
    parts = [1.0, 2.0**-8, 2.0**-8]  # rounded after each addition, bfloat16 stays at 1

    def worker(transport: SharedMemoryTransport) -> tuple[float, float]:
        small = torch.full((5,), parts[transport.rank], dtype=torch.bfloat16)
        large = torch.full((20_000,), parts[transport.rank], dtype=torch.bfloat16)
        transport.all_reduce(small).wait()
        transport.all_reduce(large).wait()
        return small[0].item(), large[-1].item()

    assert shared(worker, 3) == [(1 + 2.0**-7,) * 2] * 3


@pytest.mark.parametrize("world", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_more_ranks_than_cores(world: int) -> None:
    calls = [Call("all_reduce", numel, torch.float32, inside, 0) for numel in (3, 5000, 70_000) for inside in (0, 1)]
    calls.append(Call("broadcast", 1000, torch.float32, False, world - 1))
    assert_all_have(wanted(calls, world), shared(lambda transport: play(transport, calls, 1), world), calls)


def test_objects() -> None:
    def worker(transport: SharedMemoryTransport) -> list[Any]:
        rank = transport.rank
        return [transport.all_gather_object({"rank": rank, "text": "x" * 100_000 * rank}) for _ in range(2)][1]

    assert shared(worker, 3) == [[{"rank": rank, "text": "x" * 100_000 * rank} for rank in range(3)]] * 3


def test_gathered_objects_are_each_ranks_own() -> None:
    """With threads too: what one rank changes later must not change what another was given, or has brought."""

    def worker(transport: Any) -> list[list[int]]:
        mine = [transport.rank]
        everyone: list[list[int]] = transport.all_gather_object(mine)
        mine.append(7)
        everyone[0].append(8 + transport.rank)
        transport.all_gather_object(None)
        return everyone

    assert run_ranks(worker, 2, timeout=PATIENCE) == [[[0, 8], [1]], [[0, 9], [1]]]


# Long


def start_at(transport: SharedMemoryTransport, number: int) -> None:
    """As if so many messages had been through."""
    host = transport.host
    host._number = number
    for word in (PUBLISHED, FINISHED):
        host.page.set(word, number)


@pytest.mark.parametrize("before", [5, ENTRIES + 3, SEQUENCE // 2 + 3])
def test_the_counters_begin_again(before: int) -> None:
    """At the end of their range, and where the sign of a difference turns."""
    calls = [Call("all_reduce", numel, torch.float32, True, 0) for numel in (7, 9000)] * 6
    calls += [Call("broadcast", 100, torch.float32, True, 1)]
    together = threading.Barrier(3)

    def worker(transport: SharedMemoryTransport) -> list[list[torch.Tensor]]:
        start_at(transport, SEQUENCE - before)
        together.wait()
        return [play(transport, calls, turn, salt=100 * turn) for turn in range(before // 10 if before < 2000 else 3)]

    for turn, tensors in enumerate(zip(*shared(worker, 3), strict=True)):
        assert_all_have(wanted(calls, 3, 100 * turn), tensors, calls)


@pytest.mark.parametrize("numel", [10, 5000])
def test_more_messages_than_the_ring_has_entries(numel: int) -> None:
    """Posting waits only when the ring is full, and then for the others to go on, not for a wait of its own."""

    def worker(transport: SharedMemoryTransport) -> bool:
        tensors = [placed(transport, torch.full((numel,), float(n)), inside=True) for n in range(3 * ENTRIES)]
        works = [transport.all_reduce(tensor) for tensor in tensors]
        random.Random(transport.rank).shuffle(works)
        for work in works:
            work.wait()
        return all(bool((tensor == 2 * n).all()) for n, tensor in enumerate(tensors))

    assert shared(worker, 2) == [True, True]


# Memory comes and goes


def mappings() -> int:
    """Of shared memory, in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:stretto")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_use() -> tuple[int, int]:
    """Both, when collecting frees nothing more: behind an error, of an earlier test too, it takes two collections."""
    before = None
    while (now := (mappings(), descriptors())) != before:
        before = now
        for _ in range(2):
            gc.collect()
    return now


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    before = in_use()
    yield
    assert in_use() == before


def test_nothing_is_left_when_all_ranks_are_gone() -> None:
    def worker(transport: SharedMemoryTransport) -> None:
        play(transport, [Call("all_reduce", 70_000, torch.float32, True, 0)] * 3, 0)

    shared(worker, 3)  # what is bound once
    with nothing_left():
        for _ in range(5):
            shared(worker, 3)


def test_memory_goes_with_its_tensors_and_peers_give_up_theirs() -> None:
    """Many times: room for segments, numbers and descriptors comes again."""
    together = threading.Barrier(2)
    large = CHUNK_BYTES // 4

    def worker(transport: SharedMemoryTransport) -> list[int]:
        kept = placed(transport, torch.ones(5000), inside=True)
        transport.all_reduce(kept).wait()
        counts = []
        for turn in range(SEGMENTS + 100):
            tensor = transport.allocate(large, torch.float32, CPU)
            if turn % 50 == 0:
                tensor.fill_(transport.rank + 1)
                transport.all_reduce(tensor).wait()
                assert (tensor[0], tensor[-1]) == (3, 3)
            del tensor
            if turn % 50 == 0:
                for _ in range(2):  # peers look when nothing is under way
                    transport.all_reduce(kept).wait()
                together.wait()
                counts.append(mappings())
                together.wait()
        return counts

    with nothing_left():
        for counts in shared(worker, 2):
            assert max(counts[1:]) <= counts[0] + 4, counts


def test_segments_are_counted() -> None:
    def worker(transport: SharedMemoryTransport) -> str:
        host = transport.host
        host.page.arena._free_lines[:] = host.page.arena._free_lines[:3]
        held = []
        with pytest.raises(stretto.CommunicationError) as caught:
            for _ in range(4):
                held.append(transport.allocate(20 * CHUNK_BYTES, torch.uint8, CPU))
        return str(caught.value)

    assert SEGMENTS == 512
    assert shared(worker, 1) == [
        "rank 0: more than 512 pieces of shared memory are in use.\n"
        'Detach handles that are not needed any more, or attach with transport="process_group".'
    ]


def test_a_plan_that_is_cut_again_and_again_takes_no_more_memory() -> None:
    def worker(transport: SharedMemoryTransport) -> tuple[int, list[tuple[int, int]]]:
        model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(8)])
        sync = stretto.attach(model, transport=transport)
        found = []
        for turn in range(30):
            model[turn % 7].weight = torch.nn.Parameter(model[turn % 7].weight.detach().clone())
            model(torch.ones(2, 300)).sum().backward()
            found.append((mappings(), descriptors()))
        return sync.statistics.plans, found

    with nothing_left():
        for plans, found in shared(worker, 2):
            assert plans > 25
            assert max(found[10:])[0] <= max(found[:10])[0] + 4
            assert max(count for _, count in found[10:]) <= max(count for _, count in found[:10]) + 4


# Ranks that differ


MISMATCHES = {
    "sizes": (lambda t: t.all_reduce(torch.ones(5)), lambda t: t.all_reduce(torch.ones(6))),
    "sizes of large ones": (lambda t: t.all_reduce(torch.ones(50_000)), lambda t: t.all_reduce(torch.ones(60_000))),
    "dtypes": (lambda t: t.all_reduce(torch.ones(5)), lambda t: t.all_reduce(torch.ones(5).double())),
    "kinds": (lambda t: t.broadcast(torch.ones(5)), lambda t: t.all_reduce(torch.ones(20))),
    "roots": (lambda t: t.broadcast(torch.ones(5)), lambda t: t.broadcast(torch.ones(5), 1)),
}
TOLD = {
    "sizes": ("sum float32 of 5 elements", "sum float32 of 6 elements"),
    "sizes of large ones": ("sum float32 of 50000 elements", "sum float32 of 60000 elements"),
    "dtypes": ("sum float32 of 5 elements", "sum float64 of 5 elements"),
    "roots": ("broadcast by 0 of 20 elements", "broadcast by 1 of 20 elements"),
    "kinds": ("broadcast by 0 of 20 elements", "sum float32 of 20 elements"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_different_things_are_told(case: str) -> None:
    def worker(transport: SharedMemoryTransport) -> str:
        with pytest.raises(stretto.CommunicationError) as caught:
            MISMATCHES[case][transport.rank](transport).wait()
            transport.all_reduce(torch.ones(3)).wait()  # a root needs nobody, so it learns of it here
        with pytest.raises(stretto.CommunicationError):
            transport.all_reduce(torch.ones(3)).wait()
        return str(caught.value)

    began = time.monotonic()
    first, second = shared(worker, 2)
    assert time.monotonic() - began < PATIENCE / 3
    ours, theirs = TOLD[case]
    seen = [f"rank 1 called {theirs}, rank 0 {ours}", f"rank 0 called {ours}, rank 1 {theirs}"]
    for rank, told in enumerate([first, second]):
        heard = f"rank {rank}: rank {1 - rank} cannot go on: {seen[1 - rank]}.\n"
        assert told in (seen[rank], heard + "Remove the cause and start again, on all ranks.")


def test_only_who_sleeps_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(Futex, "wake", lambda self, address: woken.append(address))
    group = run_ranks(lambda transport: choose(transport, "shared_memory"), 2)
    tensors = [transport.allocate(1, torch.float32, CPU) for transport in group]

    def reduce() -> int:
        woken.clear()
        works = [transport.all_reduce(tensor) for transport, tensor in zip(group, tensors, strict=True)]
        for work in works:
            work.wait()
        return len(woken)

    for transport in group:  # as on x86-64, whatever this processor is
        monkeypatch.setattr(transport.host._futex, "fenced", False)
    assert reduce() == 0
    group[1].host.page.set(ASLEEP, 1)
    assert reduce() == 2, "rank 0 wakes it when it has published and when it has finished; rank 1 has nobody"
    group[1].host.page.set(ASLEEP, 0)
    assert reduce() == 0
    for transport in group:  # where a lock is no barrier
        monkeypatch.setattr(transport.host._futex, "fenced", True)
    assert reduce() == 4


def test_a_message_that_nobody_answers_runs_out_of_time() -> None:
    def worker(transport: SharedMemoryTransport) -> None:
        if transport.rank == 0:
            work = transport.all_reduce(torch.ones(3))
            with pytest.raises(RuntimeError) as caught:
                work.wait(timedelta(seconds=0.3))
            assert str(caught.value) == "not done within 0 s" and not work.is_completed()
            with pytest.raises(RuntimeError, match="not done within 0 s"):
                work.wait(timedelta(seconds=0.01))
        else:
            time.sleep(0.6)
            work = transport.all_reduce(torch.ones(3))
        work.wait()  # and it can still be had

    shared(worker, 2)


# In processes


def gradients_of(rank: int, tell: Any, caps: Sequence[float | None], torchs: bool) -> list[bytes]:
    """The bits of those of three steps, with each bucket cap, and with torch's DDP over Gloo."""
    found = []
    for cap in [*caps, *["torch"] * torchs]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.Tanh(), torch.nn.Linear(130, 90))
        forward, sync = model, None
        if cap == "torch":
            forward = torch.nn.parallel.DistributedDataParallel(model)
        else:
            sync = stretto.attach(model, bucket_cap_mb=cap, last_bucket_cap_mb=cap)
            assert "over shared_memory\n" in sync.describe()
        bits = hashlib.sha256()
        for turn in range(3):
            model.zero_grad()
            forward(values(rank, 5 * 70, torch.float32, turn).view(5, 70)).square().sum().backward()
            for parameter in model.parameters():
                bits.update(bytes(parameter.grad.view(-1).view(torch.uint8).tolist()))
        found.append(bits.digest())
        del sync
    return found


def in_processes(folder: str, world: int, caps: Sequence[float | None], torchs: bool) -> list[Any]:
    ranks = fork_ranks(gradients_of, world, folder, caps, torchs)
    return [(rank.hear(), rank.end(), rank.complaints.read_text()) for rank in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "torchs"), [(2, True), (3, False)])
def test_gradients_have_the_same_bits_for_every_plan_and_as_torchs_at_two_ranks(
    tmp_path: Path, world: int, torchs: bool
) -> None:
    caps = [None, 1e-5, 0.01, 100.0]
    ranks = in_warm_process(in_processes, str(tmp_path), world, caps, torchs)
    assert ranks == [([ranks[0][0][0]] * (len(caps) + torchs), 0, "")] * world


def play_in_process(rank: int, tell: Any, calls: Sequence[Call]) -> bool:
    transport = choose(ProcessGroupTransport(), "shared_memory")
    world = transport.world_size
    found = play(transport, calls, 3)
    return all(same(one, expected) for one, expected in zip(found, wanted(calls, world), strict=True))


def play_in_processes(folder: str, world: int, calls: Sequence[Call]) -> list[Any]:
    ranks = fork_ranks(play_in_process, world, folder, calls)
    return [(rank.hear(60), rank.end(), rank.complaints.read_text()) for rank in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 4, pytest.param(64, marks=pytest.mark.slow)])
def test_processes(tmp_path: Path, world: int) -> None:
    edges = [SMALL_BYTES // 4 + 1, *[BLOCK_BYTES, PIECE_BYTES // 4 + 1] * (world < 64)]
    calls = [Call("all_reduce", n, torch.float32, inside, 0) for n in (1, *edges) for inside in (True, False)]
    calls += [Call("broadcast", n, torch.int64, False, world - 1) for n in (1, 70_000)]
    found = in_warm_process(play_in_processes, str(tmp_path), world, calls)
    assert found == [(True, 0, "")] * world


def refuse_to_yield() -> NoReturn:
    raise AssertionError("whoever yields loses a slice, some milliseconds, where another program wants the core")


def wait_for_a_late_one(rank: int, tell: Any) -> tuple[float, float]:
    """Seconds of waiting, and of the processor meanwhile: for large messages and small ones."""
    os.sched_yield = refuse_to_yield
    transport = choose(ProcessGroupTransport(), "shared_memory")
    tensors = [torch.ones(10), torch.ones(50_000)]
    for tensor in tensors:
        transport.all_reduce(tensor).wait()  # what is made at the first time
    if rank == 0:
        time.sleep(1.5)
    began, busy = time.monotonic(), time.process_time()
    for work in [transport.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    return time.monotonic() - began, time.process_time() - busy


def wait_in_processes(folder: str, world: int) -> list[Any]:
    ranks = fork_ranks(wait_for_a_late_one, world, folder)
    return [(rank.hear(60), rank.end(), rank.complaints.read_text()) for rank in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 12])
def test_who_waits_sleeps(tmp_path: Path, world: int) -> None:
    """More ranks than cores, of which all but one have nothing to do: nobody takes the core from the one that has."""
    found = in_warm_process(wait_in_processes, str(tmp_path), world)
    for (waited, busy), code, complaint in found[1:]:
        assert (code, complaint) == (0, "")
        assert waited > 1 and busy < 0.1 * waited, found


# Never a wait but in wait


def test_a_late_peer_does_not_stop_this_ranks_backward() -> None:
    """Everything of rank 0's backward has happened before rank 1's has begun; only settling waits."""
    events: list[str] = []
    rank_0_is_through = threading.Event()

    class Log:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gradient_ready(self, number: int, name: str) -> None:
            events.append(f"rank {self.rank} has {name}")

        def bucket_launched(self, number: int, bucket: int, nbytes: int) -> None:
            events.append(f"rank {self.rank} launches {bucket}")
            if bucket == len(sizes_of) - 1 and self.rank == 0:
                rank_0_is_through.set()

        def pass_settled(self, number: int) -> None:
            events.append(f"rank {self.rank} settles")

    sizes_of = [300, 20, 300, 20]  # large and small messages

    def worker(transport: SharedMemoryTransport) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(300, 300, bias=False) for _ in sizes_of])
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-5, last_bucket_cap_mb=1e-5)
        model(torch.ones(2, 300)).sum().backward()  # plans are cut after the first
        sync.observe(Log(transport.rank))
        if transport.rank == 1:
            assert rank_0_is_through.wait(PATIENCE / 2), events
            events.append("rank 1 begins")
        model(torch.ones(2, 300)).sum().backward()

    shared(worker, 2)
    alone = events[: events.index("rank 1 begins")]
    assert [event for event in alone if "launches" in event] == [f"rank 0 launches {n}" for n in range(4)]
    assert sum("has" in event for event in alone) == 4 and "rank 0 settles" not in alone


@pytest.mark.parametrize("looked_up", [1, 2])
def test_a_segment_may_go_while_another_is_looked_up(monkeypatch: pytest.MonkeyPatch, looked_up: int) -> None:
    """Python's collector, or another thread, may free the last tensor of one between any two lines."""
    arena = Page(0).arena
    segments = sorted((arena.allocate(CHUNK_BYTES) for _ in range(3)), key=torch.Tensor.data_ptr)
    wanted = segments[looked_up]
    found = arena.locate(wanted)
    assert found is not None and found.offset == 0

    def find(bases: list[int], address: int) -> int:
        place = bisect.bisect_right(bases, address)
        segments.clear()
        return place

    monkeypatch.setattr("stretto.transport.memory.bisect", SimpleNamespace(bisect_right=find))
    assert arena.locate(wanted) == found


@pytest.mark.parametrize("goes", [False, True])
def test_what_lies_behind_a_segment_that_goes_lies_nowhere(monkeypatch: pytest.MonkeyPatch, goes: bool) -> None:
    arena = Page(0).arena
    segments = [arena.allocate(CHUNK_BYTES)]
    shown = SimpleNamespace(data_ptr=functools.partial(int, segments[0].data_ptr() + CHUNK_BYTES))

    def find(bases: list[int], address: int) -> int:
        place = bisect.bisect_right(bases, address)
        if goes:
            segments.clear()
        return place

    monkeypatch.setattr("stretto.transport.memory.bisect", SimpleNamespace(bisect_right=find))
    assert arena.locate(shown) is None
