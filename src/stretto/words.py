"""The words that ranks say behind the last bucket of a pass, each a number that is summed with it: see footer.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch


class Control(IntEnum):
    """Words after the last bucket's payload; each counts the ranks that say so."""

    GAVE_UP = 0
    """This rank's backward failed; what it sent is not a gradient."""
    WANTS_REPLAN = 1
    """Rank 0 saw gradients arrive in another order than planned."""
    LATE = 2
    """A gradient arrived again after its bucket had left: a second round must follow."""
    ABSENT = 3
    """This rank lacked some gradient."""
    CHANGED = 4
    """The module has other parameters than the plan: see rejoin.py."""
    FAILED_EARLY = 5
    """Forward, or backward before any gradient, has failed here since the last pass, and was caught: see forward.py."""
    MORE_FORWARDS = 6
    """This rank ran forward more often for this pass than for any before."""
    BUFFERS = 7
    """This rank's buffers are not what all had: see buffers.py, [Note: at rest]."""
    WITH_OTHERS = 8
    """One backward has reached handles of other process groups too: see family.py, [Note: other groups]."""
    COMPARES = 9
    """This rank compares its parameters' values with the others': see spot_checks.py."""
    UNATTACHED = 10
    """This rank's program steps parameters that no handle averages: see unattached.py."""
    RAN_OUT = 11
    """This rank gives nothing to this pass: it has no batches any more."""
    HAS_LEFT = 12
    """An exception has left ``Join`` on this rank: see uneven.py, [Note: left]."""
    WEIGHED = 13
    """This rank says of its gradients of the pass before: see same_batches.py."""
    WEIGHT = 14
    """A bit of what they weigh is 1."""


MARKS = 16
"""Words after these, equal on all ranks: see footer.py, [Note: marks]."""
VALUES = 8
"""Words after the marks, equal on all ranks that compare."""
COUNTS = 256
"""Ranks that bfloat16 can count."""
FIRST_MARK = len(Control)
"""The place of the first mark among the words."""
FIRST_VALUE = FIRST_MARK + MARKS
"""And of the first value."""
LENGTH = FIRST_VALUE + VALUES
"""Words in all."""
_SILENCE: Sequence[float] = (0.0,) * LENGTH


def marks_of(key: int) -> list[float]:
    """Bits of a handle's key, see :class:`~stretto.seat.Seat`."""
    return [float(key >> place & 1) for place in range(MARKS)]


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """A tensor's values on the host, and what tells that they are there; None where they were there already."""
    if tensor.is_cpu:
        return tensor, None
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    arrival = torch.Event(tensor.device)
    arrival.record()
    return there, arrival


@dataclass(frozen=True)
class ControlWords:
    """What ranks said in the last bucket of a pass, readable without stopping the host.

    On CPU the words are there. On an accelerator they are on their way to pinned memory, and are read when the next
    pass begins, on all ranks alike.
    """

    words: torch.Tensor | None = None
    """None where nothing was said, or could be."""
    arrival: torch.Event | None = None
    own_failure: bool = False
    """This rank gave up the pass itself and need not be told."""
    were_carried: bool = True
    """Whether ranks could say anything."""
    marks: Sequence[float] = ()
    """What is to be read of these, if something was said."""

    @property
    def all_well(self) -> bool:
        """Whether it is known that no rank had anything to say."""
        return self.words is None and self.were_carried

    @property
    def on_host(self) -> bool:
        """Whether ``read`` returns without waiting for a device."""
        return self.arrival is None

    def read(self) -> Sequence[float]:
        """A count for each word: those of :class:`Control`, marks, values."""
        if self.words is None:
            return _SILENCE
        if self.arrival is not None:
            self.arrival.synchronize()
        return [abs(word) for word in self.words.tolist()]

    @property
    def are_mixed(self) -> bool:
        """Whether they were summed with those of another handle, or with what is no footer at all. Reads them."""
        if self.words is None:
            return False
        said = self.read()[FIRST_MARK:FIRST_VALUE]
        return [min(one, COUNTS) for one in said] != [min(one, COUNTS) for one in self.marks]

    @property
    def decide_nothing(self) -> bool:
        """Whether what came with them is void: the pass was given up, or the module has changed. Reads them."""
        said = self.read()
        return bool(said[Control.GAVE_UP] or said[Control.CHANGED])

    def all_have_noticed(self, world_size: int) -> bool:
        """Whether all ranks with batches say that the module has changed: none has given up the pass. Reads them.

        False where the dtype is too coarse to tell: a rank that took some for all would act without the others.

        Args:
            world_size: how many ranks there are.
        """
        if self.words is None or world_size > 2 / torch.finfo(self.words.dtype).eps:
            return False
        said = self.read()
        return said[Control.CHANGED] >= world_size - said[Control.RAN_OUT]

    def ask_for_second_round(self, *, is_first: bool) -> bool:
        """Whether some rank does; words on their way from an accelerator are waited for in the first pass alone."""
        if self.words is None or not (self.on_host or is_first):
            return False
        said = self.read()
        return bool(said[Control.LATE] and not said[Control.GAVE_UP] and not self.are_mixed)
