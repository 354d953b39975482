"""A timeline in a few lines of text, for the terminal.

backward  =====================================
bucket 0        -------
bucket 1                     ------
bucket 2                                 ----###
exposed                                      ######
rank 1    =======================================##
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .record import Launch, PassRecord, Span, merged
from .timeline import RankPass, RankTimeline, Timeline

LEFT = 10
"""Columns for the names of rows, unless one needs more."""
MOST_ROWS = 12
"""With more buckets, a row stands for several neighbours."""


def sketch(timeline: Timeline, width: int = 72, passes: Collection[int] | None = None) -> str:
    """Draw the rank that lost most time to communication, bucket by bucket, and below one line for each other rank.

    Drawn is from forward's end to the end of the pass. ``=`` backward computes, ``-`` a bucket is on its way meanwhile,
    ``#`` it is on its way and nothing is computed. The numbers below are of that rank and that pass.

    Args:
        timeline: of all ranks.
        width: of a line, in columns.
        passes: of which to draw the first; default, the typical one.

    Example::

        print(sketch(timeline_of(read_trace("trace"))))
    """
    shown = timeline.only(passes if passes is None else sorted(passes)[:1])
    drawn = [rank for rank in shown.ranks if rank.passes]
    if not drawn:
        return "\n".join([shown.headline(), *shown.notes()])
    main = max(drawn, key=lambda rank: (rank.passes[0].record.exposed, -rank.rank))
    begin = min(rank.passes[0].record.backward_began for rank in drawn)
    named = [*_rows(main.passes[0]), *(f"rank {rank.rank}" for rank in drawn)]
    scale = _Scale(begin, shown.end, width, max(LEFT, 1 + max(map(len, named))))
    others = [_other(rank, scale) for rank in drawn if rank is not main]
    which = f"rank {main.rank}, " * (shown.world_size > 1) + f"pass {main.passes[0].record.number}"
    lines = [*_rank(main.passes[0], scale), *others, f"{replace(shown, ranks=(main,)).headline()} ({which})"]
    return "\n".join([*lines, *shown.notes()])


class _Scale:
    def __init__(self, begin: int, end: int, width: int, left: int) -> None:
        self._begin = begin
        self._left = left
        self._columns = max(10, width - left)
        self._per_time = self._columns / max(1, end - begin)

    def line(self, name: str, *marks: tuple[str, int, int]) -> str:
        """Later marks are drawn over earlier ones. Whatever is there has a column at least."""
        row: list[str] = []
        for mark, begin, end in marks:
            first, last = (self._column(at) for at in (begin, end))
            row += " " * (max(first + 1, last) - len(row))
            row[first : max(first + 1, last)] = mark * max(1, last - first)
        return f"{name:{self._left - 1}} {''.join(row)}"

    def _column(self, at: int) -> int:
        """Never outside: of a damaged trace times can lie anywhere, and a line would be as long."""
        return min(max(0, round((at - self._begin) * self._per_time)), self._columns)


def _rank(one: RankPass, scale: _Scale) -> list[str]:
    record = one.record
    lines = [scale.line("backward", *_computing(record))]
    for name, few in _rows(one).items():
        lines.append(scale.line(name, *_way(Span(min(o.begin for o in few), max(o.end for o in few)), record)))
    return [*lines, scale.line("exposed", *_waiting(record))]


def _rows(one: RankPass) -> dict[str, Sequence[Launch]]:
    """Buckets by the name of their row."""
    launches = one.record.launches
    together = max(1, -(-len(launches) // MOST_ROWS))
    rows = [launches[first : first + together] for first in range(0, len(launches), together)]
    return {f"bucket {few[0].bucket}" if len(few) == 1 else f"{few[0].bucket} .. {few[-1].bucket}": few for few in rows}


def _computing(record: PassRecord) -> list[tuple[str, int, int]]:
    at, marks = record.backward_began, []
    for wait in merged(record.waits):
        marks.append(("=", at, wait.begin))
        at = wait.end
    return [*marks, ("=", at, record.backward_ended)]


def _waiting(record: PassRecord) -> list[tuple[str, int, int]]:
    amid = [("#", wait.begin, wait.end) for wait in merged(record.waits)]
    return [*amid, ("#", record.backward_ended, record.settled)]


def _way(way: Span, record: PassRecord) -> list[tuple[str, int, int]]:
    cut = min(max(way.begin, record.backward_ended), way.end)
    return [(mark, *span) for mark, span in (("-", (way.begin, cut)), ("#", (cut, way.end))) if span[0] < span[1]]


def _other(rank: RankTimeline, scale: _Scale) -> str:
    record = rank.passes[0].record
    *amid, after = _waiting(record)
    return scale.line(f"rank {rank.rank}", *amid, *_computing(record), after)  # a short wait hides no backward
