"""What is not used any more goes at once, without Python's collector: memory, descriptors, the thread."""

from __future__ import annotations

import collections
import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.modules import module as torch_module

import stretto
from stretto import comm_hooks
from stretto.hook_work import HookWork
from stretto.reducer import reducer_of
from stretto.survivors import Survivors
from stretto.testing import run_ranks, spawn_ranks
from stretto.transport import Transport
from stretto.watch import ENTRY, listen, stop_listening

pytestmark = pytest.mark.timeout(100)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(9, 4, sparse=True)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2))
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, dense: bool = False) -> torch.Tensor:
        rows = torch.ones(3, 4) if dense else self.rows(torch.arange(3))
        return self.frozen(self.layers(rows)).sum()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(6):
        model(dense=number > 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def detached(transport: str) -> None:
    model = Net()
    handle = stretto.attach(model, transport=transport)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.report()
    handle.detach()
    assert handle.statistics.passes == 6, "asked afterwards"


def forgotten(transport: str) -> None:
    model = Net()
    stretto.attach(model, transport=transport)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def the_optimizer_lives_longest(transport: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = stretto.attach(model, transport=transport)
    train(model, optimizer)
    del model, handle
    layers = optimizer.param_groups[0]["params"][1:3]
    before = [one.detach().clone() for one in layers]
    (layers[0].sum() * (dist.get_rank() + 1)).backward()
    assert layers[0].grad is not None
    assert bool((layers[0].grad == 1.5).all()), "as long as a parameter lives"
    optimizer.step()
    assert not torch.equal(before[0], layers[0])


def drop_in(transport: str) -> None:
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def sharded(transport: str) -> None:
    model = Net().requires_grad_(True)
    model.rows.requires_grad_(False)
    handle = stretto.attach(model, transport=transport)
    train(model, stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle))
    handle.detach()


def sharded_and_forgotten(transport: str) -> None:
    model = Net().requires_grad_(True)
    model.rows.requires_grad_(False)
    handle = stretto.attach(model, transport=transport)
    train(model, stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle, overlap=False))


def sharded_and_forgotten_under_way(transport: str) -> None:
    model = Net().requires_grad_(True)
    model.rows.requires_grad_(False)
    handle = stretto.attach(model, transport=transport)
    optimizer = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle)
    model(dense=True).backward()
    optimizer.step()


def in_shares(transport: str) -> None:
    model = Net().requires_grad_(True)
    model.rows.requires_grad_(False)
    handle = stretto.attach(model, transport=transport)
    train(model, stretto.shard(torch.optim.AdamW(model.parameters()), handle, keep_grads=False, overlap=False))


def with_a_comm_hook(transport: str) -> None:
    model = Net()
    handle = stretto.attach(model, transport=transport)
    handle.register_comm_hook(None, fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def with_a_pass_that_failed(transport: str) -> None:
    model = Net()
    stretto.attach(model, transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    hook = model.layers[0].weight.register_hook(lambda gradient: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model().backward()
    hook.remove()
    train(model, optimizer)


def in_a_family(transport: str) -> None:
    first, second = Net(), Net()
    handle = stretto.attach(first, transport=transport)
    stretto.attach(second, beside=[handle], transport=transport)
    for _ in range(3):
        (first() + second()).backward()
    del first, handle
    second().backward()


WAYS: tuple[Callable[[str], None], ...] = (
    detached,
    forgotten,
    the_optimizer_lives_longest,
    drop_in,
    sharded,
    sharded_and_forgotten,
    sharded_and_forgotten_under_way,
    in_shares,
    with_a_comm_hook,
    with_a_pass_that_failed,
    in_a_family,
)


def there_is() -> collections.Counter[str]:
    """Objects of stretto's, descriptors and threads of this process."""
    made = [type(one) for one in gc.get_objects()]
    found = collections.Counter(one.__qualname__ for one in made if str(one.__module__).startswith("stretto."))
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    found["threads"] = threading.active_count()
    return found


def what_stays(rank: int, transport: str) -> dict[str, dict[str, int]]:
    found = {}
    gc.disable()
    gc.freeze()  # all of torch, which each look would go through
    for way in WAYS:
        way(transport)  # what is made once in a process
        dist.barrier()
        gc.collect()
        before = there_is()
        way(transport)
        dist.barrier()
        found[way.__name__] = dict(there_is() - before)
    return found


def test_the_last_of_a_model_may_go_at_any_moment() -> None:
    """The collector looks while tables of the process are being changed, or gone through."""

    def worker(transport: Transport) -> None:
        model = torch.nn.Linear(2, 2)
        stretto.attach(model, transport=transport)
        model(torch.ones(1, 2)).sum().backward()
        with torch_module._global_parameter_registration_hooks[ENTRY]._lock:
            del model

    run_ranks(worker, 2, timeout=20)


def test_with_the_last_listener_torchs_tables_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is left in one of them would be taken for that of a later listener, who hears of nothing there."""

    class Told:
        def hear(self, owner: torch.nn.Module, item: object) -> None:
            """What this is does not matter."""

    tables: list[dict[object, object]] = [{}, {}, {}]
    for kind, table in zip(("parameter", "module", "buffer"), tables, strict=True):
        monkeypatch.setattr(torch_module, f"_global_{kind}_registration_hooks", table)
    told = Told()
    for _ in range(2):
        listen(told.hear)
        assert [[*table] for table in tables] == [[ENTRY]] * 3 and tables[0] == tables[1]
        stop_listening(told.hear)
        assert tables == [{}, {}, {}]


def test_whom_the_collector_had_found_before_others_were_followed_is_no_survivor() -> None:
    """Python calls back for all that it has found, also when meanwhile a handle was detached: that let go twice."""

    class Circle:
        def __init__(self, *others: object) -> None:
            self.circle = self, others

    class Owner:
        calls = 0

        def none_left(self) -> None:
            self.calls += 1

    owner = Owner()
    survivors = Survivors(owner.none_left)
    gc.collect()
    gone = Circle(), Circle(), Circle()
    survivors.follow(gone[1:])
    meanwhile = [weakref.ref(one, lambda _: survivors.follow(())) for one in gone[:1]]
    del gone
    gc.collect()
    assert meanwhile[0]() is None and owner.calls == 0
    last = Circle()
    survivors.follow([last])
    del last
    gc.collect()
    assert owner.calls == 1


def test_to_let_go_twice_is_harmless() -> None:
    """One thread detaches while in another the last parameter goes."""

    def worker(transport: Transport) -> None:
        model = torch.nn.Linear(2, 2)
        handle = stretto.attach(model, transport=transport)
        reducer = reducer_of(model.weight)
        assert reducer is not None
        handle.detach()
        reducer._let_go()

    run_ranks(worker, 2, timeout=20)


def test_and_while_a_module_is_being_built() -> None:
    def worker(transport: Transport) -> None:
        models = [torch.nn.Linear(2, 2)]
        stretto.attach(models[0], transport=transport)
        models[0](torch.ones(1, 2)).sum().backward()
        transport.all_gather_object(None)
        hooks = [
            torch_module.register_module_parameter_registration_hook(hook)
            for hook in (lambda *_: models.clear(), lambda *_: None)
        ]
        transport.all_gather_object(None)
        if not transport.rank:
            torch.nn.Linear(2, 2)
        transport.all_gather_object(None)
        for hook in hooks:
            hook.remove()

    run_ranks(worker, 2, timeout=20)


def test_a_layer_that_outlives_its_module_is_not_left_to_its_rank() -> None:
    def worker(transport: Transport) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        handle = stretto.attach(model, transport=transport)
        model(torch.ones(1, 3)).sum().backward()
        model.zero_grad()
        model[0] = torch.nn.Linear(3, 2)
        loss = model(torch.ones(1, 3)).sum()
        del model, handle
        with pytest.raises(stretto.SetupError) as caught:
            loss.backward()
        return str(caught.value)

    assert all("module has been freed, so the plan cannot follow" in told for told in run_ranks(worker, 2, timeout=20))


def test_the_work_of_a_comm_hook_keeps_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Gloo's holds it until it is done with the callbacks, while this one goes on: it was the last to let
    go of a handle at times, whose end then ran there and left a thread in Python's table.
    """
    works: list[HookWork] = []

    def kept(*arguments: Any) -> HookWork:
        works.append(HookWork(*arguments))
        return works[-1]

    monkeypatch.setattr(comm_hooks, "HookWork", kept)

    def worker(transport: Transport) -> bool:
        model = torch.nn.Linear(2, 2)
        handle = stretto.attach(model, transport=transport)
        handle.register_comm_hook(None, noop_hook)
        model(torch.ones(1, 2)).sum().backward()
        reducer = reducer_of(model.weight)
        assert reducer is not None
        peers = weakref.ref(reducer.queue.peers)
        del model, handle, reducer
        return peers() is None

    assert run_ranks(worker, 2, timeout=20) == [True, True]
    assert len(works) >= 2


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_nothing_waits_for_pythons_collector(transport: str) -> None:
    for found in spawn_ranks(what_stays, 2, transport):
        assert found == {way.__name__: {} for way in WAYS}
