"""State that is saved or loaded between a change of groups, or of the plan, and the step that follows it."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import logging.handlers
import os
import signal
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shard import CARRIERS, OPTIMIZERS, Net, assert_same, assert_same_state, attached, backward, pair, train
from test_shared_memory import shared

import stretto
from stretto.listeners import before_forks
from stretto.sharding.awaited import Arrival, Awaited
from stretto.sharding.compiled import CompilerWatch
from stretto.sharding.withholding import Withholding
from stretto.testing import run_ranks, spawn_ranks


@pytest.fixture(params=["threads", "shared memory", "hosts"])
def carrier(request: pytest.FixtureRequest) -> Any:
    return CARRIERS[request.param]


def whole(transport: Any, sharded: Any) -> dict[str, Any]:
    """Rank 0's state, on every rank."""
    return copy.deepcopy(transport.all_gather_object(sharded.state_dict())[0])


def with_more(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [*model.second.parameters(), *model.last.parameters()], "lr": 0.02})


def test_who_goes_on_with_groups_that_are_added_has_all_of_the_state(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW([*parameters][:2], lr=0.01)

        model, sharded, _, plain, optimizer = pair(transport, make)
        with_more(model, sharded)
        with_more(plain, optimizer)
        train(model, sharded, transport.rank, range(3))
        train(plain, optimizer, transport.rank, range(3))
        saved, wanted = whole(transport, sharded), copy.deepcopy(optimizer.state_dict())
        assert_same_state(saved, wanted)

        model, sharded, _, plain, optimizer = pair(transport, make)
        with_more(model, sharded)
        with_more(plain, optimizer)
        sharded.load_state_dict(saved)
        optimizer.load_state_dict(wanted)
        assert_same_state(whole(transport, sharded), optimizer.state_dict())
        train(model, sharded, transport.rank, range(3, 6))
        train(plain, optimizer, transport.rank, range(3, 6))
        assert_same(model, plain)

    carrier(worker, 2)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_state_is_loaded_behind_a_backward_that_has_changed_the_plan(carrier: Any, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=keep_grads, bucket_cap_mb=0.002)
        train(model, sharded, transport.rank, range(2))
        train(plain, optimizer, transport.rank, range(2))
        saved, wanted = whole(transport, sharded), copy.deepcopy(optimizer.state_dict())
        for net, one, state in ((model, sharded, saved), (plain, optimizer, wanted)):
            train(net, one, transport.rank, range(2, 4))
            net.second.requires_grad_(False)
            one.zero_grad()
            backward(net, transport.rank, 4)
            one.load_state_dict(state)
            one.step()
            train(net, one, transport.rank, range(5, 8))
        assert_same(model, plain)
        assert_same_state(whole(transport, sharded), optimizer.state_dict())

    carrier(worker, 2)


CALLS = {
    "saved": lambda optimizer, saved: optimizer.state_dict(),
    "loaded": lambda optimizer, saved: optimizer.load_state_dict(saved),
    "in a checkpoint": lambda optimizer, saved: hasattr(optimizer, "stateful") and optimizer.stateful().state_dict(),
    "removed, loaded": lambda optimizer, saved: remove_and_load(optimizer, saved),
}


def remove_and_load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    optimizer.param_groups[0]["params"].pop(0)
    saved["param_groups"][0]["params"].pop(0)
    saved["state"].pop(0)
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_is_replaced_and_no_step_has_followed(carrier: Any, world: int, call: str) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(2))
            saved = whole(transport, one)
            old, net.first.weight = net.first.weight, torch.nn.Parameter(torch.ones_like(net.first.weight))
            group = one.param_groups[0]["params"]
            group[next(place for place, other in enumerate(group) if other is old)] = net.first.weight
            one.state.pop(old, None)
            CALLS[call](one, saved)
            if call != "removed, loaded":  # else what is no more in a group would have no gradient taken
                train(net, one, transport.rank, range(2, 4))
        assert_same(model, plain)
        assert_same_state(whole(transport, sharded), whole(transport, optimizer))
        assert_same_state(sharded.unshard().state_dict(), optimizer.state_dict())

    if world == 1:
        stretto.testing.run_ranks(worker, 1)
    else:
        carrier(worker, 2)


def test_who_has_taken_over_the_memory_of_a_parameter_has_its_own_in_the_end() -> None:
    def worker(transport: Any) -> float:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(1))
        old = model.first.weight
        model.first.weight = torch.nn.Parameter(old.data, requires_grad=False)
        sharded.param_groups[0]["params"][:] = [one for one in sharded.param_groups[0]["params"] if one is not old]
        train(model, sharded, transport.rank, range(1, 3))
        sharded.unshard()
        sync.detach()
        transport.all_gather_object(None)
        with torch.no_grad():
            model.first.weight.fill_(transport.rank)
        transport.all_gather_object(None)
        return model.first.weight[0, 0].item()

    assert shared(worker, 2) == [0.0, 1.0]


@pytest.mark.parametrize("other", ["frozen", "ignored", "of another optimizer", "of one that steps first"])
def test_data_are_swapped_for_those_of_a_parameter_that_is_not_stepped_with_it(carrier: Any, other: str) -> None:
    """It lies where this one is stepped, and must not be written over."""

    def worker(transport: Any) -> None:
        ignored = other == "ignored"
        model, sync = attached(transport, ignore=["back.bias"] * ignored)
        plain, _ = attached(transport, ignore=["back.bias"] * ignored)
        optimizers = []
        for net in (model, plain):
            alone = [net.back.bias]
            rest = [one for one in net.parameters() if one is not net.back.bias]
            both = [torch.optim.AdamW(rest, lr=0.01), torch.optim.SGD(alone, lr=0.1, momentum=0.5)][: 2 - ignored]
            optimizers.append([stretto.shard(one, sync) for one in both] if net is model else both)
            if other == "of one that steps first":
                optimizers[-1].reverse()
        for step in range(7):
            for net, several in zip((model, plain), optimizers, strict=True):
                net.back.bias.requires_grad_(other != "frozen" or step < 2)
                for one in several:
                    one.zero_grad()
                if step == 4:
                    net.first.bias.data, net.back.bias.data = net.back.bias.data, net.first.bias.data
                backward(net, transport.rank, step)
                for one in several:
                    one.step()
            assert_same(model, plain)
        transport.all_gather_object(None)
        sync.detach()
        assert_same(model, plain)

    carrier(worker, 3)


def test_two_parameters_in_one_memory_are_refused(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        model.back.bias.data = model.first.bias.data
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        assert str(caught.value) == (
            f"rank {transport.rank}, shard: first.bias, back.bias are two tensors in one memory (b.data = a.data), "
            "which sharding would separate.\nTie them as one: module_b.weight = module_a.weight, before "
            "stretto.attach()."
        )

    carrier(worker, 2)


@pytest.mark.parametrize("other", ["of another optimizer", "of none", "a buffer"])
def test_memory_of_another_tensor_of_the_module_is_refused(other: str) -> None:
    def worker(transport: Any) -> str:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
        first, second = (layer.weight for layer in model)
        if other == "a buffer":
            model[1].register_buffer("copy", first.data)
        else:
            second.data = first.data
        sync = stretto.attach(model, transport=transport)
        with pytest.raises(stretto.SetupError) as caught:
            stretto.shard(torch.optim.SGD([first], lr=0.1), sync)
        if other == "of another optimizer":
            second.data = second.data.clone()
            stretto.shard(torch.optim.SGD([first], lr=0.1), sync)
            stretto.shard(torch.optim.SGD([second], lr=0.1), sync)
        return str(caught.value)

    names = "0.weight, 1.copy" if other == "a buffer" else "0.weight, 1.weight"
    assert run_ranks(worker, 2) == [
        f"rank {rank}, shard: {names} are two tensors in one memory (b.data = a.data), which sharding would separate.\n"
        "Tie them as one: module_b.weight = module_a.weight, before stretto.attach()."
        for rank in range(2)
    ]


def test_groups_that_are_added_are_followed_amid_an_evaluation(carrier: Any) -> None:
    """By whoever saves then: what was made there could not be stepped behind it, over a process group."""

    def worker(transport: Any) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW([*parameters][:2], lr=0.01)

        model, sharded, _, plain, optimizer = pair(transport, make)
        train(model, sharded, transport.rank, range(2))
        train(plain, optimizer, transport.rank, range(2))
        with_more(model, sharded)
        with_more(plain, optimizer)
        with torch.inference_mode():
            sharded.stateful().state_dict()
        train(model, sharded, transport.rank, range(2, 5))
        train(plain, optimizer, transport.rank, range(2, 5))
        assert_same(model, plain)

    carrier(worker, 2)


def test_what_is_made_amid_an_evaluation_is_trained_with_behind_it(carrier: Any) -> None:
    """A tensor that is made in inference mode is written in no backward: the first one behind ``attach`` failed."""

    def worker(transport: Any) -> None:
        model, plain = Net(), Net()
        optimizers = [OPTIMIZERS["AdamW"](one.parameters()) for one in (model, plain)]
        plain_sync = stretto.attach(plain, transport=transport)

        def both(steps: range) -> None:
            for net, optimizer in zip((model, plain), optimizers, strict=True):
                for step in steps:
                    optimizer.zero_grad(set_to_none=False)
                    backward(net, transport.rank, step)
                    optimizer.step()
            assert_same(model, plain)

        with torch.inference_mode():
            sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.008)
            optimizers[0] = sharded = stretto.shard(optimizers[0], sync)
        both(range(3))
        with torch.inference_mode():
            state = sharded.state_dict()
        state = copy.deepcopy(transport.all_gather_object(state)[0])
        with torch.inference_mode():
            sharded.load_state_dict(state)
            sync.check()
        both(range(3, 5))
        with torch.inference_mode():
            optimizers[0] = sharded.unshard()
        both(range(5, 7))
        with torch.inference_mode():
            sync.detach()
            sync = stretto.attach(model, transport=transport)
        both(range(7, 9))
        sync.detach()
        plain_sync.detach()

    carrier(worker, 2)


class Embedded(torch.nn.Module):
    def __init__(self, kind: Any = torch.nn.Embedding, **options: Any) -> None:
        super().__init__()
        self.rows, self.head = kind(6, 2, **options), torch.nn.Linear(2, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(indices))


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_what_forward_scales_in_place_does_not_lie_once_for_all_ranks(kind: Any) -> None:
    def worker(transport: Any) -> list[str]:
        torch.manual_seed(0)
        model = Embedded(kind, max_norm=1.0)
        sync, told = stretto.attach(model, transport=transport), []
        sharded = stretto.shard(torch.optim.SGD(model.head.parameters(), lr=0.1), sync)
        for add in (
            lambda: sharded.add_param_group({"params": [model.rows.weight]}),
            lambda: stretto.shard(torch.optim.SGD([model.rows.weight], lr=0.1), sync),
        ):
            with pytest.raises(stretto.SetupError) as caught:
                add()
            told.append(str(caught.value))
        return told

    assert shared(worker, 2) == [
        [
            f"rank {rank}{at}: forward of rows scales its weight in place (max_norm=1.0), which ranks 0, 1 would share "
            "in one memory: two ranks at once would scale a row twice.\n"
            'Set max_norm=None; or leave the weight to a plain optimizer; or attach with transport="process_group".'
            for at in (", shard", ", shard")
        ]
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("run", "options"), [(run_ranks, {"max_norm": 1.0}), (shared, {"max_norm": 1.0, "sparse": True}), (shared, {})]
)
def test_what_forward_scales_in_memory_of_each_rank_is_sharded(run: Any, options: dict[str, Any]) -> None:
    def worker(transport: Any) -> None:
        model = Embedded(**options)
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        before = model.rows.weight.detach().clone()
        model(torch.tensor([0, 1])).sum().backward()
        sharded.step()
        assert not torch.equal(model.rows.weight, before)

    run(worker, 2)


def test_a_lazy_layer_is_added() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        model.append(torch.nn.LazyLinear(2))
        sharded.add_param_group({"params": [*model[1].parameters()]})
        x = model[0](torch.ones(1, 2))
        model[1](x)  # gets its shapes
        before = model[1].bias.clone()
        model[1](x).sum().backward()
        sharded.step()
        assert transport.rank or torch.allclose(model[1].bias, before - 0.1)  # the others have taken rank 0's
        sync.check()

    run_ranks(worker, 2)


# Gradients in shares


def test_a_layer_is_replaced_between_backward_and_a_step_that_never_came(carrier: Any) -> None:
    """The old one is still held, with a gradient of which this rank has its share."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=False)
        kept = []
        for net, one in ((model, sharded), (plain, optimizer)):
            backward(net, transport.rank, 0)
            kept.append(net.second.weight)
            net.second.weight = torch.nn.Parameter(torch.full_like(net.second.weight, 0.1))
            group = one.param_groups[0]["params"]
            group[next(place for place, other in enumerate(group) if other is kept[-1])] = net.second.weight
            train(net, one, transport.rank, range(1, 4))
        assert_same(model, plain)

    carrier(worker, 2)


@pytest.mark.parametrize("call", ["stateful", "load"])
def test_what_a_step_would_refuse_is_refused_where_state_is_asked_for(carrier: Any, call: str) -> None:
    """A parameter is put into a group by hand; another one has been resized on one rank."""

    def worker(transport: Any) -> str:
        model, sync = attached(transport)
        sharded = stretto.shard(torch.optim.AdamW(model.first.parameters()), sync)
        train(model, sharded, transport.rank, range(1))
        model.zero_grad()
        saved = whole(transport, sharded)
        saved["param_groups"][0]["params"].append(2)
        sharded.param_groups[0]["params"].append(model.second.bias)
        if transport.rank == 1:
            model.first.bias.data = torch.zeros(3)
        with pytest.raises(stretto.SetupError) as caught:
            sharded.stateful().state_dict() if call == "stateful" else sharded.load_state_dict(saved)
        return str(caught.value)

    first, second, *_ = carrier(worker, 2)
    assert second == (
        "rank 1, pass 1: first.bias was (40,) torch.float32 when its optimizer was sharded, and is (3,) torch.float32 "
        "now.\nRun a backward that reaches it before the step where the dtype has changed; where the size has, "
        "build another parameter, and another optimizer for it."
    )
    assert first == f"rank 0, pass 1: rank 1 cannot shard what its optimizer has now.\n  {second}"


def test_a_lazy_layer_that_is_added_keeps_nothing_from_its_end() -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(1))
        model.late = torch.nn.LazyLinear(2)
        sharded.unshard()
        sync.detach()

    shared(worker, 2)


# Found by histories that were run sharded and plain


def step_of(model: torch.nn.Module) -> torch.Tensor:
    return sum(layer(torch.ones(2)).square().sum() for layer in model)  # type: ignore[return-value]


def layers(*, seed: int = 0, count: int = 2) -> torch.nn.ModuleList:
    made = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(count))
    generator = torch.Generator().manual_seed(seed)
    for one in made.parameters():
        one.data.copy_(torch.randn(one.shape, generator=generator))
    return made


def test_what_was_frozen_after_a_silent_pass_is_stepped_with_its_mean(carrier: Any) -> None:
    """It leaves the plan, and its mean has come in shares."""

    def worker(transport: Any) -> None:
        nets = layers(), layers()
        sync, plain_sync = (stretto.attach(net, transport=transport) for net in nets)
        sharded = stretto.shard(torch.optim.SGD(nets[0].parameters(), lr=0.1), sync, keep_grads=False)
        plain = torch.optim.SGD(nets[1].parameters(), lr=0.1)
        for net, one, handle in zip(nets, (sharded, plain), (sync, plain_sync), strict=True):
            with handle.no_sync():
                (step_of(net) * (1 + transport.rank)).backward()
            net[0].requires_grad_(False)
            step_of(net).backward()
            one.step()
        assert_same(*nets)
        sync.check()

    carrier(worker, 2)


def test_a_layer_is_replaced_in_a_program_that_has_left_one_out(carrier: Any) -> None:
    """Nobody can reach the gradient of the old layer, which the old buckets still know."""

    def worker(transport: Any) -> None:
        nets = layers(count=3), layers(count=3)
        sync, _ = (stretto.attach(net, transport=transport, bucket_cap_mb=1e-5) for net in nets)
        sharded = stretto.shard(torch.optim.SGD(nets[0].parameters(), lr=0.1), sync, keep_grads=False)
        plain = torch.optim.SGD(nets[1].parameters(), lr=0.1)
        for net, one in zip(nets, (sharded, plain), strict=True):
            for number, used in enumerate([(0, 1, 2), (0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)]):
                one.zero_grad()
                sum(net[place](torch.ones(2)).square().sum() for place in used).backward()
                if number == 3:
                    net[1] = layers(seed=1)[0]
                    one.param_groups[0]["params"] = [*net.parameters()]
                else:
                    one.step()
        assert_same(*nets)

    carrier(worker, 2)


def test_a_layer_of_one_optimizer_is_replaced_before_the_other_steps() -> None:
    def worker(transport: Any) -> None:
        nets = [
            torch.nn.ModuleList([torch.nn.Conv2d(2, 3, 2), torch.nn.Linear(4, 6), torch.nn.LayerNorm(5)]) for _ in "ab"
        ]
        for net in nets:
            for number, one in enumerate(net.parameters()):
                one.data.fill_(0.1 * number)
        sync, _ = (stretto.attach(net, transport=transport, bucket_cap_mb=0.008) for net in nets)
        parts = [[*net[0].parameters(), *net[1].parameters()] for net in nets]
        plain = [torch.optim.SGD(parts[1], lr=0.1), torch.optim.SGD(nets[1][2].parameters(), lr=0.1)]
        sharded = [
            stretto.shard(torch.optim.SGD(one, lr=0.1), sync, keep_grads=False)
            for one in (parts[0], nets[0][2].parameters())
        ]
        for net, (first, second) in zip(nets, (sharded, plain), strict=True):
            outputs = net[0](torch.ones(2, 2, 4, 4)), net[1](torch.ones(4)), net[2](torch.arange(5.0))
            sum(output.square().sum() for output in outputs).backward()
            net[0] = torch.nn.Conv2d(2, 3, 2)
            for one in net[0].parameters():
                one.data.fill_(0.3)
            first.param_groups[0]["params"][:2] = [*net[0].parameters()]
            first.step()
            second.step()
        assert_same(*nets)

    shared(worker, 2)


def test_a_dtype_that_changes_after_a_new_plan_is_refused_by_name(carrier: Any) -> None:
    def worker(transport: Any) -> str:
        model = layers()
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), sync)
        model.append(torch.nn.Linear(2, 2))
        step_of(model).backward()
        model.double()
        with pytest.raises(stretto.SetupError) as caught:
            sharded.step()
        sharded.zero_grad()
        (model[0](torch.ones(2).double()).sum() + model[2](torch.ones(2).double()).sum()).backward()
        sharded.step()
        sync.check()
        return str(caught.value)

    told = carrier(worker, 2)
    assert told == [
        f"rank {rank}, pass 1: 0.weight was float32 in the last backward, and is float64 now.\n"
        "Run a backward between a change of the dtype and this call."
        for rank in range(len(told))
    ]


def test_parameters_without_dimensions_are_stepped_each_by_itself(carrier: Any) -> None:
    """Adafactor takes the root mean square of a parameter: of two that lie together it would take another one."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = (torch.nn.Parameter(torch.tensor(value)) for value in (3.0, 0.1))

    def worker(transport: Any) -> None:
        nets = Two(), Two()
        sync, _ = (stretto.attach(net, transport=transport) for net in nets)
        plain = torch.optim.Adafactor(nets[1].parameters(), lr=0.1)
        sharded = stretto.shard(torch.optim.Adafactor(nets[0].parameters(), lr=0.1), sync)
        for _ in range(3):
            for net, one in zip(nets, (sharded, plain), strict=True):
                one.zero_grad()
                (net.p + 2 * net.q).square().backward()
                one.step()
        assert_same(*nets)

    carrier(worker, 2)


WAYS_OUT = {
    "share_memory": lambda model: model.share_memory(),
    "by name": lambda model: model.second.weight.data.share_memory_(),
    "pickled": lambda model: ForkingPickler.dumps(model.second.bias),
}
"""To memory of torch's for other processes, the storage under a parameter being another one then."""


@pytest.mark.parametrize("ranks", [{0}, {0, 1}], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_parameters_that_are_handed_to_other_processes_are_stepped_all_the_same(
    carrier: Any, way: str, ranks: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Stepped was the memory that they had left."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        for step in range(6):
            for net, one in ((model, sharded), (plain, optimizer)):
                train(net, one, transport.rank, range(step, step + 1))
            transport.all_gather_object(None)
            if step in (0, 1, 3) and transport.rank in ranks:
                WAYS_OUT[way](model)
            transport.all_gather_object(None)
        assert_same(model, plain)
        assert not any(one.is_shared() for one in model.parameters() if one.numel())

    with caplog.at_level(logging.WARNING, "stretto"):
        carrier(worker, 2)
    names = {"by name": "second.weight", "pickled": "second.bias"}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(ranks)
    if way in names:
        assert {*told} == {
            f"rank {rank}, pass 2: {names[way]} lie in memory shared with other processes (share_memory(), or pickled "
            "for one) and are moved out of it, with their values: those processes will not see steps from here on.\n"
            "Send them a copy after each step: copy.deepcopy(model), or clones of its state_dict(). If you do that "
            "already, nothing needs to change."
            for rank in ranks
        }


def test_a_model_in_memory_for_other_processes_is_told_when_it_is_sharded(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        model.first.bias.data.share_memory_()
        stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)

    with caplog.at_level(logging.WARNING, "stretto"):
        shared(worker, 2)
    assert sorted(record.getMessage().partition(" lie in ")[0] for record in caplog.records) == [
        f"rank {rank}, shard: first.bias" for rank in (0, 1)
    ]


def test_what_is_told_of_forks_is_forgotten_with_the_optimizer() -> None:
    """Python keeps an entry for each that was ever registered, and goes through all of them at every fork."""

    def worker(transport: Any) -> None:
        for _ in range(20):
            model, sharded, sync, *_ = pair(transport)
            sharded.unshard()
            sync.detach()
            del model, sharded, sync
        gc.collect()

    before = len(before_forks())  # of other tests
    run_ranks(worker, 2)
    before_forks().change()
    assert len(before_forks()) < before + 10


def test_nothing_is_kept_of_tensors_that_are_gone() -> None:
    """Of each that lies over shared memory something is noted until then, for the end of the interpreter."""

    def worker(transport: Any) -> tuple[int, int]:
        counts = []
        for _ in range(40):
            model = Net()
            sync = stretto.attach(model, transport=transport)
            stretto.shard(torch.optim.AdamW(model.parameters()), sync).unshard()
            sync.detach()
            del model, sync
            gc.collect()
            counts.append(len(weakref.finalize._registry))
        return counts[5], counts[-1]

    for early, late in shared(worker, 2):
        assert late < early + 100


def fit(rank: int) -> torch.nn.Module:
    """With optimizers and handle as its locals; on rank 0 the parameters of the last steps are still under way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    sync = stretto.attach(model, transport="process_group", bucket_cap_mb=0.0005)
    optimizers = [stretto.shard(torch.optim.AdamW(model[n].parameters(), lr=0.01), sync) for n in (0, 2)]
    for number in range(3):
        model.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        if number == 2:
            model.state_dict()
            dist.barrier()
            time.sleep(1.0 * rank)
        for optimizer in optimizers:
            optimizer.step()
    return model


def read_in_a_child(rank: int) -> bool:
    model = fit(rank)
    arrived = all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    if not (child := os.fork()):
        signal.alarm(10)  # whoever waits there waits for ever
        os._exit(int(not all(value.isfinite().all() for value in model.state_dict().values())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    return arrived


def compiled(rank: int) -> tuple[float, float, list[str]]:
    told = logging.handlers.BufferingHandler(1000)
    logging.getLogger("stretto").addHandler(told)
    logging.getLogger("stretto").setLevel(logging.INFO)
    model, x = fit(rank), torch.ones(2, 8)
    found = torch.compile(model, backend="aot_eager")(x).sum().item(), model(x).sum().item()
    return *found, [record.getMessage() for record in told.buffer if "torch.compile" in record.getMessage()]


@pytest.mark.ranks
def test_what_is_under_way_is_waited_for_before_a_fork_though_the_optimizer_is_gone() -> None:
    assert spawn_ranks(read_in_a_child, 2)[0] is False


@pytest.mark.ranks
@pytest.mark.slow
def test_what_is_under_way_is_waited_for_when_the_compiler_begins_though_the_optimizer_is_gone() -> None:
    found = spawn_ranks(compiled, 2)
    told = ["torch.compile is in use: what ranks have stepped is waited for in step(), not in forward."] * 2
    assert found == [(found[0][0], found[0][0], told)] * 2


def compiled_in_place(rank: int) -> tuple[float, float]:
    """The compiler passes over the layers of torch below, and listens to all that these call."""
    model, x = fit(rank), torch.ones(2, 8)
    model.compile(backend="eager")
    return model(x).sum().item(), model(x).sum().item()


@pytest.mark.ranks
@pytest.mark.slow
def test_what_is_under_way_is_waited_for_below_a_model_that_is_compiled_in_place() -> None:
    found = spawn_ranks(compiled_in_place, 2)
    assert found == [(found[0][0], found[0][0])] * 2


def test_what_does_not_come_is_waited_for_once() -> None:
    """Neither each fork nor each look waits again, which may take seconds."""
    waited = []

    def arrive() -> None:
        waited.append("once")
        raise stretto.CommunicationError("it does not come")

    arrivals = Awaited(CompilerWatch())
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    Arrival([first], arrive, arrivals)
    Arrival([second], lambda: waited.append("came"), arrivals)
    for _ in range(3):
        before_forks().tell()
        with pytest.raises(stretto.CommunicationError, match="it does not come"):
            first.sum()
        assert second.sum() == 1
    assert waited == ["once", "came"]


def test_a_parameter_may_arrive_in_another_thread_before_it_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    Arrival([parameter], lambda: None)
    copied = type(parameter).__deepcopy__
    assert parameter.sum() == 2  # what the other does
    assert torch.equal(copied(parameter, {}), parameter)


def test_readers_of_what_does_not_come_are_let_go() -> None:
    """One exception is raised at each read, and kept the frames of all readers, with the batch of each."""

    def arrive() -> None:
        raise stretto.CommunicationError("it does not come")

    class Batch:
        pass

    parameter, batches = torch.nn.Parameter(torch.ones(1)), []
    Arrival([parameter], arrive)

    def read() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        with contextlib.suppress(stretto.CommunicationError):
            _ = parameter.sum(), batch

    for _ in range(4):
        read()
    gc.collect()
    assert batches[1]() is batches[2]() is None


@pytest.mark.parametrize("when", ["before the class is restored", "after"])
def test_a_parameter_can_be_read_though_ctrl_c_came_as_it_arrived(when: str) -> None:
    """Its class stayed that of one that waits, with nothing to wait for: each read was an endless recursion."""
    parameter, came = torch.nn.Parameter(torch.ones(2)), []
    arrival = Arrival([parameter], lambda: came.append("once"))
    [(reference, kind)] = arrival._before

    def interrupt() -> Any:
        arrival._before = [(reference, kind)]
        if when == "after":
            parameter.__class__ = kind
        raise KeyboardInterrupt

    arrival._before = [(interrupt, kind)]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        parameter.sum()
    assert parameter.sum() == 2
    Arrival([parameter], lambda: came.append("twice"))
    assert parameter.sum() == 2
    assert (type(parameter), came) == (torch.nn.Parameter, ["once", "twice"])


class Moody(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("no mood")
        return super().step(closure)


@pytest.mark.parametrize("way", ["threads", "shared memory"])
def test_beside_an_optimizer_that_has_failed_in_its_step_another_lets_go_of_its_parameters(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        first = stretto.shard(Moody(model.first.parameters(), lr=0.1), sync)
        second = stretto.shard(torch.optim.SGD(model.last.parameters(), lr=0.1), sync)
        for _ in range(2):
            backward(model, transport.rank, 0)
            second.step()
        monkeypatch.setattr(Moody, "fails", True)
        with pytest.raises(RuntimeError):
            first.step()
        lay = model.last.weight.data_ptr()
        sync.detach()
        sync.detach()
        assert model.last.weight.data_ptr() != lay
        with pytest.raises(stretto.CommunicationError, match="may be stepped in part"):
            model.first.weight.sum()

    CARRIERS[way](worker, 2)


def test_unshard_that_fails_leaves_no_part_of_the_state_in_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be saved, or stepped with, as if it was all there is."""

    def no_room(self: Withholding) -> None:
        raise MemoryError("no room")

    def worker(transport: Any) -> int:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.AdamW(model.parameters())
        sharded = sync.shard(optimizer)
        model(torch.ones(1, 2)).sum().backward()
        sharded.step()
        with pytest.raises(MemoryError, match="no room"):
            sharded.unshard()
        return len(optimizer.state)

    monkeypatch.setattr(Withholding, "give_back", no_room)
    assert run_ranks(worker, 2) == [0, 0]
