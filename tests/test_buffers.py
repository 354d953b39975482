"""What buffers are after a pass: where the module has changed in it, where it was given up, and by policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import stretto
from stretto.testing import run_ranks, spawn_ranks
from stretto.watch import listen, stop_listening

pytestmark = pytest.mark.timeout(60)


def normed() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def rows(rank: int) -> torch.Tensor:
    """Whose mean is 1.5, and 10 more on each rank."""
    return torch.arange(4.0)[:, None].expand(4, 4) + 10 * rank


def fail(*_: Any) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("policy", "first", "second"), [("mean", 0.65, 0.65), ("rank0", 0.15, 0.15), ("none", 0.15, 1.15)]
)
def test_buffers_that_are_converted_become_what_their_policy_says(policy: str, first: float, second: float) -> None:
    """The plan changes in that pass."""

    def worker(transport: Any) -> tuple[float, int]:
        model = normed()
        sync = stretto.attach(model, transport=transport, buffers=policy)
        plans = sync.statistics.plans
        model.double()
        model(rows(transport.rank).double()).sum().backward()
        assert sync.statistics.plans == plans + 1
        assert model[0].running_mean.dtype is torch.float64
        return float(model[0].running_mean[0]), int(model[0].num_batches_tracked)

    assert run_ranks(worker, 2) == [(pytest.approx(one), 1) for one in (first, second)]


def test_buffers_of_a_new_layer_become_the_mean_in_its_first_pass() -> None:
    def worker(transport: Any) -> list[float]:
        model = normed()
        stretto.attach(model, transport=transport, buffers="mean")
        model(rows(transport.rank)).sum().backward()
        model[0] = torch.nn.BatchNorm1d(4)
        model(rows(transport.rank)).sum().backward()
        return [float(model[0].running_mean[0]), float(model[0].num_batches_tracked)]

    assert run_ranks(worker, 3) == [[pytest.approx(1.15), 1.0]] * 3


def test_stand_ins_are_part_of_no_mean() -> None:
    """One rank alone has another shape: the change is refused, and the others keep what they had."""

    def worker(transport: Any) -> list[float]:
        model = normed()
        model.register_buffer("odd", torch.full((2,), 4.0))
        stretto.attach(model, transport=transport, buffers="mean")
        model(rows(0)).sum().backward()
        if transport.rank == 1:
            model.odd = torch.full((3,), 4.0)
        with pytest.raises(
            stretto.ModelMismatchError, match="buffer odd: 2 float32 cpu on rank 0; 3 float32 cpu on rank 1"
        ):
            model(rows(0)).sum().backward()
        return model.odd.tolist()

    assert run_ranks(worker, 2) == [[4.0, 4.0], [4.0, 4.0, 4.0]]


def test_a_buffer_that_is_registered_in_mid_run_is_followed_at_once() -> None:
    """And nothing else has changed; the module of one had none before."""

    def worker(transport: Any) -> list[float]:
        model = normed()
        sync = stretto.attach(model, transport=transport, buffers="mean")
        for _ in range(6):
            model(rows(transport.rank)).sum().backward()
        model.register_buffer("more", torch.full((), 2.0 + transport.rank))
        model[1].register_buffer("count", torch.tensor(5 + transport.rank), persistent=False)
        model(rows(transport.rank)).sum().backward()
        sync.check()
        return [float(model.more), float(model[1].count)]

    assert run_ranks(worker, 3) == [[3.0, 5.0]] * 3


def test_a_buffer_that_is_written_past_registration_is_found_by_the_net() -> None:
    def worker(transport: Any) -> list[int]:
        model = torch.nn.Linear(4, 1)
        stretto.attach(model, transport=transport)
        for _ in range(6):
            model(rows(0)).sum().backward()
        model._buffers["count"] = torch.tensor(5 + transport.rank)
        found = []
        for _ in range(10):
            model(rows(0)).sum().backward()
            found.append(int(model.count))
        return found

    assert run_ranks(worker, 2) == [[5] * 10, [6] * 9 + [5]]


@pytest.mark.parametrize("policy", ["rank0", "none"])
def test_a_buffer_that_one_rank_alone_registers(policy: str) -> None:
    def worker(transport: Any) -> str:
        model = normed()
        stretto.attach(model, transport=transport, buffers=policy)
        if transport.rank == 1:
            model.register_buffer("more", torch.tensor([2.0]))
        try:
            model(rows(0)).sum().backward()
        except stretto.ModelMismatchError as error:
            return str(error).splitlines()[1]
        return "followed"

    wanted = {"rank0": "  buffer more: missing on rank 0; 1 float32 cpu on rank 1", "none": "followed"}[policy]
    assert run_ranks(worker, 2) == [wanted] * 2


def own_hook(state: object, bucket: Any) -> Any:
    """Of which nobody knows what it keeps."""
    return allreduce_hook(state, bucket)


def beside_a_hook(rank: int) -> str:
    model = normed()
    sync = stretto.attach(model)
    sync.register_comm_hook(None, own_hook)
    model.register_buffer("more", torch.tensor([2.0 + rank]))
    with pytest.raises(stretto.SetupError, match="its buffers have changed on ranks 0, 1") as raised:
        model(rows(rank)).sum().backward()
    return str(raised.value)


def test_a_new_buffer_beside_a_comm_hook_is_refused_as_one_that_goes() -> None:
    first, second = spawn_ranks(beside_a_hook, 2)
    assert first.replace("rank 0,", "") == second.replace("rank 1,", "")


def beside_a_hook_that_keeps_nothing(rank: int) -> float:
    model = normed()
    sync = stretto.attach(model)
    sync.register_comm_hook(None, allreduce_hook)
    model.register_buffer("more", torch.tensor([2.0 + rank]))
    model(rows(rank)).sum().backward()
    return model.more.item()


def test_a_new_buffer_beside_a_hook_that_keeps_nothing_is_followed() -> None:
    assert spawn_ranks(beside_a_hook_that_keeps_nothing, 2) == [2.0, 2.0]


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.layer(x) * self.count


class Told:
    def __init__(self) -> None:
        self.owners: list[torch.nn.Module] = []

    def hear(self, owner: torch.nn.Module, _: object) -> None:
        self.owners.append(owner)


def test_a_reassigned_buffer_is_no_news_and_torchs_compiler_goes_along() -> None:
    model, told, frames = Counts(), Told(), CompileCounter()
    compiled = torch.compile(model, backend=frames, fullgraph=True)
    for _ in range(12):  # torch gives up what it has compiled eight times
        listen(told.hear)
        compiled(rows(0))
        stop_listening(told.hear)
    assert model.count == 12 and told.owners == [] and frames.frame_count == 1
    listen(told.hear)
    model.register_buffer("more", None)
    stop_listening(told.hear)
    model.register_buffer("last", None)
    assert told.owners == [model]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.bool])
def test_means_are_of_what_can_be_added(dtype: torch.dtype) -> None:
    def worker(transport: Any) -> float:
        model = normed()
        model.register_buffer("odd", torch.full((3,), 1.0, dtype=dtype))
        sync = stretto.attach(model, transport=transport, buffers="mean")
        model.odd = torch.full((3,), 2.0 + 2 * transport.rank).to(dtype)
        model(rows(0)).sum().backward()
        sync.check()
        return float(model.odd[0])

    wanted = {torch.bfloat16: 3.0, torch.float16: 3.0, torch.bool: 1.0}.get(dtype, 2.0)
    assert run_ranks(worker, 2) == [wanted] * 2


UNPICKLED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", UNPICKLED, ids=str)
def test_what_torch_cannot_pickle_is_told_of_where_it_differs(dtype: torch.dtype) -> None:
    def worker(transport: Any) -> str:
        model = normed()
        model.register_buffer("odd", torch.tensor([1.0, 1.0]).to(dtype))
        sync = stretto.attach(model, transport=transport)
        model.odd = torch.tensor([1.0, 1.0 + transport.rank]).to(dtype)
        with pytest.raises(stretto.ReplicaError) as caught:
            sync.check()
        return str(caught.value).splitlines()[1]

    assert run_ranks(worker, 2) == ["  odd: rank 0 differs from rank 1 by up to 1, in 1 of 2 elements"] * 2


def test_two_numbers_in_a_byte_are_told_of_by_their_bits() -> None:
    def worker(transport: Any) -> str:
        model = normed()
        for one in model.parameters():  # ranks are threads here, and draw from one generator
            torch.nn.init.zeros_(one)
        bits = torch.tensor([1, 1 + transport.rank], dtype=torch.uint8)
        model.register_buffer("odd", bits.view(torch.float4_e2m1fn_x2))
        sync = stretto.attach(model, transport=transport, init_sync=False)
        with pytest.raises(stretto.ReplicaError) as caught:
            sync.check()
        return str(caught.value).splitlines()[1]

    assert run_ranks(worker, 2) == ["  odd: rank 0 differs from rank 1 by up to 1, in 1 of 2 elements"] * 2


def test_a_buffer_with_two_names_is_left_alone_by_the_first() -> None:
    """As torch does, whose ``named_buffers`` has no other name of it."""

    def worker(transport: Any) -> list[float]:
        model = normed()
        for name in ("one", "two"):
            model.register_buffer(name, torch.full((), 1.0 + transport.rank))
            model[1].register_buffer(name, getattr(model, name))
        stretto.attach(model, transport=transport, ignore=["one"])
        for _ in range(3):
            model(rows(0)).sum().backward()
        return [float(model.one), float(model.two)]

    assert run_ranks(worker, 2) == [[1.0, 1.0], [2.0, 1.0]]


def test_buffers_that_each_rank_keeps_may_differ_in_shape_when_the_plan_changes() -> None:
    def worker(transport: Any) -> tuple[int, int]:
        model = normed()
        model.register_buffer("memory", torch.zeros(1))
        sync = stretto.attach(model, transport=transport, buffers="none")
        model(rows(0)).sum().backward()
        model.memory = torch.zeros(2 + transport.rank)
        plans = sync.statistics.plans
        model[1].bias.requires_grad_(False)
        model(rows(0)).sum().backward()
        return len(model.memory), sync.statistics.plans - plans

    assert run_ranks(worker, 2) == [(2, 1), (3, 1)]


def test_statistics_of_a_forward_on_one_rank_alone_are_told_of_as_such() -> None:
    """It evaluates in train() mode behind a backward; the next one brings rank 0's to all."""

    def worker(transport: Any) -> str:
        model = normed()
        sync = stretto.attach(model, transport=transport)
        model(rows(transport.rank)).sum().backward()
        if transport.rank == 1:
            with torch.no_grad():
                model(rows(7))
        with pytest.raises(stretto.ReplicaError) as caught:
            sync.check()
        model(rows(transport.rank)).sum().backward()
        sync.check()
        head, *lines = str(caught.value).splitlines()
        return "\n".join([head, *(line for line in lines if "differs" not in line)])

    told = (
        "pass 1: the ranks no longer hold the same values of 0.running_mean, 0.running_var, 0.num_batches_tracked.\n"
        "They are buffers, and the parameters are equal. Usually only some ranks have run a forward in train() mode "
        "since the last backward, for example to evaluate without model.eval(); the next backward makes them equal "
        "again."
    )
    assert run_ranks(worker, 2) == [told] * 2


def test_a_policy_set_later_says_what_is_compared() -> None:
    def worker(transport: Any) -> None:
        model = normed()
        sync = stretto.attach(model, transport=transport, check_every=2)
        sync.buffers = "none"
        for _ in range(2):
            model(rows(transport.rank)).sum().backward()
        sync.check()
        sync.buffers = "mean"
        with pytest.raises(stretto.ReplicaError, match=r"0\.running_mean: rank 0 differs from rank 1 by up to 1.9"):
            sync.check()
        for _ in range(2):
            model(rows(transport.rank)).sum().backward()
        sync.check()

    run_ranks(worker, 2)


def test_a_buffer_registered_while_each_rank_kept_its_own_follows_when_none_does_any_more() -> None:
    def worker(transport: Any) -> float:
        model = normed()
        sync = stretto.attach(model, transport=transport, buffers="none")
        model.register_buffer("more", torch.full((), 2.0 + transport.rank))
        model(rows(0)).sum().backward()
        assert model.more == 2 + transport.rank
        sync.buffers = "mean"
        model(rows(0)).sum().backward()
        return float(model.more)

    assert run_ranks(worker, 3) == [3.0] * 3


def test_a_buffer_of_another_shape_is_no_matter_once_each_rank_keeps_its_own() -> None:
    def worker(transport: Any) -> int:
        model = normed()
        model.register_buffer("memory", torch.zeros(1))
        sync = stretto.attach(model, transport=transport)
        model.memory = torch.zeros(2 + transport.rank)
        with pytest.raises(stretto.ModelMismatchError, match="buffer memory: 2 float32 cpu on rank 0; 3 float32 cpu"):
            model(rows(0)).sum().backward()
        sync.buffers = "none"
        plans = sync.statistics.plans
        model(rows(0)).sum().backward()
        return sync.statistics.plans - plans

    assert run_ranks(worker, 2) == [0, 0]


@pytest.mark.parametrize("who", [(1,), (0,), (0, 1)])
@pytest.mark.parametrize("policy", ["mean", "rank0"])
def test_a_pass_that_was_given_up_leaves_buffers_alone_on_all_ranks(policy: str, who: tuple[int, ...]) -> None:
    """Who gave up keeps its own; were the others' averaged all the same, they would count for less in the next mean."""

    def worker(transport: Any) -> tuple[float, float]:
        model = normed()
        stretto.attach(model, transport=transport, buffers=policy)
        loss = model(rows(transport.rank)).sum()
        own = float(model[0].running_mean[0])
        hook = model[1].weight.register_hook(fail) if transport.rank in who else None
        with pytest.raises((ValueError, stretto.PeerError)):
            loss.backward()
        if hook is not None:
            hook.remove()
        assert model[0].running_mean[0] == own
        model(rows(transport.rank)).sum().backward()
        return float(model[0].running_mean[0]), own

    found, own = zip(*run_ranks(worker, 3), strict=True)
    assert [*own] == [pytest.approx(0.15 + rank) for rank in range(3)]
    after = 0.19 * (1.5 if policy == "rank0" else 11.5)
    assert [*found] == [pytest.approx(after)] * 3


def test_numbers_that_are_none_stay_on_the_rank_that_failed() -> None:
    def worker(transport: Any) -> bool:
        model = normed()
        stretto.attach(model, transport=transport, buffers="mean")
        loss = model(rows(0) * (float("nan") if transport.rank == 1 else 1)).sum()
        if transport.rank == 1:
            model[1].weight.register_hook(fail)
        with pytest.raises((ValueError, stretto.PeerError)):
            loss.backward()
        return bool(model[0].running_mean.isnan().any())

    assert run_ranks(worker, 3) == [False, True, False]
