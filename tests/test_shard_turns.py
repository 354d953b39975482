"""``train()`` and ``eval()`` of schedule-free optimizers, which move weights between steps, in shares."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_shard import CARRIERS, Net, assert_alike, assert_same, backward, pair
from test_shard_join import build
from test_shared_memory import shared
from torch.distributed.algorithms.join import Join

import stretto
from stretto.sharding import kinds
from stretto.sharding.kinds import Kind, kind_of
from stretto.testing import run_ranks, spawn_ranks


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al., The Road Less Scheduled, 2024: weights lie between z, which steps, and x, the mean of all z."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": False})

    def train(self) -> None:
        self._turn(True, lambda group: 1 - group["beta"])

    def eval(self) -> None:
        self._turn(False, lambda group: 1 - 1 / group["beta"])

    @torch.no_grad()
    def _turn(self, wanted: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not wanted:
                for one in group["params"]:
                    if "z" in self.state[one]:
                        self.move(one, self.state[one]["z"], weight(group))
                group["train_mode"] = wanted

    def move(self, parameter: torch.Tensor, z: torch.Tensor, weight: float) -> None:
        parameter.lerp_(z, weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() before train()")
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                if "z" not in state:
                    state["z"] = one.detach().clone()
                one.lerp_(state["z"], share)
                one.sub_(one.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                state["z"].sub_(one.grad, alpha=group["lr"])


def epoch(net: Net, optimizer: Any, rank: int, first: int) -> None:
    optimizer.train()
    for step in range(first, first + 3):
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()
    optimizer.eval()


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize(("carrier", "overlap"), [*((one, True) for one in CARRIERS), ("hosts", False)])
def test_weights_between_steps_are_those_of_the_whole_optimizer(carrier: str, keep_grads: bool, overlap: bool) -> None:
    def worker(transport: Any) -> None:
        options = {"keep_grads": keep_grads, "overlap": overlap}
        model, sharded, sync, plain, optimizer = pair(transport, ScheduleFree, **options)
        for first in (0, 3, 6):
            for net, one in ((model, sharded), (plain, optimizer)):
                epoch(net, one, transport.rank, first)
                one.eval()  # it is: nothing moves
            assert_alike(transport, model, sharded, plain, optimizer)
            saved = copy.deepcopy(transport.all_gather_object(sharded.state_dict())[0])
            sharded.load_state_dict(saved)  # while weights are averages
            assert torch.equal(model(torch.ones(2, 18)), plain(torch.ones(2, 18)))
            for one in (sharded, optimizer):
                one.train()
            assert_same(model, plain)
        sync.check()
        whole = sharded.unshard()
        for one in (sharded, optimizer):
            one.eval()  # of what was sharded, which has the state now
        assert isinstance(whole, ScheduleFree) and not whole.param_groups[0]["train_mode"]
        assert_same(model, plain)

    CARRIERS[carrier](worker, 3)


def test_a_turn_before_the_first_step_makes_no_state() -> None:
    """torch.distributed.checkpoint steps if ``state`` is false, to have something to load into."""

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, ScheduleFree)
        sharded.train()
        assert not sharded.state
        backward(model, transport.rank, 0)
        sharded.step()
        sharded.eval()
        assert sharded.state

    run_ranks(worker, 2)


def test_gradients_stay_while_weights_are_turned() -> None:
    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, ScheduleFree)
        sharded.train()
        backward(model, transport.rank, 0)
        before = model.second.weight.grad.clone()
        sharded.eval()
        sharded.train()
        assert torch.equal(model.second.weight.grad, before)
        sharded.step()

    shared(worker, 2)


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_turn_between_backward_and_a_step_with_other_groups_loses_no_gradient(carrier: str, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, ScheduleFree, keep_grads=keep_grads)
        for net, one in ((model, sharded), (plain, optimizer)):
            epoch(net, one, transport.rank, 0)
            one.train()
            one.zero_grad()
            backward(net, transport.rank, 3)
            (group,) = one.param_groups
            one.add_param_group({**group, "params": [group["params"].pop()], "lr": 0.05})
            one.train()
            one.eval()
            one.train()
            before = net.second.weight.detach().clone()
            one.step()
            assert not torch.equal(net.second.weight, before)
            epoch(net, one, transport.rank, 4)
        assert_same(model, plain)

    CARRIERS[carrier](worker, 3)


def test_a_step_behind_eval_is_refused_and_all_can_go_on() -> None:
    """The optimizer would say so too, but nobody could go on from a share that has failed."""

    def worker(transport: Any) -> str:
        model, sharded, _, plain, optimizer = pair(transport, ScheduleFree)
        backward(model, transport.rank, 0)
        with pytest.raises(stretto.SetupError) as caught:
            sharded.step()
        for net, one in ((model, sharded), (plain, optimizer)):
            epoch(net, one, transport.rank, 0)
        assert_same(model, plain)
        return str(caught.value)

    assert shared(worker, 2) == [
        f"rank {rank}, pass 1: step() of ScheduleFree after eval(), or before its first train().\n"
        "Call optimizer.train() first, on all ranks. Nothing has changed."
        for rank in range(2)
    ]


def test_an_optimizer_is_tried_once_for_each_of_its_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted(*what: Any) -> Kind:
        tried.append(1)
        return kind_of(*what)

    monkeypatch.setattr(kinds, "kind_of", counted)

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, ScheduleFree)
        epoch(model, sharded, transport.rank, 0)
        transport.all_gather_object(None)
        before = len(tried)
        for first in (3, 6, 9):
            epoch(model, sharded, transport.rank, first)
        transport.all_gather_object(None)
        assert len(tried) <= before + 2  # on each rank once more, since what steps count is not 0 any more

    run_ranks(worker, 2)


def evaluates_alone(rank: int, transport: str) -> str:
    model = Net()
    sync = stretto.attach(model, transport=transport)  # type: ignore[arg-type]
    sharded = stretto.shard(ScheduleFree(model.parameters()), sync)
    sharded.train()
    backward(model, rank, 0)
    sharded.step()
    with pytest.raises(stretto.CommunicationError) as caught:
        if rank == 0:
            sharded.eval()
        backward(model, rank, 1)
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_evaluates_alone_is_told_what_it_has_called() -> None:
    told = spawn_ranks(evaluates_alone, 2, "shared_memory")
    assert any("rank 0 called optimizer.step(), train() or eval(), rank 1" in text for text in told), told


def test_an_output_of_before_cannot_be_used_in_backward() -> None:
    """As behind a step: weights that it needs have been written over."""

    def worker(transport: Any) -> str:
        model, sharded, *_ = pair(transport, ScheduleFree)
        epoch(model, sharded, transport.rank, 0)
        loss = model(torch.ones(2, 18)).sum()
        sharded.train()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return "told"

    assert shared(worker, 2) == ["told"] * 2


def test_ranks_that_call_something_else_are_told_and_can_go_on() -> None:
    def worker(transport: Any) -> str:
        model, sharded, _, plain, optimizer = pair(transport, ScheduleFree)
        epoch(model, sharded, transport.rank, 0)
        epoch(plain, optimizer, transport.rank, 0)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            (sharded.train if transport.rank == 1 else sharded.eval)()
        assert_same(model, plain)
        epoch(model, sharded, transport.rank, 3)
        epoch(plain, optimizer, transport.rank, 3)
        assert_same(model, plain)
        return str(caught.value)

    assert shared(worker, 2) == [
        f"rank {rank}, pass 3: rank 1 calls optimizer.train(), rank 0 optimizer.eval().\n"
        "Nothing has changed. Make the same calls on all ranks; then all can go on."
        for rank in range(2)
    ]


def test_without_shared_memory_ranks_that_call_something_else_have_a_patchwork_and_are_told() -> None:
    """Their numbers travel with what was moved."""

    def worker(transport: Any) -> str:
        model, sharded, *_ = pair(transport, ScheduleFree)
        epoch(model, sharded, transport.rank, 0)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            (sharded.train if transport.rank == 1 else sharded.eval)()
            print(model.first.weight)
        return str(caught.value)

    for rank, told in enumerate(run_ranks(worker, 2)):
        assert told.startswith(f"rank {rank}, pass 3: the last step was taken with other parameter groups on ")
        assert "), or was a train() or an eval() on some, so the model is a mixture.\n" in told


def test_one_rank_alone() -> None:
    model = Net()
    sharded = stretto.shard(ScheduleFree(model.parameters()), stretto.attach(model))
    plain = Net()
    optimizer = ScheduleFree(plain.parameters())
    for net, one in ((model, sharded), (plain, optimizer)):
        epoch(net, one, 0, 0)
    assert_same(model, plain)
    assert hasattr(sharded, "train")
    assert not hasattr(stretto.shard(torch.optim.SGD(plain.parameters()), stretto.attach(plain)), "train")


def test_behind_detach_it_says_so() -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport, ScheduleFree)
        epoch(model, sharded, transport.rank, 0)
        sync.detach()
        with pytest.raises(stretto.SetupError, match=r"this sharded optimizer has ended: by detach\(\) or unshard\(\)"):
            sharded.train()

    run_ranks(worker, 2)


class ByNorm(ScheduleFree):
    def move(self, parameter: torch.Tensor, z: torch.Tensor, weight: float) -> None:
        parameter.lerp_(z, weight * float(parameter.norm() < 1e6) * float(parameter.norm()))


class OfAll(ScheduleFree):
    def move(self, parameter: torch.Tensor, z: torch.Tensor, weight: float) -> None:
        number = sum(one.numel() for group in self.param_groups for one in group["params"])
        parameter.lerp_(z, weight / number)


def test_they_are_tried_as_steps_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6))]
    assert kind_of(ScheduleFree(parameters)) is Kind.ELEMENTWISE
    assert kind_of(ByNorm(parameters)) is Kind.WHOLE
    with pytest.raises(stretto.UnsupportedError, match="how it steps a parameter depends on the others"):
        kind_of(OfAll(parameters))


def turns_inside_join(rank: int) -> str:
    model, _ = build("momentum", False, "auto")
    optimizer = stretto.shard(ScheduleFree(model.parameters()), model)
    optimizer.train()
    with pytest.raises(stretto.SetupError) as caught, Join([model, optimizer]):
        optimizer.eval()
    return str(caught.value)


@pytest.mark.ranks
def test_inside_join_ranks_without_batches_only_step() -> None:
    assert spawn_ranks(turns_inside_join, 2) == [
        f"rank {rank}, shard: eval() of a sharded optimizer inside Join, where ranks without batches only step.\n"
        "Call it before or after Join."
        for rank in range(2)
    ]
