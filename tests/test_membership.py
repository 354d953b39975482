"""The module changes after it was attached: the plan follows, and the gradients of that very pass are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stretto
from stretto.testing import run_ranks, spawn_ranks

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


def train(change: str, transport, cap: float | None, uneven: bool, how: str, **options):
    model, seen, plans = Chain(), [], Plans()
    if change == "unfrozen":
        frozen_at_the_start(model)
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=cap, **options)
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
    result = {"seen": seen, "plans": plans.changed, "count": sync.statistics.plans, "names": sync.plan.parameters}
    sync.detach()
    return result


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
