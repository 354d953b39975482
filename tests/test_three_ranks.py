"""Three real processes against one: what other files show on threads or with two ranks, where rank 0 is half of all."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, build, far_apart, gradients, loss, same_bits, state
from test_comm_hooks import HOOKS, Torch, train
from test_drop_in import MEMBERS, check_member
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

import stretto
import stretto.backend
from stretto import DistributedDataParallel
from stretto.testing import spawn_ranks
from stretto.testing_network import SeparateHosts
from stretto.transport import ProcessGroupTransport, choose

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]
WORLD = 3
KB = 1 / 1024
TRANSPORTS = ["auto", "process_group"]
BATCHES = [2, 4, 5]
"""Of each rank, where they are uneven."""
COMBINED: dict[str, dict[str, Any]] = {
    "weights, dtype, division": {
        "weighted": True,
        "reduce_dtype": torch.float64,
        "predivide_factor": 2.0,
        "ignore": ["3.*"],
        "bucket_cap_mb": KB,
    },
    "delay, buffers, sum": {"delay": True, "buffers": "mean", "reduce": "sum", "predivide_factor": 3.0},
    "groups, triggers, checks": {"launch_after": ["4.weight"], "check_every": 1, "buffers": "mean", "weighted": True},
}
IDLE = ["no gradient", "zeros", "shadow"]


class NoGradient(torch.autograd.Function):
    """Backward comes by, and has nothing for what lies before."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def one_idle_in_turn(rank: int, transport: str, how: str) -> list[dict[str, Any]]:
    """In each pass one rank has nothing to do, and in some no rank uses block 4."""
    model = build("scrambled")
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
    found = []
    for step in range(6):
        model.zero_grad()
        model.execution = execution(step)
        if rank != step % WORLD:
            loss(model, batch("scrambled", rank, step)).backward()
        elif how == "shadow":
            sync.shadow_pass()
        elif how == "zeros":
            bias = model.block0[0].bias
            bias.backward(torch.zeros_like(bias))
        else:
            NoGradient.apply(loss(model, batch("scrambled", rank, step))).backward()
        found.append(gradients(model))
    sync.detach()
    return found


def execution(step: int) -> list[int]:
    return [0, 1, 2, 3] if step % 2 else [0, 1, 2, 3, 4]


def without_as_many(rank: int, divide: bool, hook: bool) -> Any:
    """Gradients of each batch, the state when all are done, and the gradients of one more pass together."""
    model = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.002)
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    found = []
    with model.join(divide_by_initial_world_size=divide):
        for step in range(BATCHES[rank]):
            model.zero_grad()
            loss(model, batch("mlp", rank, step)).backward()
            found.append(gradients(model.module))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    model.zero_grad()
    after = state(model.module)
    loss(model, batch("mlp", rank, 9)).backward()
    return found, after, gradients(model.module)


def two_that_join(rank: int) -> list[dict[str, torch.Tensor]]:
    """``Join`` over two models at once."""
    models = [DistributedDataParallel(build("mlp", seed=seed)) for seed in range(2)]
    with Join(models):
        for step in range(BATCHES[rank]):
            for model in models:
                model.zero_grad()
                loss(model, batch("mlp", rank, step)).backward()
    return [state(model.module) for model in models]


def copied(rank: int) -> Any:
    """A copy, which trains beside what it is a copy of."""
    first = DistributedDataParallel(build("mlp", seed=rank))
    loss(first, batch("mlp", rank)).backward()
    second = copy.deepcopy(first)
    for step, model in ((1, second), (2, first), (3, second)):
        model.zero_grad()
        loss(model, batch("mlp", rank, step)).backward()
    return gradients(first.module), gradients(second.module), same_bits(state(first), state(second))


def combined(rank: int, name: str, transport: str) -> Any:
    options = dict(COMBINED[name])
    if name.startswith("groups"):
        options["process_groups"] = [dist.new_group(range(WORLD)) for _ in range(2)]
    model = build("cnn", seed=0)
    sync = stretto.attach(model, transport=transport, **options)
    found = []
    for step in range(3):
        model.zero_grad()
        if options.get("weighted"):
            sync.weight = weight(rank, step)
        loss(model, batch("cnn", rank, step)).backward()
        found.append(gradients(model))
    told = sync.describe(), str(sync.plan), len(sync.plan.buckets)
    return found, {name: buffer.clone() for name, buffer in model.named_buffers()}, told


def weight(rank: int, step: int) -> int:
    return 1 + (rank + step) % 4


def hosts_in_a_group_of_our_backend(rank: int) -> Any:
    """Hosts in a part of the ranks, over a group that is shared memory by itself."""
    every, some = dist.new_group(backend="stretto"), dist.new_group([0, 2], backend="stretto")
    found = []
    for group, sizes in ((every, (2, 1)), (some, (1, 1))):
        if group is some and rank == 1:
            continue
        model = build("mlp")
        transport = choose(SeparateHosts(ProcessGroupTransport(group), sizes), "auto")
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.002)
        for step in range(2):
            model.zero_grad()
            loss(model, batch("mlp", rank, step)).backward()
        found.append((transport.name, gradients(model)))
        sync.detach()
    return found


def missing_members(rank: int) -> list[str]:
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 1))
    wrapped(torch.ones(1, 2)).sum().backward()
    problems = []
    for name in MEMBERS:
        try:
            check_member(name, wrapped)
        except (AssertionError, AttributeError, pytest.fail.Exception) as error:
            problems.append(f"{name}: {error}")
    return problems


def hooks_of_torch(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for name in ("allreduce", "bf16", "fp16 wrapper", "PowerSGD", "post-localSGD"):
        cap = 25 if name == "PowerSGD" else 0.004
        found[name] = [train(wrap, HOOKS[name][0], rank, cap) for wrap in (DistributedDataParallel, Torch)]
        dist.barrier()
    return found


def all_scenes(rank: int) -> dict[Any, Any]:
    return {
        **{("idle", way, how): one_idle_in_turn(rank, way, how) for way in TRANSPORTS for how in IDLE},
        **{("uneven", d, hook): without_as_many(rank, d, hook) for d in (True, False) for hook in (False, True)},
        **{("combined", name, way): combined(rank, name, way) for name in COMBINED for way in TRANSPORTS},
        "two that join": two_that_join(rank),
        "copied": copied(rank),
        "backend": hosts_in_a_group_of_our_backend(rank),
        "members": missing_members(rank),
        "hooks": hooks_of_torch(rank),
    }


@pytest.fixture(scope="module")
def scenes() -> list[dict[Any, Any]]:
    return spawn_ranks(all_scenes, WORLD)


def alone(name: str, step: int, shares: dict[int, float], before: Any = None) -> tuple[dict[str, Any], torch.nn.Module]:
    """The sum over ranks of their gradients times their shares, by one process."""
    model = build(name)
    if name == "scrambled":
        model.execution = execution(step)
    if before is not None:
        model.load_state_dict(before)
    for rank, share in shares.items():
        (loss(model, batch(name, rank, step)) * share).backward()
    return gradients(model), model


def assert_same(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for one in found:
        assert not same_bits(one, found[0])
    nothing = {name for name, value in wanted.items() if value is None}
    assert {name for name, value in found[0].items() if value is None} == nothing
    there = wanted.keys() - nothing
    assert there and not far_apart({n: found[0][n] for n in there}, {n: wanted[n] for n in there}, tolerance=1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", IDLE)
def test_a_rank_with_nothing_to_do_in_a_pass(scenes, transport: str, how: str) -> None:
    for step in range(6):
        idle = step % WORLD
        wanted, _ = alone("scrambled", step, {rank: 1 / WORLD for rank in range(WORLD) if rank != idle})
        assert any(value is None for value in wanted.values()) == bool(step % 2)
        found = [scene["idle", transport, how][step] for scene in scenes]
        if how == "shadow":  # its .grad stays
            assert set(found.pop(idle).values()) == {None}
        assert_same(found, wanted)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("hook", [False, True])
def test_uneven_batches_are_those_of_one_process(scenes, divide: bool, hook: bool) -> None:
    found = [scene["uneven", divide, hook] for scene in scenes]
    assert [len(mine) for mine, _, _ in found] == BATCHES
    values = build("mlp").state_dict()
    for step in range(max(BATCHES)):
        there = [rank for rank in range(WORLD) if step < BATCHES[rank]]
        share = 1 / (WORLD if divide or hook else len(there))  # a hook divides by itself
        wanted, _ = alone("mlp", step, dict.fromkeys(there, share), values)
        assert_same([found[rank][0][step] for rank in there], wanted)
        values = {name: value - 0.1 * wanted[name] for name, value in values.items()}
    assert_same([after for _, after, _ in found], values)
    wanted, _ = alone("mlp", 9, dict.fromkeys(range(WORLD), 1 / WORLD), values)
    assert_same([then for _, _, then in found], wanted)


def test_two_models_that_join_end_with_one_state_each(scenes) -> None:
    for number in range(2):
        for scene in scenes:
            assert not same_bits(scene["two that join"][number], state(build("mlp", seed=number)))


def test_a_copy_trains_beside_what_it_is_a_copy_of(scenes) -> None:
    for place, step in ((0, 2), (1, 3)):
        wanted, _ = alone("mlp", step, dict.fromkeys(range(WORLD), 1 / WORLD))
        assert_same([scene["copied"][place] for scene in scenes], wanted)
    assert [scene["copied"][2] for scene in scenes] == [[]] * WORLD


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", COMBINED)
def test_options_together(scenes, name: str, transport: str) -> None:
    options = COMBINED[name]
    found = [scene["combined", name, transport] for scene in scenes]
    over = "shared_memory" if transport == "auto" and not name.startswith("groups") else "process_group"
    for rank, (_, _, (described, plan, buckets)) in enumerate(found):
        assert described.startswith(f"rank {rank} of {WORLD} over ") and over in described.splitlines()[0], described
        assert ("as float64" in plan) == ("reduce_dtype" in options)
        assert (buckets == 1) == ("delay" in options)
    ignored = {"3.weight"} if "ignore" in options else set()
    for step in range(3):
        weights = {rank: weight(rank, step) if options.get("weighted") else 1 for rank in range(WORLD)}
        total = 1 if options.get("reduce") == "sum" else sum(weights.values())
        wanted, _ = alone("cnn", step, {rank: one / total for rank, one in weights.items()})
        mine = [grads[step] for grads, _, _ in found]
        for part in (wanted, *mine):
            for skipped in ignored:
                part.pop(skipped)
        assert_same(mine, wanted)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", COMBINED)
def test_buffers_beside_options(scenes, name: str, transport: str) -> None:
    found = [scene["combined", name, transport][1] for scene in scenes]
    if "buffers" not in COMBINED[name]:
        model = build("cnn")
        for step in range(3):
            loss(model, batch("cnn", 0, step))
        wanted = dict(model.named_buffers())
    else:
        model = build("cnn")
        for step in range(3):
            twins = [copy.deepcopy(model) for _ in range(WORLD)]
            for rank, twin in enumerate(twins):
                loss(twin, batch("cnn", rank, step))
            for buffer, *others in zip(model.buffers(), *(twin.buffers() for twin in twins), strict=True):
                floats = buffer.is_floating_point()
                buffer.copy_(sum(others) / WORLD if floats else others[0])
        wanted = dict(model.named_buffers())
    assert_same(found, wanted)


def test_hosts_in_groups_of_our_own_backend(scenes) -> None:
    wanted, _ = alone("mlp", 1, dict.fromkeys(range(WORLD), 1 / WORLD))
    assert_same([scene["backend"][0][1] for scene in scenes], wanted)
    assert {scene["backend"][0][0] for scene in scenes} == {"hierarchical (3 ranks on 2 hosts)"}
    wanted, _ = alone("mlp", 1, {0: 0.5, 2: 0.5})
    assert_same([scenes[rank]["backend"][1][1] for rank in (0, 2)], wanted)
    assert scenes[0]["backend"][1][0] == "process_group (stretto)" and len(scenes[1]["backend"]) == 1


def test_members_of_torchs_class_are_there_in_a_group_too(scenes) -> None:
    assert [scene["members"] for scene in scenes] == [[]] * WORLD


@pytest.mark.parametrize("name", ["allreduce", "bf16", "fp16 wrapper", "PowerSGD", "post-localSGD"])
def test_hooks_of_torch_give_what_they_give_in_torch(scenes, name: str) -> None:
    tolerance = 1e-3 if "16" in name else max(HOOKS[name][1], 1e-5)  # Gloo's ring rounds in an order that buckets give
    ours, theirs = ([scene["hooks"][name][place] for scene in scenes] for place in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip([*mine[0], *mine[1]], [*other[0], *other[1]], strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
        if name != "post-localSGD":
            assert all(torch.equal(one, two) for one, two in zip(mine[1], ours[0][1], strict=True))
