"""A trace on disk: one file of JSON lines a rank, each line complete as soon as its pass has settled.

    FOLDER/rank0.jsonl     {"stretto_trace": 1, "rank": 0, ...}      the header, with this rank's clock against rank 0's
    FOLDER/rank1.jsonl     {"plan": {...}, "hash": ...}               before the first pass that uses it
    FOLDER/earlier-1/      {"pass": {...}}                            a PassRecord
                           {"end": "closed"}                          or what ended it; missing after a kill

A trace that lies in the folder already is moved aside, into ``earlier-1`` and so on: also one that another handle is
still writing, which goes on there.

A process that is killed leaves whole lines, and at most a part of a last one, which reading leaves out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from .clocks import Clock
from .errors import StrettoError
from .plan import BucketPlan
from .record import PassRecord

VERSION = 1
_FILE = re.compile(r"rank(\d+)\.jsonl")
log = logging.getLogger("stretto")


class TraceError(StrettoError, ValueError):
    """A trace cannot be written or read. The message is one line."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank has seen."""

    rank: int
    world_size: int
    transport: str
    host: str
    pid: int
    clock: Clock | None
    """Against rank 0's; None if they could not be compared."""
    versions: Mapping[str, str]
    run: str = ""
    """The same for all ranks of one trace, and for no other trace."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters, and under what other name the module uses them too."""
    plans: Mapping[str, BucketPlan] = field(default_factory=dict)
    """By hash."""
    passes: tuple[PassRecord, ...] = ()
    end: str | None = None
    """``"closed"``, or the exception that ended it; None if the file ends without a word."""

    def at(self, time: int) -> int:
        """A time of this rank by rank 0's clock, in nanoseconds."""
        return time + (self.clock.offset if self.clock else 0)


class TraceWriter:
    """Writes one rank's file. Not collective.

    Args:
        folder: is made if it is not there; a file of this rank in it is replaced.
        header: everything that is known at the beginning.

    Raises:
        TraceError: the folder cannot be made, or the file not be written.
    """

    def __init__(self, folder: str | os.PathLike[str], header: RankTrace) -> None:
        path = Path(folder) / f"rank{header.rank}.jsonl"
        self._plans: set[str] = set()
        self._failed = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8")
            kept = {name: value for name, value in asdict(header).items() if name not in ("plans", "passes", "end")}
            try:
                self._write({"stretto_trace": VERSION, **kept})
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.close()
                raise
        except OSError as error:
            raise TraceError(f"the trace cannot be written: {error}") from error

    def keep(self, record: PassRecord, plan: BucketPlan) -> None:
        """One more pass.

        Raises:
            OSError: it cannot be written. Nothing more should be.
        """
        try:
            if record.plan not in self._plans:
                self._plans.add(record.plan)
                self._write({"plan": json.loads(plan.to_json()), "hash": record.plan})
            self._write({"pass": record.to_dict()})
        except OSError as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise

    def close(self, end: str = "closed") -> None:
        """The last line: what ended it, or why it could not be written to the end. Harmless twice; raises nothing."""
        if self._file.closed:
            return
        try:
            self._write({"end": self._failed or end})
        except OSError:  # the file just ends then
            log.warning("the trace in %s ends early: %s", self._file.name, self._failed or end)
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        self._file.flush()


def set_aside(folder: str | os.PathLike[str], rank: int, world_size: int, number: int) -> None:
    """Move files of an earlier trace into ``earlier-number``: this rank's; rank 0 also those of ranks there are not.

    Raises:
        TraceError: they cannot be moved.
    """
    target = Path(folder) / f"earlier-{number}"
    for path, owner in _files(folder):
        if owner == rank or (rank == 0 and owner >= world_size):
            try:
                target.mkdir(exist_ok=True)
                path.replace(target / path.name)
            except OSError as error:
                raise TraceError(f"the earlier trace cannot be moved aside: {error}") from error


def next_aside(folder: str | os.PathLike[str]) -> int:
    """The first number that no earlier trace has."""
    taken = {path.name for path in Path(folder).glob("earlier-*")}
    return next(number for number in itertools.count(1) if f"earlier-{number}" not in taken)


def _files(folder: str | os.PathLike[str]) -> list[tuple[Path, int]]:
    """Those of ranks, with the ranks by their names."""
    found = [(path, _FILE.fullmatch(path.name)) for path in Path(folder).glob("rank*.jsonl")]
    return sorted(((path, int(match[1])) for path, match in found if match), key=lambda one: one[1])


def read_trace(folder: str | os.PathLike[str]) -> list[RankTrace]:
    """What all ranks have seen, in rank order. A last line that was cut off is left out.

    Raises:
        TraceError: there is no trace, a file is none, a rank's file is missing, or they are of different runs.
    """
    if not Path(folder).is_dir():
        raise TraceError(f"{folder}: no such folder")
    found = [_read(path) for path, _ in _files(folder)]
    if not found:
        raise TraceError(f"{folder}: no trace in it (rank0.jsonl, rank1.jsonl, ...)")
    other = [one.rank for one in found if (one.run, one.world_size) != (found[0].run, found[0].world_size)]
    if other:
        raise TraceError(f"{folder}: the files of ranks {other} are of another run than that of rank {found[0].rank}")
    missing = sorted(set(range(found[0].world_size)) - {one.rank for one in found})
    if missing:
        raise TraceError(f"{folder}: the files of ranks {missing} are missing; copy all of them into one folder")
    return found


def _read(path: Path) -> RankTrace:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    whole = [line for line in lines if line.endswith("\n")]
    number = 0
    try:
        header = json.loads(whole[0])
        version = header.pop("stretto_trace")
        if version != VERSION:
            raise TraceError(f"{path}: written in version {version} of the format, this is version {VERSION}")
        plans: dict[str, BucketPlan] = {}
        passes: list[PassRecord] = []
        end: str | None = None
        for number, line in enumerate(whole[1:], 1):  # noqa: B007  (told when one is wrong)
            value = json.loads(line)
            if "plan" in value:
                plans[value["hash"]] = BucketPlan.from_json(json.dumps(value["plan"]))
            elif "pass" in value:
                passes.append(PassRecord.from_dict(value["pass"]))
            else:
                end = str(value["end"])
        clock = header.pop("clock")
        trace = RankTrace(**header, clock=Clock(**clock) if clock else None)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: line {number + 1} is no part of a trace") from error
    return RankTrace(**{**vars(trace), "plans": plans, "passes": tuple(passes), "end": end})


def header_of(
    rank: int, world_size: int, transport: str, clock: Clock | None, run: str, tied: Mapping[str, str]
) -> RankTrace:
    """Of this process."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return RankTrace(rank, world_size, transport, platform.node(), os.getpid(), clock, versions, run, dict(tied))
