"""A trace on its way to disk: see trace.py for what it looks like there."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from .clocks import Clock
from .plan import BucketPlan
from .record import PassRecord
from .trace import VERSION, RankTrace, TraceError, files_of

_AT_THE_END = ("plans", "passes", "until", "end", "later")
"""Facts that are not known yet when the header is written."""
log = logging.getLogger("stretto")


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
        self._failed, self._rank = "", header.rank
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8")
            kept = {name: value for name, value in asdict(header).items() if name not in _AT_THE_END}
            try:
                self._write({"stretto_trace": VERSION, **kept})
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.close()
                raise
        except OSError as error:
            told = f"{os.fspath(folder)!r} is a file; give a folder" if Path(folder).is_file() else str(error)
            raise TraceError(f"the trace cannot be written: {told}") from error

    def keep(self, record: PassRecord, plan: BucketPlan) -> None:
        """One more pass. Where it cannot be written that is told once, and nothing more is kept; training goes on."""
        if self._failed:
            return
        try:
            if record.plan not in self._plans:
                self._plans.add(record.plan)
                self._write({"plan": json.loads(plan.to_json()), "hash": record.plan})
            self._write({"pass": record.to_dict()})
        except OSError as error:
            self._failed = f"{type(error).__name__}: {error}"
            text = "rank %s, pass %s: the trace in %s ends here, training goes on: %s"
            log.warning(text, self._rank, record.number, self._file.name, error.strerror or error)

    def close(self, end: str = "closed", later: Clock | None = None) -> None:
        """The last line: what ended it, or why it could not be written to the end. Harmless twice; raises nothing.

        Args:
            end: ``"closed"``, or the exception.
            later: a second comparison with rank 0's clock.
        """
        if self._file.closed:
            return
        try:
            self._write({"end": self._failed or end, "later": None if later is None else asdict(later)})
        except OSError as error:  # the file just ends then
            if not self._failed:
                text = "rank %s: the end of the trace in %s cannot be written: %s"
                log.warning(text, self._rank, self._file.name, error.strerror or error)
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
    for path, owner in files_of(folder):
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


def header_of(
    rank: int,
    world_size: int,
    transport: str,
    clock: Clock | None,
    run: str,
    tied: Mapping[str, str],
    kernel: str = "",
    devices: Iterable[str] = ("cpu",),
) -> RankTrace:
    """Of this process."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    place = (rank, world_size, transport, platform.node(), os.getpid())
    return RankTrace(*place, clock, versions, run, dict(tied), kernel, tuple(devices))
