"""Buffers that never change are sent no more; when one does, all ranks follow in that very pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Here
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import stretto
from stretto.footer import Footer
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.words import FIRST_MARK, FIRST_VALUE, ControlWords

pytestmark = pytest.mark.timeout(60)


class Masked(torch.nn.Module):
    """A mask, a table of numbers, and a buffer that is reassigned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("places", torch.arange(4), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def step(model: torch.nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


class Ranked:
    """One rank's model and handle, and how many messages carried buffers."""

    def __init__(self, transport: Any, model: torch.nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.transport = RecordingTransport(transport)
        self.model = Masked() if model is None else model
        self.sync = stretto.attach(self.model, transport=self.transport, **options)
        self.rank = self.sync.rank

    def steps(self, count: int = 1) -> int:
        """Messages that carried buffers, in so many passes."""
        found = 0
        for _ in range(count):
            self.transport.calls.clear()
            step(self.model)
            found += [kind for kind, _ in self.transport.calls].count("broadcast")
        return found

    def rest(self) -> None:
        """Until nothing is sent any more."""
        assert self.steps(5) == 6, "five passes, and the order of gradients once"
        assert self.steps(3) == 0


def ranks(worker: Callable[[Ranked], Any], world: int = 2, **options: Any) -> list[Any]:
    return run_ranks(lambda transport: worker(Ranked(transport, **options)), world)


def test_what_does_not_change_is_sent_no_more() -> None:
    def worker(one: Ranked) -> str:
        before = one.sync.describe().splitlines()[2]
        one.rest()
        assert before == "buffers (3): follow rank 0's at the end of every pass"
        assert one.sync.describe().splitlines()[2] == f"{before}; no longer sent, since none changes"
        return before

    ranks(worker, 3)


CHANGES: dict[str, Callable[[Masked, int], object]] = {
    "in place": lambda model, rank: model.mask.logical_not_(),
    "behind autograd's back": lambda model, rank: model.places.data.add_(rank + 3),
    "reassigned": lambda model, rank: setattr(model, "scale", torch.tensor(2.0 + rank)),
    "no number": lambda model, rank: model.scale.fill_(float("nan")),
}


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_all_follow_in_the_pass_in_which_one_has_changed(change: str, who: tuple[int, ...]) -> None:
    def worker(one: Ranked) -> dict[str, torch.Tensor]:
        one.rest()
        if one.rank in who:
            CHANGES[change](one.model, one.rank)
        expected = {name: buffer.clone() for name, buffer in one.model.named_buffers()}
        assert one.steps() == 1, "in this pass, behind the last bucket"
        found = dict(one.model.named_buffers())
        if one.rank == 0:
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
        assert one.steps(7) == 7, "from here on in every pass, passes 10 to 16"
        assert one.steps() == 1, "what was looked at behind pass 16 is compared in the next"
        assert one.steps(3) == 0
        return {name: buffer.clone() for name, buffer in one.model.named_buffers()}

    first, *others = ranks(worker, 3)
    for other in others:
        torch.testing.assert_close(other, first, equal_nan=True, rtol=0, atol=0)


class Odd(Masked):
    """Buffers of all kinds of memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(64, dtype=torch.uint8)
        self.register_buffer("behind", memory[3:11])
        self.register_buffer("turned", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("column", (torch.arange(64) % 2).bool().view(8, 8)[:, 0])
        self.register_buffer("short", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("missing", None)


def test_bits_are_compared_wherever_they_lie() -> None:
    def worker(transport: Any) -> list[float]:
        one = Ranked(transport, Odd())
        one.model.scale.fill_(float("nan"))
        one.rest()
        found = []
        for name, index in (("behind", 2), ("turned", (1, 2)), ("short", 1)):
            if one.rank == 0:
                getattr(one.model, name)[index] = -0.0 if name == "short" else 77
            assert one.steps() >= 1, name
            found.append(float(torch.copysign(torch.ones(()), getattr(one.model, name)[index].float())))
            assert one.steps(40) and one.steps() == 0, "it rests again"
        return found

    assert run_ranks(worker, 2) == [[1.0, 1.0, -1.0]] * 2


def test_what_batch_norm_counts_is_sent_in_every_pass() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, track_running_stats=True))
        one = Ranked(transport, model)
        assert one.steps(40) == 41
        model.eval()  # statistics of BatchNorm rest as well
        assert one.steps(25) == 25, "passes 41 to 65"
        assert one.steps(3) == 0
        model.train()
        assert one.steps(3) == 3

    run_ranks(worker, 2)


def test_instance_norm_has_no_count_and_writes_past_autograd() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.InstanceNorm1d(2, track_running_stats=True))
        one = Ranked(transport, model)
        assert one.steps(20) == 21
        assert model[1].num_batches_tracked == 0

    run_ranks(worker, 2)


def test_means_of_buffers_rest_too() -> None:
    """Divided by three they are another number, once."""

    def worker(one: Ranked) -> torch.Tensor:
        kinds = []
        for _ in range(8):
            one.transport.calls.clear()
            step(one.model)
            kinds.append(len(one.transport.calls))
        assert kinds[1:] == [3, 3, 3, 3, 1, 1, 1], "gradients, integers, the mean"
        one.model.scale.add_(one.rank)
        step(one.model)
        return one.model.scale.clone()

    found = ranks(worker, 3, buffers="mean")
    assert found[0] == found[1] == found[2] == pytest.approx(2.0)


@pytest.mark.parametrize("fails", ["backward", "forward"])
def test_a_change_in_a_pass_that_failed_is_followed_in_the_next(fails: str) -> None:
    def worker(one: Ranked) -> tuple[int, float]:
        one.rest()

        def fail(*_: Any) -> None:
            raise ValueError("no")

        if one.rank == 0:
            one.model.scale.fill_(7.0)
        if one.rank == 1 and fails == "forward":
            with pytest.raises(ValueError), one.model.layer.register_forward_pre_hook(fail):
                one.model(torch.ones(2, 4))
        loss = one.model(torch.ones(2, 4))
        if one.rank == 1 and fails == "backward":
            one.model.layer.weight.register_hook(fail)  # the bias comes before it
        with pytest.raises((ValueError, stretto.PeerError)):
            loss.sum().backward()
        if fails == "backward" and one.rank == 1:
            one.model.layer.weight._backward_hooks.clear()
        assert one.model.scale == (1.0 if one.rank else 7.0)
        return one.steps(), float(one.model.scale)

    assert ranks(worker) == [(1, 7.0), (1, 7.0)]


@pytest.mark.parametrize("policy", ["mean", "rank0"])
def test_a_rank_that_failed_does_not_get_the_buffers_of_that_pass_behind_the_next_forward(policy: str) -> None:
    """It looks for them as its next pass begins: what that forward, or the program, has written would be lost."""

    def worker(transport: Any) -> float:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(4)
        model = torch.nn.Sequential(norm, torch.nn.Linear(4, 1))
        stretto.attach(model, transport=transport, buffers=policy)
        good = {name: value.clone() for name, value in norm.state_dict().items()}

        def fail(*_: Any) -> None:
            raise ValueError("no")

        x = torch.arange(4.0)[:, None].expand(4, 4)
        loss = model(x * float("nan")).sum()
        if transport.rank == 1:
            model[1].weight.register_hook(fail)
        with pytest.raises((ValueError, stretto.PeerError)):
            loss.backward()
        if transport.rank == 1:
            model[1].weight._backward_hooks.clear()
        model.zero_grad()
        norm.load_state_dict(good)
        model(x + 10 * transport.rank).sum().backward()
        return float(norm.running_mean[0])

    wanted = {"mean": 0.1 * (1.5 + 5), "rank0": 0.1 * 1.5}[policy]
    assert run_ranks(worker, 2) == [pytest.approx(wanted)] * 2


def test_means_that_were_at_rest_move_in_the_pass_in_which_the_plan_changes() -> None:
    """As where a BatchNorm is unfrozen, and put into training mode."""

    def worker(transport: Any) -> float:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(4).eval().requires_grad_(False)
        model = torch.nn.Sequential(norm, torch.nn.Linear(4, 1))
        sync = stretto.attach(model, transport=transport, buffers="mean")
        x = torch.arange(4.0)[:, None].expand(4, 4) + 10 * transport.rank
        for _ in range(6):
            model(x).sum().backward()
        plans = sync.statistics.plans
        norm.train().requires_grad_(True)
        model(x).sum().backward()
        assert sync.statistics.plans == plans + 1
        return float(norm.running_mean[0])

    assert run_ranks(worker, 2) == [pytest.approx(0.1 * (1.5 + 5))] * 2


def test_other_buffers_are_sent_again() -> None:
    def worker(one: Ranked) -> float:
        one.rest()
        one.model.register_buffer("more", torch.full((3,), 1.0 + one.rank))
        one.model.layer = torch.nn.Linear(4, 4)  # it tells of itself
        step(one.model)
        assert one.model.more[0] == 1.0
        one.model.more.add_(one.rank)
        assert one.steps() >= 1
        return float(one.model.more[0])

    assert ranks(worker) == [1.0, 1.0]


def test_another_policy_begins_anew() -> None:
    def worker(one: Ranked) -> list[float]:
        one.rest()
        one.sync.buffers = "none"
        one.model.scale.fill_(2.0 + one.rank)
        assert one.steps(9) == 0
        found = [float(one.model.scale)]
        one.sync.buffers = "rank0"
        assert one.steps(3) == 3
        return [*found, float(one.model.scale)]

    assert ranks(worker) == [[2.0, 2.0], [3.0, 2.0]]


def test_what_cannot_be_compared_is_sent_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass may have an equality of its own, or be too large to keep a copy."""

    class Own(torch.Tensor):
        pass

    def worker(one: Ranked) -> None:
        if one.rank == 1:
            one.model.scale = one.model.scale.as_subclass(Own)
        assert one.steps(20) == 21

    ranks(worker)
    monkeypatch.setattr("stretto.buffers._MOST_BYTES", 51)  # 16 + 32 + 4 bytes
    ranks(lambda one: one.steps(20) == 21 or pytest.fail("it rests"))


def behind_hooks(rank: int) -> list[Any]:
    found = []
    for hook, silent in ((allreduce_hook, False), (noop_hook, True)):
        torch.manual_seed(0)
        model = Masked()
        sync = stretto.attach(model)
        sync.register_comm_hook(None, hook)
        for _ in range(8):
            step(model)
        rests = "no longer sent" in sync.describe()
        model.scale.fill_(5.0 - rank)
        step(model)
        found.append((silent, rests, float(model.scale)))
        sync.detach()
    dist.barrier()
    return found


def test_beside_comm_hooks() -> None:
    """Nobody can say that buffers have changed where nothing is communicated, so they are sent."""
    assert spawn_ranks(behind_hooks, 2) == [[(False, True, 5.0), (True, False, 5.0)]] * 2


def joined(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Masked())
    for _ in range(6):
        step(model)
    with model.join():
        for _ in range(3 + 2 * rank):
            step(model)
    model.module.scale.fill_(3.0 + rank)
    step(model)
    return [float(model.module.scale), float(model.module.places.sum())]


def test_behind_join() -> None:
    assert spawn_ranks(joined, 2) == [[3.0, 6.0]] * 2


def uneven(transport: Any, changed: int, idle: int) -> float:
    one = Ranked(transport)
    one.rest()
    if one.rank == changed:
        one.model.scale = torch.tensor(9.0)
    if one.rank == idle:
        one.sync.shadow_pass()
    else:
        step(one.model)
    return float(one.model.scale)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_rank_without_batches_says_so_too(changed: int, idle: int) -> None:
    found = run_ranks(lambda transport: uneven(transport, changed, idle), 2)
    assert found == ([1.0, 1.0] if changed else [9.0, 9.0])


def test_nothing_is_said_of_buffers_that_nobody_sends() -> None:
    def worker(transport: Any) -> list[str]:
        own, none = Ranked(transport, buffers="none"), Ranked(transport, torch.nn.Linear(4, 4))
        own.steps(6), none.steps(6)
        return [one.sync.describe().splitlines()[2] for one in (own, none)]

    said = ["buffers (3): stay as they are on each rank", "buffers (0): follow rank 0's at the end of every pass"]
    assert run_ranks(worker, 2) == [said] * 2


def silent_at_last(rank: int) -> tuple[bool, float]:
    torch.manual_seed(0)
    model = Masked()
    sync = stretto.attach(model)
    for _ in range(6):
        step(model)
    rested = "no longer sent" in sync.describe()
    sync.register_comm_hook(None, noop_hook)
    model.scale.fill_(5.0 - rank)
    step(model)
    return rested, float(model.scale)


def test_a_hook_that_sends_nothing_wakes_them() -> None:
    assert spawn_ranks(silent_at_last, 2) == [(True, 5.0)] * 2


def failing_beside_silence(rank: int) -> tuple[float, list[int]]:
    """Rank 1 gives up passes 4 and 6, which nobody can be told; it alone acts on words for it."""
    torch.manual_seed(0)
    model = Masked()
    sync = stretto.attach(model)
    sync.register_comm_hook(None, noop_hook)
    queue, acted = sync._reducer.queue, list[int]()
    hear = queue.presence.hear
    queue.presence.hear = lambda *said, **named: acted.append(queue.pass_number) or hear(*said, **named)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no")

    for number in range(1, 9):
        hook = model.layer.weight.register_hook(fail) if rank and number in (4, 6) else None
        try:
            step(model)
        except ValueError:
            assert hook is not None
            hook.remove()
    model.scale.fill_(5.0 - rank)
    step(model)
    return float(model.scale), acted


def test_a_rank_that_gives_up_beside_a_silent_hook_sends_on() -> None:
    assert spawn_ranks(failing_beside_silence, 2) == [(5.0, [1])] * 2


def test_they_rest_no_more_when_the_last_bucket_moves_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some layers on the host, and the words in another bucket from then on: they are read too late there."""

    def read_late(self: Footer, *, summed: bool) -> ControlWords:
        return ControlWords(self._words.clone(), Here(), marks=self._quiet[FIRST_MARK:FIRST_VALUE])  # type: ignore[arg-type]

    def worker(transport: Any) -> float:
        one = Ranked(transport)
        one.rest()
        transport.all_gather_object(None)
        monkeypatch.setattr(Footer, "read", read_late)
        if one.rank == 0:
            one.model.scale.fill_(3.0)
        transport.all_gather_object(None)
        one.steps(3)
        return float(one.model.scale)

    assert run_ranks(worker, 2) == [3.0, 3.0]
