"""Models that leave parts of themselves out: what nobody uses is not sent, and what is absent holds nothing up."""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import checkpoint

import stretto
from stretto.plan import plan_buckets
from stretto.presence import QUIET, Presence
from stretto.specs import describe_parameters
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks

WIDTH, LAYERS = 160, 5
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Stack(torch.nn.Module):
    """Layers of which any may be left out."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10

    def forward(self, inputs: torch.Tensor, use: list[int], reentrant: bool = False) -> torch.Tensor:
        for number in use:
            layer = self.layers[number]
            inputs = torch.tanh(checkpoint(layer, inputs, use_reentrant=True) if reentrant else layer(inputs))
        return inputs.sum()


def inputs_of(rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank)).requires_grad_(True)


def kept(seed: int) -> list[int]:
    """Layers that are not dropped; the last always stays."""
    dice = random.Random(seed)
    return [number for number in range(LAYERS) if dice.random() > 0.4 or number == LAYERS - 1]


def expected(world: int, step: int, uses: list[list[int]], width: int = WIDTH) -> list[torch.Tensor | None]:
    model = Stack(width)
    for rank in range(world):
        (model(inputs_of(rank, step, width), uses[rank]) / world).backward()
    return [p.grad for p in model.parameters()]


def assert_close(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_bits(ranks: list[list[list[torch.Tensor | None]]]) -> None:
    for passes in zip(*ranks, strict=True):
        for tensors in zip(*passes, strict=True):
            assert all(
                (a is b is None) or (a is not None and torch.equal(a, tensors[0])) for a in tensors for b in tensors[:1]
            )


def run(world: int, steps: int, uses, *, cap: float = 1e-6, reentrant=lambda step: False, after=None):
    """Each rank's gradients of every pass, and its collectives in every pass."""

    def worker(transport):
        recording = RecordingTransport(transport)
        model = Stack()
        sync = stretto.attach(model, transport=recording, bucket_cap_mb=cap)
        found, calls = [], []
        for step in range(steps):
            model.zero_grad()
            recording.calls.clear()
            model(inputs_of(transport.rank, step), uses(step, transport.rank), reentrant(step)).backward()
            found.append(gradients(model))
            calls.append(list(recording.calls))
        return found, calls, sync.plan

    return run_ranks(worker, world)


@pytest.mark.parametrize("world", [2, 3])
def test_layers_dropped_on_all_ranks_are_not_sent(world: int) -> None:
    ranks = run(world, 12, lambda step, rank: kept(step))
    assert_same_bits([found for found, _, _ in ranks])
    for found, calls, _ in ranks:
        learnt = next(step for step in range(12) if len(kept(step)) < LAYERS) + 1
        for step in range(12):
            assert_close(found[step], expected(world, step, [kept(step)] * world))
            sent = sum(nbytes for kind, nbytes in calls[step] if kind == "all_reduce")
            if step > learnt:
                assert sent < len(kept(step)) * LAYER_BYTES + 1500, "nothing but the layers kept, and a few words"
                assert sent >= len(kept(step)) * LAYER_BYTES
                assert calls[step][0] == ("all_reduce", 4 * 2 * LAYERS), "the map, a number a bucket"
                beside = len(calls[step]) - 2 * len(kept(step))  # weights and biases are a bucket each
                assert beside in (1, 2), "and the words alone, where the last bucket is not used"


@pytest.mark.parametrize("cap", [1e-6, 0.15, 4.0])
@pytest.mark.parametrize("world", [2, 3])
def test_layers_dropped_on_each_rank_by_itself(world: int, cap: float) -> None:
    ranks = run(world, 12, lambda step, rank: kept(10 * step + rank), cap=cap)
    assert_same_bits([found for found, _, _ in ranks])
    for found, _, _ in ranks:
        for step in range(12):
            assert_close(found[step], expected(world, step, [kept(10 * step + rank) for rank in range(world)]))


@pytest.mark.parametrize("world", [2, 3])
def test_one_bucket_is_cut_where_layers_come_and_go_apart(world: int) -> None:
    ranks = run(world, 24, lambda step, rank: kept(step), cap=4.0)
    assert len({plan.hash for _, _, plan in ranks}) == 1
    assert_same_bits([found for found, _, _ in ranks])
    for found, calls, plan in ranks:
        together = [{plan.parameters[i].name.split(".")[1] for i in bucket.indices} for bucket in plan.buckets]
        assert all(len(layers) == 1 for layers in together), "each layer in a bucket of its own"
        assert_close(found[-1], expected(world, 23, [kept(23)] * world))
        sent = sum(nbytes for kind, nbytes in calls[-1] if kind == "all_reduce")
        assert sent < len(kept(23)) * LAYER_BYTES + 1500


@pytest.mark.parametrize(
    ("sizes", "came", "cuts"),
    [
        ([64, 64], [True, False], [0]),
        ([64, 64], [True, True], []),
        ([63, 120], [True, False], []),
        ([120, 63], [True, False], []),
        ([64, 32, 32, 64], [True, False, True, False], [0, 2]),
        ([32, 96, 32, 64], [True, False, True, False], [1]),
    ],
)
def test_a_cut_leaves_enough_on_both_sides(sizes: list[int], came: list[bool], cuts: list[int]) -> None:
    """Sizes in KiB, of one bucket in its order; what comes and what does not come."""
    parameters = {f"p{n}": torch.nn.Parameter(torch.empty(256 * size)) for n, size in enumerate(sizes)}
    plan = plan_buckets(describe_parameters(parameters), range(len(sizes)), cap_bytes=1 << 20)
    (bucket,) = plan.buckets
    footer = SimpleNamespace(had=torch.tensor(came, dtype=torch.float32))
    carrier: Any = None
    presence, seen = Presence(carrier), SimpleNamespace(indices=bucket.indices, footer=footer)
    for _ in range(4):
        presence.record([seen])  # type: ignore[list-item]
    assert presence.apart(plan) == cuts


def test_what_is_absent_does_not_hold_up_what_is_full() -> None:
    """An unused layer lies in the first bucket, which all the same leaves before half of the gradients have arrived."""

    def worker(transport):
        log = []

        class Watch:
            def gradient_ready(self, number, name):
                log.append((number, name))
                time.sleep(0.01)  # so that the map, which no rank waits for during backward, is there soon

            def bucket_launched(self, number, bucket, nbytes):
                log.append((number, bucket))

        model = Stack()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=2.2 * LAYER_BYTES / 1024 / 1024)
        sync.observe(Watch())
        for step in range(4):
            model.zero_grad()
            use = [0, 1, 2, 4] if transport.rank else [0, 1, 2, 3, 4]
            transport.all_gather_object("begin together")
            model(inputs_of(transport.rank, step), use).backward()
        of_pass = [what for number, what in log if number == 4]
        arrivals = [what for what in of_pass if isinstance(what, str)]
        before = of_pass[: of_pass.index(0)]
        first = {sync.plan.parameters[i].name for i in sync.plan.buckets[0].indices}
        return len(before) / len(arrivals), first

    (early, first), (also_early, _) = run_ranks(worker, 2)
    assert "layers.3.weight" in first
    assert early < 0.6 and also_early < 0.6


def test_a_model_that_uses_everything_again_stops_asking() -> None:
    def uses(step: int, rank: int) -> list[int]:
        return [0, 1, 4] if step == 2 else list(range(LAYERS))

    ranks = run(2, QUIET + 6, uses)
    for found, calls, _ in ranks:
        with_map = [step for step, made in enumerate(calls) if made[0][1] == 4 * 2 * LAYERS]
        assert with_map == list(range(3, 3 + QUIET))
        assert_close(found[-1], expected(2, QUIET + 5, [list(range(LAYERS))] * 2))


@pytest.mark.parametrize("world", [2, 3])
def test_reentrant_checkpoints_are_no_proof_of_absence(world: int) -> None:
    ranks = run(world, 8, lambda step, rank: kept(10 * step + rank), reentrant=lambda step: True)
    assert_same_bits([found for found, _, _ in ranks])
    for found, _, _ in ranks:
        for step in range(8):
            assert_close(found[step], expected(world, step, [kept(10 * step + rank) for rank in range(world)]))


def plain_or_checkpointed(model: Stack, x: torch.Tensor, use: list[tuple[int, bool]]) -> torch.Tensor:
    """Runs layers in turn, some of them in a reentrant checkpoint."""
    x = x.requires_grad_()
    for index, inside in use:
        layer = model.layers[index]
        x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if inside else layer(x))
    return x.sum()


Use = list[tuple[int, bool]]
PLAIN = [(0, False), (1, False), (2, False)]
NEW: dict[str, tuple[Use, ...]] = {  # by rank; others do as the last of them
    "a dropped layer, inside alone": ([*PLAIN, (3, True)],),
    "a dropped layer, inside first": ([(3, True), *PLAIN],),
    "a dropped layer, inside and plainly": ([(3, False), *PLAIN, (3, True)],),
    "a dropped layer, plainly and inside": ([(3, True), *PLAIN, (3, False)],),
    "a dropped layer, inside twice": ([(3, True), *PLAIN, (3, True)],),
    "on one rank": ([*PLAIN, (3, True)], PLAIN, PLAIN),
    "a layer each": ([*PLAIN, (3, True)], [*PLAIN, (4, True)], [(2, True)]),
    "the last bucket's": ([(0, True), (1, False)], [(0, True)]),
    "nothing else": ([(4, True)],),
}


@pytest.mark.parametrize("clear", [True, False, None], ids=["none", "zeros", "never"])
@pytest.mark.parametrize("what", NEW)
@pytest.mark.parametrize("world", [2, 3])
def test_a_reentrant_checkpoint_that_is_new_is_right_at_once(world: int, what: str, clear: bool | None) -> None:
    for before, cap in itertools.product([PLAIN, [(0, False)]], [1e-6, 1.0]):
        check_new(world, NEW[what], before, clear, cap, {} if cap < 1 else {"reduce": "sum"})


def check_new(world: int, new: tuple[Use, ...], before: Use, clear: bool | None, cap: float, options) -> None:
    def drive(model, ranks, share):
        seen = []
        for step in range(8):
            if clear is not None:
                model.zero_grad(set_to_none=clear)
            for rank in ranks:
                use = new[min(rank, len(new) - 1)] if step in (3, 6) else before
                (plain_or_checkpointed(model, inputs_of(rank, step, 6), use) * share).backward()
            seen.append(gradients(model))
        return seen

    def worker(transport):
        model = Stack(6)
        stretto.attach(model, transport=transport, bucket_cap_mb=cap, **options)
        return drive(model, [transport.rank], 1)

    wanted = drive(Stack(6), range(world), 1 if options else 1 / world)
    ranks = run_ranks(worker, world, timeout=20)
    assert_same_bits(ranks)
    for found in ranks:
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


def test_accumulation_failure_and_idle_passes_beside_dropped_layers() -> None:
    def worker(transport):
        model = Stack()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for step in range(4):
            model.zero_grad()
            model(inputs_of(transport.rank, step), [0, 4]).backward()
        model.zero_grad()
        with sync.no_sync():
            model(inputs_of(transport.rank, 4), [2, 4] if transport.rank else [4]).backward()
        model(inputs_of(transport.rank, 5), [4]).backward()
        accumulated = gradients(model)

        def fail(gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("injected")

        model.zero_grad()
        inputs = inputs_of(transport.rank, 6)
        hidden = torch.tanh(model.layers[0](inputs))
        if transport.rank:
            hidden.register_hook(fail)
        with pytest.raises(ValueError if transport.rank else stretto.PeerError):
            model(hidden, [4]).backward()
        model.zero_grad()
        model(inputs_of(transport.rank, 7), [1, 4]).backward()
        return accumulated, gradients(model)

    ranks = run_ranks(worker, 2, timeout=20)
    model = Stack()
    for rank in range(2):
        (model(inputs_of(rank, 4), [2, 4] if rank else [4]) / 2).backward()
        (model(inputs_of(rank, 5), [4]) / 2).backward()
    for accumulated, last in ranks:
        assert_close(accumulated, [p.grad for p in model.parameters()])
        assert_close(last, expected(2, 7, [[1, 4]] * 2))


@pytest.mark.parametrize("stopped", [False, True], ids=["not-sent", "ctrl-c-when-it-has-left"])
def test_a_map_that_was_cut_short(stopped: bool) -> None:
    """One that did not leave is sent when the pass is given up; if that is not known, nothing more is sent."""

    def worker(transport):
        class Cut(RecordingTransport):
            is_cut = False

            def all_reduce(self, tensor):
                cut, self.is_cut = self.is_cut, False
                if cut and not stopped:
                    raise stretto.CommunicationError("the map has not left")
                work = super().all_reduce(tensor)
                if cut:
                    self.calls.clear()
                    raise KeyboardInterrupt
                return work

        model, carrier, told = Stack(), Cut(transport), []
        stretto.attach(model, transport=carrier, bucket_cap_mb=1e-6)
        for step in range(7):
            model.zero_grad()
            carrier.is_cut = step == 4 and transport.rank == 1
            try:
                model(inputs_of(transport.rank, step), [0, 4] if step < 4 else [transport.rank, 4]).backward()
            except (KeyboardInterrupt, stretto.CommunicationError) as error:
                told.append((step, type(error), str(error)))
            else:
                assert_close(
                    gradients(model), expected(2, step, [[0, 4] if step < 4 else [rank, 4] for rank in (0, 1)])
                )
            if stopped and step == 5:
                return told, carrier.calls
        return told, carrier.calls

    (waited, _), (failed, sent) = run_ranks(worker, 2, timeout=20)
    if stopped:
        assert [(step, kind) for step, kind, _ in failed] == [(4, KeyboardInterrupt), (5, stretto.CommunicationError)]
        assert [step for step, *_ in waited] == [4, 5] and not sent
        assert "rank 1 failed and left" in waited[0][2] and "backward: KeyboardInterrupt" in waited[0][2]
    else:
        assert failed == [(4, stretto.CommunicationError, "the map has not left")]
        assert [(step, kind) for step, kind, _ in waited] == [(4, stretto.PeerError)]
        assert waited[0][2].startswith("rank 0, pass 5: backward failed on rank 1, so the mean of this pass"), waited


def train(rank: int, world: int) -> tuple[list, str]:
    model = Stack(32)
    sync = stretto.attach(model, bucket_cap_mb=0.004)
    found = []
    for step in range(10):
        model.zero_grad()
        model(inputs_of(rank, step, 32), kept(7 * step + (rank if step % 2 else 0))).backward()
        found.append(gradients(model))
    return found, sync.plan.hash


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_processes_that_drop_layers(world: int) -> None:
    ranks = spawn_ranks(train, world, world)
    assert len({plan for _, plan in ranks}) == 1
    assert_same_bits([found for found, _ in ranks])
    for found, _ in ranks:
        for step in range(10):
            uses = [kept(7 * step + (rank if step % 2 else 0)) for rank in range(world)]
            assert_close(found[step], expected(world, step, uses, 32))


def test_what_comes_from_a_checkpoint_beside_what_was_not_foreseen_is_added_to_what_is_there() -> None:
    """Only one rank uses ``late``, and in the second pass a checkpoint's gradient comes before it: from within, the
    engine cannot say that ``late`` will come. Another model's checkpoint made all careful before."""

    def worker(transport):
        model = torch.nn.Module()
        for name in ("late", "inner"):
            model.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
        stretto.attach(model, transport=transport)
        one = torch.ones((), requires_grad=True)
        alive = checkpoint(torch.clone, one, use_reentrant=True)
        found = []
        for number in range(3):
            loss = model.inner.sum()
            if number:
                loss = checkpoint(lambda x: (model.inner * x).sum(), one, use_reentrant=True)
            if transport.rank:
                loss = model.late.sum() + loss
            loss.backward()
            found.append((model.late.grad.tolist(), model.inner.grad.tolist()))
        assert alive.requires_grad
        return found

    wanted = [([0.5 * number] * 3, [1.0 * number] * 3) for number in (1, 2, 3)]
    assert run_ranks(worker, 2) == [wanted] * 2
