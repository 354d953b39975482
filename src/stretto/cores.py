"""How many cores this process may use, and so how many threads a rank gets."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def cores(root: Path = _ROOT) -> int:
    """That this process may use: by its affinity and, in a container, by the time that it is given.

    Args:
        root: where control groups are mounted.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([there, *map(math.ceil, _quotas(root))]))


def threads_per_rank(ranks: int) -> int:
    """So that all add up to the cores that this process may use."""
    return max(1, cores() // ranks)


def _quotas(root: Path) -> list[float]:
    """Of control groups of version 2: this process's own and those above it."""
    path = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "")
    group = root / path.lstrip("/")
    found = []
    for one in (group, *[parent for parent in group.parents if parent.is_relative_to(root)]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = one.joinpath("cpu.max").read_text().split()
            found.append(int(quota) / int(period))  # "max" is no number
    return found
