"""``sync.clip_grad_norm_`` sees what torch's function would see if all gradients were whole, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stretto
from stretto.testing import run_ranks, spawn_ranks
from stretto.transport import Transport


def net() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))).square().mean()


def wanted(layers: Callable[[torch.nn.Sequential], torch.nn.Module], norm: float = 2.0) -> float:
    """torch's norm of some layers' mean gradients, of two ranks."""
    model = net()
    ((loss(model, 0) + loss(model, 1)) / 2).backward()
    return torch.nn.utils.get_total_norm([one.grad for one in layers(model).parameters()], norm).item()


def sharded(sync: stretto.Synchronizer, module: torch.nn.Module, keep_grads: bool) -> Any:
    return stretto.shard(torch.optim.SGD(module.parameters(), lr=0.1), sync, keep_grads=keep_grads)


def norms(worker: Callable[[Transport], torch.Tensor]) -> list[float]:
    return [norm.item() for norm in run_ranks(worker, 2)]


@pytest.mark.parametrize("keep_grads", [True, False])
def test_no_gradient_at_all_has_no_norm(keep_grads: bool) -> None:
    def worker(transport: Transport) -> list[float]:
        model = net()
        sync = stretto.attach(model, transport=transport)
        sharded(sync, model, keep_grads)
        return [sync.clip_grad_norm_(1.0, norm).item() for norm in (2.0, math.inf, -1.0, -math.inf)]

    assert run_ranks(worker, 2) == [[0.0] * 4] * 2


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("norm", [1.0, 0.5, -1.0, "inf"])
def test_norms_are_those_of_torch(norm: Any, keep_grads: bool) -> None:
    def worker(transport: Transport) -> torch.Tensor:
        model = net()
        sync = stretto.attach(model, transport=transport)
        sharded(sync, model, keep_grads)
        loss(model, transport.rank).backward()
        return sync.clip_grad_norm_(1e9, norm)

    assert norms(worker) == pytest.approx([wanted(lambda model: model, float(norm))] * 2, rel=1e-5)


def test_gradients_are_counted_where_they_are_whole() -> None:
    def worker(transport: Transport) -> Any:
        model = net()
        sync = stretto.attach(model, transport=transport)
        whole = sharded(sync, model, True)
        loss(model, transport.rank).backward()
        counted = sync.clip_grad_norm_(1e9, 0).item()
        whole.unshard()
        model.zero_grad()
        sharded(sync, model, False)
        loss(model, transport.rank).backward()
        with pytest.raises(stretto.UnsupportedError) as caught:
            sync.clip_grad_norm_(1e9, 0)
        return counted, str(caught.value)

    for rank, (counted, said) in enumerate(run_ranks(worker, 2)):
        assert counted == wanted(lambda model: model, 0) == 4
        assert said == (
            f"rank {rank}, pass 2: norm_type=0 counts gradients that are not zero, and with keep_grads=False no rank "
            "has whole ones.\nUse another norm, or stretto.shard(..., keep_grads=True)."
        )


@pytest.mark.parametrize("what", ["unsharded", "a comm hook", "fewer parameters"])
def test_what_is_in_shares_stays_so_when_the_next_pass_will_leave_none(what: str) -> None:
    def identity(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("no pass follows")

    def worker(transport: Transport) -> torch.Tensor:
        model = net()
        sync = stretto.attach(model, transport=transport)
        first, _ = (sharded(sync, layer, False) for layer in (model[0], model[2]))
        loss(model, transport.rank).backward()
        if what == "a comm hook":
            sync.register_comm_hook(None, identity)
            return sync.clip_grad_norm_(1e9)
        if what == "fewer parameters":
            first.param_groups[0]["params"].pop()
        first.step()
        if what == "unsharded":
            first.unshard()
        first.zero_grad()
        model[0].zero_grad()
        return sync.clip_grad_norm_(1e9)

    of = (lambda model: model) if what == "a comm hook" else (lambda model: model[2])
    assert norms(worker) == pytest.approx([wanted(of)] * 2, rel=1e-5)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_what_was_frozen_since_backward_is_counted(keep_grads: bool) -> None:
    def worker(transport: Transport) -> torch.Tensor:
        model = net()
        sync = stretto.attach(model, transport=transport)
        sharded(sync, model, keep_grads)
        loss(model, transport.rank).backward()
        model[0].requires_grad_(False)
        return sync.clip_grad_norm_(1e9)

    assert norms(worker) == pytest.approx([wanted(lambda model: model)] * 2, rel=1e-5)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_model_attached_inside_is_counted_and_scaled_by_the_outer_handle(keep_grads: bool) -> None:
    def worker(transport: Transport) -> tuple[float, float]:
        model = net()
        inner = stretto.attach(model[0], transport=transport)
        outer = stretto.attach(model, transport=transport)
        sharded(inner, model[0], keep_grads)
        loss(model, transport.rank).backward()
        return outer.clip_grad_norm_(0.5).item(), inner.clip_grad_norm_(0.5).item()

    before, inside = run_ranks(worker, 2)[0]
    whole = wanted(lambda model: model)
    assert before == pytest.approx(whole, rel=1e-5)
    assert inside == pytest.approx(wanted(lambda model: model[0]) * 0.5 / whole, rel=1e-4)


@pytest.mark.parametrize("keep_grads", [True, False])
def test_what_the_module_has_no_more_does_not_count(keep_grads: bool) -> None:
    def worker(transport: Transport) -> torch.Tensor:
        model = net()
        sync = stretto.attach(model, transport=transport)
        optimizer = sharded(sync, model, keep_grads)
        loss(model, transport.rank).backward()
        gone = model[0]
        model[0] = torch.nn.Linear(4, 7)
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        assert gone.weight.grad is not None
        return sync.clip_grad_norm_(1e9)

    assert norms(worker) == pytest.approx([wanted(lambda model: model[2])] * 2, rel=1e-5)


def over_other_groups(rank: int) -> str:
    model = net()
    inner = stretto.attach(model[0], process_group=dist.new_group([0, 1]))
    outer = stretto.attach(model)
    sharded(inner, model[0], False)
    loss(model, rank).backward()
    with pytest.raises(stretto.SetupError) as caught:
        outer.clip_grad_norm_(1.0)
    return str(caught.value)


def test_shares_of_another_process_group_are_refused() -> None:
    assert spawn_ranks(over_other_groups, 2, timeout=60) == [
        f"rank {rank}, pass 1: weight, bias are reduced over another process group, and with keep_grads=False each of "
        "its ranks has only its share.\nClip with their own handle; or stretto.shard(..., keep_grads=True)."
        for rank in range(2)
    ]


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("norm", [2.0, math.inf, -1.0])
def test_a_sparse_gradient_without_rows_counts_nothing(norm: float, keep_grads: bool) -> None:
    def worker(transport: Transport) -> torch.Tensor:
        model = torch.nn.ModuleList([torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(1, 1, bias=False)])
        sync = stretto.attach(model, transport=transport)
        sharded(sync, model[1], keep_grads)
        (model[0](torch.empty(0, dtype=torch.long)).sum() + model[1].weight.sum() * 3).backward()
        return sync.clip_grad_norm_(1e9, norm)

    assert norms(worker) == [3.0] * 2
