"""The points where ranks meet around a step, and what happens to the model if one of them fails.

[Note: two meetings]  If ranks share the memory of parameters, no rank may write before all have finished reading: a
late rank may still read them between backward and step. And no rank may read before all have written. So they meet
before and after the step.

[Note: half a step]  If a rank fails after the first meeting, some ranks have stepped their share of the model and
others never will. From then on, on every rank that knows of it, every read of a parameter raises. Whatever can be
refused, or can fail, is therefore done before that meeting, in which all ranks learn of it: then nothing has been
written, and all can go on. If the first meeting itself fails, the model stays readable only if it is certain that no
rank has passed it.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import CommunicationError, PeerError
from ..launch import LaunchQueue
from ..transport import Work
from ..wording import describe_ranks
from .awaited import Arrival
from .turns import turns


class Coming(IntEnum):
    """Why a rank has come to the first meeting. The sum of these over ranks counts each kind."""

    TO_STEP = 0
    TO_REFUSE = 1
    IDLE = 1 << 20
    """To step without a gradient of its own: see joining.py."""
    HAS_WRITTEN = 1 << 40
    """It has written parameters in place; added to one of the others. See writings.py."""


class Met(NamedTuple):
    """What the first meeting has shown."""

    alike: bool
    """Whether all ranks have come with the same number."""
    idle: int
    """How many ranks have no gradients of their own."""
    have_written: int
    """How many ranks have written parameters in place."""


ALIKE = Met(alike=True, idle=0, have_written=0)


def leave_join(idle: int) -> str:
    """More advice after a refused step; ``idle``: how many ranks without batches have left ``Join`` because of it."""
    return "leave Join on all ranks, as those without batches have; " if idle else ""


class Meetings:
    """The meetings of one optimizer.

    Args:
        queue: has the transport, and the other ranks.
        optimizer: the one that steps.
    """

    def __init__(self, queue: LaunchQueue, optimizer: torch.optim.Optimizer) -> None:
        self._name = b"optimizer.turn" if turns(optimizer) else b"optimizer.step"
        self._transport, self._peers = queue.transport, queue.peers
        self._said = array.array("q", (0, 0))  # indexing a tensor costs some microseconds
        self._words = torch.frombuffer(self._said, dtype=torch.int64)
        """The sums over ranks of ``Coming`` and of the groups' numbers."""
        self.idle = 0
        """How many ranks came without gradients to the latest first meeting."""
        self.broken: BaseException | None = None
        """Why no step can follow."""
        self.is_spoiled = False
        """Whether every read of a parameter raises."""

    def refuse_broken(self, where: str) -> None:
        """Raise if no step can follow, or not in this process. ``where``: how the message begins."""
        self._peers.refuse_misplaced()
        if self.broken is not None:
            left = "the model may be stepped in part" if self.is_spoiled else "no other can follow; the model is whole"
            raise CommunicationError(
                f"{where}: a step of this optimizer has failed, so {left}.\nStart again from the last checkpoint."
            ) from self.broken

    def meet(self, what: str) -> None:
        """Wait until all ranks have come here. Collective.

        Args:
            what: a noun, for messages.
        """
        self._peers.wait_for(self._come(Coming.TO_STEP), what)

    def _come(self, coming: int, number: int = 0) -> Work:
        self._said[0], self._said[1] = coming, number
        carrier = self._transport
        return carrier.all_reduce(self._words) if carrier.meet is None else carrier.meet(self._said, self._name)

    def meet_before(self, parameters: Iterable[torch.nn.Parameter], coming: int, number: int = 0) -> Met:
        """The first meeting. Collective.

        Args:
            parameters: what is to be stepped.
            number: less than 2**40.
            coming: what this rank has come for, of ``Coming``.

        Raises:
            PeerError: another rank refuses the step.
        """
        work: Any = None
        try:
            work = self._come(coming, number)
            self._peers.wait_for(work, "the optimizer's step")
        except BaseException as error:
            self.fail(error)
            if work is None or not getattr(work, "will_never_begin", bool)():  # a message over a group may have begun
                self.spoil(error, parameters)
            raise
        others, total = self._said
        have_written, others = divmod(others, Coming.HAS_WRITTEN)
        self.idle, refused = divmod(others, Coming.IDLE)
        if refused and coming != Coming.TO_REFUSE:
            self._refuse_with(refused)
        return Met(total == number * self._transport.world_size, self.idle, have_written)

    def _refuse_with(self, count: int) -> NoReturn:
        told = self._peers.failures(count, ["step"])
        ranks = describe_ranks([note.rank for note in told]) if told else f"{count} of the other ranks"
        quoted = "".join(f"  {note}\n" for note in told)
        raise PeerError(
            f"{self._peers.where}: the step of an optimizer was refused on {ranks}, before any rank had stepped.\n"
            f"{quoted}Remove the cause; {leave_join(self.idle)}then all ranks can go on."
        )

    @contextlib.contextmanager
    def tell_in_time(self, parameters: Iterable[torch.nn.Parameter], *, meets: bool) -> Iterator[None]:
        """A failure inside is told to the others; nothing has been written so far. Collective if it fails.

        Args:
            parameters: what is to be stepped.
            meets: the others learn of it in the first meeting, and can go on; otherwise those that did not fail would
                wait in vain.
        """
        try:
            yield
        except Exception as problem:  # nothing was sent: if all ranks refuse alike, all can go on
            self._peers.tell_failed("step", problem, problem.__traceback__, leaves=not meets, refuses=True)
            if meets:
                self.meet_before(parameters, coming=Coming.TO_REFUSE)
            raise
        except BaseException as error:  # after Ctrl-C this rank does not wait for the others
            self.fail(error)
            raise

    def fail(self, error: BaseException, *, sent: bool = False) -> None:
        """No step can follow. The others are told, unless one of them failed first. ``sent``: as for ``leave``."""
        self.broken = error
        if not isinstance(error, CommunicationError):
            self._peers.leave("step", error, error.__traceback__, sent=sent)

    def spoil(self, error: BaseException, parameters: Iterable[torch.nn.Parameter]) -> None:
        """See [Note: half a step]."""
        text = (
            f"{self._peers.where}: a step of the optimizer has failed, so the model may be stepped in part.\n"
            "Start again from the last checkpoint, on all ranks."
        )

        def refuse() -> None:
            raise CommunicationError(text) from error

        self.broken, self.is_spoiled = error, True
        Arrival([*parameters], refuse)
