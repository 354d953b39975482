"""On a CUDA device, over NCCL and over Gloo. Skipped where there is none.

Where ranks are more than devices they share one, and NCCL, which refuses that on one host, is told of a host for each
rank: its messages go over loopback then. What is sent, in which order and on which stream is what it would be.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, build, gradients, loss, same_bits, state
from models import batch as batch_on_host
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto.testing import spawn_ranks
from stretto.wording import MIB

KIND = "cuda"
WORLD = 2
BACKENDS = ("nccl", "gloo")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def on_devices(work: Callable[..., Any], backend: str, *args: Any) -> list[Any]:
    """What ``work(device, rank, *args)`` returns on each rank of a default group of that backend."""
    return spawn_ranks(_on_device, WORLD, work, backend, *args, timeout=60)


def _on_device(rank: int, work: Callable[..., Any], backend: str, *args: Any) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the same bits in each run
    torch.use_deterministic_algorithms(True)
    if torch.cuda.device_count() < WORLD:
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    store, device = dist.distributed_c10d._get_default_store(), torch.device(KIND, rank % torch.cuda.device_count())
    dist.destroy_process_group()
    torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=WORLD)
    return work(device, rank, *args)


def batch(device: torch.device, name: str, rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch_on_host(name, rank, step)
    return inputs.to(device), targets.to(device)


def model_on(device: torch.device, name: str, rank: int) -> torch.nn.Module:
    return build(name, seed=rank).to(device)


def equal_on_all(tensors: dict[str, torch.Tensor | None]) -> None:
    """Raise unless all ranks have the same bits."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, {name: None if one is None else one.cpu() for name, one in tensors.items()})
    assert not same_bits(everyone[0], everyone[1])


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """What stops the host until the device is done raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Exactness


def train(device: torch.device, rank: int, name: str, module: torch.nn.Module, forward: torch.nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        loss(forward, batch(device, name, rank, step)).backward()
        seen.append(gradients(module))
        equal_on_all(seen[-1])
        optimizer.step()
    return [*seen, state(module)]


def compare_with_torch(device: torch.device, rank: int) -> list[str]:
    """What differs from torch's DDP, whose buckets are others: the sum of two is the same in any order."""
    found = []
    for name in MODELS:
        ours, theirs = (model_on(device, name, rank) for _ in range(2))
        wanted = train(device, rank, name, theirs, TorchDDP(theirs, device_ids=[device.index]))
        for cap in (1 / MIB, 1 / 1024, None):
            ours = model_on(device, name, rank)
            sync = stretto.attach(ours, bucket_cap_mb=cap, last_bucket_cap_mb=cap)
            got = train(device, rank, name, ours, ours)
            for step, (mine, torchs) in enumerate(zip(got, wanted, strict=True)):
                buffers = {one for one, _ in ours.named_buffers()}  # torch's DDP sends them when forward begins
                found += [f"{name}, {cap}, {step}: {one}" for one in same_bits(mine, torchs) if one not in buffers]
            sync.check()
            sync.detach()
    return found


@each_backend
def test_gradients_are_those_of_torch(backend: str) -> None:
    assert on_devices(compare_with_torch, backend) == [[], []]


def train_drop_in(device: torch.device, rank: int) -> tuple[list[float], list[float]]:
    """With autocast, a scaler, batches that come from the host, clipping and gradient accumulation."""
    losses: tuple[list[float], list[float]] = ([], [])
    for kind, told in zip((stretto.DistributedDataParallel, TorchDDP), losses, strict=True):
        model = kind(model_on(device, "cnn", rank), device_ids=[device.index])
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler(KIND)
        for step in range(6):
            for part in range(2):
                inputs, targets = batch_on_host("cnn", rank, 2 * step + part)
                with torch.autocast(KIND, torch.float16), model.no_sync() if not part else contextlib.nullcontext():
                    value = torch.nn.functional.cross_entropy(model(inputs), targets.to(device))
                scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append(value.item())
    return losses


@each_backend
def test_the_drop_in_trains_as_torchs_with_autocast_and_a_scaler(backend: str) -> None:
    for ours, theirs in on_devices(train_drop_in, backend):
        # rank 0's statistics of BatchNorm come at the end of a pass, and not when the next forward begins
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


# Replicas that drift apart


def drift(device: torch.device, rank: int) -> list[str]:
    """With BatchNorm, whose buffers each rank has written when words of the last pass are read in the next one."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stretto").addHandler(handler)
    model = model_on(device, "cnn", rank)
    sync = stretto.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        if step == 6 and rank == 1:
            with torch.no_grad():
                model[7].bias += 1
        if step == 10:
            sync.shadow_pass()
            continue
        optimizer.zero_grad()
        loss(model, batch(device, "cnn", rank, step)).backward()
        optimizer.step()
    return [text.splitlines()[0] for text in told]


@each_backend
def test_ranks_that_drift_apart_are_told(backend: str) -> None:
    """The sample of pass 8 travels in the ninth, whose words are read in the tenth."""
    told = "of BatchNormCnn: the ranks no longer hold the same values of"
    (found,), nothing = on_devices(drift, backend)
    assert nothing == [] and told in found and "7.bias" in found and "running" not in found


# What it costs


class Watcher:
    def __init__(self) -> None:
        self.ready = self.launched_within = self.launched = 0

    def gradient_ready(self, *_: Any) -> None:
        self.ready += 1

    def bucket_launched(self, *_: Any) -> None:
        self.launched += 1

    def backward_ended(self, *_: Any) -> None:
        self.launched_within = self.launched


def steady(device: torch.device, rank: int) -> dict[str, Any]:
    """Four passes, then some in which nothing may stop the host, with memory that stays where it is."""
    torch.manual_seed(rank)
    torch.nn.Linear(256, 256, device=device)(torch.ones(8, 256, device=device)).sum().backward()  # cuBLAS takes its own
    before = torch.cuda.memory_allocated()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)), torch.nn.BatchNorm1d(256)).to(device)
    sync = stretto.attach(model, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 256, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    places = [one.grad.data_ptr() for one in model.parameters()]
    plans, began = sync.statistics.plans, torch.cuda.memory_allocated()
    with no_host_sync() if dist.get_backend() == "nccl" else contextlib.nullcontext():
        for _ in range(6):
            step()
    stayed, grown = [one.grad.data_ptr() for one in model.parameters()] == places, torch.cuda.memory_allocated() - began
    sync.observe(watcher := Watcher())
    step()
    torch.cuda.synchronize()
    memory = (torch.cuda.memory_allocated() - before) / sum(one.numel() * 4 for one in model.parameters())
    return {
        "stayed": stayed, "grown": grown, "plans": sync.statistics.plans - plans, "within": watcher.launched_within,
        "launched": watcher.launched, "buckets": len(sync.plan.buckets), "memory": memory,
    }  # fmt: skip


@each_backend
def test_a_steady_pass_stops_no_host_and_leaves_memory_where_it_is(backend: str) -> None:
    for told in on_devices(steady, backend):
        assert told["stayed"] and told["grown"] == 0 and told["plans"] == 0, told
        assert told["buckets"] > 4 and told["launched"] == told["buckets"] == told["within"] + 1, told
        assert told["memory"] < 2.2, told  # parameters and gradients, each once, and a little


def learn(device: torch.device, rank: int) -> tuple[str, str, list[str]]:
    """Registered in the opposite order of its execution."""
    model = model_on(device, "scrambled", rank)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    first = str(sync.plan)
    for step in range(3):
        loss(model, batch(device, "scrambled", rank, step)).backward()
    learnt = str(sync.plan)
    sync.detach()
    return first, learnt, [name for name, _ in model.named_parameters()]


@each_backend
def test_the_order_is_learnt(backend: str) -> None:
    (first, learnt, _), other = on_devices(learn, backend)
    assert first != learnt and other[:2] == (first, learnt)


# Streams


class Towers(torch.nn.Module):
    """Two parts that run side by side, each on a stream of its own; backward of one is slow."""

    def __init__(self, device: torch.device, streams: bool) -> None:
        super().__init__()
        for name in ("left", "right"):
            layers = (torch.nn.Linear(64, 64, device=device) for _ in range(6))
            self.add_module(name, torch.nn.Sequential(*layers))
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if streams else [None, None]

    def forward(self, x: torch.Tensor, slow: int) -> torch.Tensor:
        main, told = torch.cuda.current_stream(), []
        for place, (tower, stream) in enumerate(zip((self.left, self.right), self.streams, strict=True)):
            if stream is not None:
                stream.wait_stream(main)
            with torch.cuda.stream(stream):
                y = x
                for layer in tower:
                    y = layer(Slow.apply(y, place == slow))
                told.append(y)
        for stream in self.streams:
            if stream is not None:
                main.wait_stream(stream)
        return (told[0] * told[1]).mean()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slow: bool) -> torch.Tensor:
        ctx.slow = slow
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.slow:
            torch.cuda._sleep(20_000_000)
        return gradient.clone(), None


def train_towers(device: torch.device, rank: int, cap: float) -> list[str]:
    found = []
    torch.manual_seed(0)
    model, plain = Towers(device, True), Towers(device, False)
    plain.load_state_dict(model.state_dict())
    theirs = TorchDDP(plain, device_ids=[device.index])
    sync = stretto.attach(model, bucket_cap_mb=cap)
    for turn in range(8):
        x = torch.randn(16, 64, device=device, generator=torch.Generator(device).manual_seed(turn * WORLD + rank))
        for one in (model, plain):
            one.zero_grad()
        model(x, turn % 2).backward()
        garbage = [torch.full((64, 64), float("nan"), device=device) for _ in range(30)]
        theirs(x, 3).backward()
        del garbage
        torch.cuda.synchronize()
        found += [f"pass {turn + 1}: {name}" for name in same_bits(gradients(model), gradients(plain))]
    sync.detach()
    return found


@pytest.mark.parametrize("cap", [1 / 64, 25.0])
@each_backend
@pytest.mark.filterwarnings("ignore")
def test_parts_that_run_on_streams_of_their_own(backend: str, cap: float) -> None:
    assert on_devices(train_towers, backend, cap) == [[], []]


# Two kinds of devices in one model


class TwoDevices(torch.nn.Module):
    """An embedding that is too large for the device, say, and stays in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding, self.mid = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 16, device=device)
        self.back, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        device = self.head.weight.device
        x = torch.tanh(self.mid(self.embedding(tokens).to(device))).cpu()
        return self.head(torch.tanh(self.back(x)).to(device))


def train_two_devices(device: torch.device, rank: int) -> list[str]:
    torch.manual_seed(rank)
    model = TwoDevices(device)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    alone = copy.deepcopy(model)
    wrong = []
    for turn in range(5):
        tokens = [torch.randint(100, (8,), generator=torch.Generator().manual_seed(turn * WORLD + r)) for r in (0, 1)]
        for one in (model, alone):
            one.zero_grad()
        model(tokens[rank]).square().mean().backward()
        (sum(alone(one).square().mean() for one in tokens) / WORLD).backward()
        equal_on_all(gradients(model))
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, gradients(alone)[name])
        wrong += [name for name, one in model.named_parameters() if one.grad.device != one.device]
    sync.check()
    sync.detach()
    return wrong


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "gloo"])
def test_a_model_on_host_and_device(backend: str) -> None:
    assert on_devices(train_two_devices, backend) == [[], []]


# Optimizers in shares


def train_in_shares(device: torch.device, rank: int, kind: str, keep: bool) -> None:
    make: Any = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        # eps: the gradient of a bias that has no effect is noise, and must not become a step of either sign
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
        "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    }[kind]
    model = model_on(device, "transformer", rank)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    plain = copy.deepcopy(model)
    theirs = TorchDDP(plain, device_ids=[device.index])
    whole, optimizer = make(plain.parameters()), stretto.shard(make(model.parameters()), sync, keep_grads=keep)
    for step in range(5):
        data = batch(device, "transformer", rank, step)
        for one in (optimizer, whole):
            one.zero_grad()
        loss(model, data).backward()
        loss(theirs, data).backward()
        mine = sync.clip_grad_norm_(0.5)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(torch.as_tensor(mine).to(norm), norm, rtol=1e-5, atol=1e-6)
        optimizer.step()
        whole.step()
    sync.check()
    equal_on_all(state(model))
    for name, tensor in state(model).items():
        torch.testing.assert_close(tensor, state(plain)[name], rtol=1e-4, atol=1e-5)
    saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, 0)
    for index, entry in whole.state_dict()["state"].items():
        for key, value in entry.items():
            told = saved[0]["state"][index][key]
            torch.testing.assert_close(told, value, rtol=1e-3, atol=1e-5, check_device=False)
    optimizer.load_state_dict(saved[0])
    optimizer.unshard()
    sync.detach()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
@each_backend
def test_an_optimizer_in_shares(backend: str, kind: str, keep: bool) -> None:
    on_devices(train_in_shares, backend, kind, keep)


# Whatever the graph does


class Odd(torch.nn.Module):
    """A part that is not always used, a sparse embedding, a reentrant checkpoint and a weight used twice."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(50, 16, sparse=True, device=device)
        self.twice, self.sometimes, self.inner, self.head = (
            torch.nn.Linear(16, 16, device=device) for _ in range(4)
        )  # fmt: skip

    def forward(self, tokens: torch.Tensor, use: bool) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.rows(tokens))))
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return self.head(self.sometimes(x) if use else x).square().mean()


def train_odd(device: torch.device, rank: int) -> None:
    torch.manual_seed(rank)
    model = Odd(device)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    alone = copy.deepcopy(model)
    for turn in range(6):
        uses = [turn in (2, 3, 5) and rank_ == turn % 2 for rank_ in (0, 1)]
        tokens = [torch.randint(50, (8,), generator=torch.Generator().manual_seed(turn * WORLD + r)) for r in (0, 1)]
        for one in (model, alone):
            one.zero_grad()
        model(tokens[rank].to(device), uses[rank]).backward()
        sum(alone(one.to(device), use) for one, use in zip(tokens, uses, strict=True)).div(WORLD).backward()
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None, f"{turn}: {name}"
                continue
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), msg=f"{turn}: {name}")
        equal_on_all({name: None if g is None else g.to_dense() for name, g in gradients(model).items()})
    sync.check()
    sync.detach()


@each_backend
@pytest.mark.filterwarnings("ignore")
def test_odd_graphs(backend: str) -> None:
    on_devices(train_odd, backend)


def compare_beside(
    device: torch.device, rank: int, ours: torch.nn.Module, theirs: torch.nn.Module, like_torch: int
) -> None:
    """Five passes of both: ranks have the same bits, and in the first ``like_torch`` of them torch's values."""
    for step in range(5):
        data = batch(device, "mlp", rank, step)
        for one in (ours, theirs):
            one.zero_grad()
            loss(one, data).backward()
        equal_on_all(gradients(ours))
        if step < like_torch:
            for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-3, atol=1e-4)


def train_with_hooks(device: torch.device, rank: int, name: str) -> None:
    model = model_on(device, "mlp", rank)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    plain = copy.deepcopy(model)
    theirs = TorchDDP(plain, device_ids=[device.index], bucket_cap_mb=25)
    for one in (sync, theirs):
        hook_state: Any = None
        if name == "power_sgd":
            hook_state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.1)
        hooks = {
            "fp16": default_hooks.fp16_compress_hook,
            "allreduce": default_hooks.allreduce_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
        }
        one.register_comm_hook(hook_state, hooks[name])
    compare_beside(device, rank, model, theirs, like_torch=2 if name == "power_sgd" else 5)
    sync.detach()


@pytest.mark.parametrize("name", ["allreduce", "fp16", "power_sgd"])
@each_backend
@pytest.mark.filterwarnings("ignore")
def test_comm_hooks(backend: str, name: str) -> None:
    on_devices(train_with_hooks, backend, name)


def train_with_options(device: torch.device, rank: int) -> None:
    for options in (
        {"reduce": "sum"}, {"reduce_dtype": torch.bfloat16}, {"weighted": True}, {"predivide_factor": 2.0},
        {"delay": True},
    ):  # fmt: skip
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device)
        sync = stretto.attach(model, bucket_cap_mb=1 / 1024, **options)
        alone = copy.deepcopy(model)
        for turn in range(4):
            inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(turn * WORLD + r)) for r in (0, 1)]
            weights = [1.0 + 2 * r for r in (0, 1)] if "weighted" in options else [1.0, 1.0]
            if "weighted" in options:
                sync.weight = weights[rank]
            for one in (model, alone):
                one.zero_grad()
            model(inputs[rank].to(device)).square().mean().backward()
            total = 1.0 if options.get("reduce") == "sum" else sum(weights)
            for x, weight in zip(inputs, weights, strict=True):
                (alone(x.to(device)).square().mean() * (weight / total)).backward()
            loose = 0.02 if "reduce_dtype" in options else 1e-5
            for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=loose, atol=loose / 10)
        sync.check()
        sync.detach()
    tensors = [torch.full((3,), float(rank), device=device), torch.full((2, 2), 4.0 * rank, device=device)]
    stretto.reduce(tensors)
    assert [one.tolist() for one in tensors] == [[0.5] * 3, [[2.0, 2.0]] * 2]


@each_backend
def test_options(backend: str) -> None:
    on_devices(train_with_options, backend)


def train_compiled(device: torch.device, rank: int) -> None:
    torch.use_deterministic_algorithms(False)
    model = model_on(device, "mlp", rank)
    sync = stretto.attach(model)
    plain = copy.deepcopy(model)
    theirs, compiled = TorchDDP(plain, device_ids=[device.index]), torch.compile(model)
    compare_beside(device, rank, compiled, theirs, like_torch=5)
    sync.detach()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model() -> None:
    on_devices(train_compiled, "nccl")


# When it goes wrong


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad label")


def fail_once(device: torch.device, rank: int) -> tuple[list[str], list[Any]]:
    """Rank 1's backward fails in the third pass; what is said, and where, and the gradients of all passes."""
    model = model_on(device, "mlp", 0)
    sync = stretto.attach(model, bucket_cap_mb=1 / 1024)
    said, seen = [], []
    for turn in range(8):
        model.zero_grad()
        try:
            inputs, targets = batch(device, "mlp", rank, turn)
            first, *rest = model
            x = first(inputs)
            x = Fails.apply(x) if (turn, rank) == (2, 1) else x
            torch.nn.functional.cross_entropy(torch.nn.Sequential(*rest)(x), targets).backward()
        except Exception as error:
            said.append(f"{turn}: {type(error).__name__}: {error}")
        seen.append({name: None if one is None else one.cpu() for name, one in gradients(model).items()})
    sync.check()
    sync.detach()
    return said, seen


@each_backend
def test_a_pass_that_fails_on_one_rank_is_told_on_the_other_and_all_go_on(backend: str) -> None:
    """Over NCCL, where no host waits, it is told as the next pass ends."""
    (told, seen), (own, others) = on_devices(fail_once, backend)
    assert own[0] == "2: ValueError: bad label"
    assert len(told) == 1 and "backward failed on rank 1" in told[0], told
    for turn in {*range(8)} - {2}:
        assert not same_bits(seen[turn], others[turn]), turn


DIES = """
import os, signal, sys, time
import torch, torch.distributed as dist
import stretto

rank, folder = int(sys.argv[1]), sys.argv[2]
os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
sync = stretto.attach(model, bucket_cap_mb=0.01)


def step():
    model(torch.ones(4, 64, device="cuda")).mean().backward()


for _ in range(3):
    step()
torch.cuda.synchronize()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(sys.argv[3]))
for _ in range(2):
    try:
        step()
    except stretto.PeerError as error:
        print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, seconds: float) -> None:
    """By NCCL's own error, at once, or by the thread that looks after it, before the next pass."""
    script = tmp_path / "train.py"
    script.write_text(DIES)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path), str(seconds)], **pipes)
        for rank in (0, 1)
    ]
    try:
        (printed, complaint), _ = (one.communicate(timeout=60) for one in programs)
    finally:
        for one in programs:
            one.kill()
    died = f"rank 1 (pid {programs[1].pid}) died without a word, so nobody can complete this "
    assert died in printed, printed + complaint
    if seconds:
        assert died in complaint and "This rank is at train.py:" in complaint
