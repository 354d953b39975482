"""Ranks that step, or clip, two things of the same sizes in another order: nothing may be mixed in silence, or hang.

For passes see test_peers.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stretto
from stretto.peers import Peers
from stretto.testing import run_ranks, spawn_ranks
from stretto.transport import Transport
from stretto.words import MARKS, VALUES, Control, ControlWords

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(90)]
ADVICE = (
    "All ranks must make the same calls in the same order. Look for a call that only some of them make, as under "
    "`if rank == 0` or after a `continue` or a `break`: attach(), shard(), backward, optimizer.step(), "
    "clip_grad_norm_(), check(), report(), trace(), state_dict(), load_state_dict(), unshard(), stretto.reduce()."
)
APART = (
    "rank {0}, pass 3: ranks are out of step, so nobody can complete this: rank {1} waits for this rank in another "
    "call.\nrank {0} waits at PLACE; rank {1} has begun 3 passes and is at PLACE.\n" + ADVICE
)
PATCHWORK = (
    "rank {0}, pass 3: the last step was that of another sharded optimizer on rank {1}, so the model is a mixture of "
    "two.\nStep optimizers in the same order on all ranks, and start again from the last checkpoint."
)
CLIPPED = (
    "rank {0}, pass 3: gradients of another attached model were clipped on rank {1}, so those of this one were not.\n"
    + ADVICE
)
GROUPS = (
    "rank {0}, pass 3: parameter group 0 differs between rank 0 and rank 1: a.bias, a.weight, b.bias, b.weight.\n"
    "No rank has stepped. Set the same on all ranks, schedules included; then all can go on. Step several optimizers "
    "in one order, which inside Join is that of its list."
)
EXPECTED = {
    ("steps of two models", "process_group"): PATCHWORK,
    ("steps of two models", "shared_memory"): APART,
    ("steps of one model", "process_group"): PATCHWORK,
    ("steps of one model", "shared_memory"): GROUPS,
    ("clipping", "process_group"): CLIPPED,
    ("clipping", "shared_memory"): APART,
}


def in_another_order(rank: int, kind: str, transport: Any) -> tuple[list[float], str]:
    """Rank 1 is alone with its order in the third turn. What was there before, and what is said of it."""
    stretto.inquiry.ASK_SECONDS = 0.3
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in "ab"})
    group = dist.new_group()
    if kind == "steps of one model":
        handles = [stretto.attach(parts, transport=transport, process_group=group)] * 2
    else:
        handles = [stretto.attach(one, transport=transport, process_group=group) for one in parts.values()]
    optimizers = [
        stretto.shard(torch.optim.SGD(one.parameters(), lr=0.1), handle, keep_grads=kind != "clipping")
        for one, handle in zip(parts.values(), handles, strict=True)
    ]
    calls: list[Callable[[], Any]]
    if kind == "clipping":
        calls = [lambda one=one: one.clip_grad_norm_(1.0) for one in handles]
    else:
        calls = [one.step for one in optimizers]
    for turn in range(3):
        parts.zero_grad()
        sum(scale * one(torch.ones(2, 4)).sum() for scale, one in zip((1, 100), parts.values(), strict=True)).backward()
        before = [one.weight[0, 0].item() for one in parts.values()]
        if turn == 2 and rank == 1:
            calls.reverse()
        try:
            for call in calls:
                call()
            for one in parts.values():
                one(torch.ones(2, 4))
        except stretto.StrettoError as error:
            for handle in handles:
                handle.detach()
            return before, str(error)
    return before, ""


def all_of(rank: int) -> dict[tuple[str, str], tuple[list[float], str]]:
    return {way: in_another_order(rank, *way) for way in EXPECTED}


def test_what_ranks_do_in_another_order_is_refused_by_name() -> None:
    everyone = spawn_ranks(all_of, 2, timeout=60)
    for way, wanted in EXPECTED.items():
        assert everyone[0][way][0] == everyone[1][way][0]
        texts = [re.sub(r"(in \w+\(\) )?at \S+:\d+ in [<\w>]+", "at PLACE", one[way][1]) for one in everyone]
        own = [wanted.format(rank, 1 - rank) for rank in range(2)]
        assert any(text == one for text, one in zip(texts, own, strict=True)), (way, texts)
        for rank, text in enumerate(texts):
            quoted = f"rank {rank}, pass 3: rank {1 - rank} failed and left"
            assert text == own[rank] or text.startswith(quoted), (way, text)


def buffers_in_another_order(rank: int) -> list[tuple[str, float]]:
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2)]
    for one in models:
        stretto.attach(one, transport="process_group", buffers="mean")
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for scale, one in zip((1, 1000), models, strict=True):
        one(scale * x).sum().backward()
    before = [one[1].running_mean.clone() for one in models]
    found = []
    for scale, one, values in [*zip((1, 1000), models, before, strict=True)][:: 1 - 2 * rank]:
        with pytest.raises(stretto.CommunicationError) as caught:
            one(scale * x).sum().backward()
        expected = 0.9 * values + 0.1 * one[0](scale * x).mean(0)
        found.append((str(caught.value), (one[1].running_mean - expected).abs().max().item()))
    return found


def test_buffers_of_two_models_are_not_averaged_with_each_other() -> None:
    for found in spawn_ranks(buffers_in_another_order, 2, timeout=60):
        assert any("they were summed with those of another attached model" in text for text, _ in found)
        assert all(off < 1e-2 for _, off in found)


def nameless(rank: int, equal: bool) -> list[str]:
    """Handles that have no name before their first pass."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    if equal:
        models[1].load_state_dict(models[0].state_dict())
    for one in models:
        stretto.attach(one, transport="process_group", init_sync=False)
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    for one in models[:: 1 - 2 * rank]:
        try:
            one(torch.ones(1, 2)).sum().backward()
        except stretto.CommunicationError as error:
            found.append(str(error))
    return found


def test_ranks_that_begin_with_another_of_two_handles_without_a_name_are_told() -> None:
    begin = "rank {0}, before pass 1: ranks have begun with different handles (rank 0's number 1, rank 1's number 2)"
    advice = "All ranks must begin with the same one of models that were copied, or attached with init_sync=False."
    for rank, (first, *_) in enumerate(spawn_ranks(nameless, 2, False, timeout=60)):
        assert first == f"{begin.format(rank)}, and their values differ.\n{advice}"
    for rank, (first, *_) in enumerate(spawn_ranks(nameless, 2, True, timeout=60)):
        assert first == f"{begin.format(rank)}. Their values are equal, so it may be the same model.\n{advice}"


def test_words_that_come_late_from_a_device_end_the_next_pass_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever explains the mixing: a rank that has told that it leaves must not run the pass that it has begun."""

    def explains(peers: Peers, *_: object) -> None:
        raise stretto.PeerError("rank 1 failed and left")

    def worker(transport: Transport) -> tuple[str, str, int]:
        model = torch.nn.Linear(2, 2)
        sync = stretto.attach(model, transport=transport)
        reducer = sync._reducer
        assert reducer is not None
        model(torch.ones(1, 2)).sum().backward()
        said = torch.tensor([0.0] * len(Control) + [1.0] * MARKS + [0.0] * VALUES)
        reducer._consensus._late_words = ControlWords(said, marks=[0.0] * MARKS)
        with pytest.raises(stretto.PeerError) as met:
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(stretto.CommunicationError) as behind:
            model(torch.ones(1, 2)).sum().backward()
        return str(met.value), str(behind.value), sync.statistics.passes

    monkeypatch.setattr(Peers, "fail", explains)
    for met, behind, passes in run_ranks(worker, 2):
        assert met == "rank 1 failed and left"
        assert "so it has lost its place among the others" in behind
        assert passes == 1
