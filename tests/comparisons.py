"""Comparisons that nobody has measured, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from stretto.bench import Comparison, Machine

MACHINE = Machine("a processor", 2, "Linux 6", "3.11", "2.13", "0.1", load=0.5, busy=0.02, when="2026-01-01 00:00")


def made_up(seconds: dict[str, list[float]], **changes: Any) -> Comparison:
    return Comparison(**{"workload": "policy", "ranks": 2, "network": "one host", "threads": 1, "steps": 10} | {
        "machine": MACHINE, "seconds": seconds} | changes)  # fmt: skip
