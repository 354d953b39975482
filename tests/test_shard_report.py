"""What reports and descriptions say of sharded optimizers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_shard import CARRIERS, assert_same, backward, pair, shared, train

import stretto
from stretto.report import Footprint


def two_layers() -> torch.nn.Sequential:
    """65,536 and 16,384 elements in weights, and a bias of 64: 327,936 bytes."""
    return torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 64))


def prepared(transport: Any, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, Any]:
    model = two_layers()
    sync = stretto.attach(model, transport=transport)
    sharded = stretto.shard(optimizer(model.parameters()), sync, **options)
    model(torch.ones(2, 256)).sum().backward()
    sharded.step()
    return model, sharded, sync


NBYTES = (256 * 256 + 256 * 64 + 64) * 4


def test_memory_before_and_after_is_in_the_report() -> None:
    def worker(transport: Any) -> stretto.Report:
        return prepared(transport)[2].report()

    reports = shared(worker, 2)
    for report in reports:
        assert report.unsharded == Footprint(NBYTES, NBYTES, 2 * NBYTES)
        assert sum(one.state for one in report.sharded) == 2 * NBYTES
        assert all(abs(one.state - NBYTES) <= 64 * 2 * 4 * 3 for one in report.sharded)
        assert all(NBYTES / 2 <= one.parameters < NBYTES / 2 + 256 for one in report.sharded)
        assert all(one.gradients == NBYTES for one in report.sharded)
        assert report.to_dict()["unsharded"] == {"parameters": NBYTES, "gradients": NBYTES, "state": 2 * NBYTES}
    *_, title, head, unsharded, first, second = str(reports[0]).splitlines()
    assert title == "what each rank holds for sharded optimizers, and would hold without"
    assert head == "   memory  parameters  gradients  optimizer state       all"
    assert unsharded == "unsharded      320 KB     320 KB           640 KB    1.3 MB  100 %"
    assert first == "   rank 0      160 KB     320 KB           320 KB    801 KB   63 %"
    assert second == "   rank 1      160 KB     320 KB           320 KB    800 KB   62 %"


def test_where_nothing_is_shared_parameters_stay_on_every_rank() -> None:
    def worker(transport: Any) -> stretto.Report:
        return prepared(transport)[2].report()

    for report in CARRIERS["threads"](worker, 2):
        assert report.unsharded == Footprint(NBYTES, NBYTES, 2 * NBYTES)
        assert all(NBYTES <= one.parameters < NBYTES + 256 for one in report.sharded)


def test_memory_of_several_optimizers_and_of_what_every_rank_steps() -> None:
    def worker(transport: Any) -> stretto.Report:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
        model.register_parameter("frozen", torch.nn.Parameter(torch.ones(1000), requires_grad=False))
        sync = stretto.attach(model, transport=transport)
        several = [
            stretto.shard(torch.optim.SGD([model[0].weight, model.frozen], lr=0.1, momentum=0.9), sync),
            stretto.shard(torch.optim.Adam([model[1].weight]), sync),
        ]
        model(torch.ones(2, 64)).sum().backward()
        for one in several:
            one.step()
        report = sync.report()
        several[0].unshard()
        assert sync.report().unsharded == Footprint(64 * 64 * 4, 64 * 64 * 4, 2 * 64 * 64 * 4)
        sync.detach()
        assert sync.report().unsharded is None
        return report

    for report in shared(worker, 2):
        assert report.unsharded == Footprint(2 * 64 * 64 * 4 + 4000, 2 * 64 * 64 * 4, 3 * 64 * 64 * 4)
        assert sum(one.state for one in report.sharded) == 3 * 64 * 64 * 4


def test_what_is_described() -> None:
    def lines(transport: Any, *args: Any, **options: Any) -> str:
        _, sharded, sync = prepared(transport, *args, **options)
        line = sync.describe().splitlines()[3]
        sharded.unshard()
        assert "elements" not in sync.describe()
        return line

    assert shared(lines, 2) == [
        "AdamW: in equal shares of each bucket: this rank steps 41024 of 81984 elements and keeps 320 KB of state; "
        "parameters lie once for ranks 0, 1",
        "AdamW: in equal shares of each bucket: this rank steps 40960 of 81984 elements and keeps 320 KB of state; "
        "parameters lie once for ranks 0, 1",
    ]
    assert CARRIERS["threads"](lambda t: lines(t, overlap=False), 2)[1].endswith(
        "parameters come from other ranks before step() returns"
    )
    assert CARRIERS["hosts"](lines, 3)[0].endswith(
        "parameters lie once for ranks 0, 1 and come from other hosts before step() returns"
    )
    assert shared(lambda t: lines(t, torch.optim.Adafactor), 2)[1].startswith(
        "Adafactor: each parameter whole on one rank: this rank steps 16448 of 81984 elements and keeps "
    )


def test_how_gradients_arrive_is_told_with_the_reason() -> None:
    def told(transport: Any, *args: Any, **options: Any) -> str:
        *_, sync = prepared(transport, *args, keep_grads=False, **options)
        report, line = sync.report(), sync.describe().splitlines()[3]
        sync.detach()
        gc.collect()
        assert line.endswith(f"; {str(report).splitlines()[-1].partition(': ')[2]}")
        return report.arriving[0]

    assert shared(told, 2) == ["AdamW: gradients arrive in shares"] * 2
    assert (
        shared(lambda t: told(t, torch.optim.Adafactor), 2)
        == ["Adafactor: gradients arrive whole, since each parameter is stepped whole on one rank"] * 2
    )
    assert (
        CARRIERS["hosts"](told, 3)
        == ["AdamW: gradients arrive whole, since hosts have unequal numbers of ranks (2, 1)"] * 3
    )
    assert CARRIERS["hosts"](told, 4) == ["AdamW: gradients arrive in shares"] * 4
    assert (
        CARRIERS["threads"](told, 2)
        == ["AdamW: gradients arrive whole, since local (threads of one process) sends no shares"] * 2
    )


@pytest.mark.parametrize("world", [3, 4])
def test_gradients_are_withheld_between_any_hosts(world: int) -> None:
    """Also where they arrive whole, as numbers of ranks are unequal: the program has not to know."""

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport, keep_grads=False)
        backward(model, transport.rank, 0)
        with pytest.raises(stretto.WithheldError):
            next(model.parameters()).grad.sum()
        sharded.step()
        assert all(one.grad is None for one in model.parameters() if one.numel())

    CARRIERS["hosts"](worker, world)


def test_gradients_of_a_comm_hook_are_there_for_all_to_see() -> None:
    def worker(transport: Any) -> None:
        def mean(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            future = torch.futures.Future[torch.Tensor]()
            transport.all_reduce(bucket.buffer()).wait()
            future.set_result(bucket.buffer().div_(transport.world_size))
            return future

        model, sharded, sync, plain, optimizer = pair(transport, keep_grads=False)
        train(model, sharded, transport.rank, range(1))
        train(plain, optimizer, transport.rank, range(1))
        plain.zero_grad()
        backward(model, transport.rank, 1)
        backward(plain, transport.rank, 1)
        sync.register_comm_hook(None, mean)  # with gradients in shares, which are to be stepped yet
        sharded.step()
        optimizer.step()
        for net, one in ((model, sharded), (plain, optimizer)):
            one.zero_grad()
            backward(net, transport.rank, 2)
        assert "gradients arrive whole, since what is reduced is no plain mean" in sync.describe()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        sharded.step()
        optimizer.step()
        assert_same(model, plain, 1e-6)

    shared(worker, 2)


def test_gradients_that_are_in_shares_in_some_buckets() -> None:
    def worker(transport: Any, **attached: Any) -> str:
        model = two_layers()
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.1, **attached)
        stretto.shard(torch.optim.AdamW([*model[0].parameters(), model[1].bias]), sync, keep_grads=False)
        line: str = sync.describe().splitlines()[3]
        return line.rpartition("; ")[2]

    assert (
        shared(lambda t: worker(t, reduce="sum"), 2)
        == ["gradients arrive whole, since what is reduced is no plain mean"] * 2
    )
    (told, _) = shared(worker, 2)
    assert told == (
        "gradients arrive in shares in 1 of 2 buckets, since the others hold parameters of no such optimizer"
    )


def test_the_step_inside_a_step_is_counted_once() -> None:
    def worker(transport: Any) -> list[int]:
        model, sharded, sync = prepared(transport, torch.optim.Adafactor)
        for _ in range(8):
            sharded.zero_grad()
            model(torch.ones(2, 256)).sum().backward()
            sharded.step()
        assert sync.sampler is not None
        return [len(record.optimizer) for record, _ in sync.sampler.records]

    assert shared(worker, 2) == [[1] * 5] * 2
