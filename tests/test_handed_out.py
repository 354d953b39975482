"""What users do with ``.grad`` between passes: gradients kept, replaced, masked, detached, of another shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import gradients
from torch import nn

import stretto
from stretto.launch import TIDY_EVERY
from stretto.slots import Memory
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks

WORLDS = [2, 3]
CAPS = {"one each": 1e-6, "one for all": 1.0}
PASSES = 5


def net(layers: int = 5) -> nn.Sequential:
    model = nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(4, 4), nn.Tanh())))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def alone(world: int, number: int, model: nn.Module | None = None) -> list[torch.Tensor]:
    """What the mean over ranks is."""
    model = net() if model is None else model
    model.zero_grad()
    for rank in range(world):
        (model(batch(rank, number)).square().mean() / world).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_mean(found: Any, world: int, number: int, **tolerances: float) -> None:
    for one, other in zip(found, alone(world, number), strict=True):
        torch.testing.assert_close(one, other, **tolerances)


def backward(model: nn.Module, rank: int, number: int) -> None:
    model(batch(rank, number)).square().mean().backward()


def attached(transport: Any, cap: float, **options: Any) -> nn.Module:
    model = net()
    stretto.attach(model, transport=transport, bucket_cap_mb=cap, **options)
    return model


# Gradients that are kept while the next pass runs

KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the tensor": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "flat": lambda gradient: gradient.view(-1),
    "a part": lambda gradient: gradient[:2],
}


def keep_and_go_on(transport: Any, how: str, cap: float) -> None:
    model, kept, world = attached(transport, cap), [], transport.world_size
    for number in range(PASSES):
        model.zero_grad()
        backward(model, transport.rank, number)
        kept.append([KEPT[how](parameter.grad) for parameter in model.parameters()])
    for number, found in enumerate(kept):
        for one, other in zip(found, alone(world, number), strict=True):
            torch.testing.assert_close(one, KEPT[how](other))


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_that_a_user_keeps_stay_as_they_are(world: int, how: str, cap: str) -> None:
    run_ranks(lambda transport: keep_and_go_on(transport, how, CAPS[cap]), world)


def kept_in_a_process(rank: int, way: str) -> None:
    model, kept = net(), []
    stretto.attach(model, transport=way)
    for number in range(PASSES):
        model.zero_grad()
        backward(model, rank, number)
        kept.append([parameter.grad for parameter in model.parameters()])
    for number, found in enumerate(kept):
        assert_mean(found, 2, number)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["shared_memory", "process_group"])
def test_gradients_that_a_user_keeps_in_a_process(way: str) -> None:
    spawn_ranks(kept_in_a_process, 2, way)


def test_with_reduce_dtype_too() -> None:
    def worker(transport):
        model, kept = attached(transport, 1.0, reduce_dtype=torch.float64), []
        for number in range(PASSES):
            model.zero_grad()
            backward(model, transport.rank, number)
            kept.append([parameter.grad for parameter in model.parameters()])
        for number, found in enumerate(kept):
            assert_mean(found, 2, number)

    run_ranks(worker, 2)


@pytest.mark.parametrize("losses", [2, 3, 5])
def test_memory_that_was_left_to_a_user_is_used_again(losses: int) -> None:
    """Several losses a step, the gradients of each kept until the step (PCGrad)."""

    def worker(transport):
        model, places = attached(transport, 1.0), []
        for step in range(8):
            parts = []
            for loss in range(losses):
                model.zero_grad()
                backward(model, transport.rank, losses * step + loss)
                parts.append([parameter.grad for parameter in model.parameters()])
                assert_mean(parts[-1], 2, losses * step + loss)
            places.append({part[0].data_ptr() for part in parts})
            assert len(places[-1]) == losses
            for parameter, *them in zip(model.parameters(), *parts, strict=True):
                parameter.grad = torch.stack(them).sum(0)
            del parts, them
        if losses < 5:
            assert len(set.union(*places[1:])) == losses

    run_ranks(worker, 2)


def test_one_that_a_loop_left_in_a_variable_does_no_harm() -> None:
    def worker(transport):
        model, last = attached(transport, 1.0), None
        for number in range(6):
            model.zero_grad()
            backward(model, transport.rank, number)
            if last is not None:
                torch.testing.assert_close(last, alone(2, number - 1)[0])
            assert_mean([parameter.grad for parameter in model.parameters()], 2, number)
            last = next(model.parameters()).grad

    run_ranks(worker, 2)


def test_where_gradients_are_zeroed_in_place_who_looks_at_them_sees_the_next_ones() -> None:
    """As with one process: flat views that were taken once go on being views of ``.grad``."""

    def worker(transport):
        model = attached(transport, 1.0)
        backward(model, transport.rank, 0)
        views = [parameter.grad.view(-1) for parameter in model.parameters()]
        for number in range(1, PASSES):
            model.zero_grad(set_to_none=False)
            backward(model, transport.rank, number)
            for view, parameter, wanted in zip(views, model.parameters(), alone(2, number), strict=True):
                assert view.data_ptr() == parameter.grad.data_ptr()
                torch.testing.assert_close(view, wanted.view(-1))

    run_ranks(worker, 2)


def test_an_idle_pass_leaves_gradients_alone() -> None:
    def worker(transport):
        model = net()
        sync = stretto.attach(model, transport=transport)
        backward(model, transport.rank, 0)
        if transport.rank:
            sync.shadow_pass()
            assert_mean([parameter.grad for parameter in model.parameters()], 2, 0)
        else:
            backward(model, 0, 1)

    run_ranks(worker, 2)


def test_memory_that_was_left_to_a_user_once_goes_back() -> None:
    def worker(transport):
        asked = []

        class Counting(RecordingTransport):
            def allocate(self, numel, dtype, device):
                found = super().allocate(numel, dtype, device)
                asked.append(weakref.ref(found.untyped_storage()))
                return found

        model = net()
        stretto.attach(model, transport=Counting(transport), bucket_cap_mb=1.0)
        kept = []
        for number in range(4 * TIDY_EVERY):
            model.zero_grad()
            backward(model, transport.rank, number)
            if number < 4:
                kept.append([parameter.grad for parameter in model.parameters()])
            elif kept:
                kept.clear()
        return sum(storage() is not None for storage in asked)

    assert run_ranks(worker, 2) == [1, 1]


def test_memory_knows_who_uses_it() -> None:
    memory = Memory(torch.zeros(4).data)
    assert memory.idle()
    part = memory.flat[:2]
    assert not memory.idle()
    del part
    assert memory.idle()


# Gradients that are replaced


def replaced(model: nn.Module, how: str) -> None:
    for name, parameter in model.named_parameters():
        if how == "weights masked by data" and "weight" in name:
            parameter.grad.data = torch.where(parameter.data.abs() < 0.1, 0.0, parameter.grad.data)
        elif how == "saved and replaced by data":
            model.saved = [*getattr(model, "saved", [])[-20:], parameter.grad.data]
            parameter.grad.data = torch.zeros_like(parameter.grad)
        elif how == "one transposed in place" and name == "0.weight":
            parameter.grad.data = parameter.grad.data.t()
        elif how == "one to half" and name == "0.weight":
            parameter.grad.data = parameter.grad.data.half()
        elif how == "detached in place":
            parameter.grad.detach_()
            parameter.grad.zero_()
        elif how == "part of a flat tensor":
            parameter.grad = torch.zeros(100)[3 : 3 + parameter.numel()].view(parameter.shape)


REPLACED = [
    "weights masked by data",
    "saved and replaced by data",
    "one transposed in place",
    "one to half",
    "detached in place",
    "part of a flat tensor",
]


def replace_and_go_on(transport: Any, how: str, cap: float, clear: str) -> None:
    model = attached(transport, cap)
    for number in range(PASSES + 2):
        if clear != "by itself":
            model.zero_grad(set_to_none=clear == "none")
        backward(model, transport.rank, number)
        exact = {"rtol": 1e-3, "atol": 1e-3} if how == "one to half" else {}  # autograd adds to zeros of half precision
        assert_mean([parameter.grad for parameter in model.parameters()], transport.world_size, number, **exact)
        replaced(model, how)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("clear", ["none", "zeros"])
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_that_a_user_replaces(world: int, how: str, clear: str, cap: str) -> None:
    run_ranks(lambda transport: replace_and_go_on(transport, how, CAPS[cap], clear), world)


@pytest.mark.parametrize("how", ["detached in place", "part of a flat tensor"])
def test_gradients_that_a_user_zeroes_by_hand(how: str) -> None:
    run_ranks(lambda transport: replace_and_go_on(transport, how, 1.0, "by itself"), 2)


def test_one_rank_alone_moves_its_gradients_about() -> None:
    def worker(transport):
        model = attached(transport, 1.0)
        for number in range(6):
            backward(model, transport.rank, number)
            if number == 3 and transport.rank:
                model.double().float()
        return gradients(model)

    first, second = run_ranks(worker, 2)
    total = [sum(parts) for parts in zip(*(map(torch.clone, alone(2, number)) for number in range(6)), strict=True)]
    for name, wanted in zip(first, total, strict=True):
        torch.testing.assert_close(first[name], wanted)
        assert torch.equal(first[name], second[name])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_that_keeps_its_graph_leaves_plain_gradients() -> None:
    def worker(transport):
        model = attached(transport, 1.0)
        for number in range(PASSES):
            model.zero_grad()
            model(batch(transport.rank, number)).square().mean().backward(create_graph=number != 3)
            assert not any(parameter.grad.requires_grad for parameter in model.parameters())
            assert_mean([parameter.grad for parameter in model.parameters()], 2, number)

    run_ranks(worker, 2)


# Parameters whose shape changes under the plan


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(4, 3)) for _ in range(6)])
        self.parts.append(nn.Parameter(torch.ones(1, 3)))

    def forward(self, scale: float) -> torch.Tensor:
        return sum((scale * (i + 1) * part.double() ** 2).sum() for i, part in enumerate(self.parts))


def resize(model: Shapes, how: str) -> None:
    parts = model.parts
    if how == "rows go over":
        parts[2].data, parts[3].data = torch.ones(3, 3), torch.ones(5, 3)
    elif how == "one row less":
        parts[2].data = parts[2].data[:3]
    elif how == "one row":
        parts[1].data = torch.ones(1, 3)
    elif how == "transposed":
        parts[4].data = parts[4].data.t().contiguous()
    elif how == "a dimension less":
        parts[6].data = parts[6].data[0]
    elif how == "more of them":
        parts[0].data = torch.ones(2, 2, 3)
    elif how == "as many bytes of another type":
        parts[2].data = torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize(
    "how",
    [
        "rows go over",
        "one row less",
        "one row",
        "transposed",
        "a dimension less",
        "more of them",
        "as many bytes of another type",
    ],
)
def test_shapes_that_change_by_data_are_followed(how: str, at: int, cap: str) -> None:
    def worker(transport):
        model = Shapes()
        stretto.attach(model, transport=transport, bucket_cap_mb=CAPS[cap])
        for number in range(at + 3):
            model.zero_grad()
            if number == at:
                resize(model, how)
            model(1.0 + transport.rank).backward()
            for i, part in enumerate(model.parts):
                torch.testing.assert_close(part.grad, torch.full_like(part, 3.0 * (i + 1)))

    run_ranks(worker, 2)


def test_all_of_a_run_may_change_their_shape_alike() -> None:
    """They still fit each other, and take as many bytes."""

    def worker(transport):
        model = nn.ParameterList([nn.Parameter(torch.ones(4, 3)) for _ in range(6)])
        stretto.attach(model, transport=transport)
        for number in range(8):
            model.zero_grad()
            if number == 5:
                for part in model:
                    part.data = torch.ones(2, 6)
            sum((part * (i + 1)).sum() for i, part in enumerate(model)).mul(1 + transport.rank).backward()
            for i, part in enumerate(model):
                torch.testing.assert_close(part.grad, torch.full_like(part, 1.5 * (i + 1)))

    run_ranks(worker, 2)
