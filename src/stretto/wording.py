"""How messages, reports and tables write numbers, sizes, ranks and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

KIB, MIB = 1024, 1024 * 1024
T = TypeVar("T")


def counted(number: int, things: str) -> str:
    """``1 bucket``, ``2 buckets``, ``1 pass``.

    Args:
        number: how many there are.
        things: their word in the plural, which ends in s.
    """
    one = things.removesuffix("es" if things.endswith("sses") else "s")
    return f"{number} {one if number == 1 else things}"


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def ranks_by(brought: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Ranks by what they bring, in the order in which it comes first; given as pairs of both."""
    found: dict[T, list[int]] = {}
    for rank, one in brought:
        found.setdefault(one, []).append(rank)
    return found


def format_bytes(count: float) -> str:
    """``1.5 MB``: bytes for people (1 KB is 1,024 bytes)."""
    for unit in ("B", "KB", "MB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def one_line(text: str) -> str:
    """In one line, with escapes for what terminals obey and what files of text or XML cannot hold."""
    words = " ".join(text.split())
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in words)


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns of text, the first row their heads.

    Args:
        rows: of the same length.
        left: columns that begin at the left; others end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def name_list(names: Iterable[str]) -> str:
    """``a.weight, a.bias (+14 more)``: enough names to find the place, never a screenful."""
    listed, most = list(names), 6
    shown = ", ".join(listed[:most])
    return shown if len(listed) <= most else f"{shown} (+{len(listed) - most} more)"
