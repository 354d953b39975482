"""The reduction options of ``attach``, each against one process that computes what is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from decimal import Decimal

import pytest
import torch

import stretto
from stretto.check import check_replicas, fingerprint
from stretto.scaling import Scaling, encode_weight, total_weight
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalTransport, RoundRobinTransport


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def batch(rank: int, samples: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(
    world: int, samples=lambda rank: 4, dtype=torch.float32, weight=None, **options
) -> list[list[torch.Tensor]]:
    """Gradients on each rank after two passes with these options."""

    def worker(transport):
        model = model_of(dtype)
        sync = stretto.attach(model, transport=transport, **options)
        for _ in range(2):
            model.zero_grad()
            if weight is not None:
                sync.weight = weight(transport.rank)
            model(batch(transport.rank, samples(transport.rank), dtype)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    found = run_ranks(worker, world)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "the same bits on every rank"
    return found


def alone(weights: list[float], samples=lambda rank: 4, dtype=torch.float32) -> list[torch.Tensor]:
    """The sum over ranks of weighted gradients, in double precision."""
    total: list[torch.Tensor] = []
    for rank, weight in enumerate(weights):
        model = model_of(dtype)
        model(batch(rank, samples(rank), dtype)).square().mean().backward()
        gradients = [weight * parameter.grad.double() for parameter in model.parameters()]
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
    return total


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], **tolerance) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))


@pytest.mark.parametrize("cap", [1e-6, 1.0])
@pytest.mark.parametrize("world", [2, 3])
def test_sum(world: int, cap: float) -> None:
    assert_close(reduced(world, reduce="sum", bucket_cap_mb=cap)[0], alone([1.0] * world))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_predivide_factor_changes_where_the_division_is_not_what_comes_out(reduce: str) -> None:
    found = reduced(3, reduce=reduce, predivide_factor=4.0)[0]
    assert_close(found, alone([1.0] * 3 if reduce == "sum" else [1 / 3] * 3))


def test_predivide_factor_keeps_half_precision_sums_from_overflowing() -> None:
    def worker(factor, transport):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
        model = torch.nn.Module()
        model.parameter = parameter
        stretto.attach(model, transport=transport, reduce="sum" if factor is None else "mean", predivide_factor=factor)
        (parameter * 40000.0).sum().backward()
        return parameter.grad.item()

    assert run_ranks(lambda transport: worker(None, transport), 2) == [float("inf")] * 2
    assert run_ranks(lambda transport: worker(2.0, transport), 2) == [40000.0] * 2


@pytest.mark.parametrize("cap", [1e-6, 1.0])
def test_weighted_mean_is_the_mean_over_samples(cap: float) -> None:
    counts = [1, 3, 2]
    found = reduced(3, lambda r: counts[r], weighted=True, weight=lambda r: counts[r], bucket_cap_mb=cap)[0]
    model = model_of().double()
    model(torch.cat([batch(rank, counts[rank]) for rank in range(3)]).double()).square().mean().backward()
    assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_weights_of_a_half_precision_model_are_summed_exactly() -> None:
    weights = [100_003, 7]
    found = reduced(2, dtype=torch.bfloat16, weighted=True, weight=lambda r: weights[r], reduce_dtype=torch.float32)[0]
    total = sum(weights)
    assert_close(found, alone([w / total for w in weights], dtype=torch.bfloat16), rtol=1e-2, atol=1e-3)
    third = reduced(2, dtype=torch.bfloat16, weighted=True, weight=lambda r: (r + 1) / 3, reduce_dtype=torch.float32)[0]
    assert_close(third, alone([1 / 3, 2 / 3], dtype=torch.bfloat16), rtol=1e-2, atol=1e-3)


class HalfThenSingle(torch.nn.Module):
    """Registered in the order of the first plan's end, so that the learnt order puts the half type last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.high = torch.nn.Linear(4, 4)
        self.low = torch.nn.Linear(4, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.bfloat16()).float()).square().mean()


def test_weights_may_be_fractions_whatever_dtype_the_learnt_order_puts_last() -> None:
    """The last bucket carries them."""

    start = HalfThenSingle()  # two threads that seed one generator at once would get other values

    def worker(transport: LocalTransport) -> list[torch.dtype]:
        model = copy.deepcopy(start)
        sync = stretto.attach(model, transport=transport, weighted=True)
        sync.weight = 0.25 + 0.5 * transport.rank
        lasts = []
        for _ in range(4):
            lasts.append(sync.plan.buckets[-1].dtype)
            model.zero_grad()
            model(torch.full((2, 4), transport.rank + 1.0)).backward()
        one = copy.deepcopy(start)
        (one(torch.full((2, 4), 1.0)) * 0.25 + one(torch.full((2, 4), 2.0)) * 0.75).backward()
        for parameter, alone in zip(model.parameters(), one.parameters(), strict=True):
            assert_close([parameter.grad], [alone.grad.double()], rtol=1e-2, atol=1e-3)
        return lasts

    assert run_ranks(worker, 2)[0] == [torch.float32] + 3 * [torch.bfloat16]


def test_a_rank_of_weight_0_and_all_of_weight_0() -> None:
    assert_close(reduced(2, weighted=True, weight=lambda r: r)[0], alone([0.0, 1.0]))
    assert all(g.eq(0).all() for g in reduced(2, weighted=True, weight=lambda r: 0)[0])


def test_an_attribute_that_the_handle_has_not_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="'Synchronizer' object has no attribute 'wieght'"):
        stretto.attach(torch.nn.Linear(2, 2), weighted=True).wieght = 3


def test_weight_without_weighted_is_told() -> None:
    with pytest.raises(stretto.SetupError, match=r"rank \d: weight=3 has no effect.*\n.*weighted=True"):
        reduced(2, weight=lambda r: 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.float16])
def test_weight_words(dtype: torch.dtype) -> None:
    words = Scaling(3, weighted=True).weight_words(dtype)
    given = [5.0, 1000.0, 2.0**20 + 1] if dtype.itemsize > 2 else [2.0**-20, 0.375, 2.0**30 + 1]
    total = sum(torch.tensor(encode_weight(weight, words), dtype=dtype) for weight in given)
    assert total_weight(total).item() == sum(given)
    assert (words == 1) == (dtype.itemsize > 2)


def test_reduce_dtype_sums_in_it_and_keeps_the_gradients_own() -> None:
    found = reduced(3, dtype=torch.bfloat16, reduce_dtype=torch.float32)[0]
    assert all(gradient.dtype == torch.bfloat16 for gradient in found)
    wanted = alone([1 / 3] * 3, dtype=torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, wanted, strict=True)), "rounded once, at the end"


def test_reduce_dtype_by_pattern_shows_in_the_plan_and_in_the_bytes() -> None:
    def worker(transport):
        recording = RecordingTransport(transport)
        model = model_of(torch.bfloat16)
        sync = stretto.attach(model, transport=recording, reduce_dtype={"2.*": torch.float64})
        recording.calls.clear()
        model(batch(0, dtype=torch.bfloat16)).sum().backward()
        assert {p.name: p.reduce_dtype for p in sync.plan.parameters} == {
            "0.weight": None,
            "0.bias": None,
            "2.weight": torch.float64,
            "2.bias": torch.float64,
        }
        assert "bfloat16 as float64" in str(sync.plan)
        assert stretto.BucketPlan.from_json(sync.plan.to_json()) == sync.plan
        assert sync.statistics.payload_bytes == 10 * 8 + 16 * 2, "as they travel"
        return sum(nbytes for kind, nbytes in recording.calls if kind == "all_reduce")

    assert run_ranks(worker, 2)[0] > 10 * 8 + 16 * 2


def test_delay_sends_one_message_a_dtype_after_backward() -> None:
    events: list[str] = []

    class Log:
        def gradient_ready(self, number, name):
            events.append("ready")

        def bucket_launched(self, number, bucket, nbytes):
            events.append("launched")

    def worker(transport):
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        sync = stretto.attach(model, transport=transport, delay=True)
        if transport.rank == 0:
            sync.observe(Log())
        model(batch(0)).sum().backward()
        return len(sync.plan.buckets)

    assert run_ranks(worker, 2) == [1, 1]
    assert events == ["ready"] * 8 + ["launched"]
    assert_close(reduced(2, delay=True)[0], alone([0.5, 0.5]))
    assert_close(reduced(2, delay=True, bucket_cap_mb=1e-6)[0], alone([0.5, 0.5]))


@pytest.mark.parametrize("by", ["name", "parameter"])
def test_launch_after_cuts_where_the_user_says(by: str) -> None:
    def worker(transport):
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        trigger = "2.weight" if by == "name" else model[2].weight
        sync = stretto.attach(model, transport=transport, launch_after=[trigger])
        for _ in range(3):
            model(batch(0)).sum().backward()
        return [[sync.plan.parameters[i].name for i in bucket.indices] for bucket in sync.plan.buckets]

    first, second = run_ranks(worker, 2)
    assert first == second and len(first) == 2
    assert set(first[0]) >= {"3.weight", "3.bias", "2.weight"} and "0.weight" in first[1]
    with pytest.raises(stretto.SetupError, match=r"launch_after names 9.weight"):
        stretto.attach(model_of(), launch_after=["9.weight"])


def test_the_smallest_cap_gives_each_parameter_a_bucket_of_its_own() -> None:
    assert len(stretto.attach(model_of(), bucket_cap_mb=1e-9).plan.buckets) == 4


def test_buckets_take_turns_among_transports() -> None:
    from stretto.transport import LocalGroup

    groups = [LocalGroup(2) for _ in range(3)]

    def worker(transport):
        recorded = [RecordingTransport(group.transport(transport.rank)) for group in groups]
        model = model_of()
        in_turn = RoundRobinTransport(recorded)
        stretto.attach(model, transport=in_turn, bucket_cap_mb=1e-6)
        recorded[0].inner.patience = 29.0  # as a new time-out of its group
        assert in_turn.patience == 29.0
        for one in recorded:
            one.calls.clear()
        model(batch(transport.rank)).square().mean().backward()
        counts = [sum(kind == "all_reduce" for kind, _ in one.calls) for one in recorded]
        return [p.grad.clone() for p in model.parameters()], counts

    (first, counts), (second, _) = run_ranks(worker, 2)
    assert sorted(counts) == [1, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_close(first, alone([0.5, 0.5]))


def collectives_of_three_groups(rank: int) -> list[int]:
    """What each has carried in one backward of a plan of four buckets."""
    groups = [torch.distributed.new_group() for _ in range(3)]
    model = model_of()
    stretto.attach(model, process_groups=groups, transport="process_group", bucket_cap_mb=1e-6)

    def begun() -> list[int]:
        return [group._get_sequence_number_for_group() for group in groups]

    counts = []
    for _ in range(2):  # behind the first the order of buckets is agreed
        before = begun()
        model(batch(rank)).square().mean().backward()
        counts = [now - then for now, then in zip(begun(), before, strict=True)]
    return counts


@pytest.mark.ranks
def test_process_groups_take_turns() -> None:
    first, second = spawn_ranks(collectives_of_three_groups, 2)
    assert first == second and sorted(first) == [1, 1, 2]


def test_buffers_mean() -> None:
    def worker(transport):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        stretto.attach(model, transport=transport, buffers="mean")
        model(batch(transport.rank)).sum().backward()
        return model[0].running_mean, model[0].num_batches_tracked

    first, second = run_ranks(worker, 2)
    wanted = sum(0.1 * batch(rank).mean(0) for rank in range(2)) / 2
    torch.testing.assert_close(first[0], wanted)
    assert torch.equal(first[0], second[0]) and first[1] == second[1] == 1


def test_ignore_by_pattern() -> None:
    def worker(transport):
        model = model_of()
        stretto.attach(model, transport=transport, ignore=["0.*"])
        model(batch(transport.rank)).square().mean().backward()
        return model[0].weight.grad, model[2].weight.grad

    first, second = run_ranks(worker, 2)
    assert not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduce": "median"}, "reduce='median' is not known"),
        ({"predivide_factor": -1.0}, "predivide_factor=-1.0 must be a positive number"),
        ({"reduce_dtype": torch.int32}, "must be a floating dtype"),
        (
            {"reduce_dtype": {"*": torch.float8_e4m3fn}},
            "that can be added, such as torch.float32, not torch.float8_e4m3fn",
        ),
        ({"buffers": "rank1"}, "buffers='rank1' is not known"),
    ],
)
def test_values_that_are_not_known(options: dict, words: str) -> None:
    with pytest.raises(stretto.SetupError, match=words):
        stretto.attach(model_of(), **options)


def test_numbers_of_any_kind_are_numbers() -> None:
    """And no last bucket of its own may be asked for."""
    sync = stretto.attach(
        model_of(),
        bucket_cap_mb=torch.tensor(1.0),
        last_bucket_cap_mb=0,
        predivide_factor=Decimal(2),
        weighted=None,
        check_every=2.0,
    )
    assert (sync.plan.cap_bytes, sync.plan.last_cap_bytes) == (2**20, 0)


@pytest.mark.parametrize("make", [stretto.attach, stretto.DistributedDataParallel])
def test_one_name_in_place_of_a_list(make: Callable[..., object]) -> None:
    """One parameter or name to launch after is as good as a list; patterns would be taken for letters."""
    model = model_of()
    for trigger in ("0.weight", model[0].weight):
        sync = make(model, launch_after=trigger)
        (sync if make is stretto.attach else sync.synchronizer).detach()
    with pytest.raises(stretto.SetupError, match=r"attach: sparse='0.weight' must be a list of names or patterns"):
        make(model_of(), sparse="0.weight")
    with pytest.raises(stretto.SetupError, match=r"attach: sparse=tensor\(.* must be a list of names or patterns"):
        make(model_of(), sparse=torch.zeros(1000))


def test_a_dtype_for_names_that_are_not_there_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters may be added later. Buffers have no gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    asked = {"1.running_mean": torch.float32, "0.*": torch.float64, "*": torch.float32}

    def worker(transport):
        stretto.attach(copy.deepcopy(model), transport=transport, reduce_dtype=asked)

    run_ranks(worker, 2)
    assert [one.getMessage() for one in caplog.records if "reduce_dtype" in one.getMessage()] == [
        "attach: reduce_dtype= names 1.running_mean, which no parameter has so far: see module.named_parameters()"
    ]


def test_a_comm_hook_beside_options_that_it_would_undo_is_refused() -> None:
    def worker(transport):
        sync = stretto.attach(model_of(), transport=transport, reduce="sum")
        with pytest.raises(stretto.SetupError, match="a comm hook does its own scaling"):
            sync.register_comm_hook(None, lambda state, bucket: None)

    run_ranks(worker, 2)


def test_a_rank_that_only_shadows_gives_zeros() -> None:
    def worker(transport):
        model = model_of()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for _ in range(2):
            model.zero_grad()
            if transport.rank == 1:
                sync.shadow_pass()
            else:
                model(batch(0)).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    trained, shadow = run_ranks(worker, 2)
    assert_close(trained, alone([0.5]))
    assert shadow == [None] * 4


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("cap", [1e-5, 10])
def test_reduce_of_tensors_that_do_not_come_from_backward(op: str, cap: float) -> None:
    def worker(transport):
        model = model_of()
        loss = model(batch(transport.rank)).square().mean()
        gradients = [*torch.autograd.grad(loss, list(model.parameters())), None]
        gradients[0] = gradients[0].t().contiguous().t()
        places = [g.data_ptr() for g in gradients[:-1]]
        stretto.reduce(gradients, transport=transport, op=op, bucket_cap_mb=cap)
        assert places == [g.data_ptr() for g in gradients[:-1]], "in place"
        return gradients[:-1]

    for found in run_ranks(worker, 3):
        assert_close(found, alone([1.0 if op == "sum" else 1 / 3] * 3))


ODD = {
    "expanded": lambda value: torch.full((1,), value).expand(6),
    "expanded in part": lambda value: torch.full((2, 1), value).expand(2, 3),
    "expanded whole numbers": lambda value: torch.full((), int(value)).expand(4),
    "every other one": lambda value: torch.full((8,), value)[::2],
    "every other whole number": lambda value: torch.full((8,), int(value))[::2],
    "one of eight": lambda value: torch.full((8,), value)[::8],
    "one of eight, double": lambda value: torch.full((8,), value, dtype=torch.float64)[::8],
    "one, expanded to one": lambda value: torch.full((), value).expand(1),
    "transposed": lambda value: torch.full((3, 4), value).t(),
    "lazily conjugated": lambda value: torch.full((3,), complex(value, value)).conj(),
    "lazily negated": lambda value: torch.full((3,), complex(value, -value)).conj().imag,
}
"""Tensors as autograd and users leave them."""


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("passes", [1, 6])
def test_buffers_may_lie_as_they_like(make, passes: int) -> None:
    def worker(transport):
        model = torch.nn.Linear(3, 1)
        model.register_buffer("odd", make(float(transport.rank + 3)))
        sync = stretto.attach(model, transport=transport, check_every=2)
        for number in range(passes):
            model.odd = make(float(transport.rank + 3 + number))
            model(batch(transport.rank)).sum().backward()
        sync.check()
        return model.odd.resolve_conj().resolve_neg().tolist()

    assert run_ranks(worker, 2) == [make(2.0 + passes).resolve_conj().resolve_neg().tolist()] * 2


@pytest.mark.parametrize("make", [make for kind, make in ODD.items() if "whole" not in kind])
def test_reduce_takes_tensors_as_autograd_leaves_them(make) -> None:
    def worker(transport):
        tensor, other = make(float(1 + 2 * transport.rank)), torch.ones(2)
        stretto.reduce([other, tensor], transport=transport)
        return tensor

    for found in run_ranks(worker, 2):
        assert torch.equal(found, make(2.0))


@pytest.mark.parametrize("buffers", ["rank0", "mean"])
def test_an_expanded_buffer_stays_one_with_what_it_was_expanded_from(buffers: str) -> None:
    def worker(transport):
        model = torch.nn.Linear(3, 1)
        model.register_buffer("base", torch.full((1,), float(transport.rank)))
        model.register_buffer("wide", model.base.expand(4))
        stretto.attach(model, transport=transport, buffers=buffers)
        read = []
        for _ in range(3):
            model.base.add_(1 + transport.rank)
            read.append(model.wide.tolist())
            model(batch(transport.rank)).sum().backward()
        return read

    step = 1.5 if buffers == "mean" else 1.0
    assert run_ranks(worker, 2) == [[[rank + 1 + step * number] * 4 for number in range(3)] for rank in range(2)]


@pytest.mark.parametrize("values", [[2.0] * 4, [1.0, 2.0, 3.0, float("nan")]])
@pytest.mark.parametrize("inference", [True, False])
def test_an_expanded_buffer_follows_one_that_lies_otherwise(values: list[float], inference: bool) -> None:
    def worker(transport):
        model = torch.nn.Linear(3, 1)
        with torch.inference_mode(inference):
            odd = torch.zeros(1).expand(4) if transport.rank else torch.tensor(values)
        model.register_buffer("odd", odd)
        stretto.attach(model, transport=transport)
        assert model.odd.is_inference() == inference
        return str(model.odd.tolist()), str(model.odd)

    first, second = run_ranks(worker, 2)
    assert first == second and first[0] == str(values)


def test_reduce_of_the_gradient_of_a_sum() -> None:
    """autograd gives one number, expanded; on another rank the graph, and so the layout, may be another."""

    def worker(transport):
        weight = torch.ones(3, requires_grad=True)
        loss = weight.sum() if transport.rank else (weight * torch.arange(3.0)).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        stretto.reduce([gradient], transport=transport)
        return gradient.tolist()

    assert run_ranks(worker, 2) == [[0.5, 1.0, 1.5]] * 2


def test_reduce_refuses_nones_in_other_places() -> None:
    """Layers of one shape, of which each rank uses another: the mean of both would be of neither."""

    def worker(transport):
        one = torch.ones(2)
        stretto.reduce([one, None] if transport.rank else [None, one], transport=transport)

    with pytest.raises(stretto.ModelMismatchError) as raised:
        run_ranks(worker, 2)
    assert str(raised.value) == (
        "reduce: the 2 ranks do not give the same tensors.\n"
        "  tensor 1: (2,) float32 on rank 0; missing on rank 1\n"
        "  tensor 0: missing on rank 0; (2,) float32 on rank 1\n"
        "Give the same tensors in the same order on every rank."
    )


def test_reduce_alone_does_nothing_and_refuses_what_it_cannot_do() -> None:
    tensor = torch.ones(2)
    stretto.reduce([tensor])
    assert tensor.eq(1).all()
    with pytest.raises(stretto.UnsupportedError, match=r"tensor 0 is torch.int64: give one of a floating dtype"):
        stretto.reduce([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(stretto.UnsupportedError, match=r"tensor 0 is torch.float8_e5m2: give one of a floating dtype"):
        stretto.reduce([torch.ones(2).to(torch.float8_e5m2)])
    with pytest.raises(stretto.UnsupportedError, match="op='max' is not known"):
        stretto.reduce([tensor], op="max")


@pytest.mark.parametrize(("change", "far"), [(0.5, "0.5"), (float("nan"), "inf")])
def test_replicas_that_part_are_named_on_every_rank_at_the_next_check(change: float, far: str) -> None:
    def worker(transport):
        model = model_of()
        sync = stretto.attach(model, transport=transport, check_every=2)
        for number in range(1, 5):
            if number == 3 and transport.rank == 1:
                with torch.no_grad():
                    model[2].bias[1] += change
            try:
                model(batch(transport.rank)).sum().backward()
            except stretto.ReplicaError as error:
                with pytest.raises(stretto.ReplicaError, match="pass 4"):
                    sync.check()
                return number, str(error)
            if number < 3:
                sync.check()

    assert (
        run_ranks(worker, 3)
        == [
            (
                4,
                "pass 4: the ranks no longer hold the same values of 2.bias.\n"
                f"  2.bias: ranks 0, 2 differ from rank 1 by up to {far}, in 1 of 2 elements\n"
                "Something changed them on some ranks only, mostly one of these:\n"
                "  - a step that one rank skipped, or took after a backward inside no_sync()\n"
                "  - gradients that no backward brings, as of torch.autograd.grad: stretto.reduce averages them\n"
                "  - batches that ran out on one rank inside join(): its optimizer and schedulers stood still "
                "meanwhile\n"
                "  - one backward more or fewer on one rank, as in an evaluation or after a break, which shifts its "
                "passes\n"
                "  - weights or an optimizer's state that only some ranks have loaded\n"
                "  - another learning rate, as from a scheduler that looks at one rank's loss\n"
                "  - LBFGS, whose closure runs more often on one rank, because of its own loss\n"
                "  - random numbers, such as weights drawn in the first forward (run one before attach)\n"
                "  - attach(init_sync=False), where each rank drew its own\n"
                "To go on with rank 0's: sync.detach(); sync = stretto.attach(model), and load or build the optimizer "
                "on all ranks.",
            )
        ]
        * 3
    )


@pytest.mark.parametrize(("idle", "passes"), [(None, 0), (0, 2), (1, 2)])
def test_a_check_says_whether_anything_was_averaged_so_far(idle: int | None, passes: int) -> None:
    """A rank without batches said no, and that it was at pass 0."""

    def worker(transport):
        model = model_of()
        sync = stretto.attach(model, transport=transport)
        for _ in range(passes):
            if transport.rank == idle:
                sync.shadow_pass()
            else:
                model(batch(transport.rank)).sum().backward()
        with torch.no_grad():
            model[2].bias += transport.rank
        with pytest.raises(stretto.ReplicaError) as caught:
            sync.check()
        return str(caught.value)

    told = (
        f"pass {passes}: the ranks no longer hold the same values of 2.bias.\n"
        "  2.bias: rank 0 differs from rank 1 by up to 1, in 2 of 2 elements\n"
    )
    if not passes:
        told += "No gradient was averaged so far: no backward outside no_sync() has reached the attached module.\n"
    told += "Something changed them on some ranks only, mostly one of these:\n"
    assert [one[: len(told)] for one in run_ranks(worker, 2)] == [told] * 2


def test_how_far_replicas_are_apart() -> None:
    """With NaN and infinity on all ranks alike, a zero that has lost its sign, and more than is looked at."""

    def worker(transport):
        far, zero = transport.rank * 1e-9, 0.0 if transport.rank else -0.0
        tensors = {
            "complex": torch.tensor([1 + 2j, complex(3, 1e-3 * transport.rank)]),
            "far": torch.tensor([float("nan"), float("inf"), 1 + far], dtype=torch.float64),
            "integers": torch.tensor([4, 5, 2**60 + transport.rank]),
            "large": torch.cat([torch.zeros(1 << 16), torch.full((3,), far)]),
            "shape": torch.ones(2 + transport.rank),
            "zero": torch.tensor([zero]),
        }
        with pytest.raises(stretto.ReplicaError) as caught:
            check_replicas(tensors, transport.all_gather_object, "check")
        return [line for line in str(caught.value).splitlines() if ": rank" in line]

    assert (
        run_ranks(worker, 3)
        == [
            [
                "  complex: rank 0 differs from rank 1 and from rank 2 by up to 0.002, in 1 of 4 elements",
                "  far: rank 0 differs from rank 1 and from rank 2 by up to 2e-09, in 1 of 3 elements",
                "  integers: rank 0 differs from rank 1 and from rank 2 by up to 2, in 1 of 3 elements",
                "  large: rank 0 differs from rank 1 and from rank 2, though the first 65,536 elements compare equal",
                "  shape: rank 0 differs from rank 1 and from rank 2",
                "  zero: rank 0 differs from ranks 1, 2, though 1 element compare equal",
            ]
        ]
        * 3
    )


@pytest.mark.parametrize("who", [0, 1])
def test_a_parameter_that_one_rank_alone_has_is_told_of(who: int) -> None:
    def worker(transport):
        model = model_of()
        sync = stretto.attach(model, transport=transport)
        model(batch(transport.rank)).sum().backward()
        if transport.rank == who:
            model.extra = torch.nn.Parameter(torch.zeros(2))
        with pytest.raises(stretto.ReplicaError) as caught:
            sync.check()
        return str(caught.value).splitlines()[:2]

    assert (
        run_ranks(worker, 3)
        == [
            [
                "pass 1: the ranks no longer hold the same values of extra.",
                ["  extra: rank 0 differs from ranks 1, 2", "  extra: ranks 0, 2 differ from rank 1"][who],
            ]
        ]
        * 3
    )


@pytest.mark.parametrize("first", ["rank0", "none"])
def test_buffers_are_compared_by_the_policy_of_now(first: str) -> None:
    def worker(transport):
        model = torch.nn.Linear(3, 1)
        model.register_buffer("own", torch.zeros(1))
        sync = stretto.attach(model, transport=transport, check_every=1, buffers=first)
        sync.buffers = "none" if first == "rank0" else "rank0"
        model.own += transport.rank
        if first == "rank0":  # as inside join() of the drop-in: each keeps its own
            model(batch(transport.rank)).sum().backward()
            sync.check()
        else:
            with pytest.raises(stretto.ReplicaError, match="pass 0: the ranks no longer hold the same values of own"):
                sync.check()

    run_ranks(worker, 2)


def test_check_every_must_be_a_number_of_passes() -> None:
    with pytest.raises(stretto.SetupError, match=r"check_every=0\.5 must be a number of passes"):
        stretto.attach(model_of(), check_every=0.5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_fingerprint_sees_every_element(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, dtype=dtype)
    seen = {fingerprint(tensor)}
    for place in range(5):
        other = tensor.clone()
        other[place] = 0
        seen.add(fingerprint(other))
    assert len(seen) == 6
    assert fingerprint(torch.empty(0)) == (0, 0)
    assert fingerprint(torch.ones(2, 3).t()) == fingerprint(torch.ones(6))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(6, 6), (300, 300)])  # one piece, and several
def test_fingerprint_sees_elements_that_have_changed_places(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randint(0, 200, shape).to(dtype)
    tensor[0, 0], tensor[-1, -1], tensor[0, 1] = 1, 2, 3
    swapped = tensor.clone()
    swapped[0, 0], swapped[-1, -1] = 2, 1
    others = [tensor, swapped, tensor.t(), tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)]
    assert len({fingerprint(other) for other in others}) == len(others)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)


def test_fingerprint_sees_numbers_that_differ_in_their_sign_alone_change_places() -> None:
    tensor = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))


# Complex parameters and reduce_dtype


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((3,), 1 + 2j))
        self.b = torch.nn.Parameter(torch.ones(3))

    def forward(self, scale: float) -> torch.Tensor:
        return (scale * self.a * self.b).imag.sum() + (self.a * self.a).real.sum()


@pytest.mark.parametrize(
    "asked, travels",
    [
        (torch.float32, (None, None)),
        (torch.float64, (torch.complex128, torch.float64)),
        (torch.complex128, (torch.complex128, torch.float64)),
        (torch.float16, (None, torch.float16)),
        ({"a": torch.complex128, "*": torch.float64}, (torch.complex128, torch.float64)),
    ],
)
def test_complex_parameters_travel_in_the_complex_dtype_of_that_precision(asked, travels) -> None:
    def worker(transport):
        model = Complex()
        sync = stretto.attach(model, transport=transport, reduce_dtype=asked)
        model(1.0 + transport.rank).backward()
        return [parameter.grad for parameter in model.parameters()], [
            spec.reduce_dtype for spec in sync.plan.parameters
        ]

    model = Complex()
    for rank in range(2):
        (model(1.0 + rank) / 2).backward()
    for found, dtypes in run_ranks(worker, 2):
        assert tuple(dtypes) == travels
        for one, other in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, other.grad, rtol=1e-3, atol=1e-3)


def test_a_real_dtype_for_a_complex_parameter_is_refused_by_name() -> None:
    def worker(transport):
        with pytest.raises(stretto.UnsupportedError) as caught:
            stretto.attach(Complex(), transport=transport, reduce_dtype={"a*": torch.float32})
        return str(caught.value)

    assert run_ranks(worker, 2)[1] == (
        "rank 1: reduce_dtype for 'a*' is torch.float32, which would drop the imaginary part of a (torch.complex64).\n"
        "Ask for torch.complex64, or leave it out."
    )
