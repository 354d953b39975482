"""``torch.compile`` of a whole step: the compiler listens while backward runs, and must take nothing of ours for it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.reducer import reducer_of
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(100)]
STEPS = 6


class Skips(nn.Sequential):
    """Leaves out another layer in each pass, on each rank."""

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        for number, layer in enumerate(self):
            if number != left_out:
                x = layer(x)
        return x


def build() -> nn.Module:
    torch.manual_seed(1)
    return Skips(*(nn.Linear(4, 4) for _ in range(6)))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.full((2, 4), 0.3 * rank + 0.1 * number + 0.1)


def backward(model: nn.Module, rank: int, number: int, *, steady: bool) -> None:
    left_out = -1 if steady else 1 + (number + 2 * rank) % 4
    model(batch(rank, number), left_out).square().mean().backward()


def mean_over_ranks(model: nn.Module, number: int, *, steady: bool) -> list[torch.Tensor]:
    """By hand, on one process."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(2):
        model.zero_grad()
        backward(model, rank, number, steady=steady)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad / 2
    return sums


def compiled_step(rank: int, backend: str, *, steady: bool) -> None:
    model, alone = build(), build()
    with contextlib.closing(Handle(stretto.attach(model, bucket_cap_mb=1e-4))):
        step = torch.compile(lambda number: backward(model, rank, number, steady=steady), backend=backend)
        for number in range(STEPS):
            model.zero_grad()
            step(number)
            mean = mean_over_ranks(alone, number, steady=steady)
            for parameter, wanted in zip(model.parameters(), mean, strict=True):
                torch.testing.assert_close(parameter.grad, wanted)


class Handle:
    """Detached when it is closed."""

    def __init__(self, sync: stretto.Synchronizer) -> None:
        self.close = sync.detach


def changing(rank: int) -> None:
    compiled_step(rank, "eager", steady=False)


def steady(rank: int) -> None:
    compiled_step(rank, "aot_eager", steady=True)


def sharded(rank: int) -> None:
    """The optimizer's step is in it too."""
    for keep_grads in (True, False):
        sharded_with(rank, keep_grads=keep_grads)
        torch.compiler.reset()


def sharded_with(rank: int, *, keep_grads: bool) -> None:
    model, plain = build(), build()
    sync = stretto.attach(model)
    with contextlib.closing(Handle(sync)):
        optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync, keep_grads=keep_grads)
        beside = torch.optim.AdamW(plain.parameters())

        @torch.compile(backend="eager")
        def step(number: int) -> None:
            optimizer.zero_grad()
            backward(model, rank, number, steady=True)
            sync.clip_grad_norm_(1e6)
            optimizer.step()

        for number in range(STEPS):
            step(number)
            for parameter, mean in zip(plain.parameters(), mean_over_ranks(plain, number, steady=True), strict=True):
                parameter.grad = mean
            beside.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.detach().clone(), other.detach())
        dist.barrier()  # parameters are shared: nobody leaves while another looks


def tensors_reduced(rank: int) -> None:
    @torch.compile(backend="eager")
    def run(values: torch.Tensor) -> torch.Tensor:
        doubled = values * 2
        stretto.reduce([doubled])
        return doubled + 1

    assert run(torch.full((3,), 1.0 + rank)).tolist() == [4.0] * 3


def modules_made(rank: int) -> None:
    """A module is registered in a frame that the compiler was told to pass over, but not what it calls."""
    inner = nn.Linear(4, 4)

    @torch._dynamo.disable(recursive=False)
    def make(x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(torch.compile(inner, backend="eager"))(x)

    @torch.compile(backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return make(x)

    with contextlib.closing(Handle(stretto.attach(build()))):
        assert torch.equal(run(batch(rank, 0)), inner(batch(rank, 0)))


def compiled_autograd(rank: int) -> None:
    import torch._dynamo.compiled_autograd as compiled

    model = build()
    with contextlib.closing(Handle(stretto.attach(model))):
        loss = model(batch(rank, 0), -1).square().mean()
        with pytest.raises(stretto.UnsupportedError) as raised, compiled._enable(torch.compile(backend="eager")):
            loss.backward()
        assert str(raised.value) == (
            f"rank {rank}, before pass 1: this backward is run by torch's compiled autograd, in which gradients cannot "
            "be reduced.\nLeave torch._dynamo.config.compiled_autograd False; torch.compile(model) alone is fine."
        )
        reducer = reducer_of(next(model.parameters()))
        assert reducer is not None and not reducer.queue.peers.seat.in_pass, "what it waits for now is another call"
        backward(model, rank, 0, steady=True)


class Deep(nn.Module):
    """torch's compiler cuts at buckets of more than a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def pieces_of(wrapper: type[nn.Module], *, whole_step: bool) -> list[int]:
    """How many nodes each graph has that the compiler makes of a forward, alone or within a step."""
    found: list[int] = []

    def backend(module: Any, _: Any) -> Any:
        found.append(len(module.graph.nodes))
        return module.forward

    torch.compiler.reset()
    wrapped = wrapper(Deep(), bucket_cap_mb=2)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return wrapped(x).relu()

    call = step if whole_step else torch.compile(wrapped, backend=backend)
    call(torch.ones(2, 512)).sum().backward()
    return found


def cut_at_buckets(_: int) -> None:
    for whole_step in (False, True):
        torchs = pieces_of(nn.parallel.DistributedDataParallel, whole_step=whole_step)
        ours = pieces_of(stretto.DistributedDataParallel, whole_step=whole_step)
        assert ours == torchs and len(ours) > 2, (ours, torchs)


PROGRAMS: list[Callable[[int], None]] = [
    changing,
    steady,
    sharded,
    tensors_reduced,
    modules_made,
    compiled_autograd,
    cut_at_buckets,
]


def all_programs(rank: int) -> dict[str, Any]:
    return {program.__name__: outcome for program in PROGRAMS for outcome in attempt(program, rank)}


def attempt(program: Callable[[int], None], rank: int) -> Iterator[str]:
    torch.compiler.reset()
    try:
        program(rank)
        yield "fine"
    except BaseException as error:  # pytest.fail raises no Exception
        yield f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return spawn_ranks(all_programs, 2, timeout=90)  # at once: importing the compiler costs each process seconds


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_compiled_step(program: str, outcomes) -> None:
    assert [found[program] for found in outcomes] == ["fine"] * 2


def by_default(rank: int, folder: str) -> None:
    """Inductor: of the model in place, before and after it is attached, and of a whole step."""
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{rank}", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for compile_first in (True, False):
        model, alone = build(), build()
        if compile_first:
            model.compile()
        with contextlib.closing(Handle(stretto.attach(model, bucket_cap_mb=1e-4))):
            if not compile_first:
                model.compile()
            for number in range(3):
                model.zero_grad()
                backward(model, rank, number, steady=True)
                mean = mean_over_ranks(alone, number, steady=True)
                for parameter, wanted in zip(model.parameters(), mean, strict=True):
                    torch.testing.assert_close(parameter.grad, wanted)
        torch.compiler.reset()
    compiled_step(rank, "inductor", steady=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler")
def test_the_default_compiler(tmp_path: Path) -> None:
    spawn_ranks(by_default, 2, str(tmp_path), timeout=280)
