"""What docs/overlap.md and README.md show of examples/overlap.py: measured, drawn, and written between their markers.

python benchmarks/overlap_page.py        # about a minute; on a quiet machine
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from stretto.report import ms
from stretto.sketch import sketch
from stretto.timeline import Timeline

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).parent))  # both have a common.py
import overlap
from common import ends_well, put_into

ROOT = Path(__file__).parent.parent
SIZES = (0.001, 0.07, 0.13, 0.3, 1)


def table(runs: Mapping[str, Timeline]) -> str:
    """Means over the ranks, of the pass that is drawn."""
    rows = ["| run | buckets | on their way | hidden | exposed | a step |", "|---|---|---|---|---|---|"]
    for name, timeline in runs.items():
        records = [one.record for one in timeline.passes]
        hidden, step = (statistics.fmean(map(value, records)) for value in (lambda r: r.hidden, lambda r: r.step))
        cells = [str(len(records[0].launches)), ms(hidden + timeline.exposed), f"{timeline.percent_hidden:.0f} %"]
        rows.append(f"| {name.replace('-', ' ')} | {' | '.join([*cells, ms(timeline.exposed), ms(step)])} |")
    return "\n".join(rows)


def main() -> None:
    page = ROOT / "docs" / "overlap.md"
    runs = overlap.draw(ROOT / "docs" / "pictures")
    put_into(page, "runs", f"{table(runs)}\n")
    put_into(ROOT / "README.md", "sketch", fenced(sketch(runs["overlapped"])))
    lines = []
    for size in SIZES:
        lines.append(overlap.line_of(size))
        print(lines[-1], flush=True)
    put_into(page, "sizes", fenced("\n".join(lines)))


def fenced(text: str) -> str:
    return f"```\n{text}\n```\n"


if __name__ == "__main__":
    ends_well(main)
