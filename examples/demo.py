"""The body of `make demo`: the digits on two processes, once with stretto and once with torch DDP, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.cli.demo import largest_difference
from stretto.cores import threads_per_rank

RANKS = 2
ACCURACY = 0.97
TIMEOUT = 300  # seconds for one run, which takes about ten


def train(reducer: str, results: Path) -> dict[str, Any]:
    """Run examples/digits.py on RANKS processes; what its rank 0 wrote."""
    script, found = Path(__file__).with_name("digits.py"), results / f"{reducer}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, str(script), "--reducer", reducer, "--json", str(found)]
    threads = str(threads_per_rank(RANKS))
    subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, check=True, timeout=TIMEOUT)
    return json.loads(found.read_text())


def comparison(ours: dict[str, Any], theirs: dict[str, Any], difference: float) -> Table:
    table = Table("", "stretto", "torch DDP")
    table.add_row("first loss", *(f"{run['losses'][0]:.6f}" for run in (ours, theirs)))
    table.add_row("last loss", *(f"{run['losses'][-1]:.6f}" for run in (ours, theirs)))
    table.add_row(f"largest difference in {len(ours['losses'])} losses", f"{difference:g}", "")
    table.add_row("test accuracy", *(f"{run['accuracy']:.2%}" for run in (ours, theirs)))
    table.add_row("median time of a step, ms", *(f"{1000 * run['seconds_per_step']:.2f}" for run in (ours, theirs)))
    return table


def main() -> int:
    began = time.perf_counter()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for reducer in ("stretto", "ddp"):
            print(f"Training the digits on {RANKS} processes, gradients averaged by {reducer}:", flush=True)
            try:
                runs[reducer] = train(reducer, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"The run with --reducer {reducer} ended with exit status {error.returncode}.", file=sys.stderr)
                return 1
            except subprocess.TimeoutExpired:
                print(f"The run with --reducer {reducer} was not done after {TIMEOUT} s.", file=sys.stderr)
                return 1
    ours, theirs = runs["stretto"], runs["ddp"]
    difference = largest_difference(ours["losses"], theirs["losses"])
    same, accurate = difference == 0, ours["accuracy"] >= ACCURACY

    print(f"\nThe plan stretto learnt:\n{ours['plan']}\n")
    Console().print(comparison(ours, theirs, difference))
    print("One run of each, one after the other, is only a first look at the times; `make bench` measures properly.\n")

    words = "are the same numbers as" if same else "DIFFER from"
    ratio = ours["seconds_per_step"] / theirs["seconds_per_step"]
    verdict = "at least" if accurate else "NOT"
    print(f"{RANKS} processes trained one model on real digits, each on its part of every batch.")
    print(f"The losses {words} those of torch DDP, at {ratio:.2f} of its time a step.")
    print(f"It reads {ours['accuracy']:.1%} of unseen digits, {verdict} the {ACCURACY:.0%} promised.", end=" ")
    print(f"All this took {time.perf_counter() - began:.0f} s.")
    return 0 if same and accurate else 1


if __name__ == "__main__":
    raise SystemExit(main())
