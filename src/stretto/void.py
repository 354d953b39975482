"""The errors of a void pass: ranks have sent all of it, and are in step, but none is to use its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import PeerError
from .launch import LaunchQueue
from .wording import describe_ranks

_IN_TIME = "Do not step with these gradients: zero_grad() and go on, on all ranks."
_TOO_LATE = (
    "With gradients on an accelerator, ranks learn of it as the next pass ends. Those that have stepped meanwhile, "
    "with a mean that may be NaN, have another model than the rest: go back to a checkpoint. If all of them leave out "
    "steps with gradients that are not finite, as GradScaler does: zero_grad() and go on, on all ranks. With "
    "check_every=1 ranks learn of it before the step."
)
_AGAIN = (
    " A forward that may fail and be tried again on one rank must run inside no_sync() of the handle (a wrapper's "
    ".synchronizer), its backward outside."
)


def given_up(queue: LaunchQueue, ranks: int, *, too_late: bool = False) -> PeerError:
    """So many other ranks gave it up. Quotes them.

    Args:
        queue: knows the pass, and the other ranks.
        ranks: how many.
        too_late: the next pass is about to begin.
    """
    on, told, _ = _told_of(queue, ranks, "backward")
    what = f"backward failed on {on}, so the mean of this pass lacks gradients.\n{told}"
    return _error(queue, what + (_TOO_LATE if too_late else _IN_TIME), can_go_on=not too_late)


def given_up_here(queue: LaunchQueue) -> PeerError:
    """This rank did; the others are about to begin the next one without knowing."""
    return _error(queue, f"backward failed on this rank, so no rank is to step.\n{_TOO_LATE}", can_go_on=False)


def begun_anew(queue: LaunchQueue, ranks: int, more: Sequence[int]) -> PeerError:
    """On so many ranks forward, or the beginning of backward, failed before it; ``more`` often on some of them."""
    on, told, phase = _told_of(queue, ranks, "forward", "backward", early=True)
    if more:
        on = f"{describe_ranks(more)} more often than elsewhere"
    mixes = f"{phase} failed on {on} before this pass and was caught, so this pass may mix batches.\n{told}"
    return _error(queue, mixes + _IN_TIME + ("" if phase == "backward" else _AGAIN), can_go_on=True)


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
