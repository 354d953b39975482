"""The fair comparison: all contestants in the same processes, in turn, each on a model of its own.

compare ──spawns──> measure on each rank: build all ──> a short run chooses among variants ──> rounds ──> Comparison
"""

from __future__ import annotations

import contextlib
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SetupError
from ..quiet import quietly
from ..terminal import progress as bar
from ..testing import spawn_ranks
from ..testing_network import EmulatedHosts
from ..wording import counted
from .build import Training, build
from .contestants import Contestant, alone, chosen, everybody
from .factory import try_out, workload_of
from .machine import this_machine
from .models import Workload, title_of
from .result import Comparison
from .timing import Effort, interleave, steps_in, worst_rank

Entrants = dict[str, Training]
PRELIMINARY = 4
"""Rounds of the short run that chooses among variants, after one of warm-up."""
UNLIMITED = "unlimited"
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """What ranks are asked to measure."""

    workload: str
    contestants: tuple[Contestant, ...]
    effort: Effort
    threads: int = 1
    progress: bool = False
    begun: str = ""
    """A file that rank 0 makes before its first progress bar, so that the parent stops drawing its own."""


@dataclass(frozen=True)
class Measured:
    """What a rank answers; the same on all."""

    seconds: Mapping[str, Sequence[float]]
    stands_for: Mapping[str, str]
    skipped: Mapping[str, str]
    steps: int


def compare(
    workload: str = "gpt2",
    ranks: int = 2,
    *,
    contestants: Sequence[Contestant] | None = None,
    only: Sequence[str] = (),
    effort: Effort | None = None,
    network: str | None = None,
    threads: int = 1,
    progress: bool = False,
    timeout: float = 600.0,
) -> Comparison:
    """Run all contestants on the same model in ``ranks`` new processes, and return what a step took.

    Args:
        workload: a built-in one, or ``script.py:factory``: see factory.py.
        ranks: processes.
        contestants: default, all that make sense; the first one without communication is the yardstick.
        only: of these, only those with one of the texts in their names.
        effort: how long to measure.
        network: ``"1gbit"`` or another rate that ``tc`` understands, between two emulated hosts; ``"unlimited"`` for
            the link without a limit; default, one host.
        threads: how many torch may use on each rank.
        progress: whether to draw a bar on stderr.
        timeout: seconds after which ranks are killed.

    Raises:
        SetupError: the workload or an option is unusable; the text is for the user.
        OSError: hosts cannot be emulated here; with the reason.
        RuntimeError: a rank failed; with its traceback.
    """
    for name, number in {"ranks": ranks, "threads": threads}.items():
        if number < 1:
            raise SetupError(f"{name}={number} must be 1 or more")
    if network is not None and ranks < 2:
        raise SetupError("a network needs two hosts, so ranks must be 2 or more")
    who = chosen(contestants or everybody(network is not None), only)
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder, contextlib.ExitStack() as waiting:
        waiting.enter_context(bar(f"starting {counted(ranks, 'ranks')}", wanted=progress))
        about_batch = try_out(workload)
        all_of_them = who if who[0].kind == "alone" else (alone(), *who)
        begun = Path(folder, "begun")
        job = Job(workload, all_of_them, effort or Effort(), threads, progress, str(begun))

        def look() -> None:
            if begun.exists():
                waiting.close()
            time.sleep(_LOOK_SECONDS)

        machine = this_machine()
        found = spawn(measure, ranks, job, network=network, timeout=timeout, meanwhile=look)[0]
    told = {"machine": machine, "about_batch": about_batch, **vars(found)}
    return Comparison(workload, ranks, words_for(network), threads, **told)


def spawn(
    worker: Callable[..., Any],
    ranks: int,
    *args: Any,
    network: str | None = None,
    timeout: float = 600.0,
    meanwhile: Callable[[], object] = lambda: time.sleep(_LOOK_SECONDS),
) -> list[Any]:
    """Run ``worker(rank, *args)`` on one host or, with a network, half of the ranks on each of two emulated hosts.

    Ctrl-C ends them.

    Raises:
        OSError: hosts cannot be emulated here.
        RuntimeError: a rank failed.
    """
    if network is None:
        return quietly(spawn_ranks, worker, ranks, *args, timeout=timeout, meanwhile=meanwhile)
    with EmulatedHosts() as hosts:
        if network != UNLIMITED:
            hosts.limit(network)
        sizes = [ranks - ranks // 2, ranks // 2]
        return quietly(hosts.spawn_ranks, worker, sizes, *args, timeout=timeout, meanwhile=meanwhile, end=hosts.close)


def words_for(network: str | None) -> str:
    """For people."""
    if network is None:
        return "one host"
    return "two emulated hosts" if network == UNLIMITED else f"two emulated hosts with {network}/s between them"


# On each rank


def measure(rank: int, job: Job) -> Measured:
    """One rank's part. Collective."""
    torch.set_num_threads(job.threads)
    make = workload_of(job.workload)
    if rank == 0 and job.begun:
        Path(job.begun).touch()
    with bar("making contestants", wanted=rank == 0 and job.progress):
        entrants, skipped = enter([one for one in job.contestants if not one.candidates], make)
    yardstick = next(iter(entrants.values()))
    steps = steps_in(job.effort.block, lambda: yardstick.steps(1))
    stands_for = {}
    for contestant in job.contestants:
        if contestant.candidates:
            best = fastest(contestant, make, steps, job)
            if isinstance(best, str):
                skipped[contestant.name] = best
                continue
            stands_for[contestant.name] = best.name
            more, trouble = enter([replace(best, name=contestant.name)], make)
            entrants, skipped = entrants | more, skipped | trouble
    blocks = in_order(job, entrants, steps)
    gc.collect()
    gc.freeze()
    title = f"{title_of(job.workload)}, {dist.get_world_size()} ranks"
    with letting_go(entrants):
        seconds = run_rounds(blocks, job, job.effort.rounds, title)
    passes = {one.name: in_block(one, steps) for one in job.contestants}
    a_step = {name: [round(s / passes[name], 9) for s in times] for name, times in seconds.items()}
    return Measured(a_step, stands_for, skipped, steps)


def in_order(job: Job, entrants: Entrants, steps: int) -> dict[str, Callable[[], None]]:
    """What each contestant runs in a round, in the order of the tables."""
    there = [one for one in job.contestants if one.name in entrants]
    return {one.name: functools.partial(entrants[one.name].steps, in_block(one, steps)) for one in there}


def in_block(contestant: Contestant, steps: int) -> int:
    """How many passes it makes at a time: ``steps``, or the next lower number that ends with a synchronisation."""
    every = contestant.sync_every
    return max(every, steps // every * every)


def run_rounds(blocks: Mapping[str, Callable[[], object]], job: Job, rounds: int, title: str) -> dict[str, list[float]]:
    """Time them, interleaved; the slower rank's seconds. Collective."""
    warm_up, limit = job.effort.warm_up, job.effort.seconds
    return worst_rank(interleave(blocks, rounds, warm_up, title=title, seconds=limit, watched=job.progress))


def enter(contestants: Sequence[Contestant], make: Callable[[], Workload]) -> tuple[Entrants, dict[str, str]]:
    """Those that can run, after three steps each, and why others cannot. Collective, the same on all ranks."""
    entrants: Entrants = {}
    skipped = {}
    for contestant in contestants:
        training, reason = _try(contestant, make)
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            skipped[contestant.name] = next(filter(None, reasons))
            if contestant.kind == "alone":
                raise RuntimeError(f"the step without communication failed: {skipped[contestant.name]}")
        elif training is not None:
            entrants[contestant.name] = training
    return entrants, skipped


def _try(contestant: Contestant, make: Callable[[], Workload]) -> tuple[Training | None, str]:
    try:
        training = build(contestant, make)
        training.steps(3 * contestant.sync_every)  # torch DDP reports errors of the first step in the second, and so on
        return training, ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def fastest(contestant: Contestant, make: Callable[[], Workload], steps: int, job: Job) -> Contestant | str:
    """The best of its candidates in a short run, or why none can run. Collective, the same on all ranks."""
    entrants, skipped = enter(contestant.candidates, make)
    if not entrants:
        return next(iter(skipped.values()))
    blocks = {name: functools.partial(training.steps, steps) for name, training in entrants.items()}
    with letting_go(entrants):
        short = replace(job, effort=replace(job.effort, warm_up=1))
        rounds = min(PRELIMINARY, job.effort.rounds)
        found = run_rounds(blocks, short, rounds, f"choosing {contestant.name}")
    blocks.clear()
    gc.collect()
    medians = {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    best = min(medians, key=lambda name: medians[name])
    return next(one for one in contestant.candidates if one.name == best)


@contextlib.contextmanager
def letting_go(entrants: Entrants) -> Iterator[None]:
    """Afterwards nothing refers to the process group, so that it can end."""
    try:
        yield
    finally:
        for training in entrants.values():
            training.close()
        entrants.clear()
        gc.collect()
