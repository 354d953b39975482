"""Parameters that are given other memory (``parameter.data = ...``) on some ranks alone, before a step in shares."""

import re

import pytest
import torch

import stretto
from stretto.testing import spawn_ranks

pytestmark = pytest.mark.ranks


def outcome(run):
    try:
        run()
    except stretto.StrettoError as error:
        return type(error).__name__, str(error)
    return "no error"


def assigns(rank):
    """Behind step 5, where no spot check looks: other values on rank 0, then on both, then a clone on rank 1."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    plain.load_state_dict(model.state_dict())
    sync = stretto.attach(model)
    optimizer = stretto.shard(torch.optim.AdamW(model.parameters(), lr=0.1), sync)
    beside = torch.optim.AdamW(plain.parameters(), lr=0.1)
    found = []

    def backward(step):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for net, its_own in ((model, optimizer), (plain, beside)):
            its_own.zero_grad()
            net(inputs).pow(2).mean().backward()

    def assign(*nets):
        for net in nets:
            net[0].weight.data = torch.full((5, 6), 0.1)
            net[2].bias.data = torch.full((3,), 0.2)

    for step in range(9):
        backward(step)
        if step == 5:
            assign(plain, *([] if rank else [model]))
            found.append(outcome(optimizer.step))
            assign(*([model] if rank else []))
        if step == 6:
            assign(model, plain)
        if step == 7 and rank:
            model[0].weight.data = model[0].weight.data.clone()
        found.append(outcome(optimizer.step))
        beside.step()
    alike = all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    return found, alike


def test_other_values_on_some_ranks_alone_are_refused_before_any_has_stepped():
    """The model was put together of both, in silence where no spot check looked."""
    for rank, (found, alike) in enumerate(spawn_ranks(assigns, 2, timeout=40)):
        kind, said = found.pop(5)
        assert found == ["no error"] * 9 and alike
        assert kind == "ModelMismatchError"
        assert re.sub(r" by up to [^,]*,", " by up to FAR,", said) == (
            f"rank {rank}, pass 6: 0.weight, 2.bias have been given other memory (parameter.data = ...) on some ranks "
            "only, and hold other values there.\n"
            "  0.weight: rank 0 differs from rank 1 by up to FAR, in 30 of 30 elements\n"
            "  2.bias: rank 0 differs from rank 1 by up to FAR, in 3 of 3 elements\n"
            "No rank has stepped. Assign the same on all ranks; then all can go on."
        )
