"""Each text that stretto raises or logs, whole."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh

import stretto
from stretto import BucketPlan, BucketSpec, ParameterSpec, steps
from stretto import DistributedDataParallel as DDP
from stretto.blame import SAME_CALLS, apart
from stretto.ddp_faces import ReducerFace
from stretto.events import Events
from stretto.plan import plan_buckets
from stretto.specs import dtype_of
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import LocalGroup, LocalTransport, ProcessGroupTransport, RoundRobinTransport, Transport, Work

# Parameters that nobody used


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        self.heads = torch.nn.ModuleDict({key: torch.nn.Linear(2, 1) for key in "abcd"})

    def forward(self, use: str) -> torch.Tensor:
        hidden = self.body(torch.ones(3, 2))
        return torch.stack([self.heads[key](hidden).sum() for key in use]).sum()


NEVER_USED = (
    "rank 0, pass 3: heads.c.weight, heads.c.bias, heads.d.weight, heads.d.bias had no gradient in any pass so far, "
    "{}. Each is untrained so far, and is sent as zeros if others share its bucket.\n"
    "If that is intended, as for a target network, freeze it: requires_grad_(False). If it is to come later, as "
    "for an expert that no token has reached yet, ignore this. Shown once."
)


def warned(caplog: pytest.LogCaptureFixture, uses: list[list[str]], hook: object = None) -> list[str]:
    """What is logged while each rank runs one pass with each of its heads."""

    def worker(transport):
        model = Heads()
        sync = stretto.attach(model, transport=transport)
        if hook is not None:
            sync.register_comm_hook(None, hook)
        for use in uses[transport.rank]:
            model.zero_grad()
            model(use).backward()

    with caplog.at_level(logging.DEBUG, "stretto"):
        run_ranks(worker, len(uses))
    assert all((record.name, record.levelno) == ("stretto", logging.WARNING) for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def identity(state: object, bucket: object) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_no_rank_ever_used_are_named_once(caplog, world: int) -> None:
    uses = [["a"] * 8, ["a", "b", "a", "c", "a", "a", "a", "a"], ["b"] * 8]
    assert warned(caplog, uses[:world]) == [NEVER_USED.format("on any rank")]


@pytest.mark.parametrize("uses", [["abcd"], ["ab", "cd"], ["a", "b", "cd"], ["ab", "ab", "ab", "abcd"]])
def test_what_some_pass_of_some_rank_used_is_not_named(caplog, uses: list[str]) -> None:
    passes = [uses[number % len(uses)] for number in range(3)]
    expected = [NEVER_USED.format("on any rank")] if len(uses) == 4 else []
    assert warned(caplog, [["ab"] * 3, passes]) == expected


def test_parameters_with_gradients_that_no_backward_brings_are_not_called_untrained(caplog) -> None:
    """A pipeline that splits backward runs whole ones as well, of other layers."""

    def worker(transport):
        model = Heads()
        stretto.attach(model, transport=transport)
        for _ in range(3):
            others = [*model.heads["c"].parameters(), *model.heads["d"].parameters()]
            for one, grad in zip(others, torch.autograd.grad(model("cd"), others), strict=True):
                one.grad = grad if one.grad is None else one.grad + grad
            model("ab").backward()

    run_ranks(worker, 2)
    assert caplog.records == []


class Renewing(Heads):
    """Makes the weight of a head anew in each forward, as no plan can know beforehand."""

    def forward(self, use: str) -> torch.Tensor:
        head = self.heads["a"]
        head.weight = torch.nn.Parameter(head.weight.detach() * 0.9)
        return super().forward(use)


def test_parameters_that_forward_replaces_in_each_pass_are_not_named(caplog) -> None:
    """They have been reduced all the same, behind the pass."""

    def worker(transport):
        model = Renewing()
        sync = stretto.attach(model, transport=transport)
        for _ in range(5):
            model.zero_grad()
            model("abcd").backward()
        return sync.used_by["heads.a.weight"]

    assert run_ranks(worker, 2) == [2, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("other, named", [("abcd", []), ("ab", [NEVER_USED.format("on any rank")])])
def test_with_a_comm_hook_rank_0_speaks_for_all(caplog, other: str, named: list[str]) -> None:
    assert warned(caplog, [["ab"] * 4, [other] * 4], identity) == named


def test_beside_noop_hook_rank_0_speaks_of_itself(caplog) -> None:
    assert warned(caplog, [["ab"] * 4, ["abcd"] * 4], noop_hook) == [NEVER_USED.format("on this rank")]


NO_WEIGHT = (
    "rank 0, pass 1: attached with weighted=True, but no weight was set before this pass, so this rank counts as 1.\n"
    "Set it before each backward: sync.weight = len(inputs), or a wrapper's .synchronizer.weight; or leave out "
    "weighted=True."
)


@pytest.mark.parametrize("sets", ["never", "before the first pass", "later"])
def test_weights_that_are_never_given_are_told_of_once(caplog, sets: str) -> None:
    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport, weighted=True)
        for number in range(3):
            if sets == "before the first pass" or (sets == "later" and number == 1):
                sync.weight = 1.0
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records] == [NO_WEIGHT] * (sets != "before the first pass")


def joins_twice(rank: int) -> list[str]:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    model = DDP(torch.nn.Linear(2, 1))
    for _ in range(2):
        with model.join(divide_by_initial_world_size=False):
            for _ in range(3 + rank):
                model(torch.ones(1, 2)).sum().backward()
    return told


@pytest.mark.ranks
def test_a_join_over_the_ranks_that_are_left_sets_its_weights_itself() -> None:
    assert spawn_ranks(joins_twice, 2) == [[], []]


# What an optimizer steps and nobody averages


KEPT = (
    "rank 0, {}: a step with gradients of this rank only, from a backward inside no_sync(): weight, bias. Each rank "
    "steps with its own gradients.\n"
    "Run the last backward before each step outside no_sync(), also in the last, shorter round of an epoch. If "
    "gradients, or later the weights, are averaged in another way, ignore this. Shown once."
)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("rounds", [[2] * 10 + [1], [1], [2, 2]])
def test_steps_behind_a_backward_inside_no_sync_are_told_of_once(caplog, shards: bool, rounds: list[int]) -> None:
    """As of an epoch whose batches are no multiple of how many are accumulated."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport, check_every=0)  # ranks part, or train on the same
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = stretto.shard(optimizer, sync) if shards else optimizer
        for _ in range(2):
            for batches in rounds:
                for number in range(batches):
                    with sync.no_sync() if number == 0 else contextlib.nullcontext():
                        model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        sync.detach()

    run_ranks(worker, 2)
    where = "before pass 1" if rounds == [1] else "pass 10"
    assert [record.getMessage() for record in caplog.records] == [KEPT.format(where)] * (1 in rounds)


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("shards", [False, True])
def test_a_step_whose_closure_runs_the_last_backward_is_told_of_by_what_that_was(
    caplog, shards: bool, averages: bool
) -> None:
    """As Lightning steps."""

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = stretto.shard(optimizer, sync) if shards else optimizer

        def closure():
            with contextlib.nullcontext() if averages else sync.no_sync():
                model(torch.ones(1, 2)).sum().backward()

        for _ in range(3):
            optimizer.zero_grad()
            with sync.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step(closure)
        sync.detach()

    run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records] == [KEPT.format("before pass 1")] * (not averages)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_behind_gradients_that_were_dropped_are_not_told_of(caplog, set_to_none: bool) -> None:
    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with sync.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad(set_to_none)
        optimizer.step()
        sync.detach()

    run_ranks(worker, 2)
    assert not caplog.records


@pytest.mark.parametrize("assigns", [False, True])
def test_steps_with_gradients_that_stretto_reduce_has_averaged_are_not_told_of(caplog, assigns: bool) -> None:
    """As where a pipeline's schedule runs all backwards, or losses are weighed against each other before the mean.

    Something else may be reduced between the steps of two optimizers. Later, without it, a step is told of.
    """
    told = []

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport, check_every=0)
        parts = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
        for averages in (True, True, False):
            with sync.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            gradients = [one.grad.clone() if assigns else one.grad for one in model.parameters()]
            if averages:
                stretto.reduce(gradients, transport=transport)
            for one, gradient in zip(model.parameters(), gradients, strict=True):
                one.grad = gradient
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for part in parts:
                part.step()
                stretto.reduce([torch.ones(1)], transport=transport)
            if transport.rank == 0:  # which tells; the other may be behind
                told.append(len(caplog.records))
            model.zero_grad(set_to_none=False)
        sync.detach()

    run_ranks(worker, 2)
    assert told == [0, 0, 1]
    assert [record.getMessage() for record in caplog.records] == [KEPT.format("before pass 1").replace(", bias", "")]


ANOTHER_IS_TRAINED = (
    "rank 0, before pass 1: {} of SGD, which no handle averages, and no backward has reached the attached module: each "
    "rank may be training its own model.\n"
    "Attach the module that you train, not an earlier one that it was copied or rebuilt from. If it is averaged in "
    "another way, or each rank is meant to train its own first, ignore this. Shown once."
)


@torch.no_grad()
def step_by_hand(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad


def test_steps_of_what_is_attached_or_the_modules_own_begin_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A critic that is trained first, beside a temperature of each rank's own; a head that is to be left alone."""

    def worker(transport: Transport) -> None:
        actor = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        critic, own = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
        stretto.attach(actor, transport=transport, ignore=["1.*"], check_every=0)
        stretto.attach(critic, transport=transport, check_every=0)  # on the same batches
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, own, actor[1])]
        for number in range(120):
            trained = (critic, own, actor[1])[place := number % 2 if number < 60 else 2]
            trained(torch.ones(1, trained.in_features)).sum().backward()
            if transport.rank == 0:
                optimizers[place].step()
            else:
                step_by_hand(trained)

    run_ranks(worker, 2)
    assert caplog.records == []


@pytest.mark.parametrize("clears", [True, False])
def test_a_hook_that_clears_gradients_behind_the_step_hides_nothing(
    caplog: pytest.LogCaptureFixture, clears: bool
) -> None:
    def worker(transport: Transport) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if clears:
            optimizer.register_step_post_hook(lambda one, *_: one.zero_grad())
        with sync.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        if transport.rank == 0:
            optimizer.step()

    run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records] == [KEPT.format("before pass 1")]


@pytest.mark.parametrize("what", ["a probe", "a head beside a backward that was kept", "attached again"])
def test_who_trains_something_else_before_is_told_nothing_at_the_end(
    caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """No copy of what is attached."""

    def worker(transport: Transport) -> None:
        model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        if what == "a head beside a backward that was kept":
            with sync.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            head = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head(torch.ones(1, 2)).sum().backward()
        if transport.rank == 0:
            optimizer.step()
        sync.detach()
        if what == "attached again":
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert caplog.records == []


@pytest.mark.parametrize(("steps", "told"), [(1, "1 step"), (6, "6 steps"), (99, "32 steps")])
@pytest.mark.parametrize("what", ["a copy", "itself", "another that is attached", "without gradients"])
def test_who_attaches_a_module_and_trains_another_is_told(
    caplog: pytest.LogCaptureFixture, what: str, steps: int, told: str
) -> None:
    """Amid the run, or when the handle ends."""

    def worker(transport: Transport) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        trained = model if what == "itself" else copy.deepcopy(model)
        if what == "another that is attached":
            stretto.attach(trained, transport=transport)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            if what != "without gradients":
                trained(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()
            if transport.rank == 0:  # which hears of the steps of all threads
                optimizer.step()
            elif what != "without gradients":
                step_by_hand(trained)
        sync.detach()

    run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records] == [ANOTHER_IS_TRAINED.format(told)] * (what == "a copy")


UNBROUGHT = (
    "rank 0, before pass 1: weight, bias have gradients that no backward has brought, and that stretto.reduce has not "
    "averaged: each rank seems to step with its own.\n"
    "Call stretto.reduce([p.grad for p in parameters]) before each step, for other than all ranks with process_group=: "
    "so after torch.autograd.grad and torch.func.grad, and after a pipeline that splits backward, which is to run "
    "inside no_sync(). If they are averaged in another way, ignore this. Shown once."
)


def unbrought(caplog: pytest.LogCaptureFixture, what: str, *, steps: int = 9) -> list[str]:
    """What is logged where gradients come from ``torch.autograd.grad``."""

    def worker(transport: Transport) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        parameters = [*model.parameters()]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(parameters, lr=0.1)]
        if "sharded" in what:
            optimizers = [stretto.shard(optimizers[0], sync)]
        if "one each" in what:
            optimizers = [torch.optim.SGD([one], lr=0.1) for one in parameters]
        flat = torch.zeros(3)

        def gradients() -> torch.Tensor:
            loss = model(torch.full((1, 2), 0.0 if what == "zeros" else 1.0 + transport.rank)).sum()
            found = [*torch.autograd.grad(loss, parameters)]
            if "flat" in what:
                torch.cat([one.view(-1) for one in found], out=flat)
                found = [part.view_as(one) for part, one in zip(flat.split([2, 1]), found, strict=True)]
            if "reduced" in what:
                op: Literal["mean", "sum"] = "sum" if "as a sum" in what else "mean"
                stretto.reduce([flat] if "flat" in what else found, op=op, transport=transport)
            for one, grad in zip(parameters, found, strict=True):
                one.grad = torch.zeros_like(grad) if what == "zeros" else grad.detach()
                if "as a sum" in what:
                    one.grad = grad / 2
            return loss

        for _ in range(steps):
            if "closure" not in what:
                gradients()
            if what == "kept":
                with sync.no_sync():
                    model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers if transport.rank == 0 or "sharded" in what else ():  # all threads are heard
                optimizer.step(*[gradients] * ("closure" in what))
            if "closure" in what and transport.rank and "sharded" not in what:
                gradients()
            if "zeroed" in what:
                model.zero_grad()

    run_ranks(worker, 2)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("what", ["", "sharded", "closure", "closure, zeroed behind the step"])
def test_gradients_that_no_backward_has_brought_are_told_of_once(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """torch's class says nothing either."""
    assert unbrought(caplog, what) == [UNBROUGHT]


def test_reduce_inside_a_transform_and_what_it_was_given_long_ago_cost_nothing() -> None:
    """``stretto.reduce`` keeps in mind what it was given, but nothing that is gone."""

    def worker(transport: Transport) -> int:
        stretto.attach(torch.nn.Linear(2, 1), transport=transport)

        def loss(one: torch.Tensor) -> torch.Tensor:
            stretto.reduce([one.detach()], transport=transport)
            return one.sum()

        torch.func.grad(loss)(torch.ones(2))
        for _ in range(300):
            stretto.reduce([torch.ones(1)], transport=transport)
        watch = steps._watch()
        assert watch is not None
        return len(watch.averaged)

    assert max(run_ranks(worker, 2)) < 300


def test_of_several_optimizers_three_steps_of_one_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert unbrought(caplog, "one each", steps=2) == []
    assert unbrought(caplog, "one each", steps=3) == [UNBROUGHT.replace("weight, bias", "weight", 1)]


@pytest.mark.parametrize(
    "what",
    [
        "reduced",
        "reduced, sharded",
        "reduced, closure",
        "reduced, flat",
        "reduced, flat, one each",
        "reduced as a sum",
        "zeros",
    ],
)
def test_gradients_that_were_averaged_or_are_zeros_are_not_told_of(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Zeros are those of the step in which torch makes an optimizer's state."""
    assert unbrought(caplog, what) == []


def test_what_a_backward_without_synchronisation_has_brought_is_told_of_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert unbrought(caplog, "few steps", steps=2) == []
    assert unbrought(caplog, "kept") == [KEPT.format("before pass 1")]


STEPPED_ALONE = (
    "rank 0, pass 1: SGD steps {}, which no handle averages, beside parameters that one does: each rank may train its "
    "own.\nAttach the module that holds all of them, or this part as well. If they are meant to differ, or are "
    "averaged in another way, ignore this. Shown once."
)


def told_of_steps(caplog: pytest.LogCaptureFixture, **how: bool) -> list[str]:
    """What is logged while an optimizer steps an encoder and its head, of which the first alone is attached."""

    def worker(transport):
        whole = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        whole[1].requires_grad_(not how.get("frozen"))
        ignore = ["1.*"] if how.get("ignored") else []
        stretto.attach(whole if ignore else whole[0], transport=transport, ignore=ignore)
        if how.get("attached_too") or how.get("ignored_there"):
            stretto.attach(whole[1], transport=transport, ignore=["bias"] if how.get("ignored_there") else [])
        groups = [[*whole[0].parameters()], [*whole[1].parameters()]]
        given = [dict(params=one) for one in groups]
        if how.get("named"):
            given = [dict(params=[*whole[place].named_parameters(name)]) for place, name in enumerate(["body", "head"])]
        if how.get("named_alike"):
            given = [dict(params=[*one.named_parameters()]) for one in whole]
        if how.get("lazy"):
            given += [dict(params=[*torch.nn.LazyLinear(1).parameters()])]
        optimizers = [torch.optim.SGD(given, lr=0.1)]
        if how.get("misnamed"):
            optimizers[0].param_groups[1]["param_names"] = ["weight"]
        if how.get("apart"):
            optimizers = [torch.optim.SGD(one, lr=0.1) for one in groups]
        for _ in range(5):
            whole.zero_grad()
            whole(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    with caplog.at_level(logging.WARNING, "stretto"):
        run_ranks(worker, 2)
    return [record.getMessage() for record in caplog.records]


BY_PLACE = "param_groups[1]['params'][0] (1, 3), param_groups[1]['params'][1] (1,)"


@pytest.mark.parametrize(
    "how, which",
    [
        ("plain", BY_PLACE),
        ("lazy", BY_PLACE),
        ("misnamed", BY_PLACE),
        ("named", "head.weight, head.bias"),
        ("named_alike", "weight, bias"),
    ],
)
def test_what_is_stepped_beside_an_attached_part_and_not_averaged_is_named_once(caplog, how: str, which: str) -> None:
    assert told_of_steps(caplog, **{how: True}) == [STEPPED_ALONE.format(which)]


def test_what_one_optimizer_steps_beside_two_handles_is_named_once(caplog) -> None:
    """As of DLRM: two attached networks, and tables of which each rank has its own."""

    def worker(transport):
        bottom, table, top = parts = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
        for part in (bottom, top):
            stretto.attach(part, transport=transport)
        optimizer = torch.optim.SGD([dict(params=[*one.parameters()]) for one in (bottom, table, top)], lr=0.1)
        for _ in range(5):
            parts.zero_grad()
            top(table(bottom(torch.full((1, 2), 1.0 + transport.rank)))).sum().backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "stretto"):
        run_ranks(worker, 2)
    told = STEPPED_ALONE.format("param_groups[1]['params'][0] (2, 2), param_groups[1]['params'][1] (2,)")
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.mark.parametrize("how", ["frozen", "ignored", "ignored_there", "attached_too", "apart"])
def test_what_is_averaged_or_left_alone_by_request_may_be_stepped(caplog, how: str) -> None:
    assert told_of_steps(caplog, **{how: True}) == []


# In one process, before anything is trained


def spec(name: str = "w", **changes: object) -> ParameterSpec:
    return ParameterSpec(**{"name": name, "shape": (2,), "strides": (1,), "dtype": torch.float32} | changes)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def of_other_gradients() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.weight.grad_dtype = torch.float64
    return module


def attach(**options: object) -> stretto.Synchronizer:
    return stretto.attach(model(), **options)


def launched_without_a_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "4")
        attach()


def member_of_a_gone_wrapper() -> None:
    face = DDP(model()).reducer
    gc.collect()
    face._remove_autograd_hooks()


@dataclass
class Mesh:
    ndim: int = 1

    def _get_root_mesh(self) -> str:
        return "another"


def with_a_mesh(ndim: int = 1, **options: object) -> None:
    DDP(model(), device_mesh=Mesh(ndim), **options)


def on_two_kinds_of_device() -> None:
    DDP(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")))


PLAN = plan_buckets([spec("a"), spec("b", dtype=torch.float64)], cap_bytes=100)
CUT = PLAN.to_json().replace('"cut_after": []', '"cut_after": ["a"]')


def one_group_for_several() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        attach(process_groups=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


ALONE = [
    (
        one_group_for_several,
        "process_groups= takes a list of groups of the same ranks: for one, write process_group=group",
    ),
    (
        lambda: attach(process_groups=3),
        "process_groups= takes a list of groups of the same ranks: for one, write process_group=group",
    ),
    (
        lambda: DDP(model(), process_groups=3),
        "process_groups= takes a list of groups of the same ranks: for one, write process_group=group",
    ),
    (
        launched_without_a_group,
        "WORLD_SIZE=4 ranks were launched, but no process group is initialised: each would train alone.\n"
        "Call torch.distributed.init_process_group() before stretto.attach(model).",
    ),
    (
        lambda: attach(ignore=["9.*"]),
        "attach: ignore= names 9.*, which the module does not have.\n"
        "Give names, or patterns of names, of module.named_parameters() or module.named_buffers().",
    ),
    (
        lambda: attach(buffers="all"),
        'buffers=\'all\' is not known: use one of "rank0", "mean", "none"',
    ),
    (lambda: attach(check_every=-1), "check_every=-1 must be a number of passes, 0 for never, or None"),
    (
        lambda: attach(reduce_dtype=torch.int32),
        "reduce_dtype for '*' must be a floating dtype that can be added, such as torch.float32, not torch.int32",
    ),
    (
        lambda: attach(launch_after=["9.weight"]),
        "launch_after names 9.weight, which is not in this module.\n"
        "Give parameters of the attached module, or names as in module.named_parameters().",
    ),
    (lambda: attach(reduce="max"), 'reduce=\'max\' is not known: use one of "mean", "sum"'),
    (lambda: attach(predivide_factor=0), "predivide_factor=0 must be a positive number, or None"),
    (lambda: attach(bucket_cap_mb="25"), "bucket_cap_mb='25' must be a positive number, or None"),
    (lambda: attach(weighted="yes"), "weighted='yes' must be True or False"),
    (lambda: attach(ignore="9.*"), "attach: ignore='9.*' must be a list of names or patterns, such as [\"head.*\"]"),
    (lambda: attach(beside=[3]), "attach: beside= takes handles, as returned by attach(), not int"),
    (
        lambda: stretto.shard(torch.optim.SGD(model().parameters()), torch.nn.Linear(1, 1)),
        "shard: takes an optimizer and the handle that attach() has returned, or the drop-in, not (SGD, Linear).\n"
        "Call optimizer = stretto.shard(optimizer, sync).",
    ),
    (
        lambda: stretto.shard(torch.optim.SGD(model().parameters()), [attach(), attach()]),
        "shard: takes an optimizer and the handle that attach() has returned, or the drop-in, not (SGD, list).\n"
        "Call optimizer = stretto.shard(optimizer, sync). For several models build an optimizer for each, or attach "
        "one module that has all of them, torch.nn.ModuleList([a, b]): each is still called by itself.",
    ),
    (
        lambda: stretto.attach([]),
        "attach: the first argument must be a torch.nn.Module, not list.\nGive it the model: stretto.attach(model)",
    ),
    (
        lambda: attach(transport=3),
        'attach: transport=3 is not known: use one of "auto", "shared_memory", "process_group", or an instance of a '
        "subclass of stretto.transport.Transport",
    ),
    (
        lambda: attach(transport="gloo"),
        'attach: transport=\'gloo\' is not known: use one of "auto", "shared_memory", "process_group", or an '
        "instance of a subclass of stretto.transport.Transport; "
        'Gloo and NCCL come with the process group, "process_group"',
    ),
    (
        lambda: attach(reduce_dtype={3: torch.float32}),
        "reduce_dtype names 3, which is not a name.\nGive names, or patterns of names, of module.named_parameters().",
    ),
    (
        lambda: stretto.attach(torch.nn.Linear(2, 2, device="meta")),
        "attach: weight, bias are on the meta device, which holds no values.\n"
        "Give them values before stretto.attach(model), for example with model.to_empty(device=...) and an "
        "initialisation, or leave them out with ignore=.",
    ),
    (
        lambda: stretto.attach(of_other_gradients()),
        "attach: weight (torch.float64) are to have gradients of another dtype than their own, which cannot lie in a "
        "bucket.\nLeave grad_dtype of parameters alone. To sum in another dtype give reduce_dtype=.",
    ),
    (
        lambda: setattr(attach(), "buffers", "all"),
        'buffers=\'all\' is not known: use one of "rank0", "mean", "none"',
    ),
    (
        lambda: setattr(attach(weighted=True), "weight", "many"),
        "rank 0: weight='many' must be between 0 and 2**31.\n"
        "Set it to this rank's number of samples or tokens in the batch.",
    ),
    (
        lambda: stretto.shard(torch.optim.SGD(model().parameters()), attach(), keep_grads="no"),
        "shard: keep_grads='no' must be True or False",
    ),
    (
        lambda: Events(2).add(3),
        "rank 2: observe() was given 3, which has no method named after an event.\n"
        "Give it methods of stretto.events.Observer, such as pass_settled(self, pass_number).",
    ),
    (lambda: stretto.reduce([None, 1.0]), "reduce: item 1 is a float; give dense floating tensors"),
    (
        lambda: stretto.reduce(torch.nn.Linear(1, 1)),
        "reduce: item 0 is a Linear; give dense floating tensors, such as [p.grad for p in model.parameters()]",
    ),
    *(
        (
            functools.partial(stretto.reduce, [torch.ones(2)], transport=given),
            f"reduce: transport={given!r} must be an instance of a subclass of stretto.transport.Transport.\n"
            "Leave it out: then the process group carries the tensors.",
        )
        for given in ("shared_memory", 3, "", False)
    ),
    (
        lambda: stretto.reduce([torch.ones(2)], transport=object.__new__(LocalTransport)),
        "reduce: transport=LocalTransport(...) lacks name, rank, world_size, bucket_cap_bytes, "
        "last_bucket_cap_bytes.\n"
        "Set what is missing in LocalTransport.__init__: stretto.transport.Transport says what each is.",
    ),
    (lambda: stretto.reduce(None), "reduce: None was given; give dense floating tensors"),
    (lambda: attach(check_every=float("inf")), "check_every=inf must be a number of passes, 0 for never, or None"),
    (lambda: attach(check_every=float("nan")), "check_every=nan must be a number of passes, 0 for never, or None"),
    (lambda: attach(check_every=1.5), "check_every=1.5 must be a number of passes, 0 for never, or None"),
    (
        lambda: plan_buckets([spec()], cap_bytes=-4),
        "bucket caps must be positive, got cap_bytes=-4, last_cap_bytes=-1",
    ),
    (lambda: attach().register_comm_hook(None, 3), "Communication hook must be callable, got 3"),
    (
        lambda: setattr(attach(), "weight", 2),
        "rank 0: weight=2 has no effect on a model that was attached without weights.\n"
        "Use stretto.attach(model, weighted=True).",
    ),
    (
        lambda: setattr(attach(weighted=True), "weight", -2),
        "rank 0: weight=-2 must be between 0 and 2**31.\n"
        "Set it to this rank's number of samples or tokens in the batch.",
    ),
    (
        lambda: attach(reduce="sum").register_comm_hook(None, identity),
        "rank 0: a comm hook does its own scaling, so reduce=, weighted= and predivide_factor= of attach() have no "
        "effect with one.\nLeave them out, or leave out the hook.",
    ),
    (lambda: stretto.reduce([], op="max"), 'reduce: op=\'max\' is not known: use one of "mean", "sum"'),
    (
        lambda: stretto.reduce([], bucket_cap_mb="10 MB"),
        "reduce: bucket_cap_mb='10 MB' must be a positive number",
    ),
    (lambda: stretto.reduce([], bucket_cap_mb=-1), "reduce: bucket_cap_mb=-1 must be a positive number"),
    (lambda: stretto.reduce([], bucket_cap_mb=None), "reduce: bucket_cap_mb=None must be a positive number"),
    (
        lambda: stretto.reduce([torch.ones(2), torch.ones(2, dtype=torch.int64)]),
        "reduce: tensor 1 is torch.int64: give one of a floating dtype that can be added, tensor.float()",
    ),
    (
        lambda: ProcessGroupTransport(torch.distributed.GroupMember.NON_GROUP_MEMBER),
        "this rank is not in process_group=: call attach only on the ranks that are",
    ),
    (ProcessGroupTransport, "there is no process group: call torch.distributed.init_process_group() before"),
    (
        lambda: ProcessGroupTransport(3),
        "process_group= takes what torch.distributed.new_group() returns, not int",
    ),
    (
        lambda: ProcessGroupTransport(DeviceMesh.__new__(DeviceMesh)),
        "process_group= takes what torch.distributed.new_group() returns, not DeviceMesh.\n"
        'Write mesh["dp"].get_group(), with the name of the dimension that is averaged over.',
    ),
    (
        lambda: RoundRobinTransport([LocalGroup(2).transport(0), LocalGroup(3).transport(0)]),
        "process_groups must hold the same ranks in the same order, got (rank, size) [(0, 2), (0, 3)].\n"
        "Make each of them with torch.distributed.new_group(ranks), with the same ranks.",
    ),
    (
        lambda: stretto.reduce([torch.ones(2).to_sparse()]),
        "reduce: tensor 0 is torch.sparse_coo: give a dense one, tensor.to_dense()",
    ),
    (lambda: attach(last_bucket_cap_mb=-1), "last_bucket_cap_mb=-1 must be 0 or a positive number, or None"),
    # Plans
    (
        lambda: plan_buckets([spec()], cap_bytes=1, order=[0, 0]),
        "order must name each of the 1 parameters once, got 2 indices",
    ),
    (lambda: replace(PLAN, buckets=PLAN.buckets[:1]), "a bucket plan must hold every parameter exactly once"),
    (
        lambda: replace(PLAN, buckets=(BucketSpec((0, 1), torch.float32, "cpu"),)),
        "bucket 0 must hold parameters of one dtype and device, and at least one",
    ),
    (
        lambda: BucketPlan.from_json(PLAN.to_json().replace('"version": 1', '"version": 7')),
        "this is a plan of version 7; this stretto reads version 1",
    ),
    (lambda: BucketPlan.from_json("{}"), "not a bucket plan in JSON: KeyError: 'version'"),
    (lambda: plan_buckets([spec()], cut_after=[7]), "cut_after must be indices of parameters, got [7]"),
    (lambda: BucketPlan.from_json(CUT), "cut_after must be indices of parameters, got ['a']"),
    (lambda: spec(device=3), "parameter w: device 3 must be a string, such as 'cpu' or 'cuda'"),
    (lambda: dtype_of("nn"), "'nn' is not a torch dtype"),
    (lambda: spec(shape=(-2,)), "parameter 'w' cannot have shape (-2,) and strides (1,)"),
    (lambda: spec(strides=(1, 1)), "parameter w: shape (2,) and strides (1, 1) differ in length"),
    # The drop-in
    (
        lambda: with_a_mesh(process_group=3),
        "Cannot specify both process_group and device_mesh arguments.\nLeave one of them out.",
    ),
    (
        lambda: stretto.DistributedDataParallel(model(), process_group=3, process_groups=[4]),
        "Cannot specify both process_group and process_groups.\nLeave one of them out.",
    ),
    (
        lambda: stretto.attach(model(), process_group=3, process_groups=[4]),
        "process_group= and process_groups= each say what carries the gradients: leave out all but one",
    ),
    (
        lambda: stretto.reduce([torch.ones(1)], transport=LocalGroup(1).transport(0), process_group=3),
        "transport= and process_group= each say what carries the gradients: leave out all but one",
    ),
    (
        lambda: with_a_mesh(2),
        "Only 1D device mesh is supported, but got Mesh(ndim=2).\nGive one of its dimensions' group.",
    ),
    (
        lambda: DDP(model(), mixed_precision=1),
        "DistributedDataParallel: mixed_precision=1 must be a torch.nn.parallel.distributed._MixedPrecision, or None.\n"
        "For one dtype: _MixedPrecision(param_dtype=...).",
    ),
    (
        lambda: DDP(model(), param_to_hook_all_reduce=1),
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.\n"
        "Leave both out: they have no effect here.",
    ),
    (
        lambda: DDP(torch.nn.Tanh()),
        "DistributedDataParallel is not needed: the module has no parameter to reduce.\n"
        "Wrap the module that is trained, and use this one as it is.",
    ),
    (
        lambda: DDP(model(), device_ids=[0, 1]),
        "device_ids can only be None or contain a single element, got [0, 1].\nStart one process for each device.",
    ),
    (
        on_two_kinds_of_device,
        "the module's parameters must be on one type of device, but are on ['cpu', 'meta'].\n"
        "Call module.to(device) before wrapping it.",
    ),
    (
        lambda: DDP(model(), device_ids=[0]),
        "device_ids=[0] and output_device=None only make sense for a module on one accelerator, but its parameters "
        "are on ['cpu']: leave both out.",
    ),
    (
        lambda: DDP(model())._ddp_init_helper(),
        "DistributedDataParallel._ddp_init_helper is not supported by stretto: it builds torch's reducer; wrap the "
        "module again instead.",
    ),
    (
        lambda: ReducerFace(DDP(model())).get_backward_stats,
        "DistributedDataParallel.reducer.get_backward_stats is not supported by stretto: observe passes with "
        "DistributedDataParallel.synchronizer.observe.",
    ),
    (member_of_a_gone_wrapper, "this reducer's DistributedDataParallel is gone"),
]


@pytest.mark.parametrize("trigger, text", ALONE, ids=[text[:30] for _, text in ALONE])
def test_text_of_what_is_refused_at_once(trigger, text: str) -> None:
    with pytest.raises((stretto.StrettoError, TypeError)) as caught:
        trigger()
    assert str(caught.value) == text


def destroyed_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = ProcessGroupTransport()
    dist.destroy_process_group()
    transport.all_reduce(torch.ones(1))


def hook_registered_twice(transport: LocalTransport) -> None:
    sync = stretto.attach(model(), transport=transport)
    sync.register_comm_hook(None, identity)
    sync.register_comm_hook(None, identity)


def who_used_what_beside_noop_hook(transport: LocalTransport) -> None:
    sync = stretto.attach(model(), transport=transport)
    sync.register_comm_hook(None, noop_hook)
    print(sync.used_by)


def hooked(hook: object) -> Callable[[LocalTransport], None]:
    def worker(transport: LocalTransport) -> None:
        module = model()
        stretto.attach(module, transport=transport).register_comm_hook(None, hook)
        module(torch.ones(1, 2)).sum().backward()

    return worker


def gives_a_tensor(state: object, bucket: object) -> torch.Tensor:
    return bucket.buffer()


def resizes(state: object, bucket: object) -> torch.futures.Future:
    bucket.buffer().resize_(bucket.buffer().numel() + 1)
    return identity(state, bucket)


def overruns(state: object, bucket: object) -> torch.futures.Future:
    numel = bucket.buffer().numel()
    bucket.buffer().resize_(numel + 1).fill_(3)[numel:].fill_(7)
    bucket.buffer().resize_(numel)
    return identity(state, bucket)


def gives_nothing(state: object, bucket: object) -> torch.futures.Future:
    return identity(state, bucket).then(lambda done: None)


@pytest.mark.parametrize(
    "hook, text",
    [
        (
            lambda bucket: None,
            "comm hook test_messages.<lambda> cannot be called as hook(state, bucket): too many positional arguments.\n"
            "Call register_comm_hook(state, hook): the hook gets that state and a bucket.",
        ),
        (
            gives_a_tensor,
            "comm hook test_messages.gives_a_tensor returned a Tensor, not a torch.futures.Future of the reduced flat "
            "tensor.\nReturn the future of the collective, dist.all_reduce(tensor, async_op=True).get_future(); or one "
            "that is done: future = torch.futures.Future(); future.set_result(tensor).",
        ),
        (
            resizes,
            "comm hook test_messages.resizes has resized bucket.buffer() in place, from 13 elements to 14.\n"
            "It is a part of what ranks send each other: resize a copy, bucket.buffer().clone(), and let the future "
            "have as many elements as there were.",
        ),
        (
            overruns,
            "comm hook test_messages.overruns has resized bucket.buffer() in place and back, and written behind it.\n"
            "It is a part of what ranks send each other: resize a copy, bucket.buffer().clone(), and let the future "
            "have as many elements as there were.",
        ),
        (
            lambda state, bucket: identity(state, bucket).then(lambda done: []),
            "the comm hook's future holds a list in place of the reduced flat tensor.\n"
            "Let its last callback return that tensor.",
        ),
        (
            gives_nothing,
            "the comm hook's future holds a NoneType in place of the reduced flat tensor.\n"
            "Let its last callback return that tensor.",
        ),
    ],
)
def test_text_of_hooks_that_do_not_keep_the_contract(hook, text: str) -> None:
    def worker(transport):
        with pytest.raises((TypeError, ValueError)) as caught:
            hooked(hook)(transport)
        return str(caught.value)

    assert run_ranks(worker, 2) == [text, text]


def test_a_hook_that_overruns_a_bucket_is_refused_before_the_next() -> None:
    def first_alone(state: object, bucket: object) -> torch.futures.Future:
        return (identity if bucket.index() else overruns)(state, bucket)

    def worker(transport):
        module = torch.nn.Linear(3, 4)
        stretto.attach(module, transport=transport, bucket_cap_mb=1e-5).register_comm_hook(None, first_alone)
        with pytest.raises(ValueError, match="in place and back, and written behind it"):
            module(torch.ones(1, 3)).sum().backward()
        return True

    assert run_ranks(worker, 2) == [True, True]


def test_a_hook_counts_by_what_it_takes_and_not_by_what_it_wraps() -> None:
    def wrapped(state: object, bucket: object, log: object) -> torch.futures.Future:
        return identity(state, bucket)

    @functools.wraps(wrapped)
    def hook(state: object, bucket: object) -> torch.futures.Future:
        return wrapped(state, bucket, print)

    run_ranks(hooked(hook), 2)


class Broken(RecordingTransport):
    """Its works are its own, and take no timeout."""

    def __init__(self, inner: LocalTransport) -> None:
        super().__init__(inner)
        self.store = None  # so that ranks cannot look where the others are, which differs from run to run
        self.breaks = False

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        work = self.inner.all_reduce(tensor)
        work.wait()
        return self if self.breaks else work

    def wait(self) -> None:
        raise RuntimeError("connection reset")


def broken_link(transport: LocalTransport) -> None:
    module, link = model(), Broken(transport)
    stretto.attach(module, transport=link)
    link.breaks = True
    module(torch.ones(1, 2)).sum().backward()


ON_RANKS = [
    (
        hook_registered_twice,
        f"rank 0: a comm hook is registered already ({identity!r}).\n"
        "Detach and attach again to use another one: sync.detach(); sync = stretto.attach(model)",
    ),
    (
        who_used_what_beside_noop_hook,
        "rank 0, before pass 1: with torch's noop_hook, which communicates nothing, it is not known which ranks used "
        "which parameters.\nUse another hook, or none, or look at .grad on each rank.",
    ),
    (
        broken_link,
        "rank 0, pass 1: bucket 0 (1.bias, 1.weight, 0.bias, 0.weight) could not be reduced over local (threads of one "
        "process): connection reset\n"
        "Expected every rank to call backward for this pass. Look at the first error in the other ranks' logs.",
    ),
]


def test_text_of_parameters_that_are_to_be_clipped() -> None:
    def worker(transport):
        module = model()
        sync = stretto.attach(module, transport=transport)
        with pytest.raises(TypeError) as caught:
            sync.clip_grad_norm_(module.parameters(), 1.0)
        return str(caught.value)

    assert run_ranks(worker, 2) == 2 * [
        "clip_grad_norm_: max_norm must be a number, not generator.\n"
        "It clips all parameters of the attached module, so do not pass them: sync.clip_grad_norm_(1.0)"
    ]


@pytest.mark.parametrize("trigger, text", ON_RANKS, ids=[trigger.__name__ for trigger, _ in ON_RANKS])
def test_text_on_each_rank(trigger, text: str) -> None:
    def worker(transport):
        with pytest.raises(stretto.StrettoError) as caught:
            trigger(transport)
        return str(caught.value)

    assert run_ranks(worker, 2) == [text, text.replace("rank 0", "rank 1")]


def test_text_of_a_group_that_is_gone() -> None:
    with pytest.raises(stretto.CommunicationError) as caught:
        destroyed_group()
    assert str(caught.value) == (
        "rank 0: the process group was destroyed while a model is attached to it.\n"
        "Call detach() on the handle first, or dist.destroy_process_group() after the last backward."
    )


class Careless:
    def pass_settled(self, pass_number: int) -> None:
        raise KeyError(pass_number)

    def __repr__(self) -> str:
        return "Careless()"


def test_text_of_an_observer_that_raises(caplog) -> None:
    def worker(transport):
        module = model()
        sync = stretto.attach(module, transport=transport)
        if transport.rank == 1:
            sync.observe(Careless())
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()

    with caplog.at_level(logging.DEBUG, "stretto"):
        run_ranks(worker, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1, pass 1: observer Careless() raised an exception and was removed; training goes on.\n"
        "Fix it and pass it to sync.observe(...) again."
    ]


# Of the tools for tests


def die(rank: int) -> None:
    """Leave when both have connected: a rank that is still connecting to one that left has a traceback to tell."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {rank}", "")
    store.wait(["here 0", "here 1"])
    os._exit(3)


def test_text_of_ranks_that_do_not_come_or_do_not_end() -> None:
    with pytest.raises(RuntimeError) as caught:
        LocalGroup(2, timeout=0.1).transport(0).all_reduce(torch.ones(3)).wait()
    assert str(caught.value) == "all_reduce of 3 x torch.float32: ranks [1] did not make this call within 0 s"
    with pytest.raises(TimeoutError) as caught:
        run_ranks(lambda transport: time.sleep(1), 1, timeout=0.1)
    assert str(caught.value) == "rank 0 did not end within 0 s"


def test_a_rank_that_does_not_end_hides_no_error_of_another() -> None:
    goes_on = threading.Event()

    def worker(transport):
        if transport.rank == 0:
            raise KeyError("first")
        goes_on.wait(60)

    with pytest.raises(TimeoutError) as caught:
        run_ranks(worker, 2, timeout=0.1)
    goes_on.set()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.ranks
def test_text_of_processes_that_do_not_end_or_die() -> None:
    with pytest.raises(TimeoutError) as caught:
        spawn_ranks(die, 2, timeout=0.1)
    assert str(caught.value) == "ranks [0, 1] did not end within 0 s"
    with pytest.raises(RuntimeError) as caught:
        spawn_ranks(die, 2)
    assert str(caught.value) == "ranks died without a traceback, exit codes by rank: {0: 3, 1: 3}"


@pytest.mark.ranks
def test_ranks_end_with_ctrl_c_that_comes_to_their_parent_alone() -> None:
    """As in a notebook: they went on, and the program could not end before them."""
    processes = []

    def started(process: BaseProcess) -> None:
        processes.append(process)
        if len(processes) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(die, 3, started=started)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def test_text_of_ranks_that_have_gone_apart() -> None:
    found = apart("rank 0, pass 3", (3, 2), {1: (4, 1), 2: (3, 1)}, "rank 0 waits at train.py:9 in fit")
    assert str(found) == (
        "rank 0, pass 3: ranks are out of step, so nobody can complete this.\n"
        f"rank 0 waits at train.py:9 in fit.\n{SAME_CALLS}\n"
        "So far rank 1 has begun 4 passes, rank 2 has begun 3 passes, this rank 3 passes and 1 other call more."
    )


# Every other text has a test that states it whole, wherever that test is

TESTS = Path(__file__).parent
SOURCE = Path(stretto.__file__).parent
MANY = r"(?:.|\n)*"
SAYS = re.compile(r"log\.(info|warning|error|exception)|warnings\.warn|\w+Error")
"""What is called with a text that a program is told, now or when the error is raised."""
BEGINNING = r"(?:stretto: )?(?:rank (?:\d+|\?)(?:, pass (?:\d+|\?))?: )?"


def texts_in(node: ast.expr, named: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """A string as the program has it, with ``?`` for what is filled in; None for anything else.

    Args:
        node: of the program.
        named: strings that have a name in its module.
    """
    if isinstance(node, ast.Name):
        return named.get(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [texts_in(side, named) for side in (node.left, node.right)]
        return "".join("\0" if part is None else part for part in parts)
    return None


def raised() -> dict[str, str]:
    """Where, and the text, of everything that the package raises or logs."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        named = dict[str, str]()
        for one in tree.body:
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                named[one.targets[0].id] = texts_in(one.value, named) or "\0"
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not (isinstance(call, ast.Call) and call.args):
                continue
            if isinstance(node, ast.Raise) or SAYS.fullmatch(ast.unparse(call.func)):
                text = texts_in(call.args[0], named)
                if text and len(text.replace("\0", "")) > 8:
                    found[f"{path.relative_to(SOURCE)}:{call.lineno}"] = re.sub(r"%(?:[srd]|\.\d?f)", "\0", text)
    return found


@functools.cache
def asserted() -> list[str]:
    """Every string in a test."""
    found = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.expr) and (text := texts_in(node)):
                found.add(text.replace("\0", "?").removeprefix("^").removesuffix("$"))  # some are patterns
    return list(found)


RAISED = raised()


@pytest.mark.parametrize("place", RAISED)
def test_each_text_is_stated_whole_by_a_test(place: str) -> None:
    text = RAISED[place]
    pattern = re.compile(BEGINNING + MANY.join(map(re.escape, text.split("\0"))) + "\n?")
    assert any(pattern.fullmatch(one) for one in asserted()), text.replace("\0", "{}")
