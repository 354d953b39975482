"""Ranks that train on the same batches are told so, and nobody else: same_batches.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Fails

import stretto
from stretto.errors import PeerError
from stretto.events import Events
from stretto.same_batches import PASSES
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalTransport, Transport

TOLD = (
    "rank 0, pass {0}: before averaging, the gradients of {1} were the same, bit for bit, in each of 8 passes. So "
    "these ranks train on the same batches, and together do the work of one rank.\n"
    "Give each rank its own: DataLoader(..., sampler=DistributedSampler(dataset)), with the global rank; for a stream, "
    "datasets.distributed.split_dataset_by_node; for random data, a seed that contains the rank. If that is intended, "
    "ignore this. Shown once; check_every=0 never looks."
)


class Run:
    """Steps of a small model on one rank, on batches drawn with a seed."""

    def __init__(self, transport: Transport | str, seed: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        self.sync = stretto.attach(self.model, transport=transport, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.generator = torch.Generator().manual_seed(seed)
        self.events: Events = self.sync._reducer._events

    def loss(self) -> torch.Tensor:
        result: torch.Tensor = self.model(torch.randn(8, 5, generator=self.generator)).square().mean()
        return result

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

    @property
    def looks(self) -> bool:
        return bool(self.events.launch_started)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def told(
    caplog: pytest.LogCaptureFixture, seeds: Sequence[int], worker: Callable[[Run], None] = lambda run: run.step(40)
) -> list[str]:
    """What is told where each rank draws its batches with one of these seeds. Nobody looks when all is done."""

    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, seeds[transport.rank])
        worker(run)
        assert not run.looks

    run_ranks(on_rank, len(seeds))
    return warnings_of(caplog)


def test_the_same_batches_on_all_ranks_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, [1, 1]) == [TOLD.format(9, "ranks 0, 1")]


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_batches_of_their_own_are_no_news(caplog: pytest.LogCaptureFixture, seeds: Sequence[int]) -> None:
    assert told(caplog, seeds) == []


@pytest.mark.parametrize(
    ("seeds", "ranks"),
    [
        ((1, 2, 1, 2), "ranks 0, 2 and of ranks 1, 3"),
        ((1, 1, 2, 2, 3, 3), "ranks 0, 1 and of ranks 2, 3 and of ranks 4, 5"),
        ((1, 2, 3, 4) * 2, "ranks 0, 4 and of ranks 1, 5 and of ranks 2, 6 and of 1 more such groups"),
    ],
)
def test_ranks_that_shard_by_the_local_rank_are_told_with_whom(
    caplog: pytest.LogCaptureFixture, seeds: Sequence[int], ranks: str
) -> None:
    (text,) = told(caplog, seeds)
    number = int(text.split("pass ")[1].split(":")[0])
    assert text == TOLD.format(number, ranks)
    assert number >= PASSES + 1


def test_one_rank_of_its_own_is_enough_not_to_be_told(caplog: pytest.LogCaptureFixture) -> None:
    """Two of three: one bit a rank does not tell, and the page on limits says so."""
    assert told(caplog, [1, 1, 2]) == []


def test_a_few_steps_on_the_same_batch_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    def worker(run: Run) -> None:
        run.step(PASSES)
        run.sync.detach()

    assert told(caplog, [1, 1], worker) == []


def test_batches_that_become_different_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, 1)
        run.step(5)
        run.generator.manual_seed(transport.rank)
        run.step(40)
        assert not run.looks

    run_ranks(on_rank, 2)
    assert warnings_of(caplog) == []


def test_whoever_never_wants_to_be_told_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, 1, check_every=0)
        assert not run.looks
        run.step(20)

    run_ranks(on_rank, 2)
    assert warnings_of(caplog) == []


def test_gradients_that_are_zero_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def worker(run: Run) -> None:
        for _ in range(40):
            run.optimizer.zero_grad()
            (0 * run.loss()).backward()
            run.optimizer.step()

    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, 1)
        for one in run.model.parameters():
            one.data.abs_()
        worker(run)

    run_ranks(on_rank, 2)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("what", ["NaN", "an offset"])
def test_gradients_that_are_the_same_whatever_the_batch_is_say_nothing(
    caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, transport.rank)
        if what == "an offset":
            run.model.requires_grad_(False)[2].bias.requires_grad_(True)
        for _ in range(40):
            run.optimizer.zero_grad()
            batch = torch.randn(8, 5, generator=run.generator)
            (run.model(batch) * (torch.nan if what == "NaN" else 1.0)).sum().backward()

    run_ranks(on_rank, 2)
    assert [text for text in warnings_of(caplog) if "the same" in text] == []


def test_passes_that_were_given_up_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """All ranks' are then the same NaN."""

    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, transport.rank)
        for _ in range(20):
            run.optimizer.zero_grad()
            hidden = Fails.apply(run.model[:2](torch.randn(8, 5)))  # type: ignore[no-untyped-call]
            with pytest.raises((ValueError, PeerError)):
                run.model[2](hidden).sum().backward()
        run.step(20)
        assert not run.looks

    run_ranks(on_rank, 2)
    assert [text for text in warnings_of(caplog) if "the same" in text] == []


def test_ranks_without_batches_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(transport: LocalTransport) -> None:
        run = Run(transport, 1)
        run.step(4)
        for _ in range(20):
            if transport.rank:
                run.sync.shadow_pass()
            else:
                run.optimizer.zero_grad()
                run.loss().backward()

    run_ranks(on_rank, 2)
    assert [text for text in warnings_of(caplog) if "batches" in text] == []


def test_nothing_more_is_sent_for_it_where_batches_differ() -> None:
    def on_rank(transport: LocalTransport) -> tuple[int, int]:
        counts = []
        for options in ({}, {"check_every": 0}):
            recording = RecordingTransport(transport)
            run = Run(recording, transport.rank, **options)
            run.step(40)
            counts.append(len(recording.calls))
            run.sync.detach()
        first, second = counts
        return first, second

    for looked, did_not in run_ranks(on_rank, 2):
        assert looked == did_not


def _worker(_: int, kind: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    run = Run(kind, 1)
    run.step(12)
    run.sync.detach()
    return records


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["shared_memory", "process_group"])
def test_processes_are_told_too(kind: str) -> None:
    first, second = spawn_ranks(_worker, 2, kind)
    assert first == [TOLD.format(9, "ranks 0, 1")]
    assert second == []
