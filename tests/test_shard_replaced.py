"""A module whose optimizer is sharded is wrapped again: by a framework, or by a notebook's cell that runs again."""

from typing import Any

import pytest
import torch

import stretto
from stretto import DistributedDataParallel as DDP
from stretto.testing import spawn_ranks

pytestmark = pytest.mark.ranks


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def train(model: torch.nn.Module, optimizer: Any, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + rank + step)).square().sum().backward()
        optimizer.step()


def cells(rank: int) -> list[str]:
    """One cell, run three times, while a name holds the optimizer of the time before."""
    nets = []
    for shards in (True, False):
        module, optimizer = net(), None
        for _ in range(3):
            model, before, original = DDP(module), optimizer, torch.optim.AdamW(module.parameters(), lr=0.1)
            optimizer = stretto.shard(original, model) if shards else original
            train(model, optimizer, rank)
        nets.append((module, model, before, original))
    (module, model, before, original), (plain, *_) = nets
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    found = []
    for call in (before.step, lambda: stretto.shard(torch.optim.SGD(module.parameters()), model)):
        with pytest.raises(stretto.SetupError) as caught:
            call()
        found.append(str(caught.value))
    model = DDP(module)
    with pytest.raises(stretto.SetupError) as caught:
        stretto.shard(original, model)
    return [*found, str(caught.value)]


def test_a_cell_that_wraps_and_shards_runs_again() -> None:
    for rank, (stepped, taken, again) in enumerate(spawn_ranks(cells, 2)):
        assert stepped == (
            f"rank {rank}, shard: this sharded optimizer has ended: by detach() or unshard(), or for a later one.\n"
            "Call unshard() before, on all ranks, and use what it returns: it has the whole state."
        )
        assert taken == (
            f"rank {rank}, shard: 0.weight, 0.bias, 2.weight, 2.bias belong to another sharded optimizer.\n"
            "Give each parameter to one optimizer, or call unshard() of the other one before."
        )
        assert again == (f"rank {rank}, shard: the optimizer is sharded already.\nUse what the first call returned.")


def follows(rank: int, thawed: str) -> str:
    """Whether a layer is thawed before or after the module is wrapped again, or else (empty) it is converted."""
    module = net()
    module[0].requires_grad_(not thawed)
    optimizer = stretto.shard(torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]), DDP(module))
    module[0].requires_grad_(thawed != "after")
    model = DDP(module)
    train(model, optimizer, rank)
    with pytest.raises(stretto.SetupError) as caught:
        if thawed:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*module[0].parameters()]})
        else:
            module.double()
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].double())
            train(model, optimizer, rank)
    state = optimizer.unshard().state_dict()
    later = stretto.shard(torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]), model)
    if not thawed:
        later.load_state_dict(state)
    train(model, later, rank)
    return str(caught.value)


@pytest.mark.parametrize("thawed", ["before", "after", ""])
def test_what_the_new_wrapper_alone_knows_of_is_refused_with_the_reason(thawed: str) -> None:
    for rank, told in enumerate(spawn_ranks(follows, 2, thawed)):
        assert told == (
            f"rank {rank}, before pass 1: the module was wrapped again since this optimizer was sharded. It goes "
            "on stepping what it has, but cannot follow parameters that are added or converted.\n"
            "Call unshard(), on all ranks; then shard a new optimizer with the new wrapper, and load the state."
        )
