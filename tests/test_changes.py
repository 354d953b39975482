"""A change of the module that alters no arithmetic must alter no gradient, whatever was accumulated before it.

Each history runs twice, with the change and without it, and every ``.grad`` of every rank is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Fails

import stretto
from stretto.testing import run_ranks
from stretto.transport import Transport

IDLE = "idle"
PASSES = [("abc", "abc"), ("a", "bc"), ("bc", "bc"), ("bc", "a"), ("abc", IDLE), (IDLE, "a"), ("bc", IDLE)]
"""Which layers each rank uses in the pass of the change."""
BEFORE = [
    [],
    [("pass", "abc", "abc")],
    [("pass", "abc", "abc"), ("clear", "rank 0", "")],
    [("silent", "a", "a")],
    [("silent", "a", "")],
    [("silent", "ac", "c")],
    [("pass", "abc", "abc"), ("silent", "a", "a")],
    [("pass", "abc", "abc"), ("silent", "", "ac")],
    [("pass", "abc", "abc"), ("silent", "c", "a"), ("clear", "", "rank 1")],
]
"""What has happened by then, on each rank."""


def renamed(model: torch.nn.ModuleList) -> None:
    model.insert(0, torch.nn.Linear(1, 1, bias=False))


def renamed_by_a_frozen_one(model: torch.nn.ModuleList) -> None:
    model.insert(0, torch.nn.Linear(1, 1, bias=False).requires_grad_(False))


def converted(model: torch.nn.ModuleList) -> None:
    model.double()


def channels_last(model: torch.nn.ModuleList) -> None:
    model.to(memory_format=torch.channels_last)


def converted_and_renamed(model: torch.nn.ModuleList) -> None:
    converted(model)
    renamed(model)


def longer(model: torch.nn.ModuleList) -> None:
    model.append(torch.nn.Linear(1, 1, bias=False))


def swapped(model: torch.nn.ModuleList) -> None:
    model[1], model[2] = model[2], model[1]


CHANGES = [renamed, renamed_by_a_frozen_one, converted, channels_last, converted_and_renamed, longer, swapped]


def train(layers: dict[str, torch.nn.Module], used: str, scale: float) -> None:
    outputs = {
        name: layer(torch.tensor([1])) if isinstance(layer, torch.nn.Embedding) else layer.weight
        for name, layer in layers.items()
    }
    total = sum(outputs[name].sum().double() * scale * factor for factor, name in enumerate("abc", 1) if name in used)
    assert isinstance(total, torch.Tensor)
    total.backward()


def gradients(
    change: Callable[[torch.nn.ModuleList], None] | None, history: list[Any], sparse: bool, options: dict[str, Any]
) -> list[list[list[float] | None]]:
    """Of the three layers, on both ranks."""

    def worker(transport: Transport) -> list[list[float] | None]:
        a = torch.nn.Embedding(3, 2, sparse=True) if sparse else torch.nn.Linear(1, 2, bias=False)
        layers = {"a": a, "b": torch.nn.Linear(1, 2, bias=False), "c": torch.nn.Conv2d(2, 2, 2, bias=False)}
        model = torch.nn.ModuleList([layers["b"], a, layers["c"]])
        sync = stretto.attach(model, transport=transport, **options)
        for what, *of_ranks in history:
            mine = of_ranks[transport.rank]
            scale = 1.0 + 10 * transport.rank
            if what == "change" and change is not None:
                change(model)
            elif what == "clear" and mine:
                model.zero_grad(set_to_none=transport.rank == 0)
            elif what == "silent" and mine:
                with sync.no_sync():
                    train(layers, mine, 100 * scale)
            elif what == "pass" and mine == IDLE:
                sync.shadow_pass()
            elif what == "pass":
                train(layers, mine, scale)
        found = [layer.weight.grad for layer in layers.values()]
        return [None if one is None else [round(x, 3) for x in one.to_dense().flatten().tolist()] for one in found]

    return run_ranks(worker, 2)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce": "sum"}, {"weighted": True}, {"predivide_factor": 2.0}, {"reduce": "sum", "weighted": True}],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "mean",
)
def test_a_change_that_alters_no_arithmetic_alters_no_gradient(options: dict[str, Any], sparse: bool) -> None:
    """With options, a third of the changes in turn for each history: they alter factors, not what is held."""
    different = []
    for number, (before, used) in enumerate(itertools.product(BEFORE, PASSES)):
        history = [*before, ("change", "", ""), ("pass", *used), ("pass", "b", "b")]
        right = gradients(None, history, sparse, options)
        for change in CHANGES[number % 3 :: 3] if options else CHANGES:
            found = gradients(change, history, sparse, options)
            if found != right:
                different.append((change.__name__, history, right, found))
    assert not different, f"{len(different)} differ, the first: {different[0]}"


def test_of_a_sum_an_idle_rank_gives_nothing_of_what_it_has_accumulated() -> None:
    history = [("pass", "a", "a"), ("silent", "", "a"), ("pass", "a", IDLE)]
    (of_rank_0, _, _), (of_rank_1, _, _) = gradients(None, history, False, {"reduce": "sum"})
    assert of_rank_0 == [7.0, 7.0]  # 1, and its part of the 12 that all held
    assert of_rank_1 == [1112.0, 1112.0]


@pytest.mark.parametrize("taken", [False, True], ids=["", "old-name-taken"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("keeping", [(0,), (1,), (0, 2)])
def test_a_layer_that_some_ranks_rename_and_others_build_anew_counts_once(
    keeping: tuple[int, ...], reduce: str, sparse: bool, taken: bool
) -> None:
    """The ranks that keep it have sent its gradient by its old name, and have only the sum of theirs by then."""
    world = 2 if keeping == (1,) else 3

    def made() -> torch.nn.Module:
        return torch.nn.Embedding(3, 2, sparse=True) if sparse else torch.nn.Linear(1, 2, bias=False)

    def worker(transport: Transport) -> list[list[float]]:
        model = torch.nn.ModuleDict({"a": made(), "c": torch.nn.Linear(1, 2, bias=False)})
        stretto.attach(model, transport=transport, reduce=reduce)  # type: ignore[arg-type]
        found = []
        for number in range(3):
            model.zero_grad()
            if number == 1:
                old = model.pop("a")
                model["b"] = old if transport.rank in keeping else made()
                if taken:
                    model["a"] = made()
                del old
            train(dict(model.items()), "".join(model), 1.0 + 10 * transport.rank)
            found.append([model[name].weight.grad.sum().item() for name in sorted(model)])
        return found[1:]

    total = 2 * sum(1.0 + 10 * rank for rank in range(world)) / (world if reduce == "mean" else 1)
    wanted = [factor * total for factor in ((1, 2, 3) if taken else (2, 3))]
    for found in run_ranks(worker, world):
        assert found == [pytest.approx(wanted)] * 2


def after_a_pass_that_failed(change: Callable[[torch.nn.ModuleList], None], *, warm: bool, **shard: Any) -> Any:
    """The layer's gradient, or where the optimizer is sharded its values after a step, on both ranks."""

    def worker(transport: Transport) -> list[float]:
        model = torch.nn.ModuleList([torch.nn.Conv2d(2, 2, 2, bias=False), torch.nn.Linear(1, 2, bias=False)])
        for layer in model:
            torch.nn.init.ones_(layer.weight)  # threads draw from one generator, in whatever order
        weight, last = (layer.weight for layer in model)  # its gradient comes first
        sync = stretto.attach(model, transport=transport)
        optimizer = stretto.shard(torch.optim.SGD(model.parameters(), lr=1.0), sync, **shard) if shard else None

        def backward(*, fails: bool = False) -> None:
            here = weight.double() * 2
            total = (Fails.apply(here) if fails else here).sum() * (1.0 + transport.rank)
            (total + last.double().sum()).backward()

        if warm:
            backward()
            model.zero_grad()
        change(model)
        with pytest.raises((ValueError, stretto.PeerError)):
            backward(fails=transport.rank == 1)
        model.zero_grad()
        backward()
        if optimizer is not None:
            optimizer.step()
        found = weight if optimizer is not None else weight.grad
        assert found is not None
        return [round(one, 3) for one in found.detach().flatten().tolist()]

    return run_ranks(worker, 2)


@pytest.mark.parametrize("shard", [{}, {"keep_grads": True}, {"keep_grads": False}])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("change", [converted, channels_last])
def test_a_pass_that_failed_takes_nothing_of_a_change_for_the_next(change: Any, warm: bool, shard: Any) -> None:
    """On the rank where it did not fail a schedule was known then, and what fits its slot no more was sent twice."""
    found = after_a_pass_that_failed(change, warm=warm, **shard)
    right = after_a_pass_that_failed(lambda model: None, warm=warm, **shard)
    assert found == right
