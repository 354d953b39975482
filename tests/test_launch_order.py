"""What stands between which collectives does not depend on who is faster.

The user's own collectives, or those of another model, may come in the middle of a backward. On one process group they
must stand between the same buckets on every rank.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import stretto
from stretto.testing import RecordingTransport, run_ranks

LAYERS = 6


class Between(torch.autograd.Function):
    """Notes in the log that backward came by, as a collective of the user's would stand there."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, log: list[Any]) -> torch.Tensor:
        ctx.log = log
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(0.02)
        ctx.log.append("user")
        return gradient, None


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor, log: list[Any], use: list[int]) -> torch.Tensor:
        for number in use:
            inputs = Between.apply(torch.tanh(self.layers[number](inputs)), log)
        return inputs.sum()


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_hook_whose_future_takes_time_keeps_its_place(seconds: float) -> None:
    def worker(transport: Any) -> list[Any]:
        log: list[Any] = []

        def hook(state: Any, bucket: Any) -> torch.futures.Future[Any]:
            log.append(bucket.index())
            future: torch.futures.Future[Any] = torch.futures.Future()
            if seconds:
                threading.Timer(seconds, future.set_result, [bucket.buffer()]).start()
            else:
                future.set_result(bucket.buffer())
            return future

        model = Chain()
        stretto.attach(model, transport=transport, bucket_cap_mb=0.001, last_bucket_cap_mb=0.001).register_comm_hook(
            None, hook
        )
        for _ in range(2):
            log.clear()
            model(torch.ones(2, 16), log, [*range(LAYERS)]).backward()
        return log

    for log in run_ranks(worker, 2):
        assert log == [word for number in range(LAYERS) for word in ("user", number)], log


@pytest.mark.parametrize("late", [0.0, 0.15])
def test_a_map_that_is_waited_for_keeps_the_buckets_in_place(late: float) -> None:
    def worker(transport: Any) -> list[Any]:
        log: list[Any] = []
        recording = RecordingTransport(transport)
        recording.own_channel = False
        recording.calls = log
        model = Chain()
        stretto.attach(model, transport=recording, bucket_cap_mb=0.001, last_bucket_cap_mb=0.001)
        for step in range(4):
            log.clear()
            use = [*range(LAYERS)] if step != 1 else [*range(LAYERS - 1)]
            loss = model(torch.ones(2, 16), log, use)
            if step == 3:
                time.sleep(late * transport.rank)
            loss.backward()
        return ["user" if call == "user" else "sent" for call in log]

    for log in run_ranks(worker, 2):
        assert log[:3] == ["user", "sent", "sent"], "the map, and the first bucket behind it"
        assert log[3:] == ["user", "sent"] * (LAYERS - 1), log
