"""Figures of the VLDB 2020 paper on DistributedDataParallel, on CPUs: measured, as JSON, as tables and as plots.

    python benchmarks/figures.py all --output docs/benchmarks
    python benchmarks/figures.py sweep skip --rounds 40
    python benchmarks/figures.py all --draw-only

Each figure goes to OUTPUT/name.json and OUTPUT/name.svg, and its table between the markers of the page beside OUTPUT
(docs/benchmarks.md), if that is there. --draw-only makes tables and plots again from the JSON files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from stretto.bench import Effort
from stretto.errors import SetupError

sys.path.insert(0, str(Path(__file__).parent))
from common import count, ends_well, put_into
from paper.breakdown import BREAKDOWN
from paper.contest import CONTEST
from paper.figure import Asked, Data, Figure, comparisons, markdown, save
from paper.network import NETWORK
from paper.ranks import RANKS
from paper.round_robin import ROUND_ROBIN
from paper.skip import SKIP
from paper.sweep import SWEEP

FIGURES = {one.name: one for one in (CONTEST, BREAKDOWN, SWEEP, SKIP, ROUND_ROBIN, RANKS, NETWORK)}
OUTPUT = Path(__file__).parent.parent / "docs" / "benchmarks"
QUICK = Effort(rounds=3, seconds=2.0, block=0.005, warm_up=1)


def measured_before(file: Path) -> Data:
    """Raises SetupError if that is no file of a figure."""
    try:
        found: Data = json.loads(file.read_text())
        comparisons(found)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{file} holds no measurements of a figure") from error
    return found


def one_figure(figure: Figure, asked: Asked, output: Path, page: Path, draw_only: bool) -> None:
    watched = Console(stderr=True)
    began = time.monotonic()
    file = output / f"{figure.name}.json"
    data = measured_before(file) if draw_only else figure.measure(asked)
    save(figure, data, output)
    text = markdown(figure, data)
    Console(width=200).print(Markdown(f"## {figure.title}\n\n{text}"))
    if (output / f"{figure.name}.svg").exists():
        text += f"\n![{figure.title}]({output.name}/{figure.name}.svg)\n"
    where = f" and {page}" if put_into(page, figure.name, text) else ""
    watched.print(f"{figure.name}: {time.monotonic() - began:.0f} s, written to {output}{where}", highlight=False)


def minutes_of(names: Sequence[str]) -> str:
    """What there is still to wait, the figure that begins now first."""
    first, *others = (FIGURES[name].minutes for name in names)
    more = f", about {first + sum(others):g} with all that follow" if others else ""
    return f"about {first:g} minutes on two quiet cores{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", choices=["all", *FIGURES])
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="folder of JSON and SVG files (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=30,
        help="at most; each figure has a limit of time, and runs no fewer than five unless told to (default: 30)",
    )
    parser.add_argument("--quick", action="store_true", help="one tiny model, three rounds: to see that it runs")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing, take the JSON files that are there")
    options = parser.parse_args()
    names = [*FIGURES] if "all" in options.figures else options.figures
    missing = [name for name in names if options.draw_only and not (options.output / f"{name}.json").exists()]
    if missing:
        parser.error(f"--draw-only: {options.output} has no {', '.join(f'{name}.json' for name in missing)}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("plots need matplotlib, which is not installed: pip install matplotlib")
    options.output.mkdir(parents=True, exist_ok=True)  # or fail before anything is measured
    asked = Asked(QUICK if options.quick else Effort(options.rounds, warm_up=2), options.quick)
    page = options.output.with_suffix(".md")
    for number, name in enumerate(names, 1):
        left = "" if options.quick or options.draw_only else f" ({minutes_of(names[number - 1 :])})"
        Console(stderr=True).print(f"figure {number} of {len(names)}: {FIGURES[name].title}{left}", highlight=False)
        one_figure(FIGURES[name], asked, options.output, page, options.draw_only)


if __name__ == "__main__":
    ends_well(main)
