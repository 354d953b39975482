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
from stretto.steps import name_in
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]

TOLD = (
    "pass {0} of Linear: an optimizer steps {1}, which no handle averages, and ranks hold different values of it.\n"
    "  {1}: rank 0 differs from rank 1 by up to {2}, in 1 of 1 element\n"
    "Attach the module that it belongs to; or, if it belongs to none, average its gradient on all ranks before each "
    "step, stretto.reduce([parameter.grad]), and start from equal values. If ranks are meant to differ there, ignore "
    "this. Shown once; check_every=0 never looks."
)
ALPHA = "param_groups[0]['params'][0] (1,) of SGD"


def batch() -> torch.Tensor:
    """Of this rank's own: that ranks train on the same is told, too."""
    return torch.full((1, 2), 1.0 + dist.get_rank())


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
            self.actor(batch()).sum().backward()
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
        critic(batch()).sum().backward()
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


def with_gradients_set_to_none_behind_each_step(rank: int) -> None:
    agent = Agent()
    for _ in range(40):
        agent.train(1, float(rank))
        agent.alpha.grad = None


def a_probe_on_one_rank_alone(rank: int) -> None:
    """Beside what is averaged: ranks that have other numbers of optimizers do not take one for another."""
    agent = Agent()
    agent.alpha.register_post_accumulate_grad_hook(agent.average)
    if rank == 0:
        probe = torch.zeros(1, requires_grad=True)
        probe.grad = torch.ones(1)
        agent.optimizers.insert(0, torch.optim.SGD([probe], lr=1.0))
    agent.train(40, float(rank))


def behind_one_that_has_ended_its_look(rank: int) -> None:
    """One model is trained alone for long, and then another with a temperature beside it."""
    before = torch.nn.Linear(2, 2)
    stretto.attach(before)
    of_before = torch.optim.SGD(before.parameters(), lr=0.0)
    for _ in range(260):
        before(batch()).sum().backward()
        of_before.step()
    agent = Agent()
    agent.optimizers.append(of_before)
    agent.train(40, float(rank))


def another_handle_looks_never(rank: int) -> None:
    critic = torch.nn.Linear(2, 2)
    stretto.attach(critic, check_every=0)
    critic(batch()).sum().backward()
    torch.optim.SGD(critic.parameters(), lr=0.0).step()
    Agent().train(40, float(rank))


def left_alone_by_another_handle(rank: int) -> None:
    agent = Agent()
    other = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    stretto.attach(other, ignore=["1.*"])
    of_other = torch.optim.SGD(other[0].parameters(), lr=0.0)
    agent.optimizers = [torch.optim.SGD(other[1].parameters(), lr=1.0 + rank), of_other]
    for _ in range(40):
        other(torch.ones(1, 1)).sum().backward()
        agent.train(1, 0.0)


def one_that_takes_the_place_of_another(rank: int) -> None:
    """Nothing tells it from that one but the object: ranks that reuse an ``id`` have both in the same order."""
    agent = Agent()
    found: list[torch.Tensor] = []
    for number in range(40):
        del agent.optimizers[1:]
        found.append(torch.zeros(1 + number, requires_grad=True))
        found[-1].grad = torch.ones(1 + number)
        agent.optimizers.append(torch.optim.SGD(found[-1:], lr=1.0))
        if rank:
            found.append(torch.zeros(1))
        agent.train(1, 0.0)


def divided_by_torch_beside(rank: int) -> None:
    """A second model, averaged by torch's class, whose optimizer inside has this rank's part."""
    agent, other = Agent(), torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    agent.optimizers = [zero()(other.parameters(), torch.optim.Adam, lr=0.1)]
    for _ in range(40):
        other(torch.full((1, 3), 1.0 + rank)).sum().backward()
        agent.train(1, 0.0)


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


def zero() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer


def divided_by_torch(rank: int) -> None:
    agent = Agent()
    agent.of_actor = zero()(agent.actor.parameters(), torch.optim.SGD, lr=0.1)
    agent.train(40, 0.0, beside=False)


SCENES: Sequence[tuple[Callable[[int], None], list[str]]] = [
    (apart, [TOLD.format(32, ALPHA, 32)]),
    (averaged_in_a_hook, []),
    (averaged_by_hand, []),
    (from_another_pass_on, [TOLD.format(256, ALPHA, "2.2e+02")]),
    (not_asked, []),
    (two_handles, [TOLD.format(32, ALPHA, 32)]),
    (on_one_rank_alone, []),
    (beside_one_without_batches, []),
    (with_gradients_set_to_none_behind_each_step, [TOLD.format(32, ALPHA, 32)]),
    (a_probe_on_one_rank_alone, []),
    (behind_one_that_has_ended_its_look, [TOLD.format(32, ALPHA, 32)]),
    (another_handle_looks_never, [TOLD.format(32, ALPHA, 32)]),
    (left_alone_by_another_handle, []),
    (one_that_takes_the_place_of_another, []),
    (divided_by_torch_beside, []),
    (freed, []),
    (several, [TOLD.format(32, "other of AdamW", 32)]),
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


def test_a_parameter_without_a_shape_is_called_by_its_place() -> None:
    assert name_in({"params": [torch.ones(2), torch.tensor(1.0)]}, 3, 1) == "param_groups[3]['params'][1]"
