"""Sparse gradients: one process on the joined batch is what every rank must hold, with the same bits on all of them."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
import torch
from models import Fails, words_come_late
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional as F

import stretto
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks

ROWS, WIDTH = 12, 4


class Net(nn.Module):
    """Two sparse tables and a dense head; ``forward`` takes what it is told to."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        fill(self, dtype)

    def forward(self, indices: torch.Tensor, use: str = "wbh") -> torch.Tensor:
        hidden = torch.ones(len(indices), WIDTH, dtype=self.words.weight.dtype)
        if "w" in use:
            hidden = hidden * self.words(indices).sum(1)
        if "b" in use:
            hidden = hidden + self.bags(indices)
        if "t" in use:  # the table is the output layer as well: a dense gradient
            return F.linear(hidden, self.words.weight).square().sum()
        return self.head(hidden).square().sum() if "h" in use else hidden.square().sum()


def fill(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """The same values in every thread: torch's default generator is shared between thread ranks."""
    module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def indices_of(rank: int, number: int = 0) -> torch.Tensor:
    """Repeated within a rank, shared between ranks in part."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, ROWS // 2 + rank, (5 + rank, 3), generator=generator)


def copies(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def same_bits(one: dict, other: dict) -> None:
    for name, gradient in one.items():
        found = other[name]
        if gradient is None:
            assert found is None, name
            continue
        assert gradient.layout == found.layout, name
        if gradient.is_sparse:
            assert gradient.is_coalesced() and found.is_coalesced()
            assert torch.equal(gradient.indices(), found.indices()), name
            gradient, found = gradient.values(), found.values()
        assert torch.equal(gradient, found), name


def both_have(worker, wanted: dict) -> None:
    """What two ranks return."""
    first, second = run_ranks(worker, 2, timeout=20)
    close(first, wanted)
    same_bits(first, second)


def close(found: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
            continue
        torch.testing.assert_close(
            found[name].to_dense(), gradient.to_dense(), msg=lambda text, name=name: f"{name}: {text}"
        )


def joined(world: int, uses: list[list[str]], dtype: torch.dtype = torch.float32, divisor: float | None = None) -> dict:
    """Gradients of one process on all ranks' batches; ``uses[number][rank]``, '' for no backward."""
    model = Net(dtype)
    for number, per_rank in enumerate(uses):
        for rank, use in enumerate(per_rank):
            if use:
                (model(indices_of(rank, number), use) / (divisor or world)).backward()
    return copies(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "uses",
    [
        pytest.param(["wbh", "wbh", "wbh"], id="all"),
        pytest.param(["wh", "bh", "wbh"], id="another-table-on-each-rank"),
        pytest.param(["h", "wh", "h"], id="unused-on-some-ranks"),
        pytest.param(["bh", "bh", "bh"], id="unused-on-all-ranks"),
        pytest.param(["h", "h", "h"], id="no-table-at-all"),
        pytest.param(["w", "w", "w"], id="nothing-dense"),
        pytest.param(["w", "bh", "h"], id="nothing-dense-on-one-rank"),
        pytest.param(["wt", "wt", "wt"], id="tied-dense"),
        pytest.param(["wh", "wt", "t"], id="tied-dense-on-some-ranks"),
    ],
)
def test_the_mean_of_the_joined_batch(uses, world) -> None:
    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport)
        found = []
        for _ in range(4):  # before and after the order is learnt
            model.zero_grad()
            model(indices_of(transport.rank), uses[transport.rank]).backward()
            found.append(copies(model))
        return found

    wanted = joined(world, [uses[:world]])
    everyone = run_ranks(worker, world, timeout=20)
    for number in range(4):
        for found in everyone:
            close(found[number], wanted)
            same_bits(found[number], everyone[0][number])
    if "t" not in "".join(uses[:world]):
        assert all(g is None or g.is_sparse for n, g in everyone[0][0].items() if n != "head.weight")


@pytest.mark.parametrize("world", [2, 3])
def test_the_set_of_what_is_used_changes_with_every_pass(world) -> None:
    kinds = ["wbh", "h", "w", "b", "wt", "bh"]

    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport)
        found = []
        for number in range(10):
            model.zero_grad()
            model(indices_of(transport.rank), kinds[(number * (transport.rank + 1)) % len(kinds)]).backward()
            found.append(copies(model))
        return found

    everyone = run_ranks(worker, world, timeout=20)
    for number in range(10):
        wanted = joined(world, [[kinds[(number * (rank + 1)) % len(kinds)] for rank in range(world)]])
        for found in everyone:
            close(found[number], wanted)
            same_bits(found[number], everyone[0][number])


@pytest.mark.parametrize("world", [2, 3])
def test_accumulation_under_no_sync_is_reduced_as_a_whole(world) -> None:
    uses = [["wbh", "h", "wh"], ["bh", "h", "h"], ["h", "wt", "h"]]

    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport)
        for _ in range(2):
            model.zero_grad()
            for number in range(3):
                with sync.no_sync() if number < 2 else contextlib.nullcontext():
                    model(indices_of(transport.rank, number), uses[number][transport.rank]).backward()
        return copies(model)

    everyone = run_ranks(worker, world, timeout=20)
    for found in everyone:
        close(found, joined(world, [per_rank[:world] for per_rank in uses]))
        same_bits(found, everyone[0])


def test_accumulation_without_zero_grad_stays_the_mean() -> None:
    uses = [["wh", "wbh"], ["bh", "h"], ["h", "h"], ["wt", "h"], ["wh", "h"]]

    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport)
        found = []
        for number, use in enumerate(uses):
            model(indices_of(transport.rank, number), use[transport.rank]).backward()
            found.append(copies(model))
        return found

    everyone = run_ranks(worker, 2, timeout=20)
    for number in range(len(uses)):
        for found in everyone:
            close(found[number], joined(2, uses[: number + 1]))
            same_bits(found[number], everyone[0][number])


@pytest.mark.parametrize("bag", [False, True])
def test_a_model_with_nothing_dense(bag) -> None:
    def build():
        model = nn.EmbeddingBag(ROWS, WIDTH, sparse=True) if bag else nn.Embedding(ROWS, WIDTH, sparse=True)
        fill(model)
        return model

    def worker(transport):
        model = build()
        sync = stretto.attach(model, transport=transport)
        assert "sparse gradients (1): " in sync.describe()
        for _ in range(3):
            model.zero_grad()
            model(indices_of(transport.rank)).square().sum().backward()
        assert sync.statistics.passes == 3 and sync.statistics.payload_bytes > 0
        sync.detach()
        assert not model.weight._post_accumulate_grad_hooks
        return copies(model)

    alone = build()
    sum(alone(indices_of(rank)).square().sum() / 2 for rank in range(2)).backward()
    both_have(worker, copies(alone))


@pytest.mark.parametrize(
    ("options", "divisor"),
    [
        ({"reduce": "sum"}, 1),
        ({"predivide_factor": 3.0}, 2),
        ({"reduce": "sum", "predivide_factor": 3.0}, 1),
        ({"delay": True}, 2),
        ({"reduce_dtype": torch.float64}, 2),
    ],
)
def test_options(options, divisor) -> None:
    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport, **options)
        model(indices_of(transport.rank), "wbh").backward()
        return copies(model)

    both_have(worker, joined(2, [["wbh", "wbh"]], divisor=divisor))


@pytest.mark.parametrize("use", ["wbh", "wt"])
def test_weighted(use) -> None:
    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport, weighted=True)
        sync.weight = 1 + 2 * transport.rank
        model(indices_of(transport.rank), use).backward()
        return copies(model)

    model = Net()
    for rank in range(2):
        (model(indices_of(rank), use) * (1 + 2 * rank) / 4).backward()
    both_have(worker, copies(model))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_pass_that_fails_on_one_rank_and_a_right_one_after_it(world, hooked) -> None:
    def sum_in_place(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport)
        if hooked:
            sync.register_comm_hook(None, sum_in_place)
        for number in range(4):
            model.zero_grad()
            if number % 2:
                failing = transport.rank == world - 1
                hidden = model.bags(indices_of(transport.rank))  # its gradient comes last
                loss = (Fails.apply(hidden) if failing else hidden).square().sum()
                if not failing or number == 3:
                    loss = loss + model.words(indices_of(transport.rank)).square().sum()
                with pytest.raises(ValueError if failing else stretto.PeerError):
                    (loss + model.head(hidden).sum()).backward()
            else:
                model(indices_of(transport.rank), "wbh").backward()
        model.zero_grad()
        model(indices_of(transport.rank), "wbh").backward()
        return copies(model)

    everyone = run_ranks(worker, world, timeout=20)
    for found in everyone:
        wanted = joined(world, [["wbh"] * world])
        if hooked:
            del wanted["head.weight"]  # this hook reduces nothing
        close(found, wanted)
        same_bits({n: g for n, g in found.items() if n in wanted}, everyone[0])


@pytest.mark.parametrize("use", ["wbh", "wt"])
def test_a_rank_without_batches_takes_part(use) -> None:
    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport)
        model(indices_of(transport.rank), "wbh").backward()
        model.zero_grad()
        if transport.rank:
            sync.shadow_pass()
        else:
            model(indices_of(0), use).backward()
        return copies(model)

    first, second = run_ranks(worker, 2, timeout=20)
    close(first, joined(2, [[use, ""]]))
    assert all(gradient is None for gradient in second.values())


def test_replicas_stay_equal_under_sparse_adam() -> None:
    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport, check_every=1)
        sparse = torch.optim.SparseAdam([model.words.weight, model.bags.weight], lr=0.1)
        dense = torch.optim.SGD([model.head.weight], lr=0.01)
        for number in range(6):
            sparse.zero_grad(set_to_none=bool(number % 2))
            dense.zero_grad()
            model(indices_of(transport.rank, number), "wbh" if number != 3 else "wh").backward()
            sparse.step()
            dense.step()
        sync.check()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    everyone = run_ranks(worker, 3, timeout=20)
    assert all(torch.equal(found[name], everyone[0][name]) for found in everyone for name in found)


def test_a_gradient_that_is_sparse_without_its_module_saying_so_is_named() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(ROWS, WIDTH))
            fill(self)

        def forward(self, indices):
            return F.embedding(indices, self.table, sparse=True).square().sum()

    def worker(transport, **options):
        model = Functional()
        stretto.attach(model, transport=transport, **options)
        model(indices_of(transport.rank)).backward()
        return copies(model)

    with pytest.raises(stretto.UnsupportedError, match=r"rank \d, pass 1: .*table is sparse.*\n.*sparse=\['table'\]"):
        run_ranks(worker, 2, timeout=20)
    first, second = run_ranks(lambda transport: worker(transport, sparse=["tab*"]), 2, timeout=20)
    assert first["table"].is_sparse
    same_bits(first, second)
    with pytest.raises(stretto.SetupError) as caught:
        stretto.attach(Functional(), sparse=["nowhere"])
    assert str(caught.value) == (
        "attach: sparse= names nowhere, which the module does not have.\n"
        "Give names, or patterns of names, of module.named_parameters()."
    )
    with pytest.raises(stretto.SetupError, match="sparse= names nowhere"):
        run_ranks(lambda transport: worker(transport, sparse=["nowhere"]), 2, timeout=20)


def fails_while_words_come_late(rank: int) -> list[str]:
    words_come_late()
    net, told = Net(), []
    stretto.attach(net)
    for number in range(1, 5):
        net.zero_grad()
        hidden = net.bags(torch.tensor([[rank, 2]])) * net.words(torch.tensor([[1]])).sum(1)
        loss = net.head(Fails.apply(hidden) if rank and number == 2 else hidden).square().sum()
        try:
            loss.backward()
        except (ValueError, stretto.PeerError) as error:
            told.append(f"{number}: {str(error).splitlines()[0]}")
    return told


def test_a_failure_that_the_counts_have_told_is_not_told_again_when_the_words_arrive() -> None:
    """On an accelerator words arrive in the next pass, which is a right one, and which the other rank steps with."""
    assert spawn_ranks(fails_while_words_come_late, 2) == [
        ["2: rank 0, pass 2: backward failed on rank 1, so the mean of this pass lacks gradients."],
        ["2: on purpose"],
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_beside_noop_hook_the_counts_tell_of_a_failure(number: int) -> None:
    def worker(transport):
        model = Net()
        stretto.attach(model, transport=transport).register_comm_hook(None, noop_hook)
        if number == 2:
            model(indices_of(transport.rank), "wbh").backward()
        hidden = model.bags(indices_of(transport.rank))
        with pytest.raises(ValueError if transport.rank else stretto.PeerError) as caught:
            last = Fails.apply(hidden) if transport.rank else hidden
            (last.sum() + model.head(hidden).sum() + model.words(indices_of(0)).sum()).backward()
        model.zero_grad()
        model(indices_of(transport.rank), "w").backward()
        return re.sub(r"py:\d+", "py:LINE", str(caught.value)), copies(model)

    (text, first), (own, second) = run_ranks(worker, 2, timeout=20)
    assert own == "on purpose"
    assert text == (
        f"rank 0, pass {number}: backward failed on rank 1, so the mean of this pass lacks gradients.\n"
        f"  rank 1, pass {number}, backward: ValueError: on purpose (models.py:LINE in backward)\n"
        "Do not step with these gradients: zero_grad() and go on, on all ranks."
    )
    close(first, {"words.weight": joined(2, [["w", "w"]])["words.weight"]})
    same_bits({"words.weight": first["words.weight"]}, second)


def test_sparse_gradients_that_are_not_rows_become_dense() -> None:
    class Gathers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(ROWS, WIDTH))
            fill(self)

        def forward(self, indices):
            return torch.gather(self.table, 0, indices, sparse_grad=True).square().sum()

    def worker(transport):
        model = Gathers()
        stretto.attach(model, transport=transport, sparse=["table"])
        model(indices_of(transport.rank)).backward()
        return copies(model)

    model = Gathers()
    sum(model(indices_of(rank)) / 2 for rank in range(2)).backward()
    both_have(worker, copies(model))


def test_ranks_that_disagree_on_what_is_sparse_are_told() -> None:
    def worker(transport):
        stretto.attach(nn.Embedding(ROWS, WIDTH, sparse=transport.rank == 0), transport=transport)

    with pytest.raises(stretto.ModelMismatchError, match=r"sparse parameters: \['weight'\] on rank 0; \[\] on rank 1"):
        run_ranks(worker, 2, timeout=20)


def test_what_sparse_parameters_cost() -> None:
    def worker(transport):
        recorded = RecordingTransport(transport)
        model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(ROWS, WIDTH, sparse=True))
        stretto.attach(model, transport=recorded)
        calls = []
        for _ in range(2):
            recorded.calls.clear()
            model[0](torch.ones(1, 3)).sum().backward()
        calls.append([kind for kind, _ in recorded.calls])
        recorded.calls.clear()
        model[1](torch.tensor([1, 1, 2])).sum().backward()
        return [*calls, recorded.calls]

    idle, used = run_ranks(worker, 2, timeout=20)[0]
    assert idle == ["all_reduce"] * 2  # the bucket, and the counts
    assert [kind for kind, _ in used] == ["all_reduce"] * 2 + ["broadcast"] * 2
    assert [nbytes for _, nbytes in used[2:]] == [2 * 8 + 2 * WIDTH * 4] * 2


def drop_in(rank: int) -> list:
    warnings.simplefilter("ignore")
    found = []
    for reference in (False, True):
        model = Net()
        wrap = nn.parallel.DistributedDataParallel if reference else stretto.DistributedDataParallel
        ddp = wrap(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for number in range(4):
            optimizer.zero_grad()
            ddp(indices_of(rank, number), "wbh").backward()
            optimizer.step()
        found.append(({n: p.detach().clone() for n, p in model.named_parameters()}, copies(model)))
    nothing_dense = stretto.DistributedDataParallel(nn.Embedding(ROWS, WIDTH, sparse=True), sparse=["w*"])
    nothing_dense(indices_of(rank)).sum().backward()
    ddp = stretto.DistributedDataParallel(Net())
    with pytest.raises(stretto.UnsupportedError) as caught:
        ddp._register_fused_optim(torch.optim.SGD, 0.01)
    assert str(caught.value) == (
        "DistributedDataParallel._register_fused_optim would not step words.weight, bags.weight: their gradients are "
        "sparse and lie in no bucket.\n"
        "Leave them out, optim_params=[...], and step them with an optimizer of their own."
    )
    ddp._register_fused_optim(torch.optim.SGD, 0.01, optim_params=[ddp.module.head.weight])
    return [*found, nothing_dense.module.weight.grad, stepped_in_backward(rank)]


def stepped_in_backward(rank: int) -> list[torch.Tensor]:
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
    ddp = stretto.DistributedDataParallel(model)
    for number in range(4):
        ddp(indices_of(rank, number), "wbh").backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ranks
def test_the_drop_in_is_as_torch_over_a_process_group() -> None:
    first, second = spawn_ranks(drop_in, 2, timeout=60)
    for (ours, ours_grads), (torchs, torch_grads) in ((first[0], first[1]), (second[0], second[1])):
        close(ours_grads, torch_grads)
        torch.testing.assert_close(ours, torchs)
        assert ours_grads["words.weight"].is_sparse
    same_bits(first[0][1], second[0][1])
    assert torch.equal(first[2].to_dense(), second[2].to_dense())
    for mine, other, plain in zip(first[3], second[3], first[0][0].values(), strict=True):
        torch.testing.assert_close(mine, plain)
        assert torch.equal(mine, other)


def test_a_weight_given_during_backward_is_of_the_next_pass_for_every_gradient() -> None:
    def worker(transport):
        model = Net()
        sync = stretto.attach(model, transport=transport, weighted=True)

        def late(gradient):
            sync.weight = 1 + 2 * transport.rank

        model.words.weight.register_hook(late)  # the head's gradient comes before, and begins the pass
        model(indices_of(transport.rank)).backward()
        return copies(model)

    alone = Net()
    sum(alone(indices_of(rank)) / 2 for rank in range(2)).backward()
    both_have(worker, copies(alone))
