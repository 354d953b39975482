"""A rank that waits asks where the others are, and whether that rules out that they come."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

import torch.distributed as dist

from .blame import SAME_BATCHES, SAME_CALLS, apart, crosses, elsewhere
from .channel import Channel
from .notes import Note
from .people import HAS_NOT_COME
from .seat import Answer, Seat
from .whereabouts import IN_TORCHS, others_work, standing

log = logging.getLogger("stretto")

ASK_SECONDS = 5.0
"""How long a rank waits before it asks."""
REPEATS = 6
"""It asks again after so many times as long."""
ALL_ANSWER_SECONDS = 4.0
"""The longest time until all ranks that can answer have answered."""
NOTE_SECONDS = 2.0
"""How long a rank that knows of a failure waits for the words of the one that failed."""


_WAS_NOT_STARTED = (
    "\nAll ranks make this call: look for a condition around it (if rank == 0), for a call of torch.distributed before "
    "it in which another rank waits, or for a rank that was not started."
)
"""Where some have not come, and have no handle."""
_HAS_GONE_ON = (
    "\nAll ranks make this call: look for a loop that another rank has left (fewer batches, or a break of its own), "
    "for a condition around the call (if rank == 0), or for a call of torch.distributed in which it waits first."
)
"""Where some wait in a call of torch's."""


class Inquiry:
    """One, for one wait, repeated ever more rarely: after 5 s, 30 s, 3 minutes, 18 minutes.

    A rank that seems to wait for this one is asked once more after 25 s.

    Args:
        seat: of the handle.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._asked: dict[int, str] | None = None
        self._after = ASK_SECONDS
        self._quoted: set[str] = set()
        self._before: dict[int, Answer] = {}
        """Of ranks that wait in a collective of torch's. They are asked twice, 25 s apart: a rank that came out of it a
        little earlier than another waits for that one in peace."""

    def go_on(self, where: str, channel: Channel, notes: Iterable[Note], waited: float) -> None:
        """Log why the wait lasts, as far as that is known. Does not block.

        Args:
            where: how messages begin.
            channel: to the others.
            notes: of the others, as read so far.
            waited: for so many seconds this rank has waited.

        Raises:
            PeerError: what is awaited will never come.
        """
        for note in notes:
            failed = note.is_early and not note.leaves and note.number == self._seat.passes
            if failed and str(note) not in self._quoted:  # that rank may go on, or end
                self._quoted.add(str(note))
                log.warning(
                    "%s: this rank waits, because %s has failed on another rank.\n  %s", where, note.phase, note
                )
        if (told := self._ask(channel, waited)) is not None:
            who_has_gone_apart(where, self._seat, channel, told)
            now = places(channel, told, waited)
            waiting = {one: answer for one, answer in told.items() if waits_in_torchs(self._seat, channel, one, told)}
            for other, answer in waiting.items():
                # A broadcast may reach a rank by way of another, which is late, when its source has long gone on.
                if all(told[one] == self._before.get(one) for one in ([other] if answer.source is None else told)):
                    raise elsewhere(where, other, now, SAME_BATCHES if self._seat.in_pass else SAME_CALLS)
            self._before = waiting
            if waiting:
                self._after = min(self._after, waited + (REPEATS - 1) * ASK_SECONDS)
            advice = _WAS_NOT_STARTED if HAS_NOT_COME in now else _HAS_GONE_ON if IN_TORCHS in now else ""
            log.warning("%s: %s.%s", where, now, advice)

    def _ask(self, channel: Channel, waited: float) -> dict[int, Answer] | None:
        """Or look for answers; those that there are, once, when all are there or should be."""
        if waited <= self._after:
            return None
        try:
            if self._asked is None:
                self._asked = channel.ask(self._seat.handle)
                return None
            told = channel.heard(self._asked)
        except RuntimeError:  # the store has gone, or is silent: that is told
            told, self._asked = {}, self._asked or {}
        if len(told) < len(self._asked) and waited <= self._after + ALL_ANSWER_SECONDS:
            return None
        self._asked, self._after = None, REPEATS * self._after
        return told


def who_has_gone_apart(where: str, seat: Seat, channel: Channel, told: dict[int, Answer]) -> None:
    """Raise if what is awaited will never come, though all live.

    Args:
        where: how the message begins.
        seat: of the handle.
        channel: to the others.
        told: what they have answered.

    Raises:
        PeerError: some have called other things than this rank.
    """
    progress, pairs = seat.progress, functools.partial(zip, strict=False)
    others = {one: answer.progress for one, answer in told.items() if crosses(pairs(progress, answer.progress))}
    if others:
        raise apart(where, progress, others, places(channel, told))
    mine, ended = channel.beside(), channel.ended()
    for other, answer in told.items():
        known = mine.keys() & answer.beside
        counts = chain.from_iterable(pairs(mine[one], answer.beside[one]) for one in known)
        has_not_come = any(begun > theirs for begun, theirs in pairs(progress, answer.progress))
        # A pass that it is at the end of, and this rank amid: behind what this rank waits for.
        awaits = any(ended[one] < answer.ended[one] for one in known & ended.keys() & answer.ended.keys())
        if crosses(counts) or (has_not_come and awaits):
            raise elsewhere(where, other, places(channel, told))


def waits_in_torchs(seat: Seat, channel: Channel, other: int, told: Mapping[int, Answer]) -> bool:
    """Whether a rank has not come to what this one is in, and waits for it in a collective of torch's."""
    answer = told[other]
    has_not_come = any(begun > theirs for begun, theirs in zip(seat.progress, answer.progress, strict=False))
    awaits = answer.awaited and dist.is_initialized() and dist.get_rank() in answer.awaited
    if awaits and answer.source is not None:
        awaits = answer.source == dist.get_rank() and len(answer.awaited) <= len(told) + 1
    # Another thread may make either call: beside() knows those that are no daemons, on both ranks.
    return bool(has_not_come and awaits and answer.beside and channel.beside()) and not others_work()


def words_of(channel: Channel | None, seat: Seat, ranks: int, phases: Collection[str], *, early: bool) -> list[Note]:
    """What the ranks that failed in this pass told of it, if it arrives soon enough.

    Args:
        channel: to the others, if there is one.
        seat: of the handle.
        ranks: how many.
        phases: in which parts of a step they may have failed.
        early: before the pass began, and not in it.
    """
    if channel is None:
        return []
    until = time.monotonic() + NOTE_SECONDS
    while True:
        channel.read()
        told = [note for note in channel.told(seat) if note.number == seat.passes and note.is_early == early]
        found = {note.rank: note for note in told if note.phase in phases}
        if len(found) >= ranks or time.monotonic() >= until:
            return [found[rank] for rank in sorted(found)]
        time.sleep(0.01)


def where_all_are(channel: Channel | None, handle: str) -> str:
    """As :func:`places`, asked now, for at most 2.5 s; empty if no rank can be asked."""
    return "" if channel is None else places(channel, channel.gather(handle, 2.5))


def places(channel: Channel, told: dict[int, Answer], waited: float | None = None) -> str:
    """Where all are, in a line.

    Args:
        channel: to the others.
        told: what they have answered.
        waited: for so many seconds this rank has waited.
    """
    waits = "waits" if waited is None else f"has waited {waited:.0f} s"
    lines = [f"rank {channel.rank} {waits} {standing(sys._getframe())}"]
    for other in channel.others():
        lines.append(f"rank {other} {told[other].text if other in told else channel.why_silent(other)}")
    if channel.line.is_silent:
        lines.append(f"the process group's store{', which rank 0 has,' * channel.rank_0_has_store()} does not answer")
    return "; ".join(lines)
