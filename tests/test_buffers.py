"""What buffers are after a pass: where the module has changed in it, where it was given up, and by policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stretto
from stretto.testing import run_ranks

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
