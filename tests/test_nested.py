"""An attached model inside another one: both handles together are right, as one handle on all would be."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import unittest.mock
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Fails, checkpoint
from torch import nn

import stretto
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.testing_network import SeparateHosts
from stretto.transport import ProcessGroupTransport, choose
from stretto.transport.base import FLUSH_SECONDS

WIDTH = 5


class Model(nn.Module):
    """``a`` and ``b`` are the inner model; ``c`` and ``d`` the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        for name in use:
            layer = self.inner[name] if name in "ab" else getattr(self, name)
            x = torch.tanh(layer(x))
        return x.square().sum()


def batch(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def copies(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def joined(uses: list[str], number: int = 0) -> dict[str, torch.Tensor | None]:
    model = Model()
    for rank, use in enumerate(uses):
        (model(batch(rank, number), use) / len(uses)).backward()
    return copies(model)


def compare(everyone: list[dict], wanted: dict) -> None:
    for found in everyone:
        for name, gradient in wanted.items():
            if gradient is None:
                assert found[name] is None, name
                continue
            torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
            assert torch.equal(found[name], everyone[0][name]), name


def stop_once(owner: object, name: str, carrier: RecordingTransport) -> None:
    """Ctrl-C in place of the next call; from then on ``carrier`` counts."""
    plain = getattr(owner, name)

    def stop(*_: object, **__: object) -> None:
        setattr(owner, name, plain)
        carrier.calls.clear()
        raise KeyboardInterrupt

    setattr(owner, name, stop)


def attach_both(model: Model, transport, **options):
    small = {"bucket_cap_mb": 120 / 2**20, "transport": transport}  # a layer a bucket
    return stretto.attach(model.inner, **small, **options), stretto.attach(model, **small, **options)


ORDERS = [
    pytest.param(["abcd", "abcd", "abcd"], id="the-same-everywhere"),
    pytest.param(["abcd", "cdab", "acbd"], id="another-order-on-each-rank"),
    pytest.param(["abcd", "cd", "ab"], id="one-part-alone"),
    pytest.param(["ab", "ab", "ab"], id="the-inner-alone"),
    pytest.param(["cd", "cd", "cd"], id="the-outer-alone"),
    pytest.param(["a", "d", "bc"], id="little-in-common"),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("uses", ORDERS)
def test_the_mean_of_the_joined_batch(uses, world) -> None:
    def worker(transport):
        model = Model()
        attach_both(model, transport)
        found = []
        for _ in range(4):
            model.zero_grad()
            model(batch(transport.rank), uses[transport.rank]).backward()
            found.append(copies(model))
        return found

    everyone = run_ranks(worker, world, timeout=20)
    for number in range(4):
        compare([found[number] for found in everyone], joined(uses[:world]))


def test_the_order_changes_with_every_pass() -> None:
    kinds = ["abcd", "dcba", "ca", "bd", "cd", "ab"]

    def worker(transport):
        model = Model()
        attach_both(model, transport)
        found = []
        for number in range(12):
            model.zero_grad()
            model(batch(transport.rank), kinds[number * (transport.rank + 1) % 6]).backward()
            found.append(copies(model))
        return found

    everyone = run_ranks(worker, 3, timeout=20)
    for number in range(12):
        wanted = joined([kinds[number * (rank + 1) % 6] for rank in range(3)])
        compare([found[number] for found in everyone], wanted)


def test_reentrant_checkpoints_around_both() -> None:
    def worker(transport):
        model = Model()
        attach_both(model, transport)
        for _ in range(3):
            model.zero_grad()
            x = batch(transport.rank).requires_grad_()
            for name in "acbd":
                layer = model.inner[name] if name in "ab" else getattr(model, name)
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
            x.square().sum().backward()
        return copies(model)

    compare(run_ranks(worker, 2, timeout=20), joined(["acbd"] * 2))


@pytest.mark.parametrize("where", [1, 2, 3])
@pytest.mark.parametrize("use", ["abcd", "cdab", "cadb"])
def test_a_pass_that_fails_on_one_rank_and_a_right_one_after_it(use, where) -> None:
    def worker(transport):
        model = Model()
        attach_both(model, transport)
        for number in range(4):
            model.zero_grad()
            if number % 2:
                fails = transport.rank == 1
                x = batch(transport.rank)
                for place, name in enumerate(use):
                    x = torch.tanh((model.inner[name] if name in "ab" else getattr(model, name))(x))
                    x = Fails.apply(x) if fails and place == where - 1 else x
                with pytest.raises(ValueError if fails else stretto.PeerError):
                    x.square().sum().backward()
            else:
                model(batch(transport.rank), use).backward()
        model.zero_grad()
        model(batch(transport.rank), use).backward()
        return copies(model)

    compare(run_ranks(worker, 3, timeout=20), joined([use] * 3))


def test_each_handle_has_its_own_no_sync() -> None:
    def worker(transport):
        model = Model()
        inner, outer = attach_both(model, transport)
        for silent in ([inner], [outer], [inner, outer], []):
            with contextlib.ExitStack() as stack:
                for sync in silent:
                    stack.enter_context(sync.no_sync())
                model(batch(transport.rank, len(silent)), "cadb").backward()
        return copies(model), inner.statistics.passes, outer.statistics.passes

    everyone = run_ranks(worker, 2, timeout=20)
    model = Model()
    for number in (1, 1, 2, 0):
        for rank in range(2):
            (model(batch(rank, number), "cadb") / 2).backward()
    compare([found for found, *_ in everyone], copies(model))
    assert everyone[0][1:] == (2, 2)


@pytest.mark.parametrize("uses", ORDERS)
def test_models_beside_each_other(uses) -> None:
    def worker(transport):
        model = Model()  # not attached itself: its parts are
        small = {"bucket_cap_mb": 120 / 2**20, "transport": transport}
        first = stretto.attach(model.inner, **small)
        second = stretto.attach(model.c, beside=[first], **small)
        third = stretto.attach(model.d, beside=[second], **small)
        found = []
        for _ in range(4):
            model.zero_grad()
            model(batch(transport.rank), uses[transport.rank]).backward()
            found.append(copies(model))
        for sync in (second, first, third):  # none holds another
            sync.detach()
        return found

    everyone = run_ranks(worker, 3, timeout=20)
    for number in range(4):
        compare([found[number] for found in everyone], joined(uses))


def test_backward_has_ended_for_all_that_it_has_reached_before_the_first_waits() -> None:
    """So in a trace what the first waits for is no part of the others' backward."""

    def worker(transport):
        told, models = [], [nn.Linear(2, 2) for _ in range(2)]

        class Noted:
            def __init__(self, place: int) -> None:
                self.place = place

            def backward_ended(self, pass_number: int) -> None:
                told.append(("ended", self.place, pass_number))

            def pass_settled(self, pass_number: int) -> None:
                told.append(("settled", self.place, pass_number))

        handles = []
        for place, model in enumerate(models):
            handles.append(stretto.attach(model, transport=transport, beside=handles[-1:]))
            handles[-1].observe(Noted(place))
        for _ in range(2):
            sum(model(torch.ones(1, 2)).sum() for model in models).backward()
        for sync in handles:
            sync.detach()
        return [[(what, place) for what, place, number in told if number == one] for one in (1, 2)]

    (first, second), other = run_ranks(worker, 2, timeout=20)
    assert [first, second] == other and first == second
    assert {*first[:2]} == {("ended", 0), ("ended", 1)} and first[2:] == [("settled", 0), ("settled", 1)]


def test_when_the_first_has_left_the_next_one_sends_while_backward_runs() -> None:
    def worker(transport):
        handles = []
        for number in range(4):
            delay = number == 2
            beside = handles[-1:]
            handles.append(stretto.attach(nn.Linear(2, 2), transport=transport, beside=beside, delay=delay))
        found = []
        while handles:
            found.append(["while backward runs" in sync.describe().splitlines()[1] for sync in handles])
            handles.pop(0).detach()
        return found

    wanted = [[True, False, False, False], [True, False, False], [False, False], [True]]
    assert run_ranks(worker, 2, timeout=20) == [wanted] * 2


def test_what_is_left_to_whom(caplog) -> None:
    def worker(transport):
        model = Model()
        inner, outer = attach_both(model, transport)
        assert [spec.name for spec in outer.plan.parameters] == ["c.weight", "c.bias", "d.weight", "d.bias"]
        with pytest.raises(stretto.AlreadyAttachedError):
            stretto.attach(model, transport=transport)
        with pytest.raises(stretto.SetupError) as caught:
            inner.detach()
        assert str(caught.value) == (
            f"rank {transport.rank}: another attached model holds this one and has left its parameters to this handle."
            "\nCall detach() on the outer handle first."
        )
        outer.detach()
        inner.detach()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        stretto.attach(model, transport=transport)
        model(batch(transport.rank), "abcd").backward()
        return copies(model)

    with caplog.at_level(logging.INFO, "stretto"):
        compare(run_ranks(worker, 2, timeout=20), joined(["abcd"] * 2))
    lines = [record.getMessage() for record in caplog.records]
    names = "inner.a.weight, inner.a.bias, inner.b.weight, inner.b.bias"
    said = f"attach: 4 parameters ({names}) are left to their handle over local (threads of one process)"
    assert lines == [said] * 2


def test_a_detach_that_is_refused_leaves_sharded_optimizers_as_they_are() -> None:
    def worker(transport):
        model = Model()
        inner, outer = attach_both(model, transport)
        sharded = inner.shard(torch.optim.SGD(model.inner.parameters(), lr=0.1))
        with pytest.raises(stretto.SetupError, match="has left its parameters to this handle"):
            inner.detach()
        model(batch(transport.rank), "abcd").backward()
        sharded.step()
        ended = [sharded.ended]
        outer.detach()
        inner.detach()
        return [*ended, sharded.ended]

    assert run_ranks(worker, 2, timeout=20) == [[False, True]] * 2


@pytest.mark.parametrize(
    ("inner", "outer", "wanted"), [("none", "rank0", 0.0), ("rank0", "none", 0.0), ("mean", "rank0", 0.5)]
)
def test_buffers_of_a_part_follow_its_own_handle_unless_that_leaves_them(inner: str, outer: str, wanted: float) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("seen", torch.zeros(1))

    def worker(transport):
        model = nn.Sequential(Counting(), nn.Linear(1, 1))
        stretto.attach(model[0], transport=transport, buffers=inner)
        stretto.attach(model, transport=transport, buffers=outer)
        model[0].seen.fill_(transport.rank)
        model(torch.ones(1, 1)).sum().backward()
        return model[0].seen.item()

    assert run_ranks(worker, 2) == [wanted] * 2


def test_three_levels_and_two_inner_models_beside_each_other() -> None:
    def worker(transport):
        model = Model()
        for part in (model.inner["b"], model.inner["a"], model.inner, model.c, model):
            if part is model.inner:
                with pytest.raises(stretto.AlreadyAttachedError):
                    stretto.attach(part, transport=transport)
            else:
                stretto.attach(part, transport=transport)
        for _ in range(3):
            model.zero_grad()
            model(batch(transport.rank), ["abcd", "dcba", "bd"][transport.rank]).backward()
        return copies(model)

    compare(run_ranks(worker, 3, timeout=20), joined(["abcd", "dcba", "bd"]))


def test_ranks_that_disagree_on_what_is_attached_are_told() -> None:
    def worker(transport):
        model = Model()
        stretto.attach(model.inner["a" if transport.rank else "b"], transport=transport)
        stretto.attach(model, transport=transport)

    with pytest.raises(stretto.ModelMismatchError, match="attached already"):
        run_ranks(worker, 2, timeout=20)


def test_nothing_keeps_dropped_models_alive() -> None:
    def worker(transport):
        model = Model()
        attach_both(model, transport)
        model(batch(transport.rank), "abcd").backward()
        return [weakref.ref(model)]

    references = run_ranks(worker, 2, timeout=20)
    gc.collect()
    assert all(reference() is None for pair in references for reference in pair)


def test_a_model_that_was_dropped_has_no_part_in_passes_whether_it_is_collected_or_not() -> None:
    def worker(transport):
        model, dropped = Model(), nn.Linear(WIDTH, WIDTH)
        first = stretto.attach(dropped, transport=transport)
        sync = stretto.attach(model, transport=transport, beside=[first])
        (model(batch(transport.rank), "abcd") + dropped(batch(transport.rank)).sum()).backward()
        kept = first._reducer if transport.rank else None
        transport.all_gather_object(None)
        del first, dropped
        gc.collect()
        transport.all_gather_object(None)
        found = []
        for number in range(3):
            model.zero_grad()
            if number == 2 and transport.rank:
                sync.shadow_pass()
            else:
                model(batch(transport.rank, number), "abcd").backward()
                found.append(copies(model))
        assert kept is None or kept._passes == 1
        return found

    everyone = run_ranks(worker, 2, timeout=20)
    for number in range(2):
        compare([found[number] for found in everyone], joined(["abcd"] * 2, number))


@pytest.mark.parametrize("keeps", [[], [1], [0, 1]], ids=["nobody-keeps", "one-keeps", "all-keep"])
@pytest.mark.parametrize("which", ["inner", "outer"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_member_is_reduced_on_when_all_its_parameters_were_replaced(beside: bool, which: str, keeps: list) -> None:
    """Whether the old ones are still alive differs between ranks, and says nothing."""

    def worker(transport):
        model, kept, found = Model(), [], []
        rest = nn.ModuleDict({"c": model.c, "d": model.d})
        if beside:
            sync = stretto.attach(model.inner, transport=transport)
            stretto.attach(rest, transport=transport, beside=[sync])
        else:
            attach_both(model, transport)
        for number in range(4):
            model.zero_grad()
            if number == 2:
                replaced = model.inner if which == "inner" else rest
                kept += [*replaced.parameters()] if transport.rank in keeps else []
                replaced.load_state_dict({n: one.clone() for n, one in replaced.state_dict().items()}, assign=True)
            model(batch(transport.rank, number), ["abcd", "cdab"][transport.rank]).backward()
            found.append(copies(model))
        return found

    everyone = run_ranks(worker, 2, timeout=20)
    for number in range(4):
        compare([found[number] for found in everyone], joined(["abcd", "cdab"], number))


def test_who_is_stopped_amid_what_follows_a_pass_sends_nothing_for_the_members_behind() -> None:
    """The others may be amid a message of that very member, or not: it would be summed with it."""

    def worker(transport):
        model, carrier = Model(), RecordingTransport(transport)
        inner, outer = attach_both(model, carrier)
        told = []
        for number in range(4):
            model.zero_grad()
            if number == 2 and transport.rank:
                stop_once(inner._reducer._consensus, "hear", carrier)
            try:
                model(batch(transport.rank, number), "abcd").backward()
            except KeyboardInterrupt:
                assert not carrier.calls
                assert all(parameter.grad is None for parameter in model.parameters())
            except stretto.CommunicationError as error:
                told.append(f"{type(error).__name__} {error}")
        assert [sync.statistics.passes for sync in (inner, outer)] == [3, 2]
        return told, len(carrier.calls)

    (waited, _), (stopped, sent) = run_ranks(worker, 2, timeout=20)
    assert sent == 0
    assert len(stopped) == 1 and stopped[0].startswith("CommunicationError rank 1, pass 3: this rank has failed"), (
        stopped
    )
    assert [text.partition("\n")[0] for text in waited] == [
        f"PeerError rank 0, pass {number}: rank 1 failed and left, so nobody can complete this pass."
        for number in (3, 4)
    ]
    assert all("  rank 1, pass 3, backward: KeyboardInterrupt" in text for text in waited), waited


def test_a_handle_that_is_collected_while_others_are_looked_for_hides_none_of_them() -> None:
    def worker(transport):
        handles = [stretto.attach(nn.Linear(2, 2), transport=transport) for _ in range(3)]
        seats = [sync._reducer.queue.peers.seat for sync in handles]
        for seat in seats:
            seat.row = seats  # as of handles of a process, which threads are not
        seats[0].whose = lambda gone=seats[0]: seats.remove(gone)
        families = [sync._reducer.family for sync in handles]
        return families[2]._company() == families[1:]

    assert all(run_ranks(worker, 2, timeout=20))


def over_gloo(rank: int) -> list:
    found = []
    for group in (None, dist.new_group([0, 1])):
        model = Model()
        stretto.attach(model.inner, bucket_cap_mb=120 / 2**20)
        outer = stretto.attach(model, bucket_cap_mb=120 / 2**20, process_group=group, check_every=1)
        assert not outer._reducer.delay, "each handle has its own counters and buffers in shared memory"
        for number in range(6):
            model.zero_grad()
            model(batch(rank, number), ["abcd", "dcba"][(rank + number) % 2]).backward()
        found.append(copies(model))
    for group in (None, dist.new_group([0, 1])):
        model, over = Model(), "process_group"
        stretto.attach(model.inner, bucket_cap_mb=120 / 2**20, transport=over)
        outer = stretto.attach(model, bucket_cap_mb=120 / 2**20, transport=over, process_group=group, check_every=1)
        assert outer._reducer.delay is (group is None)
        for number in range(6):
            model.zero_grad()
            model(batch(rank, number), ["abcd", "dcba"][(rank + number) % 2]).backward()
        found.append(copies(model))
    wrapped = stretto.DistributedDataParallel(Model().inner["a"])
    stretto.attach(nn.Sequential(wrapped, nn.Linear(WIDTH, WIDTH)))
    return found


@pytest.mark.ranks
def test_over_one_process_group_and_over_two() -> None:
    everyone = spawn_ranks(over_gloo, 2, timeout=60)
    wanted = joined(["dcba", "abcd"], 5)
    for way in range(4):
        compare([found[way] for found in everyone], wanted)


def identity(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def who_waits(rank: int) -> dict[str, bool]:
    """Whether the second of two handles side by side sends after backward."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    turns: dict = {"process_groups": [first, second]}
    found = {}
    for name, one, other in (
        ("shared memory", {}, {}),
        ("takes turns, on its first group", turns, {"process_group": first, "transport": "process_group"}),
        ("takes turns, on its second group", turns, {"process_group": second, "transport": "process_group"}),
        ("takes turns, on another", turns, {"transport": "process_group"}),
        ("shared memory, and a group", {}, {"transport": "process_group"}),
        ("comm hooks over shared memory", {}, {}),
    ):
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        earlier = stretto.attach(parts[0], bucket_cap_mb=30 / 2**20, **one)
        later = stretto.attach(parts[1], bucket_cap_mb=30 / 2**20, beside=[earlier], **other)
        if "hooks" in name:
            for handle in (earlier, later):
                handle.register_comm_hook(None, identity)
        for number in range(4):
            for part in parts:
                part.zero_grad()
            x = torch.full((1, WIDTH), 1.0 + rank)
            for part in parts if rank else reversed(parts):  # so that gradients come in another order on each rank
                x = torch.full((1, WIDTH), 1.0 + rank) * part(x).sum().mul(0).add(1) + part(x) * 0 + part.bias * 0
            total = sum(
                part(torch.full((1, WIDTH), (1.0 + rank) * 10**place)).sum() for place, part in enumerate(parts)
            )
            (total + x.sum() * 0).backward()
            means = [part.weight.grad.unique().tolist() for part in parts]
            assert means == [[1.5], [15.0]], (name, number, means)
        if "hooks" not in name:
            words = later.describe().splitlines()[1]
            assert words == (
                "gradients: mean over ranks, sent "
                f"{'after backward' if later._reducer.delay else 'while backward runs'}, in place when backward returns"
            )
        found[name] = later._reducer.delay
        later.detach()
        earlier.detach()
    return found


def left_alone(rank: int) -> list[bool]:
    """Two models that one backward reaches; then the first is detached, and the second goes on by itself."""
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    first, second = (stretto.attach(part, transport="process_group") for part in parts)
    waits = []
    for number in range(6):
        if number == 3:
            first.detach()
        x = torch.full((1, WIDTH), 1.0 + rank)
        sum(part(x).sum() for part in (parts if number < 3 else parts[1:])).backward()
        waits.append(second._reducer.waits)
    return waits


@pytest.mark.ranks
def test_whoever_is_left_alone_overlaps_again() -> None:
    assert spawn_ranks(left_alone, 2) == [[True] * 3 + [False] * 3] * 2


@pytest.mark.ranks
def test_handles_side_by_side_wait_for_each_other_only_where_their_buckets_could_mix() -> None:
    for found in spawn_ranks(who_waits, 2, timeout=60):
        assert found == {
            "shared memory": False,
            "takes turns, on its first group": True,
            "takes turns, on its second group": True,
            "takes turns, on another": False,
            "shared memory, and a group": False,
            "comm hooks over shared memory": True,
        }


# Side by side, without a word about each other

TRANSPORTS = ["process_group", "shared_memory"]


def batches(rank: int, uses: list[str]) -> list[tuple[torch.Tensor, str]]:
    return [(batch(rank, number), use) for number, use in enumerate(uses)]


SIDE_BY_SIDE = [  # what each of two ranks does in each pass; capitals: backward raises behind that layer
    ["abcd", "cdab", "acbd", "ab", "cd", "dcba", "ab", "badc", "cdba", "abdc"],
    ["cdab", "abcd", "bdac", "ba", "dc", "acbd", "ab", "dcab", "abcd", "cdba"],
]
LAYERS_COME_AND_GO = [["ac", "bdc", "dcba", "cab", "abd"] * 4, ["cb", "abd", "abcd", "dab", "cdba"] * 4]
ONE_FAILS = [["abcd", "cdab", "abcd"], ["cdab", "abDc", "cdab"]]
REPLACED = [["abcd", "abcd", "abcd*", "cdab"], ["cdab", "cdab", "cdab*", "abcd"]]
"""*: all parameters of ``a`` and ``b`` are others from here on."""
RIGHT = {"order": SIDE_BY_SIDE, "absent": LAYERS_COME_AND_GO, "replaced": REPLACED}


def drop_ins(
    rank: int, uses: list[list[str]], transport: str, *, apart: bool = False, hooks: bool = False
) -> tuple[list, list]:
    """Two drop-ins that know nothing of each other, and what their backwards leave or raise; ``apart``, each on a
    process group of its own."""
    model = Model()
    parts = [model.inner, nn.ModuleDict({"c": model.c, "d": model.d})]
    options = {"bucket_cap_mb": (30 if hooks else 120) / 2**20, "transport": transport}  # a layer a bucket; a parameter
    groups = [dist.new_group() if apart else None for _ in parts]
    wrapped = [
        stretto.DistributedDataParallel(part, process_group=group, **options)
        for part, group in zip(parts, groups, strict=True)
    ]
    if hooks:
        for one, group in zip(wrapped, groups, strict=True):
            one.register_comm_hook(group, identity)
    found, raised = [], []
    for x, use in batches(rank, uses[rank]):
        model.zero_grad()
        if use.endswith("*"):
            model.inner.load_state_dict({n: one.clone() for n, one in model.inner.state_dict().items()}, assign=True)
        for name in use.strip("*"):
            layer = model.inner[name.lower()] if name.lower() in "ab" else getattr(model, name.lower())
            x = torch.tanh(layer(x))
            x = Fails.apply(x) if name.isupper() else x
        try:
            x.square().sum().backward()
        except (ValueError, stretto.PeerError) as error:
            raised.append(type(error).__name__)
        found.append(copies(model))
    del wrapped
    return found, raised


def several(rank: int) -> dict:
    return {
        (kind, transport): drop_ins(rank, uses, transport)
        for kind, uses in (*RIGHT.items(), ("fails", ONE_FAILS))
        for transport in TRANSPORTS
    }


@pytest.mark.ranks
def test_drop_ins_side_by_side_in_another_order_on_each_rank() -> None:
    everyone = spawn_ranks(several, 2, timeout=90)
    for transport in TRANSPORTS:
        for kind, uses in RIGHT.items():
            for number, both in enumerate(zip(*uses, strict=True)):
                wanted = joined([use.strip("*") for use in both], number)
                compare([rank[kind, transport][0][number] for rank in everyone], wanted)
        check_failure([rank["fails", transport] for rank in everyone])


def check_failure(everyone: list[tuple[list, list]]) -> None:
    """The second rank's backward fails in the pass between, before it has reached the first model."""
    for number in (0, 2):
        compare([found[number] for found, _ in everyone], joined([uses[number] for uses in ONE_FAILS], number))
    assert [raised for _, raised in everyone] == [["PeerError"], ["ValueError"]]


def several_apart(rank: int) -> dict:
    found = {
        (kind, transport): drop_ins(rank, uses, transport, apart=True)[0]
        for kind, uses in RIGHT.items()
        for transport in TRANSPORTS
    }
    hooked = drop_ins(rank, SIDE_BY_SIDE, "process_group", apart=True, hooks=True)[0]
    fails = {("fails", transport): drop_ins(rank, ONE_FAILS, transport, apart=True) for transport in TRANSPORTS}
    return found | fails | {("order", "comm hooks"): hooked}


@pytest.mark.ranks
def test_on_two_process_groups_no_rank_waits_for_one_that_waits_for_it() -> None:
    everyone = spawn_ranks(several_apart, 2, timeout=60)
    for kind, way in everyone[0]:
        if kind == "fails":
            check_failure([rank[kind, way] for rank in everyone])
            continue
        for number, both in enumerate(zip(*RIGHT[kind], strict=True)):
            wanted = joined([use.strip("*") for use in both], number)
            compare([rank[kind, way][number] for rank in everyone], wanted)


def one_family_on_two_groups(rank: int) -> list[dict]:
    """Handles that are beside each other for good, a process group each, with hooks that go one at a time."""
    model, found, groups = Model(), [], [dist.new_group(), dist.new_group()]
    small = {"bucket_cap_mb": 30 / 2**20, "transport": "process_group"}
    rest = nn.ModuleDict({"c": model.c, "d": model.d})
    first = stretto.attach(model.inner, **small, process_group=groups[0])
    second = stretto.attach(rest, **small, process_group=groups[1], beside=[first])
    for one, group in zip((first, second), groups, strict=True):
        one.register_comm_hook(group, identity)
    for x, use in batches(rank, SIDE_BY_SIDE[rank]):
        model.zero_grad()
        model(x, use).backward()
        found.append(copies(model))
    return found


@pytest.mark.ranks
def test_one_family_on_two_process_groups_does_not_wait_for_itself() -> None:
    everyone = spawn_ranks(one_family_on_two_groups, 2, timeout=60)
    for number, both in enumerate(zip(*SIDE_BY_SIDE, strict=True)):
        compare([found[number] for found in everyone], joined([*both], number))


def lost_in_one(rank: int, lost_first: bool) -> list[str]:
    """Rank 0 has a model with each of the others, and loses its place in one of them."""
    groups = {1: dist.new_group([0, 1]), 2: dist.new_group([0, 2])}
    handles, parts = {}, {}
    for other in (1, 2) if lost_first else (2, 1):
        if rank in (0, other):
            parts[other] = nn.Linear(WIDTH, WIDTH)
            handles[other] = stretto.attach(parts[other], process_group=groups[other])
    found = []
    for number in range(3):
        if number == 2 and rank == 0:
            handles[1]._reducer.failing.lose(RuntimeError("of the test"))
        try:
            sum(parts[other](torch.ones(1, WIDTH)).sum() for other in sorted(parts)).backward()
        except stretto.StrettoError as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("lost_first", [False, True])
def test_a_rank_that_has_lost_its_place_in_one_tells_those_of_another_group(lost_first: bool) -> None:
    found = spawn_ranks(lost_in_one, 3, lost_first, timeout=30)
    assert found == [["CommunicationError"], ["PeerError"], ["PeerError"]]


def who_sends(rank: int, apart: bool) -> list[list[bool]]:
    """Whether two with hooks that go one at a time send nothing before backward has ended, pass by pass."""
    groups = [dist.new_group() if apart else None for _ in range(2)]
    parts = [nn.Linear(WIDTH, WIDTH) for _ in groups]
    handles = [
        stretto.attach(part, transport="process_group", process_group=group)
        for part, group in zip(parts, groups, strict=True)
    ]
    for one, group in zip(handles, groups, strict=True):
        one.register_comm_hook(group, identity)
    waits = []
    for _ in range(3):
        sum(part(torch.ones(1, WIDTH)).sum() for part in parts).backward()
        waits.append([one._reducer.waits for one in handles])
    return waits


@pytest.mark.ranks
@pytest.mark.parametrize("apart", [False, True])
def test_whoever_waits_within_backward_is_held_back_where_others_wait_for_it(apart: bool) -> None:
    later = [True, True] if apart else [False, True]
    assert spawn_ranks(who_sends, 2, apart, timeout=60) == [[[True, True], later, later]] * 2


def around_an_expert(rank: int) -> list[list[float]]:
    """An expert of two ranks each, and an outer model around it that was attached behind another one. The expert is
    attached before that one on two ranks, and behind it on the others."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expert, between, outer = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    options = {"transport": "process_group", "bucket_cap_mb": 30 / 2**20}
    handles = [
        stretto.attach(one, **options, process_group=halves[rank // 2] if one is expert else None)
        for one in ((expert, between) if rank < 2 else (between, expert))
    ]
    handles.append(stretto.attach(nn.ModuleList([expert, outer]), **options))
    found = []
    for _ in range(3):
        x = torch.full((1, WIDTH), 1.0 + rank)
        sum((one(x * 10**place)).sum() for place, one in enumerate((between, outer, expert))).backward()
        found.append([one.weight.grad.unique().item() for one in (between, outer, expert)])
        for one in (expert, between, outer):
            one.zero_grad()
    return found


@pytest.mark.ranks
def test_a_model_around_another_keeps_its_place_behind_those_attached_before_it() -> None:
    for rank, found in enumerate(spawn_ranks(around_an_expert, 4, timeout=60)):
        assert found == [[2.5, 25.0, 150.0 if rank < 2 else 350.0]] * 3


class SumsInBackward(torch.autograd.Function):
    """Over all ranks, on the default group, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.sum().reshape(1)
        dist.all_reduce(total)
        return gradient + 0 * total


def hook_and_expert(rank: int, hooked: bool) -> list[list[float | None]]:
    """A model on three ranks whose buckets wait for each other, or for a map of absences; an expert on two of them."""
    pair = dist.new_group([0, 1])
    first, second, expert = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    sync = stretto.attach(nn.ModuleList([first, second]), transport="process_group", bucket_cap_mb=30 / 2**20)
    if hooked:
        sync.register_comm_hook(None, mean_of_three)
    if rank < 2:
        beside = stretto.attach(expert, transport="process_group", process_group=pair)
    found = []
    for number in range(6):
        x = torch.full((1, WIDTH), 1.0 + rank)
        middle = SumsInBackward.apply(first(x) if hooked or number % 2 == 0 else x.clone().requires_grad_())
        (second(10 * x + 0 * middle).sum() + middle.sum() + (expert(100 * x).sum() if rank < 2 else 0)).backward()
        gradients = [one.weight.grad for one in (first, second, expert)]
        found.append([None if gradient is None else gradient.unique().item() for gradient in gradients])
        for one in (first, second, expert):
            one.zero_grad()
    if rank < 2:
        beside.detach()
    return found


def mean_of_three(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return identity(None, bucket).then(lambda future: future.value().mul_(2 / 3))


@pytest.mark.ranks
@pytest.mark.parametrize("hooked", [True, False])
def test_collectives_of_the_program_in_backward_stand_between_the_same_buckets_on_all_ranks(hooked: bool) -> None:
    for rank, found in enumerate(spawn_ranks(hook_and_expert, 3, hooked, timeout=60)):
        of_expert = 150.0 if rank < 2 else None
        for number, (first, second, expert) in enumerate(found):
            assert first == (pytest.approx(2.0) if hooked or number % 2 == 0 else None)
            assert (second, expert) == (pytest.approx(20.0), of_expert)


def idle_in_a_family(rank: int, inner: str) -> list[list[list[float]]]:
    """Each rank drops another layer, so that maps of absences are exchanged; in one pass rank 1 has nothing to do."""
    torch.manual_seed(0)
    model = nn.Module()
    model.inner, model.rest = (nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]) for _ in range(2))
    first = stretto.attach(model.inner, bucket_cap_mb=1e-5, transport=inner)
    stretto.attach(model, bucket_cap_mb=1e-5, transport="process_group")
    for number in range(6):
        model.zero_grad()
        if number == 4 and rank == 1:
            first.shadow_pass()
            continue
        x = torch.ones(2, 4)
        for place, layer in enumerate([*model.inner, *model.rest]):
            x = x if place % 3 == rank else layer(x)
        x.sum().backward()
    return [model.inner[2].weight.grad.tolist(), model.rest[2].weight.grad.tolist()]


@pytest.mark.ranks
@pytest.mark.parametrize("inner", ["process_group", "auto"])
def test_a_rank_that_is_idle_tells_for_all_of_a_family_before_it_sends(inner: str) -> None:
    first, second = spawn_ranks(idle_in_a_family, 2, inner, timeout=60)
    assert first == second


class SumsItsGradient(torch.autograd.Function):
    """As layers do that are spread over all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def expert_in_a_family(rank: int) -> list[list[float | None]]:
    """On two ranks of three an expert is in a family with the dense layers; its hook goes one at a time."""
    pair = dist.new_group([0, 1])
    first, second, expert = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    dense = nn.ModuleList([first, second])
    handles = [stretto.attach(dense, transport="process_group", bucket_cap_mb=30 / 2**20)]
    if rank < 2:
        handles.append(stretto.attach(expert, transport="process_group", process_group=pair, beside=handles))
        handles[1].register_comm_hook(pair, identity)
    found = []
    for _ in range(3):
        x = torch.full((1, WIDTH), 1.0 + rank)
        loss = second(SumsItsGradient.apply(first(x)) * 0 + x * 10).sum()
        (loss + expert(x * 100).sum() if rank < 2 else loss).backward()
        found.append([None if one.weight.grad is None else one.weight.grad.unique().item() for one in (second, expert)])
        dense.zero_grad()
        expert.zero_grad()
    return found


@pytest.mark.ranks
def test_a_member_that_waits_within_backward_holds_back_itself_alone() -> None:
    found = spawn_ranks(expert_in_a_family, 3, timeout=60)
    assert found == [[[20.0, 150.0 if rank < 2 else None]] * 3 for rank in range(3)]


class StartsBackward(torch.autograd.Function):
    """Its backward runs a backward of its own, of which nobody can know before."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            ctx.layer(gradient.detach()).square().sum().backward()
        return gradient, None


def met_from_inside(rank: int) -> tuple[list, list[str], list[bool]]:
    logger, lines = logging.getLogger("stretto"), []
    listens = logging.Handler(logging.WARNING)
    listens.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(listens)
    model, found, sent = Model(), [], []
    small = {"bucket_cap_mb": 120 / 2**20, "transport": "process_group"}
    handles = [stretto.attach(part, **small) for part in (model.c, model.inner)]
    for number in range(3):
        model.zero_grad()
        x, before = StartsBackward.apply(batch(rank, number).requires_grad_(), model.c), handles[1].statistics.buckets
        x.register_hook(lambda _, before=before: sent.append(handles[1].statistics.buckets > before))
        model(x, "ab").backward()
        found.append(copies(model))
    assert [sync.statistics.passes for sync in handles] == [3, 3]
    return found, lines, sent


@pytest.mark.ranks
def test_one_that_nobody_could_know_to_come_is_named() -> None:
    everyone = spawn_ranks(met_from_inside, 2, timeout=60)
    for number in range(3):
        for name, gradient in everyone[0][0][number].items():
            other = everyone[1][0][number][name]
            assert (gradient is None and other is None) or torch.equal(gradient, other), name
    for rank, (_, lines, sent) in enumerate(everyone):
        assert sent == [True, False, False]  # from then on it waits
        assert lines == [
            f"rank {rank}, pass 1: one backward has reached two attached models on one process group, from inside a "
            "custom autograd function: the one attached later (a.weight, a.bias, b.weight, b.bias) has sent "
            "gradients before it was known that backward reaches the earlier one (weight, bias). Unless it reaches "
            "both in this order on every rank, their gradients of this pass are mixed.\n"
            "Attach the later one with stretto.attach(module, beside=[the earlier one's handle]), or wrap both in "
            "one DistributedDataParallel(torch.nn.ModuleList([...]))."
        ]


def given_up_in_turn(rank: int, hooked: tuple[bool, ...]) -> tuple[str, list[list[float]]]:
    """Backward fails on rank 0 when it has reached the last of several models, on two ranks of one host and another."""
    parts, handles = [nn.Linear(2, 2) for _ in hooked], []
    for part, hook in zip(parts, hooked, strict=True):
        transport = choose(SeparateHosts(ProcessGroupTransport(), (2, 1)), "auto")
        handles.append(stretto.attach(part, transport=transport, bucket_cap_mb=1e-5, beside=handles))
        if hook:
            handles[-1].register_comm_hook(None, mean_of_three)
    x, told = torch.ones(1, 2), ""
    for fails in (False, True, False):
        for part in parts:
            part.zero_grad()
        hidden = (rank + 1) * x
        for part in parts[:-1]:
            hidden = part(hidden)
        hidden = Fails.apply(hidden) if fails and rank == 0 else hidden
        try:
            parts[-1](hidden).sum().backward()
        except (ValueError, stretto.PeerError) as error:
            told += f"{type(error).__name__}: {error}"
    return told, [part.bias.grad.tolist() for part in parts]


@pytest.mark.ranks
@pytest.mark.parametrize("hooked", [(False, True), (True, False, True)])
def test_a_rank_that_gives_up_several_waits_for_the_first_where_a_later_one_makes_it_wait(hooked) -> None:
    """It waited for the later one's hook, and the others for the sums of the first, which this rank was to pass on."""
    (first, mine), *others = spawn_ranks(given_up_in_turn, 3, hooked, timeout=50)
    assert first == "ValueError: on purpose"
    for rank, (told, gradients) in enumerate(others, 1):
        assert told == (
            f"PeerError: rank {rank}, pass 2: backward failed on rank 0, so the mean of this pass lacks gradients.\n"
            "  rank 0, pass 2, backward: failed; its own log has the error\n"
            "Do not step with these gradients: zero_grad() and go on, on all ranks."
        )
        assert gradients == mine


def given_up_on_two_groups(rank: int, host_sizes: tuple[int, ...], third: bool) -> list[str]:
    """Backward fails on rank 0 when it has reached handles of all ranks and one of two ranks, which have met before."""
    pair, told = dist.new_group([0, 1]), []
    dense, expert, last = (nn.Linear(2, 2) for _ in range(3))
    stretto.attach(dense, transport=choose(SeparateHosts(ProcessGroupTransport(), host_sizes), "auto"))
    if rank < 2:
        stretto.attach(expert, process_group=pair).register_comm_hook(pair, identity)
    if third:
        stretto.attach(last).register_comm_hook(None, mean_of_three)
    for fails in (False, False, True, False):
        hidden = dense(torch.full((1, 2), 1.0 + rank))
        hidden = Fails.apply(hidden) if fails and rank == 0 else hidden
        try:
            last(expert(hidden) if rank < 2 else hidden).sum().backward()
        except (ValueError, stretto.PeerError) as error:
            told.append(type(error).__name__)
        dist.barrier()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("host_sizes, third", [((2, 1), False), ((3,), True)])
def test_models_of_several_groups_are_given_up_in_the_order_in_which_others_end_them(host_sizes, third) -> None:
    """A rank gave up those of one group alone, in another order than the others, and stayed with one for ever."""
    told = spawn_ranks(given_up_on_two_groups, 3, host_sizes, third, timeout=50)
    assert told == [["ValueError"], ["PeerError"], ["PeerError"]]


def given_up_at_its_end(rank: int) -> str:
    """The first of two models fails at the end of backward on rank 0, long before the other ranks come to theirs."""
    parts, handles = [nn.Linear(2, 2) for _ in range(2)], []
    for part in parts:
        transport = choose(SeparateHosts(ProcessGroupTransport(), (2, 1)), "auto")
        handles.append(stretto.attach(part, transport=transport, bucket_cap_mb=1e-5, beside=handles))
    handles[1].register_comm_hook(None, mean_of_three)
    told = ""
    for fails in (False, True, False):
        loss = parts[1](parts[0](torch.full((1, 2), 1.0 + rank))).sum()
        if fails and rank:
            time.sleep(FLUSH_SECONDS + 1)
        full = unittest.mock.Mock(side_effect=MemoryError("no room"))
        out = unittest.mock.patch.object(handles[0]._reducer.tracker, "contributed", full)
        try:
            with out if fails and not rank else contextlib.nullcontext():
                loss.backward()
        except (MemoryError, stretto.PeerError) as error:
            told += type(error).__name__ + " no room" * ("no room" in str(error))
    return told


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_fails_in_the_end_of_the_first_waits_for_it_where_a_later_one_makes_it_wait() -> None:
    told = spawn_ranks(given_up_at_its_end, 3, timeout=50)
    assert told == ["MemoryError no room", *["PeerError no room"] * 2]


def stopped_behind(rank: int, how: str) -> list[str]:
    """The first of two models fails on rank 0 as backward ends, and then the second, behind it, cannot be given up."""
    parts, handles, broken, told = [nn.Linear(2, 2) for _ in range(2)], [], [False], []
    for part in parts:
        handles.append(stretto.attach(part, beside=handles))

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if broken[0]:
            raise ValueError("on purpose")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    handles[1].register_comm_hook(None, hook)
    parts[1](parts[0](torch.ones(1, 2))).sum().backward()
    dist.barrier()
    if rank and how == "others leave":
        for sync in handles:
            sync.detach()
        return told
    broken[0] = how == "hook fails" and not rank
    full = unittest.mock.Mock(side_effect=KeyboardInterrupt if how == "others leave" else MemoryError)
    out = unittest.mock.patch.object(handles[0]._reducer.tracker, "contributed", full)
    stretto.failing.FLUSH_SECONDS = 0.2  # of those that wait for each other here
    for fails in (True, False)[: 1 + (how == "hook fails")]:
        try:
            with out if fails and not rank else contextlib.nullcontext():
                parts[1](parts[0](torch.ones(1, 2))).sum().backward()
        except (KeyboardInterrupt, MemoryError, stretto.CommunicationError) as error:
            quoted = ["MemoryError"] * ("MemoryError" in str(error))
            told.append(", ".join([type(error).__name__, *quoted]))
    return told


@pytest.mark.ranks
@pytest.mark.parametrize(
    "how, wanted",
    [
        ("others leave", [["KeyboardInterrupt"], []]),
        (
            "hook fails",
            [
                ["MemoryError", "CommunicationError, MemoryError"],
                ["PeerError, MemoryError", "PeerError, MemoryError"],
            ],
        ),
    ],
)
def test_what_cannot_be_given_up_behind_hides_no_failure_and_is_told(how: str, wanted: list[list[str]]) -> None:
    """The user read that others had gone, in place of Ctrl-C too; and others waited for what had never been sent."""
    assert spawn_ranks(stopped_behind, 2, how, timeout=50) == wanted


def given_up_before_a_map(rank: int) -> str:
    """Of two models that share nothing, ranks tell each other what will come of the second; backward fails between."""
    first, second = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for part in (first, second):
        stretto.attach(part, transport="process_group")
    told = ""
    for number in range(5):
        hidden = first(torch.full((1, 2), 1.0 + rank))
        hidden = Fails.apply(hidden) if number == 3 and rank == 0 else hidden
        hidden = second[0](hidden)
        try:
            (hidden + second[1](hidden) if number % 2 == rank else hidden).sum().backward()
        except (ValueError, stretto.PeerError) as error:
            told += str(error)
        dist.barrier()
    return told


@pytest.mark.ranks
def test_a_rank_that_gives_up_one_before_a_map_of_absences_is_named() -> None:
    mine, others = spawn_ranks(given_up_before_a_map, 2, timeout=50)
    assert mine == "on purpose"
    assert others.startswith("rank 1, pass 4: backward failed on rank 0, so")


def given_up_in_order(rank: int, hooked: bool) -> str:
    """The first and the third of three models are one family; the second is a stranger that lies between them."""
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 4)
    carried = "auto" if hooked else "process_group"  # where all of them share one channel
    first, second = stretto.attach(a, transport=carried), stretto.attach(b, transport=carried)
    if hooked:
        second.register_comm_hook(None, identity)
    stretto.attach(c, transport=carried, beside=[first])
    told = ""
    for fails in (False, True, False):
        for part in (a, b, c):
            part.zero_grad()
        hidden = a(torch.full((1, 2), 1.0 + rank))
        hidden = Fails.apply(hidden) if fails and rank == 0 else hidden
        try:
            c(b(hidden)).sum().backward()
        except (ValueError, stretto.PeerError) as error:
            told += type(error).__name__
        dist.barrier()
    mine = torch.cat([p.grad.flatten() for part in (a, b, c) for p in part.parameters()])
    other = mine.clone()
    dist.broadcast(other, 0)
    return f"{told}, {torch.equal(mine, other)}"


@pytest.mark.ranks
@pytest.mark.parametrize("hooked", [False, True])
def test_models_are_given_up_in_the_order_in_which_others_end_them(hooked: bool) -> None:
    """The failing rank gave up the family first, and stayed with its last for ever; others were amid the stranger."""
    assert spawn_ranks(given_up_in_order, 2, hooked, timeout=50) == ["ValueError, True", "PeerError, True"]
