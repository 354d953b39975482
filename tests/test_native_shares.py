"""Shares by reduce-scatter and all-gather, as accelerators get them. Here over Gloo, which has both, on CPU tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_shard import OPTIMIZERS, Net, train

import stretto
from stretto.testing import spawn_ranks
from stretto.transport import ProcessGroupTransport, native
from stretto.transport.exchange import ShareSum, exchange_shares
from stretto.transport.native import GatheredShares, ScatteredSum
from stretto.transport.slices import slice_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
DTYPES = [torch.float32, torch.float64, torch.complex64]


def ranks_that_sum_both_ways(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    chance, generator = random.Random(7), torch.Generator().manual_seed(rank)
    for shared, words in [(0, 3), (1, 0), (64, 1), (64 * world, 2), *((chance.randrange(999), 4) for _ in range(20))]:
        dtype = chance.choice(DTYPES)
        tensor = torch.randn(shared + words, dtype=dtype, generator=generator)
        one, other = tensor.clone(), tensor.clone()
        native_sum, exchanged = ScatteredSum(group, one, shared), ShareSum(group, other, shared)
        for work in (native_sum, native_sum, exchanged):  # a wait can be repeated
            work.wait()
        assert native_sum.is_completed()
        low, high = slice_of(shared, rank, world)
        torch.testing.assert_close(one[low:high], other[low:high])
        torch.testing.assert_close(one[shared:], other[shared:])
        assert torch.equal(one[:low], tensor[:low]) and torch.equal(one[high:shared], tensor[high:shared])


def ranks_that_gather_both_ways(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    chance = random.Random(8)
    for number in range(20):
        numels = [chance.choice([0, 1, 64, chance.randrange(1, 999)]) for _ in range(world)]
        numels[number % world] += 1
        share = torch.randn(numels[rank]).to(chance.choice([torch.bfloat16, *DTYPES]))
        one, other = [share.new_empty(sum(numels) - numels[rank]) for _ in range(2)]
        gathering = GatheredShares(group, one, share, numels)
        for work in (gathering, gathering, exchange_shares(group, other, share, numels)):
            work.wait()
        assert gathering.is_completed()
        assert torch.equal(one, other), numels


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("ranks", [ranks_that_sum_both_ways, ranks_that_gather_both_ways])
def test_both_ways_give_the_same(ranks: Any, world: int) -> None:
    spawn_ranks(ranks, world, world)


def ranks_that_train(rank: int, world: int, name: str, keep_grads: bool) -> list[torch.Tensor]:
    used = set()
    for way in ("reduce_scatter_single", "all_gather_single"):
        call = getattr(dist.ProcessGroup, way)
        setattr(dist.ProcessGroup, way, lambda *given, way=way, call=call: (used.add(way), call(*given))[1])
    stretto.transport.process_group.can_sum = stretto.transport.process_group.can_gather = lambda tensor: True
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    model, plain = models
    options = {"bucket_cap_mb": 0.008, "transport": ProcessGroupTransport()}
    sync, _ = stretto.attach(model, **options), stretto.attach(plain, **options)
    sharded = stretto.shard(OPTIMIZERS[name](model.parameters()), sync, keep_grads=keep_grads)
    train(model, sharded, rank, range(6))
    train(plain, OPTIMIZERS[name](plain.parameters()), rank, range(6))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert used == ({"all_gather_single"} if keep_grads else {"reduce_scatter_single", "all_gather_single"})
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
@pytest.mark.parametrize("world", [2, 3])
def test_training_with_them_is_the_same(world: int, name: str, keep_grads: bool) -> None:
    first, *others = spawn_ranks(ranks_that_train, world, world, name, keep_grads)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_who_goes_that_way(device: str, dtype: torch.dtype) -> None:
    """CPU tensors never; half types, which backends round on every hop, are gathered so, not summed."""
    tensor = torch.empty(4, device=device, dtype=dtype)
    assert native.can_gather(tensor) == (device != "cpu")
    assert native.can_sum(tensor) == (device != "cpu" and dtype is torch.float32)


def ranks_that_read(rank: int, world: int, natively: bool) -> None:
    if natively:
        stretto.transport.process_group.can_gather = lambda tensor: True
    model, transport = Net(), ProcessGroupTransport()
    sharded = stretto.shard(
        OPTIMIZERS["momentum"](model.parameters()), stretto.attach(model, transport=transport, bucket_cap_mb=0.008)
    )
    for step in range(3):
        train(model, sharded, rank, range(step, step + 1))
        assert transport.under_way is not None and transport.under_way._spreads
        model.state_dict()
        assert not transport.under_way._spreads


@pytest.mark.parametrize("natively", [True, False])
def test_nothing_of_a_step_is_kept_once_the_parameters_have_been_read(natively: bool) -> None:
    """As much memory as the model."""
    spawn_ranks(ranks_that_read, 2, 2, natively)
