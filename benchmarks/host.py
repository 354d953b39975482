"""Ranks of one host: an all-reduce alone, and whole training steps, through shared memory and through Gloo.

    python benchmarks/host.py [sizes] [steps] [ranks] [--rounds 40] [--json FILE] [--plot FILE]

sizes: an all-reduce of 4 B to 256 MB by stretto, by Gloo on loopback and, where mpi4py is installed, by MPI.
steps: an SGD step over the same step without communication, on seven models, stretto beside torch DDP as tuned.
ranks: the same step with 2, 4 and 8 ranks, whatever the number of cores.
One thread a rank. Contestants take turns within a round; figures are medians over rounds with quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto.testing import spawn_ranks
from stretto.transport import ProcessGroupTransport, choose

sys.path.insert(0, str(Path(__file__).parent))
from common import Spread, interleave, machine, show_table, worst_rank
from workloads import WORKLOADS

SIZES = [4, 256, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 100_000_000, 256 << 20]
BLOCK_SECONDS = 0.06
"""Steps are timed in blocks of about this length, since ranks that start together are not what training looks like."""
LOCKSTEP = "lockstep alone"
"""No gradients are sent, but ranks wait for each other in every step: what any exact method costs at least."""
TUNED = {
    f"torch DDP, {cap} MB": {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": cap}
    for cap in (1, 4, 10, 25)
}
TUNED["torch DDP, batched copy"] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "batched_grad_copy": True,
    "bucket_cap_mb": 4,
}


# An all-reduce alone


def sizes_of_rank(rank: int, largest: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of one all-reduce, by size and contestant: the slower rank's."""
    torch.set_num_threads(1)
    shared = choose(ProcessGroupTransport(), "shared_memory")
    found = {}
    for size in [size for size in SIZES if size <= largest]:
        repeat = max(1, min(200, (1 << 20) // size))
        mine = shared.allocate(size // 4, torch.float32, torch.device("cpu"))
        plain = torch.zeros(size // 4)
        contestants: dict[str, Callable[[], object]] = {
            "stretto": lambda mine=mine, n=repeat: [shared.all_reduce(mine).wait() for _ in range(n)],
            "Gloo": lambda plain=plain, n=repeat: [dist.all_reduce(plain) for _ in range(max(1, n // 8))],
            "memory traffic": _traffic(size, repeat),
        }
        if (mpi := _mpi()) is not None:
            contestants["MPI"] = lambda plain=plain, n=repeat, mpi=mpi: [_mpi_sum(mpi, plain) for _ in range(n)]
        calls = {"Gloo": max(1, repeat // 8)}
        few = max(5, rounds // (1 + size // (16 << 20)))
        seconds = worst_rank(interleave(contestants, few, 2, title=f"all-reduce of {size} B"))
        found[str(size)] = {name: [s / calls.get(name, repeat) for s in times] for name, times in seconds.items()}
    return found


def _traffic(size: int, repeat: int) -> Callable[[], object]:
    """The memory traffic that an all-reduce of two ranks needs, without meeting anybody: each rank adds half of one
    buffer to half of another and writes the sum to both."""
    first, second = torch.zeros(size // 4), torch.zeros(size // 4)
    half = max(1, size // 8)

    def run() -> None:
        for _ in range(repeat):
            for one, other in zip(first[:half].split(32768), second[:half].split(32768), strict=True):
                torch.add(one, other, out=one)
                other.copy_(one)

    return run


def _mpi() -> Any:
    if "PMI_RANK" not in os.environ:
        return None
    from mpi4py import MPI

    return MPI


def _mpi_sum(mpi: Any, tensor: torch.Tensor) -> None:
    mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, tensor.numpy(), mpi.SUM)


def run_sizes(rounds: int, largest: int) -> dict[str, dict[str, list[float]]]:
    """Under MPI's launcher where there is one, so that MPI can take part."""
    with contextlib.suppress(ImportError), tempfile.TemporaryDirectory() as folder:
        import mpi4py  # noqa: F401

        launcher = Path(sys.executable).with_name("mpiexec")
        command = [str(launcher), "-n", "2", sys.executable, __file__, "--under-mpi", folder]
        command += ["--rounds", str(rounds), "--largest", str(largest)]
        subprocess.run(command, check=True)
        return json.loads((Path(folder) / "found.json").read_text())
    return spawn_ranks(sizes_of_rank, 2, largest, rounds, timeout=900)[0]


def under_mpi(folder: Path, rounds: int, largest: int) -> None:
    rank = int(os.environ["PMI_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = sizes_of_rank(rank, largest, rounds)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    gc.collect()
    dist.destroy_process_group()


def show_sizes(found: dict[str, dict[str, list[float]]]) -> None:
    names = list(next(iter(found.values())))
    rows = []
    for size, seconds in found.items():
        best = statistics.median(seconds["stretto"])
        row = [f"{int(size):,} B"]
        for name in names:
            spread = Spread.of(seconds[name])
            ratio = "" if name == "stretto" else f"  {spread.median / best:.1f}x"
            row.append(spread.show(1e-6, 1) + ratio)
        rows.append([*row, f"{int(size) / best / 1e9:.1f}"])
    show_table("All-reduce, two ranks: us, median (and quartiles)", ["size", *names, "stretto, GB/s"], rows)


def plot_sizes(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in next(iter(found.values())):
        spreads = [Spread.of(seconds[name]) for seconds in found.values()]
        x = [int(size) for size in found]
        axes.plot(x, [s.median * 1e6 for s in spreads], marker="o", markersize=3, label=name)
        axes.fill_between(x, [s.low * 1e6 for s in spreads], [s.high * 1e6 for s in spreads], alpha=0.2)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds", title="All-reduce of two ranks, one host"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


# Whole steps


def block_of(
    model: torch.nn.Module, forward: torch.nn.Module, loss: Any, steps: int, meet: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(forward).backward()
            meet()
            optimizer.step()

    return run


def steps_of_rank(rank: int, workload: str, rounds: int, only: list[str] | None) -> dict[str, list[float]]:
    """Seconds of a step of each contestant in each round: the slower rank's."""
    torch.set_num_threads(1)

    def make() -> Any:
        torch.manual_seed(0)
        return WORKLOADS[workload]()

    model, loss = make()
    once = block_of(model, model, loss, 1)
    for _ in range(5):
        once()
    began = time.perf_counter()
    once()
    steps = torch.tensor([max(1, round(BLOCK_SECONDS / (time.perf_counter() - began)))])
    dist.broadcast(steps, 0)
    contestants = {"no communication": block_of(model, model, loss, int(steps))}
    again, loss = make()
    contestants["no communication, again"] = block_of(again, again, loss, int(steps))
    shared, word = choose(ProcessGroupTransport(), "shared_memory"), torch.zeros(1)
    again, loss = make()
    contestants[LOCKSTEP] = block_of(again, again, loss, int(steps), lambda: shared.all_reduce(word).wait())
    handles = []
    for name, options in ({"stretto": {}, "stretto over Gloo": {"transport": "process_group"}}).items():
        attached, loss = make()
        handles.append(stretto.attach(attached, **options))
        contestants[name] = block_of(attached, attached, loss, int(steps))
    for name, options in TUNED.items():
        if only is None or name in only:
            inner, loss = make()
            contestants[name] = block_of(inner, TorchDDP(inner, **options), loss, int(steps))
    gc.collect()
    gc.freeze()
    seconds = worst_rank(interleave(contestants, rounds, title=f"{workload}, {dist.get_world_size()} ranks"))
    return {name: [s / int(steps) for s in times] for name, times in seconds.items()}


def ratios(seconds: dict[str, list[float]]) -> dict[str, Spread]:
    """To the step without communication in the same round."""
    alone = seconds["no communication"]
    return {
        name: Spread.of([one / base for one, base in zip(times, alone, strict=True)])
        for name, times in seconds.items()
        if name != "no communication"
    }


def best_torch(spreads: dict[str, Spread]) -> tuple[str, Spread]:
    return min(((name, s) for name, s in spreads.items() if name.startswith("torch")), key=lambda pair: pair[1].median)


def run_steps(rounds: int, only: list[str]) -> dict[str, Any]:
    chosen = [name for name in WORKLOADS if not only or any(part in name for part in only)]
    found, rows = {}, []
    for workload in chosen:
        seconds = spawn_ranks(steps_of_rank, 2, workload, rounds, None, timeout=900)[0]
        spreads = ratios(seconds)
        name, torch_best = best_torch(spreads)
        row = [workload, f"{statistics.median(seconds['no communication']) * 1e3:.2f}"]
        for one in ("no communication, again", LOCKSTEP, "stretto", "stretto over Gloo"):
            row.append(spreads[one].show())
        rows.append([*row, f"{torch_best.show()} ({name.removeprefix('torch DDP, ')})"])
        found[workload] = {name: vars(s) for name, s in spreads.items()}
    means = {
        one: statistics.geometric_mean(found[workload][one]["median"] for workload in chosen)
        for one in ("no communication, again", LOCKSTEP, "stretto", "stretto over Gloo")
    }
    best = statistics.geometric_mean(
        min(s["median"] for name, s in found[workload].items() if name.startswith("torch")) for workload in chosen
    )
    rows.append(["geometric mean", "", *(f"{mean:.3f}" for mean in means.values()), f"{best:.3f}"])
    header = ["SGD step, two ranks", "ms alone", "again", "lockstep", "stretto", "over Gloo", "torch DDP, best"]
    show_table("Whole step over the same step without communication: median (and quartiles)", header, rows)
    return found | {"geometric mean": means | {"torch DDP, best": best}}


def run_ranks_table(rounds: int) -> dict[str, Any]:
    found, rows = {}, []
    for workload in ("100 x Linear(64), batch 32", "GPT-2, 4 x 256, batch 2 x 64"):
        for world in (2, 4, 8):
            seconds = spawn_ranks(steps_of_rank, world, workload, rounds, ["torch DDP, 4 MB"], timeout=900)[0]
            spreads = ratios(seconds)
            alone = f"{statistics.median(seconds['no communication']) * 1e3:.2f}"
            row = [workload, str(world), alone, spreads["stretto"].show(), spreads["stretto over Gloo"].show()]
            rows.append([*row, spreads["torch DDP, 4 MB"].show()])
            found[f"{workload}, {world} ranks"] = {name: vars(s) for name, s in spreads.items()}
    header = ["SGD step", "ranks", "ms alone", "stretto", "stretto over Gloo", "torch DDP, 4 MB"]
    show_table(f"More ranks than the {os.cpu_count()} cores: over the step without communication", header, rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["sizes", "steps", "ranks", []], help="default: all three")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="workloads with one of these in their names")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest all-reduce")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of the sizes; needs matplotlib")
    parser.add_argument("--under-mpi", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.under_mpi:
        return under_mpi(options.under_mpi, options.rounds, options.largest)
    parts = options.parts or ["sizes", "steps", "ranks"]
    found: dict[str, Any] = {"machine": machine()}
    if "sizes" in parts:
        seconds = run_sizes(options.rounds, options.largest)
        show_sizes(seconds)
        found["all-reduce, seconds"] = {
            size: {name: vars(Spread.of(times)) for name, times in one.items()} for size, one in seconds.items()
        }
        if options.plot:
            plot_sizes(seconds, options.plot)
    if "steps" in parts:
        found["step ratios"] = run_steps(options.rounds, options.only)
    if "ranks" in parts:
        found["step ratios, many ranks"] = run_ranks_table(max(8, options.rounds // 3))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
