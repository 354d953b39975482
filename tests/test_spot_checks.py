"""Ranks that drift apart are told of, unasked and without a message for it: spot_checks.py."""

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
from models import Fails
from test_shared_memory import shared

import stretto
from stretto import spot_checks
from stretto.check import check_replicas
from stretto.errors import PeerError
from stretto.footer import Footer
from stretto.spot_checks import SpotCheck, _are_unlike, _few_of
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalGroup, LocalTransport, Transport
from stretto.words import COUNTS, FIRST_MARK, FIRST_VALUE, LENGTH, VALUES, Control, ControlWords

APART = (
    "pass {0} of Sequential: the ranks no longer hold the same values of 0.weight, 0.bias, 2.weight.\n"
    "  0.weight: rank 0 differs from rank 1 by up to 1, in 20 of 20 elements\n"
    "  0.bias: rank 0 differs from rank 1 by up to 1, in 4 of 4 elements\n"
    "  2.weight: rank 0 differs from rank 1 by up to 1, in 12 of 12 elements\n"
    "Something changed them on some ranks only, mostly one of these:\n"
    "  - a step that one rank skipped, or took after a backward inside no_sync()\n"
    "  - gradients that no backward brings, as of torch.autograd.grad: stretto.reduce averages them\n"
    "  - batches that ran out on one rank inside join(): its optimizer and schedulers stood still meanwhile\n"
    "  - one backward more or fewer on one rank, as in an evaluation or after a break, which shifts its passes\n"
    "  - weights or an optimizer's state that only some ranks have loaded\n"
    "  - another learning rate, as from a scheduler that looks at one rank's loss\n"
    "  - LBFGS, whose closure runs more often on one rank, because of its own loss\n"
    "  - random numbers, such as weights drawn in the first forward (run one before attach)\n"
    "  - attach(init_sync=False), where each rank drew its own\n"
    "To go on with rank 0's: sync.detach(); sync = stretto.attach(model), and load or build the optimizer on all "
    "ranks.\n"
    "stretto compares a few elements now and then. If ranks are meant to train on their own for a while, ignore this. "
    "Shown once; check_every=n compares everything, and raises; check_every=0 never compares."
)


class Run:
    """Steps of a small model on one rank, with a constant gradient, which is 1 in the mean."""

    def __init__(self, transport: Transport, lr: float = 0.0, **options: Any) -> None:
        layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3, bias=False)
        self.model = torch.nn.Sequential(*layers).to(torch.float64)
        self.sync = stretto.attach(self.model, transport=transport, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self._part = (2 * transport.rank + 1) / transport.world_size

    def backward(self) -> None:
        self.optimizer.zero_grad()
        (self._part * sum(one.sum() for one in self.model.parameters() if one.requires_grad)).backward()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    def step_by_gradients_elsewhere(self, by: float) -> None:
        before = [one.detach().clone() for one in self.model.parameters()]
        self.move(by)
        self.backward()
        with torch.no_grad():
            torch._foreach_copy_([*self.model.parameters()], before)
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

    assert run(caplog, worker) == [APART.format(2)]


def test_steps_that_end_behind_other_passes_on_each_rank_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """As of a closure that one rank runs more often. No rank ever compared with another: replicas parted in silence."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=1.0)
        for backwards in [[3, 2, 2, 2], [2, 2, 2, 3]][transport.rank]:
            for _ in range(backwards):
                one.backward()
            one.optimizer.step()

    (text,) = run(caplog, worker)
    assert text.startswith("pass 5 of Sequential: the ranks no longer hold the same values of 0.weight, 0.bias, ")


def test_a_rank_that_steps_for_all_is_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    """And sends what it has stepped: one rank alone says what it holds."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        for _ in range(40):
            one.backward()
            if transport.rank == 0:
                one.optimizer.step()
            for parameter in one.model.parameters():
                transport.broadcast(parameter.data.view(-1)).wait()

    assert run(caplog, worker) == []


@pytest.mark.parametrize(("after", "every"), [(3, 1024), (7, 1024), (100, 1024), (130, 32)])
def test_what_parts_later_is_told_of_while_the_run_is_not_twice_as_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, after: int, every: int
) -> None:
    """In the end every 1,024 passes; here more often, since a run is long before those are no powers of two."""
    assert spot_checks._EVERY == 1024
    monkeypatch.setattr(spot_checks, "_EVERY", every)

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.step(after)
        if transport.rank == 1:
            one.move()
        one.step(min(after, every) + 2)

    (told,) = run(caplog, worker)
    due = next(number for number in range(after + 1, 4096) if math.log2(number) % 1 == 0 or number % every == 0)
    assert told.startswith(f"pass {due + 1} of Sequential: ")


def test_of_three_ranks_those_are_named_that_agree(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        if transport.rank == 1:
            one.move()
        one.step(2)

    (told,) = run(caplog, worker, 3)
    assert "0.bias: ranks 0, 2 differ from rank 1 by up to 1, in 4 of 4 elements" in told


def test_equal_ranks_are_told_nothing_and_send_nothing_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)

    def worker(transport: LocalTransport) -> None:
        one = Run(recording := RecordingTransport(transport), lr=0.1)
        one.step(2)  # the order is learnt
        recording.calls.clear()
        one.step(40)
        assert [kind for kind, _ in recording.calls] == ["all_reduce"] * 40

    assert run(caplog, worker) == [] and looks.number == 0


def test_who_compares_by_himself_or_never_or_has_a_comm_hook_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The hook may be one by which each rank steps by itself, as post-localSGD's."""

    def alone(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def worker(transport: LocalTransport) -> None:
        asked, never, hooked = Run(transport, check_every=50), Run(transport, check_every=0), Run(transport)
        hooked.sync.register_comm_hook(None, alone)
        for one in (asked, never, hooked):
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
            first.optimizer.step()
            second.optimizer.step()

    assert run(caplog, worker) == [APART.format(2)]


def test_behind_a_look_no_step_is_awaited(caplog: pytest.LogCaptureFixture) -> None:
    """A model whose training had ended behind pass 4 listened to every optimizer of the process from then on."""

    def worker(transport: LocalTransport) -> bool:
        one = Run(transport)
        one.step(4)
        return bool(one.sync._reducer._consensus.spot_checks._mine)  # type: ignore[union-attr]

    assert run_ranks(worker, 2) == [False, False]


# Where an optimizer steps in shares


def changed_in_memory_of_its_own(model: torch.nn.Module) -> None:
    for one in model.parameters():
        one.data = one.data + 1


def changed_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for one in model.parameters():
            one += 1


@pytest.mark.parametrize("change", [changed_in_place, changed_in_memory_of_its_own])
@pytest.mark.parametrize(("behind", "told_in"), [(0, 2), (3, 5)])
def test_what_ranks_held_before_a_step_in_shares_is_told_of_when_it_is_equal_again(
    caplog: pytest.LogCaptureFixture, change: Any, behind: int, told_in: int
) -> None:
    """Behind such a step nothing is to be seen: rank 1's half of the model had been loaded, and rank 0's not."""

    def worker(transport: Transport) -> None:
        one = Run(transport)
        one.optimizer = stretto.shard(one.optimizer, one.sync)
        one.step(behind)
        if transport.rank == 1:
            change(one.model)
        one.step(9)
        check_replicas(dict(one.model.named_parameters()), transport.all_gather_object, "")

    run_ranks(worker, 2)
    assert warnings_of(caplog) == [
        f"pass {told_in} of Sequential: before the last step the ranks held different values of 0.weight, 0.bias, "
        "2.weight. Each rank has stepped its share from its own values, so the model is equal on all ranks again, but "
        "a mixture.\n"
        "  0.weight: rank 0 differs from rank 1 by up to 1, in 20 of 20 elements\n"
        "  0.bias: rank 0 differs from rank 1 by up to 1, in 4 of 4 elements\n"
        "  2.weight: rank 0 differs from rank 1 by up to 1, in 12 of 12 elements\n"
        "Change weights in the same way on all ranks: load them on each, and draw random values with one seed. Where "
        "the ranks of a host share them, some rank was writing to them in place: let all assign parameter.data = ... "
        "(docs/sharding.md). Start again from before that. Only a few elements were compared. Shown once; "
        "check_every=0 never looks."
    ]


@pytest.mark.parametrize("changed_behind", [1, 4])
def test_a_step_in_shares_with_a_closure_is_looked_at(caplog: pytest.LogCaptureFixture, changed_behind: int) -> None:
    """Its pass runs inside the step, whose end was taken for that of the next one: nothing was said any more."""

    def worker(transport: Transport) -> None:
        one = Run(transport)
        optimizer = one.optimizer = stretto.shard(one.optimizer, one.sync)
        for step in range(10):
            if step == changed_behind and transport.rank == 1:
                changed_in_place(one.model)
            optimizer.step(one.backward)

    (told,) = run(caplog, worker)
    assert told.startswith(
        f"pass {changed_behind + 1} of Sequential: the ranks no longer hold the same values of 0.weight, 0."
    )


@pytest.mark.parametrize("sharded_first", [True, False])
def test_a_plain_step_before_one_in_shares_hides_nothing(caplog: pytest.LogCaptureFixture, sharded_first: bool) -> None:
    """Where it ended was the last look, and the step in shares made equal what had not been."""

    def worker(transport: Transport) -> None:
        one = Run(transport)
        first, _, last = one.model
        optimizers = [
            stretto.shard(torch.optim.SGD(first.parameters(), lr=0.0), one.sync),
            torch.optim.SGD(last.parameters(), lr=0.0),
        ]
        if transport.rank == 1:
            changed_in_place(first)
        for _ in range(9):
            one.backward()
            for optimizer in optimizers if sharded_first else optimizers[::-1]:
                optimizer.step()

    (told,) = run(caplog, worker)
    assert told.startswith("pass 2 of Sequential: before the last step the ranks held different values of 0.weight, 0.")


@pytest.mark.parametrize("each", [1, 3])
def test_ranks_that_read_other_parameters_look_at_all(caplog: pytest.LogCaptureFixture, each: int) -> None:
    """What forward had not read was under way, and left out on that rank: ranks soon compared no more, in silence."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.ways, self.head = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)), torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.head(self.ways[way](x))

    def worker(transport: Transport) -> tuple[bool, int]:
        model = Branches()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-5)
        sharded = stretto.shard(torch.optim.AdamW(model.ways.parameters()), sync)
        plain = torch.optim.SGD(model.head.parameters(), lr=0.01)
        for step in range(20):
            model(torch.full((2, 4), float(step)), transport.rank).sum().backward()
            for optimizer in (plain, sharded) if step % each == each - 1 else (plain,):
                optimizer.step()
                optimizer.zero_grad()
        checks = sync._reducer._consensus.spot_checks  # type: ignore[union-attr]
        return checks._wanted, checks._fruitless

    with caplog.at_level(logging.INFO, "stretto"):
        assert run_ranks(worker, 2) == [(True, 0)] * 2
    assert not [one.getMessage() for one in caplog.records if "looked at" in one.getMessage()]


@pytest.mark.parametrize("run_all", [run_ranks, shared])
def test_equal_ranks_that_step_in_shares_are_told_nothing(caplog: pytest.LogCaptureFixture, run_all: Any) -> None:
    def worker(transport: Transport) -> None:
        one = Run(transport, lr=0.1)
        one.optimizer = stretto.shard(one.optimizer, one.sync)
        for _ in range(5):
            one.step()
            changed_in_memory_of_its_own(one.model)  # on all ranks alike

    run_all(worker, 2)
    assert caplog.records == []


# Where ranks are apart for a while, or have nothing to read


def test_weights_that_each_rank_moves_for_a_backward_and_back_are_no_drift(caplog: pytest.LogCaptureFixture) -> None:
    """Sharpness-aware minimisation as it is used beside DDP, by each rank's own gradient."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=0.1)
        for _ in range(20):
            one.step_by_gradients_elsewhere(0.5 * (1 + transport.rank))

    assert run(caplog, worker) == []


def test_ranks_that_are_made_equal_behind_each_step_look_twice_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=0.1 * (1 + transport.rank))
        for number in range(20):
            one.step()
            with torch.no_grad():
                torch._foreach_mul_([*one.model.parameters()], 0.0)
                torch._foreach_add_([*one.model.parameters()], number)

    with caplog.at_level(logging.INFO, "stretto"):
        assert run(caplog, worker) == []
    end = (
        "of Sequential: the elements that ranks compared around the last step were not equal, but all parameters are "
        "equal now"
    )
    said = [record.getMessage() for record in caplog.records if record.getMessage().endswith(end)]
    assert said == [f"pass {number} {end}" for number in (2, 2, 3, 3)]


def test_drift_behind_such_moves_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=2.0 * (1 + transport.rank))
        for _ in range(3):
            one.step_by_gradients_elsewhere(0.5 * (1 + transport.rank))

    (told,) = run(caplog, worker)
    assert told.startswith("pass 2 of Sequential: ")


@pytest.mark.parametrize("what", ["frozen", "sparse"])
def test_parameters_in_no_bucket_are_looked_at_too(caplog: pytest.LogCaptureFixture, what: str) -> None:
    def worker(transport: LocalTransport) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=what == "sparse"), torch.nn.Linear(3, 1))
        model[0].requires_grad_(what != "frozen")
        stretto.attach(model, transport=transport)
        if transport.rank == 1:
            with torch.no_grad():
                model[0].weight += 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(4)).sum().backward()
            optimizer.step()

    (told,) = run(caplog, worker)
    assert told.startswith("pass 2 of Sequential: the ranks no longer hold the same values of 0.weight.\n")


def test_buffers_are_left_to_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a pass each rank has written its own, on a device at least."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.model.register_buffer("own", torch.full((3,), float(transport.rank)))
        one.step(9)

    assert run(caplog, worker) == []


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.shared(x))


def test_what_a_handle_inside_looks_after_is_its_own_affair(caplog: pytest.LogCaptureFixture) -> None:
    """Experts, of which each pair of ranks has another."""
    pairs = LocalGroup(2), LocalGroup(2)

    def worker(transport: LocalTransport) -> None:
        torch.manual_seed(transport.rank % 2)
        model = Experts()
        stretto.attach(model.expert, transport=pairs[transport.rank % 2].transport(transport.rank // 2))
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        sync.check()

    assert run(caplog, worker, 4) == []


def test_a_step_of_another_thread_touches_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may change meanwhile."""

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.model, "named_parameters", None)
            torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()

    run_ranks(worker, 2)


class Outer(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: another one steps a part, and what others have stepped comes behind that."""

    def __init__(self, parameters: list[torch.nn.Parameter], rank: int) -> None:
        super().__init__(parameters, {})
        self.inner, self.rank = torch.optim.SGD(parameters[rank:], lr=0.5), rank

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        if self.rank:
            first = self.param_groups[0]["params"][0]
            first -= 0.5 * first.grad


def test_a_step_inside_a_step_is_not_yet_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.optimizer = Outer([*one.model.parameters()], transport.rank)
        one.step(6)

    assert run(caplog, worker) == [] and looks.number == 0


class Looks:
    """How often parameters were compared closely, on all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        monkeypatch.setattr(stretto.spot_checks, "check_replicas", self.look)

    def look(self, *what: Any) -> None:
        self.number += 1
        check_replicas(*what)


@pytest.mark.parametrize("everywhere", [True, False])
def test_memory_that_is_lent_out_between_uses_is_no_drift(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    """Of a frozen layer. Where some ranks alone do so, what they say is unlike, which is found out twice."""
    looks = Looks(monkeypatch)

    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        frozen = one.model[0].weight.requires_grad_(False)
        lends = everywhere or transport.rank == 1
        values = frozen.detach().clone()
        for number in range(20):
            frozen.untyped_storage().resize_(values.nbytes)
            with torch.no_grad():
                frozen.copy_(values)
            if lends:
                frozen.untyped_storage().resize_(0)
            one.step()
            if number == 11 and everywhere and transport.rank == 1:
                with torch.no_grad():
                    one.model[0].bias += 1

    found = run(caplog, worker)
    assert [text.splitlines()[0] for text in found] == [
        "pass 17 of Sequential: the ranks no longer hold the same values of 0.bias."
    ] * everywhere
    assert looks.number == (2 if everywhere else 4)


def test_a_rank_that_comes_back_says_nothing_of_a_pass_that_is_long_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)

    def worker(transport: LocalTransport) -> None:
        one = Run(transport, lr=1.0)
        one.step(2)
        if transport.rank == 1:
            one.sync.shadow_pass()
            one.optimizer.step()  # with the gradients of before, which are the same here
        else:
            one.step()
        one.step(1)

    assert run(caplog, worker) == [] and looks.number == 0


@pytest.mark.parametrize("late", [True, False])
def test_a_rank_without_batches_is_not_named_where_others_differ(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also where words come late, as from a device: all ranks look at the same pass, and nothing comes between."""
    if late:
        monkeypatch.setattr(Footer, "read", read_late)

    def worker(transport: LocalTransport) -> list[float]:
        one = Run(transport)
        if transport.rank == 1:
            one.move()
        if transport.rank == 2:
            one.move(5)
        one.step()
        sums = []
        for _ in range(3):
            if transport.rank == 2:
                one.sync.shadow_pass()
            else:
                one.step()
            transport.all_reduce(own := torch.tensor([1.0, 2.0, 3.0])).wait()
            sums += own.tolist()
        return sums

    assert run_ranks(worker, 3) == [[3.0, 6.0, 9.0] * 3] * 3
    assert [text.splitlines()[1] for text in warnings_of(caplog)] == [
        "  0.weight: rank 0 differs from rank 1 by up to 1, in 20 of 20 elements"
    ]


class ThereAlready:
    def synchronize(self) -> None:
        """For words that are read late, as from a device."""


def read_late(self: Footer, *, summed: bool) -> ControlWords:
    assert summed
    return ControlWords(self._words.clone(), ThereAlready(), marks=self._quiet[FIRST_MARK:FIRST_VALUE])  # type: ignore[arg-type]


def test_an_error_of_a_pass_is_told_of_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where words come late one is told a pass later; but not behind another, by ranks that heard of both alone."""
    monkeypatch.setattr(Footer, "read", read_late)

    def worker(transport: LocalTransport) -> dict[int, str]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        stretto.attach(model, transport=transport, check_every=2)  # at every other pass words are waited for
        told = {}
        for number in range(1, 9):
            model.zero_grad()
            hidden = model[0](torch.ones(1, 4))
            try:
                model[1](Fails.apply(hidden) if number in (3, 4) and transport.rank == 1 else hidden).sum().backward()
            except (PeerError, ValueError) as error:
                told[number] = f"{error}".splitlines()[0]
        return told

    failed = "rank 0, pass 3: backward failed on rank 1, so the mean of this pass lacks gradients."  # the graver one
    assert run_ranks(worker, 2) == [{4: failed}, {3: "on purpose", 4: "on purpose"}]


def test_another_plan_beside_a_rank_without_batches_where_words_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Footer, "read", read_late)

    def worker(transport: LocalTransport) -> tuple[int, list[float]]:
        layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(6)])
        sync = stretto.attach(layers, transport=transport, bucket_cap_mb=1e-5)
        sums = []
        for number in range(12):
            if transport.rank == 2 and number > 2:
                sync.shadow_pass()
            else:
                order = [*layers] if number < 5 else [*layers][::-1]
                hidden = torch.ones(1, 4)
                for layer in order:
                    hidden = layer(hidden)
                hidden.sum().backward()
            transport.all_reduce(own := torch.ones(3)).wait()
            sums += own.tolist()
        return sync.statistics.plans, sums

    outcomes = run_ranks(worker, 3)
    assert all(sums == [3.0] * 36 for _, sums in outcomes)
    assert len({plans for plans, _ in outcomes}) == 1 and outcomes[0][0] > 1


def test_of_many_ranks_that_all_differ_some_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: LocalTransport) -> None:
        one = Run(transport)
        one.move(transport.rank)
        one.step(2)

    (told,) = run(caplog, worker, 6)
    assert told.splitlines()[2] == (
        "  0.bias: rank 0 differs from rank 1 and from rank 2 and from rank 3 and 2 others by up to 5, in 4 of 4 "
        "elements"
    )


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_an_optimizer_whose_state_one_rank_has_loaded(transport: str) -> None:
    """As where rank 0 alone reads a checkpoint: the weights go out to all, the rest does not."""
    told, nothing = spawn_ranks(resumes_on_rank_0, 2, transport)
    assert nothing == []
    (text,) = told
    assert text.startswith(
        "pass 2 of Sequential: the ranks no longer hold the same values of 0.weight, 0.bias, 2.weight.\n"
    )


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


# What a spot check sees


KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (100,), (4, 5), (2, 3, 4, 4)], ids=str)
def test_a_spot_check_sees_another_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    said = [SpotCheck([tensor, torch.zeros(0)]).says()]
    for number in range(64):
        tensor.copy_(torch.full((), 1 + number / 8))
        said.append(SpotCheck([tensor, torch.zeros(0)]).says())
    assert all(one[0] == Control.COMPARES and len(one) == len({*one}) <= 1 + VALUES for one in said)
    assert all(FIRST_VALUE <= word < LENGTH for one in said for word in one[1:])
    assert len({tuple(one) for one in said}) > 40 / 65 * len({*torch.arange(1, 9, 1 / 8).to(dtype).tolist()})


@pytest.mark.parametrize("number", [0, 1, 5, 1024])
def test_a_spot_check_does_not_depend_on_how_a_tensor_lies(number: int) -> None:
    tensor = torch.randn(2, 3, 4, 4)
    laid_out = tensor.to(memory_format=torch.channels_last), torch.cat([tensor] * 2)[2:]
    assert all(SpotCheck([one], number).says() == SpotCheck([tensor], number).says() for one in laid_out)


@pytest.mark.parametrize("shape", [(200,), (40, 5), (7, 3, 70), (9, 2, 3, 3)], ids=str)
def test_spot_checks_of_many_passes_see_most_elements(shape: tuple[int, ...]) -> None:
    places = torch.arange(math.prod(shape)).view(shape)
    seen = [{*_few_of(places, number).tolist()} for number in range(2000)]
    assert len(set().union(*seen)) > 0.9 * places.numel()
    assert all(len(one) == min(64, places.numel()) for one in seen)


def test_no_more_than_what_is_looked_at_is_copied() -> None:
    large = torch.zeros(1000, 1000).t()
    with torch.profiler.profile(profile_memory=True) as seen:
        _few_of(large, 3)
    assert sum(max(one.self_cpu_memory_usage, 0) for one in seen.key_averages()) < 10_000


def test_memory_that_is_lent_out_is_left_alone() -> None:
    tensor = torch.randn(4, 5)
    tensor.untyped_storage().resize_(0)
    assert SpotCheck([tensor, torch.ones(3)]).says() == SpotCheck([torch.ones(3)]).says()


def test_what_cannot_be_read_is_left_alone() -> None:
    others = torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.nn.UninitializedParameter()
    assert SpotCheck([*others, torch.ones(3)]).says() == SpotCheck([torch.ones(3)]).says()


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
