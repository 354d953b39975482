"""Tensors that show the memory of parameters beside them, where a sharded optimizer moves that."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_shard import CARRIERS, OPTIMIZERS, Net, assert_same, backward, pair, train

import stretto
from stretto.sharding import aliases
from stretto.testing import run_ranks, spawn_ranks


@pytest.fixture(params=["threads", "shared memory", "hosts"])
def carrier(request: pytest.FixtureRequest) -> Any:
    return CARRIERS[request.param]


SHOWN: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {
    "detached": lambda one: one.detach(),
    "data": lambda one: one.data,
    "rows": lambda one: one.data[1:3] if one.dim() else one.data,
    "transposed": lambda one: one.data.t() if one.dim() == 2 else one.data,
}


def shown(model: torch.nn.Module, how: str) -> list[torch.Tensor]:
    return [SHOWN[how](one) for one in model.parameters() if one.numel()]


def assert_shows(kept: list[torch.Tensor], model: torch.nn.Module, how: str) -> None:
    for one, now in zip(kept, shown(model, how), strict=True):
        assert torch.equal(one, now) and one.data_ptr() == now.data_ptr() and one.stride() == now.stride()


@pytest.mark.parametrize("how", SHOWN)
def test_what_shows_a_parameter_goes_with_it(carrier: Any, how: str) -> None:
    """From a time before the optimizer was sharded, from before the plan was learnt, and to the end."""

    def worker(transport: Any) -> None:
        model = Net()
        early = shown(model, how)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.008)
        sharded = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        assert_shows(early, model, how)
        late, first = shown(model, how), sync.plan
        train(model, sharded, transport.rank, range(3))
        assert sync.plan is not first, "nothing has moved since"
        assert_shows(early, model, how)
        assert_shows(late, model, how)
        sharded.unshard()
        sync.detach()
        transport.all_gather_object(None)
        with torch.no_grad():
            model.first.weight.fill_(3.0)
        transport.all_gather_object(None)
        assert_shows(early, model, how)
        assert_shows(late, model, how)

    carrier(worker, 2)


class Cached(torch.nn.Module):
    """Its loss goes through critics that were put by, detached, in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = torch.nn.Linear(40, 70), torch.nn.Linear(18, 40)
        self.put_by: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.put_by = self.put_by or [one.detach() for one in self.critic.parameters()]
        hidden = torch.tanh(self.actor(x))
        return torch.nn.functional.linear(hidden, *self.put_by) + self.critic(hidden.detach())


def test_a_loss_through_what_was_put_by_is_that_of_now(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        nets = [net := Cached(), copy.deepcopy(net)]
        handles = [stretto.attach(net, transport=transport, bucket_cap_mb=0.008) for net in nets]
        plain = torch.optim.AdamW(nets[1].parameters(), lr=0.01)
        sharded = stretto.shard(torch.optim.AdamW(nets[0].parameters(), lr=0.01), handles[0])
        train(nets[0], sharded, transport.rank, range(6))  # type: ignore[arg-type]
        train(nets[1], plain, transport.rank, range(6))  # type: ignore[arg-type]
        assert_same(*nets)
        for handle in handles:
            handle.detach()

    carrier(worker, 2)


def test_objects_are_looked_through_only_where_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = gc.get_objects
    monkeypatch.setattr(aliases.gc, "get_objects", lambda: looked.append(1) or real())

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(3))
        sharded.unshard()

    run_ranks(worker, 2)
    assert not looked


def test_what_covers_more_than_a_parameter_stays_where_it_is() -> None:
    """And other parameters, graphs, and what has no memory of its own to speak of."""

    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        flat = torch.arange(32.0)
        for number, layer in enumerate(model):
            layer.weight.data = flat[16 * number : 16 * number + 16].view(4, 4)
        inside, sparse = flat[17:19], torch.eye(3).to_sparse()
        graph = model[0](torch.ones(1, 4))
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=1.0), sync)
        with torch.no_grad():
            model[1].weight.fill_(-1.0)
        transport.all_gather_object(None)
        assert flat.tolist() == [*map(float, range(32))] and inside.tolist() == [-1.0, -1.0]
        assert graph.tolist() == [[6.0, 22.0, 38.0, 54.0]] and sparse.is_sparse
        sharded.unshard()

    run_ranks(worker, 2)


def test_a_step_waits_where_something_is_shown() -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        train(model, sharded, transport.rank, range(1))
        assert any(type(one) is not torch.nn.Parameter for one in model.parameters())
        kept = model.state_dict()
        train(model, sharded, transport.rank, range(1, 2))
        assert all(type(one) is torch.nn.Parameter for one in model.parameters()), "kept would not wait"
        train(plain, optimizer, transport.rank, range(2))
        assert all(torch.equal(kept[name], one) for name, one in plain.named_parameters())
        del kept
        train(model, sharded, transport.rank, range(2, 3))
        assert any(type(one) is not torch.nn.Parameter for one in model.parameters())

    run_ranks(worker, 2)


def _clip_what_is_kept(rank: int) -> None:
    model, sharded, sync, plain, optimizer = pair("process_group", keep_grads=False)
    for net, one in ((model, sharded), (plain, optimizer)):
        kept = [*net.state_dict().values()]
        for step in range(5):
            one.zero_grad()
            backward(net, rank, step)
            one.step()
            for value in kept:
                value.clamp_(-0.05, 0.05)
    assert_same(model, plain)
    sync.check()


@pytest.mark.ranks
def test_weights_are_clipped_by_what_was_kept() -> None:
    spawn_ranks(_clip_what_is_kept, 2)
