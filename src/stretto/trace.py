"""A trace on disk: one file of JSON lines a rank, each line complete as soon as its pass has settled.

    FOLDER/rank0.jsonl     {"stretto_trace": 1, "rank": 0, ...}      the header, with this rank's clock against rank 0's
    FOLDER/rank1.jsonl     {"plan": {...}, "hash": ...}               before the first pass that uses it
    FOLDER/earlier-1/      {"pass": {"number": 7, ...}}               a PassRecord
                           {"end": "closed", "later": ...}            or what ended it; missing after a kill. The clock
                                                                      once more, where it could be compared

A trace that already lies in the folder is moved aside, into ``earlier-1`` and so on. This includes a trace that another
handle is still writing, which continues there.

A process that is killed leaves whole lines, and at most a part of a last one. Reading leaves out what is missing, cut
off or no part of a trace, with one line that names the file and the line; the folder is refused only if nothing can be
shown. From a long trace, only the last passes are read, if that is asked for. writing.py writes it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .clocks import Clock
from .errors import StrettoError
from .plan import BucketPlan
from .record import PassRecord, is_whole
from .wording import describe_ranks

VERSION = 1
_FILE = re.compile(r"rank(0|[1-9]\d*)\.jsonl")
_PASS = b'{"pass":'
"""How the line of a pass begins: it need not be understood whole to know that it is one."""
_MOST_RANKS = 2**20
"""More than there were ever: a header that speaks of so many is damaged, and each of them would be named as missing."""
_SHOWN = 3
"""So many lines that are no part of a trace are named."""
_NOT_OURS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What a line raises that is no part of a trace: the last, where it is nested very deep."""
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
    """Against rank 0's when it began; None if they could not be compared."""
    versions: Mapping[str, str]
    run: str = ""
    """The same for all ranks of one trace, and for no other trace."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters, and under what other name the module uses them too."""
    kernel: str = ""
    """The same for all ranks that read one clock."""
    devices: tuple[str, ...] = ("cpu",)
    """Kinds of devices on which gradients lie."""
    plans: Mapping[str, BucketPlan] = field(default_factory=dict)
    """By hash."""
    passes: tuple[PassRecord, ...] = ()
    until: int | None = None
    """The number of the last pass in the file, also where that is none of those asked for; None if it has none."""
    end: str | None = None
    """``"closed"``, or the exception that ended it; None if the file ends without a word."""

    later: Clock | None = None
    """Against rank 0's when it ended, where that could be had: clocks drift apart."""

    def at(self, time: int) -> int:
        """A time of this rank by rank 0's clock, in nanoseconds; as it is if the clocks could not be compared."""
        first, last = self.clock, self.later
        if first is None:
            return time
        if last is None or last.at <= first.at:
            return time + first.offset
        return time + first.offset + (last.offset - first.offset) * (time - first.at) // (last.at - first.at)

    @property
    def uncertainty(self) -> int | None:
        """Nanoseconds by which its times may be off from rank 0's; None if that is not known."""
        if self.clock is None:
            return None
        ends = [self.passes[0].began, self.passes[-1].settled] if self.passes else [self.clock.at]
        return max(self.clock.right_to(time, self.later) for time in ends)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Kinds of devices whose work the host does not wait for, so that times are not the device's."""
        return accelerators(self.devices)


def accelerators(devices: Iterable[str]) -> tuple[str, ...]:
    """Those of these kinds of devices that work on their own."""
    return tuple(sorted({*devices} - {"cpu"}))


def files_of(folder: str | os.PathLike[str]) -> list[tuple[Path, int]]:
    """Those of ranks, with the ranks by their names."""
    found = [(path, _FILE.fullmatch(path.name)) for path in Path(folder).glob("rank*.jsonl")]
    return sorted(((path, int(match[1])) for path, match in found if match), key=lambda one: one[1])


def read_trace(
    folder: str | os.PathLike[str], last: int | None = None, tell: Callable[[str], object] = log.warning
) -> list[RankTrace]:
    """What ranks have seen, in rank order. What cannot be read is left out, and told of.

    A last line that was cut off is left out without a word: the trace then has no ``end``.

    Args:
        folder: as given to ``sync.trace``.
        last: only so many passes from the end, counted by what any rank has. Default: all.
        tell: is called with a line for each thing that is left out; default, a warning of the logger ``stretto``.

    Raises:
        TraceError: there is no trace, or nothing in it can be read.
    """
    if Path(folder).is_file():
        raise TraceError(f"{folder}: this is a file; give the folder that was given to sync.trace()")
    if not Path(folder).is_dir():
        raise TraceError(f"{folder}: no such folder")
    files = files_of(folder)
    if not files:
        raise TraceError(f"{folder}: no trace in it (rank0.jsonl, rank1.jsonl, ...)")
    found: list[RankTrace] = []
    problems: list[str] = []
    for path, rank in files:
        try:
            found.append(_File(path, rank, last).read(problems))
        except TraceError as error:
            problems.append(f"{error}: left out")
    if not found:
        raise TraceError(problems[0].removesuffix(": left out"))
    found, others = _of_one_run(found)
    if others:
        problems.append(
            f"{folder}: what {describe_ranks(others)} wrote is from another run than that of rank {found[0].rank}: "
            "left out"
        )
    missing = sorted(set(range(found[0].world_size)) - {rank for _, rank in files})
    if missing:
        problems.append(f"{folder}: no file of {describe_ranks(missing)}; copy those of all ranks into one folder")
    for problem in problems:
        tell(problem)
    return _newest(_clocks_shared(found), last)


def _of_one_run(found: list[RankTrace]) -> tuple[list[RankTrace], list[int]]:
    """Those of the run that has most files, the first of several; and the other ranks."""
    runs = Counter((one.run, one.world_size) for one in found)
    [(most, _)] = runs.most_common(1)
    others = [one.rank for one in found if (one.run, one.world_size) != most]
    return [one for one in found if one.rank not in others], others


def _clocks_shared(found: list[RankTrace]) -> list[RankTrace]:
    """One rank of a host has compared its clock at the end, for all that read the same."""
    later = {one.kernel: one.later for one in found if one.later is not None}
    return [replace(one, later=later.get(one.kernel)) if one.kernel else one for one in found]


def _newest(found: list[RankTrace], number: int | None) -> list[RankTrace]:
    if number is None:
        return found
    wanted = {*sorted({record.number for one in found for record in one.passes})[-number:]}
    return [replace(one, passes=tuple(p for p in one.passes if p.number in wanted)) for one in found]


class _File:
    """One rank's.

    Args:
        path: where it lies.
        rank: whose it is by its name.
        last: only so many passes from the end.
    """

    def __init__(self, path: Path, rank: int, last: int | None) -> None:
        self._path = path
        self._rank = rank
        self._plans: dict[str, BucketPlan] = {}
        self._passes: deque[tuple[int, bytes]] = deque(maxlen=None if last is None else min(last, sys.maxsize))
        self._end: str | None = None
        self._later: Clock | None = None
        self._bad: list[int] = []

    def read(self, problems: list[str]) -> RankTrace:
        """Raises ``TraceError`` if there is no header; what else is wrong is added to ``problems``."""
        try:
            with self._path.open("rb") as file:
                lines = enumerate(_whole(file), 1)
                header = self._header(next(lines, (1, b""))[1])
                for number, line in lines:
                    self._understand(number, line)
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {error}") from error
        passes = self._records()
        if self._bad:
            shown = ", ".join(map(str, sorted(self._bad)[:_SHOWN]))
            more = f" and {len(self._bad) - _SHOWN} more" if len(self._bad) > _SHOWN else ""
            what, verb = ("line", "is") if len(self._bad) == 1 else ("lines", "are")
            problems.append(f"{self._path}: {what} {shown}{more} {verb} not part of a trace: left out")
        until = passes[-1].number if passes else None
        return replace(header, plans=self._plans, passes=passes, until=until, end=self._end, later=self._later)

    def _header(self, line: bytes) -> RankTrace:
        try:
            header = json.loads(line)
            version = header.pop("stretto_trace")
            clock = _clock(header.pop("clock"))
            devices = tuple(header.pop("devices", ("cpu",)))
            trace = RankTrace(**header, clock=clock, devices=devices)
            if not _is_sound(trace):
                raise TypeError(header)
        except _NOT_OURS as error:
            version = _version(line)
            if version == VERSION or version is None:
                what = "line 1 is not part of a trace" if line.strip() else "is empty"
                raise TraceError(f"{self._path}: {what}") from error
        if version != VERSION:
            raise TraceError(f"{self._path}: written in version {version} of the format, this is version {VERSION}")
        if trace.rank != self._rank:
            raise TraceError(f"{self._path}: says that it is the file of rank {trace.rank}")
        return trace

    def _understand(self, number: int, line: bytes) -> None:
        try:
            if line.startswith(_PASS):
                self._passes.append((number, line))
                return
            value = json.loads(line)
            if "plan" in value:
                self._plans[value["hash"]] = BucketPlan.from_json(json.dumps(value["plan"]))
            else:
                end, self._later = value["end"], _clock(value.get("later"))
                if type(end) is not str:
                    raise TypeError(end)
                self._end = end
        except _NOT_OURS:
            self._bad.append(number)

    def _records(self) -> tuple[PassRecord, ...]:
        records = []
        while self._passes:
            number, line = self._passes.popleft()
            try:
                record = PassRecord.from_dict(json.loads(line)["pass"])
                if not self._fits(record):
                    raise ValueError(record.plan)
                records.append(record)
            except _NOT_OURS:
                self._bad.append(number)
        return tuple(records)

    def _fits(self, record: PassRecord) -> bool:
        """Whether its plan, if that is known, has the buckets that it speaks of."""
        plan = self._plans.get(record.plan)
        buckets = [one.bucket for one in record.launches]
        return min(buckets, default=0) >= 0 and (plan is None or max(buckets, default=-1) < len(plan.buckets))


def _is_sound(header: RankTrace) -> bool:
    """Whether its values are of the kinds that a trace has."""
    tables = [text for table in (header.versions, header.tied) for one in table.items() for text in one]
    texts = (header.transport, header.host, header.run, header.kernel, *header.devices, *tables)
    numbers = (header.rank, header.world_size, header.pid)
    right = all(type(text) is str for text in texts) and all(map(is_whole, numbers))
    return right and 0 <= header.rank < header.world_size < _MOST_RANKS


def _clock(value: Any) -> Clock | None:
    clock = None if value is None else Clock(**value)
    if clock is not None and not all(map(is_whole, (clock.offset, clock.uncertainty, clock.at))):
        raise TypeError(value)
    return clock


def _whole(file: Any) -> Iterator[bytes]:
    """Lines that have an end."""
    return (line for line in file if line.endswith(b"\n"))


def _version(line: bytes) -> Any:
    """Of the format, whatever else the header says."""
    try:
        return json.loads(line)["stretto_trace"]
    except _NOT_OURS:
        return None
