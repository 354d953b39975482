"""Each text that stretto raises or logs, whole."""

from __future__ import annotations

import logging

import pytest
import torch

import stretto
from stretto.testing import run_ranks

# Parameters that nobody used


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        self.heads = torch.nn.ModuleDict({key: torch.nn.Linear(2, 1) for key in "abcd"})

    def forward(self, use: str) -> torch.Tensor:
        hidden = self.body(torch.ones(3, 2))
        return torch.stack([self.heads[key](hidden).sum() for key in use]).sum()


NEVER_USED = (
    "rank 0, pass 3: heads.c.weight, heads.c.bias, heads.d.weight, heads.d.bias had no gradient in any pass so far, "
    "{}. Each is sent as zeros and not trained.\n"
    "If it is meant so, freeze it, requires_grad_(False), or leave it out: "
    "attach(..., ignore=['heads.c.weight', 'heads.c.bias', 'heads.d.weight', 'heads.d.bias'])."
)


def warned(caplog: pytest.LogCaptureFixture, uses: list[list[str]], hook: object = None) -> list[str]:
    """What is logged while each rank runs one pass with each of its heads."""

    def worker(transport):
        model = Heads()
        sync = stretto.attach(model, transport=transport)
        if hook is not None:
            sync.register_comm_hook(None, hook)
        for use in uses[transport.rank]:
            model.zero_grad()
            model(use).backward()

    with caplog.at_level(logging.DEBUG, "stretto"):
        run_ranks(worker, len(uses))
    assert all((record.name, record.levelno) == ("stretto", logging.WARNING) for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def identity(state: object, bucket: object) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_no_rank_ever_used_are_named_once(caplog, world: int) -> None:
    uses = [["a"] * 8, ["a", "b", "a", "c", "a", "a", "a", "a"], ["b"] * 8]
    assert warned(caplog, uses[:world]) == [NEVER_USED.format("on any rank")]


@pytest.mark.parametrize("uses", [["abcd"], ["ab", "cd"], ["a", "b", "cd"], ["ab", "ab", "ab", "abcd"]])
def test_what_some_pass_of_some_rank_used_is_not_named(caplog, uses: list[str]) -> None:
    passes = [uses[number % len(uses)] for number in range(3)]
    expected = [NEVER_USED.format("on any rank")] if len(uses) == 4 else []
    assert warned(caplog, [["ab"] * 3, passes]) == expected


def test_with_a_comm_hook_rank_0_speaks_of_itself(caplog) -> None:
    assert warned(caplog, [["ab"] * 4, ["abcd"] * 4], identity) == [NEVER_USED.format("on this rank")]
