"""A void pass, which a rank has given up: ranks have sent all of it, and are in step, but none is to use its gradients.

To make one of the errors marks the pass as void: a sharded optimizer waits for no step with it. ``stepped_apart`` is
for a rank that is not in step any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .broadcast import CoalescedMessages
from .errors import CommunicationError, PeerError
from .launch import LaunchQueue
from .seat import Seat
from .wording import describe_ranks
from .words import ControlWords

_IN_TIME = "Do not step with these gradients: zero_grad() and go on, on all ranks."
_TOO_LATE = (
    "With gradients on an accelerator, ranks learn of it as the next pass ends. Those that have stepped in between, "
    "with a mean that may be NaN, have another model than the rest: go back to a checkpoint, on all ranks. With "
    "check_every=1 ranks learn of it before the step."
)
_STEPPED_APART = (
    "With gradients on an accelerator, ranks learn of it as the next pass ends. Start again from the last checkpoint, "
    "on all ranks. With check_every=1 they learn of it before the step."
)
_ALL_ALIKE = (
    "With gradients on an accelerator, ranks learn of it as the next pass ends. What they have stepped with in between "
    "was the same on all: zero_grad() and go on, on all ranks."
)
_AGAIN = (
    " A forward that may fail and be tried again on one rank must run inside no_sync() of the handle (a wrapper's "
    ".synchronizer), its backward outside."
)


@dataclass
class GivenUp:
    """What was so when this rank gave up a pass, until the next begins."""

    known: bool
    """Whether the other ranks learn of it at the end of that pass, wherever gradients lie."""
    steps: list[tuple[Seat, list[int]]]
    """How often sharded optimizers had stepped, for each handle that has some."""
    buffers: CoalescedMessages = field(default_factory=CoalescedMessages)
    """Of the module, still under way."""
    _words: ControlWords | None = None

    @property
    def crosses(self) -> bool:
        """Whether there are sharded optimizers, and none has stepped since here: on other ranks they may have."""
        left = [(seat, steps) for seat, steps in self.steps if seat.sharded]
        return bool(left) and all(seat.steps[: len(steps)] == steps for seat, steps in left)

    def outlast(self, wait: Callable[..., ControlWords]) -> ControlWords:
        """Wait until all of it is there, if nobody has yet. Returns what ranks said in it."""
        if self._words is None:
            self._words = wait(self.buffers, release=False)
        return self._words


def given_up(queue: LaunchQueue, ranks: int, *, too_late: bool = False) -> PeerError:
    """So many other ranks gave it up. Quotes them.

    Args:
        queue: knows the pass, and the other ranks.
        ranks: how many.
        too_late: the next pass is about to begin, and the error is to be raised at its end.
    """
    on, told, _ = _told_of(queue, ranks, "backward")
    what = f"backward failed on {on}, so the mean of this pass lacks gradients.\n{told}"
    return _error(queue, what + (_TOO_LATE if too_late else _IN_TIME), can_go_on=not too_late)


def given_up_here(queue: LaunchQueue) -> PeerError:
    """This rank did; the others are about to begin the next one without knowing."""
    return _error(queue, f"backward failed on this rank, so no rank is to step.\n{_TOO_LATE}", can_go_on=False)


def stepped_apart(queue: LaunchQueue) -> CommunicationError:
    """The same where an optimizer is sharded, whose step is collective: the others have sent what belongs to that."""
    what = "backward failed on this rank, so it did not come to the step of a sharded optimizer, as the others may have"
    return CommunicationError(f"{queue.where}: {what}.\n{_STEPPED_APART}")


def begun_anew(queue: LaunchQueue, ranks: int, more: Sequence[int], *, too_late: bool = False) -> PeerError:
    """On so many ranks forward, or the beginning of backward, failed before it; ``more`` often on some of them."""
    on, told, phase = _told_of(queue, ranks, "forward", "backward", early=True)
    if more:
        on = f"{describe_ranks(more)} more often than elsewhere"
    mixes = f"{phase} failed on {on} before this pass and was caught, so this pass may mix batches.\n{told}"
    advice = (_ALL_ALIKE if too_late else _IN_TIME) + ("" if phase == "backward" else _AGAIN)
    return _error(queue, mixes + advice, can_go_on=True)


def _told_of(queue: LaunchQueue, ranks: int, *phases: str, early: bool = False) -> tuple[str, str, str]:
    """What ranks told of a failure, given on how many ranks it happened, and in which part of a step."""
    notes = queue.peers.failures(ranks, phases, early=early)
    on = describe_ranks([note.rank for note in notes]) if len(notes) == ranks else "other ranks"
    told = "".join(f"  {note}\n" for note in notes) or "Their own logs have the error.\n"
    return on, told, " or ".join(phase for phase in phases if phase in {note.phase for note in notes} or not notes)


def _error(queue: LaunchQueue, what: str, *, can_go_on: bool) -> PeerError:
    queue.peers.seat.void = queue.pass_number
    error = PeerError(f"{queue.where}: {what}")
    error.can_go_on = can_go_on
    return error
