"""Embeddings with sparse gradients that are unfrozen, replaced, added or converted after attaching."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import ProcessGroupTransport

AT, PASSES = 3, 7


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def table(rows: int = 6, seed: int = 1, sparse: bool = True) -> nn.Embedding:
    return filled(nn.Embedding(rows, 3, sparse=sparse), seed)


class Net(nn.Module):
    """Tables ``a`` and ``b``, and ``c`` if there is one; a dense layer unless it is left out."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        self.a, self.b = table(), table(seed=2)
        self.dense = filled(nn.Linear(3, 2)) if dense else nn.Identity()

    def forward(self, indices: torch.Tensor, use: str = "abc") -> torch.Tensor:
        tables = [layer for name in use if (layer := getattr(self, name, None)) is not None]
        total = sum(layer(indices).to(torch.float64).tanh() for layer in tables)
        return self.dense(total.to(torch.float32)).square().sum()


def indices_of(rank: int, number: int) -> torch.Tensor:
    return torch.randint(6, (5,), generator=torch.Generator().manual_seed(10 * number + rank))


def unfrozen(model: Net) -> None:
    model.b.requires_grad_(True)


def replaced(model: Net) -> None:
    model.b = table(8, 3)


def replaced_by_dense(model: Net) -> None:
    model.b = table(8, 3, sparse=False)


def added(model: Net) -> None:
    model.c = table(7, 4)


def converted(model: Net) -> None:
    model.b.double()


def removed(model: Net) -> None:
    del model.b


def resized(model: Net) -> None:
    model.b.weight.data = table(9, 5).weight.data


def all_at_once(model: Net) -> None:
    replaced(model)
    added(model)
    model.a.double()


CHANGES: dict[str, Callable[[Net], None]] = {
    change.__name__: change
    for change in (unfrozen, replaced, replaced_by_dense, added, converted, removed, resized, all_at_once)
}


def drive(model: Net, ranks: Any, world: int, change: Callable[[Net], None], uses: Any, clear: bool) -> list[Any]:
    seen = []
    for number in range(PASSES):
        if number == AT:
            change(model)
        if clear or number == AT:
            model.zero_grad()
        for rank in ranks:
            (model(indices_of(rank, number), uses(rank, number)) / world).backward()
        seen.append({name: dense(parameter.grad) for name, parameter in model.named_parameters()})
    return seen


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().clone()


def net_for(what: str, with_dense: bool) -> Net:
    model = Net(with_dense)
    model.b.requires_grad_(what != "unfrozen")
    return model


USES = {
    "all": lambda rank, number: "abc",
    "others elsewhere": lambda rank, number: "abc" if (rank + number) % 2 else "ac",
    "some": lambda rank, number: "abc" if number % 2 else "a",
}


def train(transport: Any, what: str, use: str, with_dense: bool, clear: bool, **options: Any) -> list[Any]:
    model = net_for(what, with_dense)
    stretto.attach(model, transport=transport, **options)
    return drive(model, [transport.rank], 1, CHANGES[what], USES[use], clear)


def compare(ranks: list[Any], wanted: list[Any]) -> None:
    for found in ranks:
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert one.keys() == other.keys()
            for name, gradient in other.items():
                assert (one[name] is None) == (gradient is None), (number, name)
                if gradient is not None:
                    torch.testing.assert_close(one[name], gradient, rtol=1e-5, atol=1e-5)
                    assert torch.equal(one[name], ranks[0][number][name])


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "accumulating"])
@pytest.mark.parametrize("with_dense", [True, False], ids=["beside a dense layer", "alone"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_followed_in_the_pass_that_meets_it(
    what: str, world: int, use: str, with_dense: bool, clear: bool
) -> None:
    ranks = run_ranks(lambda transport: train(transport, what, use, with_dense, clear), world, timeout=20)
    compare(ranks, drive(net_for(what, with_dense), range(world), world, CHANGES[what], USES[use], clear))


@pytest.mark.parametrize("with_dense", [True, False], ids=["beside a dense layer", "alone"])
@pytest.mark.parametrize("what", CHANGES)
def test_who_used_what_is_known_after_the_pass_of_a_change(what: str, with_dense: bool) -> None:
    uses = USES["others elsewhere"]

    def passes(model: Net, after: Callable[[int], None]) -> None:
        for number in range(AT + 2):
            if number == AT:
                CHANGES[what](model)
            after(number)

    def worker(transport):
        model, found = net_for(what, with_dense), []
        sync = stretto.attach(model, transport=transport)

        def one_pass(number: int) -> None:
            model.zero_grad()
            model(indices_of(transport.rank, number), uses(transport.rank, number)).backward()
            found.append(sync.used_by)

        passes(model, one_pass)
        return found

    model, wanted = net_for(what, with_dense), []

    def count(number: int) -> None:
        wanted.append({name: 0 for name, _ in model.named_parameters()})
        for rank in range(3):
            model.zero_grad()
            model(indices_of(rank, number), uses(rank, number)).backward()
            for name, parameter in model.named_parameters():
                wanted[-1][name] += parameter.grad is not None

    passes(model, count)
    for found in run_ranks(worker, 3):
        for used, counts in zip(found, wanted, strict=True):
            assert used == {name: counts.get(name, 0) for name in used}
            assert used.keys() >= {name for name, ranks in counts.items() if ranks}


@pytest.mark.parametrize("what", CHANGES)
def test_with_sums(what: str) -> None:
    ranks = run_ranks(lambda transport: train(transport, what, "some", True, False, reduce="sum"), 3)
    compare(ranks, drive(net_for(what, True), range(3), 1, CHANGES[what], USES["some"], False))


def in_a_process(rank: int, what: str) -> list[Any]:
    return train(ProcessGroupTransport(), what, "others elsewhere", True, True)


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["unfrozen", "all_at_once"])
def test_in_processes(what: str) -> None:
    ranks = spawn_ranks(in_a_process, 2, what)
    compare(ranks, drive(net_for(what, True), range(2), 2, CHANGES[what], USES["others elsewhere"], True))


@pytest.mark.parametrize("dense_on", [None, 0, 2])
def test_a_table_that_some_ranks_alone_replace_by_one_just_like_it(dense_on: int | None) -> None:
    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport)
        for number in range(PASSES):
            model.zero_grad()
            if number == AT and transport.rank == 1:
                model.b = table(seed=2)
            loss = model(indices_of(transport.rank, number))
            if number == AT and transport.rank == dense_on:
                loss = loss + model.b.weight.sum()
            loss.backward()
            yield_to = {name: dense(parameter.grad) for name, parameter in model.named_parameters()}
            if number == AT:
                at_once = yield_to
        return [at_once, yield_to]

    model, wanted = Net(), []
    for number in (AT, PASSES - 1):
        model.zero_grad()
        for rank in range(3):
            loss = model(indices_of(rank, number))
            (loss + model.b.weight.sum() if number == AT and rank == dense_on else loss).div(3).backward()
        wanted.append({name: dense(parameter.grad) for name, parameter in model.named_parameters()})
    compare(run_ranks(worker, 3), wanted)


def test_one_line_names_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stretto"):
        run_ranks(lambda transport: train(transport, "all_at_once", "all", True, True), 2)
    assert [record.getMessage() for record in caplog.records if record.name == "stretto"] == [
        "rank 0, pass 4: the plan follows the module: 1 parameter added (c.weight), 1 replaced (b.weight), "
        "1 now float64 (a.weight)"
    ]


# A model with sparse parameters alone


def test_a_model_of_tables_alone_warns_of_nothing_and_says_who_used_them(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = Net(dense=False)
        sync = stretto.attach(model, transport=transport)
        before = sync.used_by
        for number in range(5):
            model.zero_grad()
            model(indices_of(0, number), "ab" if transport.rank else "a").backward()
        return before, sync.used_by

    with caplog.at_level(logging.DEBUG, "stretto"):
        found = run_ranks(worker, 2)
    assert not caplog.records
    assert found == [({"a.weight": 0, "b.weight": 0}, {"a.weight": 2, "b.weight": 1})] * 2


def test_a_change_of_a_model_of_tables_alone_names_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport):
        model = Net(dense=False)
        stretto.attach(model, transport=transport)
        for number in range(5):
            if number == 2:
                model.b = table(sparse=True)
            model(indices_of(0, number), "ab").backward()

    with caplog.at_level(logging.INFO, "stretto"):
        run_ranks(worker, 2)
    assert caplog.messages == ["rank 0, pass 3: the plan follows the module: 1 parameter replaced (b.weight)"]


def test_who_used_what_beside_a_dense_layer() -> None:
    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport)
        model(indices_of(0, 0), "ab" if transport.rank else "a").backward()
        return sync.used_by

    assert run_ranks(worker, 3) == [{"dense.weight": 3, "dense.bias": 3, "a.weight": 3, "b.weight": 2}] * 3


def test_a_model_that_gets_its_first_table_pays_for_none_before() -> None:
    def worker(transport):
        recording = RecordingTransport(transport)
        model = Net()
        del model.a, model.b
        model.a = table(sparse=False)
        stretto.attach(model, transport=recording)
        for number in range(3):
            recording.calls.clear()
            model(indices_of(transport.rank, number)).backward()
            calls = list(recording.calls)
        return calls

    assert all(len(calls) == 1 for calls in run_ranks(worker, 2))


@pytest.mark.parametrize("sparse", [True, False])
def test_accumulated_converted_and_frozen_is_still_averaged(sparse: bool) -> None:
    def worker(transport):
        model = Net()
        model.b = table(sparse=sparse)
        sync = stretto.attach(model, transport=transport)
        model.double()
        with sync.no_sync():
            (model.b(torch.tensor([0])).sum() * (transport.rank + 1)).backward()
        weight = model.b.weight
        if not sparse:  # by another name
            del model.b
            model.d = weight
        weight.requires_grad_(False)
        model.dense.bias.sum().backward()
        return dense(weight.grad)[0].tolist()

    assert run_ranks(worker, 2) == [[1.5] * 3] * 2
