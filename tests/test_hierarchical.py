"""Several hosts with several ranks each. Here hosts are pretended; see test_network.py for a network between them."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from warm import in_warm_process

import stretto
from stretto.peers import Peers
from stretto.testing import run_ranks, spawn_ranks
from stretto.testing_network import SeparateHosts
from stretto.transport import HierarchicalTransport, LocalTransport, ProcessGroupTransport, Transport, choose
from stretto.transport.choose import hosts_among

CPU = torch.device("cpu")
SIZES = [(2, 1), (1, 2), (2, 2), (3, 2), (1, 2, 1), (1, 3)]
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.complex64, torch.complex128, torch.int32, torch.int64, torch.uint8),
]
NUMELS = [0, 1, 5, 64, 65, 4096, 4097, 20_003]
LARGER = {torch.float32: 1_500_000, torch.bfloat16: 300_001}


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def on_hosts(worker: Callable[[Transport], Any], sizes: tuple[int, ...]) -> list[Any]:
    """Run it on threads whose memory ends where a host ends, and see that nothing is left of that."""

    def run(local: LocalTransport) -> Any:
        transport = choose(SeparateHosts(local, sizes), "auto")
        assert isinstance(transport, HierarchicalTransport)
        assert transport.name == f"hierarchical ({sum(sizes)} ranks on {len(sizes)} hosts)"
        try:
            return worker(transport)
        finally:
            local.all_gather_object(None)
            transport.close()
            transport.close()

    before = collect_until(there_are=0)
    results = run_ranks(run, sum(sizes))
    assert collect_until(there_are=before) == before
    return results


def gloo_threads() -> int:
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended since it was listed
            found += "gloo" in path.read_text()
    return found


def gloo_threads_at_rest() -> int:
    """Threads take their names a moment after they began, on a busy machine a long one."""
    seen = [-1]
    while seen != [seen[-1]] * 10:
        time.sleep(0.03)
        seen = [*seen[-9:], gloo_threads()]
    return seen[-1]


def collect_until(there_are: int) -> int:
    """What a thread looks at just now is not collected, so again."""
    until = time.monotonic() + 10
    while gc.collect() >= 0 and gloo_threads() != there_are and time.monotonic() < until:
        time.sleep(0.05)
    return gloo_threads()


def same_bits(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor.view(torch.uint8), tensors[0].view(torch.uint8)) for tensor in tensors)


# What is a host?


@pytest.mark.parametrize(
    "seen, hosts",
    [
        ([[0, 1], [0, 1]], [(0, 1)]),
        ([[0], [1]], [(0,), (1,)]),
        ([[0, 1], [1, 0], [2, 3], [3, 2]], [(0, 1), (2, 3)]),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], [(0, 2), (1, 3)]),
        ([[0, 1], [0, 1], [2]], [(0, 1), (2,)]),
        ([[0, 1, 2], [1], [2]], [(0,), (1,), (2,)]),  # only what both have opened counts
        ([[0, 1], [0, 1, 2], [1, 2]], []),  # 0 and 2 share memory with 1, and not with each other
        ([[0, 1], [0, 1], []], []),  # 2 has none
        ([[1], [0, 1]], []),  # 0 cannot open its own
    ],
)
def test_hosts_are_ranks_that_have_opened_each_others_memory(seen: list[list[int]], hosts: list[Any]) -> None:
    assert hosts_among(seen) == hosts


# Sums


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_have_the_same_bits_on_every_rank_of_every_host(sizes: tuple[int, ...]) -> None:
    cases = [(dtype, numel) for dtype in DTYPES for numel in (*NUMELS, LARGER.get(dtype, 2))]
    drawn = [[draw(rank, numel, dtype) for rank in range(sum(sizes))] for dtype, numel in cases]

    def worker(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for (dtype, numel), values in zip(cases, drawn, strict=True):
            in_arena = transport.allocate(numel, dtype, CPU)
            in_arena.copy_(values[transport.rank])
            elsewhere = values[transport.rank].clone()
            for tensor in (in_arena, elsewhere):
                transport.all_reduce(tensor).wait()
            found.append((in_arena.clone(), elsewhere))
        return found

    for case, values, everybodys in zip(cases, drawn, zip(*on_hosts(worker, sizes), strict=True), strict=True):
        in_arena, elsewhere = everybodys[0]
        assert same_bits([one for one, _ in everybodys]) and same_bits([one for _, one in everybodys]), case
        for tensor in everybodys[0]:
            assert_is_sum(tensor, values)
        if len(sizes) == 2:  # of more, Gloo adds in an order that depends on how a message is cut
            assert torch.equal(in_arena, elsewhere)


def draw(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * rank + numel)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(
            numel, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator
        ).to(dtype)
    return torch.randint(0, 9, (numel,), dtype=dtype, generator=generator)


def assert_is_sum(tensor: torch.Tensor, values: list[torch.Tensor]) -> None:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        assert torch.equal(tensor, torch.stack(values).sum(0, dtype=tensor.dtype))
        return
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    exact = torch.stack(values).to(wide).sum(0)
    size = torch.stack(values).to(wide).abs().sum(0)
    # One rounding a host and one an addition between hosts; wider types also inside a host.
    assert ((tensor.to(wide) - exact).abs() <= 4 * torch.finfo(tensor.dtype).eps * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_the_first_elements_can_be_divided(dtype: torch.dtype) -> None:
    cases = [(10, 4), (70_000, 69_000), (70_000, 70_000), (1_100_000, 1_080_000)]
    drawn = [[draw(rank, numel, dtype) for rank in range(5)] for numel, _ in cases]

    def worker(transport: Transport) -> list[torch.Tensor]:
        found = []
        for (numel, averaged), values in zip(cases, drawn, strict=True):
            tensors = [transport.allocate(numel, dtype, CPU), torch.empty(numel, dtype=dtype)]
            for tensor in tensors:
                tensor.copy_(values[transport.rank])
                transport.all_reduce_mean(tensor, averaged).wait()  # type: ignore[attr-defined]
            assert torch.equal(*tensors)
            found.append(tensors[1])
        return found

    everybodys = zip(*on_hosts(worker, (3, 2)), strict=True)
    for (_, averaged), values, tensors in zip(cases, drawn, everybodys, strict=True):
        assert same_bits([*tensors])
        assert_is_sum(tensors[0][averaged:], [value[averaged:] for value in values])
        assert_is_sum(tensors[0][:averaged] * 5, [value[:averaged] for value in values])


def test_half_types_do_not_overflow_where_the_mean_does_not() -> None:
    def worker(transport: Transport) -> None:
        tensor = torch.full((30_000,), 30_000.0, dtype=torch.float16)
        transport.all_reduce_mean(tensor, 30_000).wait()  # type: ignore[attr-defined]
        assert torch.equal(tensor, torch.full_like(tensor, 30_000))

    on_hosts(worker, (3, 2))


def test_of_two_hosts_the_sum_does_not_depend_on_how_it_is_cut() -> None:
    def worker(transport: Transport) -> None:
        whole = draw(transport.rank, 300_000, torch.float32)
        parts = [part.clone() for part in whole.split(70_001)]
        for tensor in (whole, *parts):
            transport.all_reduce(tensor).wait()
        assert torch.equal(whole, torch.cat(parts))

    on_hosts(worker, (3, 2))


def test_many_messages_end_in_the_order_in_which_they_were_posted() -> None:
    def worker(transport: Transport) -> None:
        tensors = [torch.full((1 + 37 * number,), float(transport.rank + number)) for number in range(300)]
        works = [transport.all_reduce(tensor) for tensor in tensors]
        works[-1].wait()
        for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work.is_completed()
            assert torch.equal(tensor, torch.full_like(tensor, 3 * number + 3))

    on_hosts(worker, (2, 1))


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2), (1, 2, 1)])
def test_any_rank_can_broadcast(sizes: tuple[int, ...]) -> None:
    dtypes = (torch.bfloat16, torch.complex64, torch.bool, torch.int16)
    drawn = [
        (root, dtype, numel, draw(root, numel, torch.float32).to(dtype))
        for root in range(sum(sizes))
        for dtype in dtypes
        for numel in (0, 3, 40_001, 1_100_000 if dtype.is_complex else 9)
    ]

    def worker(transport: Transport) -> None:
        for root, dtype, numel, value in drawn:
            mine = transport.allocate(numel, dtype, CPU) if numel % 2 else torch.zeros(numel, dtype=dtype)
            if transport.rank == root:
                mine.copy_(value)
            transport.broadcast(mine, root).wait()
            assert torch.equal(mine, value)

    on_hosts(worker, sizes)


# Under way


def test_a_late_host_stops_nobody() -> None:
    late = threading.Event()

    def worker(transport: Transport) -> None:
        tensor = torch.full((100_000,), float(transport.rank))
        if transport.rank >= 2:
            assert late.wait(30)
        works = [transport.all_reduce(tensor), transport.all_reduce(torch.ones(1))]
        if transport.rank < 2:
            assert not any(work.is_completed() for work in works)
            for milliseconds in range(10):  # torch takes less than one to mean: for ever
                with pytest.raises(RuntimeError, match="not done within 0 s"):
                    works[0].wait(timedelta(milliseconds=milliseconds + 0.5))
            everybody_waits.wait(30)
            late.set()
        works[1].wait()
        works[0].wait()
        assert tensor[0] == tensor[-1] == 6

    everybody_waits = threading.Barrier(2)
    on_hosts(worker, (2, 2))


def test_what_is_posted_while_a_message_is_between_hosts_leaves_at_once() -> None:
    """Rank 0 sleeps on the first message, which another host holds up; the second begins meanwhile."""
    begun = threading.Event()

    def worker(transport: Transport) -> None:
        first, second = torch.ones(50_000), torch.ones(50_000)
        if transport.rank == 2:
            assert begun.wait(30)
        works = [transport.all_reduce(first)]
        if transport.rank == 1:
            time.sleep(0.3)  # so that rank 0 sleeps
        works.append(transport.all_reduce(second))
        if transport.rank == 0:
            team = transport._team  # type: ignore[attr-defined]
            launch = team.counterparts.all_reduce

            def tell(tensor: torch.Tensor) -> Any:
                begun.set()
                return launch(tensor)

            team.counterparts.all_reduce = tell
        for work in works:
            work.wait()
        assert first.sum() == second.sum() == 150_000

    on_hosts(worker, (2, 1))


def test_a_rank_may_leave_as_soon_as_it_has_the_sum() -> None:
    """What it has sent reaches the other host all the same."""

    def worker(local: LocalTransport) -> None:
        for _ in range(20):
            transport = choose(SeparateHosts(local, (2, 1)), "auto")
            tensor = torch.ones(700_000)
            transport.all_reduce(tensor).wait()
            transport.close()
            assert tensor.sum() == 2_100_000

    run_ranks(worker, 3)


# Training


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (3, 2)])
def test_training_gives_the_mean_with_the_same_bits_on_all_ranks(sizes: tuple[int, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 7))

    def train(transport: Transport) -> list[torch.Tensor]:
        module = copy.deepcopy(model)
        sync = stretto.attach(module, transport=transport, bucket_cap_mb=0.02, check_every=1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for number in range(4):
            optimizer.zero_grad()
            data = torch.randn(6, 50, generator=torch.Generator().manual_seed(10 * number + transport.rank))
            module(data).square().mean().backward()
            optimizer.step()
        assert transport.name in sync.describe()
        gradients = [parameter.grad.clone() for parameter in module.parameters()]
        sync.detach()
        return gradients

    together = on_hosts(train, sizes)
    flat = run_ranks(train, sum(sizes))
    for gradients in together:
        assert all(torch.equal(*pair) for pair in zip(gradients, together[0], strict=True))
        for mine, theirs in zip(gradients, flat[0], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_handle_leaves_the_transport_to_whoever_made_it() -> None:
    def worker(transport: Transport) -> str:
        modules = [torch.nn.Linear(100, 70), torch.nn.Linear(100, 70)]
        first, _ = (stretto.attach(module, transport=transport) for module in modules)
        assert [one_pass(module, transport.rank) for module in modules] == [1.0, 1.0]
        first.detach()
        assert one_pass(modules[1], transport.rank) == 1.0
        transport.close()
        with pytest.raises(stretto.CommunicationError) as caught:
            transport.all_reduce(torch.ones(3)).wait()
        return str(caught.value)

    first, second, third = on_hosts(worker, (2, 1))
    for rank, told in ((0, first), (2, third)):
        assert told == (
            f"rank {rank}: this transport was closed, and the connections to other hosts with it.\n"
            "Call close() after the last collective, or make another transport with stretto.transport.choose."
        )
    assert second == (
        "rank 1: rank 0 cannot go on: this transport was closed, and the connections to other hosts with it.\n"
        "Remove the cause and start again, on all ranks."
    )


def test_ranks_that_broadcast_from_different_roots_are_told() -> None:
    told: list[str] = []

    def worker(transport: Transport) -> None:
        with pytest.raises(RuntimeError) as caught:  # rank 2 waits for the other host in vain
            transport.broadcast(torch.ones(3), transport.rank).wait()
        told.append(str(caught.value).splitlines()[0])

    run_ranks(lambda local: worker(choose(SeparateHosts(local, (2, 1)), "auto")), 3, timeout=5)
    assert any(
        "rank 1 called bcast from 1 of 12 elements, rank 0 bcast from 0 of 12 elements" in one for one in told
    ) or (
        any("rank 0 called bcast from 0 of 12 elements, rank 1 bcast from 1 of 12 elements" in one for one in told)
    ), told


# Choosing


def test_shared_memory_is_insisted_on_where_there_are_two_hosts() -> None:
    def worker(local: LocalTransport) -> str:
        with pytest.raises(stretto.SetupError) as caught:
            choose(SeparateHosts(local, (2, 1)), "shared_memory")
        return str(caught.value)

    assert run_ranks(worker, 3) == [
        f'rank {rank}: transport="shared_memory" is not available: rank 0: the memory of rank 2 cannot be opened: '
        'No such file or directory.\nAttach with transport="auto", which then uses the process group.'
        for rank in range(3)
    ]


def chosen(sizes: tuple[int, ...], asked: str, caplog: pytest.LogCaptureFixture, store: bool = True) -> list[str]:
    """The transports' names, and one line of the log."""

    def worker(local: LocalTransport) -> str:
        if not store:
            local.store = None  # type: ignore[assignment]
        transport = choose(SeparateHosts(local, sizes), asked)
        local.all_gather_object(None)
        transport.close()
        return transport.name

    with caplog.at_level(logging.INFO, "stretto"):
        names = {*run_ranks(worker, sum(sizes))}
    return [*names, *(record.getMessage() for record in caplog.records)]


NO_MEMORY = "the memory of rank 1 cannot be opened: No such file or directory"
LOCAL = "local (threads of one process)"


def test_what_was_chosen_is_logged_once(caplog) -> None:
    assert chosen((1, 2), "auto", caplog) == [
        "hierarchical (3 ranks on 2 hosts)",
        f"gradients are summed in the memory of each of 2 hosts, then over hosts: rank 0: {NO_MEMORY}",
    ]


def test_ranks_that_are_alone_on_their_hosts_use_the_group(caplog) -> None:
    line = f"gradients go over {LOCAL}, not through shared memory: rank 0: {NO_MEMORY}"
    assert chosen((1, 1), "auto", caplog) == [LOCAL, line]


def test_the_group_can_be_insisted_on(caplog) -> None:
    assert chosen((1, 2), "process_group", caplog) == [LOCAL]


def test_without_a_store_hosts_cannot_meet(caplog) -> None:
    assert chosen((1, 2), "auto", caplog, store=False) == [
        LOCAL,
        f"gradients go over {LOCAL}, not through shared memory: rank 0: {NO_MEMORY}; and {LOCAL} has no store, "
        "by which ranks of different hosts could find each other",
    ]


def test_unclear_hosts_use_the_group(caplog) -> None:
    class Chain(SeparateHosts):
        """Rank 1 shares memory with both others, which do not with each other."""

        def __init__(self, inner: LocalTransport) -> None:
            super().__init__(inner, [[1, 1, 1], [1, 1, 1], [1, 1, 1]][0])
            self._host_of = [[0, 0, 1], [0, 0, 0], [1, 0, 0]][inner.rank]

    def worker(local: LocalTransport) -> str:
        return choose(Chain(local), "auto").name

    with caplog.at_level(logging.INFO, "stretto"):
        assert run_ranks(worker, 3) == [LOCAL] * 3
    assert len(caplog.records) == 1


# Processes


def attach_apart(sizes: tuple[int, ...], group: Any = None) -> tuple[torch.nn.Module, stretto.Synchronizer]:
    module = torch.nn.Linear(100, 70)
    transport = choose(SeparateHosts(ProcessGroupTransport(group), sizes), "auto")
    return module, stretto.attach(module, transport=transport)


def one_pass(module: torch.nn.Module, value: float) -> float:
    module.zero_grad()
    module(torch.full((1, 100), float(value))).sum().backward()
    return module.weight.grad[0, 0].item()  # type: ignore[index, union-attr]


def attach_in_groups(rank: int) -> list[Any]:
    """In groups of which ranks have different numbers, several handles, detached in several ways."""
    dist.new_group([0, 3])
    some = dist.new_group([1, 2, 3])
    results = []
    before = gloo_threads_at_rest()
    if rank:
        module, sync = attach_apart((2, 1), some)
        results.append(one_pass(module, rank))
        sync.detach()
        del module, sync  # and with them the transport, which is this function's own
    first, second = attach_apart((2, 2)), attach_apart((1, 3))
    for module, _ in (first, second, first):
        results.append(one_pass(module, rank))
    first[1].detach()
    assert one_pass(second[0], rank) == 1.5
    del first, second, module
    again, _ = attach_apart((2, 2))
    results.append(one_pass(again, rank))
    del again, _
    dist.barrier()
    results.append(collect_until(before) - before)
    return results


@pytest.mark.ranks
def test_several_handles_in_several_groups_come_and_go() -> None:
    zero, *others = spawn_ranks(attach_in_groups, 4)
    assert zero == [1.5, 1.5, 1.5, 1.5, 0]
    assert others == [[2.0, *zero]] * 3


def destroy_first(rank: int) -> tuple[str, int]:
    module, sync = attach_apart((2, 1))
    assert one_pass(module, rank) == 1
    store = sync._transport.store  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(stretto.CommunicationError) as caught:
        one_pass(module, rank)
    left = gloo_threads()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    return str(caught.value), left


@pytest.mark.ranks
def test_connections_end_with_the_group() -> None:
    for rank, (text, left) in enumerate(spawn_ranks(destroy_first, 3)):
        assert left == 0
        assert text == (
            f"rank {rank}: the process group was destroyed while a model is attached to it.\n"
            "Call detach() on the handle first, or dist.destroy_process_group() after the last backward."
        )


def give_up_a_wait(rank: int) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=3))
    store = dist.distributed_c10d._get_default_store()
    module, _ = attach_apart((2, 1), group)
    assert one_pass(module, rank) == 1
    if rank == 2:  # alone on its host
        store.wait(["gave up/0", "gave up/1"])
    told = []
    for _ in range(2):
        with pytest.raises(stretto.CommunicationError) as caught:
            one_pass(module, 100 * rank)
        told.append(str(caught.value))
        store.set(f"gave up/{rank}", "")
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{other}" for other in range(3)])  # a handle that is dropped says that this rank has left
    return told


@pytest.mark.ranks
def test_after_a_wait_that_was_given_up_no_host_gets_a_wrong_sum() -> None:
    everyone = spawn_ranks(give_up_a_wait, 3, timeout=60)
    for rank, told in enumerate(everyone):
        for number, text in enumerate(told, 2):
            begins = f"rank {rank}, pass {number}: bucket 0 (bias, weight) could not be reduced over hierarchical "
            begins += "(3 ranks on 2 hosts)"
            why = text.partition("failed: ")[2].split("\n")[0]
            if rank != 1:
                assert text == (
                    f"{begins}: the exchange with rank {2 - rank} of another host has failed: {why}\n"
                    "Look at the first error in the other ranks' logs, and start again, on all ranks."
                )
            elif "not done within 3 s" not in text:  # else its own patience was over first
                assert text == (
                    f"{begins}: rank 0 cannot go on: the exchange with rank 2 of another host has failed: {why}\n"
                    "Remove the cause and start again, on all ranks."
                )


def test_hosts_follow_a_new_time_out_of_the_group() -> None:
    def worker(transport: Transport) -> tuple[float | None, float, float]:
        tensor = transport.allocate(50_000, torch.float32, CPU)
        transport.all_reduce(tensor).wait()
        transport.base.inner.patience = 7.0  # type: ignore[attr-defined]  # as ``dist.set_timeout`` does to a real one
        transport.all_reduce(tensor).wait()
        others = transport._team.counterparts  # type: ignore[attr-defined]
        seconds = others._groups[0].options._timeout.total_seconds()
        return transport.patience, others.courier.patience, seconds

    assert on_hosts(worker, (2, 2)) == [(7.0, 7.0, 7.0)] * 4


def test_other_hosts_do_not_sum_what_is_filled_again_after_a_wait_was_given_up() -> None:
    knows = threading.Event()

    def worker(transport: Transport) -> str | list[float]:
        tensor = transport.allocate(50_000, torch.float32, CPU).fill_(1.0)
        if transport.rank == 2:
            assert knows.wait(30)
        work: Any = transport.all_reduce(tensor)
        if transport.rank == 0:
            while not transport._team.host._outside:  # type: ignore[attr-defined]
                assert not work.is_completed()  # it looks whether rank 1 has come
            transport.break_off("rank 0: enough")  # type: ignore[attr-defined]
            tensor.fill_(7.0)
        if transport.rank == 2:
            work.wait()
            return tensor.unique().tolist()
        with pytest.raises(stretto.CommunicationError) as caught:
            work.wait()
        knows.set()
        return str(caught.value)

    assert on_hosts(worker, (2, 1)) == [
        "rank 0: enough",
        "rank 1: rank 0 cannot go on: enough.\nRemove the cause and start again, on all ranks.",
        [3.0],
    ]


def die_in_a_pass(rank: int) -> None:
    module, _ = attach_apart((2, 2))
    for number in range(5):
        if rank == 3 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        one_pass(module, rank)


@pytest.mark.ranks
def test_a_killed_rank_is_named_on_every_host() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        spawn_ranks(die_in_a_pass, 4)
    assert time.monotonic() - began < 60
    for rank in range(3):
        told = rf"PeerError: rank {rank}, pass 3: (.|\n)*?rank 3 \(pid \d+\)( died without a word| has died)"
        assert re.search(told, str(caught.value)), str(caught.value)


def close_in_a_child(rank: int) -> int:
    transport = choose(SeparateHosts(ProcessGroupTransport(), (2, 1)), "auto")
    child = os.fork()
    if child == 0:
        transport.close()
        del transport
        gc.collect()
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    transport.all_reduce(torch.ones(50_000)).wait()
    transport.close()
    return status


@pytest.mark.ranks
def test_a_forked_child_leaves_the_connections_alone() -> None:
    assert spawn_ranks(close_in_a_child, 3) == [7, 7, 7]


def stop_amid_an_exchange() -> list[str]:
    """In a process of its own: what is let go of for good stays to its end."""
    closed = threading.Event()

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    def worker(local: LocalTransport) -> str:
        transport: Any = choose(SeparateHosts(local, (2, 1)), "auto")
        tensor = transport.allocate(50_000, torch.float32, CPU).fill_(1.0)
        if transport.rank == 2:
            assert closed.wait(30)
        work = transport.all_reduce(tensor)
        if transport.rank == 0:
            host = transport._team.host
            while not host._outside:
                assert not work.is_completed()  # it looks whether rank 1 has come
            host._sleep = interrupt
        try:
            Peers(transport).wait(work)
        except (KeyboardInterrupt, stretto.CommunicationError) as error:
            if transport.rank == 0:
                transport.close()
                closed.set()
            return type(error).__name__
        return "done"

    return run_ranks(worker, 3)


@pytest.mark.ranks
def test_ctrl_c_amid_an_exchange_between_hosts_lets_go_of_them_at_once() -> None:
    """Gloo's group, when it is freed, would wait for the host that has not come."""
    assert in_warm_process(stop_amid_an_exchange, timeout=40) == ["KeyboardInterrupt", "PeerError", "done"]
