"""What fails on one rank inside ``join()`` and is caught there, while others have batches or have run out of them."""

from __future__ import annotations

import pytest
import torch
from models import Fails

import stretto
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, fails: str = "") -> torch.Tensor:
        if fails == "forward":
            raise ValueError("bad token")
        hidden = self.norm(self.a(x))
        return self.b(Fails.apply(hidden) if fails == "backward" else hidden)


def train(rank: int, transport: str, fails: str, batches: tuple[int, int]) -> tuple[list[str], list[torch.Tensor]]:
    """What became of each batch, and the parameters behind it all, and one more step without ``join()``."""
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    became = []

    def step(number: int, fails: str = "") -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = model(x, fails=fails).square().mean()
        if fails == "loss":
            raise ValueError("bad weight")
        loss.backward()
        optimizer.step()

    with model.join():
        for number in range(batches[rank]):
            try:
                step(number, fails if rank == 1 and number == 3 else "")
            except (ValueError, stretto.PeerError) as error:
                became.append(type(error).__name__)
            else:
                became.append("stepped")
    step(20)
    return became, [parameter.detach().clone() for parameter in model.parameters()]


STEPPED, MINE, TOLD = "stepped", "ValueError", "PeerError"
BATCHES = {"both have batches": (5, 5), "the other has run out": (2, 5)}
BECAME = {  # of rank 1's fourth batch, and behind it; a forward that failed is told in the next pass
    ("forward", "both have batches"): ([*[STEPPED] * 3, TOLD, STEPPED], [*[STEPPED] * 3, MINE, TOLD]),
    ("forward", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, TOLD]),
    ("backward", "both have batches"): ([*[STEPPED] * 3, TOLD, STEPPED], [*[STEPPED] * 3, MINE, STEPPED]),
    ("backward", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, STEPPED]),
    ("loss", "both have batches"): ([STEPPED] * 5, [*[STEPPED] * 3, MINE, STEPPED]),
    ("loss", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, STEPPED]),
}


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize(("fails", "who"), BECAME)
def test_a_failure_that_is_caught_inside_join_leaves_all_in_step(transport: str, fails: str, who: str) -> None:
    """They told joined ranks of the batch that had failed and of the next: Gloo aborted, or all waited for ever."""
    (first, mine), (second, theirs) = spawn_ranks(train, 2, transport, fails, BATCHES[who])
    assert (first, second) == BECAME[fails, who]
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def train_on_two_views(rank: int, transport: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + 3 * rank):
            optimizer.zero_grad()
            (model(torch.randn(4, 3)).mean() + model(torch.randn(4, 3)).square().mean()).backward()
            optimizer.step()
    assert model._get_ddp_logging_data()["num_buckets_reduced"] == len(model.synchronizer.plan.buckets)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_two_forwards_of_one_pass_are_told_as_one(transport: str) -> None:
    mine, theirs = spawn_ranks(train_on_two_views, 2, transport)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
