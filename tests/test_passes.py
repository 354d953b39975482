"""What a pass does where ranks differ: absent gradients, late ones, a backward that fails. Graphs: test_graphs.py."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import types
import unittest.mock
import weakref

import models
import pytest
import torch
from models import checkpoint

import stretto
from stretto.failing import Failing
from stretto.reducer import reducer_of
from stretto.testing import LocalTransport, RecordingTransport, run_ranks


def fill(module: torch.nn.Module) -> None:
    """The same values in every thread: torch's default generator is shared between thread ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values)


class Branches(torch.nn.Module):
    """Three branches; ``forward`` takes those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(3, 3) for _ in range(3))
        fill(self)

    def forward(self, inputs: torch.Tensor, use: str) -> torch.Tensor:
        for name in use:
            inputs = torch.tanh(getattr(self, name)(inputs))
        return inputs.sum()


def inputs_of(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank))


def expected(world: int, uses: list[str], numbers: int = 0) -> dict[str, torch.Tensor | None]:
    """The mean over ranks, computed by one process; None for what no rank used."""
    model = Branches()
    for rank in range(world):
        if uses[rank]:
            (model(inputs_of(rank, numbers), uses[rank]) / world).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("cap", [1e-6, 1.0])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("uses", [["a", "b", "c"], ["ab", "b", "b"], ["abc"] * 3, ["c"] * 3, ["ab", "c", "a"]])
def test_parameters_that_some_or_no_rank_used(uses: list[str], world: int, cap: float) -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport, bucket_cap_mb=cap)
        for _ in range(3):
            model.zero_grad()
            model(inputs_of(transport.rank), uses[transport.rank]).backward()
        return gradients(model)

    found = run_ranks(worker, world)
    wanted = expected(world, uses)
    for one in found:
        assert_same(one, wanted)
    assert all(
        (a is b is None) or torch.equal(a, b)
        for one in found[1:]
        for a, b in zip(one.values(), found[0].values(), strict=True)
    )


@pytest.mark.parametrize("world", [2, 3])
def test_another_subset_in_every_pass_and_on_every_rank(world: int) -> None:
    choices = [["ab", "bc", "a"], ["c"] * 3, ["abc", "a", "b"], ["b"] * 3, ["a", "c", "b"], ["abc"] * 3]

    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport, bucket_cap_mb=5e-5)
        found = []
        for uses in choices:
            model.zero_grad()
            model(inputs_of(transport.rank), uses[transport.rank]).backward()
            found.append(gradients(model))
        return found

    for found in run_ranks(worker, world):
        for uses, one in zip(choices, found, strict=True):
            assert_same(one, expected(world, uses))


def test_gradient_of_what_nobody_used_keeps_its_bits() -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport)
        model(inputs_of(transport.rank), "abc").backward()
        before = model.c.weight.grad.clone()
        preset = torch.full_like(model.b.weight, 7.0 + transport.rank)
        model.b.weight.grad = preset
        model(inputs_of(transport.rank, 1), "a").backward()
        assert torch.equal(model.c.weight.grad, before)
        assert model.b.weight.grad is preset
        assert torch.equal(preset, torch.full_like(preset, 7.0 + transport.rank))

    run_ranks(worker, 3)


@pytest.mark.parametrize("cap", [1e-6, 5e-5, 1.0])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("ranks_that_reuse", [{0, 1, 2}, {1}])
def test_gradient_that_comes_again_after_its_bucket_left(
    ranks_that_reuse: set[int], world: int, set_to_none: bool, cap: float
) -> None:
    """A layer used plainly and in a reentrant checkpoint before it: it arrives, its bucket leaves, it arrives again."""

    def loss_of(model: Branches, inputs: torch.Tensor, reuse: bool) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = checkpoint(model.c if reuse else model.b, inputs, use_reentrant=True)
        return model.c(model.b(model.a(hidden))).sum()

    def worker(transport):
        recording = RecordingTransport(transport)
        model = Branches()
        sync = stretto.attach(model, transport=recording, bucket_cap_mb=cap)
        for number in range(4):
            model.zero_grad(set_to_none=set_to_none)
            recording.calls.clear()
            loss_of(model, inputs_of(transport.rank, number), transport.rank in ranks_that_reuse).backward()
            reference = Branches()
            for rank in range(world):
                (loss_of(reference, inputs_of(rank, number), rank in ranks_that_reuse) / world).backward()
            assert_same(gradients(model), {n: p.grad for n, p in reference.named_parameters()})
        assert [kind for kind, _ in recording.calls] == ["all_reduce"] * len(sync.plan.buckets), "learnt by now"
        return [p.grad.clone() for p in model.parameters()]

    first, *others = run_ranks(worker, world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


class Inside(torch.autograd.Function):
    """A user's own reentrant checkpoint."""

    @staticmethod
    def forward(ctx, layer, inputs):
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        return layer(inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(inputs), gradient)
        return None, inputs.grad


def loss_with_reuse(model: Branches, inputs: torch.Tensor, reuse: bool, own: bool) -> torch.Tensor:
    inputs = inputs.clone().requires_grad_()
    layer = model.c if reuse else torch.tanh
    hidden = Inside.apply(layer, inputs) if own else checkpoint(layer, inputs, use_reentrant=True)
    return model.c(model.b(model.a(hidden))).sum()


@pytest.mark.parametrize("begins", [0, 3, 5])
@pytest.mark.parametrize("checkpointed_before", [True, False])
def test_a_layer_newly_used_plainly_and_in_a_reentrant_checkpoint(begins: int, checkpointed_before: bool) -> None:
    """Also where gradients have arrived in one order all the time, and their slots are ``.grad`` at once."""

    def loss_of(model: Branches, number: int, rank: int) -> torch.Tensor:
        inputs = inputs_of(rank, number)
        if number < begins and not checkpointed_before:
            return model.c(model.b(model.a(inputs))).sum()
        return loss_with_reuse(model, inputs, number >= begins, own=False)

    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        transport.all_gather_object(None)  # threads share the count of checkpoints: none before all have attached
        for number in range(8):
            model.zero_grad()
            loss_of(model, number, transport.rank).backward()
            reference = Branches()
            for rank in range(2):
                (loss_of(reference, number, rank) / 2).backward()
            assert_same(gradients(model), {n: p.grad for n, p in reference.named_parameters()})

    run_ranks(worker, 2)


@pytest.mark.parametrize("observed", [False, True])
def test_one_more_gradient_than_ever_before_after_its_slot_was_handed_out_is_told_and_then_known(observed) -> None:
    """Of a checkpoint that is not torch's, so that nothing shows it beforehand; observed from amid it on, too."""

    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        watch = types.SimpleNamespace(gradient_ready=lambda number, name: None)
        for number in range(7):
            reuse = number >= 3
            model.zero_grad()
            if observed and number == 3:
                model.a.weight.register_hook(lambda _: sync.observe(watch))
            try:
                loss_with_reuse(model, inputs_of(transport.rank, number), reuse, own=True).backward()
            except stretto.UnsupportedError as error:
                assert number == 3
                assert str(error) == (
                    f"rank {transport.rank}, pass 4: c.bias, c.weight got one more gradient than in earlier passes, "
                    "after the bucket had left (a backward inside backward, around a layer that is used again).\n"
                    "Do not step with these gradients: zero_grad() and go on; the next pass expects it. To avoid this, "
                    "use torch.utils.checkpoint(..., use_reentrant=False), or attach(..., delay=True)."
                )
                continue
            assert number != 3
            reference = Branches()
            for rank in range(2):
                (loss_with_reuse(reference, inputs_of(rank, number), reuse, own=True) / 2).backward()
            assert_same(gradients(model), {n: p.grad for n, p in reference.named_parameters()})
        return True

    assert run_ranks(worker, 2) == [True, True]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, fail):
        ctx.fail = fail
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise ValueError("this rank's backward fails")
        return gradient, None


def failing_loss(model: Branches, inputs: torch.Tensor, fail: bool, where: str) -> torch.Tensor:
    hidden = inputs.clone().requires_grad_()
    if where == "after all gradients":
        hidden = Fails.apply(hidden, fail)
    hidden = model.a(hidden)
    if where == "amid":
        hidden = Fails.apply(hidden, fail)
    return model.c(model.b(hidden)).sum()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["amid", "after all gradients"])
@pytest.mark.parametrize("world, failing", [(2, {0}), (2, {1}), (3, {0, 2})])
@pytest.mark.parametrize("in_pass", [0, 2])
def test_backward_that_fails_is_told_to_the_others_and_the_next_pass_is_right(
    failing: set[int], world: int, where: str, in_pass: int, set_to_none: bool
) -> None:
    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for number in range(5):
            model.zero_grad(set_to_none=set_to_none)
            fails = number == in_pass and transport.rank in failing
            raised: type[Exception] | None = None
            try:
                failing_loss(model, inputs_of(transport.rank, number), fails, where).backward()
            except (ValueError, stretto.PeerError) as error:
                raised = type(error)
            if number == in_pass:
                with sync.no_sync():
                    model(inputs_of(transport.rank), "abc").backward()  # must not touch what is still under way
                model.zero_grad(set_to_none=set_to_none)
                assert raised is (ValueError if fails else stretto.PeerError)
            else:
                assert raised is None
                reference = Branches()
                for rank in range(world):
                    (failing_loss(reference, inputs_of(rank, number), False, where) / world).backward()
                assert_same(gradients(model), {n: p.grad for n, p in reference.named_parameters()})
        return True

    assert all(run_ranks(worker, world))


def test_peer_error_says_rank_pass_and_what_to_do() -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport)
        try:
            failing_loss(model, inputs_of(0), transport.rank == 1, "amid").backward()
        except stretto.PeerError as error:
            return str(error)
        except ValueError:
            return None

    assert re.sub(r":\d+ in", ":LINE in", run_ranks(worker, 2)[0]) == (
        "rank 0, pass 1: backward failed on rank 1, so the mean of this pass lacks gradients.\n"
        "  rank 1, pass 1, backward: ValueError: this rank's backward fails (test_passes.py:LINE in backward)\n"
        "Do not step with these gradients: zero_grad() and go on, on all ranks."
    )


def test_buffers_follow_rank_0_at_settle_also_when_reassigned() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.norm = torch.nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1 + inputs.sum().detach()
            return self.layer(self.norm(inputs)).sum()

    def worker(transport):
        model = Counting()
        stretto.attach(model, transport=transport)
        before = []
        for number in range(3):
            loss = model(inputs_of(transport.rank, number))
            before.append(model.count.clone())
            loss.backward()
        return before[-1], model.count, model.norm.running_mean, model.norm.num_batches_tracked

    first, second = run_ranks(worker, 2)
    assert not torch.equal(first[0], second[0]), "buffers must not be touched before backward ends"
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    assert torch.equal(first[0], first[1]), "rank 0 keeps its own"


def test_buffers_none_leaves_each_rank_its_own() -> None:
    def worker(transport):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        stretto.attach(model, transport=transport, buffers="none")
        model(inputs_of(transport.rank)).sum().backward()
        return model[0].running_mean

    first, second = run_ranks(worker, 2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("world", [2, 3])
def test_an_undefined_gradient_is_none_given(world: int) -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport)
        for number in range(4):
            model.zero_grad()
            loss = model(inputs_of(transport.rank), "ab")
            if number % 2:
                loss = torch._C._functions.UndefinedGrad()(loss)
            loss.backward()
            assert_same(gradients(model), expected(world, [""] * 3 if number % 2 else ["ab"] * 3))

    run_ranks(worker, world)


def expected_alone(rank: int, use: str) -> dict[str, torch.Tensor | None]:
    model = Branches()
    model(inputs_of(rank), use).backward()
    return gradients(model)


@pytest.mark.parametrize("when", ["before", "after", "later"])
@pytest.mark.parametrize("how", ["the same", "another branch each time", "in a reentrant checkpoint"])
def test_hooks_of_the_program_see_each_gradient_where_it_arrives(when: str, how: str) -> None:
    """Its own and not a sum under way; also that which fills a bucket, and those that may come again."""
    parts = ["a", "b"] if how == "another branch each time" else ["ab"]

    def worker(transport):
        model, seen = Branches(), []

        def hook() -> None:
            for name, one in model.named_parameters():
                one.register_post_accumulate_grad_hook(
                    lambda one, name=name: seen.append((name, None if one.grad is None else one.grad.clone()))
                )

        if when == "before":
            hook()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-5)
        if when == "after":
            hook()
        for number in range(10):
            if when == "later" and number == 5:
                hook()
            model.zero_grad()
            seen.clear()
            part = parts[number % len(parts)]
            x = inputs_of(transport.rank)
            if how == "in a reentrant checkpoint":
                x.requires_grad_(True)
                checkpoint(model, x, part, use_reentrant=True).backward()
            else:
                model(x, part).backward()
            assert_same(gradients(model), expected(2, [part] * 2))
            alone = expected_alone(transport.rank, part)
            if when != "later" or number >= 5:
                assert {name for name, _ in seen} == {name for name, one in alone.items() if one is not None}
            for name, one in seen:
                assert one is not None and torch.equal(one, alone[name])
        assert sync.graph_changed == (len(parts) > 1)

    run_ranks(worker, 2)


def step_in_backward(model: torch.nn.Module) -> None:
    def step(one: torch.nn.Parameter) -> None:
        one.data.sub_(one.grad)
        one.grad = None

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)


def told_of_hooks(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {one.getMessage() for one in caplog.records if "had no gradient when" in one.getMessage()}


def hooks_may_have(rank: int, number: int, names: str) -> str:
    return (
        f"rank {rank}, pass {number}: parameters with a hook of your program (register_post_accumulate_grad_hook) "
        f"had no gradient when it was to be averaged: {names}.\n"
        "If the hook steps and clears .grad, each rank trains by itself. Step after backward; or hand the optimizer "
        "to torch's _apply_optimizer_in_backward and wrap the module in stretto.DistributedDataParallel."
    )


@pytest.mark.parametrize("cap", [1.0, 1e-6])
@pytest.mark.parametrize("passes", [-1, 0, 1, 2, 5])
def test_gradients_that_a_hook_takes_away_are_named(passes: int, cap: float, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer in backward of PyTorch's tutorial, from before attaching or later. First in doubt, then surely."""

    def worker(transport):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        if passes < 0:
            step_in_backward(model[1])
        stretto.attach(model, transport=transport, bucket_cap_mb=cap)
        for number in range(10):
            if number == passes:
                step_in_backward(model[1])
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()

    with pytest.raises(stretto.UnsupportedError) as caught:
        run_ranks(worker, 2)
    first = max(passes, 0) + 1
    assert told_of_hooks(caplog) == {hooks_may_have(rank, first, "1.weight, 1.bias") for rank in range(2)}
    assert str(caught.value).replace("rank 1", "rank 0") == (
        f"rank 0, pass {first + 1}: the gradient of 1.weight, 1.bias was taken away before it was averaged: a hook "
        "of your program steps or clears it as soon as it arrives.\n"
        "Step after backward; or hand the optimizer to torch's _apply_optimizer_in_backward and wrap the module in "
        "stretto.DistributedDataParallel."
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("passes", [0, 5])
def test_torchs_optimizer_in_backward_beside_attach_is_named(passes: int, caplog: pytest.LogCaptureFixture) -> None:
    """It hooks the node behind a parameter, which nobody sees."""

    from torch.distributed.optim import _apply_optimizer_in_backward  # imports torch.jit, which warns

    def worker(transport):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        stretto.attach(model, transport=transport)
        for number in range(8):
            if number == passes:
                _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()

    with pytest.raises(stretto.UnsupportedError, match="was taken away before it was averaged: a hook of your"):
        run_ranks(worker, 2)


def test_undefined_gradients_of_parameters_with_hooks_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """They are mentioned once, each by its name; those to which nothing comes are unused ones."""

    def worker(transport):
        model, seen = Branches(), []
        sync = stretto.attach(model, transport=transport)
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(seen.append)
        for number in range(6):
            model.zero_grad()
            loss = model(inputs_of(transport.rank), "a" if number < 3 else "ab")
            (torch._C._functions.UndefinedGrad()(loss) if number != 4 else loss).backward()
            used = ["ab"] * 2 if number == 4 else [""] * 2
            assert_same(gradients(model), expected(2, used))
        return sync.statistics.passes

    assert run_ranks(worker, 2) == [6, 6]
    assert told_of_hooks(caplog) == {
        hooks_may_have(rank, number, names)
        for rank in range(2)
        for number, names in ((1, "a.weight, a.bias"), (4, "b.weight, b.bias"))
    }
    unused = [one.getMessage() for one in caplog.records if "in any pass so far" in one.getMessage()]
    assert len(unused) == 1 and unused[0].startswith(
        "rank 0, pass 3: b.weight, b.bias, c.weight, c.bias had no gradient"
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_returns_something_is_refused_in_torchs_words(when: str) -> None:
    """torch calls the hooks behind it with what it has returned, in the place of the parameter, and raises then."""

    def worker(transport):
        model, handles, told = Branches(), [], []

        def hook() -> None:
            handles.extend(one.register_post_accumulate_grad_hook(lambda one: one.grad) for one in model.parameters())

        if when == "before":
            hook()
        stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for number in range(6):
            if when == "after" and number == 2:
                hook()
            model.zero_grad()
            try:
                model(inputs_of(transport.rank), "ab").backward()
            except RuntimeError as error:
                told.append(str(error))
                continue
            finally:
                if number == 4:
                    for handle in handles:
                        handle.remove()
            assert_same(gradients(model), expected(2, ["ab"] * 2))
        return told

    told = ["Tensor post accumulate grad hooks should return None."] * (5 if when == "before" else 3)
    assert run_ranks(worker, 2) == [told, told]


def test_what_is_never_used_is_known_by_its_name_when_the_plan_follows_the_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport)
        for use in ("ac", "c", "b"):
            model.a.requires_grad_(use == "ac")
            model(inputs_of(transport.rank), use).backward()
        return sync.statistics.plans

    assert min(run_ranks(worker, 2)) > 1
    assert not [one for one in caplog.records if "in any pass so far" in one.getMessage()]


@pytest.mark.parametrize("cap", [1.0, 1e-6])
def test_what_was_accumulated_and_dropped_was_taken_by_nobody(cap: float, caplog: pytest.LogCaptureFixture) -> None:
    """A gradient that came in a backward pass without synchronisation, of a parameter that later comes without."""

    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=cap)
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda _: None)

        def backward(*, undefined: bool) -> None:
            loss = model(inputs_of(transport.rank), "ab")
            (torch._C._functions.UndefinedGrad()(loss) if undefined else loss).backward()

        for undefined in (True, True, False, True):
            model.zero_grad()
            with sync.no_sync():
                backward(undefined=False)
            model.zero_grad()
            backward(undefined=undefined)
            assert_same(gradients(model), expected(2, [""] * 2 if undefined else ["ab"] * 2))

    run_ranks(worker, 2)


@pytest.mark.parametrize("table", ["ours", "torch's"])
def test_hooks_that_come_and_go_leave_the_overlap_as_it_is(table: str) -> None:
    """One registered anew lies behind ours, which sees to it that it is the last again. In a table of torch's it is
    moved when it is called, and is the last from the next pass on."""

    def worker(transport):
        model, during = Branches(), []
        if table == "torch's":
            for one in model.parameters():
                one.register_post_accumulate_grad_hook(lambda _: None)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        watch = types.SimpleNamespace(
            pass_started=lambda number: during.append([]),
            bucket_launched=lambda number, bucket, nbytes: during[-1].append(bucket),
            backward_ended=lambda number: during[-1].append("end"),
        )
        sync.observe(watch)
        for number in range(8):
            handles = []
            if table == "ours" or number == 4:
                handles = [one.register_post_accumulate_grad_hook(lambda _: None) for one in model.parameters()]
            model.zero_grad()
            model(inputs_of(transport.rank), "abc").backward()
            assert_same(gradients(model), expected(2, ["abc"] * 2))
            for handle in handles if table == "ours" else ():
                handle.remove()
        return during

    for during in run_ranks(worker, 2):
        for events in during[5:]:
            assert len(events) == 7 and events.index("end") >= 5, "buckets leave while backward runs"


def test_gradients_may_be_observed_from_amid_a_backward_on() -> None:
    """By a hook, or another thread: the pass has followed its schedule so far, and is looked at from there on."""

    def worker(transport):
        model, seen = Branches(), []
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for number in range(6):
            model.zero_grad()
            output = model(inputs_of(transport.rank), "abc")
            if number == 4:
                watch = types.SimpleNamespace(gradient_ready=lambda number, name: seen.append(number))
                model.c.weight.register_hook(lambda _, watch=watch: sync.observe(watch) if not seen else None)
            output.backward()
            assert_same(gradients(model), expected(2, ["abc"] * 2))
        return seen

    for seen in run_ranks(worker, 2):
        assert 0 < seen.count(5) < seen.count(6) == 6


def test_two_devices_threads_that_bring_their_first_gradients_at_once_are_no_nested_task() -> None:
    """The second has found the gate closed, and waits for the lock until the first has begun the pass."""

    def worker(transport):
        model = torch.nn.ParameterDict({"one": torch.zeros(2), "other": torch.zeros(2)})
        sync = stretto.attach(model, transport=transport)
        reducer, threads = sync._reducer, []

        def at_once(_: object) -> None:
            model["other"].grad = torch.full((2,), 4.0 * transport.rank)
            threads.append(threading.Thread(target=reducer._first_arrival, args=(model["other"],)))
            threads[-1].start()

        sync.observe(types.SimpleNamespace(pass_started=at_once))
        model["one"].register_post_accumulate_grad_hook(lambda _: threads[-1].join())
        for _ in range(4):
            model.zero_grad()
            model["one"].sum().backward()
            assert model["one"].grad.tolist() == [1.0, 1.0] and model["other"].grad.tolist() == [2.0, 2.0]
        return reducer.tracker.nested

    assert run_ranks(worker, 2) == [False, False]


def test_a_sparse_gradient_that_no_module_announces_is_refused_by_name() -> None:
    def worker(transport):
        model = torch.nn.Embedding(5, 2)
        stretto.attach(model, transport=transport)
        torch.nn.functional.embedding(torch.tensor([1, 3]), model.weight, sparse=True).sum().backward()

    with pytest.raises(stretto.UnsupportedError) as caught:
        run_ranks(worker, 2)
    assert str(caught.value).replace("rank 1", "rank 0") == (
        "rank 0, pass 1: the gradient of weight is sparse, which their modules do not declare.\n"
        "Name them: stretto.attach(model, sparse=['weight']); or make them dense."
    )


def test_detach_from_a_hook_is_refused_while_backward_runs() -> None:
    """A part of the gradients would be averaged, and the rest not."""

    def worker(transport):
        model = Branches()
        sync, refused = stretto.attach(model, transport=transport), []

        def detach(_: torch.Tensor) -> None:
            try:
                sync.detach()
            except stretto.SetupError as error:
                refused.append(str(error))

        handle = model.a.weight.register_post_accumulate_grad_hook(detach)
        for _ in range(3):
            model.zero_grad()
            model(inputs_of(transport.rank), "ab").backward()
            assert_same(gradients(model), expected(2, ["ab"] * 2))
        handle.remove()
        sync.detach()
        return refused

    for rank, refused in enumerate(run_ranks(worker, 2)):
        assert refused == [
            f"rank {rank}, pass {number}: detach() was called while backward runs.\n"
            "Call it when backward has returned, and not from a hook."
            for number in (1, 2, 3)
        ]


def test_detach_leaves_the_module_as_it_was_and_is_harmless_twice() -> None:
    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport)
        model(inputs_of(transport.rank), "abc").backward()
        before = sync.plan, sync.statistics
        sync.detach()
        sync.detach()
        assert (sync.plan, sync.statistics) == before and before[1].passes == 1
        assert sync.describe() == "detached: backward is left alone, nothing is communicated."
        with pytest.raises(stretto.SetupError) as caught:  # it would say that all is well
            sync.check()
        assert str(caught.value) == (
            f"rank {transport.rank}: check() after detach() knows of no other rank.\nUse it before detach()."
        )
        with pytest.raises(stretto.SetupError, match=r"used_by after detach\(\) knows of no other rank"):
            sync.used_by  # noqa: B018
        model.zero_grad()
        assert all(reducer_of(parameter) is None for parameter in model.parameters())
        model(inputs_of(transport.rank), "abc").backward()
        wanted = expected(1, ["abc"]) if transport.rank == 0 else None
        if wanted:
            assert_same(gradients(model), wanted)
        stretto.attach(model, transport=transport).detach()

    run_ranks(worker, 2)


def test_nothing_keeps_a_dropped_model_alive() -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport)
        model(inputs_of(transport.rank), "abc").backward()
        return [weakref.ref(one) for one in (model, model.a, model.a.weight)]

    references = [reference for mine in run_ranks(worker, 2) for reference in mine]
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


def test_the_comm_hook_replaces_the_all_reduce_and_gets_undivided_gradients() -> None:
    seen: list[tuple[int, bool]] = []

    def double(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * state)
        return future

    def worker(transport):
        recording = RecordingTransport(transport)
        model = Branches()
        sync = stretto.attach(model, transport=recording, bucket_cap_mb=5e-5)
        sync.register_comm_hook(2.0, double)
        with pytest.raises(stretto.SetupError, match="registered already"):
            sync.register_comm_hook(2.0, double)
        for _ in range(2):
            model.zero_grad()
            recording.calls.clear()
            model(inputs_of(transport.rank), "abc").backward()
        (said,) = recording.calls
        assert said[0] == "all_reduce" and said[1] < 4 * 6 * 16, "who had what, in one small message"
        return gradients(model)

    for rank, found in enumerate(run_ranks(worker, 2)):
        model = Branches()
        (2 * model(inputs_of(rank), "abc")).backward()
        assert_same(found, {n: p.grad for n, p in model.named_parameters()})
    assert {last for _, last in seen} == {True, False}


@pytest.mark.parametrize("world", [2, 3])
def test_freezing_on_the_way_is_ordinary(world: int) -> None:
    def worker(transport):
        model = Branches()
        stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for number in range(5):
            model.zero_grad()
            if number == 2:
                model.b.requires_grad_(False)
            model(inputs_of(transport.rank), "abc").backward()
        return gradients(model)

    model = Branches()
    model.b.requires_grad_(False)
    for rank in range(world):
        (model(inputs_of(rank), "abc") / world).backward()
    for found in run_ranks(worker, world):
        assert_same(found, {n: p.grad for n, p in model.named_parameters()})


def test_what_a_pass_without_synchronisation_reached_is_not_forgotten_after_a_failure() -> None:
    def worker(transport):
        model = torch.nn.ParameterDict({key: torch.nn.Parameter(torch.ones(2)) for key in "abc"})
        sync = stretto.attach(model, transport=transport)
        with pytest.raises((ValueError, stretto.PeerError)):
            (model["b"] * Fails.apply(model["c"], transport.rank == 0)).sum().backward()
        model.zero_grad()
        with sync.no_sync():
            (model["a"] * 4 if transport.rank == 0 else model["b"]).sum().backward()
        model["b"].sum().backward()
        return model["a"].grad.tolist()

    assert run_ranks(worker, 2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("passes_before", [0, 2])
def test_with_a_comm_hook_a_failure_is_told_and_the_next_pass_is_right(passes_before: int) -> None:
    def worker(transport):
        def hook(state, bucket):
            future = torch.futures.Future()
            work = transport.all_reduce(bucket.buffer().div_(2))
            work.wait()
            future.set_result(bucket.buffer())
            return future

        model = Branches()
        sync = stretto.attach(model, transport=transport)
        sync.register_comm_hook(None, hook)
        for number in range(passes_before + 2):
            model.zero_grad()
            fails = number == passes_before and transport.rank == 0
            loss = failing_loss(model, inputs_of(transport.rank), fails, "amid")
            if number == passes_before:
                with pytest.raises(ValueError if fails else stretto.PeerError):
                    loss.backward()
            else:
                loss.backward()
        return gradients(model)

    model = Branches()
    for rank in range(2):
        (failing_loss(model, inputs_of(rank), False, "amid") / 2).backward()
    for found in run_ranks(worker, 2, timeout=10):
        assert_same(found, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("world", [2, 3])
def test_with_a_comm_hook_what_nobody_used_stays_as_it_was(world: int) -> None:
    def worker(transport):
        def hook(state, bucket):
            future = torch.futures.Future()
            transport.all_reduce(bucket.buffer().div_(world)).wait()
            future.set_result(bucket.buffer())
            return future

        model = Branches()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=5e-5)
        sync.register_comm_hook(None, hook)
        found = []
        for uses in (["a", "b", "b"], ["abc"] * 3, ["a"] * 3, ["ab", "c", "c"]):
            model.zero_grad()
            model(inputs_of(transport.rank), uses[transport.rank]).backward()
            found.append((uses, gradients(model)))
        return found

    for found in run_ranks(worker, world):
        for uses, one in found:
            assert_same(one, expected(world, uses))


def test_late_gradients_and_a_failure_in_one_pass() -> None:
    def worker(transport):
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        stretto.attach(torch.nn.ModuleList([first, second]), transport=transport, bucket_cap_mb=1e-6)
        hidden = first(torch.ones(1, 2, requires_grad=True))
        if transport.rank == 1:
            loss = second(Fails.apply(hidden, True)).sum()
        else:
            loss = checkpoint(second, second(hidden), use_reentrant=True).sum()
        with pytest.raises(ValueError if transport.rank else stretto.PeerError):
            loss.backward()

    run_ranks(worker, 2, timeout=5)


def test_a_weight_that_cannot_be_is_refused_when_it_is_set() -> None:
    def worker(transport):
        sync = stretto.attach(Branches(), transport=transport, weighted=True)
        with pytest.raises(stretto.SetupError, match="weight=-1 must be between 0"):
            sync.weight = -1

    run_ranks(worker, 2)


def test_an_observer_made_of_functions_can_be_dropped_and_removed() -> None:
    calls: list[int] = []

    def raising(*_: object) -> None:
        calls.append(1)
        raise KeyError("observer")

    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport)
        if transport.rank == 0:
            sync.observe(types.SimpleNamespace(pass_started=raising))
        for _ in range(3):
            model(inputs_of(0), "abc").backward()

    run_ranks(worker, 2)
    assert len(calls) == 1


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_pass_that_fails_at_its_first_gradient_is_told_and_the_next_one_is_right(
    world: int, leaves_out: bool
) -> None:
    """There is no memory for one that would have to leave the old to a user who keeps gradients."""
    use = "ab" if leaves_out else "abc"

    def worker(transport):
        class Full(RecordingTransport):
            is_full = False

            def allocate(self, numel, dtype, device):
                if self.is_full:
                    self.is_full = False
                    raise MemoryError("no memory left")
                return super().allocate(numel, dtype, device)

        model, carrier = Branches(), Full(transport)
        stretto.attach(model, transport=carrier, bucket_cap_mb=1e-6)
        kept: list[torch.Tensor] = []
        for number in range(7):
            kept += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            before = [gradient.clone() for gradient in kept]
            model.zero_grad()
            carrier.is_full = number == 4 and transport.rank == 1
            wanted = expected(world, [use] * world, number)
            try:
                model(inputs_of(transport.rank, number), use).backward()
            except (MemoryError, stretto.PeerError) as error:
                assert (number, type(error)) == (4, stretto.PeerError if transport.rank != 1 else MemoryError)
                model.zero_grad()
            else:
                assert number != 4
                assert_same(gradients(model), wanted)
            assert all(map(torch.equal, kept, before))
        return True

    assert all(run_ranks(worker, world, timeout=20))


@pytest.mark.parametrize(
    ("where", "at"), [("__exit__", 1), ("__enter__", 2)], ids=["a-pass-has-begun", "backward-ended"]
)
@pytest.mark.parametrize("beside", [False, True])
def test_ctrl_c_where_a_pass_is_counted_and_nobody_is_in_it_is_told_and_the_next_one_is_right(
    where: str, at: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks for signals as a function begins: before it has done anything."""
    plain, left = getattr(Failing, where), {}

    def interrupted(self, *arguments):
        if self in left:
            left[self] -= 1
            if not left[self]:
                del left[self]
                raise KeyboardInterrupt
        return plain(self, *arguments)

    monkeypatch.setattr(Failing, where, interrupted)

    def worker(transport):
        model, told = Branches(), []
        sync = stretto.attach(model.c if beside else model, transport=transport, bucket_cap_mb=1e-6)
        if beside:
            stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for number in range(5):
            model.zero_grad()
            if number == 2 and transport.rank:
                left[sync._reducer.failing] = at
            try:
                model(inputs_of(transport.rank, number), "abc").backward()
            except (KeyboardInterrupt, stretto.PeerError) as error:
                told.append((number, error))  # with its frames, which are not to hold what the engine lets go
            else:
                assert_same(gradients(model), expected(2, ["abc"] * 2, number))
        return told

    ((number, waited),), ((stopped_at, stopped),) = run_ranks(worker, 2, timeout=20)
    assert (number, type(waited), stopped_at, type(stopped)) == (2, stretto.PeerError, 2, KeyboardInterrupt)
    told = str(waited).splitlines()
    assert told[0] == "rank 0, pass 3: backward failed on rank 1, so the mean of this pass lacks gradients."
    assert told[1].startswith("  rank 1, pass 3, backward: KeyboardInterrupt"), told


def test_ctrl_c_of_an_idle_rank_as_it_begins_comes_out_as_it_is() -> None:
    def worker(transport):
        model = Branches()
        sync = stretto.attach(model, transport=transport)
        model(inputs_of(transport.rank, 0), "abc").backward()
        if not transport.rank:
            with pytest.raises(stretto.PeerError) as caught:
                model(inputs_of(0, 1), "abc").backward()
            return str(caught.value).splitlines()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sync._reducer.queue.presence, "announce_nothing", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sync.shadow_pass()
        return []

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    told, _ = run_ranks(worker, 2, timeout=20)
    assert told[0] == "rank 0, pass 2: rank 1 failed and left, so nobody can complete this pass."
    assert told[1].startswith("  rank 1, pass 2, backward: KeyboardInterrupt"), told


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_an_idle_rank_gives_nothing_of_its_own_in_a_second_round(world: int, reentrant: bool) -> None:
    """What it held was taken for late: it was lost there, and counted in the mean of the others."""

    def worker(transport):
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "abc"})
        sync = stretto.attach(layers, transport=transport, bucket_cap_mb=1e-6)
        for parameter in layers.parameters():
            parameter.data.fill_(1.0)
        for _ in range(2):  # without c: from here on ranks tell who will come
            layers.zero_grad()
            (layers.a.weight.sum() + 100 * layers.b.weight.sum()).backward()
        if transport.rank == 0:
            sync.shadow_pass()
        else:
            layers.zero_grad()
            inputs = torch.ones(1, 1, requires_grad=True)
            middle = checkpoint(layers.b, inputs, use_reentrant=True) if reentrant else layers.b(inputs)
            layers.a(middle).sum().backward()
        return [None if one.grad is None else one.grad.item() for one in layers.parameters()]

    idle, *others = run_ranks(worker, world)
    assert idle == [1.0, 100.0, None]
    assert others == [[pytest.approx((world - 1) / world)] * 2 + [None]] * (world - 1)


@pytest.mark.parametrize("value", [0.0, 2.0])
@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
@pytest.mark.parametrize("parts", [False, True], ids=["one handle", "nested"])
def test_backward_of_a_parameter_itself_is_a_pass(parts: bool, cap_mb: float, value: float) -> None:
    """torch does not count the root of such a graph among what will be executed: it was taken for absent."""

    def worker(transport):
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "ab"})
        handles = [stretto.attach(one, transport=transport, bucket_cap_mb=cap_mb) for one in [layers.a] * parts]
        handles.append(stretto.attach(layers, transport=transport, bucket_cap_mb=cap_mb))
        lone, found = layers.a.weight, []
        for number in range(5):
            layers.zero_grad()
            if number < 2 or transport.rank:
                (layers.b.weight.sum() + layers.b.bias.sum() + layers.a.bias.sum()).backward()
            else:
                lone.backward(torch.full_like(lone, value))
            found.append([None if one.grad is None else one.grad.flatten()[0].item() for one in layers.parameters()])
        return found

    for found in run_ranks(worker, 2):
        assert found == [[None, 1.0, 1.0, 1.0]] * 2 + [[value / 2, 0.5, 0.5, 0.5]] * 3


@pytest.mark.parametrize(
    "failing", [{3: [0]}, {3: [0], 4: [0]}, {3: [0], 4: [1]}, {3: [0, 1]}, {1: [0]}, {3: [0], 5: [1]}]
)
@pytest.mark.parametrize("what", ["dense", "sparse", "a rank without batches"])
def test_where_words_come_late_a_failure_ends_the_same_passes_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, what: str, failing: dict[int, list[int]]
) -> None:
    """As on an accelerator: the other ranks learn of it a pass later. The rank that failed must not use that alone."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> tuple[list[tuple[int, str]], list[torch.Tensor]]:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=what == "sparse"), torch.nn.Linear(3, 1))
        fill(model)
        sync = stretto.attach(model, transport=transport, check_every=0)
        told = []
        for number in range(1, 9):
            model.zero_grad()
            try:
                if what == "a rank without batches" and transport.rank == 2:
                    sync.shadow_pass()
                    continue
                hidden = model[0](torch.tensor([transport.rank, 2]))
                fails = transport.rank in failing.get(number, ())
                model[1](models.Fails.apply(hidden) if fails else hidden).square().sum().backward()
            except (ValueError, stretto.PeerError) as error:
                told.append((number, str(error)))
        return told, [one.grad.to_dense() for one in model.parameters() if one.grad is not None]

    outcomes = run_ranks(worker, 3)
    late = set() if what == "sparse" else {number + 1 for number in failing if number > 1}
    for rank, (told, _) in enumerate(outcomes):
        alone = {number for number, ranks in failing.items() if rank in ranks}
        soon = {number for number in failing if what == "sparse" or number == 1}
        assert [number for number, _ in told] == sorted(alone | late | soon)
    for _, gradients in outcomes[: 2 if "batches" in what else 3]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, outcomes[0][1], strict=True))
    if what == "dense" and failing == {3: [0]}:
        late = (
            "With gradients on an accelerator, ranks learn of it as the next pass ends. Those that have stepped in "
            "between, with a mean that may be NaN, have another model than the rest: go back to a checkpoint, on all "
            "ranks. With check_every=1 ranks learn of it before the step."
        )
        own, others = outcomes[0][0][1][1], outcomes[1][0][0][1]
        assert own == f"rank 0, pass 3: backward failed on this rank, so no rank is to step.\n{late}"
        assert others.startswith("rank 1, pass 3: backward failed on rank 0, so the mean of this pass lacks gradients.")
        assert "ValueError: on purpose" in others and others.endswith(f"\n{late}")


@pytest.mark.parametrize("failing", [[1], [0, 1]])
def test_where_words_come_late_models_of_one_backward_lose_one_more_pass_alone(
    monkeypatch: pytest.MonkeyPatch, failing: list[int]
) -> None:
    """Where the first had failed, all ranks gave up the second, and took that for a failure of some rank alone."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[int]:
        layers, handles, told = [torch.nn.Linear(2, 2) for _ in range(3)], [], []
        for layer in layers:
            handles.append(stretto.attach(layer, transport=transport, beside=[*handles], check_every=0))
        for number in range(1, 9):
            hidden = layers[0](torch.ones(1, 2))
            if number == 3 and transport.rank in failing:
                hidden = models.Fails.apply(hidden)
            try:
                layers[2](layers[1](hidden)).sum().backward()
            except (ValueError, stretto.PeerError):
                told.append(number)
        return told

    assert run_ranks(worker, 2) == ([[4], [3, 4]] if failing == [1] else [[3], [3]])


def test_where_words_come_late_a_forward_that_failed_is_told_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to step with the mean of that pass is too late then, and the gradients at hand are no mix."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[str]:
        model, told = torch.nn.Linear(2, 1), []
        stretto.attach(model, transport=transport, check_every=0)
        for number in range(1, 6):
            model.zero_grad()
            if number == 3 and transport.rank == 1:
                with pytest.raises(RuntimeError):
                    model(torch.ones(1, 3))
            try:
                model(torch.ones(1, 2)).sum().backward()
            except stretto.PeerError as error:
                assert number == 4 and error.can_go_on
                told += [line for line in str(error).splitlines() if not line.startswith("  ")]
        return told

    for rank, told in enumerate(run_ranks(worker, 2)):
        assert told == [
            f"rank {rank}, pass 3: forward failed on rank 1 before this pass and was caught, so this pass may mix "
            "batches.",
            "With gradients on an accelerator, ranks learn of it as the next pass ends. What they have stepped with in "
            "between was the same on all: zero_grad() and go on, on all ranks. A forward that may fail and be tried "
            "again on one rank must run inside no_sync() of the handle (a wrapper's .synchronizer), its backward "
            "outside.",
        ]


@pytest.mark.parametrize("change", ["strides", "shape"])
def test_where_words_come_late_a_change_that_one_rank_sees_does_not_hide_a_failure(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The rank that saw it heard of the failure at once, the one that did not a pass later: two stepped without it."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[int]:
        layers = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        layers["c"] = torch.nn.Conv2d(2, 2, 2)
        stretto.attach(layers, transport=transport, check_every=0)
        told = []
        for number in range(1, 6):
            layers.zero_grad()
            if number == 3 and change == "strides":
                layers["c"].to(memory_format=torch.channels_last)
            elif number == 3:
                layers["c"].weight.data = torch.zeros(2, 2, 3, 3)
            hidden = layers["a"](torch.ones(1, 2))
            if number == 3 and transport.rank == 0:
                hidden = models.Fails.apply(hidden)
            loss = layers["b"](hidden).sum()
            if number != 3 or transport.rank == 1:
                loss = loss + layers["c"](torch.ones(1, 2, 3, 3)).sum()
            try:
                loss.backward()
            except (ValueError, stretto.PeerError):
                told.append(number)
        return told

    assert run_ranks(worker, 3) == [[3, 4], [4], [4]]


def test_where_words_come_late_no_failure_hides_behind_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the next, which is known in time, all could go on; after the first they cannot."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[tuple[int, bool]]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        stretto.attach(model, transport=transport, check_every=2)
        told = []
        for number in range(1, 6):
            model.zero_grad()
            hidden = model[0](torch.ones(1, 2))
            try:
                model[1](
                    models.Fails.apply(hidden) if {3: 0, 4: 1}.get(number) == transport.rank else hidden
                ).sum().backward()
            except (ValueError, stretto.PeerError) as error:
                told.append((number, getattr(error, "can_go_on", True)))
        return told

    assert run_ranks(worker, 3) == [[(3, True), (4, False)], [(4, True)], [(4, False)]]
    (logged,) = [one.getMessage() for one in caplog.records if "lacks gradients" in one.getMessage()]
    assert logged.startswith("rank 1, pass 3: ") and "go back to a checkpoint" in logged


def test_where_words_come_late_a_failure_behind_which_all_fail_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody raises for the second, which all know; one rank has not stepped with the first, and others may have."""
    models.words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[int]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        stretto.attach(model, transport=transport, check_every=0)
        told = []
        for number in range(1, 6):
            model.zero_grad()
            hidden = model[0](torch.ones(1, 2))
            fails = number == 4 or (number == 3 and transport.rank == 1)
            try:
                model[1](models.Fails.apply(hidden) if fails else hidden).sum().backward()
            except ValueError:
                told.append(number)
        return told

    assert run_ranks(worker, 2) == [[4], [3, 4]]
    logged = [one.getMessage() for one in caplog.records if "go back to a checkpoint" in one.getMessage()]
    assert sorted(text.split(": ")[0] for text in logged) == ["rank 0, pass 3", "rank 1, pass 3"]


def test_after_a_pass_that_was_refused_who_waits_is_in_a_call() -> None:
    """What is wrong there is said of calls: batches, which it spoke of, have no part in it."""

    def refuse(**_: object) -> None:
        raise stretto.CommunicationError("refused")

    def worker(transport: LocalTransport) -> tuple[str, str]:
        model = Branches()
        handle = stretto.attach(model, transport=transport)
        seat, found = handle._reducer.queue.peers.seat, []
        patched = unittest.mock.patch.object(handle._reducer._consensus, "catch_up", refuse)
        with patched, pytest.raises(stretto.CommunicationError, match="refused"):
            model(inputs_of(0), "a").backward()
        found.append(seat.kind("attach"))
        model(inputs_of(0), "a").backward()
        return *found, seat.kind("attach")

    assert run_ranks(worker, 2) == [("call", "call")] * 2


class Told:
    """What a reducer's ``Failing`` deals with, of a rank that is alone."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        peers = types.SimpleNamespace(left="", seat=types.SimpleNamespace(in_pass=True))
        peers.tell_failed = lambda phase, error, _, *, leaves: self.heard.append((phase, error, leaves))
        peers.leave = lambda phase, error, _: (self.heard.append((phase, error, "left")), vars(peers).update(left="x"))
        peers.fall_behind = lambda error: vars(peers).update(left=f"{error!r}")
        queue = types.SimpleNamespace(peers=peers, lock=threading.RLock(), where="rank 1, pass 2", buckets=[])
        queue.transport = types.SimpleNamespace(flush=lambda _: self.heard.append("stayed"))
        self.failing = Failing(queue, self.stop, dict)  # type: ignore[arg-type]

    def stop(self) -> None:
        self.heard.append("stopped")

    def give_up(self, error: BaseException | None) -> None:
        if error is not None:
            with self.failing.giving_up():
                raise error


@pytest.mark.parametrize(
    "lost",
    [None, OSError("another"), OSError("own"), stretto.PeerError("gone")],
    ids=["not", "another", "same", "told"],
)
def test_why_a_pass_could_not_be_given_up_at_its_end_is_said_unless_it_is_known(
    lost: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    one, own = Told(), OSError("own")
    one.failing.at_the_end(own, lambda: one.give_up(lost))
    assert one.heard == [("backward", own, lost is not None), "stayed"]
    said = ["rank 1, pass 2: backward failed, and the pass could not be given up."]
    assert [record.message for record in caplog.records] == said * (f"{lost}" == "another")
    assert all(record.exc_info and record.exc_info[1] is lost for record in caplog.records)


@pytest.mark.parametrize("error", [stretto.PeerError("gone"), OSError("own"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_loses_its_place_once(is_lost: bool, error: BaseException) -> None:
    """By whatever the others do not know of; and a pass in which they know has ended too."""
    one = Told()
    if is_lost:
        one.failing.lose(first := OSError("first"))
        assert one.heard == [("backward", first, "left"), "stopped"]
        one.heard.clear()
    with pytest.raises(type(error)), one.failing:
        raise error
    told = not (is_lost or isinstance(error, stretto.PeerError))
    assert one.heard == [("backward", error, "left")] * told + ["stopped"] * (told or is_lost)


def test_a_rank_that_is_lost_does_not_give_up_a_backward_that_was_dropped() -> None:
    one = Told()
    one.failing.lose(OSError("first"))
    one.heard.clear()
    one.failing.in_engine(lambda _: one.heard.append("given up"), has_begun=True)
    assert not one.heard


@pytest.mark.parametrize(
    ("own", "lost", "read"),
    [
        (OSError("own"), stretto.PeerError("gone"), None),
        (OSError("own"), OSError("another"), None),
        (OSError("own"), KeyboardInterrupt(), KeyboardInterrupt),
        (stretto.PeerError("gone"), OSError("another"), OSError),
    ],
)
def test_of_two_failures_that_of_the_first_is_read_unless_it_is_of_another_rank_or_ctrl_c_came(
    own: BaseException, lost: BaseException, read: type[BaseException] | None
) -> None:
    first, second, third = Told(), Told(), Told()

    def give_up() -> None:
        second.give_up(lost)

    with pytest.raises(read) if read else contextlib.nullcontext():
        first.failing.behind(own, give_up, [one.failing for one in (first, second, third)])
    assert (first.heard, second.heard, third.heard) == ([], [("backward", own, True)], [])
