"""Traces for tests: synthetic ones, of which all numbers are known, and recorded ones of ranks in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import stretto
from stretto.clocks import Clock
from stretto.plan import plan_buckets
from stretto.record import Launch, PassRecord, Span
from stretto.specs import describe_parameters
from stretto.testing import DelayTransport, run_ranks
from stretto.trace import RankTrace, read_trace

MS = 1_000_000
"""Nanoseconds."""
SAME = Clock(0, 0)


def plan_of(names: Sequence[str]) -> stretto.BucketPlan:
    """A bucket a name, in this order."""
    specs = describe_parameters({name: torch.zeros(256) for name in reversed(names)})
    return plan_buckets(specs, cap_bytes=1, last_cap_bytes=0)


def a_record(number: int = 1, names: Sequence[str] = ("c", "b", "a"), **changes: Any) -> PassRecord:
    """In milliseconds: optimizer 2 to 4, forward 10 to 20, gradients from 30 to 50, each bucket 15 on its way and
    handed over within 1, backward ended at 52, settled at 70; a pass every 100."""
    at, apart = 100 * MS * number, 20 * MS // max(1, len(names) - 1)
    gradients = tuple((name, at + 30 * MS + apart * place) for place, name in enumerate(names))
    launches = tuple(
        Launch(place, 1024, name, came, came, came + MS, came + 15 * MS, max(came + 15 * MS, at + 53 * MS))
        for place, (name, came) in enumerate(gradients)
    )
    record = PassRecord(
        number,
        plan_of(names).hash,
        began=at,
        started=gradients[0][1] if gradients else at + 30 * MS,
        backward_ended=at + 52 * MS,
        settled=at + 70 * MS,
        forwards=(Span(at + 10 * MS, at + 20 * MS),),
        optimizer=(Span(at + 2 * MS, at + 4 * MS),),
        gradients=gradients,
        launches=launches,
        buffers=at + 52 * MS,
    )
    return PassRecord(**{**vars(record), **changes})


def a_trace(
    rank: int = 0, world_size: int = 1, passes: Sequence[PassRecord] | None = None, **changes: Any
) -> RankTrace:
    """Of the passes given; default, one of :func:`a_record`. The clock is rank 0's unless it is said."""
    passes = [a_record()] if passes is None else passes
    names = [one.gradients for one in passes]
    plans = {one.plan: plan_of([name for name, _ in gradients]) for one, gradients in zip(passes, names, strict=True)}
    facts: dict[str, Any] = {"transport": "local", "host": "here", "clock": SAME, "end": "closed", "plans": plans}
    return RankTrace(rank, world_size, pid=100 + rank, versions={}, passes=tuple(passes), **{**facts, **changes})


class Slow(torch.autograd.Function):
    """Does nothing, and takes its time for it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Ladder(torch.nn.Module):
    """Rungs whose gradients come one after the other, each after so many seconds."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.rungs = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rung in self.rungs.values():
            x = Slow.apply(rung(x), self.seconds)
        return x


def recorded(
    folder: Path,
    ranks: int,
    names: Sequence[str] = ("first", "middle", "last"),
    *,
    passes: int = 3,
    backward: float = 0.002,
    link: Callable[[int], float] | None = None,
    late: Callable[[int], float] = lambda rank: 0.0,
) -> list[RankTrace]:
    """Of ranks in threads, a bucket a rung, ``backward`` seconds each, over a link of their own if one is given."""

    def worker(transport: Any) -> None:
        carrier = transport if link is None else DelayTransport(transport, link)
        model = Ladder(names, backward)
        sync = stretto.attach(model, transport=carrier, bucket_cap_mb=1e-6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            time.sleep(late(transport.rank))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

        for _ in range(2):
            step()
        with sync.trace(folder):
            for _ in range(passes):
                step()

    run_ranks(worker, ranks)
    return read_trace(folder)
