"""Parameter groups of sharded optimizers that change, on all ranks or on one alone; layers that are replaced."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from test_hierarchical import on_hosts
from test_shard import CARRIERS, Net, assert_alike, assert_same, assert_same_state, attached, backward, pair, train
from test_shared_memory import shared

import stretto
from stretto.membership import Membership
from stretto.testing import run_ranks, spawn_ranks
from stretto.withheld import Alive, Withheld


@pytest.fixture(params=["threads", "shared memory"])
def carrier(request: pytest.FixtureRequest) -> Any:
    return CARRIERS[request.param]


# Whose parameters


def test_a_group_with_parameters_of_another_sharded_optimizer_is_refused(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        one = stretto.shard(torch.optim.AdamW(model.first.parameters()), sync)
        other = stretto.shard(torch.optim.SGD(model.last.parameters(), lr=0.1), sync)
        with pytest.raises(stretto.SetupError) as caught:
            other.add_param_group({"params": [*model.second.parameters(), model.first.bias]})
        assert str(caught.value) == (
            f"rank {transport.rank}, shard: first.bias belong to another sharded optimizer.\n"
            "Give each parameter to one optimizer, or call unshard() of the other one before."
        )
        assert len(other.param_groups) == 1
        other.add_param_group({"params": model.second.parameters()})
        with pytest.raises(stretto.SetupError, match=r"second\.weight belong to another sharded optimizer"):
            one.add_param_group({"params": [model.second.weight]})
        with pytest.raises(stretto.SetupError, match=r"second\.bias belong to another sharded optimizer"):
            stretto.shard(torch.optim.SGD([model.second.bias], lr=0.1), sync)
        for step in range(2):
            backward(model, transport.rank, step)
            one.step()
            other.step()
        one.unshard()
        other.add_param_group({"params": [model.first.bias]})  # nobody else's by now

    carrier(worker, 2)


def test_alone_a_parameter_has_one_optimizer_too() -> None:
    model = Net()
    sync = stretto.attach(model)
    one = stretto.shard(torch.optim.AdamW(model.first.parameters()), sync)
    other = stretto.shard(torch.optim.AdamW(model.last.parameters()), sync)
    with pytest.raises(stretto.SetupError) as caught:
        other.add_param_group({"params": [model.first.bias]})
    assert str(caught.value) == (
        "shard: first.bias belong to another sharded optimizer.\n"
        "Give each parameter to one optimizer, or call unshard() of the other one before."
    )
    assert len(other.param_groups) == 1 and one.param_groups
    sync.detach()


def test_what_leaves_the_groups_and_the_module_is_freed() -> None:
    model = Net()
    sharded = stretto.shard(torch.optim.AdamW(model.parameters()), stretto.attach(model))
    former = weakref.ref(model.last.weight)
    model.last = torch.nn.Linear(model.last.in_features, model.last.out_features)
    sharded.param_groups = [{**sharded.param_groups[0], "params": [*model.parameters()]}]
    gc.collect()
    assert former() is None


# One rank alone


def leave_out(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [one for one in group["params"] if one is not parameter]


CHANGES = {
    "lr": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "weight_decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "betas": lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "text": lambda model, optimizer: optimizer.param_groups[0].update(mode="other"),
    "params": lambda model, optimizer: leave_out(optimizer, model.first.bias),
}
SAME = "No rank has stepped. Set the same on all ranks, schedules included; then all can go on."
ORDER = " Step several optimizers in one order, which inside Join is that of its list."
"""What is added where groups have other parameters."""
SAID = {
    "lr": "parameter group 0 has lr=0.5 on rank 1, lr=0.01 on rank 0.",
    "weight_decay": "parameter group 0 has weight_decay=0.5 on rank 1, weight_decay=0.01 on rank 0.",
    "betas": "parameter group 0 has betas=(0.5, 0.6) on rank 1, betas=(0.9, 0.999) on rank 0.",
    "text": "parameter group 0 has mode=other on rank 1, mode=one on rank 0.",
    "params": "parameter group 0 differs between rank 0 and rank 1: first.bias.",
}


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("what", SAID)
def test_what_one_rank_alone_has_changed_is_named_before_any_has_stepped(what: str, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=keep_grads)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
            net.zero_grad()
            backward(net, transport.rank, 3)
        sharded.param_groups[0]["mode"] = "one"
        before = dict(sharded.param_groups[0])
        if transport.rank == 1:
            CHANGES[what](model, sharded)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            sharded.step()
        more = ORDER if what == "params" else ""
        assert str(caught.value) == f"rank {transport.rank}, pass 4: {SAID[what]}\n{SAME}{more}"
        assert_same(model, plain)
        sharded.param_groups[0].update(before)
        sharded.step()
        optimizer.step()
        train(model, sharded, transport.rank, range(4, 6))
        train(plain, optimizer, transport.rank, range(4, 6))
        assert_same(model, plain)

    shared(worker, 2)


@pytest.mark.parametrize("hosts", [(2, 1), (2, 2)])
def test_between_hosts_too(hosts: tuple[int, ...]) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        backward(model, transport.rank, 2)
        sharded.param_groups[0]["lr"] = 0.01 if transport.rank else 0.25
        try:
            with pytest.raises(stretto.ModelMismatchError, match=r"lr=0\.01 on rank 1, lr=0\.25 on rank 0"):
                sharded.step()
        finally:
            sync.detach()
            gc.collect()

    on_hosts(worker, hosts)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_without_shared_memory_the_patchwork_is_named(keep_grads: bool, overlap: bool) -> None:
    """There is no meeting before the step; what others have stepped brings what they had."""

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, keep_grads=keep_grads, overlap=overlap)
        train(model, sharded, transport.rank, range(3))
        backward(model, transport.rank, 3)
        mine = 0.5 if transport.rank == 1 else 0.01
        sharded.param_groups[0]["lr"] = mine
        with pytest.raises(stretto.ModelMismatchError) as caught:
            sharded.step()
            model.state_dict()
        others = "rank 1" if transport.rank != 1 else "ranks 0, 2"
        told = ", ".join(f"{key}={value}" for key, value in sharded.param_groups[0].items() if key != "params")
        assert told.startswith(f"lr={mine}, betas=(0.9, 0.999), ")
        assert str(caught.value) == (
            f"rank {transport.rank}, pass 4: the last step was taken with other parameter groups on {others} than here "
            f"({told}), so the model is a mixture.\n"
            "Set the same on all ranks, schedules included, and start again from the last checkpoint."
        )
        for look in (model.first.weight.sum, sharded.step):
            with pytest.raises(stretto.CommunicationError, match="has failed, so the model may be stepped in part"):
                look()

    run_ranks(worker, 3)


def test_without_shared_memory_other_members_are_named_before_the_step(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        backward(model, transport.rank, 2)
        leave_out(sharded, model.first.bias if transport.rank else model.last.weight)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            sharded.step()
        assert str(caught.value) == (
            f"rank {transport.rank}, pass 3: parameter group 0 differs between rank 0 and rank 1: first.bias, "
            f"last.weight.\n{SAME}{ORDER}"
        )

    carrier(worker, 2)


def test_options_that_cannot_be_compared_are_no_difference(carrier: Any) -> None:
    """NaN equals nothing, and an object has another hash in each process."""

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        sharded.param_groups[0].update(note=object(), nothing=float("nan"), lr=torch.tensor(0.01))
        train(model, sharded, transport.rank, range(3))

    carrier(worker, 2)


def test_a_tensor_that_one_rank_alone_has_written_is_noticed() -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        sharded.param_groups[0]["lr"] = torch.tensor(0.01)
        train(model, sharded, transport.rank, range(3))
        if transport.rank == 1:
            sharded.param_groups[0]["lr"].fill_(0.5)
        with pytest.raises(stretto.ModelMismatchError, match=r"has lr=0\.5 on rank 1, lr=0\.00999"):
            train(model, sharded, transport.rank, range(3, 4))

    shared(worker, 2)


class Rate(float):
    """As numpy's float64 is."""


def test_numbers_of_any_class_are_compared(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        sharded.param_groups[0]["lr"] = Rate(0.02) if transport.rank else 0.02
        train(model, sharded, transport.rank, range(3))
        model.state_dict()
        sharded.param_groups[0]["lr"] = Rate(0.02 if transport.rank else 0.5)
        with pytest.raises(stretto.ModelMismatchError):
            train(model, sharded, transport.rank, range(3, 4))
            model.state_dict()

    carrier(worker, 2)


def test_a_tensor_in_a_tuple_that_one_rank_alone_has_written_is_noticed() -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        beta = torch.tensor(0.9)
        sharded.param_groups[0]["betas"] = beta, 0.999
        train(model, sharded, transport.rank, range(3))
        if transport.rank == 1:
            beta.fill_(0.5)
        with pytest.raises(stretto.ModelMismatchError, match=r"has betas=\(0\.5, 0\.999\) on rank 1"):
            train(model, sharded, transport.rank, range(3, 4))

    shared(worker, 2)


def test_options_that_stay_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, too, which are a list."""

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        sharded = stretto.shard(torch.optim.AdamW(model.named_parameters()), sync)
        assert sharded.param_groups[0]["param_names"]
        train(model, sharded, transport.rank, range(4))
        transport.all_gather_object(None)
        monkeypatch.setattr("stretto.sharding.groups._number_of", None)
        train(model, sharded, transport.rank, range(4, 5))

    run_ranks(worker, 2)


# Layers that are replaced


def test_a_step_with_sparse_gradients_goes_through_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, everything = [], Membership.everything
    monkeypatch.setattr(Membership, "everything", lambda self: walks.append(get_ident()) or everything(self))

    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2))
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        for _ in range(3):
            sharded.zero_grad()
            model(torch.tensor([transport.rank, 3])).sum().backward()
            before = walks.count(get_ident())
            sharded.step()
        assert walks.count(get_ident()) == before  # the first two are looked at, as passes 1, 2, 4, 8

    shared(worker, 2)


def test_a_later_parameter_is_not_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.withheld.id", lambda one: one.numel(), raising=False)  # it has the place of the other
    gone, kept = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))
    known = Alive([gone, kept])
    assert known.holds(gone) and known.holds(kept)
    del gone
    assert not known.holds(torch.nn.Parameter(torch.ones(3))) and known.holds(kept)
    assert [one is kept for one in known] == [True]


def test_a_layer_that_one_rank_alone_replaces_is_whole_on_all(carrier: Any) -> None:
    """With ``keep_grads=False`` it would be in shares on one rank, and not on the other."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=False)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
        for net in (model, plain):
            net.zero_grad()
            if transport.rank == 1:
                old = net.back
                net.back = torch.nn.Linear(70, 40)
                with torch.no_grad():
                    net.back.weight.copy_(old.weight)
                    net.back.bias.copy_(old.bias)
            backward(net, transport.rank, 3)
        assert torch.equal(model.back.weight.grad, plain.back.weight.grad), "what the old buckets had is in it"
        for net in (model, plain):
            net.zero_grad()
            backward(net, transport.rank, 4)
        assert torch.equal(model.back.weight.grad, plain.back.weight.grad)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            sharded.step()
        assert "parameter group 0 differs between rank 0 and rank 1: (40, 70), (40,), back.bias, back.weight." in str(
            caught.value
        )

    carrier(worker, 2)


def test_what_is_added_is_in_shares_from_the_next_pass_on(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        sharded = stretto.shard(torch.optim.AdamW(model.first.parameters()), sync, keep_grads=False)
        plain, _ = attached(transport)
        optimizer = torch.optim.AdamW(plain.first.parameters())
        for step in range(6):
            for net, one in ((model, sharded), (plain, optimizer)):
                if step == 2:
                    rest = [p for p in net.parameters() if not any(p is mine for mine in net.first.parameters())]
                    one.add_param_group({"params": rest})
                net.zero_grad()
                backward(net, transport.rank, step)
                if step > 2 and net is model:
                    assert all(isinstance(p.grad, Withheld) for p in model.parameters() if p.numel())
                one.step()
                if step >= 2 and net is model:
                    assert all(p.grad is None for p in model.parameters() if p.numel())
        assert_same(model, plain)
        sync.detach()

    carrier(worker, 2)


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_what_leaves_the_groups_and_comes_back_has_its_state(carrier: Any, keep_grads: bool, converts: bool) -> None:
    """As with a plain optimizer, whose state it never leaves. Its last gradient is nobody's."""

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, keep_grads=keep_grads)
        for step in range(9):
            for net, one in ((model, sharded), (plain, optimizer)):
                apart = {*map(id, net.second.parameters())} if 3 <= step < 6 else set()
                if step == 5 and converts:
                    net.second.double()
                    net.second.register_forward_pre_hook(lambda _, x: x[0].double())
                    net.second.register_forward_hook(lambda *_: _[-1].float())
                one.param_groups[0]["params"] = [p for p in net.parameters() if id(p) not in apart]
                one.zero_grad()
                backward(net, transport.rank, step)
                one.step()
                if net is plain:
                    net.second.zero_grad()
                    for p in net.second.parameters():  # which torch leaves in the dtype of before
                        for key, value in one.state[p].items():
                            one.state[p][key] = value if key == "step" else value.to(p.dtype)
            assert not sharded._shares._groups.departed or 3 <= step < 6
        assert_same(model, plain)
        whole = sharded.state_dict()
        if transport.rank == 0:
            assert_same_state(whole, optimizer.state_dict())
        sync.detach()

    carrier(worker, 2)


def test_what_was_converted_is_stepped_by_though_the_backward_behind_did_not_reach_it(carrier: Any) -> None:
    """Nothing arrives that would tell of it, and the tables of the module are what they were."""

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        train(model, sharded, transport.rank, range(2))
        model.last.double()
        sharded.zero_grad()
        model.first(torch.ones(2, model.first.in_features)).sum().backward()
        before = [one.detach().clone() for one in model.parameters()]
        sharded.step()
        moved = {id(one) for one, old in zip(model.parameters(), before, strict=True) if not torch.equal(one, old)}
        assert moved == {*map(id, model.first.parameters())}
        assert {one.dtype for one in sync.plan.parameters if one.name.startswith("last")} == {torch.float64}
        sync.detach()

    carrier(worker, 2)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_parameter_goes_from_one_sharded_optimizer_to_another(carrier: Any, keep_grads: bool, first: int) -> None:
    """Whichever of them steps, and clears its gradients, first in the step in which it moves."""

    def worker(transport: Any) -> None:
        nets = []
        for shards in (True, False):
            model, sync = attached(transport)
            split = [model.first, model.second], [model.last]
            pair = [torch.optim.AdamW([p for layer in some for p in layer.parameters()], lr=0.01) for some in split]
            optimizers = [stretto.shard(one, sync, keep_grads=keep_grads) for one in pair] if shards else pair
            for step in range(5):
                backward(model, transport.rank, step)
                if step == 2:
                    group = optimizers[0].param_groups[0]
                    group["params"] = [p for p in group["params"] if p is not model.second.weight]
                    optimizers[1].param_groups[0]["params"].append(model.second.weight)
                for one in (optimizers[first], optimizers[1 - first]):
                    one.step()
                    one.zero_grad()
                model.zero_grad()
            nets.append(model)
            sync.detach()
        assert_same(*nets)

    carrier(worker, 2)


@pytest.mark.parametrize("where", [0, 1, None])
def test_a_number_given_as_a_text_is_refused_before_any_rank_has_stepped(carrier: Any, where: int | None) -> None:
    """A learning rate from a configuration file. torch's step raises ``TypeError`` as well, and changes nothing."""

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        train(model, sharded, transport.rank, range(2))
        backward(model, transport.rank, 2)
        if where in (None, transport.rank):
            sharded.param_groups[0]["lr"] = "0.01"
        with pytest.raises((TypeError, stretto.PeerError)) as caught:
            sharded.step()
        if where in (None, transport.rank):
            assert str(caught.value) == (
                f"rank {transport.rank}, pass 3: parameter group 0 has lr='0.01', a str instead of a number.\n"
                "This rank has not stepped. Set a number."
            )
        sharded.param_groups[0]["lr"] = 0.01
        train(model, sharded, transport.rank, range(2, 5))
        train(plain, optimizer, transport.rank, range(5))
        assert_alike(transport, model, sharded, plain, optimizer)
        sync.detach()

    (shared if where is not None else carrier)(worker, 2)


class Moded(torch.optim.SGD):
    """A choice that is a text, or False for none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.defaults["mode"] = False
        for group in self.param_groups:
            group.setdefault("mode", False)


def test_a_choice_may_be_a_text_where_the_default_is_false() -> None:
    def worker(transport: Any) -> None:
        model = Net()
        sync = stretto.attach(model, transport=transport)
        sharded = sync.shard(Moded([{"params": [*model.parameters()], "mode": "fast"}], lr=0.1))
        train(model, sharded, transport.rank, range(1))
        sync.detach()

    run_ranks(worker, 2)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_has_left_the_groups_finds_its_state_behind_unshard(carrier: Any, steps: int) -> None:
    """As in torch, which keeps it in ``optimizer.state`` until the program takes it out. ``steps``: without it."""

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        ended = []
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
            gone, group = net.second.weight, one.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not gone]
            train(net, one, transport.rank, range(3, 3 + steps))
            ended.append(one.unshard() if one is sharded else one)
            assert gone in ended[-1].state
            with pytest.raises(KeyError):  # torch's: of a state that no group has
                ended[-1].state_dict()
            group["params"].append(gone)
        sync.detach()
        assert_same_state(*(one.state_dict() for one in ended))

    carrier(worker, 2)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_state_of_a_parameter_that_has_left_the_groups_can_be_taken_out(carrier: Any, steps: int) -> None:
    """``steps``: before that. The parameter stays in the module, comes back, and begins anew."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
            gone, group = net.second.weight, one.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not gone]
            train(net, one, transport.rank, range(3, 3 + steps))
            assert isinstance(one.state.pop(gone), dict)
            with pytest.raises(KeyError):
                del one.state[gone]
            train(net, one, transport.rank, range(5, 7))
            group["params"].append(gone)
            train(net, one, transport.rank, range(7, 9))
            group["params"] = [p for p in group["params"] if p is not gone]
            del one.state[gone]
        assert_same(model, plain)
        assert_same_state(sharded.unshard().state_dict(), optimizer.state_dict())

    carrier(worker, 2)


@pytest.mark.parametrize("place", ["the same", "the last"])
def test_a_parameter_whose_state_was_taken_out_begins_anew_though_no_step_came_meanwhile(
    carrier: Any, place: str
) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        saved = []
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
            gone, group = net.second.weight, one.param_groups[0]
            before, others = group["params"], [p for p in group["params"] if p is not gone]
            group["params"] = others
            one.state.pop(gone)
            group["params"] = before if place == "the same" else [*others, gone]
            saved.append(one.state_dict())
            train(net, one, transport.rank, range(3, 6))
        assert transport.rank or saved[0]["state"].keys() == saved[1]["state"].keys()
        assert_alike(transport, model, sharded, plain, optimizer)
        sync.detach()

    carrier(worker, 2)


def test_a_state_that_one_rank_alone_has_taken_out_is_refused() -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        backward(model, transport.rank, 2)
        group, gone = sharded.param_groups[0], model.second.weight
        before = group["params"]
        if transport.rank:
            group["params"] = [p for p in before if p is not gone]
            sharded.state.pop(gone)
            group["params"] = before
        with pytest.raises(stretto.ModelMismatchError) as caught:
            sharded.step()
        assert str(caught.value) == (
            f"rank {transport.rank}, pass 3: parameter group 0 differs between rank 0 and rank 1: second.weight, "
            "second.weight (without its state).\n"
            "No rank has stepped. Set the same on all ranks, schedules included; then all can go on. Step several "
            "optimizers in one order, which inside Join is that of its list."
        )
        sync.detach()

    shared(worker, 2)


def test_what_is_no_parameter_may_be_looked_for_in_the_state() -> None:
    def worker(transport: Any) -> None:
        _, sharded, sync, *_ = pair(transport)
        assert sharded.state.pop("all", 3) == 3
        sync.detach()

    shared(worker, 2)


def test_a_parameter_that_has_left_the_module_as_well_leaves_no_state_behind_unshard(carrier: Any) -> None:
    """It cannot come back, and torch's ``state_dict()`` would fail over it."""

    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(3))
        gone = model.second.bias
        sharded.param_groups[0]["params"] = [p for p in model.parameters() if p is not gone]
        model.second.bias = None
        ended = sharded.unshard()
        assert gone not in ended.state and len(ended.state_dict()["state"]) == len(ended.state)
        sync.detach()

    carrier(worker, 2)


@pytest.mark.parametrize("ends", ["unshard", "detach"])
def test_nothing_stands_for_a_gradient_behind_the_end_of_who_has_left_it(carrier: Any, ends: str) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport, keep_grads=False)
        train(model, sharded, transport.rank, range(2))
        sharded.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.second.weight]
        train(model, sharded, transport.rank, range(2, 3))
        assert isinstance(model.second.weight.grad, Withheld)
        sharded.unshard() if ends == "unshard" else sync.detach()
        assert not any(isinstance(p.grad, Withheld) for p in model.parameters())
        backward(model, transport.rank, 3)
        sync.detach()

    carrier(worker, 2)


def test_gradients_that_wait_for_a_step_are_whole_behind_unshard(carrier: Any) -> None:
    """They were None, and the plain optimizer's step skipped them without a word."""

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        plain, _ = attached(transport)
        nets = []
        for net in (model, plain):
            first, *rest = [*net.parameters()][::-1]
            nets.append([torch.optim.AdamW([first, *rest[::2]], lr=0.01), torch.optim.SGD(rest[1::2], lr=0.01)])
        ending, staying = [stretto.shard(one, sync, keep_grads=False) for one in nets[0]]
        for step in range(3):
            for net, optimizers in ((model, [ending, staying]), (plain, nets[1])):
                net.zero_grad()
                backward(net, transport.rank, step)
                for one in optimizers if step < 2 else ():
                    one.step()
        ended = ending.unshard()
        assert all(p.grad is not None for group in ended.param_groups for p in group["params"])
        for one in (ended, staying, *nets[1]):
            one.step()
        assert_same(model, plain)
        sync.detach()

    carrier(worker, 2)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_groups_that_are_all_taken_away_come_back(carrier: Any, keep_grads: bool) -> None:
    """A step without any group does nothing, as in torch; it ended training."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=keep_grads)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(2))
            groups = [*one.param_groups]
            one.param_groups.clear()
            net.zero_grad()
            train(net, one, transport.rank, range(2, 3))
            for group in groups:
                one.add_param_group(group)
            train(net, one, transport.rank, range(3, 5))
        assert_alike(transport, model, sharded, plain, optimizer)

    carrier(worker, 2)


def test_an_option_that_is_taken_out_of_a_group_stays_away(carrier: Any) -> None:
    """The next step put it back, so a second schedule began at the rate of the first."""

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        for net, one in ((model, sharded), (plain, optimizer)):
            torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0)
            train(net, one, transport.rank, range(2))
            del one.param_groups[0]["initial_lr"]
            one.param_groups[0]["lr"] = 0.5
            train(net, one, transport.rank, range(2, 3))
            assert "initial_lr" not in one.param_groups[0]
            torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0)
            train(net, one, transport.rank, range(3, 5))
        assert_alike(transport, model, sharded, plain, optimizer)

    carrier(worker, 2)


def test_a_whole_state_can_be_saved_while_some_of_it_is_away(carrier: Any) -> None:
    """torch's own optimizer cannot, and raises ``KeyError``."""

    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        sharded.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.second.weight]
        train(model, sharded, transport.rank, range(2, 4))
        saved = sharded.state_dict()
        assert transport.rank or len(saved["state"]) == len(saved["param_groups"][0]["params"])
        given = sharded.unshard()
        assert given.state.pop(model.second.weight)
        assert given.state_dict()["state"].keys() == {*range(len(given.param_groups[0]["params"]))}
        sync.detach()

    carrier(worker, 2)


def test_a_layer_in_the_place_of_a_narrower_one_has_the_strides_it_needs(
    carrier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They were compared with those of the layer that had its name before."""

    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        torch.manual_seed(0)
        model.second, model.back = torch.nn.Linear(40, 90), torch.nn.Linear(90, 40)
        sharded.param_groups[0]["params"] = [*model.parameters()]
        train(model, sharded, transport.rank, range(2, 4))
        sync.detach()

    with caplog.at_level(logging.WARNING, "stretto"):
        carrier(worker, 2)
    assert not caplog.records


@pytest.mark.parametrize("how", ["state_dict", "unshard"])
def test_what_has_come_back_is_saved_before_its_next_step(carrier: Any, how: str) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(2))
            one.param_groups[0]["params"] = [p for p in net.parameters() if p is not net.second.weight]
            net.second.weight.grad = None
            train(net, one, transport.rank, range(2, 4))
            one.param_groups[0]["params"] = [*net.parameters()]
        saved = sharded.state_dict() if how == "state_dict" else sharded.unshard().state_dict()
        if not transport.rank or how == "unshard":
            assert_same_state(saved, optimizer.state_dict())
        sync.detach()

    carrier(worker, 2)


def test_what_has_left_the_module_too_is_kept_no_more(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        gone = {*map(id, model.second.parameters())}
        sharded.param_groups[0]["params"] = [p for p in model.parameters() if id(p) not in gone]
        train(model, sharded, transport.rank, range(2, 4))
        assert {*map(id, sharded._shares._groups.departed)} == gone
        model.second = torch.nn.Linear(40, 70)
        sharded.param_groups[0]["params"] = [*model.parameters()]
        train(model, sharded, transport.rank, range(4, 6))
        assert not sharded._shares._groups.departed
        sync.detach()

    carrier(worker, 2)


def test_who_goes_through_the_state_is_told_once_that_it_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(1))
        looks = sharded.state.values(), sharded.state.items(), sharded.state.keys(), sharded.state
        assert [[*look] for look in looks] == [[]] * 4
        sync.detach()

    run_ranks(worker, 2)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"rank {rank}, shard: the state of this optimizer is divided over the ranks, so a loop over optimizer.state "
        "finds nothing, and changes nothing.\n"
        "To read it: state_dict(), on all ranks; to set it: load_state_dict(). Shown once."
        for rank in (0, 1)
    ]


def test_a_module_is_as_it_was_if_what_is_in_shares_cannot_be_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were names and parameters the new ones by then, and buckets those of before, no later pass could be right."""

    def fail(*args: Any) -> None:
        raise stretto.CommunicationError("a rank has gone")

    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport, keep_grads=False)
        train(model, sharded, transport.rank, range(3))
        before = sync.plan
        model.back = torch.nn.Linear(70, 40)
        transport.all_gather_object(None)
        monkeypatch.setattr("stretto.rejoin.complete", fail, raising=False)
        monkeypatch.setattr("stretto.launch.complete", fail)
        with pytest.raises(stretto.CommunicationError, match="a rank has gone"):
            backward(model, transport.rank, 3)
        old = {id(one()) for one in sync._reducer.queue.references}
        assert sync.plan is before and id(model.back.weight) not in old
        assert stretto.reducer.reducer_of(model.back.weight) is None

    shared(worker, 2)


# Memory


def maps_of_parameters(rank: int) -> int:
    model = torch.nn.Linear(1500, 1500)
    sync = stretto.attach(model, transport="shared_memory")
    stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
    model(torch.ones(1, 1500)).sum().backward()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in line[0].split("-")], line[4]) for line in lines]
    address = model.weight.data_ptr()
    own = next(file for (start, stop), file in spans if start <= address < stop)
    return sum(file == own for _, file in spans)


@pytest.mark.ranks
def test_every_rank_maps_the_parameters_once() -> None:
    """The first one, in whose arena they lie, had them twice: what each counts in proportion was uneven."""
    assert spawn_ranks(maps_of_parameters, 3) == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("ranks", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_a_group_that_lists_a_parameter_twice_is_refused_in_the_next_step(ranks: set[int]) -> None:
    def worker(transport: Any) -> str:
        model, sync = attached(transport)
        sharded = stretto.shard(torch.optim.SGD(model.first.parameters(), lr=0.1), sync)
        sharded.add_param_group({"params": [model.last.weight] * (1 + (transport.rank in ranks))})
        backward(model, transport.rank, 0)
        with pytest.raises(stretto.StrettoError) as caught:
            sharded.step()
        return str(caught.value)

    told = "rank {0}, pass 1: the optimizer's groups list more than once: last.weight.\nList each parameter once."
    found = shared(worker, 2)
    assert [found[rank] for rank in ranks] == [told.format(rank) for rank in ranks]
