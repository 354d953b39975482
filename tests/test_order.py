"""When buckets leave, and how the plan follows the order in which gradients arrive."""

import copy

import pytest
import torch
from models import Blocks, batch, build, gradients, in_order, loss, opposite, same_bits

import stretto
from stretto.testing import run_ranks, spawn_ranks

KB = 1 / 1024
ONE_EACH = 1 / 1024 / 1024


class Log:
    """What happened in which pass."""

    def __init__(self):
        self.events = []

    def gradient_ready(self, pass_number, name):
        self.events.append((pass_number, "ready", name))

    def bucket_launched(self, pass_number, bucket, nbytes):
        self.events.append((pass_number, "launched", bucket))

    def plan_changed(self, pass_number, plan):
        self.events.append((pass_number, "plan", plan.hash))

    def of(self, pass_number, kind):
        return [what for number, event, what in self.events if (number, event) == (pass_number, kind)]

    def plans(self):
        return [(number, plan) for number, event, plan in self.events if event == "plan"]

    def ready_before_launch(self, pass_number, bucket):
        """How many gradients had arrived when a bucket left, as a part of all."""
        now = [(event, what) for number, event, what in self.events if number == pass_number]
        before = now[: now.index(("launched", bucket))]
        return sum(event == "ready" for event, _ in before) / len(self.of(pass_number, "ready"))


def train(model, rank, passes, sync=None, execution=None):
    """``passes`` pairs of (this rank's own gradients, those after backward); ``execution`` gives a pass its order."""
    log, seen = Log(), []
    if sync is not None:
        sync.observe(log)
    for step in range(1, passes + 1):
        if execution is not None:
            model.execution = execution(step)
        data = batch("blocks", rank, step)
        twin = copy.deepcopy(model)
        loss(twin, data).backward()
        model.zero_grad()
        loss(model, data).backward()
        seen.append((gradients(twin), gradients(model)))
    return log, seen


def run(make, passes, *, cap=KB, world=2, executions=None):
    """Each rank's (handle, log, gradients); ``executions`` has a function of the pass number for each rank."""
    models = [make() for _ in range(world)]

    def worker(transport):
        rank = transport.rank
        sync = stretto.attach(models[rank], transport=transport, bucket_cap_mb=cap)
        return sync, *train(models[rank], rank, passes, sync, executions[rank] if executions else None)

    return run_ranks(worker, world)


def assert_exact(ranks):
    for step, passes in enumerate(zip(*(seen for _, _, seen in ranks), strict=True), 1):
        for rank, (_, got) in enumerate(passes):
            expected = {name: sum(own[name] / len(ranks) for own, _ in passes) for name in got}
            assert not same_bits(got, expected), f"rank {rank}, pass {step}"


def test_first_backward_overlaps_already():
    for sync, log, _ in run(in_order, 1):
        assert len(sync.plan.buckets) >= 4
        assert log.ready_before_launch(1, 0) < 0.5
        last = max(i for i, (_, event, _) in enumerate(log.events) if event == "ready")
        early = [what for _, event, what in log.events[:last] if event == "launched"]
        assert early == list(range(len(early))) and len(early) >= len(sync.plan.buckets) - 2


def test_first_plan_guesses_the_reverse_of_registration_and_the_second_knows():
    ranks = run(opposite, 4)
    first_plan = stretto.attach(opposite(), bucket_cap_mb=KB).plan
    assert first_plan.order == tuple(reversed(range(20)))
    for sync, log, _ in ranks:
        assert log.ready_before_launch(1, 0) > 0.75, "a wrong guess makes the first bucket wait"
        assert log.plans() == [(1, sync.plan.hash)]
        assert sync.plan.order[:4] in {(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)}, "block 4, run last"
        for number in (2, 3, 4):
            assert log.ready_before_launch(number, 0) < 0.5
    assert_exact(ranks)


@pytest.mark.parametrize("make", [in_order, opposite, lambda: Blocks([3, 0, 4, 1, 2])])
def test_learnt_plan_is_the_order_of_arrival(make):
    for sync, log, _ in run(make, 3, cap=ONE_EACH):
        names = [sync.plan.parameters[index].name for index in sync.plan.order]
        assert names == log.of(3, "ready")


@pytest.mark.parametrize("cap", [ONE_EACH, KB, 1.0])
@pytest.mark.parametrize("make", [in_order, opposite])
def test_buckets_leave_in_plan_order_and_all_of_them_once(make, cap):
    for sync, log, _ in run(make, 3, cap=cap):
        for number in (2, 3):
            assert log.of(number, "launched") == list(range(len(sync.plan.buckets)))
        assert sync.statistics.passes == 3


FORTH, BACK = [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]


def test_plan_follows_a_change_in_mid_run():
    def turn(step):
        return FORTH if step < 5 else BACK

    ranks = run(in_order, 9, executions=[turn, turn])
    plans = [log.plans() for _, log, _ in ranks]
    assert plans[0] == plans[1]
    assert [number for number, _ in plans[0]][-1:] == [5], "the new order shows in pass 5"
    for _, log, _ in ranks:
        assert log.ready_before_launch(4, 0) < 0.5
        assert log.ready_before_launch(5, 0) > 0.5
        for number in (6, 7, 8, 9):
            assert log.ready_before_launch(number, 0) < 0.5
    assert_exact(ranks)


def test_plan_follows_every_slow_drift():
    def turn(step):
        return FORTH if step // 10 % 2 == 0 else BACK

    ranks = run(in_order, 59, executions=[turn, turn])
    for sync, log, _ in ranks:
        changes = [number for number, _ in log.plans() if number > 1]
        assert changes == [10, 20, 30, 40, 50]
        assert sync.statistics.plans == len(log.plans()) + 1
    assert_exact(ranks)


@pytest.mark.parametrize("drifting", [0, 1])
def test_ranks_that_disagree_follow_rank_0_together(drifting):
    executions = [lambda step: FORTH, lambda step: FORTH]
    executions[drifting] = lambda step: FORTH if step < 4 else BACK
    ranks = run(in_order, 8, executions=executions)
    plans = [log.plans() for _, log, _ in ranks]
    assert plans[0] == plans[1]
    assert [number for number, _ in plans[0] if number > 1] == ([4] if drifting == 0 else [])
    assert ranks[0][0].plan == ranks[1][0].plan
    assert_exact(ranks)


@pytest.mark.parametrize(
    "turn",
    [lambda step: FORTH if step % 2 else BACK, lambda step: FORTH[step % 5 :] + FORTH[: step % 5]],
    ids=["two by turns", "five by turns"],
)
def test_order_that_alternates_does_not_replan_every_pass(turn):
    ranks = run(in_order, 64, executions=[turn, turn])
    plans = [log.plans() for _, log, _ in ranks]
    assert plans[0] == plans[1]
    assert len(plans[0]) <= 10
    assert len([number for number, _ in plans[0] if number > 32]) <= 2
    assert_exact(ranks)


def test_gradients_that_stay_move_with_the_plan():
    """Never cleared: what lies in the old buckets when the plan changes is part of the next mean."""
    models = [opposite() for _ in range(2)]

    def worker(transport):
        model = models[transport.rank]
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        seen, before = [], None
        for step in range(3):
            data = batch("blocks", transport.rank, step)
            twin = copy.deepcopy(model)
            for name, parameter in twin.named_parameters():
                parameter.grad = before[name].clone() if before else None
            loss(twin, data).backward()
            loss(model, data).backward()
            before = gradients(model)
            seen.append((gradients(twin), before))
        assert sync.statistics.plans == 2
        return sync, None, seen

    assert_exact(run_ranks(worker, 2))


def test_a_module_attached_anew_learns_anew():
    """After detach nothing of the former handle is left: no hooks, no plan."""
    models = [opposite() for _ in range(2)]

    def worker(transport):
        model = models[transport.rank]
        first = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        train(model, transport.rank, 2)
        first.detach()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        second = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        log, seen = train(model, transport.rank, 2, second)
        assert second.statistics.passes == 2
        assert log.ready_before_launch(1, 0) > 0.75 and log.plans()[0][0] == 1
        return second, log, seen

    assert_exact(run_ranks(worker, 2))


def drifting_rank(rank, world):
    """Over Gloo, where ranks are not in step: rank 0 turns in pass 4, the others two passes later."""
    model = build("scrambled", seed=rank)
    sync = stretto.attach(model, bucket_cap_mb=KB)
    log, seen = train(model, rank, 10, sync, lambda step: FORTH if step < (4 if rank == 0 else 6) else BACK)
    early = [log.ready_before_launch(number, 0) for number in range(2, 11)]
    return log.plans(), sync.plan.hash, sync.plan.to_json(), early, seen


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_processes_change_plans_at_the_same_pass(world):
    ranks = spawn_ranks(drifting_rank, world, world)
    first = ranks[0]
    assert [number for number, _ in first[0]] == [1, 4], "pass number of each change"
    assert first[0][-1][1] == first[1]
    for plans, plan_hash, json, early, _ in ranks:
        assert (plans, plan_hash, json) == first[:3]
        assert max(early[:2]) < 0.5 and max(early[5:]) < 0.5
        assert stretto.BucketPlan.from_json(json).hash == plan_hash
    for step, passes in enumerate(zip(*(rank[4] for rank in ranks), strict=True), 1):
        for rank, (_, got) in enumerate(passes):
            assert not same_bits(got, passes[0][1]), f"rank {rank}, pass {step}"
            for name, gradient in got.items():
                expected = sum(own[name] / world for own, _ in passes)
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
