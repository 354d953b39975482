"""Buckets that are stepped one after the other, each on its way while the next is stepped."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_shard import OPTIMIZERS, assert_alike, backward, batch, pair, train

import stretto
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import ProcessGroupTransport


class Looking(RecordingTransport):
    """Calls ``look`` before each broadcast of its own."""

    look: Any = None

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        if root == self.rank and self.look is not None:
            self.look()
        return super().broadcast(tensor, root)


def test_a_bucket_is_sent_before_the_next_is_stepped() -> None:
    def worker(inner: Any) -> None:
        transport = Looking(inner)
        model, sharded, sync, *_ = pair(transport, OPTIMIZERS["momentum"])
        stepped: list[int] = []
        backward(model, transport.rank, 0)
        transport.look = lambda: stepped.append(len(sharded._shares.inner.state))
        sharded.step()
        assert stepped == [*range(1, len(sync.plan.buckets) + 1)] and len(stepped) > 2

    run_ranks(worker, 2)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some do that others have written."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_what_may_count_its_steps_steps_everything_at_once() -> None:
    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, lambda p: Counting(p, lr=0.1))
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(3))
        assert len(sync.plan.buckets) > 2
        assert sharded.param_groups[0]["steps"] == optimizer.param_groups[0]["steps"] == 3
        assert_alike(transport, model, sharded, plain, optimizer)

    run_ranks(worker, 2)


def test_torchs_own_class_with_another_step_steps_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted each bucket, and ranks that have shares of other buckets parted."""
    real, both = torch.optim.SGD.step, threading.Barrier(2, timeout=20)

    def counting(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return real(self, closure)

    def worker(transport: Any) -> None:
        both.wait()
        model, sharded, sync, *_ = pair(transport, lambda p: torch.optim.SGD(p, lr=0.1))
        train(model, sharded, transport.rank, range(3))
        assert len(sync.plan.buckets) > 2 and sharded.param_groups[0]["steps"] == 3

    monkeypatch.setattr(torch.optim.SGD, "step", counting)
    run_ranks(worker, 2)


def test_a_bucket_of_which_a_rank_has_no_share_and_parameters_in_none() -> None:
    """Of three ranks, one parameter of a bucket alone; frozen and empty ones are stepped by every rank."""

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport, OPTIMIZERS["Adam"], bucket_cap_mb=1e-6)
        assert len(sync.plan.buckets) == len([*model.parameters()])
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(2))
            net.second.requires_grad_(False)
            train(net, one, transport.rank, range(2, 4))
        assert_alike(transport, model, sharded, plain, optimizer)

    run_ranks(worker, 3)


def test_a_rank_that_fails_when_others_have_been_sent_a_bucket() -> None:
    def worker(transport: Any) -> tuple[str, str]:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        inner, calls, told = sharded._shares.inner, [0], ""
        real = inner._step

        def fail_at_second() -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise ValueError("no more numbers")
            real()

        if transport.rank == 1:
            inner._step = fail_at_second
        try:
            train(model, sharded, transport.rank, range(2, 3))
            model.state_dict()
        except (ValueError, stretto.PeerError) as error:
            told = type(error).__name__
        with pytest.raises(stretto.CommunicationError, match="the model may be stepped in part"):
            sharded.step()
        with pytest.raises(stretto.CommunicationError, match="the model may be stepped in part") as looked:
            print(next(model.parameters()))
        return told, str(looked.value).partition(",")[0]

    assert run_ranks(worker, 2) == [("PeerError", "rank 0"), ("ValueError", "rank 1")]


class Watching(ProcessGroupTransport):
    """Notes what of a model is sent and received where it lies: of each message, whether both are."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place: list[bool] = []
        self.model: Any = None

    def spread_share(self, received: torch.Tensor, share: torch.Tensor, numels: Any) -> Any:
        if self.model is not None:
            with torch._C.DisableTorchFunctionSubclass():  # without waiting for them
                ends = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in self.model.parameters()]
            lies = [any(low <= one.data_ptr() < high for low, high in ends) for one in (received, share)]
            self.in_place.append(all(lies))
        return super().spread_share(received, share, numels)


def _steps_over_gloo(rank: int, name: str) -> list[bool]:
    transport = Watching()
    model, sharded, _, plain, optimizer = pair(transport, OPTIMIZERS[name], keep_grads=False)
    transport.model = model
    for step in range(4):
        train(model, sharded, rank, range(step, step + 1))
        with torch.no_grad():  # a writer waits until what is here was sent
            for one in model.parameters():
                one.add_(0.125)
        train(plain, optimizer, rank, range(step, step + 1))
        with torch.no_grad():
            for one in plain.parameters():
                one.add_(0.125)
        assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
    assert_alike(transport, model, sharded, plain, optimizer)
    sharded.unshard()
    return transport.in_place


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_between_two_ranks_parameters_are_sent_and_arrive_where_they_lie(name: str) -> None:
    for in_place in spawn_ranks(_steps_over_gloo, 2, name):
        buckets = len(in_place) // 4
        first, *others = in_place[:buckets]
        assert not first, "numbers go with it"
        assert others and all(others) == (name == "AdamW"), "of whole parameters each rank has several"
