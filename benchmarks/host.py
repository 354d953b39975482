"""Ranks of one host: an all-reduce alone, and whole training steps, through shared memory and through Gloo.

    python benchmarks/host.py [sizes] [steps] [ranks] [busy] [--rounds 40] [--json FILE] [--plot FILE]

sizes: an all-reduce of 4 B to 256 MB by stretto, by Gloo on loopback and, where mpi4py is installed, by MPI.
steps: an SGD step over the same step without communication, on seven models, stretto beside torch DDP as tuned, and
       beside what no exact method can do without: ranks that only wait for each other (lockstep), and those that also
       move the bytes once through shared memory (floor; see src/stretto/bench/floor.py).
ranks: the same step with 2, 4 and 8 ranks, whatever the number of cores.
busy:  the same step while other programs compute on the same cores, as workers that load data do.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.bench import Comparison, Contestant, Effort, Quartiles, compare
from stretto.bench.contestants import ALONE, FLOOR, LOCKSTEP, alone, torch_variants
from stretto.bench.plots import check
from stretto.bench.result import geometric_mean
from stretto.transport import ProcessGroupTransport, choose

sys.path.insert(0, str(Path(__file__).parent))
from common import count, ends_well, interleave, machine, output, show_table, spawn, worst_rank
from workloads import WORKLOADS

SIZES = [4, 256, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 100_000_000, 256 << 20]
BLOCK_SECONDS = 0.06
"""Steps are timed in blocks of about this length, since ranks that start together are not what training looks like."""
AGAIN = "no communication, again"


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
    return spawn(sizes_of_rank, 2, largest, rounds, timeout=900)[0]


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
            spread = Quartiles.of(seconds[name])
            ratio = "" if name == "stretto" else f"  {spread.median / best:.1f}x"
            row.append(spread.show(1e-6, 1) + ratio)
        rows.append([*row, f"{int(size) / best / 1e9:.1f}"])
    show_table("All-reduce, two ranks: us, median (and quartiles)", ["size", *names, "stretto, GB/s"], rows)


def plot_sizes(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in next(iter(found.values())):
        spreads = [Quartiles.of(seconds[name]) for seconds in found.values()]
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


TORCH = [one.name for one in torch_variants()]
CONTESTANTS = [
    alone(),
    Contestant(AGAIN, "alone"),
    Contestant(LOCKSTEP, "lockstep"),
    Contestant(FLOOR, "floor"),
    Contestant("stretto", "stretto"),
    Contestant("stretto over Gloo", "stretto", {"transport": "process_group"}),
    *torch_variants(),
]


def best_torch(found: Comparison) -> tuple[str, Quartiles]:
    return min(((name, found.ratio(name)) for name in TORCH if name in found.seconds), key=lambda one: one[1].median)


def ratios(found: Comparison) -> dict[str, dict[str, float]]:
    return {name: vars(found.ratio(name)) for name in found.seconds if name != ALONE}


def run_steps(rounds: int, only: list[str]) -> dict[str, Any]:
    effort = Effort(rounds, float("inf"), BLOCK_SECONDS, warm_up=5)
    runs: dict[str, Comparison] = {}
    for title, source in WORKLOADS.items():
        if not only or any(part in title for part in only):
            runs[title] = compare(source, contestants=CONTESTANTS, effort=effort, progress=True, timeout=900)
    ours = [one.name for one in CONTESTANTS if one.kind != "torch" and one.name != ALONE]
    rows, best = [], {}
    for title, found in runs.items():
        name, best[title] = best_torch(found)
        row = [title, f"{found.spread(ALONE).median * 1e3:.2f}"]
        row += [found.ratio(one).show() if one in found.seconds else "-" for one in ours]
        rows.append([*row, f"{best[title].show()} ({name.removeprefix('torch DDP, ')})"])
    means = {one: geometric_mean([*runs.values()], one) for one in [*ours, *TORCH]}
    means["torch DDP, best"] = statistics.geometric_mean(one.median for one in best.values())
    shown = [f"{means[one]:.3f}" if means[one] else "-" for one in (*ours, "torch DDP, best")]
    rows.append(["geometric mean", "", *shown])
    header = [
        "SGD step, two ranks",
        "ms alone",
        "again",
        "lockstep",
        "floor",
        "stretto",
        "over Gloo",
        "torch DDP, best",
    ]
    show_table("Whole step over the same step without communication: median (and quartiles)", header, rows)
    for reason in sorted({f"{name}: {why}" for one in runs.values() for name, why in one.skipped.items()}):
        print(f"did not take part: {reason}")
    return {title: ratios(found) for title, found in runs.items()} | {"geometric mean": means}


FEW = ["stretto", "stretto over Gloo", "torch DDP, 4 MB"]


def compare_few(title: str, world: int, what: int, rounds: int) -> tuple[list[str], dict[str, dict[str, float]]]:
    """A row of a table, in which ``what`` varies, and the ratios in it."""
    who = [one for one in CONTESTANTS if one.name in (ALONE, *FEW)]
    effort = Effort(rounds, float("inf"), BLOCK_SECONDS, warm_up=5)
    run = compare(WORKLOADS[title], world, contestants=who, effort=effort, progress=True, timeout=900)
    alone_ms = f"{run.spread(ALONE).median * 1e3:.2f}"
    return [title, str(what), alone_ms, *(run.ratio(name).show() for name in FEW)], ratios(run)


def run_busy_table(rounds: int, only: list[str]) -> dict[str, Any]:
    found, rows = {}, []
    titles = "policy, 2 x Linear(64), batch 256", "GPT-2, 4 x 256, batch 2 x 64"
    for title in [one for one in titles if not only or any(part in one for part in only)]:
        for others in (0, 1, 2, 4):
            with contextlib.ExitStack() as beside:
                for _ in range(others):
                    beside.enter_context(_computing())
                row, found[f"{title}, beside {others}"] = compare_few(title, 2, others, rounds)
            rows.append(row)
    header = ["SGD step, two ranks", "other programs", "ms alone", *FEW]
    show_table(f"Beside programs that compute on the same {os.cpu_count()} cores: over the step alone", header, rows)
    return found


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def run_ranks_table(rounds: int) -> dict[str, Any]:
    found, rows = {}, []
    for title in ("100 x Linear(64), batch 32", "GPT-2, 4 x 256, batch 2 x 64"):
        for world in (2, 4, 8):
            row, found[f"{title}, {world} ranks"] = compare_few(title, world, world, rounds)
            rows.append(row)
    header = ["SGD step", "ranks", "ms alone", *FEW]
    show_table(f"More ranks than the {os.cpu_count()} cores: over the step without communication", header, rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["sizes", "steps", "ranks", "busy", []], help="default: all")
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="workloads with one of these in their names")
    parser.add_argument("--largest", type=count, default=SIZES[-1], help="bytes of the largest all-reduce")
    parser.add_argument("--json", type=output)
    parser.add_argument("--plot", type=output, help="of the sizes; needs matplotlib")
    parser.add_argument("--under-mpi", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.under_mpi:
        return under_mpi(options.under_mpi, options.rounds, options.largest)
    if options.largest < SIZES[0]:
        parser.error(f"--largest {options.largest}: the smallest all-reduce is {SIZES[0]} bytes")
    if options.plot:
        check(options.plot)
    parts = options.parts or ["sizes", "steps", "ranks", "busy"]
    found: dict[str, Any] = {"machine": machine()}
    if "sizes" in parts:
        seconds = run_sizes(options.rounds, options.largest)
        show_sizes(seconds)
        found["all-reduce, seconds"] = {
            size: {name: vars(Quartiles.of(times)) for name, times in one.items()} for size, one in seconds.items()
        }
        if options.plot:
            plot_sizes(seconds, options.plot)
    if "steps" in parts:
        found["step ratios"] = run_steps(options.rounds, options.only)
    if "ranks" in parts:
        found["step ratios, many ranks"] = run_ranks_table(max(8, options.rounds // 3))
    if "busy" in parts:
        found["step ratios, busy"] = run_busy_table(max(8, options.rounds // 3), options.only)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    ends_well(main)
