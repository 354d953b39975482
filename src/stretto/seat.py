"""What a rank counts about one handle, for the ranks that wait for it, and what it answers them."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .notes import Note


def nothing() -> None:
    """For when no other rank needs to be told."""


@dataclass(eq=False)
class Seat:
    """One handle at the channel. It does not know the handle, so that it can tell when that is gone."""

    handle: str = ""
    """The name on which all ranks have agreed, if they have."""
    group: str = ""
    """What messages say of the process group, where its ranks are not those of all: the end of a noun."""
    passes: int = 0
    """How many have begun; others read it."""
    ended: int = 0
    """The number of the last that this rank has come to the end of, where it launches what is left."""
    void: int = 0
    """The number of the last pass that failed on some rank, so that no rank must step."""
    in_pass: bool = False
    """Whether one is under way; else what this rank waits for belongs to another call."""
    thread: int = 0
    """Which began the last; 0 before the first."""
    told: tuple[str, int, str] | None = None
    """Handle, pass and text of the last failure of backward that was told."""
    unsent: list[Note] = field(default_factory=list)
    """Told before the handle had a name."""
    whose: Callable[[], Any] = lambda: None
    """What acts for the handle, while it lives."""
    alarm: Callable[[], None] = nothing
    """Called once a second on the channel's thread: see alarm.py."""
    row: list[Seat] = field(default_factory=list)
    """Of all handles of this process at the channel, in the order in which they joined."""
    attempt: int = 0
    """Which one of this rank to attach that was; 0 until it comes together with the others."""
    meets: bool = False
    """Whether this rank has come together with the others to agree on the name."""
    attached: bool = False
    """Whether this rank has attached."""
    calls: int = 0
    """Collective calls that are no passes and no steps."""
    steps: list[int] = field(default_factory=list)
    """Of each sharded optimizer, in the order in which they were made."""
    sharded: set[int] = field(default_factory=set)
    """Places there of those that are still in use."""
    number: int = field(default_factory=functools.partial(next, itertools.count()))
    """Of all handles of this process, in the order in which they were made."""
    looks_beside: bool = False
    """Whether it compares, or has compared, parameters that are stepped and in no handle: see unattached.py."""
    refused: int = 0
    """How many steps had begun when this rank last refused one, and told so."""
    with_others: bool = False
    """Whether a backward of this rank has reached it together with handles of other process groups."""
    all_know: bool = False
    """Whether all ranks have heard that of some rank."""

    def begins(self, number: int) -> None:
        """A pass."""
        self.passes, self.thread = number, threading.get_ident()

    def when(self, occasion: str) -> str:
        """How messages say at which point of the handle's life something is; ``occasion`` is what it was made for."""
        when = f"pass {self.passes}" if self.passes else "before pass 1" if self.attached else occasion
        return when + self.group

    def kind(self, occasion: str) -> str:
        """What is waited for: a key of ``EXPECTED``."""
        return "pass" if self.in_pass else "call" if self.attached else occasion

    def note(self, rank: int, phase: str, error: str, place: str, *, before: bool) -> Note:
        """Of a failure; ``before`` the next pass has begun."""
        if not before:
            self.told = self.handle, self.passes, error
        return Note(rank, phase, self.handle, self.passes, self.passes + before, error, place)

    def has_refused(self, note: Note) -> bool:
        """Whether this rank has refused the step that the other has, so that both go on, or has not come to it."""
        return 0 < note.refused <= self.refused or note.refused > sum(self.steps)

    @property
    def trying(self) -> int:
        """The attempt to attach that is under way; 0 if none is. It lasts until all ranks know the name."""
        return 0 if self.attached and self.handle else self.attempt

    @property
    def place(self) -> tuple[int, int]:
        """Its place among the handles that have no name yet, and how many these are."""
        nameless = [one for one in self.row if one is self or (one.attached and not one.handle)]
        return nameless.index(self), len(nameless)

    @property
    def key(self) -> int:
        """A number for the handle, the same on all ranks and exact in float64; 0 as long as it has no name."""
        return int(self.handle[:12] or "0", 16)

    @property
    def progress(self) -> list[int]:
        """Counts of what all ranks do in one order: of two ranks one is ahead in all, or they have gone apart."""
        return [self.passes, self.calls, *self.steps]


class Answer(NamedTuple):
    """Where a rank is."""

    text: str
    """The end of a sentence that begins with the rank."""
    progress: list[int]
    """Of its seat; empty if it has none, or none is known."""
    beside: dict[str, list[int]]
    """See :meth:`Channel.beside`."""
    ended: dict[str, int]
    """See :meth:`Channel.ended`."""
    awaited: Sequence[int] = ()
    source: int | None = None
    """See :func:`~stretto.whereabouts.awaited_in_torchs` for both."""
