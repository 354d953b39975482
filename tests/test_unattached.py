"""What an optimizer steps beside a handle, and no handle averages: unattached.py."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stretto
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]

TOLD = (
    "pass {0} of Linear: an optimizer steps {1}, which no handle averages, and ranks hold other values of it.\n"
    "  {2}: rank 0 differs from rank 1 by up to {3}, in 1 of 1 element\n"
    "Attach the module that holds it; or average the gradient of what is in no module before it is stepped, on all "
    "ranks: stretto.reduce([parameter.grad]). Where ranks are to differ there, all is well. Told once; check_every=0 "
    "never looks."
)
ALPHA = "SGD, param_groups[0]['params'][0] (1,)"


class Agent:
    """An attached layer and a temperature with an optimizer of its own, as in soft actor-critic."""

    def __init__(self, **options: Any) -> None:
        self.actor = torch.nn.Linear(2, 2)
        self.sync = stretto.attach(self.actor, **options)
        self.alpha = torch.zeros(1, requires_grad=True)
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([self.alpha], lr=1.0)]
        self.of_actor: torch.optim.Optimizer = torch.optim.SGD(self.actor.parameters(), lr=0.0)

    def average(self, parameter: torch.Tensor) -> None:
        stretto.reduce([parameter.grad])

    def train(self, passes: int, slope: float, *, beside: bool = True) -> None:
        for _ in range(passes):
            if beside:
                self.alpha.grad = None
                (self.alpha * slope).sum().backward()
                for one in self.optimizers:
                    one.step()
            self.of_actor.zero_grad()
            self.actor(torch.ones(1, 2)).sum().backward()
            self.of_actor.step()


def apart(rank: int) -> None:
    Agent().train(70, float(rank))


def averaged_in_a_hook(rank: int) -> None:
    agent = Agent()
    agent.alpha.register_post_accumulate_grad_hook(agent.average)
    agent.train(40, float(rank))


def averaged_by_hand(rank: int) -> None:
    agent = Agent()
    agent.alpha.register_hook(lambda gradient: (dist.all_reduce(own := gradient.clone()), own)[1])
    agent.train(40, float(rank))


def from_another_pass_on(rank: int) -> None:
    agent = Agent()
    agent.train(40, 0.0, beside=False)
    agent.train(230, float(rank))


def not_asked(rank: int) -> None:
    Agent(check_every=0).train(40, float(rank))


def two_handles(rank: int) -> None:
    agent, critic = Agent(), torch.nn.Linear(2, 2)
    stretto.attach(critic)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.0)
    for _ in range(40):
        agent.train(1, float(rank))
        critic(torch.ones(1, 2)).sum().backward()
        of_critic.step()


def on_one_rank_alone(rank: int) -> None:
    """A probe of rank 0's own: with nothing to compare, nothing is told, and the others are not held up."""
    Agent().train(40, 1.0, beside=not rank)


def beside_one_without_batches(rank: int) -> None:
    """Which steps no more, so what it has is no other rank's, whoever averages."""
    agent = Agent()
    agent.train(20, float(rank))
    for _ in range(20):
        agent.sync.shadow_pass() if rank == 1 else agent.train(1, float(rank))
    dist.barrier()


def freed(rank: int) -> None:
    agent = Agent()
    agent.train(10, float(rank))
    agent.optimizers.clear()
    agent.train(30, float(rank))


def several(rank: int) -> None:
    agent = Agent()
    other = torch.zeros(1, requires_grad=True)
    other.grad = torch.ones(1)
    agent.optimizers.append(torch.optim.AdamW([("other", other)], lr=1.0 + rank, weight_decay=0.0))
    agent.train(40, 0.0)


def sharded(rank: int) -> None:
    """The optimizer inside steps each rank's share, which is no other rank's."""
    agent = Agent()
    agent.of_actor = stretto.shard(torch.optim.SGD(agent.actor.parameters(), lr=0.1, momentum=0.9), agent.sync)
    agent.train(40, 0.0, beside=False)


def divided_by_torch(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    agent = Agent()
    agent.of_actor = ZeroRedundancyOptimizer(agent.actor.parameters(), torch.optim.SGD, lr=0.1)
    agent.train(40, 0.0, beside=False)


SCENES: Sequence[tuple[Callable[[int], None], list[str]]] = [
    (apart, [TOLD.format(32, ALPHA, ALPHA, 32)]),
    (averaged_in_a_hook, []),
    (averaged_by_hand, []),
    (from_another_pass_on, [TOLD.format(256, ALPHA, ALPHA, "2.2e+02")]),
    (not_asked, []),
    (two_handles, [TOLD.format(32, ALPHA, ALPHA, 32)]),
    (on_one_rank_alone, []),
    (beside_one_without_batches, []),
    (freed, []),
    (several, [TOLD.format(32, "AdamW 2, other", "AdamW 2, other", 32)]),
    (sharded, []),
    (divided_by_torch, []),
]


def all_scenes(rank: int) -> dict[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    found = {}
    for scene, _ in SCENES:
        scene(rank)
        found[scene.__name__] = [*told]
        told.clear()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[str]]]:
    return spawn_ranks(all_scenes, 2, timeout=80)


@pytest.mark.parametrize("scene, told", SCENES, ids=[scene.__name__ for scene, _ in SCENES])
def test_what_is_stepped_beside_a_handle(
    found: list[dict[str, list[str]]], scene: Callable[[int], None], told: list[str]
) -> None:
    assert found[0][scene.__name__] == told
    assert found[1][scene.__name__] == [], "rank 0 speaks for all"
