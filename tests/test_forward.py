"""A forward that fails on one rank, or that no backward follows: what the ranks know of each other's forwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import logging
import pickle
import re
import threading
import time
import traceback
import unittest.mock
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import stretto
from stretto import recorder
from stretto.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

FAILED = (
    "rank {0}, pass {1}: forward failed on {2} before this pass and was caught, so this pass may mix batches.\n"
    "{3}"
    "Do not step with these gradients: zero_grad() and go on, on all ranks. A forward that may fail and be tried "
    "again on one rank must run inside no_sync() of the handle (a wrapper's .synchronizer), its backward outside."
)
EARLY = (
    "rank {0}, pass {1}: backward failed on {2} before this pass and was caught, so this pass may mix batches.\n"
    "{3}"
    "Do not step with these gradients: zero_grad() and go on, on all ranks."
)
NOTE = "  rank {0}, pass {1}, forward: ValueError: bad token (test_forward.py:LINE in forward)\n"
IN_BACKWARD = "  rank {0}, pass {1}, backward: ValueError: bad token (test_forward.py:LINE in raises)\n"
MORE = (
    "rank {0}, pass {1}: some ranks ran forward more often for this pass than for any earlier one, others did not "
    "({2}).\nIf a rank skipped a batch (an exception that was caught, a loss that needs no gradient, a break or "
    "continue before backward), its passes are shifted by one from here on. Run forwards without a backward under "
    "torch.no_grad(). Shown once."
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x, fail=False):
        if fail:
            raise ValueError("bad token")
        return self.inner(x).sum()


class Behind(torch.autograd.Function):
    """Behind the module, or all of its parameters: where backward begins. It calls ``act`` before it goes on."""

    @staticmethod
    def forward(ctx, value, act):
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.act()
        return gradient, None


def raises(fail: bool) -> None:
    if fail:
        raise ValueError("bad token")


class FailsInBackward(Model):
    """Before a gradient of a parameter is there."""

    def __init__(self, wrapped=lambda loss: loss) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x, fail=False):
        return self.wrapped(Behind.apply(super().forward(x), lambda: raises(fail)))


class OwnState(Model):
    def __getstate__(self):
        return self.__dict__.copy()


def x(value: float) -> torch.Tensor:
    return torch.full((1, 2), value)


def plain(text: str) -> str:
    return re.sub(r"\.py:\d+ in", ".py:LINE in", text)


def goes_on(transport, fails, batches: int = 5, wrap=stretto.attach, kind=Model):
    """Train, leave out batches that fail, and return what was raised and the gradients of each batch."""
    model = kind()
    wrap(model, transport=transport)
    seen = []
    for number in range(1, batches + 1):
        model.zero_grad()
        try:
            model(x(transport.rank + 10.0 * number), fail=fails(transport.rank, number)).backward()
        except (ValueError, stretto.PeerError) as error:
            seen.append(f"{type(error).__name__}: {plain(str(error))}")
        else:
            seen.append(float(model.inner.weight.grad[0, 0]))
    return seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_fails_before_a_gradient_on_one_rank_and_is_caught_is_told_by_all(phase: str, world: int) -> None:
    """Of a backward that had reached no hook of a parameter nobody knew; batches were mixed but for a warning."""
    kind, text, note = (FailsInBackward, EARLY, IN_BACKWARD) if phase == "backward" else (Model, FAILED, NOTE)

    def last(rank: int, number: int) -> bool:
        return rank == world - 1 and number == 2

    found = run_ranks(lambda t: goes_on(t, last, 4 + (t.rank == world - 1), kind=kind), world)
    told = text.format("{0}", 2, f"rank {world - 1}", note.format(world - 1, 2))
    first = sum(range(world)) / world
    # The failing rank's batches 4 and 5 meet the others' 3 and 4.
    later = [first + 10 * number + 10 / world for number in (3, 4)]
    for rank in range(world - 1):
        assert found[rank] == [first + 10, f"PeerError: {told.format(rank)}", *map(pytest.approx, later)]
    mine = ["ValueError: bad token", f"PeerError: {told.format(world - 1)}"]
    assert found[-1] == [first + 10, *mine, *map(pytest.approx, later)]


def test_a_forward_that_is_interrupted_on_one_rank_is_told_like_one_that_fails() -> None:
    """A loop that catches Ctrl-C and goes on stepped with mixed batches, but for a warning."""

    class Interrupted(Model):
        def forward(self, x, fail=False):
            if fail:
                raise KeyboardInterrupt
            return super().forward(x)

    def worker(transport) -> str:
        model = Interrupted()
        stretto.attach(model, transport=transport)
        model(x(1.0)).backward()
        if transport.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                model(x(1.0), fail=True)
        with pytest.raises(stretto.PeerError) as told:
            model(x(1.0)).backward()
        model.zero_grad()
        model(x(float(transport.rank))).backward()
        assert model.inner.weight.grad[0, 0] == 0.5
        return plain(str(told.value))

    note = "  rank 1, pass 2, forward: KeyboardInterrupt (test_forward.py:LINE in forward)\n"
    assert run_ranks(worker, 2) == [FAILED.format(rank, 2, "rank 1", note) for rank in (0, 1)]


def test_two_of_three_ranks_are_named() -> None:
    found = run_ranks(lambda t: goes_on(t, lambda rank, number: rank > 0 and number == 2, 3 + (t.rank > 0)), 3)
    told = FAILED.format("{0}", 2, "ranks 1, 2", NOTE.format(1, 2) + NOTE.format(2, 2))
    for rank in range(3):
        assert f"PeerError: {told.format(rank)}" in found[rank]


@pytest.mark.parametrize("world", [2, 3])
def test_a_forward_that_fails_on_every_rank_is_nobodys_news(world: int) -> None:
    for seen in run_ranks(lambda t: goes_on(t, lambda rank, number: number in (1, 3)), world):
        assert [entry for entry in seen if isinstance(entry, str)] == ["ValueError: bad token"] * 2
        assert seen[1::2] == [20 + (world - 1) / 2, 40 + (world - 1) / 2]


@pytest.mark.parametrize("world", [2, 3])
def test_where_forward_fails_on_all_it_is_counted(world: int) -> None:
    """A second failure on one rank alone left out a batch of that rank, and the rest was mixed in silence."""

    def fails(rank: int, number: int) -> bool:
        return number == 2 or (rank == world - 1 and number == 3)

    found = run_ranks(lambda t: goes_on(t, fails, 4 + (t.rank == world - 1)), world)
    notes = "".join(NOTE.format(rank, 2) for rank in range(world))
    told = FAILED.format("{0}", 2, f"rank {world - 1} more often than elsewhere", notes)
    for rank, seen in enumerate(found):
        assert seen[2 + (rank == world - 1)] == f"PeerError: {told.format(rank)}"
        assert seen[-1] == pytest.approx(sum(range(world)) / world + 40 + 10 / world)


def test_a_checkpoint_around_the_module_stops_its_forward_and_that_is_no_failure() -> None:
    """The ranks told each other of one in every pass, and where they were not alike all raised."""

    def worker(transport):
        model = Model()
        stretto.attach(model, transport=transport)
        for _ in range(3):
            model.zero_grad()
            batch = x(1.0 + transport.rank).requires_grad_()
            loss = checkpoint(model, batch, use_reentrant=False) if transport.rank else model(batch)
            loss.backward()
            assert model.inner.weight.grad[0, 0] == 1.5

    run_ranks(worker, 2)


# Backward, before the first gradient


def all_are_told(prepare) -> None:
    """Of rank 1's second backward, which fails before a gradient. ``prepare(transport)`` gives what makes a loss."""

    def worker(transport):
        loss_of, seen = prepare(transport), []
        for number in range(3 + transport.rank):
            loss = loss_of(transport.rank == 1 and number == 1)
            try:
                loss.backward()
            except (ValueError, stretto.PeerError) as error:
                seen.append((number, type(error).__name__))
        return seen

    assert run_ranks(worker, 2) == [[(1, "PeerError")], [(1, "ValueError"), (2, "PeerError")]]


def test_a_backward_that_reaches_no_sparse_parameter_is_told_where_all_are_sparse() -> None:
    class Sparse(torch.nn.Embedding):
        def forward(self, fail):
            return Behind.apply(super().forward(torch.tensor([1])).sum(), lambda: raises(fail))

    def prepare(transport):
        model = Sparse(2, 2, sparse=True)
        stretto.attach(model, transport=transport)
        return model

    all_are_told(prepare)


def test_forward_on_one_rank_and_backward_on_another_are_told_together() -> None:
    def worker(transport):
        kind = FailsInBackward if transport.rank == 2 else Model
        return goes_on(transport, lambda rank, number: rank > 0 and number == 2, 3 + (transport.rank > 0), kind=kind)

    notes = NOTE.format(1, 2) + IN_BACKWARD.format(2, 2)
    for rank, seen in enumerate(run_ranks(worker, 3)):
        told = FAILED.replace("forward failed", "forward or backward failed").format(rank, 2, "ranks 1, 2", notes)
        assert f"PeerError: {told}" in seen


def test_who_failed_before_a_pass_is_not_blamed_for_one_that_another_gives_up() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

        def forward(self, inputs, early=False, amid=False):
            hidden = Behind.apply(self.first(inputs), lambda: raises(amid))
            return Behind.apply(self.last(hidden).sum(), lambda: raises(early))

    def worker(transport):
        model = Both()
        stretto.attach(model, transport=transport)
        model(x(1.0)).backward()
        if transport.rank == 2:
            with pytest.raises(ValueError, match="bad token"):
                model(x(1.0), early=True).backward()
        try:
            model(x(1.0), amid=transport.rank == 1).backward()
        except (ValueError, stretto.PeerError) as error:
            return plain(str(error)).splitlines()[:2]

    found = run_ranks(worker, 3)
    note = IN_BACKWARD.format(1, 2).removesuffix("\n")
    for rank in (0, 2):
        gave_up = f"rank {rank}, pass 2: backward failed on rank 1, so the mean of this pass lacks gradients."
        assert found[rank] == [gave_up, note]
    assert found[1] == ["bad token"]


def test_a_backward_that_reaches_no_parameter_on_any_rank_is_nobodys_news() -> None:
    for seen in run_ranks(lambda t: goes_on(t, lambda rank, number: number in (1, 3), kind=FailsInBackward), 2):
        assert seen == ["ValueError: bad token", 20.5, "ValueError: bad token", 40.5, 50.5]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    names: tuple[str, ...] = ("a", "b")


@pytest.mark.parametrize("wrapped", [lambda one: (1, [one]), lambda one: {"loss": one, "n": 2}, Output])
def test_outputs_are_found_in_containers(wrapped) -> None:
    def prepare(transport):
        model = FailsInBackward(wrapped)
        stretto.attach(model, transport=transport)

        def loss_of(fail):
            found = model(x(1.0), fail=fail)
            (loss,) = found[1] if isinstance(found, tuple) else [getattr(found, "loss", None) or found["loss"]]
            return loss

        return loss_of

    all_are_told(prepare)


@dataclasses.dataclass
class Unfinished(Output):
    later: float = dataclasses.field(init=False)


def itself(loss: torch.Tensor) -> dict:
    found = {"loss": loss}
    return {**found, "all": found, "found": found.setdefault("itself", found)}


class Watched(dict):
    def values(self):
        raise AssertionError("nobody has asked for them")

    __iter__ = values


class CallsItselfOne(Output):
    __class__ = dict


@pytest.mark.parametrize(
    "wrapped",
    [
        Unfinished,
        itself,
        lambda one: {"loss": one, "kind": Unfinished},
        lambda one: Watched(loss=one),
        CallsItselfOne,
    ],
)
def test_outputs_may_be_whatever_the_program_likes(wrapped) -> None:
    """Not all that looks like a container can be walked through: forward raised, or never ended."""

    def worker(transport):
        model = FailsInBackward(wrapped)
        stretto.attach(model, transport=transport)
        found = model(x(1.0))
        (found.loss if hasattr(found, "loss") else found["loss"]).backward()
        assert model.inner.weight.grad[0, 0] == 1.0

    run_ranks(worker, 2, timeout=10)


def test_a_checkpoint_of_the_module_counts_once_wherever_the_pass_begins(caplog) -> None:
    """On rank 1 the first pass has begun when forward runs again, on rank 0 and in the second pass it has not."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        model.register_parameter("gain", torch.nn.Parameter(torch.ones(1)))
        stretto.attach(model, transport=transport)
        for number in (1, 2):
            loss = checkpoint(model, torch.ones(1, 2), use_reentrant=False, preserve_rng_state=False).sum()
            if transport.rank == number == 1:
                loss = loss * model.gain.sum()
            loss.backward()

    run_ranks(worker, 2, timeout=10)
    assert caplog.messages == []


def test_a_rank_that_has_run_no_forward_so_far_does_not_contradict(caplog) -> None:
    """It only shadowed a pass, and then ran as many as all others: they alone knew that it was more than before."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        for number, idle in enumerate([0, None, 1, None], start=1):
            if transport.rank == idle:
                sync.shadow_pass()
            else:
                sum(model(x(1.0 + transport.rank)) for _ in range(number)).sum().backward()

    run_ranks(worker, 2, timeout=10)
    assert caplog.messages == []


def test_a_rank_without_a_batch_does_not_contradict(caplog) -> None:
    """What it ran before earlier passes, as often as usual, says nothing of this one."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        model.act = lambda x: model.weight.sum() + model.bias.sum() + x.sum()
        sync = stretto.attach(model, transport=transport)
        for number in (1, 1, 2):
            if transport.rank == 2 and number > 1:
                sync.shadow_pass()
            else:
                run = model.act if transport.rank == 1 else model
                sum(run(x(1.0)) for _ in range(number)).sum().backward()

    run_ranks(worker, 3, timeout=10)
    assert caplog.messages == []


def test_no_forward_at_all_is_no_habit(caplog) -> None:
    """A rank that runs another method again, where the others run more forwards than before, has left out no batch."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        model.act = lambda x: model.weight.sum() + model.bias.sum() + x.sum()
        stretto.attach(model, transport=transport)
        for number in (1, 1, 2):
            run = model.act if transport.rank else model
            sum(run(x(1.0)) for _ in range(number)).sum().backward()

    run_ranks(worker, 2, timeout=10)
    assert caplog.messages == []


def test_a_rank_that_ran_another_method_in_between_does_not_contradict(caplog) -> None:
    """It says nothing of its next pass, in which it has run as many forwards more as all others."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        model.act = lambda x: model.weight.sum() + model.bias.sum() + x.sum()
        stretto.attach(model, transport=transport)
        for number in (1, 2, 3):
            run = model.act if number == 2 and transport.rank == 0 else model
            sum(run(x(1.0 + transport.rank)) for _ in range(1 + number // 3)).sum().backward()

    run_ranks(worker, 2, timeout=10)
    assert caplog.messages == []


EPISODES = (2, 3, 7, 4, 1, 6, 5, 8, 9, 8), (3, 4, 3, 9, 5, 7, 1, 2, 3, 5)
REGULAR = (1, 1, 1, 2, 1, 1, 1, 2, 1, 1)


@pytest.mark.parametrize(
    ("numbers", "warns"),
    [
        (EPISODES, False),
        ((REGULAR, REGULAR), False),
        (((*REGULAR, 1, 2), (*REGULAR, 1, 2)), False),
        (((*REGULAR, 1, 3), (*REGULAR, 1, 2)), True),
        (((1, 1, 2), (1, 1, 1)), True),
    ],
    ids=["episodes", "regular", "longer", "a batch left out", "early"],
)
def test_who_runs_another_number_of_forwards_each_time_does_not_contradict(caplog, numbers, warns: bool) -> None:
    """As with episodes of an environment: one longer than all before shows nothing. A penalty now and then is usual."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        stretto.attach(model, transport=transport)
        for count in numbers[transport.rank]:
            sum(model(x(1.0 + transport.rank)) for _ in range(count)).sum().backward()

    run_ranks(worker, 2, timeout=10)
    assert len(caplog.messages) == warns


def test_an_output_of_which_torch_knows_no_node_any_more_may_be_there() -> None:
    """It is refused where it is used, and not before. The output beside it is watched like any other."""

    def with_a_view(loss):
        result = loss.expand(2).clone()
        first, _ = result.unbind()
        return first, result.mul_(2), first

    def prepare(transport):
        model = FailsInBackward(with_a_view)
        stretto.attach(model, transport=transport)
        return lambda fail: model(x(1.0), fail=fail)[1].sum()

    all_are_told(prepare)


def test_a_forward_within_no_sync_is_watched_in_a_backward_outside() -> None:
    """As is advised for a forward that may fail."""

    def prepare(transport):
        model = FailsInBackward()
        sync = stretto.attach(model, transport=transport)

        def loss_of(fail):
            with sync.no_sync():
                return model(x(1.0), fail=fail)

        return loss_of

    all_are_told(prepare)


class HandsOn(Model):
    def forward(self, value, fail=False):
        return super().forward(value.expand(1, 2)), value


def test_an_output_that_another_model_hands_on_is_watched_for_the_one_that_made_it() -> None:
    def prepare(transport):
        model, other = FailsInBackward(), HandsOn()
        for one in (model, other):
            stretto.attach(one, transport=transport)
        return lambda fail: other(model(x(1.0), fail=fail))[1]

    all_are_told(prepare)


def by_grad(sync, model, fail=True):
    """Nothing is to arrive at the parameters."""
    inputs = x(1.0).requires_grad_()
    torch.autograd.grad(model(inputs, fail=fail), inputs)


def by_inputs(sync, model):
    """As an attack on the model does, or a generator's step that leaves the discriminator's gradients alone."""
    inputs = x(1.0).requires_grad_()
    model(inputs, fail=True).backward(inputs=[inputs])


def within_no_sync(sync, model):
    with sync.no_sync():
        model(x(1.0), fail=True).backward()


def frozen(sync, model, fail=True):
    """As a discriminator is while the generator learns, whose own handle tells what fails behind its own outputs."""
    model.requires_grad_(False)
    try:
        model(x(1.0).requires_grad_(), fail=fail).backward()
    finally:
        model.requires_grad_(True)


@pytest.mark.parametrize("how", [by_grad, by_inputs, within_no_sync, frozen])
def test_a_backward_that_is_no_pass_may_fail_on_one_rank(how) -> None:
    def worker(transport):
        model = FailsInBackward()
        sync = stretto.attach(model, transport=transport)
        for number in range(3):
            model.zero_grad()
            if transport.rank == 1 and number == 1:
                with pytest.raises(ValueError, match="bad token"):
                    how(sync, model)
            elif number == 1:  # else forwards differ, which is warned of
                with sync.no_sync():
                    model(x(1.0))
            model(x(1.0 + transport.rank)).backward()
            assert model.inner.weight.grad[0, 0] == 1.5

    run_ranks(worker, 2)


def test_a_backward_that_reached_an_output_and_no_parameter_in_the_end_is_no_pass() -> None:
    def worker(transport):
        model = Model()
        sync = stretto.attach(model, transport=transport)
        for _ in range(3):
            model.zero_grad()
            if transport.rank == 1:
                by_grad(sync, model, fail=False)
                frozen(sync, model, fail=False)
            model(x(1.0 + transport.rank)).backward()
            assert model.inner.weight.grad[0, 0] == 1.5
        assert sync.statistics.passes == 3

    run_ranks(worker, 2)


def asks(model, fail: bool) -> None:
    """As in the backward of an equilibrium or of a score: it goes through the model again."""
    with torch.enable_grad():
        by_grad(None, model, fail=False)
    raises(fail)


class ImplicitModel(Model):
    def forward(self, inputs, fail=None):
        value = super().forward(inputs)
        return value if fail is None else Behind.apply(value, lambda: asks(lambda one, fail: self(one), fail))


def test_a_backward_that_calls_the_engine_again_is_watched_still() -> None:
    found = run_ranks(lambda t: goes_on(t, lambda r, n: r == 1 and n == 2, 3 + t.rank, kind=ImplicitModel), 2)
    note = IN_BACKWARD.format(1, 2)
    assert found[0][:2] == [10.5, f"PeerError: {EARLY.format(0, 2, 'rank 1', note)}"]
    assert found[1][1:3] == ["ValueError: bad token", f"PeerError: {EARLY.format(1, 2, 'rank 1', note)}"]


def test_a_node_that_asked_the_model_and_failed_is_no_failure_of_the_model() -> None:
    """It was watched once the model's part was over, and the end of its graph told of a failure."""

    def fails_within_another(model) -> None:
        inputs = x(1.0).requires_grad_()
        with pytest.raises(ValueError, match="bad token"):
            torch.autograd.grad(Behind.apply(inputs.sum(), lambda: asks(lambda one, fail: model(one), True)), inputs)

    def worker(transport):
        model = Model()
        stretto.attach(model, transport=transport)
        for number in range(3):
            model.zero_grad()
            if transport.rank == 1 and number == 1:
                fails_within_another(model)
            model(x(1.0 + transport.rank)).backward()
            assert model.inner.weight.grad[0, 0] == 1.5

    run_ranks(worker, 2)


def test_another_threads_gradients_of_inputs_end_no_pass() -> None:
    """It has come to an output before the pass began, and ends amid it."""

    def worker(transport):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        sync = stretto.attach(model, transport=transport)
        for _ in range(3):
            model.zero_grad()
            has_come, goes_on = threading.Event(), threading.Event()
            inputs = x(1.0).requires_grad_()
            meeting = Behind.apply(inputs, lambda has_come=has_come, on=goes_on: (has_come.set(), on.wait(10)))
            other = threading.Thread(target=torch.autograd.grad, args=(model(meeting).sum(), inputs))
            own = model(x(1.0))
            other.start()
            assert has_come.wait(10)

            def amid(_, other=other, goes_on=goes_on) -> None:
                goes_on.set()
                other.join(10)

            hook = model[1].bias.register_post_accumulate_grad_hook(amid)
            own.sum().backward()
            hook.remove()
        assert sync.statistics.passes == 3

    run_ranks(worker, 2, timeout=30)


def test_where_the_exception_is_not_seen_its_rank_is_named() -> None:
    """A debugger has taken the place in which it would be seen."""

    def worker(transport):
        unseen = unittest.mock.patch("stretto.engine._is_traced", return_value=False)
        with unseen if transport.rank == 1 else contextlib.nullcontext():
            return goes_on(
                transport, lambda r, number: r == 1 and number == 2, 2 + transport.rank, kind=FailsInBackward
            )

    note = "  rank 1, pass 2, backward: failed; its own log has the error\n"
    found = run_ranks(worker, 2)
    assert found[0][1] == f"PeerError: {EARLY.format(0, 2, 'rank 1', note)}"


def test_the_programs_own_hooks_on_outputs_are_called_with_ours() -> None:
    class Hooked(Model):
        def forward(self, inputs, fail=False):
            loss = super().forward(inputs)
            loss.register_hook(lambda gradient: 2 * gradient)
            return loss

    def worker(transport):
        model, seen = Hooked(), []
        sync = stretto.attach(model, transport=transport)
        for _ in range(3):
            model.zero_grad()
            loss = model(x(1.0 + transport.rank))
            handle = loss.register_hook(lambda gradient: seen.append(float(gradient)))
            loss.register_hook(lambda _: seen.append("removed")).remove()
            loss.backward()
            handle.remove()
            assert model.inner.weight.grad[0, 0] == 3.0
        assert seen == [2.0] * 3
        kept = model(x(1.0))
        sync.detach()
        model.zero_grad()
        kept.backward()
        assert model.inner.weight.grad[0, 0] == 2.0

    run_ranks(worker, 2)


def test_an_output_can_be_saved_without_a_warning() -> None:
    """torch warns of hooks that are lost."""

    def worker(transport):
        model = Model()
        stretto.attach(model, transport=transport)
        torch.save(model(x(1.0)), io.BytesIO())

    run_ranks(worker, 2)


def test_a_failure_before_the_first_pass_of_a_copy_is_quoted() -> None:
    """It has no name yet by which ranks could tell of it: they agree on one in the first pass."""

    def wrap(model, transport):
        return stretto.attach(model, transport=transport, init_sync=False)

    found = run_ranks(lambda t: goes_on(t, lambda r, number: r == 1 and number == 1, 2 + t.rank, wrap), 2)
    assert f"PeerError: {FAILED.format(0, 1, 'rank 1', NOTE.format(1, 1))}" in found[0]


@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_sent_out_of_turn(world: int) -> None:
    """Two models on one group, and a collective of the user's own: the others may wait in any of them."""

    def worker(transport):
        first, second = Model(), Model()
        for model in (first, second):
            stretto.attach(model, transport=transport)
        seen, own = [], []
        for number in range(4 + (transport.rank == 1)):
            try:
                loss = second(x(1.0), fail=transport.rank == 1 and number == 2)
                mine = torch.ones(3)
                transport.all_reduce(mine).wait()
                own.append(mine.tolist())
                first(x(1.0)).backward()
                loss.backward()
            except (ValueError, stretto.PeerError) as error:
                seen.append((number, type(error).__name__))
        return seen, own

    found = run_ranks(worker, world, timeout=10)
    assert [seen for seen, _ in found] == [
        [(2, "ValueError"), (3, "PeerError")] if rank == 1 else [(2, "PeerError")] for rank in range(world)
    ]
    assert all(own == [[float(world)] * 3] * 4 for _, own in found)


def in_no_sync(sync, model):
    return sync.no_sync()


def in_eval(sync, model):
    model.eval()
    return contextlib.nullcontext()


def without_gradients(sync, model):
    return torch.no_grad()


@pytest.mark.parametrize("how", [in_no_sync, in_eval, without_gradients])
def test_a_forward_that_is_tried_again_or_evaluates_may_fail_on_one_rank(how) -> None:
    def worker(transport):
        model = Model()
        sync = stretto.attach(model, transport=transport)
        for number in range(3):
            model.zero_grad()
            if transport.rank == 1 and number == 1:
                with how(sync, model), pytest.raises(ValueError, match="bad token"):
                    model(x(1.0), fail=True)
                model.train()
            model(x(1.0 + transport.rank)).backward()
            assert model.inner.weight.grad[0, 0] == 1.5

    run_ranks(worker, 2)


def test_models_inside_one_another_tell_as_well() -> None:
    def worker(transport):
        model = torch.nn.Sequential(Model(), Model().inner)
        stretto.attach(model[0], transport=transport)
        stretto.attach(model, transport=transport)
        seen = []
        for number in range(3 + transport.rank):
            try:
                hidden = model[0](x(1.0), fail=transport.rank == 1 and number == 1)
                model[1](hidden.expand(1, 2)).sum().backward()
            except (ValueError, stretto.PeerError) as error:
                seen.append((number, type(error).__name__))
        return seen

    found = run_ranks(worker, 2)
    assert found == [[(1, "PeerError")], [(1, "ValueError"), (2, "PeerError")]]


@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_left_out_elsewhere_is_warned_of_once(caplog, world: int) -> None:
    """An exception in the loss is the user's own; so is a loss that reaches no parameter."""

    def worker(transport):
        model = Model()
        stretto.attach(model, transport=transport)
        for number in range(5 + transport.rank % 2):
            loss = model(x(1.0))
            if transport.rank == 1 and number == 2:
                continue
            loss.backward()

    with caplog.at_level(logging.WARNING, "stretto"):
        run_ranks(worker, world)
    counts = "; ".join(f"rank {rank} {2 if rank == 1 else 1}, at most 1 before" for rank in range(world))
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == [MORE.format(rank, 3, counts) for rank in (0, 1)]


@pytest.mark.parametrize("everywhere", [lambda number: 1 + number % 3, lambda number: 3])
def test_forwards_that_are_alike_on_all_ranks_are_no_news(caplog, everywhere) -> None:
    def worker(transport):
        model = Model()
        sync = stretto.attach(model, transport=transport)
        for number in range(6):
            losses = [model(x(1.0)) for _ in range(everywhere(number))]
            for _ in range(transport.rank):  # and these count nowhere
                with sync.no_sync():
                    model(x(1.0))
                with torch.no_grad():
                    model(x(1.0))
                model.eval()(x(1.0))
                model.train()
            sum(losses).backward()

    with caplog.at_level(logging.WARNING, "stretto"):
        run_ranks(worker, 2)
    assert not caplog.records


class Encoder(Model):
    def encode(self, x):
        return self.inner(x).square().sum()


RIGHT = {
    "a method other than forward on some ranks": lambda model, draw: [model, model.encode][draw % 2](x(1.0)),
    "as many forwards as a rank likes": lambda model, draw: sum(model(x(1.0)) for _ in range(1 + draw % 2)),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_ranks_that_run_the_module_each_in_its_own_way_leave_out_no_batch(caplog, kind: str) -> None:
    """They were told that their passes are shifted, though none was."""

    def worker(transport):
        model = Encoder()
        stretto.attach(model, transport=transport)
        for number in range(12):  # rank 0 draws 1 0 1 0 ..., rank 1 1 1 0 0 1 1 ...
            RIGHT[kind](model, 1 - (number // (1 + transport.rank)) % 2).backward()

    with caplog.at_level(logging.WARNING, "stretto"):
        run_ranks(worker, 2)
    assert not caplog.records


# Where the watch stands


def attached(model: torch.nn.Module, act) -> None:
    """On two ranks, with the model attached: ``act(model, sync)``."""

    def worker(transport):
        own = copy.deepcopy(model)
        act(own, stretto.attach(own, transport=transport))

    run_ranks(worker, 2)


def test_forwards_that_no_backward_follows_are_not_compared_with_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a policy plays: while a pass is recorded each forward took longer than the one before."""
    looks = 0

    class Tick(int):
        def __ge__(self, other: int) -> bool:
            nonlocal looks
            looks += 1
            return int(self) >= int(other)

        def __lt__(self, other: int) -> bool:
            return not self >= other

    def worker(transport: object) -> None:
        model = torch.nn.Linear(1, 1)
        stretto.attach(model, transport=transport)
        for _ in range(4):
            model(torch.ones(1, 1)).sum().backward()
        for _ in range(100):
            model(torch.ones(1, 1))

    monkeypatch.setattr(recorder, "now", lambda: Tick(time.monotonic_ns()))
    run_ranks(worker, 2)
    assert 2 * 99 <= looks < 10 * 2 * 99


@pytest.mark.parametrize("kind", [Model, OwnState])
def test_copies_of_an_attached_module_are_plain(kind: type) -> None:
    def act(model, sync):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        for one in [*copies, torch.load(file, weights_only=False)]:
            shallow = kind is OwnState and one is copies[1]  # its state is the other's own dictionary
            assert shallow or one._compiled_call_impl is None
            assert torch.equal(one(x(1.0)), model(x(1.0)))

    attached(kind(), act)


def functional_clone(model: torch.nn.Module) -> torch.nn.Module:
    """As ``higher`` and learn2learn make them for meta-learning: with parameters that are not leaves."""
    clone = type(model).__new__(type(model))
    clone.__dict__ = model.__dict__.copy()
    clone._parameters = {name: one.clone() for name, one in model._parameters.items()}
    clone._modules = {name: functional_clone(one) for name, one in model._modules.items()}
    return clone


def replica(model: torch.nn.Module) -> torch.nn.Module:
    """As torch's ``DataParallel`` makes them."""
    one = model._replicate_for_data_parallel()
    one._modules = {name: functional_clone(layer) for name, layer in model._modules.items()}
    return one


@pytest.mark.parametrize("how", [functional_clone, replica])
@pytest.mark.parametrize("when", ["attached", "detached", "the original is gone"])
def test_a_clone_that_has_copied_the_slot_runs_its_own_forward(how, when: str) -> None:
    """It ran the attached module's, with that one's weights, and MAML adapted nothing."""

    def worker(transport):
        model = Model()
        handle = stretto.attach(model, transport=transport)
        clone, before = how(model), model(x(1.0)).item()
        with torch.no_grad():
            for layer in clone.children():
                layer.weight.mul_(0)
                layer.bias.fill_(0.5)
        if when == "detached":
            handle.detach()
        elif when == "the original is gone":
            del model, handle
            gc.collect()
        out, wanted = clone(x(1.0)), Model.forward(clone, x(1.0))
        return out.item() != before, torch.equal(out, wanted), out.grad_fn is not None

    assert run_ranks(worker, 2) == [(True, True, True)] * 2


def test_a_clone_of_a_module_with_two_handles_runs_its_own_forward() -> None:
    def worker(transport):
        model = Model()
        for left_out in ("*.weight", "*.bias"):
            stretto.attach(model, transport=transport, ignore=[left_out])
        clone = functional_clone(model)
        with torch.no_grad():
            for layer in clone.children():
                layer.weight.mul_(2)
        return torch.equal(clone(x(1.0)), Model.forward(clone, x(1.0)))

    assert run_ranks(worker, 2) == [True, True]


def test_a_clone_that_is_exported_has_its_own_forward() -> None:
    """Without dynamo, which says all the same that it compiles."""

    def act(model, sync):
        if sync.rank:
            return  # torch exports in one thread at a time
        clone = functional_clone(model)
        for layer in clone._modules.values():
            layer._parameters = {name: torch.nn.Parameter(one.detach() * 2) for name, one in layer._parameters.items()}
        exported = torch.export.export(clone, (x(1.0),), strict=False).module()
        assert torch.equal(exported(x(1.0)), Model.forward(clone, x(1.0)))

    attached(Model(), act)


def test_a_forward_that_failed_lets_its_inputs_go_when_its_frames_are_cleared() -> None:
    """As unittest does, and who tries again with less when memory is short."""

    def act(model, sync):
        wide = torch.ones(1, 17)
        gone = weakref.ref(wide)
        with pytest.raises(RuntimeError) as caught:
            model(wide)
        del wide
        traceback.clear_frames(caught.value.__traceback__)
        gc.collect()
        assert gone() is None

    attached(Model(), act)


def test_detach_leaves_the_module_as_it_was() -> None:
    def worker(transport):
        model = Model()
        before = {*vars(model)}
        stretto.attach(model, transport=transport).detach()
        return {*vars(model)} == before

    assert run_ranks(worker, 2) == [True, True]


def test_detach_clears_the_slot_and_keeps_what_was_compiled_in_place() -> None:
    class Compiled:
        calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return torch.zeros(())

    def worker(transport):
        plain_one, compiled = Model(), Model()
        slot = compiled._compiled_call_impl = Compiled()
        syncs = [stretto.attach(model, transport=transport) for model in (plain_one, compiled)]
        compiled(x(1.0))
        for sync in syncs:
            sync.detach()
        assert slot.calls == 1 and compiled._compiled_call_impl is slot and plain_one._compiled_call_impl is None

    run_ranks(worker, 2)


def test_what_is_compiled_in_place_after_attaching_stays() -> None:
    def act(model, sync):
        model.compile(backend="eager")
        mine = model._compiled_call_impl
        sync.detach()
        assert model._compiled_call_impl is mine

    attached(Model(), act)


def test_what_is_compiled_in_place_after_attaching_is_watched_from_the_next_pass_on() -> None:
    """It took the place of what watches forward."""

    def act(model, sync):
        seen = []
        sync.observe(SimpleNamespace(forward_ended=seen.append))
        calls = model._compiled_call_impl = functools.partial(Model._call_impl, model)  # as module.compile() does
        for _ in range(3):
            model(x(1.0)).backward()
        sync.detach()
        assert seen == [2, 3] and model._compiled_call_impl is calls

    attached(Model(), act)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_handles_either_may_leave_first(first) -> None:
    """What watched for the one that had attached before stayed in the slot, beneath the other's."""

    def worker(transport):
        model = Model()
        before = {*vars(model)}
        handles = [stretto.attach(model, transport=transport, ignore=[out]) for out in ("*.weight", "*.bias")]
        gone = weakref.ref([model._compiled_call_impl.beneath, model._compiled_call_impl][first])
        handles.pop(first).detach()
        seen = []
        handles[0].observe(SimpleNamespace(forward_ended=seen.append))
        model(x(1.0)).backward()
        left = gone() is None
        handles.pop().detach()
        return left, seen, {*vars(model)} == before

    assert run_ranks(worker, 2) == [(True, [1], True)] * 2


@pytest.mark.parametrize("wrapper_elsewhere", [False, True], ids=["alone", "another thread in a wrapper's forward"])
def test_the_compiler_takes_an_attached_module_whole_and_once(
    wrapper_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = torch._dynamo.testing.CompileCounter()
    looks_at, code = torch._dynamo.convert_frame.ConvertFrameAssert.__call__, []

    def listed(self, frame, *rest, **named):
        code.append(frame.f_code)
        return looks_at(self, frame, *rest, **named)

    def worker(transport):
        model = Model()
        stretto.attach(model, transport=transport)
        if transport.rank == 0:
            compiled = torch.compile(model, backend=counter, fullgraph=True)
            for _ in range(4):
                compiled(x(1.0))

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.convert_frame.ConvertFrameAssert, "__call__", listed)
    elsewhere = stretto.DistributedDataParallel(Model()) if wrapper_elsewhere else None
    monkeypatch.setattr(TorchDDP, "_active_ddp_module", elsewhere)
    run_ranks(worker, 2)
    assert counter.frame_count == 1
    ours = (str(Path(stretto.__file__).parent), __file__)  # and not a finaliser of what another test has left
    looked_at = [one.co_name for one in code if one.co_filename.startswith(ours)]
    assert looked_at == ["forward"], "frames beside the model's, which it may refuse"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported):DeprecationWarning")
def test_scripting_an_attached_module() -> None:
    def act(model, sync):
        if sync.rank == 0:  # it is not made for threads
            assert torch.equal(torch.jit.script(model)(x(1.0)), model(x(1.0)))

    attached(torch.nn.Sequential(torch.nn.Linear(2, 1)), act)
