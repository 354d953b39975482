"""The torch.distributed backend: Gloo's answers, from shared memory, for stock programs."""

import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm_programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.testing import spawn_ranks
from stretto.transport import collectives, memory

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
OPERATIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
PIECE = collectives.STAGED_BYTES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of names that people still use


def backend(ranks=None):
    """A group of the backend, beside the Gloo group that the ranks were started with."""
    import stretto.backend  # noqa: F401

    return dist.new_group(ranks, backend="stretto")


def numbers(shape, dtype, seed):
    """The same small whole numbers wherever the seed is the same: their sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def rank_numbers(shape, dtype, seed=0):
    return numbers(shape, dtype, 1000 * seed + dist.get_rank())


# What each collective gives: (group, dtype, operation, shape, seed) -> what this rank has afterwards


def all_reduce(group, dtype, operation, shape, seed):
    tensor = rank_numbers(shape, dtype, seed)
    dist.all_reduce(tensor, operation, group)
    return tensor


def broadcast(group, dtype, operation, shape, seed):
    tensor = rank_numbers(shape, dtype, seed)
    dist.broadcast(tensor, seed % dist.get_world_size(), group)
    return tensor


def all_gather(group, dtype, operation, shape, seed):
    results = [torch.zeros(shape, dtype=dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(results, rank_numbers(shape, dtype, seed), group)
    return torch.stack(results)


def all_gather_single(group, dtype, operation, shape, seed):
    result = torch.zeros((dist.get_world_size() * shape[0], *shape[1:]), dtype=dtype)
    dist.all_gather_into_tensor(result, rank_numbers(shape, dtype, seed), group)
    return result


def reduce_scatter(group, dtype, operation, shape, seed):
    result = torch.zeros(shape, dtype=dtype)
    tensors = [rank_numbers(shape, dtype, 100 * seed + to) for to in range(dist.get_world_size())]
    dist.reduce_scatter(result, tensors, operation, group)
    return result


def reduce_scatter_single(group, dtype, operation, shape, seed):
    result = torch.zeros(shape, dtype=dtype)
    tensor = rank_numbers((dist.get_world_size() * shape[0], *shape[1:]), dtype, seed)
    dist.reduce_scatter_tensor(result, tensor, operation, group)
    return result


COLLECTIVES = [all_reduce, broadcast, all_gather, all_gather_single, reduce_scatter, reduce_scatter_single]
REDUCING = [all_reduce, reduce_scatter, reduce_scatter_single]


def outcome(collective, group, *case):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return collective(group, *case)
    except (RuntimeError, ValueError) as error:
        return type(error)


def compare(collective, group, dtype, operation, shape, seed):
    ours, gloos = (outcome(collective, one, dtype, operation, shape, seed) for one in (group, dist.group.WORLD))
    case = f"{collective.__name__} {operation} of {shape} {dtype}"
    if isinstance(gloos, type):
        assert isinstance(ours, (type, torch.Tensor)), case
    else:
        assert isinstance(ours, torch.Tensor), f"{case}: {ours}"
        exact = operation != dist.ReduceOp.AVG  # a complex number divided by 3 is not its parts divided by 3
        assert torch.equal(ours, gloos) or (not exact and torch.allclose(ours, gloos, rtol=1e-6)), case


def grid(rank):
    """Everything once."""
    group = backend()
    for collective in COLLECTIVES:
        for dtype in DTYPES:
            for operation in OPERATIONS if collective in REDUCING else ["SUM"]:
                compare(collective, group, dtype, getattr(dist.ReduceOp, operation), (3, 5), 1)
    for _ in range(2):  # a barrier raises what a Gloo thread has raised that has not come to the end of that work
        dist.all_reduce(torch.ones(1))
    return group.in_shared_memory


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_collectives_dtypes_and_operations_give_what_gloo_gives(world):
    assert spawn_ranks(grid, world) == [True] * world


def random_sequence(rank):
    """The same on all ranks, since nothing is random about it but the seed of the test's source."""
    group = backend()
    edges = [0, 1, 63, 64, PIECE // 8 - 1, PIECE // 8, PIECE // 8 + 1, 3 * PIECE // 8 + 17, 5 * PIECE // 4]
    sizes = st.one_of(st.sampled_from(edges), st.integers(0, 5000))

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from(COLLECTIVES), st.sampled_from(DTYPES), sizes, st.integers(0, 9))
    def run(collective, dtype, numel, seed):
        compare(collective, group, dtype, dist.ReduceOp.SUM, (numel,), seed)

    run()


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_sequences_of_any_size_give_what_gloo_gives(world):
    spawn_ranks(random_sequence, world)


def unusual_layouts(rank):
    group, found = backend(), []
    for one in (group, dist.group.WORLD):
        base = numbers((4, 6), torch.float32, rank)
        transposed = base.clone().t()
        nhwc = numbers((2, 3, 4, 5), torch.float32, rank).to(memory_format=torch.channels_last)
        leaf = nn.Parameter(base.clone())
        scalar = torch.tensor(rank + 1.0)
        with torch.inference_mode():
            frozen = base.clone()
        lazy = torch.conj(numbers((3,), torch.complex64, rank) * 1j)
        for tensor in (transposed, nhwc, leaf, scalar, frozen, lazy.resolve_conj()):
            dist.all_reduce(tensor, group=one)
        gathered = [torch.zeros(6, 4).t() for _ in range(2)]
        dist.all_gather(gathered, base, one)
        used = base.clone().requires_grad_()
        loss = used.exp().sum().exp()  # saved for backward, and overwritten: torch's backends do not tell autograd
        dist.all_reduce(loss, group=one)
        loss.backward()
        found.append([transposed, nhwc, leaf.detach(), scalar, frozen.clone(), *gathered])
    assert all(map(torch.equal, *found))
    row = torch.arange(8.0)
    dist.all_reduce(row[::2], group=group)
    assert row.tolist() == [0, 1, 4, 3, 8, 5, 12, 7], "where Gloo writes elsewhere"
    single = torch.full((8,), rank + 1.0)[::8]  # of one element, and torch takes any stride for contiguous then
    dist.broadcast(single, 1, group=group)
    singles = [torch.zeros(8)[::8] for _ in range(2)]
    dist.all_gather(singles, torch.full((8,), rank + 5.0)[::8], group=group)
    assert [single.item(), *(one.item() for one in singles)] == [2, 5, 6]
    assert found[0][1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks
def test_tensors_may_lie_in_memory_as_they_like():
    spawn_ranks(unusual_layouts, 2)


def same_bits_everywhere(rank):
    group = backend()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(PIECE, generator=torch.Generator().manual_seed(rank)).to(dtype)
        exact = [torch.randn(PIECE, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)]
        total = exact[0].float() + exact[1].float()
        for other in exact[2:]:
            total += other.float()
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total.to(dtype)), "summed in rank order, halves in float32"
        results.append(tensor)
    return results


@pytest.mark.ranks
def test_sums_are_taken_in_rank_order_so_all_ranks_have_the_same_bits():
    first, *others = spawn_ranks(same_bits_everywhere, 4)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# Works, and all the rest of torch.distributed


def works(rank):
    group = backend()
    tensor = torch.full((3,), rank + 1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.is_completed() and work.is_success() and work.wait() and work.wait(timedelta(seconds=1))
    assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr() == work.result()[0].data_ptr()
    assert work.get_future().then(lambda future: future.value()[0].sum()).wait() == 9
    results = [torch.zeros(3) for _ in range(2)]
    assert dist.all_gather(results, tensor, group, async_op=True).get_future().wait() == results
    assert dist.barrier(group, async_op=True).wait()


@pytest.mark.ranks
def test_asynchronous_works_are_done_already():
    spawn_ranks(works, 2)


def the_rest(rank):
    import stretto.backend

    group = backend()
    assert group.in_shared_memory is None  # nobody has asked yet
    assert dist.get_backend(group) == group.name() == "stretto" and isinstance(
        group, stretto.backend.StrettoProcessGroup
    )
    world, zeros, mine = dist.get_world_size(), [torch.zeros(2) for _ in range(3)], torch.full((2,), float(rank))
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group)
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    told = [rank, "text"]
    dist.broadcast_object_list(told, 1, group)
    assert told == [1, "text"]
    dist.gather(mine, zeros if rank == 0 else None, 0, group)
    assert rank or [int(tensor[0]) for tensor in zeros] == [0, 1, 2]
    dist.scatter(mine, [torch.full((2,), 10.0 + r) for r in range(3)] if rank == 2 else None, 2, group)
    assert mine.tolist() == [10 + rank] * 2
    dist.reduce(mine, 1, group=group)
    assert rank != 1 or mine.tolist() == [33, 33]
    row = torch.arange(3.0) + 10 * rank
    dist.all_to_all_single(out := torch.zeros(3), row, group=group)
    assert out.tolist() == [rank, 10 + rank, 20 + rank]
    ring = [dist.P2POp(dist.irecv, got := torch.zeros(3), (rank - 1) % 3, group)]
    ring += [dist.P2POp(dist.isend, row, (rank + 1) % 3, group)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert got[0] == 10 * ((rank - 1) % 3)
    both = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(both, group=group)
    assert both[0].tolist() == [3, 3] and both[1].tolist() == [3, 3, 3]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in both:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert both[0].tolist() == [9, 9]
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(gathered := torch.zeros(3), torch.tensor([rank + 1.0]), group)
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(scattered := torch.zeros(1), gathered, group=group)
    assert gathered.tolist() == [1, 2, 3] and scattered.tolist() == [3 * (rank + 1)]
    group.monitored_barrier(timedelta(seconds=20))
    group.allreduce(plain := torch.ones(1)).wait()
    group.broadcast(plain, 0).wait()
    group.allreduce([plain], dist.ReduceOp.MAX).wait()
    group.barrier(timeout=timedelta(seconds=20)).wait()
    assert plain == 3
    dist.all_reduce(rows := torch.eye(2).to_sparse(), group=group)
    assert torch.equal(rows.to_dense(), 3 * torch.eye(2))


@pytest.mark.ranks
def test_what_has_no_way_through_shared_memory_goes_through_gloo():
    spawn_ranks(the_rest, 3)


def refusals(rank):
    group = backend()
    for call in (
        lambda one: dist.all_reduce(torch.ones(2, dtype=torch.int16), group=one),
        lambda one: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, one),
        lambda one: dist.all_gather([torch.zeros(3), torch.zeros(4)], torch.ones(3), one),
        lambda one: dist.all_gather([torch.zeros(3)], torch.ones(3), one),
        lambda one: dist.all_gather_into_tensor(torch.zeros(5), torch.ones(3), one),
        lambda one: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(5), group=one),
        lambda one: dist.broadcast(torch.ones(2), group=one, group_src=-1),
        lambda one: dist.broadcast(torch.ones(2), group=one, group_src=2),
    ):
        texts = []
        for one in (group, dist.group.WORLD):
            try:
                call(one)
                texts.append("")
            except (RuntimeError, ValueError) as error:
                texts.append(re.sub(r"\d", "", str(error)))  # some begin with the time
        assert texts[1] and texts[0] in ("", texts[1]), texts
    dist.all_reduce(tensor := torch.ones(2), group=group)
    assert tensor.tolist() == [2, 2], "what was refused did no harm"


@pytest.mark.ranks
def test_what_gloo_refuses_is_refused_in_its_words():
    spawn_ranks(refusals, 2)


def groups_in_groups(rank):
    import stretto.backend  # noqa: F401

    every, pairs = backend(), [backend([0, 2]), backend([1, 2])]
    for number, members in enumerate(([0, 2], [1, 2])):
        if rank in members:
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=pairs[number])
            assert tensor.tolist() == [sum(members)] * 5
            dist.broadcast(tensor.fill_(rank), members[1], pairs[number])
            assert tensor.tolist() == [2] * 5
    dist.barrier(every)
    alone = [dist.new_group([one], backend="stretto") for one in range(3)][rank]
    dist.all_reduce(tensor := torch.ones(1), group=alone)
    assert tensor == 1 and alone.in_shared_memory is False
    if rank == 1:
        dist.destroy_process_group(pairs[1])
    dist.barrier(every)


@pytest.mark.ranks
def test_groups_of_some_ranks():
    spawn_ranks(groups_in_groups, 3)


def threads_at_once(rank):
    groups = [backend(), backend()]
    found = [[], []]

    def run(number):
        for step in range(50):
            dist.all_reduce(tensor := torch.full((1000,), float(rank + step)), group=groups[number])
            found[number].append(float(tensor[0]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[2.0 * step + 1 for step in range(50)]] * 2


@pytest.mark.ranks
def test_threads_with_a_group_each():
    spawn_ranks(threads_at_once, 2)


def memory_in_use(rank):
    group = backend()

    def shared_bytes():
        """Of both ranks; a mapping has a descriptor of its own."""
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        files = [link.stat() for link in links if os.readlink(link).startswith("/memfd:stretto")]
        return sum({file.st_ino: file.st_size for file in files}.values())

    for collective in COLLECTIVES:
        outcome(collective, group, torch.float32, dist.ReduceOp.SUM, (1 << 22,), 0)
    large = shared_bytes()
    for _ in range(3000):
        dist.broadcast(torch.ones(100), 0, group)  # the root runs ahead
    assert shared_bytes() == large
    return large


@pytest.mark.ranks
def test_large_tensors_take_little_shared_memory():
    assert max(spawn_ranks(memory_in_use, 2)) < 32 * memory.MIB


def results_of_functional_collectives(rank):
    """They lie in other tensors, and are waited for at their first use."""
    from torch.distributed import _functional_collectives as functional

    group = backend()

    def summed(numel=4):
        return functional.all_reduce(torch.arange(float(numel)) + rank, "sum", group)

    dist.all_to_all_single(out := torch.zeros(4), summed(), group=group)
    assert out.tolist() == ([1, 3, 1, 3] if rank == 0 else [5, 7, 5, 7])
    mine, got = summed(), functional.all_reduce(torch.zeros(4), "sum", group)
    (dist.recv if rank else dist.send)(got if rank else mine, 1 - rank, group)
    assert (got + 0).tolist() == ([1, 3, 5, 7] if rank else [0] * 4)
    dist.all_reduce(twice := summed(), group=group)
    results = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(results, summed(), group)
    assert (twice + 0).tolist() == [2, 6, 10, 14] and results[1].tolist() == [1, 3, 5, 7]


@pytest.mark.ranks
def test_results_of_functional_collectives_are_sent_and_received():
    spawn_ranks(results_of_functional_collectives, 2)


def tried_out(rank):
    """In this mode a program runs without its data: also if it makes the first collectives of the group."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    group = backend()
    for _ in range(2):
        with FakeTensorMode():
            fake = torch.ones(2)
            dist.barrier(group)
            dist.all_reduce(fake, group=group)
            dist.all_gather([torch.zeros(2) for _ in range(2)], fake, group)
            dist.all_to_all_single(torch.zeros(2), fake, group=group)
            dist.all_reduce(torch.ones(2, dtype=torch.float8_e5m2), group=group)  # which Gloo would refuse
            assert dist.broadcast(fake, 0, group, async_op=True).get_future().wait()[0] is fake
            dist.send(fake, 1 - rank, group)
        dist.all_reduce(torch.ones(2, device="meta"), group=group)
        dist.all_reduce(real := torch.ones(2), group=group)
        assert real.tolist() == [2, 2]


@pytest.mark.ranks
def test_tensors_that_have_only_a_shape_are_not_sent():
    spawn_ranks(tried_out, 2)


def whose_values_lie_elsewhere(rank):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = backend()
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor, told = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), []
    for call in (
        lambda: dist.send(tensor, 1 - rank, group),
        lambda: dist.recv(tensor, 1 - rank, group),
        lambda: dist.all_to_all_single(torch.zeros(2), tensor, group=group),
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.broadcast(tensor, 0, group),
    ):
        with pytest.raises(stretto.UnsupportedError) as caught:
            call()
        told.append(str(caught.value))
    dist.all_to_all_single(out := torch.zeros(2), tensor.to_local(), group=group)
    dist.all_reduce(out, group=group)
    assert out.tolist() == [2, 2], "what was refused did no harm"
    return told


@pytest.mark.ranks
def test_no_tensor_whose_values_lie_in_others_is_taken():
    calls = ["send", "recv", "all_to_all_single", "allreduce", "broadcast"]
    for rank, told in enumerate(spawn_ranks(whose_values_lie_elsewhere, 2)):
        for what, text in zip(calls, told, strict=True):
            assert text == (
                f"rank {rank}: {what} takes no DTensor: its values lie in other tensors.\n"
                "Hand it those instead, one by one; the part of a DTensor that a rank has is to_local()."
            )


# Programs that know nothing of stretto


def trained(group, steps=5, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 3, 8, 8, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return [*model.state_dict().values()]


def stock_ddp(rank):
    group = backend()
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}):
        assert all(map(torch.equal, trained(group, **options), trained(dist.group.WORLD, **options))), options
    return trained(group)


@pytest.mark.ranks
def test_torch_ddp_trains_to_the_same_bits_as_over_gloo():
    first, second = spawn_ranks(stock_ddp, 2)
    assert all(map(torch.equal, first[:2], second[:2]))


def other_wrappers(rank):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def steps(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 10), float(rank + step))).pow(2).mean().backward()
            optimizer.step()

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))

    found = []
    for group in (backend(), dist.group.WORLD):
        model = DistributedDataParallel(net(), process_group=group)
        adam = torch.optim.AdamW
        steps(model, ZeroRedundancyOptimizer(model.parameters(), adam, process_group=group, lr=0.1))
        hooked = DistributedDataParallel(net(), process_group=group)
        hooked.register_comm_hook(group, fp16_compress_hook)
        steps(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1))
        uneven = DistributedDataParallel(net(), process_group=group, find_unused_parameters=True)
        with uneven.join():  # whose ranks tell each other, in another way without batches, what was used
            for _ in range(2 + rank):
                uneven(torch.ones(2, 10)).sum().backward()
        sharded = net()
        fully_shard(sharded, mesh=DeviceMesh.from_group(group, "cpu"))
        steps(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
        whole = [parameter.full_tensor() for parameter in sharded.parameters()]
        found.append([*model.parameters(), *hooked.parameters(), *(p.grad for p in uneven.parameters()), *whole])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks
def test_zero_comm_hooks_join_and_fsdp_give_what_they_give_over_gloo():
    spawn_ranks(other_wrappers, 2)


def averages_over_who_has_batches(rank):
    found = []
    for group in (backend(), dist.group.WORLD):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(10, 3), process_group=group)
        with model.join(divide_by_initial_world_size=False):  # torch's reducer waits for the number of these ranks
            for step in range(2 + rank):
                model.zero_grad()
                model(torch.full((2, 10), float(rank + step))).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks
def test_the_reducer_of_torch_waits_for_a_work_of_which_python_has_let_go():
    spawn_ranks(averages_over_who_has_batches, 2)


def compiled(rank):
    import stretto.backend  # noqa: F401

    world, found = dist.get_world_size(), []
    for group in (dist.new_group(backend="stretto"), dist.group.WORLD):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 3)), process_group=group)

        @torch.compile(backend="eager")
        def step(batch, model=model):
            model(batch).sum().backward()

        @torch.compile(backend="eager")
        def collectives(tensor, group=group):
            parts, part = torch.empty(world * 3), torch.empty(3)
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            dist.barrier(group)
            dist.all_gather_into_tensor(parts, tensor, group)
            dist.reduce_scatter_tensor(part, parts, group=group)
            dist.broadcast(part, 0, group)
            dist.all_gather(gathered := [torch.empty(3) for _ in range(world)], part, group)
            return torch.cat([tensor, parts, part, *gathered])

        for number in range(2):
            step(torch.randn(4, 10, generator=torch.Generator().manual_seed(rank + number)))
        results = collectives(torch.full((3,), float(rank + 1)))
        found.append([results, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks
def test_what_is_compiled_gives_what_it_gives_over_gloo():
    spawn_ranks(compiled, 2)


def attached(rank):
    torch.manual_seed(0)
    group, grads = backend(), []
    for transport in ("auto", "process_group"):
        model = nn.Linear(3, 2)
        torch.manual_seed(0)
        sync = stretto.attach(model, process_group=group, transport=transport)
        model.zero_grad()
        model(torch.full((1, 3), float(rank))).sum().backward()
        grads.append(model.weight.grad.clone())
        assert sync.describe().splitlines()[0] == f"rank {rank} of 2 over " + (
            "shared_memory" if transport == "auto" else "process_group (stretto)"
        )
        sync.detach()
    assert torch.equal(*grads) and float(grads[0][0, 0]) == 0.5


@pytest.mark.ranks
def test_attach_finds_shared_memory_over_it_too():
    spawn_ranks(attached, 2)


# Where ranks do not share memory, and where they die


def separated(rank):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("stretto").addHandler(handler)
    logging.getLogger("stretto").setLevel(logging.INFO)
    if rank == 1:

        def refuse(*_):
            raise PermissionError(13, "Permission denied")

        memory.open_peers = refuse
    group = backend()
    for collective in COLLECTIVES:
        compare(collective, group, torch.float32, dist.ReduceOp.SUM, (1000,), 0)
    dist.barrier(group)
    assert group.in_shared_memory is False
    return told


@pytest.mark.ranks
def test_ranks_that_do_not_share_memory_use_gloo_and_rank_0_says_why():
    why = "rank 1: the memory of rank 0 cannot be opened: Permission denied"
    told = f"gradients go over process_group (stretto), not through shared memory: {why}"
    assert spawn_ranks(separated, 2) == [[told], []]


def different_calls(rank):
    group = backend()
    with pytest.raises(stretto.CommunicationError) as caught:
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=group)
        else:
            dist.all_reduce(torch.ones(4), group=group)
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_call_different_things_are_told_what_each_called():
    first, second = spawn_ranks(different_calls, 2)
    assert first == (
        "rank 0: all_reduce in the group of ranks [0, 1] failed: rank 1 called sum float32 of 4 elements, "
        "rank 0 sum float32 of 3 elements.\n"
        "Look at the first error in the other ranks' logs, and start again, on all ranks."
    )
    assert second.startswith("rank 1: all_reduce in the group of ranks [0, 1] failed: rank 0 called sum float32 of 3 ")


def after_a_quantised_tensor(rank):
    """Gloo refuses it, on all ranks, and the group goes on."""
    group = backend()
    with pytest.raises(RuntimeError):
        dist.broadcast(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), 0, group=group)
    dist.all_reduce(one := torch.ones(1), group=group)
    return one.item()


@pytest.mark.ranks
def test_a_quantised_tensor_is_left_to_gloo():
    assert spawn_ranks(after_a_quantised_tensor, 2) == [2.0, 2.0]


def calls_of_equal_pieces(rank, call):
    """One large tensor, or two of half its size: whose pieces are equally long."""
    group = backend()
    sizes = [2 * PIECE] if rank == 0 else [PIECE, PIECE]
    with pytest.raises(stretto.CommunicationError) as caught:
        for size in sizes:
            tensor = torch.ones(size // 4)
            if call == "all_reduce":
                dist.all_reduce(tensor, group=group)
            elif call == "broadcast":
                dist.broadcast(tensor, 0, group=group)
                dist.barrier(group)  # the root of a broadcast waits for nobody
            elif call == "all_gather":
                dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor, group=group)
            else:
                dist.reduce_scatter(torch.empty_like(tensor), [tensor, tensor], group=group)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("call", "what", "of_each"),
    [
        ("all_reduce", "sum float32", 1),
        ("broadcast", "broadcast by 0", 4),  # as bytes
        ("all_gather", "all_gather", 8),
        ("reduce_scatter", "rs sum float32", 2),
    ],
)
def test_a_large_tensor_is_not_taken_for_two_smaller_ones(call, what, of_each):
    half, whole = (f"{what} of {of_each * nbytes // 4} elements" for nbytes in (PIECE, 2 * PIECE))
    first, second = spawn_ranks(calls_of_equal_pieces, 2, call)
    by_first, by_second = f"rank 1 called {half}, rank 0 {whole}.", f"rank 0 called {whole}, rank 1 {half}."
    # Who comes to it later may be told by the other: the root of a broadcast in the barrier after it.
    assert f"failed: {by_first}" in first or f"rank 1 cannot go on: {by_second}" in first
    assert f"failed: {by_second}" in second or f"rank 0 cannot go on: {by_first}" in second


PREAMBLE = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import stretto.backend
torch.set_num_threads(1)
dist.init_process_group("stretto")
rank = dist.get_rank()
"""


def start(program, world=2, preamble=PREAMBLE):
    """Ranks as a user starts them by hand: what they print and the codes with which they end."""
    ended = warm_programs.run_ranks(["-c", preamble + textwrap.dedent(program)], world, to_the_end=True)
    return [(one.stdout, one.stderr, one.returncode) for one in ended]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "ending", ["", "dist.destroy_process_group()", "del tensor; dist.destroy_process_group()", "sys.exit(0)"]
)
def test_programs_end_cleanly_with_and_without_destroying_the_group(ending):
    program = "dist.all_reduce(tensor := torch.ones(100_000)); dist.barrier(); print(int(tensor.sum()))\n" + ending
    assert start(program) == [("200000\n", "", 0)] * 2


@pytest.mark.ranks
def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    model = "DistributedDataParallel(torch.nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()\n"
    script.write_text(PREAMBLE + model + "print(dist.get_backend(), flush=True)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stdout.count("stretto") == 2


@pytest.mark.ranks
def test_what_the_documentation_shows_runs():
    page = (Path(__file__).parent.parent / "docs" / "transports.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert start(code, preamble="") == [("", "", 0)] * 2


class Refusing:
    """In the place of Gloo."""

    def __init__(self, used):
        self.used = used

    def __getattr__(self, name):
        self.used.append(name)
        raise AssertionError(f"{name} went through Gloo")


def only_one(rank):
    group = backend()
    found, used = [], []
    group._gloo = Refusing(used)
    for operation in OPERATIONS[:5]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if operation == "AVG" and dtype is torch.int64:
                continue  # left to Gloo, which refuses it
            tensor, op = torch.arange(1, 7).to(dtype).view(2, 3).T, getattr(dist.ReduceOp, operation)
            mine, flat, one = tensor.clone(), tensor.flatten(), torch.zeros(6, dtype=dtype)
            dist.all_reduce(mine, op, group=group)
            dist.reduce_scatter(one, [flat], op, group=group)
            dist.reduce_scatter_tensor(other := torch.zeros(6, dtype=dtype), flat, op, group=group)
            found += [torch.equal(mine, tensor), torch.equal(one, flat), torch.equal(other, flat)]
    given, objects = torch.arange(6.0).view(2, 3).T, [None]
    dist.all_gather(results := [torch.zeros(3, 2)], given, group=group)
    dist.all_gather_into_tensor(one := torch.zeros(3, 2), given, group=group)
    dist.broadcast(copied := given.clone(), rank, group=group)
    dist.barrier(group)
    dist.all_gather_object(objects, "mine", group=group)
    found += [torch.equal(tensor, given) for tensor in (*results, one, copied)]
    return [*found, objects == ["mine"]], used, group.in_shared_memory


@pytest.mark.ranks
def test_in_a_world_of_one_nothing_goes_through_gloo():
    ((found, used, shared),) = spawn_ranks(only_one, 1)
    assert found and all(found) and not used and shared is False


@pytest.mark.ranks
def test_a_world_of_one():
    program = """
        dist.all_reduce(tensor := torch.ones(3)); dist.barrier()
        results = [torch.zeros(3)]; dist.all_gather(results, tensor)
        model = DistributedDataParallel(torch.nn.Linear(3, 3)); model(torch.ones(1, 3)).sum().backward()
        print(dist.get_backend(), results[0].tolist()); dist.destroy_process_group()
    """
    assert start(program, 1) == [("stretto [1.0, 1.0, 1.0]\n", "", 0)]


KILLED = """
    dist.all_reduce(torch.ones(1))
    pids = [None] * 2; dist.all_gather_object(pids, os.getpid())
    {model}
    if rank == 1:
        print(os.getpid(), time.monotonic(), flush=True); {end}
    try: {call}
    except RuntimeError as error: print(time.monotonic()); print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "model, call, what",
    [
        ("", "dist.all_reduce(torch.ones(4))", "all_reduce"),
        ("", "dist.barrier()", "barrier"),
        ("", "dist.all_reduce(torch.ones(1 << 22))", "all_reduce"),
        ("", "dist.broadcast(torch.ones(1 << 22), 0)", "broadcast"),
        (
            "model = DistributedDataParallel(torch.nn.Linear(3, 3))",
            "model(torch.ones(1, 3)).sum().backward()",
            "all_reduce",
        ),
    ],
    ids=["all_reduce", "barrier", "large", "root", "ddp"],
)
def test_who_waits_for_a_killed_rank_raises_within_seconds(model, call, what):
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    (told, _, _), (died, _, code) = start(KILLED.format(model=model, call=call, end=end))
    assert code == -signal.SIGKILL
    pid, when = died.split()
    raised, text = told.split("\n", 1)
    assert float(raised) - float(when) < 2, "told late"
    assert text == (
        f"rank 0: {what} failed: rank 1 (pid {pid}) died without a word.\n"
        "Remove the cause and start again, on all ranks.\n"
    )


def late(rank, name):
    import stretto.backend

    group = dist.new_group(backend=name, timeout=timedelta(seconds=1))
    dist.barrier(group)
    assert stretto.transport.ProcessGroupTransport(group).patience == 1
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        assert "not done within 1 s" in str(caught.value) and time.monotonic() - began < 10
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["stretto", "cpu:stretto", "cpu:stretto,cuda:gloo"])
def test_who_does_not_come_within_the_timeout(name):
    spawn_ranks(late, 2, name)


def late_by_a_new_timeout(rank, longer):
    import stretto.backend  # noqa: F401

    change = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout  # before 2.14
    before, after = (2, 60) if longer else (60, 1)
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=before))
    dist.barrier(group)
    change(timedelta(seconds=after), group)
    if rank == 1 and longer:
        time.sleep(3)
    if rank == 0 and not longer:
        with pytest.raises(RuntimeError, match="not done within 1 s"):
            dist.all_reduce(torch.ones(3), group=group)
    elif longer:
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.parametrize("longer", [False, True])
def test_a_new_timeout_of_the_group_holds_from_the_next_collective_on(longer):
    spawn_ranks(late_by_a_new_timeout, 2, longer)


def given_up(rank, numel):
    import stretto.backend  # noqa: F401

    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=1))
    dist.barrier(group)
    tensors, told = [torch.full((numel,), 1.0 + rank) for _ in range(2)], []
    for tensor in tensors:
        if rank == 1:
            dist.barrier()
        try:
            dist.all_reduce(tensor, group=group)
            told.append("done")
        except RuntimeError as error:
            told.append(str(error))
        if rank == 0:
            if tensor is tensors[0]:
                tensor.fill_(7.0)
            dist.barrier()
            dist.barrier()
            assert tensors[0].unique().tolist() == [7.0], "the call that had failed was carried out"
        else:
            dist.barrier()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("numel", [3, 2_000_000])
def test_a_tensor_is_not_written_after_the_call_has_failed(numel):
    first, second = spawn_ranks(given_up, 2, numel)
    over = "a message was not done within 1 s, and rank 1 had not arrived"
    called = "all_reduce in the group of ranks [0, 1] failed:"
    again = ".\nLook at the first error in the other ranks' logs, and start again, on all ranks."
    late = "not done within 1 s, and rank 1 had not arrived"
    assert first == [f"rank 0: {called} {late}{again}", f"rank 0: {called} {over}{again}"]
    peer = f"rank 1: {called} rank 0 cannot go on: {over}.\nRemove the cause and start again, on all ranks."
    assert second == ["done" if numel == 3 else peer, peer]


def leaves_its_group(rank, numel):
    import stretto.backend  # noqa: F401

    group = dist.new_group(backend="stretto")
    dist.all_reduce(torch.ones(numel), group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        dist.all_reduce(torch.ones(numel), group=group)
        dist.destroy_process_group(group)
        del group
        store.wait(["heard"])
        return ""
    total = torch.ones(numel)
    dist.all_reduce(total, group=group)  # for which that rank has done its part
    assert total.unique().tolist() == [2.0]
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(numel), group=group)
    store.set("heard", "")
    assert time.monotonic() - began < 10
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("numel", [3, 2_000_000])
def test_a_rank_that_destroys_a_group_lets_nobody_wait(numel):
    """For half an hour, where Gloo raises at once."""
    told, _ = spawn_ranks(leaves_its_group, 2, numel)
    assert told == (
        "rank 0: all_reduce in the group of ranks [0, 1] failed: rank 1 cannot go on: it has let go of its process "
        "group.\nRemove the cause and start again, on all ranks."
    )


ROOT_ENDS = """
    value = torch.full((1_000_000,), float(rank == 0))
    dist.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.broadcast(value, 0)
        store.set("pid", str(os.getpid()))
        del store
    else:
        pid, until = store.get("pid").decode(), time.monotonic() + 1
        while os.path.exists("/proc/" + pid) and time.monotonic() < until: time.sleep(0.01)
        dist.broadcast(value, 0)
        print(value.sum().item(), flush=True)
    {end}
"""


@pytest.mark.ranks
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "", "sys.exit(0)"])
def test_the_root_of_a_broadcast_may_end_before_others_have_it(end):
    (_, _, first), (said, _, second) = start(ROOT_ENDS.format(end=end))
    assert (first, said, second) == (0, "1000000.0\n", 0)


def test_importing_stretto_registers_nothing():
    program = "import stretto, torch.distributed as dist; assert 'stretto' not in dist.Backend.backend_list\n"
    program += "import stretto.backend; assert dist.Backend.STRETTO == 'stretto' and not dist.is_initialized()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_torch_finds_the_backend_by_its_name():
    """From 2.14 on, without an import."""
    found = entry_points(group="torch.distributed.backends", name="stretto")
    assert found, "stretto was installed before it had an entry point: install it again"
    assert next(iter(found)).load()() is None and dist.Backend.STRETTO == "stretto"
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        return
    program = """
import torch.distributed as dist
dist.init_process_group("stretto", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
dist.destroy_process_group()
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("stretto\n", "")


@pytest.mark.parametrize("name", ["all_to_all_single", "alltoall_base", "send", "recv"])
def test_what_torch_calls_with_the_interpreters_lock_is_called_without(name):
    """Else Gloo's threads, which let go of tensors with a lock of their own, and this one wait for each other."""
    import stretto.backend

    assert inspect.isfunction(vars(stretto.backend.StrettoProcessGroup)[name])
