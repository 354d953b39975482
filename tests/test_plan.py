"""The plan: a pure function's value. Random parameters, orders and caps."""

import dataclasses
import itertools
import json
import math
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import stretto
from stretto.errors import PlanError
from stretto.plan import BucketPlan, BucketSpec, plan_buckets
from stretto.replan import ReplanPolicy, complete_order, recut
from stretto.specs import ParameterSpec, describe_parameters, slot_strides
from stretto.wording import counted, format_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def spec(number, shape=(4,), dtype=torch.float32, device="cpu"):
    return ParameterSpec(f"p{number}", shape, slot_strides(shape, torch.empty(shape).stride()), dtype, device)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(
    st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from(["cpu", "cuda", "cuda#1"])), min_size=1, max_size=16
).map(lambda rows: tuple(spec(number, *row) for number, row in enumerate(rows)))


@st.composite
def requests(draw):
    """Arguments of plan_buckets."""
    parameters = draw(specs)
    order = draw(st.none() | st.permutations(range(len(parameters))))
    return parameters, order, draw(st.integers(1, 3000)), draw(st.none() | st.integers(0, 2000))


def make(request):
    parameters, order, cap, last_cap = request
    return plan_buckets(parameters, order, cap_bytes=cap, last_cap_bytes=last_cap)


def arrivals(request):
    parameters, order, _, _ = request
    return list(reversed(range(len(parameters)))) if order is None else order


def members(plan):
    return [[plan.parameters[index] for index in bucket.indices] for bucket in plan.buckets]


@given(requests())
def test_every_parameter_once(request):
    plan = make(request)
    assert plan.parameters == request[0]
    assert sorted(plan.order) == list(range(len(request[0])))
    assert all(bucket.indices for bucket in plan.buckets)


@given(requests())
def test_one_dtype_and_device_a_bucket(request):
    plan = make(request)
    for bucket, inside in zip(plan.buckets, members(plan), strict=True):
        assert {(p.dtype, p.device) for p in inside} == {(bucket.dtype, bucket.device)}


@given(requests())
def test_caps_are_kept_unless_a_parameter_is_alone(request):
    plan = make(request)
    for number, inside in enumerate(members(plan)):
        size = plan.bucket_bytes(number)
        assert size == sum(p.nbytes for p in inside)
        assert size <= plan.cap_bytes or sum(p.nbytes > 0 for p in inside) == 1
    *before, last = [p.nbytes for p in members(plan)[-1]]
    assert sum(before) <= plan.last_cap_bytes, "few bytes go with one that is too large anyhow"
    assert sum(before) + last <= plan.last_cap_bytes or last > plan.last_cap_bytes
    assert plan.last_cap_bytes == (request[2] // 4 if request[3] is None else request[3])


@given(requests())
def test_buckets_are_no_smaller_than_they_must_be(request):
    """Two neighbours of one kind do not fit into one bucket, the tail that was cut off apart."""
    plan = make(request)
    for kind in {(p.dtype, p.device) for p in plan.parameters}:
        numbers = [n for n, bucket in enumerate(plan.buckets) if (bucket.dtype, bucket.device) == kind]
        for one, other in itertools.pairwise(numbers):
            if other == len(plan.buckets) - 1:
                continue
            following = plan.parameters[plan.buckets[other].indices[0]]
            assert plan.bucket_bytes(one) + following.nbytes > plan.cap_bytes


@given(requests())
def test_small_ones_go_on_behind_a_large_one_while_they_are_few(request):
    """A bucket crosses a large parameter only while it holds little, and no two neighbours could have been one."""
    plan = make(request)
    position = {index: place for place, index in enumerate(arrivals(request))}
    large = [index for index, p in enumerate(plan.parameters) if p.nbytes >= plan.cap_bytes]
    tail = plan.buckets[-1].indices
    for number, bucket in enumerate(plan.buckets[:-1]):
        kind = (bucket.dtype, bucket.device)
        crossed = [
            sum(plan.parameters[one].nbytes for one in bucket.indices if position[one] < position[index])
            for index in large
            if (plan.parameters[index].dtype, plan.parameters[index].device) == kind
            and position[bucket.indices[0]] < position[index] < position[bucket.indices[-1]]
        ]
        assert all(nbytes <= plan.last_cap_bytes for nbytes in crossed)
        following = next(
            (b for b in plan.buckets[number + 1 :] if (b.dtype, b.device) == kind and b.indices != tail), None
        )
        if following is not None and plan.bucket_bytes(number) <= min(plan.last_cap_bytes, plan.cap_bytes):
            after = plan.parameters[following.indices[0]]
            assert plan.bucket_bytes(number) + after.nbytes > plan.cap_bytes


@pytest.mark.parametrize("cap_bytes", (1 << 19, 4 * 384 * 384))
def test_biases_of_large_layers_share_a_bucket(cap_bytes: int):
    """Twelve layers 384 wide, that fill the cap or more: one message a weight, and one for all biases, not one each."""
    shapes = [shape for _ in range(12) for shape in ((384, 384), (384,))]
    parameters = [spec(number, shape) for number, shape in enumerate(shapes)]
    weights = list(range(22, -1, -2))
    for order, last in ((None, [weights[-1]]), ([at for w in weights for at in (w, w + 1)], list(range(23, 0, -2)))):
        plan = plan_buckets(parameters, order, cap_bytes=cap_bytes)
        assert len(plan.buckets) == 13
        assert [list(b.indices) for b in plan.buckets if len(b.indices) == 1] == [[weight] for weight in weights]
        assert [list(b.indices) for b in plan.buckets if len(b.indices) > 1] == [list(range(23, 0, -2))]
        assert list(plan.buckets[-1].indices) == last


def test_no_message_is_made_of_a_few_bytes_before_a_large_last_one():
    parameters = [spec(number, (size,)) for number, size in enumerate((20, 10, 50))]
    for last_cap, buckets in ((120, [(0, 1, 2)]), (119, [(0, 1), (2,)])):
        plan = plan_buckets(parameters, range(3), cap_bytes=400, last_cap_bytes=last_cap)
        assert [bucket.indices for bucket in plan.buckets] == buckets


def test_much_does_not_wait_behind_a_large_one():
    parameters = [spec(0, (30,)), spec(1, (200,)), spec(2, (3,)), spec(3, (200,)), spec(4, (4,))]
    plan = plan_buckets(parameters, range(5), cap_bytes=400, last_cap_bytes=100)
    assert [bucket.indices for bucket in plan.buckets] == [(0,), (1,), (3,), (2, 4)]
    plan = plan_buckets(parameters, range(5), cap_bytes=400, last_cap_bytes=120)  # as much as the first holds
    assert [bucket.indices for bucket in plan.buckets] == [(1,), (0, 2), (3,), (4,)]
    plan = plan_buckets(parameters, range(5), cap_bytes=400, last_cap_bytes=0)
    assert [bucket.indices for bucket in plan.buckets] == [(0,), (1,), (2,), (3,), (4,)]


@given(requests())
@example(((spec(0), spec(1, dtype=torch.float64), spec(2)), [0, 1, 2], 1000, 16))
def test_buckets_leave_as_their_last_member_arrives(request):
    plan = make(request)
    position = {index: place for place, index in enumerate(arrivals(request))}
    inside = [[position[index] for index in bucket.indices] for bucket in plan.buckets]
    assert all(places == sorted(places) for places in inside), "inside a bucket, in order of arrival"
    ends = [places[-1] for places in inside]
    assert ends == sorted(ends)


@given(requests())
def test_the_same_request_gives_the_same_plan(request):
    plan, again = make(request), make(request)
    assert plan == again and plan.hash == again.hash and hash(plan) == hash(again) and str(plan) == str(again)
    assert recut(plan, arrivals(request)) == plan


@given(requests())
def test_default_order_is_the_reverse_of_registration(request):
    parameters, _, cap, last_cap = request
    order = list(reversed(range(len(parameters))))
    assert make((parameters, None, cap, last_cap)) == make((parameters, order, cap, last_cap))


@given(requests())
def test_json_round_trip(request):
    plan = make(request)
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash and "\n" not in plan.to_json()


@given(requests(), requests())
def test_hashes_are_equal_where_plans_are(one, other):
    first, second = make(one), make(other)
    assert (first.hash == second.hash) == (first == second)


@given(requests(), st.data())
def test_any_change_shows_in_the_hash(request, data):
    plan = make(request)
    number = data.draw(st.integers(0, len(plan.parameters) - 1))
    parameter = plan.parameters[number]
    changed = data.draw(
        st.sampled_from(
            [
                dataclasses.replace(parameter, name="other"),
                dataclasses.replace(parameter, shape=(*parameter.shape, 1), strides=(*parameter.strides, 1)),
                dataclasses.replace(parameter, shape=(1, *parameter.shape), strides=(7, *parameter.strides)),
            ]
        )
    )
    parameters = (*plan.parameters[:number], changed, *plan.parameters[number + 1 :])
    assert dataclasses.replace(plan, parameters=parameters).hash != plan.hash
    assert dataclasses.replace(plan, cap_bytes=plan.cap_bytes + 1).hash != plan.hash
    assert dataclasses.replace(plan, last_cap_bytes=plan.last_cap_bytes + 1).hash != plan.hash
    if len(plan.buckets) > 1:
        assert dataclasses.replace(plan, buckets=plan.buckets[::-1]).hash != plan.hash


@given(requests())
def test_offsets_lay_parameters_side_by_side(request):
    plan = make(request)
    for number, inside in enumerate(members(plan)):
        *offsets, end = plan.offsets(number)
        laid = sorted(zip(offsets, (p.numel for p in inside), strict=True))
        assert laid[0][0] == 0 and [a + n for a, n in laid] == [*(a for a, _ in laid[1:]), end]


def evenness(nbytes: int) -> int:
    """The largest power of two up to 64 that divides it."""
    return max(power for power in (1, 2, 4, 8, 16, 32, 64) if not nbytes % power)


@given(requests())
def test_parameters_begin_where_the_processor_likes_them(request):
    """As far as their own size allows, whatever lies before them: a class more or less moves nobody else."""
    plan = make(request)
    for number, inside in enumerate(members(plan)):
        for offset, spec in zip(plan.offsets(number), inside, strict=False):
            assert not offset * spec.dtype.itemsize % evenness(spec.nbytes)


def test_a_head_of_ten_classes_moves_nobody_else():
    shapes = [(10,), (10, 64), (64,), (64, 32), (3,), (64,), (32, 3, 3, 3), (5, 64), (32,)]
    specs = [
        ParameterSpec(f"p{number}", shape, row_major(shape), torch.float32, "cpu")
        for number, shape in enumerate(shapes)
    ]
    (offsets, *_) = [plan_buckets(specs, [*range(len(specs))], last_cap_bytes=1 << 20).offsets(0)]
    assert [shape for shape, offset in zip(shapes, offsets, strict=False) if offset * 4 % 64] == [(3,)]
    assert [offset for shape, offset in zip(shapes, offsets, strict=False) if shape == (10,)] == [
        max(offsets[:-1]) - 10
    ]


def row_major(shape):
    return torch.empty(shape, device="meta").stride()


@given(requests())
def test_what_lies_in_a_run_can_be_concatenated(request):
    plan = make(request)
    for number, inside in enumerate(members(plan)):
        offsets = plan.offsets(number)
        for run in plan.layout(number):
            assert list(run) == sorted(run), "in order of arrival"
            gradients = [
                torch.randn(inside[place].shape).as_strided(inside[place].shape, inside[place].strides)
                for place in run
                if inside[place].numel
            ]
            if len(gradients) < 2:
                continue
            flat = torch.cat(gradients).reshape(-1)
            start = offsets[next(place for place in run if inside[place].numel)]
            for place in run:
                spec = inside[place]
                slot = flat.as_strided(spec.shape, spec.strides, offsets[place] - start) if spec.numel else flat[:0]
                assert not spec.numel or torch.equal(slot, gradients.pop(0))


@given(requests())
def test_table_names_things(request):
    plan = make(request)
    title, header, *rows = str(plan).splitlines()
    assert plan.hash in title and f": {counted(len(plan.parameters), 'parameters')}, " in title
    larger = any(plan.bucket_bytes(number) > plan.cap_bytes for number in range(len(plan.buckets)))
    most = f"{format_bytes(plan.cap_bytes)}{' or one larger parameter' if larger else ''}"
    whole = ", but for what is not cut" if plan.bucket_bytes(-1) > plan.last_cap_bytes else ""
    caps = f" of at most {most} (the last {format_bytes(plan.last_cap_bytes)}{whole})"
    assert title.endswith(caps if len(plan.buckets) > 1 else ", in 1 bucket")
    assert header.split() == ["bucket", "dtype", "device", "params", "size", "filled", "by"]
    for number, (row, bucket, inside) in enumerate(zip(rows, plan.buckets, members(plan), strict=True)):
        cells = row.split()
        assert cells[:4] == [str(number), str(bucket.dtype)[6:], bucket.device, str(len(inside))]
        assert format_bytes(plan.bucket_bytes(number)) in row
        assert inside[0].name in cells and inside[-1].name in cells


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (1 << 20, "1.0 MB"), (1 << 30, "1.0 GB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_a_plan_is_frozen():
    plan = plan_buckets([spec(0)])
    for thing in (plan, plan.buckets[0], plan.parameters[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            thing.dtype = None


# lag


@given(requests(), st.data())
def test_lag_is_when_bytes_leave(request, data):
    plan = make(request)
    order = data.draw(st.permutations(range(len(plan.parameters))))
    order = order[: data.draw(st.integers(0, len(order)))]
    left, arrived, sent = 0.0, set(), 0
    for place, index in enumerate(order, 1):
        arrived.add(index)
        while sent < len(plan.buckets) and arrived.issuperset(plan.buckets[sent].indices):
            left += place * plan.bucket_bytes(sent)
            sent += 1
    total = sum(p.nbytes for p in plan.parameters)
    left += len(plan.parameters) * sum(plan.bucket_bytes(number) for number in range(sent, len(plan.buckets)))
    assert plan.lag(order) == pytest.approx(left / total / len(plan.parameters) if total else 0.0)


def test_lag_of_orders_right_and_wrong():
    plan = plan_buckets([spec(number) for number in range(4)], [0, 1, 2, 3], cap_bytes=16, last_cap_bytes=16)
    assert plan.lag([0, 1, 2, 3]) == pytest.approx((1 + 2 + 3 + 4) / 16)
    assert plan.lag([3, 2, 1, 0]) == plan.lag([]) == 1.0
    assert plan.lag([0, 1]) == pytest.approx((1 + 2 + 4 + 4) / 16)


# Slots


def dense(tensor):
    """Every element in a place of its own, and no place between them that is nobody's."""
    places = [sum(i * s for i, s in zip(at, tensor.stride(), strict=True)) for at in _positions(tensor.shape)]
    return sorted(places) == list(range(tensor.numel()))


def _positions(shape):
    return itertools.product(*map(range, shape))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.empty(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        change = draw(st.sampled_from(["none", "none", "slice", "step", "expand"]))
        if change == "slice":
            tensor = tensor.narrow(dim, 0, min(2, tensor.shape[dim]))
        elif change == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "expand" and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1).expand(*(3 if d == dim else n for d, n in enumerate(tensor.shape)))
    return tensor


@given(tensors())
def test_slot_has_a_place_for_each_element(tensor):
    strides = slot_strides(tensor.shape, tensor.stride())
    slot = torch.arange(tensor.numel()).as_strided(tensor.shape, strides)  # raises if it does not fit
    assert sorted(slot.reshape(-1).tolist()) == list(range(tensor.numel()))
    if dense(tensor) and tensor.numel():
        assert strides == tensor.stride()
    else:
        assert slot.is_contiguous()


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(2, 3, 1, 1).to(memory_format=torch.channels_last), (3, 1, 3, 3)),
        (torch.empty(3, 1).expand(3, 4), (4, 1)),
        (torch.empty(6, 4)[::2], (4, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
        (torch.empty(1), (1,)),
    ],
    ids=["contiguous", "transposed", "channels_last", "1x1 kernel", "expanded", "sliced", "scalar", "empty", "one"],
)
def test_slot_strides(tensor, strides):
    assert slot_strides(tensor.shape, tensor.stride()) == strides
    (described,) = describe_parameters({"p": tensor})
    assert described == ParameterSpec("p", tuple(tensor.shape), strides, tensor.dtype, "cpu")
    assert described.numel == tensor.numel()
    assert described.nbytes == math.prod(tensor.shape) * tensor.element_size()


def test_devices_are_labelled_the_same_on_every_rank():
    def described(first, second):
        tensors = {"a": torch.empty(1, device="meta"), "b": _On(first), "c": _On(second), "d": _On(first)}
        return [parameter.device for parameter in describe_parameters(tensors)]

    assert described("cuda:0", "cuda:1") == described("cuda:6", "cuda:2") == ["meta", "cuda", "cuda#1", "cuda"]


class _On:
    """As much of a tensor on a device that this machine lacks as a plan looks at."""

    shape, dtype = (2,), torch.float32

    def __init__(self, device):
        self.device = torch.device(device)

    def stride(self):
        return (1,)


# When to plan anew


def plan_of(count, order=None):
    return plan_buckets([spec(number) for number in range(count)], order, cap_bytes=32, last_cap_bytes=16)


def drive(orders):
    """Passes at which the policy asks for a new plan, and gets it."""
    plan, policy, asked = plan_of(20), ReplanPolicy(), []
    for number, order in enumerate(orders, 1):
        wants = policy.drifted(plan, order, number)
        if wants or number == 1:
            plan = recut(plan, complete_order(plan, order))
            policy.learnt(order, number)
            asked.append(number)
    return asked


FORTH, BACK = list(range(20)), list(range(20))[::-1]


def test_a_stable_order_is_learnt_once():
    assert drive([FORTH] * 50) == [1]


def test_a_new_order_is_followed_at_once():
    assert drive([FORTH] * 9 + [BACK] * 9 + [FORTH] * 9) == [1, 10, 19]


def test_alternating_orders_cost_ever_fewer_plans():
    asked = drive([FORTH, BACK] * 1000)
    assert 2 <= len(asked) <= 13
    shuffled = random.Random(0)
    asked = drive([shuffled.sample(FORTH, 20) for _ in range(2000)])
    assert 2 <= len(asked) <= 14


def test_patience_returns_when_order_settles():
    asked = drive([FORTH, BACK] * 20 + [FORTH] * 200 + [BACK] * 9 + [FORTH] * 9)
    assert [number for number in asked if number > 200] == [241, 250], "after a long calm turns are followed at once"


def test_a_small_gain_is_not_worth_a_plan():
    swapped = FORTH[:]
    swapped[0], swapped[1] = 1, 0  # both lie in the first bucket
    assert drive([FORTH] * 3 + [swapped] * 20) == [1]


@given(st.permutations(range(20)), st.integers(0, 20))
def test_complete_order_puts_absentees_behind_what_they_follow_in_the_plan(order, seen):
    plan = plan_of(20)
    completed = complete_order(plan, order[:seen])
    assert [index for index in completed if index in order[:seen]] == order[:seen] and sorted(completed) == FORTH
    for one, following in itertools.pairwise(plan.order):
        if following not in order[:seen]:
            assert completed[completed.index(one) + 1] == following
    if plan.order[0] not in order[:seen]:
        assert completed[0] == plan.order[0]


def test_complete_order_counts_a_parameter_that_came_twice_once():
    assert complete_order(plan_of(3), [2, 1, 2, 0, 1]) == [2, 1, 0]


# Bad input


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1], [0, 1, 2, 2], []])
def test_order_must_be_a_permutation(order):
    with pytest.raises(PlanError, match="each of the 3 parameters once"):
        plan_buckets([spec(number) for number in range(3)], order)


@pytest.mark.parametrize(("cap", "last_cap"), [(0, None), (-1, None), (-1, 4), (8, -1)])
def test_caps_must_be_positive(cap, last_cap):
    with pytest.raises(PlanError, match="must be positive"):
        plan_buckets([spec(0)], cap_bytes=cap, last_cap_bytes=last_cap)


@pytest.mark.parametrize(
    ("dtype", "device", "indices"),
    [
        (torch.float32, "cpu", [[0], [1]]),
        (torch.float32, "cpu", [[0, 1], [2], [2]]),
        (torch.float32, "cpu", [[0, 1, 2, 3]]),
        (torch.float32, "cpu", [[0, 1, 2], []]),
        (torch.float64, "cpu", [[0, 1, 2]]),
        (torch.float32, "cuda", [[0, 1, 2]]),
    ],
    ids=["missing", "twice", "unknown", "empty bucket", "other dtype", "other device"],
)
def test_a_plan_that_contradicts_itself(dtype, device, indices):
    buckets = tuple(BucketSpec(tuple(inside), dtype, device) for inside in indices)
    with pytest.raises((PlanError, IndexError) if indices == [[0, 1, 2, 3]] else PlanError, match="bucket"):
        BucketPlan(tuple(spec(number) for number in range(3)), buckets, 8, 8)


GOOD = json.loads(plan_of(3).to_json())


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "null", "[]", "{}", '"plan"', "1", "[[[", json.dumps(GOOD | {"version": 2})]
    + [json.dumps({key: value for key, value in GOOD.items() if key != missing}) for missing in GOOD]
    + [
        json.dumps(GOOD | {"buckets": buckets}) for buckets in ([[0, 1]], [[0, 1, 2], []], [[0, 1, 7]], [[-1, 0, 1]], 3)
    ],
)
def test_json_that_is_no_plan(text):
    with pytest.raises(PlanError):
        BucketPlan.from_json(text)


def with_row(*row):
    """The good plan with this in the place of what it has of the first parameter."""
    return {"parameters": [[*row], *GOOD["parameters"][1:]]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cap_bytes": "large"}, "bucket caps must be positive, got cap_bytes=large"),
        ({"cap_bytes": None}, "bucket caps must be positive, got cap_bytes=None"),
        ({"cap_bytes": -4}, "bucket caps must be positive, got cap_bytes=-4"),
        ({"last_cap_bytes": [1]}, "bucket caps must be positive"),
        (with_row("p0", [4], [1, 1], "float32", "cpu", None), "strides .* differ in length"),
        (with_row("p0", [-4], [1], "float32", "cpu", None), "parameter 'p0' cannot have shape"),
        (with_row("p0", ["4"], [1], "float32", "cpu", None), "parameter 'p0' cannot have shape"),
        (with_row(0, [4], [1], "float32", "cpu", None), "parameter 0 cannot have shape"),
        (with_row("p0", [4], [1], "float32", 0, None), "device 0 must be a string"),
        (with_row("p0", [4], [1], "nonsense", "cpu", None), "has no attribute 'nonsense'"),
        (with_row("p0", [4], [1], "Tensor", "cpu", None), "'Tensor' is not a torch dtype"),
        (with_row("p0", [4], [1], 32, "cpu", None), "TypeError: attribute name must be string"),
        (with_row("p0", [4], [1], None, "cpu", None), "TypeError: attribute name must be string"),
        (with_row("p0", [4], [1], "float32", "cpu", "Tensor"), "'Tensor' is not a torch dtype"),
        (with_row("p0", [4], [1], "float32", "cpu"), "not enough values to unpack"),
    ],
)
def test_json_with_facts_that_cannot_be(change, told):
    """Each is refused for what it is: a row of another length would be refused whatever else is in it."""
    assert BucketPlan.from_json(json.dumps(GOOD | with_row(*GOOD["parameters"][0]))) == plan_of(3)
    with pytest.raises(PlanError, match=told):
        BucketPlan.from_json(json.dumps(GOOD | change))


@given(
    st.text(max_size=30) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=6).map(json.dumps)
)
def test_any_other_text_is_refused_as_such(text):
    with pytest.raises(PlanError, match="plan"):
        BucketPlan.from_json(text)


def test_brackets_too_deep_for_python_are_refused_as_such():
    with pytest.raises(PlanError, match="not a bucket plan in JSON: RecursionError"):
        BucketPlan.from_json("[" * 100_000)


def test_errors_are_strettos_and_value_errors():
    assert issubclass(PlanError, stretto.StrettoError) and issubclass(PlanError, ValueError)
    assert stretto.BucketPlan is BucketPlan
