"""A program's default device is its own: what stretto makes for itself says where it is to be.

``torch.set_default_device("cuda")`` around a model on the host, or a model on a device whose words go to the host.
On the device ``meta``, which holds no values, whatever was made there by mistake cannot be read.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import stretto
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 4, sparse=True)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, words: torch.Tensor, use: list[int]) -> torch.Tensor:
        hidden = self.norm(self.words(words))
        for layer in use:
            hidden = self.layers[layer](hidden).tanh()
        return hidden


def train(rank: int, transport: str, device: str | None, shards: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    batches = [torch.randint(7, (5,), generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(8)]
    with torch.device(device) if device else contextlib.nullcontext():
        sync = stretto.attach(model, transport=transport, weighted=True, bucket_cap_mb=0.0001)
        dense = torch.optim.Adam([*model.layers.parameters(), *model.norm.parameters()])
        optimizers = [sync.shard(dense) if shards else dense, torch.optim.SGD(model.words.parameters(), lr=0.1)]
        for number, words in enumerate(batches):
            sync.weight = 1 + rank
            with sync.no_sync() if number % 4 == 2 else contextlib.nullcontext():
                model(words, [0, 1 + (number + rank) % 2]).square().mean().backward()
            if number % 4 != 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        sync.check()
        sync.report()
        gradient = [torch.full((3,), float(rank), device="cpu")]
        stretto.reduce(gradient)
        state = optimizers[0].state_dict()["state"]
    moments = [one for index in sorted(state) for one in state[index].values()]
    return [*(one.detach().clone() for one in model.state_dict().values()), *gradient, *moments]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_another_default_device_changes_nothing(transport: str, shards: bool) -> None:
    plain = spawn_ranks(train, 2, transport, None, shards)
    for one, other in zip(plain, spawn_ranks(train, 2, transport, "meta", shards), strict=True):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))
