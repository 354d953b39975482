"""Without ``zero_grad``: what ``.grad`` holds when a pass begins stays, and what is new is reduced as was asked."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from models import Fails

import stretto
from stretto.preset import Preset
from stretto.testing import run_ranks


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


class Two(torch.nn.Module):
    """Two layers, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return (self.second(x).tanh() if both else x).square().mean()


ACCUMULATING: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduce": "sum"},
    "sum, predivided": {"reduce": "sum", "predivide_factor": 2.0},
    "mean, predivided": {"predivide_factor": 2.0},
    "weighted mean": {"weighted": True},
    "weighted sum": {"reduce": "sum", "weighted": True},
    "sum in float32": {"reduce": "sum", "reduce_dtype": torch.float32},
    "sum after backward": {"reduce": "sum", "delay": True},
}


def factors(options: dict[str, Any], world: int) -> list[float]:
    """What each rank's gradients count for."""
    weights = [float(1 + rank) if "weighted" in options else 1.0 for rank in range(world)]
    return weights if "reduce" in options else [weight / sum(weights) for weight in weights]


def uses_both(number: int, rank: int) -> bool:
    return number not in (3, 4) or (number, rank) == (4, 0)


@pytest.mark.parametrize("cap", [1e-6, 1.0])
@pytest.mark.parametrize("between", ["nothing", "scaled", "zeros", "preset", "None for one"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("how", ACCUMULATING)
def test_what_is_there_stays_and_what_is_new_is_reduced(how: str, micro: int, between: str, cap: float) -> None:
    options, world = ACCUMULATING[how], 3

    def prepare(model: Two, number: int) -> None:
        for name, parameter in model.named_parameters():
            if between == "scaled" and parameter.grad is not None:
                parameter.grad.mul_(0.5)
            elif between == "zeros" and parameter.grad is not None and number % 2:
                parameter.grad.zero_()
            elif between == "preset" and number % 2:
                parameter.grad = torch.full_like(parameter, 0.25)
            elif between == "None for one" and name == "first.weight":
                parameter.grad = None

    def drive(model: Two, ranks: Any, shares: list[float], sync: Any = None) -> list[list[torch.Tensor]]:
        seen = []
        for number in range(7):
            prepare(model, number)
            for part in range(micro):
                silent = sync is not None and part < micro - 1
                with sync.no_sync() if silent else contextlib.nullcontext():
                    for rank in ranks:
                        x = batch(rank + 10 * part + 100 * number)
                        (model(x, uses_both(number, rank)) * shares[rank]).backward()
            seen.append([parameter.grad.clone() for parameter in model.parameters()])
        return seen

    def worker(transport):
        model = Two()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=cap, **options)
        if "weighted" in options:
            sync.weight = 1 + transport.rank
        return drive(model, [transport.rank], [1.0] * world, sync)

    wanted = drive(Two(), range(world), factors(options, world))
    ranks = run_ranks(worker, world)
    close = {"rtol": 1e-4, "atol": 1e-5} if "reduce_dtype" in options else {}
    for found in ranks:
        for one, other, same in zip(found, wanted, ranks[0], strict=True):
            for a, b, c in zip(one, other, same, strict=True):
                torch.testing.assert_close(a, b, **close)
                assert torch.equal(a, c)


@pytest.mark.parametrize("how", ACCUMULATING)
def test_what_ranks_have_preset_differently_becomes_its_mean(how: str) -> None:
    options = ACCUMULATING[how]

    def worker(transport):
        model = Two()
        sync = stretto.attach(model, transport=transport, **options)
        if "weighted" in options:
            sync.weight = 1 + transport.rank
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(transport.rank))
        (model(batch(0), True) * 0.0).backward()
        return [parameter.grad for parameter in model.parameters()]

    wanted = 2 / 3 if how == "weighted mean" else 0.5
    for found in run_ranks(worker, 2):
        assert all(torch.allclose(gradient, torch.full_like(gradient, wanted)) for gradient in found)


class Kept(torch.nn.Module):
    """Two parameters of ones; gradients of the second are sparse if asked for."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(1, 3, bias=False, dtype=torch.float64)
        self.second = torch.nn.Embedding(2, 3, sparse=sparse, dtype=torch.float64)

    def forward(self, size: float) -> torch.Tensor:
        first = self.first(torch.full((1, 1), size, dtype=torch.float64))
        return first.sum() + (self.second(torch.tensor([1])) * size).sum()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("change", ["unfrozen", "another dtype", "another parameter"])
@pytest.mark.parametrize("how", ["mean", "sum", "weighted sum", "sum after backward"])
def test_what_is_kept_over_a_change_of_the_module_is_counted_once(how: str, change: str, sparse: bool) -> None:
    def worker(transport):
        model = Kept(sparse)
        sync = stretto.attach(model, transport=transport, **ACCUMULATING[how])
        if "weighted" in ACCUMULATING[how]:
            sync.weight = 1 + transport.rank
        seen = []
        for number in range(6):
            if change == "unfrozen":
                model.second.weight.requires_grad_(number % 3 != 1)
            elif change == "another dtype" and number == 2:
                kept = model.second.weight.grad
                model.second.weight.grad = None
                model.second.float()
                model.second.weight.grad = kept.float()
            elif number == 2:
                new = torch.nn.Parameter(model.second.weight.detach().clone())
                new.grad, model.second.weight = model.second.weight.grad, new
            model(1.0 + transport.rank).backward()
            seen.append([one.grad.to_dense().double()[-1].max().item() for one in model.parameters()])
        return seen

    mine = factors(ACCUMULATING[how], 2)
    once = mine[0] * 1 + mine[1] * 2
    frozen = (1, 4) if change == "unfrozen" else ()
    wanted = [[once * number, once * len({*range(number)} - {*frozen})] for number in range(1, 7)]
    for found in run_ranks(worker, 2):
        assert found == wanted


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("how", ACCUMULATING)
def test_what_is_kept_in_memory_that_a_parameter_has_left_is_still_there(how: str, kernels: bool, at: int) -> None:
    """Its strides change, and ``.grad`` stays where it is. Those of a matrix are seen when the order changes, too."""

    def worker(transport):
        first, second = (torch.nn.Conv2d(2, 2, 2) if kernels else torch.nn.Linear(2, 2) for _ in range(2))
        model = torch.nn.ModuleList([first, second])
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        sync = stretto.attach(model, transport=transport, **ACCUMULATING[how])
        if "weighted" in ACCUMULATING[how]:
            sync.weight = 1.0 + transport.rank
        seen = []
        for number in range(6):
            if number == at:
                for layer in model:
                    layer.weight.data = layer.weight.data.transpose(0, 1).contiguous().transpose(0, 1)
            one, other = (second, first) if number == at + 1 else (first, second)
            loss = sum((layer.weight * (1 + transport.rank)).sum() + layer.bias.sum() for layer in (one, other))
            loss.backward()
            seen.append([parameter.grad.aminmax() for parameter in model.parameters()])
        return seen

    mine = factors(ACCUMULATING[how], 2)
    weight, bias = mine[0] * 1 + mine[1] * 2, sum(mine)
    for found in run_ranks(worker, 2):
        for number, gradients in enumerate(found, 1):
            wanted = torch.tensor([weight, weight, bias, bias] * 2) * number
            torch.testing.assert_close(torch.tensor(gradients).flatten(), wanted)


def test_what_is_accumulated_beside_a_pass_of_others_is_summed() -> None:
    """A pass that reaches another model of the family, and on the other rank this one too."""

    def worker(transport):
        outer = torch.nn.ModuleDict({"inner": Two(), "other": Two()})
        inner = stretto.attach(outer["inner"], transport=transport, reduce="sum")
        stretto.attach(outer, transport=transport, reduce="sum")

        def reach(*names: str) -> None:
            sum(outer[name](batch(transport.rank), True) for name in names).backward()

        reach("inner", "other")
        with inner.no_sync():
            outer["inner"](batch(transport.rank), True).backward()
        reach("other", *(["inner"] if transport.rank else []))
        reach("inner", "other")
        return [one.grad for one in outer["inner"].parameters()]

    alone = [Two() for _ in range(2)]
    for rank, one in enumerate(alone):
        one(batch(rank), True).backward()
    wanted = [a.grad * 3 + b.grad * 4 for a, b in zip(*(one.parameters() for one in alone), strict=True)]
    for found in run_ranks(worker, 2):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_were_only_asked_for_are_not_accumulated(sparse: bool, frozen: bool) -> None:
    """``torch.autograd.grad`` runs the hooks that look at ``.grad``, and leaves it as it is."""

    def worker(transport):
        model = Kept(sparse)
        sync = stretto.attach(model, transport=transport, reduce="sum")
        size, second = 1.0 + transport.rank, model.second.weight
        if frozen:
            second.requires_grad_(False)
            model(size).backward()
            second.requires_grad_(True)
        for parameter in (model.first.weight, second):
            parameter.grad = torch.zeros_like(parameter)
        for number in range(6):
            if number % 3:
                with sync.no_sync():
                    model(size).backward()
            else:
                model(size).backward()
            torch.autograd.grad(model(size), [*model.parameters()])
        model(size).backward()
        return [one.grad.to_dense()[-1].max().item() for one in model.parameters()]

    assert run_ranks(worker, 2) == [[21.0, 21.0]] * 2


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("change", ["nothing", "another dtype", "another parameter", "unfrozen"])
def test_what_was_accumulated_before_it_was_frozen_is_reduced(change: str, reduce: str, alike: bool) -> None:
    """In the next synchronised pass, whatever else has happened to it; on all ranks, or by one alone."""

    def worker(transport):
        model = Kept(False)
        second = model.second
        stays = change == "unfrozen"
        if stays:
            second.weight.requires_grad_(False)
        sync = stretto.attach(model, transport=transport, reduce=reduce)
        model(1.0).backward()
        model.zero_grad()
        if change == "another dtype":
            second.float()
        elif change == "another parameter":
            second.weight = torch.nn.Parameter(second.weight.detach().clone())
        second.weight.requires_grad_(True)
        with sync.no_sync():
            if alike or not transport.rank:
                model(1.0 + transport.rank).backward()
        second.weight.requires_grad_(False)
        model(1.0).backward()
        found = second.weight.grad[-1].max().item()
        model.zero_grad()
        model(1.0).backward()
        return found, second.weight.grad is None

    total = 3.0 if alike else 1.0
    assert run_ranks(worker, 2) == [(total if reduce == "sum" else total / 2, True)] * 2


def test_detaching_takes_all_hooks_off() -> None:
    def worker(transport):
        model = Two()
        sync = stretto.attach(model, transport=transport, reduce="sum")
        model(batch(transport.rank), True).backward()
        sync.detach()
        return [len(parameter._backward_hooks or ()) for parameter in model.parameters()]

    assert run_ranks(worker, 2) == [[0] * 4] * 2


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("silent", [0, 1])
def test_of_a_sum_what_was_cleared_after_a_silent_pass_counts_no_more(silent: int, cleared: bool, graph: bool) -> None:
    """Rank ``silent`` has a gradient without synchronisation; rank 1 alone uses the parameter in the pass after it."""

    def worker(transport):
        model = torch.nn.ParameterDict({"sometimes": torch.zeros(3), "always": torch.zeros(3)})
        sync = stretto.attach(model, transport=transport, reduce="sum")
        (model["sometimes"] + model["always"]).sum().backward()  # 2 each
        if transport.rank == silent:
            with sync.no_sync():
                model["sometimes"].sum().backward(create_graph=graph)  # 1 more here
        if cleared:
            model.zero_grad()
        (model["sometimes"] * transport.rank * 4 + model["always"]).sum().backward()
        return model["sometimes"].grad.tolist()

    assert run_ranks(worker, 2) == [[4.0 if cleared else 2.0 + 1.0 + 4.0] * 3] * 2


def test_of_a_sum_what_follows_a_backward_that_failed_is_summed() -> None:
    def worker(transport):
        model = torch.nn.ParameterList([torch.zeros(()) for _ in range(2)])
        first, second = model
        sync = stretto.attach(model, transport=transport, reduce="sum")
        x = torch.ones((), requires_grad=True)
        with contextlib.suppress(ValueError, stretto.PeerError):
            ((Fails.apply(x) if transport.rank == 0 else x) + first + second).backward()
        model.zero_grad()
        with sync.no_sync():
            (first + second).backward()
        (first + second).backward()
        return [parameter.grad.item() for parameter in model]

    assert run_ranks(worker, 2) == [[4.0, 4.0]] * 2


def test_of_a_sum_what_another_handle_begins_is_new_as_well() -> None:
    """The last gradient that was looked at is not this pass's, where a pass of both begins with one of the other's."""

    def worker(transport):
        one, two = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        first = stretto.attach(one, transport=transport)
        sync = stretto.attach(two, transport=transport, reduce="sum", beside=[first])
        two.weight.sum().backward()
        with sync.no_sync():
            two.weight.sum().backward()
        two.zero_grad()
        (two.weight.sum() + one.weight.sum()).backward()  # the one built last comes first
        return two.weight.grad.item()

    assert run_ranks(worker, 2) == [2.0] * 2


@pytest.mark.parametrize("kept", [False, True])
def test_of_a_sum_what_another_devices_thread_has_added_before_the_first_gradient_came_is_new(kept: bool) -> None:
    """Its hook has not been called yet. What it holds of backward passes without synchronisation is new as well."""
    early, first = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
    preset, before = Preset(), []
    preset.follow([early, first])
    if kept:
        for one in (early, first):
            one.grad = torch.full((), 3.0)
        (early + first).backward()
        for one in (early, first):
            preset.accumulated(one)

    def arrived(_: object) -> None:
        assert early.grad is not None and early.grad == (5.0 if kept else 1.0), "it has come before"
        preset.begin()
        before.extend([preset.before(early), preset.before(first)])

    first.register_post_accumulate_grad_hook(arrived)
    (early + first).backward()
    assert early.grad is not None
    assert early.grad == first.grad == (5.0 if kept else 1.0) and before == ([3.0, 3.0] if kept else [None, None])


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_of_a_sum_a_layer_that_gets_another_name_is_summed_once(sparse: bool, silent: bool) -> None:
    """A layer is inserted before it, so the module has another under its old name."""

    def worker(transport):
        model = torch.nn.ModuleList([torch.nn.Embedding(2, 1, sparse=sparse), torch.nn.Linear(1, 1)])
        sync = stretto.attach(model, transport=transport, reduce="sum")
        first = torch.zeros(1, dtype=torch.long)
        if silent:
            with sync.no_sync():
                model[0](first).sum().backward()
        model.insert(0, torch.nn.Linear(1, 1))
        (model[1](first).sum() + model[0].bias.sum() + model[2].bias.sum()).backward()
        return [model[1].weight.grad.to_dense()[0].item(), model[0].bias.grad.item(), model[2].bias.grad.item()]

    assert run_ranks(worker, 3) == [[6.0 if silent else 3.0, 3.0, 3.0]] * 3


def test_of_a_sum_tied_weights_are_untied() -> None:
    def worker(transport):
        one, two = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        two.weight = one.weight
        model = torch.nn.ModuleList([one, two])
        stretto.attach(model, transport=transport, reduce="sum")
        one.weight = torch.nn.Parameter(torch.ones(1, 1))
        (one.weight + two.weight).sum().backward()
        return one.weight.grad.item(), two.weight.grad.item()

    assert run_ranks(worker, 3) == [(3.0, 3.0)] * 3


def test_of_a_sum_a_frozen_layer_is_added_beside_one_that_gets_another_name() -> None:
    def worker(transport):
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])
        stretto.attach(model, transport=transport, reduce="sum")
        model.append(torch.nn.Linear(1, 1).requires_grad_(False))
        model[0].weight.sum().backward()
        return model[0].weight.grad.item(), model[1].weight.grad

    assert run_ranks(worker, 2) == [(2.0, None)] * 2


@pytest.mark.parametrize("looks", [True, False])
def test_of_a_sum_what_a_rank_holds_of_a_layer_that_another_asks_for_counts_once(looks: bool) -> None:
    """Whether or not it has looked at its own module, in which nothing has changed."""

    def worker(transport):
        layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        frozen = layers[1].weight.requires_grad_(False)
        frozen.grad = torch.full_like(frozen, 5.0)
        sync = stretto.attach(layers, transport=transport, reduce="sum")
        layers[0].weight.sum().backward()
        if looks:
            layers.add_module("none", torch.nn.Identity())
        if not transport.rank:
            frozen.requires_grad_(True)
            with sync.no_sync():
                (frozen * 3).sum().backward()
            frozen.requires_grad_(False)
        layers[0].weight.sum().backward()
        return frozen.grad.item()

    assert run_ranks(worker, 2) == [8.0] * 2


def test_of_a_sum_a_layer_gets_another_name_while_a_rank_is_idle() -> None:
    def worker(transport):
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        sync = stretto.attach(model, transport=transport, reduce="sum")
        first = model[0].weight
        first.grad = torch.full_like(first, 100.0) if transport.rank else None
        model.insert(0, torch.nn.Linear(1, 1, bias=False))
        if transport.rank:
            sync.shadow_pass()
        else:
            (first * 8).sum().backward()
        return first.grad.item()

    assert run_ranks(worker, 2) == [8.0, 100.0]


def test_of_a_sum_what_is_preset_after_a_silent_pass_is_averaged_though_it_lies_where_the_old_gradient_lay() -> None:
    """A new tensor gets the address, and the id, of the one that has just been freed."""

    def worker(transport):
        model = torch.nn.Linear(3, 1, bias=False)
        sync = stretto.attach(model, transport=transport, reduce="sum")
        with sync.no_sync():
            model.weight.sum().backward()
        model.weight.grad = None
        model.weight.grad = torch.empty_like(model.weight).copy_(torch.full((1, 3), 100.0))
        model.weight.sum().backward()
        return model.weight.grad.tolist()

    assert run_ranks(worker, 2) == [[[102.0] * 3]] * 2
