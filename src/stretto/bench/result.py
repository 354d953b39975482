"""The result of a comparison: a value, to and from JSON, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..wording import columns, counted
from .contestants import ALONE
from .machine import Machine
from .models import title_of
from .timing import Quartiles


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step, of each contestant in each round: the slower rank's."""

    workload: str
    """As it was asked for."""
    ranks: int
    network: str
    """What is between the ranks, for display."""
    threads: int
    """How many torch may use on each rank."""
    steps: int
    """How many a contestant ran at a time; more if it synchronises less often."""
    machine: Machine
    seconds: Mapping[str, Sequence[float]]
    """By contestant, round by round."""
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """For contestants with variants: the one chosen in a short run."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """By contestant that could not run: why."""
    about_batch: str = ""
    """A sentence, if the batch is not the user's own."""

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len(self.seconds[ALONE])

    def spread(self, name: str) -> Quartiles:
        """Seconds of a step."""
        return Quartiles.of(self.seconds[name])

    def ratio(self, name: str, to: str = ALONE) -> Quartiles:
        """The ratios to another contestant's steps of the same rounds."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=True)
        return Quartiles.of([one / base for one, base in pairs])

    def to_dict(self) -> dict[str, Any]:
        """For JSON; seconds. ``summary`` follows from the rest."""
        summary = {name: {"seconds": vars(self.spread(name)), "ratio": vars(self.ratio(name))} for name in self.seconds}
        return vars(self) | {"machine": self.machine.to_dict(), "summary": summary}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Comparison:
        """The reverse."""
        given = {name: one for name, one in value.items() if name != "summary"}
        return cls(**given | {"machine": Machine(**value["machine"])})

    @property
    def title(self) -> str:
        """What was compared, in one line."""
        many = f"{counted(self.ranks, 'ranks')} x {counted(self.threads, 'threads')}"
        return f"{title_of(self.workload)}: {many}, {self.network}"

    @property
    def remarks(self) -> list[str]:
        """What a reader has to know in addition to the figures."""
        found = [f"{name}: {real}, the fastest in a short run before." for name, real in self.stands_for.items()]
        found += [f"{name} did not take part: {reason}" for name, reason in self.skipped.items()]
        found += [self.about_batch] if self.about_batch else []
        if self.ranks * self.threads > self.machine.cores:
            who = "threads" if self.threads > 1 else "ranks"
            count, there = counted(self.ranks * self.threads, who), counted(self.machine.cores, "cores")
            found.append(f"{count} share {there}: times are of {who} that take turns.")
        if "emulated" in self.network:
            found.append("The hosts and the link between them are emulated on one machine (network namespaces, veth).")
        return found

    def rows(self) -> list[list[str]]:
        """Contestant, milliseconds a step, ratio to the step without communication."""
        return [[name, self.spread(name).show(1e-3), self.ratio(name).show()] for name in self.seconds]

    def __str__(self) -> str:
        head = ["SGD step", "ms", f"over {ALONE}"]
        text = columns([head, *self.rows()])
        often = f"{counted(self.rounds, 'rounds')} of {counted(self.steps, 'steps')}"
        end = f"medians [quartiles] of {often}, contestants in turn"
        return "\n".join([self.title, "", text, "", end, *self.remarks, str(self.machine)])


def geometric_mean(comparisons: Sequence[Comparison], name: str) -> float | None:
    """Geometric mean of a contestant's median ratios over workloads; None if it is missing in one."""
    if any(name not in one.seconds for one in comparisons):
        return None
    return statistics.geometric_mean(one.ratio(name).median for one in comparisons)
