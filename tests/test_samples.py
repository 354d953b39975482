"""Ranks that drift apart are told of, unasked and without a message for it: check.py, [Note: samples]."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.check import Sample, _are_unlike
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalTransport, Transport
from stretto.words import COUNTS, FIRST_VALUE, LENGTH, VALUES, Control

APART = (
    "pass {0}: the ranks no longer hold the same values of 0.weight, 0.bias, 2.weight.\n"
    "  0.weight: rank 0 differs from rank 1 by up to 1, in 20 of 20 elements\n"
    "  0.bias: rank 0 differs from rank 1 by up to 1, in 4 of 4 elements\n"
    "  2.weight: rank 0 differs from rank 1 by up to 1, in 12 of 12 elements\n"
    "Something changed them on some ranks only: a step that was skipped, or behind a backward inside no_sync(); "
    "weights or an optimizer's state that were loaded there alone; another learning rate, as of a scheduler that looks "
    "at one rank's loss; a random number.\n"
    "To go on with rank 0's: sync.detach(); sync = stretto.attach(model), and load or build the optimizer on all "
    "ranks.\n"
    "stretto looks at a few elements unasked. Where ranks are meant to move their weights by themselves for a while, "
    "all is well. Told once; check_every=n looks at all, and raises."
)


class Run:
    """Steps of a small model on one rank, with a constant gradient."""

    def __init__(self, transport: Transport, lr: float = 0.0, **options: Any) -> None:
        layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3, bias=False)
        self.model = torch.nn.Sequential(*layers).to(torch.float64)
        self.sync = stretto.attach(self.model, transport=transport, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            sum(one.sum() for one in self.model.parameters()).backward()
            self.optimizer.step()

    def move(self, by: float = 1.0) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one += by


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run(caplog: pytest.LogCaptureFixture, worker: Callable[[LocalTransport], None], world: int = 2) -> list[str]:
    run_ranks(worker, world)
    return warnings_of(caplog)


def test_weights_that_one_rank_has_loaded_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        if transport.rank == 1:
            one.move()
        one.step(9)

    assert run(caplog, worker) == [APART.format(2)]


def test_another_learning_rate_is_told_of_behind_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        Run(transport, lr=1.0 + transport.rank).step(3)

    assert run(caplog, worker) == [APART.format(3).replace("up to 1,", "up to 2,")]


@pytest.mark.parametrize("after", [3, 7, 100, 1500])
def test_what_parts_later_is_told_of_while_the_run_is_not_twice_as_long(
    caplog: pytest.LogCaptureFixture, after: int
) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.step(after)
        if transport.rank == 1:
            one.move()
        one.step(min(after, 1024) + 2)

    (told,) = run(caplog, worker)
    due = next(number for number in range(after + 1, 4096) if math.log2(number) % 1 == 0 or number % 1024 == 0)
    assert told.startswith(f"pass {due + 1}: ")


def test_of_three_ranks_those_are_named_that_agree(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        if transport.rank == 1:
            one.move()
        one.step(2)

    (told,) = run(caplog, worker, 3)
    assert "0.bias: ranks 0, 2 differ from rank 1 by up to 1, in 4 of 4 elements" in told


def test_equal_ranks_are_told_nothing_and_send_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(recording := RecordingTransport(transport), lr=0.1)
        one.step(2)  # the order is learnt
        recording.calls.clear()
        one.step(40)
        assert [kind for kind, _ in recording.calls] == ["all_reduce"] * 40
        assert one.sync._peers is not None

    assert run(caplog, worker) == []


def test_who_compares_by_himself_or_has_a_comm_hook_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The hook may be one by which each rank steps by itself, as post-localSGD's."""

    def alone(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def worker(transport: LocalTransport) -> None:
        asked, hooked = Run(transport, check_every=50), Run(transport)
        hooked.sync.register_comm_hook(None, alone)
        for one in (asked, hooked):
            if transport.rank == 1:
                one.move()
            one.step(9)

    assert run(caplog, worker) == []


def test_ranks_without_batches_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """They do not step any more."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=1.0)
        one.step(3)
        for _ in range(9):
            if transport.rank == 1:
                one.sync.shadow_pass()
            else:
                one.step()

    assert run(caplog, worker) == []


def test_a_pass_that_was_given_up_says_nothing_of_values(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.step(4)  # of whose values the next one would tell
        if transport.rank == 1:
            one.move()
        value = one.model[0].weight.sum() + one.model[0].bias.sum()
        if transport.rank == 1:
            value.register_hook(fails)
        with pytest.raises((ValueError, stretto.PeerError)):
            (value + one.model[2].weight.sum()).backward()
        caplog.clear()
        one.step(3)
        assert not warnings_of(caplog)
        one.step()

    def fails(_: torch.Tensor) -> None:
        raise ValueError("no")

    run_ranks(worker, 2)
    assert [text.splitlines()[0] for text in warnings_of(caplog)] == [APART.splitlines()[0].format(9)]


def test_two_models_of_one_backward_are_told_of_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        first, second = Run(transport), Run(transport)
        if transport.rank == 1:
            second.move()
        for _ in range(5):
            sum(one.sum() for each in (first, second) for one in each.model.parameters()).backward()

    assert run(caplog, worker) == [APART.format(2)]


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_an_optimizer_whose_state_one_rank_has_loaded(transport: str) -> None:
    """As where rank 0 alone reads a checkpoint: the weights go out to all, the rest does not."""
    told, nothing = spawn_ranks(resumes_on_rank_0, 2, transport)
    assert nothing == []
    (text,) = told
    assert text.startswith("pass 3: the ranks no longer hold the same values of 0.weight, 0.bias, 2.weight.\n")


def resumes_on_rank_0(rank: int, transport: str) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state: dict[str, Any] = {}
    sync = stretto.attach(model, transport=transport)  # type: ignore[arg-type]
    for number in range(12):
        if number == 6:
            sync.detach()
            model = copy.deepcopy(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            if rank == 0:
                optimizer.load_state_dict(state)
            sync = stretto.attach(model, transport=transport)  # type: ignore[arg-type]
        optimizer.zero_grad()
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        state = optimizer.state_dict()
    return told


# What a sample sees


KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (100,), (4, 5), (2, 3, 4, 4)], ids=str)
def test_a_sample_sees_another_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    first = tensor[0] if len(shape) > 1 else tensor
    said = [Sample([tensor, torch.zeros(0)]).says()]
    for number in range(64):
        first.copy_(torch.full((), 1 + number / 8))
        said.append(Sample([tensor, torch.zeros(0)]).says())
    assert all(one[0] == Control.COMPARES and len(one) == len({*one}) <= 1 + VALUES for one in said)
    assert all(FIRST_VALUE <= word < LENGTH for one in said for word in one[1:])
    assert len({tuple(one) for one in said}) > 40 / 65 * len({*torch.arange(1, 9, 1 / 8).to(dtype).tolist()})


def test_a_sample_does_not_depend_on_how_a_tensor_lies() -> None:
    tensor = torch.randn(2, 3, 4, 4)
    laid_out = tensor.to(memory_format=torch.channels_last)
    assert Sample([tensor]).says() == Sample([laid_out]).says() == Sample([torch.cat([tensor] * 2)[2:]]).says()


def test_memory_that_is_lent_out_is_left_alone() -> None:
    tensor = torch.randn(4, 5)
    tensor.untyped_storage().resize_(0)
    assert Sample([tensor, torch.ones(3)]).says() == Sample([torch.ones(3)]).says()


@given(st.lists(st.lists(st.booleans(), min_size=VALUES, max_size=VALUES), max_size=4), st.integers(0, 3))
def test_ranks_that_do_not_compare_leave_the_others_alone(said: list[list[bool]], others: int) -> None:
    words = torch.zeros(LENGTH)
    for one in said:
        words[Control.COMPARES] += 1
        words[FIRST_VALUE:] += torch.tensor(one)
    words[Control.ABSENT] += others
    assert _are_unlike(words.tolist()) == any(one != said[0] for one in said)


def test_more_ranks_than_can_be_counted_are_not_taken_for_unlike() -> None:
    words = torch.zeros(LENGTH, dtype=torch.bfloat16)
    for rank in range(COUNTS + 44):
        words[[Control.COMPARES, FIRST_VALUE]] += 1
        words[LENGTH - 1] += rank == 7
    assert _are_unlike(words.tolist())
    words[LENGTH - 1] = 0
    assert not _are_unlike(words.tolist())
    words[Control.COMPARES] = 302  # summed in another order
    assert not _are_unlike(words.tolist())
