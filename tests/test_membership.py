"""The module changes after it was attached: the plan follows, and the gradients of that very pass are right."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Fails, checkpoint, words_come_late
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules import module as torch_module

import stretto
from stretto.testing import LocalTransport, RecordingTransport, run_ranks, spawn_ranks

PASSES = 7
AT = 4
CAPS = {"tiny": 1e-6, "default": None}


def linear(seed: int, *sizes: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    """The same values on every rank: torch's default generator is shared between thread ranks."""
    layer = nn.Linear(*(sizes or (3, 3)), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


class Chain(nn.Module):
    """Runs the layers that it has, in the dtype of each, and scales by ``gain`` if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (linear(seed) for seed in range(3))

    def forward(self, x: torch.Tensor, use: str = "abcdh") -> torch.Tensor:
        for name in use:
            layer = getattr(self, name, None)
            if layer is not None:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
                x = x * getattr(layer, "gain", 1.0)
        return x.sum()


def inputs_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def frozen_at_the_start(model: Chain) -> None:
    model.b.requires_grad_(False)


def change_frozen(model: Chain) -> None:
    model.b.bias.requires_grad_(False)


def change_unfrozen(model: Chain) -> None:
    model.b.requires_grad_(True)


def change_added(model: Chain) -> None:
    model.d = linear(7)
    model.a.gain = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))


def change_replaced(model: Chain) -> None:
    model.b = linear(8)


def change_replaced_parameter(model: Chain) -> None:
    model.b.weight = nn.Parameter(linear(8).weight.detach().clone())


def change_removed(model: Chain) -> None:
    del model.b


def change_all_to_float(model: Chain) -> None:
    model.float()


def change_part_to_float(model: Chain) -> None:
    model.b.float()


def change_last_to_float(model: Chain) -> None:
    model.c.float()


def change_there_and_back(model: Chain) -> None:
    model.float().double()


def rewrite(layer: nn.Module) -> None:
    """Past registration, as ``.to()`` does under ``torch.__future__.set_overwrite_module_params_on_conversion``."""
    for name, parameter in layer._parameters.items():
        assert parameter is not None
        layer._parameters[name] = nn.Parameter(parameter.detach().clone())


def change_all_rewritten(model: Chain) -> None:
    """No hook is left to begin a pass."""
    for layer in (model.a, model.b, model.c):
        rewrite(layer)


def change_head_only(model: Chain) -> None:
    """Transfer learning: no parameter of the plan gets a gradient any more."""
    model.requires_grad_(False)
    model.h = linear(9)


def change_many(model: Chain) -> None:
    change_frozen(model)
    change_added(model)
    model.c = linear(8)


CHANGES = {name.removeprefix("change_"): found for name, found in globals().items() if name.startswith("change_")}


def clear(model: nn.Module, how: str) -> None:
    if how == "before":
        model.zero_grad()
    elif how == "zeros":
        model.zero_grad(set_to_none=False)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def uses_of(rank: int, number: int, uneven: bool) -> str:
    """With ``uneven`` each rank leaves out another layer, and in some passes all leave out ``a``."""
    if not uneven:
        return "abcdh"
    return "abcdh".replace("abc"[rank], "").replace("a" if number % 3 == 1 and rank < 2 else "-", "")


def alone(change: str, world: int, uneven: bool) -> list[dict[str, torch.Tensor | None]]:
    model, seen = Chain(), []
    if change == "unfrozen":
        frozen_at_the_start(model)
    for number in range(1, PASSES + 1):
        model.zero_grad()
        if number == AT:
            CHANGES[change](model)
        for rank in range(world):
            (model(inputs_of(rank, number), uses_of(rank, number, uneven)) / world).backward()
        seen.append(gradients(model))
    return seen


class Plans:
    def __init__(self) -> None:
        self.changed: list[tuple[int, str]] = []

    def plan_changed(self, pass_number: int, plan) -> None:
        self.changed.append((pass_number, plan.hash))


def train(change: str, transport, cap: float | None, uneven: bool, how: str, *, hook: Any = None, **options):
    model, seen, used, plans = Chain(), [], [], Plans()
    if change == "unfrozen":
        frozen_at_the_start(model)
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=cap, **options)
    if hook is not None:
        sync.register_comm_hook(None, hook)
    sync.observe(plans)
    for number in range(1, PASSES + 1):
        clear(model, how)
        if number == AT:
            CHANGES[change](model)
            for layer in model.children() if how == "zeros" else ():
                for parameter in layer.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
        if how == "after the change":
            model.zero_grad()
        model(inputs_of(transport.rank, number), uses_of(transport.rank, number, uneven)).backward()
        seen.append(gradients(model))
        used.append(sync.used_by)
    result = {"seen": seen, "plans": plans.changed, "count": sync.statistics.plans, "names": sync.plan.parameters}
    result["used"] = used
    sync.detach()
    return result


def ranks_that_use(change: str, world: int, uneven: bool) -> list[dict[str, int]]:
    model, counts = Chain(), []
    if change == "unfrozen":
        frozen_at_the_start(model)
    for number in range(1, PASSES + 1):
        if number == AT:
            CHANGES[change](model)
        counts.append({name: 0 for name, _ in model.named_parameters()})
        for rank in range(world):
            model.zero_grad()
            model(inputs_of(rank, number), uses_of(rank, number, uneven)).backward()
            for name, parameter in model.named_parameters():
                counts[-1][name] += parameter.grad is not None
    return counts


def assert_close(found, wanted, nothing_is_zeros: bool = False) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None or (nothing_is_zeros and not found[name].any()), name
            continue
        assert found[name] is not None, name
        assert found[name].dtype == gradient.dtype, name
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal_bits(first, second) -> None:
    for one, other in zip(first["seen"], second["seen"], strict=True):
        assert one.keys() == other.keys()
        assert all(a is b is None or torch.equal(a, b) for a, b in ((one[n], other[n]) for n in one))
    assert first["plans"] == second["plans"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("uneven", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_plan_follows_and_that_very_pass_is_right(change: str, cap: str, uneven: bool, world: int) -> None:
    ranks = run_ranks(lambda t: train(change, t, CAPS[cap], uneven, "before"), world)
    for number, wanted in enumerate(alone(change, world, uneven), 1):
        for found in ranks:
            try:
                assert_close(found["seen"][number - 1], wanted)
            except AssertionError as error:
                raise AssertionError(f"pass {number}: {error}") from error
    for number, wanted in enumerate(ranks_that_use(change, world, uneven), 1):
        for found in ranks:
            used = found["used"][number - 1]
            assert used == {name: wanted.get(name, 0) for name in used}, number
            assert used.keys() >= {name for name, count in wanted.items() if count}, number
    for other in ranks[1:]:
        assert_equal_bits(ranks[0], other)
    if change not in ("removed", "there_and_back"):
        assert AT in [number for number, _ in ranks[0]["plans"]]
        assert ranks[0]["count"] == 1 + len(ranks[0]["plans"])


@pytest.mark.parametrize("uneven", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize("how", ["after the change", "zeros"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_were_there_when_it_changed(change: str, how: str, uneven: bool) -> None:
    ranks = run_ranks(lambda t: train(change, t, None, uneven, how), 2)
    for number, wanted in enumerate(alone(change, 2, uneven), 1):
        for found in ranks:
            assert_close(found["seen"][number - 1], wanted, nothing_is_zeros=how == "zeros")
    assert_equal_bits(*ranks)


def in_processes(rank: int, change: str):
    return train(change, stretto.transport.ProcessGroupTransport(), 1e-6, True, "before")


@pytest.mark.ranks
@pytest.mark.parametrize("change", ["many", "all_to_float"])
def test_in_processes(change: str) -> None:
    ranks = spawn_ranks(in_processes, 2, change)
    for found in ranks:
        for seen, wanted in zip(found["seen"], alone(change, 2, True), strict=True):
            assert_close(seen, wanted)
    assert_equal_bits(*ranks)


def beside_a_hook(rank: int) -> dict[Any, Any]:
    transport, hook = stretto.transport.ProcessGroupTransport(), default_hooks.allreduce_hook
    return {
        (change, uneven): train(change, transport, 1e-6, uneven, "before", hook=hook)
        for change in CHANGES
        for uneven in (False, True)
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_the_plan_follows_beside_a_hook_that_keeps_nothing(world: int) -> None:
    ranks = spawn_ranks(beside_a_hook, world)
    for change, uneven in ranks[0]:
        for found in ranks:
            for number, wanted in enumerate(alone(change, world, uneven)):
                assert_close(found[change, uneven]["seen"][number], wanted)
        for other in ranks[1:]:
            assert_equal_bits(ranks[0][change, uneven], other[change, uneven])
        if change not in ("removed", "there_and_back"):
            assert AT in [number for number, _ in ranks[0][change, uneven]["plans"]]


# What is told


def test_one_line_names_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = Chain()
        model.unused = linear(9)
        stretto.attach(model, transport=transport)
        for number in range(1, 6):
            model.zero_grad()
            if number == 3:
                change_many(model)
                model.a.bfloat16()
                del model.unused
            model(inputs_of(transport.rank, number)).backward()

    with caplog.at_level(logging.INFO, "stretto"):
        run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records if record.name == "stretto"] == [
        "rank 0, pass 3: the plan follows the module: 3 parameters added (a.gain, d.weight, d.bias), 2 replaced "
        "(c.weight, c.bias), 1 frozen (b.bias), 2 removed (unused.weight, unused.bias), 2 now bfloat16 (a.weight, "
        "a.bias)"
    ]


def test_ranks_that_change_differently_are_told_the_same_until_they_agree() -> None:
    def worker(transport):
        model, told = Chain(), []
        sync = stretto.attach(model, transport=transport)
        model(inputs_of(0, 0)).backward()
        if transport.rank == 1:
            change_added(model)
            change_frozen(model)
        for number in range(2):
            model.zero_grad()
            with pytest.raises(stretto.ModelMismatchError) as caught:
                model(inputs_of(transport.rank, number)).backward()
            told.append(str(caught.value))
        if transport.rank != 1:
            change_added(model)
            change_frozen(model)
        model.zero_grad()
        model(inputs_of(transport.rank, 9)).backward()
        return told, gradients(model), sync.statistics.plans

    (told, first, plans), (other, second, _), (third, *_) = run_ranks(worker, 3)
    assert told == other == third
    assert told[0] == (
        "pass 2: the 3 ranks do not hold the same model.\n"
        "  parameter b.bias: 3 float64 cpu on ranks 0, 2; 3 float64 cpu, frozen on rank 1\n"
        "  parameter a.gain: missing on ranks 0, 2; scalar float64 cpu on rank 1\n"
        "  parameter d.weight: missing on ranks 0, 2; 3x3 float64 cpu on rank 1\n"
        "  parameter d.bias: missing on ranks 0, 2; 3 float64 cpu on rank 1\n"
        "Change the model in the same way on all ranks, between the same two passes."
    )
    assert plans > 1
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


# Occasions


@pytest.mark.parametrize("change", ["added", "replaced", "unfrozen", "head_only", "all_to_float"])
@pytest.mark.parametrize("when", ["before the silent pass", "after it"])
def test_a_change_around_a_pass_without_synchronisation(change: str, when: str) -> None:
    def passes(model, sync, ranks, world):
        seen = []
        for number in range(5):
            model.zero_grad()
            if number == 2 and when == "before the silent pass":
                CHANGES[change](model)
            for rank in ranks:
                with sync.no_sync() if sync else contextlib.nullcontext():
                    (model(inputs_of(rank, number)) / world).backward()
            if number == 2 and when == "after it":
                CHANGES[change](model)
            for rank in ranks:
                (model(inputs_of(rank, number + 50), "abcdh" if number != 2 else "bch") / world).backward()
            seen.append(gradients(model))
        return seen

    def build():
        model = Chain()
        if change == "unfrozen":
            frozen_at_the_start(model)
        return model

    def worker(transport):
        model = build()
        return passes(model, stretto.attach(model, transport=transport), [transport.rank], 1)

    first, second = run_ranks(worker, 2)
    for one, other, wanted in zip(first, second, passes(build(), None, [0, 1], 2), strict=True):
        assert_close(one, wanted)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def test_what_was_dropped_before_a_change_is_no_gradient() -> None:
    """A pass without synchronisation had reached it; in that of the change no rank uses it."""

    def worker(transport):
        model = nn.ModuleList([nn.Linear(2, 1) for _ in range(2)])
        sync = stretto.attach(model, transport=transport)
        with sync.no_sync():
            sum(part(torch.ones(1, 2)).sum() for part in model).backward()
        model.zero_grad()
        model[0].double()
        (model[0].bias * 2).sum().backward()
        return model[0].weight.grad, model[0].bias.grad.item()

    assert run_ranks(worker, 2) == [(None, 2.0)] * 2


def test_a_rank_that_is_idle_as_the_plan_changes_knows_what_it_has_accumulated() -> None:
    def worker(transport):
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})
        sync = stretto.attach(model, transport=transport)
        with sync.no_sync():
            model["b"].weight.sum().backward()
        del model["a"]
        if transport.rank:
            sync.shadow_pass()
        else:
            model["c"].weight.sum().backward()
        model["c"].weight.sum().backward()
        return [model[name].weight.grad.item() for name in "bc"]

    # Rank 0 has the half of its own 1 by now, and of c one more; rank 1 has its 1 of each.
    assert run_ranks(worker, 2) == [[0.75, 1.25]] * 2


def test_what_was_built_differently_on_each_rank_becomes_rank_0s() -> None:
    def worker(transport):
        model = Chain()
        stretto.attach(model, transport=transport)
        model(inputs_of(0, 0)).backward()
        model.b = linear(50 + transport.rank)
        model.c.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        model.c.norm.running_mean.fill_(transport.rank)
        model(inputs_of(transport.rank, 1)).backward()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    first, *others = run_ranks(worker, 3)
    assert torch.equal(first["b.weight"], linear(50).weight)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_a_layer_that_one_rank_replaced_by_one_just_like_it() -> None:
    def worker(transport):
        model = Chain()
        stretto.attach(model, transport=transport)
        for number in range(5):
            model.zero_grad()
            if number == 3 and transport.rank == 1:
                model.b = linear(1)
            model(inputs_of(transport.rank, number)).backward()
            if number >= 3:
                assert_close(gradients(model), mean_of_plain(3, number))
        return {"seen": [gradients(model)], "plans": []}

    first, *others = run_ranks(worker, 3)
    for other in others:
        assert_equal_bits(first, other)


def mean_of_plain(world: int, number: int) -> dict[str, torch.Tensor | None]:
    model = Chain()
    for rank in range(world):
        (model(inputs_of(rank, number)) / world).backward()
    return gradients(model)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_was_written_past_registration_is_found_by_the_net(times: int) -> None:
    """Also where one that was there in between has left its place in memory to the last."""

    def worker(transport):
        model = Chain()
        sync = stretto.attach(model, transport=transport)
        for number in range(1, 40):
            model.zero_grad()
            if number == 20:
                for _ in range(times):
                    rewrite(model.b)
            model(inputs_of(transport.rank, number)).backward()
        return gradients(model), sync.plan

    (first, plan), (second, other) = run_ranks(worker, 2)
    assert plan == other
    assert_close(first, mean_of_plain(2, 39))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("written", "seen", "passes"), [(2, 0, 0), (20, 25, 8), (26, 29, 3), (30, 32, 2)])
def test_what_was_trained_unseen_is_named_with_its_passes(
    written: int, seen: int, passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(transport):
        model = Chain()
        model.layers = nn.ModuleList([linear(1)])
        stretto.attach(model, transport=transport)
        for number in range(1, 34):
            if number == written + (transport.rank == 0):
                rewrite(model.b)
            if number == 25:
                model.c = linear(2)  # seen at once, and so are all others
            if number == 29:
                model.layers.insert(0, linear(3))
            x = inputs_of(transport.rank, number)
            (model(x) + sum(layer(x).sum() for layer in model.layers)).backward()

    with caplog.at_level(logging.WARNING):
        run_ranks(worker, 2)
    told = [record.message for record in caplog.records if "seen only now" in record.message]
    if not seen:
        assert told == []
        return
    assert told == [
        f"rank 0, pass {seen}: seen only now: b.weight, b.bias, written directly into _parameters or _modules, which "
        f"torch does not report. Gradients were not averaged in up to {passes} passes before this one. From here on "
        "all ranks have rank 0's values, but the state of an optimizer may differ between ranks.\n"
        "Assign the layer, module.name = layer, which is seen at once, or attach again after such a change."
    ]


def test_a_layer_that_has_the_id_of_one_that_was_popped_is_seen_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = Chain()
        model.layers = nn.ModuleList([linear(1), linear(2)])
        sync = stretto.attach(model, transport=transport)
        for number in range(1, 10):
            if number == 8:
                plans, was = sync.statistics.plans, id(model.layers[0])
                for _ in range(50):  # mostly at once; ranks are threads here
                    model.layers.pop(0)
                    model.layers.insert(0, linear(3))
                    if id(model.layers[0]) == was:
                        break
            x = inputs_of(transport.rank, number)
            (model(x) + sum(layer(x).sum() for layer in model.layers)).backward()
        assert sync.statistics.plans == plans + 1
        return gradients(model)

    with caplog.at_level(logging.WARNING):
        first, second = run_ranks(worker, 2)
    assert all(torch.equal(first[name], second[name]) for name in first) and not caplog.records


@pytest.mark.parametrize("kind", ["lazy", "put into a list that is new"])
def test_what_is_registered_is_not_taken_for_unseen(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = Chain()
        stretto.attach(model, transport=transport)
        for number in range(12):
            if number == 10:
                model.more = nn.ModuleList([nn.LazyLinear(2, dtype=torch.float64)] if kind == "lazy" else [])
                if kind != "lazy":
                    model.more.insert(0, linear(2))
            x = inputs_of(transport.rank, number)
            (model(x) + sum(layer(x).sum() for layer in getattr(model, "more", ()))).backward()

    with caplog.at_level(logging.WARNING):
        run_ranks(worker, 2)
    assert not caplog.records


def test_a_layer_that_is_replaced_behind_forward_was_used_by_none() -> None:
    def worker(transport):
        model = torch.nn.Sequential(linear(0), linear(1))
        sync = stretto.attach(model, transport=transport)
        for number in range(4):
            loss = model(inputs_of(transport.rank, number)).sum()
            if number == 3:
                model[1] = linear(2)
            loss.backward()
        assert model[1].weight.grad is None
        return sync.used_by

    wanted = {"0.weight": 2, "0.bias": 2, "1.weight": 0, "1.bias": 0}
    assert run_ranks(worker, 2) == [wanted] * 2


@pytest.mark.parametrize("who", ["a graph", "a graph of rank 0", "a sharded optimizer"])
def test_all_are_replaced_past_registration_and_somebody_holds_the_old_ones(who: str) -> None:
    def worker(transport):
        model, kept = torch.nn.Sequential(linear(0), linear(1)), []
        sync = stretto.attach(model, transport=transport)
        if who == "a sharded optimizer":
            stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        for number in range(7):
            if number == 4:
                rewrite(model[0])
                rewrite(model[1])
            model.zero_grad()
            loss = model(inputs_of(transport.rank, number)).sum()
            loss.backward()
            if who == "a graph" or (who == "a graph of rank 0" and transport.rank == 0):
                kept.append(loss)
            yield gradients(model) if number >= 4 else {}

    for first, second in zip(*run_ranks(lambda t: [*worker(t)], 2), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's, at the break
@pytest.mark.parametrize("how", ["called", "not in training", "by its parts", "compiled", "compiled in two"])
def test_all_are_replaced_past_registration_whatever_runs_forward(how: str) -> None:
    def worker(transport):
        model = torch.nn.Sequential(linear(0), Broken() if how == "compiled in two" else torch.nn.Tanh(), linear(1))
        stretto.attach(model, transport=transport)
        forward = torch.compile(model, backend="eager") if how.startswith("compiled") else model
        model.train(how != "not in training")
        for number in range(9):
            if number == 6:
                rewrite(model[0])
                rewrite(model[2])
            model.zero_grad()
            x = inputs_of(transport.rank, number)
            out = model[2](model[1](model[0](x))) if how == "by its parts" else forward(x)
            loss = out.sum()  # the old graph, and its parameters, live until here
            loss.backward()
            yield gradients(model)

    for (first, second), number in zip(zip(*run_ranks(lambda t: [*worker(t)], 2), strict=True), range(9), strict=True):
        assert first.keys() == second.keys()
        for name, gradient in first.items():
            assert gradient is not None
            assert torch.equal(gradient, second[name]), (number, name)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(x)


def replaced_at(change: Callable[[nn.Sequential, list[torch.Tensor]], None]) -> list[list[dict]]:
    """Gradients of passes in which each rank has let go of all that was planned, by ``change``, before the fifth."""

    def worker(transport):
        model, kept = torch.nn.Sequential(linear(0), torch.nn.Sequential(linear(1))), []
        model[0].requires_grad_(False)
        stretto.attach(model, transport=transport)
        found = []
        for number in range(8):
            if number == 5:
                change(model, kept)
            model.zero_grad()
            model(inputs_of(transport.rank, number)).sum().backward()
            kept.clear()
            found.append(gradients(model[1]))
        return found

    return run_ranks(worker, 2)


def put_in_later(model: nn.Sequential, _: list[torch.Tensor]) -> None:
    del model[1][0]
    model[1].insert(0, linear(7))


def written_later(model: nn.Sequential, _: list[torch.Tensor]) -> None:
    model[1]._modules.clear()
    model[1]._modules["0"] = linear(7)


def within_a_transform(model: nn.Sequential, kept: list[torch.Tensor]) -> None:
    kept += model.parameters()
    rewrite(model[0])
    model[0].requires_grad_(False)  # torch allows no hook on these in there
    rewrite(model[1][0])

    def let_go(x: torch.Tensor) -> torch.Tensor:
        kept.clear()
        return x.sum()

    torch.func.grad(let_go)(torch.ones(2))


@pytest.mark.parametrize("change", [put_in_later, written_later, within_a_transform])
def test_what_takes_the_place_of_all_that_was_planned_is_found(change) -> None:
    for first, second in zip(*replaced_at(change), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in ("0.weight", "0.bias"))


def test_all_are_replaced_and_the_last_goes_amid_backward() -> None:
    """What has come by then was not seen; it is averaged all the same."""

    def worker(transport):
        model, kept = torch.nn.Sequential(linear(0), linear(1)), []
        stretto.attach(model, transport=transport)
        for number in range(7):
            if number == 4:
                kept += model.parameters()
                rewrite(model[0])
                rewrite(model[1])
            model.zero_grad()
            between = model[0](inputs_of(transport.rank, number))
            between.register_hook(lambda _, kept=kept: kept.clear())
            model[1](between).sum().backward()
            del between
            found = gradients(model)
            yield found, [one.detach().clone() for one in model.parameters()]

    for (first, values), (second, others) in zip(*run_ranks(lambda t: [*worker(t)], 2), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(map(torch.equal, values, others))


def test_a_parameter_that_was_taken_out_of_a_table_is_seen() -> None:
    def worker(transport):
        model = linear(0)
        sync = stretto.attach(model, transport=transport)
        for number in range(20):
            if number == 5:
                model._parameters["bias"] = None
            model(inputs_of(transport.rank, number)).sum().backward()
        return [spec.name for spec in sync.plan.parameters]

    assert run_ranks(worker, 2) == [["weight"]] * 2


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
def test_what_stands_for_parameters_for_a_while_is_left_to_its_rank(kind) -> None:
    def worker(transport):
        model = nn.Linear(3, 1, bias=False)
        sync = stretto.attach(model, transport=transport, reduce="sum")
        x, found = torch.full((1, 3), transport.rank + 1.0), []
        for _ in range(4):
            model(x).sum().backward()
            found.append(model.weight.grad[0, 0].item())
            for _ in range(2):
                fast = {"weight": kind(model.weight.detach().clone())}
                torch.func.functional_call(model, fast, (x,)).sum().backward()
                assert torch.equal(fast["weight"].grad, x)
        assert sync._reducer is not None and sync.statistics.passes == 4 and not sync._reducer.members._hooks
        return found

    assert run_ranks(worker, 2) == [[3.0, 6.0, 9.0, 12.0]] * 2


def test_what_changes_in_each_of_the_first_passes_is_not_taken_for_unused(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = linear(0)
        stretto.attach(model, transport=transport)
        for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
            model.to(dtype)(inputs_of(transport.rank, number).to(dtype)).sum().backward()

    run_ranks(worker, 2)
    assert "no gradient" not in caplog.text


def test_what_was_replaced_leaves_nothing_behind() -> None:
    def worker(transport):
        model = Chain()
        sync = stretto.attach(model, transport=transport, reduce="sum")
        for number in range(1, 30):
            model.b = linear(number)
            model(inputs_of(transport.rank, number)).backward()
            assert sync._reducer is not None and sync._reducer.queue.preset is not None
            assert len(sync._reducer._arrivals._handles) == len(sync._reducer.queue.preset._hooks) == 6

    run_ranks(worker, 2)


@pytest.mark.parametrize("container", [torch.nn.ModuleList, torch.nn.Sequential])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("as_long_as_before", [False, True])
def test_a_layer_that_is_inserted_late_is_seen_in_its_first_pass(container, place, as_long_as_before):
    """torch writes it into the table of the list itself, of which no hook tells."""

    def worker(transport):
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        model = container(*layers) if container is torch.nn.Sequential else container(layers)
        stretto.attach(model, transport=transport)
        for number in range(25):
            if number == 23:
                model.insert(place, torch.nn.Linear(1, 1, bias=False))
                if as_long_as_before:
                    model.pop(1)
            model.zero_grad()
            sum(layer.weight.sum() * (1 + transport.rank) for layer in model).backward()
            assert [layer.weight.grad.item() for layer in model] == [1.5] * len(model)

    run_ranks(worker, 2)


@pytest.mark.parametrize("edit", ["a list that was cut", "two taken, two put in"])
def test_lists_are_compared_by_what_they_hold(edit: str) -> None:
    """Neither their length nor where their table lies tells: a key is written over, a table's memory is used again."""

    def worker(transport):
        layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(5)]
        if edit == "a list that was cut":
            model = torch.nn.Sequential(*layers)[1:]
        else:
            model = torch.nn.ModuleList(layers)
            del model[4:]
        stretto.attach(model, transport=transport)
        for number in range(25):
            if number == 17 and edit == "a list that was cut":
                model.insert(len(model), torch.nn.Linear(1, 1, bias=False))
            elif number == 17:
                for _ in range(2):
                    model.pop(1)
                for _ in range(2):
                    model.insert(1, torch.nn.Linear(1, 1, bias=False))
            model.zero_grad()
            sum(layer.weight.sum() * (1 + transport.rank) for layer in model).backward()
            assert [layer.weight.grad.item() for layer in model] == [1.5] * len(model)

    run_ranks(worker, 2)


def test_halves_that_are_trained_in_turn_change_the_plan_no_more_than_needed() -> None:
    def worker(transport):
        model, plans = Chain(), Plans()
        stretto.attach(model, transport=transport).observe(plans)
        for number in range(12):
            model.zero_grad()
            model.a.requires_grad_(number % 2 == 0)
            model.c.requires_grad_(number % 2 == 1)
            model(inputs_of(transport.rank, number)).backward()
            alone = Chain()
            for rank in range(2):
                (alone(inputs_of(rank, number)) / 2).backward()
            for name, gradient in gradients(alone).items():
                if dict(model.named_parameters())[name].requires_grad:
                    torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient)
        return plans.changed

    changed, _ = run_ranks(worker, 2)
    assert all(number < 6 for number, _ in changed)


@pytest.mark.parametrize(
    "options",
    [
        {"weighted": True},
        {"reduce": "sum"},
        {"predivide_factor": 3.0},
        {"delay": True},
        {"reduce_dtype": {"d.*": torch.float32}},
        {"launch_after": ["b.weight"]},
        {"ignore": ["*.bias"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_count_for_new_parameters(options: dict) -> None:
    def worker(transport):
        model = Chain()
        sync = stretto.attach(model, transport=transport, **options)
        for number in range(4):
            model.zero_grad()
            if number == 2:
                change_added(model)
            if "weighted" in options:
                sync.weight = 1 + transport.rank
            model(inputs_of(transport.rank, number)).backward()
            if number >= 2:
                model_alone = Chain()
                change_added(model_alone)
                parts = []
                for rank in range(2):
                    model_alone.zero_grad()
                    model_alone(inputs_of(rank, number)).backward()
                    parts.append(gradients(model_alone))
                weights = [1 / 3, 2 / 3] if "weighted" in options else [1, 1] if "reduce" in options else [0.5, 0.5]
                for name, found in gradients(model).items():
                    wanted = sum(w * part[name] for w, part in zip(weights, parts, strict=True))
                    if options.get("ignore") and name.endswith("bias"):
                        wanted = parts[transport.rank][name]
                    exact = {"rtol": 1e-5, "atol": 1e-6} if "reduce_dtype" in options else {}
                    torch.testing.assert_close(found, wanted, **exact)
        return [spec.reduce_dtype for spec in sync.plan.parameters if spec.name == "d.weight"]

    for found in run_ranks(worker, 2):
        assert found == [torch.float32 if "reduce_dtype" in options else None]


def mean_of_two(transport: Any, _: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    transport.all_reduce(bucket.buffer().div_(2)).wait()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("late", [False, True])
def test_with_a_comm_hook_a_layer_that_is_unfrozen_waits_for_its_first_gradient(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    if late:
        words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> None:
        layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
        layers[1].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport)
        sync.register_comm_hook(None, functools.partial(mean_of_two, transport))
        for number in range(4):
            layers.zero_grad()
            layers[1].requires_grad_(number > 1)
            layers[0](torch.full((1, 2), 1.0 + transport.rank)).sum().backward()
            assert layers[0].weight.grad is not None and layers[0].weight.grad.tolist() == [[1.5, 1.5]] * 2
            assert layers[1].weight.grad is None

    run_ranks(worker, 2)


def test_with_a_comm_hook_a_change_is_named() -> None:
    def worker(transport):
        model = Chain()
        sync = stretto.attach(model, transport=transport)
        sync.register_comm_hook(None, functools.partial(mean_of_two, transport))
        model(inputs_of(0, 0)).backward()
        change_frozen(model)
        model(inputs_of(0, 1)).backward()
        change_added(model)
        with pytest.raises(stretto.SetupError) as caught:
            model(inputs_of(0, 2)).backward()
        return str(caught.value)

    assert run_ranks(worker, 2)[1] == (
        "rank 1, pass 3: the module has changed since it was attached (3 parameters added (a.gain, d.weight, d.bias), "
        "1 frozen (b.bias) on ranks 0, 1), and a comm hook keeps its state by bucket, so the plan cannot follow.\n"
        "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
    )


def test_a_change_in_a_pass_that_fails_is_followed_in_the_next() -> None:
    def worker(transport):
        model = Chain()
        stretto.attach(model, transport=transport)
        model(inputs_of(0, 0)).backward()
        change_added(model)
        with pytest.raises((ValueError, stretto.PeerError)):
            x = inputs_of(0, 1)
            inner = model.a(x.requires_grad_(True))
            inner = Fails.apply(inner) if transport.rank == 0 else inner
            torch.tanh(model.d(model.c(inner))).sum().backward()
        model.zero_grad()
        model(inputs_of(transport.rank, 2)).backward()
        return {"seen": [gradients(model)], "plans": []}

    first, second = run_ranks(worker, 2)
    assert_equal_bits(first, second)
    model = Chain()
    change_added(model)
    for rank in range(2):
        (model(inputs_of(rank, 2)) / 2).backward()
    assert_close(first["seen"][0], gradients(model))


class TiedInCheckpoints(nn.Module):
    """``e`` shares its weight with ``a``; layers named in ``inside`` run in a reentrant checkpoint."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self.inside = inside
        self.a, self.b, self.e = (linear(seed) for seed in range(3))
        self.e.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in "abe":
            x = checkpoint(self.run, x, name, use_reentrant=True) if name in self.inside else self.run(x, name)
        return x.sum()

    def run(self, x: torch.Tensor, name: str) -> torch.Tensor:
        layer = getattr(self, name)
        return torch.tanh(layer(x.to(layer.weight.dtype))).double()


@pytest.mark.parametrize("inside", ["", "a", "e", "b", "ae"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_layer_is_converted_beside_one_that_arrives_twice(world: int, inside: str) -> None:
    def drive(model, ranks, world):
        seen = []
        for number in range(6):
            model.zero_grad()
            if number == 4:
                model.b.to(torch.float32)
            for rank in ranks:
                (model(inputs_of(rank, number).requires_grad_()) / world).backward()
            seen.append(gradients(model))
        return seen

    def worker(transport):
        model = TiedInCheckpoints(inside)
        stretto.attach(model, transport=transport)
        return drive(model, [transport.rank], 1)

    wanted = drive(TiedInCheckpoints(inside), range(world), world)
    for found in run_ranks(worker, world):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


def test_a_frozen_layer_that_is_added_takes_rank_0s_values() -> None:
    def worker(transport):
        model = Chain()
        sync = stretto.attach(model, transport=transport)
        model(inputs_of(0, 0)).backward()
        model.d = linear(30 + transport.rank).requires_grad_(False)
        model(inputs_of(0, 1)).backward()
        return model.d.weight.tolist(), sync.statistics.plans

    first, second = run_ranks(worker, 2)
    assert first == second
    assert first[0] == linear(30).weight.tolist()


# Buffers


def test_a_buffer_that_differs_between_ranks_is_named_on_all() -> None:
    def worker(transport):
        model = Chain()
        model.register_buffer("seen", torch.zeros(2))
        stretto.attach(model, transport=transport)
        model(inputs_of(0, 0)).backward()
        model.seen = torch.ones(3 if transport.rank == 1 else 2)
        with pytest.raises(stretto.ModelMismatchError) as caught:
            model(inputs_of(0, 1)).backward()
        model.seen = torch.full((3,), float(transport.rank + 5))
        model(inputs_of(0, 2)).backward()
        model(inputs_of(0, 3)).backward()
        return str(caught.value), model.seen.tolist()

    told, other = run_ranks(worker, 2)
    assert told == other
    assert told[1] == [5.0] * 3
    assert "  buffer seen: 2 float32 cpu on rank 0; 3 float32 cpu on rank 1\n" in told[0]


# What stays and what does not


def test_nothing_keeps_a_dropped_model_alive() -> None:
    def worker(transport):
        model = Chain()
        frozen_at_the_start(model)
        stretto.attach(model, transport=transport)
        for number in range(4):
            if number == 2:
                dropped = weakref.ref(model.c.weight)
                change_many(model)
            model(inputs_of(transport.rank, number)).backward()
        gc.collect()
        assert dropped() is None
        return [weakref.ref(one) for one in (model, *model.children())]

    for references in run_ranks(worker, 2):
        gc.collect()
        assert all(reference() is None for reference in references)


TABLES = (
    torch_module._global_parameter_registration_hooks,
    torch_module._global_buffer_registration_hooks,
    torch_module._global_module_registration_hooks,
)


def test_detaching_leaves_no_hook() -> None:
    before = [dict(table) for table in TABLES]

    def worker(transport):
        model = Chain()
        frozen_at_the_start(model)
        handles = [stretto.attach(model, transport=transport)]
        other = Chain()
        handles.append(stretto.attach(other, transport=transport))
        model(inputs_of(0, 0)).backward()
        change_added(model)
        for handle in handles:
            handle.detach()
        return [p._post_accumulate_grad_hooks for one in (model, other) for p in one.parameters()]

    assert not any(hooks for found in run_ranks(worker, 2) for hooks in found)
    gc.collect()

    stretto.attach(Chain())  # a world of one watches nothing
    assert all(table.keys() <= was.keys() for table, was in zip(TABLES, before, strict=True))


def test_without_a_change_nothing_more_is_sent() -> None:
    def worker(transport):
        recording, model = RecordingTransport(transport), Chain()
        frozen_at_the_start(model)
        stretto.attach(model, transport=recording, bucket_cap_mb=1e-6)
        for number in range(40):
            model.zero_grad()
            recording.calls.clear()
            Chain().extra = linear(3)  # somebody else's
            model(inputs_of(transport.rank, number)).backward()
            if number:
                assert [kind for kind, _ in recording.calls] == ["all_reduce"] * 4

    run_ranks(worker, 2)


# The module is gone, its parts live on


def unfrozen(a: nn.Linear, b: nn.Linear) -> None:
    b.requires_grad_(True)


def put_in(a: nn.Linear, b: nn.Linear) -> None:
    a.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def cast(a: nn.Linear, b: nn.Linear) -> None:
    a.float()


FREED = {unfrozen: "1.bias, 1.weight", put_in: "one of shape (3,)", cast: "0.weight, 0.bias"}


@pytest.mark.parametrize("change", FREED)
@pytest.mark.parametrize("keeps", ["the handle", "the module", "nothing"])
def test_a_container_that_nobody_keeps(change, keeps: str) -> None:
    """Its handle keeps the module. Without either nothing can be followed, and a rank would train by itself."""

    def worker(transport):
        a, b = linear(0), linear(1)
        b.requires_grad_(False)
        box = nn.ModuleList([a, b])
        sync = stretto.attach(box, transport=transport)
        kept = {"the handle": sync, "the module": box}.get(keeps)
        del box, sync
        for number in range(3):
            if number == 2:
                change(a, b)
            for layer in (a, b):
                layer.zero_grad()
            x = inputs_of(transport.rank, number)
            b(a(x.to(a.weight.dtype)).double()).sum().backward()
        assert kept is not None
        return {
            name: one.grad.tolist() for layer in (a, b) for name, one in layer.named_parameters() if one.requires_grad
        }

    if keeps != "nothing":
        one, other = run_ranks(worker, 2)
        assert one == other
        return
    with pytest.raises(stretto.SetupError) as caught:
        run_ranks(worker, 2)
    told = str(caught.value).replace("rank 1,", "rank 0,").replace("1.weight, 1.bias", "1.bias, 1.weight")
    assert told == (
        f"rank 0, pass 3: nothing averages the gradient of {FREED[change]}, unfrozen, converted or added after the "
        "module was attached. That module has been freed, so the plan cannot follow the change.\n"
        "Keep the module, or its handle, as long as its parts are trained: sync = stretto.attach(module)"
    )


# The drop-in


def through_the_drop_in(rank: int):
    model = Chain()
    model.register_buffer("count", torch.zeros(()))
    model._ddp_params_and_buffers_to_ignore = ["c.weight"]
    ddp = stretto.DistributedDataParallel(model)
    seen = []
    for number in range(1, 6):
        ddp.zero_grad()
        if number == 3:
            change_many(model)
            model.h = linear(9)
            model.h.register_buffer("scale", torch.full((2,), float(rank)))
        ddp(inputs_of(rank, number)).backward()
        seen.append(gradients(model))
    return seen, model.h.scale


def rewritten_below_the_drop_in(rank: int) -> list[dict[str, torch.Tensor | None]]:
    model, seen = Chain(), []
    ddp = stretto.DistributedDataParallel(model)
    for number in range(1, 5):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        optimizer.zero_grad()
        ddp(inputs_of(rank, number)).backward()
        seen.append(gradients(model))
        optimizer.step()
        if number == 2:
            del optimizer
            change_all_rewritten(model)
    return seen


@pytest.mark.ranks
def test_all_are_replaced_past_registration_below_the_drop_in() -> None:
    first, second = spawn_ranks(rewritten_below_the_drop_in, 2)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


@pytest.mark.ranks
def test_through_the_drop_in() -> None:
    (first, scale), (second, other) = spawn_ranks(through_the_drop_in, 2)
    assert scale.tolist() == other.tolist() == [0.0, 0.0]
    model = Chain()
    for number, (one, two) in enumerate(zip(first, second, strict=True), 1):
        model.zero_grad()
        if number == 3:
            change_many(model)
            model.h = linear(9)
        parts = []
        for rank in range(2):
            model.zero_grad()
            model(inputs_of(rank, number)).backward()
            parts.append(gradients(model))
        for name in one:
            if name == "c.weight":
                torch.testing.assert_close(one[name], parts[0][name])
                torch.testing.assert_close(two[name], parts[1][name])
            elif parts[0][name] is not None:
                torch.testing.assert_close(one[name], (parts[0][name] + parts[1][name]) / 2)
                assert torch.equal(one[name], two[name])


@pytest.mark.parametrize("idle", [False, True])
def test_where_words_come_late_a_layer_is_unfrozen_that_one_rank_alone_uses_at_first(
    monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """The others followed a pass later, after their step, and their copies of the layer were no longer the same."""
    words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> list[list[float | None]]:
        layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(3)])
        for layer in layers:
            torch.nn.init.ones_(layer.weight)
        layers[2].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport, check_every=0)
        found = []
        for number in range(1, 6):
            layers.zero_grad()
            layers[2].requires_grad_(number > 2)
            if idle and transport.rank == 2:
                sync.shadow_pass()
                continue
            total = layers[0].weight.sum() + layers[1].weight.sum()
            if transport.rank == 0 or number > 3:
                total = total + layers[2].weight.sum()
            total.backward()
            found.append([None if one.grad is None else one.grad.item() for one in layers.parameters()])
        return found

    ranks = 3
    share = pytest.approx((ranks - idle) / ranks)
    right = [[share, share, None]] * 2 + [[share, share, pytest.approx(1 / ranks)]] + [[share] * 3] * 2
    assert run_ranks(worker, ranks)[: ranks - idle] == [right] * (ranks - idle)


def test_where_words_come_late_a_parameter_gets_another_shape_that_one_rank_alone_uses_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an embedding that grows. The others followed after their step, so that their copies differed for good."""
    words_come_late(monkeypatch)

    def worker(transport: LocalTransport) -> tuple[list[list[float] | None], list[float]]:
        layers = torch.nn.ModuleList([torch.nn.Linear(1, 2, bias=False) for _ in range(2)])
        sync = stretto.attach(layers, transport=transport, check_every=0)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
        found = []
        for number in range(1, 6):
            optimizer.zero_grad()
            if number == 3:
                layers[1].weight.data = torch.ones(3, 1)
            total = layers[0].weight.sum()
            if transport.rank == 0 or number != 3:
                total = total + layers[1].weight.sum() * (1 + transport.rank)
            total.backward()
            gradient = layers[1].weight.grad
            found.append(None if gradient is None else gradient.flatten().tolist())
            optimizer.step()
        sync.check()
        return found, layers[1].weight.flatten().tolist()

    means = [[1.5] * 2, [1.5] * 2, [0.5] * 3, [1.5] * 3, [1.5] * 3]
    assert run_ranks(worker, 2) == [(means, [1 - 0.5 * 3.5] * 3)] * 2
