"""Parameters that are given other memory (``parameter.data = ...``) on some ranks alone, before a step in shares."""

import logging
import logging.handlers
import re

import pytest
import torch
from test_shard_join import outcome

import stretto
from stretto.testing import spawn_ranks

pytestmark = pytest.mark.ranks


def assigns(rank, at):
    """Before some step: other values on rank 0, then on both; a clone on rank 1 later, and what was warned of."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    plain.load_state_dict(model.state_dict())
    sync = stretto.attach(model)
    optimizer = stretto.shard(torch.optim.AdamW(model.parameters(), lr=0.1), sync)
    beside = torch.optim.AdamW(plain.parameters(), lr=0.1)
    found, warned = [], logging.handlers.BufferingHandler(100)
    logging.getLogger("stretto").addHandler(warned)

    def backward(step):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for net, its_own in ((model, optimizer), (plain, beside)):
            its_own.zero_grad()
            net(inputs).pow(2).mean().backward()

    def assign(*nets):
        for net in nets:
            net[0].weight.data = torch.full((5, 6), 0.1)
            net[2].bias.data = torch.full((3,), 0.2)

    for step in range(8):
        backward(step)
        if step == at:
            assign(plain, *([] if rank else [model]))
            found.append(outcome(optimizer.step))
            assign(*([model] if rank else []))
        if step == at + 1:
            assign(model, plain)
        if step == at + 2 and rank:
            model[0].weight.data = model[0].weight.data.clone()
        found.append(outcome(optimizer.step))
        beside.step()
    alike = all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    return found, alike, [record.getMessage() for record in warned.buffer if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("at", [1, 5], ids=["where a spot check looks", "where none does"])
def test_other_values_on_some_ranks_alone_are_refused_before_any_has_stepped(at):
    """The model was put together of both, in silence where no spot check looked."""
    for rank, (found, alike, warned) in enumerate(spawn_ranks(assigns, 2, at, timeout=40)):
        kind, said = found.pop(at)
        assert found == ["no error"] * 8 and alike and warned == []
        assert kind == "ModelMismatchError"
        assert re.sub(r" by up to [^,]*,", " by up to FAR,", said) == (
            f"rank {rank}, pass {at + 1}: since the last step some ranks only have given other memory, with other "
            "values, to 0.weight, 2.bias (parameter.data = ...).\n"
            "  0.weight: rank 0 differs from rank 1 by up to FAR, in 30 of 30 elements\n"
            "  2.bias: rank 0 differs from rank 1 by up to FAR, in 3 of 3 elements\n"
            "No rank has stepped. Assign the same on all ranks; then all can go on."
        )


def saves(rank):
    """With groups that are followed by whoever saves: the layout is made from the values of one rank of the host."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    sync = stretto.attach(model)
    optimizer = stretto.shard(torch.optim.AdamW(model[0].parameters(), lr=0.1), sync)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    if rank:
        model[0].bias.data = torch.ones(5)
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    found = outcome(lambda: optimizer.stateful().state_dict())
    if not rank:
        model[0].bias.data = torch.ones(5)
    optimizer.stateful().state_dict()
    return found[0], model[0].bias.sum().item()


def test_who_saves_behind_a_change_of_groups_is_told_as_well():
    assert spawn_ranks(saves, 2, timeout=40) == [("ModelMismatchError", 5.0)] * 2
