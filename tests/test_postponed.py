"""A change that some ranks alone notice, where words come late: all follow a pass later, and lose nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import Fails, words_come_late

import stretto
from stretto.testing import LocalTransport, run_ranks
from stretto.words import LENGTH, Control, ControlWords


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    words_come_late(monkeypatch)


def one_and_a_convolution() -> torch.nn.ModuleDict:
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "ab"})
    layers.update({name: torch.nn.Conv2d(2, 2, 2, bias=False) for name in "cd"})
    for parameter in layers.parameters():
        torch.nn.init.ones_(parameter)
    return layers


def loss_of(
    layers: torch.nn.ModuleDict, rank: int, number: int, *, fails: bool = False, alone: tuple[int, ...] = (3,)
) -> torch.Tensor:
    """In pass 3 strides change, and rank 0 alone uses what has changed, and so notices it."""
    if number == 3:
        layers.to(memory_format=torch.channels_last)
    loss = layers["d"].weight.sum() if number < 3 else torch.zeros(())
    if number not in alone or rank == 0:
        loss = loss + (1 + rank) * layers["c"].weight.sum()
    hidden = layers["a"](torch.ones(1, 1))
    return loss + layers["b"](Fails.apply(hidden) if fails else hidden).sum()


def of(parameter: torch.nn.Parameter) -> float | None:
    return None if parameter.grad is None else round(parameter.grad.flatten()[0].item(), 3)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize(("reduce", "first"), [("mean", 0), ("mean", 1), ("sum", 0)])
def test_a_layer_used_without_synchronisation_on_one_rank_and_frozen_again(
    reduce: str, first: int, zeroed: bool
) -> None:
    """The rank that had used it stepped a pass earlier than the others, and Adam's state differed for good."""

    def worker(transport: LocalTransport) -> tuple[list[float | None], float, int]:
        layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        for layer in layers:
            torch.nn.init.ones_(layer.weight)
        layers[1].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport, check_every=0, reduce=reduce)
        optimizer, found = torch.optim.Adam(layers.parameters(), lr=0.5), []
        for number in range(1, 6):
            if zeroed:
                optimizer.zero_grad()
            if number == 3:
                layers[1].requires_grad_(True)
                with sync.no_sync():
                    part = layers[1].weight.sum() if transport.rank == first else 0
                    (layers[0].weight.sum() + part).backward()
                layers[1].requires_grad_(False)
            layers[0].weight.sum().backward()
            found.append(of(layers[1].weight))
            optimizer.step()
        sync.check()
        return found, round(layers[1].weight.item(), 3), sync.statistics.plans

    mean = 1.0 if reduce == "sum" else 0.5
    right = ([None, None, None, mean, None if zeroed else mean], 0.5 if zeroed else 0.0, 2)
    assert run_ranks(worker, 2) == [right] * 2


@pytest.mark.parametrize(
    ("reduce", "sharded", "zeroed"),
    [("mean", False, True), ("sum", False, True), ("mean", False, False), ("sum", False, False), ("mean", True, True)],
)
def test_other_strides_that_one_rank_alone_sees(reduce: str, sharded: bool, zeroed: bool) -> None:
    """In a sharded step the messages of that rank, which followed at once, and of the others crossed."""

    def worker(transport: LocalTransport) -> tuple[list[float | None], float]:
        layers = one_and_a_convolution()
        weight = layers["c"].weight
        sync = stretto.attach(layers, transport=transport, check_every=0, reduce=reduce)
        plain, found = torch.optim.Adam(layers.parameters(), lr=0.5), []
        optimizer: Any = stretto.shard(plain, sync) if sharded else plain
        for number in range(1, 7):
            if zeroed or number % 2:
                optimizer.zero_grad()
            loss_of(layers, transport.rank, number).backward()
            found.append(None if sharded else of(weight))
            if zeroed or not number % 2:
                optimizer.step()
        sync.check()
        return found, round(weight.flatten()[0].item(), 3)

    mean = 3.0 if reduce == "sum" else 1.5
    found = [mean, mean, None, mean + mean / 3, mean, mean]
    if not zeroed:
        found = [mean, 2 * mean, None, mean + mean / 3, mean, 2 * mean]
    right = ([None] * 6 if sharded else found, -1.494 if zeroed else -0.478)
    assert run_ranks(worker, 2) == [right] * 2


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_layer_that_one_rank_alone_has_replaced_by_one_like_it(reduce: str, kept: bool, zeroed: bool) -> None:
    """Until all follow, it steps with what the buckets have carried for the others, which counts once.

    The old layer may live on, as an optimizer has it.
    """

    def worker(transport: LocalTransport) -> list[float | None]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)]), []
        old = layers[1] if kept else None
        stretto.attach(layers, transport=transport, check_every=0, reduce=reduce)
        for number in range(1, 6):
            if zeroed or number < 4:
                layers.zero_grad()
            if number == 3 and transport.rank == 0:
                layers[1] = torch.nn.Linear(1, 1, bias=False)
            sum(layer.weight.sum() * (1 + transport.rank) for layer in layers).backward()
            found.append(of(layers[1].weight))
        del old
        return found

    mean, share = (3.0, 1) if reduce == "sum" else (1.5, 0.5)
    late = [2 * share, mean + share, mean] if zeroed else [2 * share, 2 * mean, 3 * mean]
    assert run_ranks(worker, 2) == [[mean, mean, *late]] * 2


def test_a_rank_with_nothing_to_give_is_not_waited_for() -> None:
    """All that have batches notice the change, in the pass in which it comes."""

    def worker(transport: LocalTransport) -> list[float | None]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)]), []
        sync = stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 5):
            layers.zero_grad()
            if number == 3:
                layers.append(torch.nn.Linear(1, 1, bias=False))
            if transport.rank == 2:
                sync.shadow_pass()
                continue
            sum(layer.weight.sum() * 3 for layer in layers).backward()
            found.append(of(layers[-1].weight))
        return found

    assert run_ranks(worker, 3) == [[2.0] * 4, [2.0] * 4, []]


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_that_gives_nothing_to_the_pass_in_which_all_follow(idle: int, zeroed: bool) -> None:
    """What it holds back comes in the next pass of its own; where it holds nothing, no further plan is made."""

    def worker(transport: LocalTransport) -> tuple[list[float | None], int]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)]), []
        layers[1].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 8):
            if zeroed:
                layers.zero_grad()
            if number == 3 and transport.rank == 0:
                layers[1].requires_grad_(True)
                with sync.no_sync():
                    (layers[1].weight * 4).sum().backward()
                layers[1].requires_grad_(False)
            if number == 4 and transport.rank == idle:
                sync.shadow_pass()
            else:
                layers[0].weight.sum().backward()
            found.append(of(layers[1].weight))
        return found, sync.statistics.plans

    then = None if zeroed else 2.0
    late = ([None] * 5 + [2.0, then], 3)
    soon = [([None] * 3 + [2.0] + [then] * 3, 2), ([None] * 7, 2)]
    assert run_ranks(worker, 2) == (soon if idle else [late] * 2)


@pytest.mark.parametrize(
    ("dtype", "ranks", "noticed", "idle", "all_have"),
    [
        (torch.bfloat16, 256, 255, 1, True),
        (torch.bfloat16, 257, 256, 0, False),  # whether of one more, it cannot say
        (torch.float32, 300, 256, 0, False),
        (torch.float32, 300, 256, 44, True),
        (torch.complex64, 300, 300, 0, True),
    ],
)
def test_more_ranks_than_a_dtype_can_count_never_follow_at_once(
    dtype: torch.dtype, ranks: int, noticed: int, idle: int, all_have: bool
) -> None:
    """A rank would wait for one that has not noticed, and steps."""
    words = torch.zeros(LENGTH, dtype=dtype)
    words[Control.CHANGED], words[Control.RAN_OUT] = noticed, idle
    assert ControlWords(words).all_have_noticed(ranks) is all_have


@pytest.mark.parametrize("comes_first", ["a", "c"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_was_in_grad_before_stays_there(reduce: str, comes_first: str) -> None:
    """On all ranks alike, and a sum counts it once."""

    def worker(transport: LocalTransport) -> list[list[float | None]]:
        layers, found = one_and_a_convolution(), []
        layers["b"].weight.requires_grad_(False)
        stretto.attach(layers, transport=transport, check_every=0, reduce=reduce)
        for number in range(1, 6):
            if reduce == "mean":
                layers["c"].zero_grad()
            loss = loss_of(layers, transport.rank, number)
            if comes_first == "c" and number > 3:
                loss = layers["a"].weight.sum() + (1 + transport.rank) * layers["c"].weight.sum()
            loss.backward()
            found.append([of(layers[name].weight) for name in "acd"])
        return found

    means = [[1, 1.5, 1], [2, 1.5, 2], [3, None, 2], [4, 2, 2], [5, 1.5, 2]]
    sums = [[2, 3, 2], [4, 6, 4], [6, 6, 4], [8, 10, 4], [10, 13, 4]]
    assert run_ranks(worker, 2) == [sums if reduce == "sum" else means] * 2


def test_what_a_layer_has_kept_since_it_was_frozen_stays_where_it_is() -> None:
    def worker(transport: LocalTransport) -> list[list[float | None]]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(3)]), []
        layers[1].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 6):
            if number == 2:
                layers[2].requires_grad_(False)
            if number == 4 and transport.rank == 0:
                layers[1].requires_grad_(True)
                with sync.no_sync():
                    layers[1].weight.sum().backward()
                layers[1].requires_grad_(False)
            sum(layer.weight.sum() for layer in (layers[0], layers[2])).backward()
            found.append([of(layer.weight) for layer in layers])
        return found

    assert run_ranks(worker, 2) == [[[1, None, 1], [2, None, 1], [3, None, 1], [4, None, 1], [5, 0.5, 1]]] * 2


@pytest.mark.parametrize("then", ["unused", "grows"])
def test_what_was_held_back_comes_in_the_next_pass_whatever_that_reaches(then: str) -> None:
    """Where a parameter has another shape by then, its old gradient is one of nothing."""

    def worker(transport: LocalTransport) -> list[float | None]:
        layers, found = one_and_a_convolution(), []
        weight = layers["c"].weight
        stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 6):
            layers.zero_grad()
            if then == "grows" and number == 4:
                weight.data = torch.ones(2, 2, 3, 3)
            if then == "unused" and number == 4:
                layers["a"].weight.sum().backward()
            else:
                loss_of(layers, transport.rank, number).backward()
            found.append(of(weight))
        return found

    assert run_ranks(worker, 2) == [[1.5, 1.5, None, 0.5 if then == "unused" else 1.5, 1.5]] * 2


def test_buffers_that_one_rank_alone_has_replaced() -> None:
    """The messages of the rank that followed at once met the step of the others."""

    def worker(transport: LocalTransport) -> list[list[float]]:
        model, found = torch.nn.Linear(1, 1), []
        model.register_buffer("kept", torch.zeros(2))
        stretto.attach(model, transport=transport, check_every=0)
        for number in range(1, 6):
            if number == 3 + transport.rank:
                model.kept = torch.full((3,), 1.0 + transport.rank)
            model(torch.ones(1, 1)).sum().backward()
            transport.all_reduce(own := torch.ones(1)).wait()
            assert own.item() == 2
            found.append(model.kept.tolist())
        return found

    here, there = run_ranks(worker, 2)
    assert here[3:] == there[3:] == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (1, "parameter 1.weight: 2x1 float32 cpu on rank 0; missing on rank 1"),
        (0, "parameter 0.weight: 2x1 float32 cpu on rank 0; 3x1 float32 cpu on rank 1"),
    ],
)
def test_modules_that_have_not_changed_alike_are_named_on_all_ranks_in_the_next_pass(place: int, told: str) -> None:
    def worker(transport: LocalTransport) -> list[str]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 3, bias=False)]), list[str]()
        stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 5):
            if number == 3 and transport.rank == 0:
                layers.add_module(str(place), torch.nn.Linear(1, 2, bias=False))
            try:
                sum(layer.weight.sum() for layer in layers).backward()
                transport.all_reduce(own := torch.ones(1)).wait()
                assert own.item() == 2
            except stretto.ModelMismatchError as error:
                found.append(str(error))
        return found

    assert (
        run_ranks(worker, 2)
        == [
            [
                "pass 4: the 2 ranks do not hold the same model.\n"
                f"  {told}\n"
                "Change the model in the same way on all ranks, between the same two passes."
            ]
        ]
        * 2
    )


def test_a_change_that_one_rank_alone_sees_in_a_pass_whose_end_tells_of_a_failure() -> None:
    """It raises in the same pass on all ranks; nothing of that pass is kept."""

    def worker(transport: LocalTransport) -> list[float | str | None]:
        layers = one_and_a_convolution()
        stretto.attach(layers, transport=transport, check_every=0)
        found: list[float | str | None] = []
        for number in range(1, 6):
            layers.zero_grad()
            try:
                loss_of(layers, transport.rank, number, fails=number == 2 and transport.rank == 1).backward()
                found.append("void" if number == 2 else of(layers["c"].weight))
            except (ValueError, stretto.PeerError) as error:
                found.append(type(error).__name__)
        return found

    assert run_ranks(worker, 2) == [
        [1.5, "void", "PeerError", 1.5, 1.5],
        [1.5, "ValueError", "PeerError", 1.5, 1.5],
    ]


@pytest.mark.parametrize("failing", [3, 4])
def test_the_pass_in_which_one_notices_or_all_are_to_follow_fails(failing: int) -> None:
    """Nothing of it is kept, nor of the next one, which tells of that."""

    def worker(transport: LocalTransport) -> list[float | str | None]:
        layers = one_and_a_convolution()
        stretto.attach(layers, transport=transport, check_every=0)
        found: list[float | str | None] = []
        for number in range(1, 8):
            layers.zero_grad()
            fails, alone = number == failing and transport.rank == 1, (3, 4) if failing == 3 else (3,)
            try:
                loss_of(layers, transport.rank, number, fails=fails, alone=alone).backward()
                found.append("void" if number == failing else of(layers["c"].weight))
            except (ValueError, stretto.PeerError) as error:
                found.append(type(error).__name__)
        return found

    before, after = [1.5, 1.5, None][: failing - 1], [1.5, 1.5, 1.5][: 7 - failing - 1]
    assert run_ranks(worker, 2) == [
        [*before, "void", "PeerError", *after],
        [*before, "ValueError", "PeerError", *after],
    ]


def test_what_was_given_back_to_a_pass_that_fails_does_not_come_again() -> None:
    """With sparse gradients the other ranks raise in that pass, and the next one counts."""

    def worker(transport: LocalTransport) -> list[float | str | None]:
        layers, found = one_and_a_convolution(), list[float | str | None]()
        layers["e"] = torch.nn.Embedding(2, 1, sparse=True)
        stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 8):
            layers.zero_grad()
            try:
                loss_of(layers, transport.rank, number, fails=number == 4 and transport.rank == 0).backward()
                found.append(of(layers["c"].weight))
            except (ValueError, stretto.PeerError) as error:
                found.append(type(error).__name__)
        return found

    first, second = run_ranks(worker, 2)
    assert first == [1.5, 1.5, None, "ValueError", 1.5, 1.5, 1.5]
    assert second == [1.5, 1.5, None, "PeerError", 1.5, 1.5, 1.5]


def mean_of_two(transport: Any, _: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    transport.all_reduce(bucket.buffer().div_(2)).wait()
    future.set_result(bucket.buffer())
    return future


def test_with_a_comm_hook_a_change_is_refused_in_the_same_pass_on_all_ranks() -> None:
    """One rank raised before a step that the others took."""

    def worker(transport: LocalTransport) -> list[str]:
        layers, told = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)]), []
        layers[1].requires_grad_(False)
        sync = stretto.attach(layers, transport=transport, check_every=0)
        sync.register_comm_hook(None, functools.partial(mean_of_two, transport))
        for number in range(1, 6):
            layers[1].requires_grad_(number > 2)
            loss = layers[0].weight.sum()
            try:
                (loss + layers[1].weight.sum() if number == 3 and transport.rank == 0 else loss).backward()
            except stretto.SetupError as error:
                return [*told, str(error).splitlines()[0]]
            told.append("stepped")
        return told

    def refused(rank: int) -> str:
        return (
            f"rank {rank}, pass 3: the module has changed since it was attached (1 parameter unfrozen (1.weight) on "
            "ranks 0, 1), and a comm hook keeps its state by bucket, so the plan cannot follow."
        )

    assert run_ranks(worker, 2) == [["stepped"] * 3 + [refused(rank)] for rank in range(2)]


def test_what_a_rank_kept_before_it_gave_nothing_to_the_pass_in_which_all_follow_is_in_the_next_mean() -> None:
    """It is known by its place in the plan, and has another one in the new plan."""

    def worker(transport: LocalTransport) -> tuple[list[float | None], int]:
        layers, found = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(3)]), []
        sync = stretto.attach(layers, transport=transport, check_every=0)
        for number in range(1, 6):
            if number != 4 or transport.rank == 0:
                layers.zero_grad()
            if number == 3:
                layers[0].requires_grad_(False)
            if number == 3 and transport.rank == 1:
                with sync.no_sync():
                    (layers[2].weight * 4).sum().backward()
                sync.shadow_pass()
            else:
                sum(layer.weight.sum() for layer in (layers[1:2] if number == 4 else layers)).backward()
            found.append(of(layers[2].weight))
        return found, len(sync.plan.parameters)

    assert run_ranks(worker, 2) == [([1.0, 1.0, third, 2.0, 1.0], 2) for third in (0.5, 4.0)]
