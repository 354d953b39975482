"""What ranks that wait for others are told when those have left or died."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from .errors import CommunicationError, PeerError, SetupError
from .notes import WAYS_TO_LEAVE, Note
from .transport.base import Leftover
from .whereabouts import standing
from .wording import counted, describe_ranks

NORM = "the norm of gradients"
STEPPED_ELSEWHERE = "what other hosts have stepped"
STEPPED_BY_OTHERS = "what other ranks have stepped"
EXPECTED = {
    "pass": "backward for this pass",
    "attach": "stretto.attach",
    "call": "the same",
    "reduce": "stretto.reduce",
    NORM: "sync.clip_grad_norm_",
    STEPPED_ELSEWHERE: "optimizer.step()",
    STEPPED_BY_OTHERS: "optimizer.step()",
}
"""What every rank is to call on these occasions, or for this."""
SAME_CALLS = (
    "All ranks must make the same calls in the same order. Look for a call that only some of them make, as under "
    "`if rank == 0` or after a `continue` or a `break`: attach(), shard(), backward, optimizer.step(), "
    "clip_grad_norm_(), check(), report(), trace(), state_dict(), load_state_dict(), unshard(), stretto.reduce()."
)
"""Where they have not."""
SAME_BATCHES = (
    "Give every rank the same number of batches, or use the drop-in and its join(): with model.join(): ... If they had "
    "the same number, look for a loop that one of them has left by a value of its own (decide together, by "
    "stretto.reduce([value])), or for a call of torch.distributed that only some make, as under `if rank == 0`."
)
"""Where one waits in a call of torch's."""


def who_is_to_blame(
    where: str,
    occasion: str,
    passes: int,
    left: Sequence[Note],
    dead: Sequence[tuple[int, int]],
    starved: Callable[[], bool],
    *,
    by_itself: bool,
) -> tuple[PeerError | None, bool]:
    """An error for ranks that have left or died, and whether they surely have no part in what is awaited.

    Args:
        where: how the message begins.
        occasion: a key of ``EXPECTED``.
        passes: the number of this rank's pass; 0 before the first.
        left: notes of ranks that say in them that they have left.
        dead: rank and pid of those that do not run any more.
        starved: tells whether the kernel has killed a process here for lack of memory.
        by_itself: what is awaited goes on when a rank has left in peace.
    """
    silent = [(rank, pid) for rank, pid in dead if rank not in {note.rank for note in left}]
    left = [note for note in left if note.failed or not by_itself]
    if left and (not silent or any(note.failed and note.first_hand for note in left)):
        missing = [note for note in left if note.passes is not None and note.passes < passes]
        return left_early(where, occasion, missing or left, passes), bool(missing)
    return (killed(where, occasion, silent, starved=starved()), True) if silent else (None, False)


def is_told(error: CommunicationError) -> bool:
    """Whether it says why a rank cannot go on: this one too, which the system has refused something.

    Who has ended since may have done so for want of it. Not where another rank's memory is not there any more.
    """
    cause = error.__cause__
    refused = isinstance(cause, OSError) and cause.errno not in (errno.ESTALE, errno.ENOENT)
    return refused or "cannot go on" in str(error)


def without_excused(
    rank: int, left: Sequence[Note], dead: Sequence[tuple[int, int]]
) -> tuple[list[Note], list[tuple[int, int]]]:
    """Of those that have left or died, those that did not for want of this rank."""
    excused = {note.rank for note in left if note.is_for_want_of(rank)}
    return [one for one in left if one.rank not in excused], [one for one in dead if one[0] not in excused]


def left_early(where: str, occasion: str, notes: Sequence[Note], passes: int) -> PeerError:
    """An error for ranks that say in these notes that they have left.

    Args:
        where: how the message begins.
        occasion: a key of ``EXPECTED``.
        notes: at least one.
        passes: the number of this rank's pass; 0 before the first.
    """
    failed = [note for note in notes if note.failed]
    first_hand = [note for note in failed if note.first_hand]
    roots = [note for note in notes if not note.failed and any(one.is_for_absence_of(note.rank) for one in failed)]
    if first_hand or (failed and not roots):
        first_hand = first_hand or failed[:1]
        told = "".join(dict.fromkeys(f"  {note}\n" for note in first_hand))  # of the pass, and of leaving it
        ranks = describe_ranks(sorted({note.rank for note in first_hand}))
        return PeerError(
            f"{where}: {ranks} failed and left, so nobody can complete this {occasion}.\n{told}"
            "Remove the cause and start again, on all ranks."
        )
    note = (roots or notes)[0]
    how = WAYS_TO_LEAVE[note.phase]
    if note.passes is None or not passes or occasion == "call":
        expected = SAME_CALLS if occasion == "call" else f"Expected every rank to call {EXPECTED[occasion]}."
        what = f"call, {standing(sys._getframe())}" if occasion == "call" else occasion
        return PeerError(f"{where}: rank {note.rank} has left ({how}), so nobody can complete this {what}.\n{expected}")
    if note.passes >= passes:  # so it has had as many batches
        return PeerError(
            f"{where}: rank {note.rank} has left ({how}), so nobody can complete this pass, which it had begun.\n"
            "Look at the first error in its log: it may have failed here, and caught that."
        )
    done = counted(note.passes, "passes")
    return PeerError(
        f"{where}: rank {note.rank} finished after {done} ({how}), so nobody can complete this one.\n"
        "Give every rank the same number of batches, or use the drop-in and its join(): with model.join(): ... If they "
        "had the same number, that rank skipped one (continue, except), or this rank took one twice, or an exception "
        "or an early end has taken that rank out of its loop: see its log."
    )


def killed(where: str, occasion: str, dead: Sequence[tuple[int, int]], *, starved: bool) -> PeerError:
    """An error for ranks that ended without a note, given by rank and pid; ``starved``: memory was short."""
    told = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in dead)
    short = ": it has killed some process on this machine since this rank attached" if starved else ""
    return PeerError(
        f"{where}: {told} died without a word, so nobody can complete this {occasion}.\n"
        "Something killed it: a signal, os._exit(), a crash outside Python (Gloo, where ranks have sent different "
        f"things), or the system because memory ran out (see dmesg){short}. Start again, on all ranks."
    )


def told_of(error: CommunicationError, what: str) -> CommunicationError:
    """The error of a transport, which knows of no pass and no names, with them; any other as it is.

    Args:
        error: a transport's begins with the rank alone.
        what: could not be done; begins with the rank and the pass.
    """
    begins = what.partition(",")[0] + ": "
    if not (text := str(error)).startswith(begins):
        return error
    told = type(error).__new__(type(error))  # a transport's own may take other arguments, and be raised again
    told.args = (f"{what}: {text.removeprefix(begins)}",)
    told.__dict__.update(error.__dict__)
    return told.with_traceback(error.__traceback__)


def unlike_calls(where: str, error: CommunicationError, places: str) -> CommunicationError:
    """An error for ranks that met with different calls, as the transport's error says; ``places`` as below."""
    all_are = f"{places}.\n" if places else ""
    return CommunicationError(f"{where}: {error}.\n{all_are}{SAME_CALLS}")


def not_done(what: str, error: RuntimeError, places: str, expected: str) -> CommunicationError:
    """An error for what a transport could not do, where no rank is known to have left.

    Args:
        what: begins with the rank and the pass.
        error: the transport's.
        places: where all are; empty if that is not known.
        expected: what every rank was to call.
    """
    all_are = f"{places}.\n" if places else ""
    return CommunicationError(
        f"{what}: {error}\n{all_are}Expected every rank to call {expected}. Look at the first error in the "
        "other ranks' logs."
    )


def crosses(pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether one rank has done less than the other of one thing and more of another: neither waits for the other's.

    Args:
        pairs: counts of both, see :class:`~stretto.seat.Seat`, as far as both are known.
    """
    known = [*pairs]
    return any(mine > theirs for mine, theirs in known) and any(mine < theirs for mine, theirs in known)


def apart(where: str, progress: Sequence[int], others: Mapping[int, Sequence[int]], places: str) -> PeerError:
    """An error for ranks that have gone apart.

    Args:
        where: how the message begins.
        progress: of this rank.
        others: of those.
        places: where all are.
    """
    told = ", ".join(f"rank {rank} has begun {_counted(theirs, progress)}" for rank, theirs in sorted(others.items()))
    mine = _counted(progress, next(iter(others.values())))
    return PeerError(
        f"{where}: ranks are out of step, so nobody can complete this.\n{places}.\n{SAME_CALLS}\n"
        f"So far {told}, this rank {mine}."
    )


def elsewhere(where: str, rank: int, places: str, advice: str = SAME_CALLS) -> PeerError:
    """An error for a rank that has begun what this one has not, of another handle or of torch's, and waits there.

    Args:
        where: how the message begins.
        rank: that one.
        places: where all are.
        advice: what to look for.
    """
    return PeerError(
        f"{where}: ranks are out of step, so nobody can complete this: rank {rank} waits for this rank in another "
        f"call.\n{places}.\n{advice}"
    )


def refuse_other_calls(where: str, said: Sequence[str]) -> None:
    """Raise if ranks have come to different calls.

    Args:
        where: how the message begins.
        said: by rank, the place in this library and, after a space, what was called where.

    Raises:
        CommunicationError: on all ranks; nothing was sent.
    """
    places, calls = zip(*(one.split(" ", 1) for one in said), strict=True)
    if len({*places}) > 1:
        told = "; ".join(f"rank {rank} is {call}" for rank, call in enumerate(calls))
        raise CommunicationError(f"{where}: ranks have made different calls: {told}.\n{SAME_CALLS}")


def too_late(rank: int, when: str, limit: float) -> str:
    """For the others, of a wait that this rank has broken off after ``limit`` seconds. ``when``: in its life."""
    return f"rank {rank}: {when} was not done within {limit:.0f} s\nStart again, on all ranks."


def refuse_misplaced(where: str, rank: int, parent: int) -> NoReturn:
    """Raise in a child of the process that attached, or in a signal handler during a wait of its thread.

    Args:
        where: how the message begins.
        rank: this one.
        parent: the process that attached.
    """
    if parent != os.getpid():
        raise CommunicationError(
            f"rank {rank}: this process was forked from process {parent}, and only that process can reduce.\n"
            "Call detach() in the child before it trains there, or fork before stretto.attach(model)."
        )
    raise SetupError(
        f"{where}: a collective call was made while this rank waits inside another, for example by a signal "
        "handler.\n"
        "Let the handler set a flag, agree on it after the step, stretto.reduce([flag]), and make the call there."
    )


def refuse_if_lost(where: str, left: str) -> None:
    """Raise ``CommunicationError`` if this rank has told the others that it takes part in nothing any more.

    Args:
        where: how the message begins.
        left: what it has told; empty if it has not.
    """
    if left:
        raise CommunicationError(
            f"{where}: this rank has failed and left, so it has lost its place among the others.\n"
            f"  {left}\nRemove the cause and start again, on all ranks."
        )


def refuse_leftovers(where: str, rank: int, handle: str, leftovers: Iterable[Leftover]) -> None:
    """Raise ``CommunicationError``, or ``PeerError``, if what is sent now would meet something else.

    Args:
        where: how the message begins.
        rank: this one.
        handle: its name, if it has one. One that has the leftover itself hears from the others why.
        leftovers: of what would carry it.
    """
    for one in leftovers:
        if one.rank is None or handle == one.handle != "":
            continue
        if one.is_sent:
            kind, who = (CommunicationError, "this rank") if one.rank == rank else (PeerError, f"rank {one.rank}")
            raise kind(
                f"{where}: {who} has stopped waiting for a message that was under way in the process group, and what "
                f"is sent now could be mixed up with it.\n  {one.told}\nCall detach() on what is attached, then use a "
                f"new group, made on all ranks: process_group=torch.distributed.new_group({one.group})"
            )
        if handle:  # an attaching rank meets the others before anything is sent
            raise CommunicationError(
                f"{where}: this rank has lost its place in what another handle does over this process group, where "
                f"others may wait for it.\n  {one.told}\nCall detach() on both, and attach again, on all ranks."
            )


def _counted(progress: Sequence[int], other: Sequence[int]) -> str:
    passes, calls, *steps = progress
    told = [counted(passes, "passes")]
    if steps:
        told.append(f"{', '.join(map(str, steps))} steps of sharded optimizers")
    if (more := calls - other[1]) > 0:
        told.append(f"{counted(more, 'other calls')} more")
    return " and ".join(told)
