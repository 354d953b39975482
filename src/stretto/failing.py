"""What a rank tells the others when its own forward or backward fails, and when it has fallen out of step with them."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType

import torch
import torch.distributed as dist

from .blame import refuse_if_lost
from .bucket import drop_gradients
from .engine import accumulates_into, when_raised
from .errors import CommunicationError, StrettoError
from .launch import LaunchQueue
from .notes import text_of
from .peers import Peers
from .transport.base import FLUSH_SECONDS, raised_by_handler

log = logging.getLogger("stretto")


class Failing:
    """The failures of one reducer on this rank.

    As a context: what all ranks do together. There they raise alike, or know what was the matter; a rank that anything
    else stops there, Ctrl-C for one, has missed what the others do, and lost its place among them.

    Args:
        queue: knows the pass and the other ranks.
        stop: ends the pass here, so that the next gradient begins one, which is refused. A method, held weakly.
        everything: returns the parameters that may get gradients, by name.
    """

    def __init__(
        self, queue: LaunchQueue, stop: Callable[[], None], everything: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        self._queue = queue
        self._stop = weakref.WeakMethod(stop)
        self._everything = everything
        self._is_told = False
        self._owes_word = False
        """Whether the others are still to be told that this rank has no place any more."""
        self.early = 0
        """How often forward, or backward before it reached a parameter, has failed since the last pass began."""

    @property
    def is_lost(self) -> bool:
        """Whether this rank has no place any more, and the others know."""
        return bool(self._queue.peers.left)

    def __enter__(self) -> None:
        self._is_told = False

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        if isinstance(error, dist.DistBackendError):  # NCCL's, where a rank has gone
            try:
                self._queue.peers.fail("what travels beside gradients could not be sent", error)
            except CommunicationError as told:
                self.lose(told, trace)
                raise
        self._queue.peers.seat.in_pass = False
        if self._is_told:
            return
        if not isinstance(error, StrettoError) or raised_by_handler(error):  # the others know nothing of a handler's
            self.lose(error, trace)
        elif self.is_lost:
            self._part()

    def lose(self, error: BaseException, trace: TracebackType | None = None) -> None:
        """From here on this rank sends nothing, and the others know."""
        if not self.is_lost:  # in a call within the pass
            self._queue.peers.leave("backward", error, trace)
        self._part()

    def _part(self) -> None:
        if (stop := self._stop()) is not None:
            stop()
        drop_gradients(self._queue.buckets)

    def before(self, phase: str, error: BaseException | None, trace: TracebackType | None = None) -> None:
        """A pass: something failed while others may be in the middle of theirs."""
        self.early += 1
        self._queue.peers.tell_failed(phase, error, trace, before=True)

    def at_the_end(self, error: BaseException, give_up: Callable[[], object]) -> None:
        """Of backward, where it can be seen."""
        lost = self._give_up(give_up)
        self._tell(error, error.__traceback__)
        self._say(lost, error)
        self._is_told = True
        self.stay()

    def in_engine(self, give_up: Callable[[list[Failing]], object], has_begun: bool) -> None:
        """Backward was dropped; the exception may come by. From a weak reference's callback: nothing must come out.

        Args:
            give_up: called with a list, to which it adds those whose passes it has given up.
            has_begun: the pass; else backward came to the module, and failed before it reached a parameter.
        """
        if self.is_lost:
            return  # and the others know
        if not has_begun:
            self._early()
            return
        given_up: list[Failing] = []
        lost = self._give_up(functools.partial(give_up, given_up))

        def tell(error: BaseException | None, trace: TracebackType | None = None) -> None:
            self._tell(error, trace)
            self._say(lost, error)
            _tell_owed(given_up, error, trace)
            for one in given_up:
                one.stay()

        if not when_raised(tell):
            with contextlib.suppress(KeyboardInterrupt):
                tell(None)

    def _early(self) -> None:
        """As after a failed forward, the others may be in a pass to which this rank will not come."""

        def tell(error: BaseException | None, trace: TracebackType | None) -> None:
            if error is not None and not isinstance(error, StrettoError):  # else the end was well, or it is known
                self.before("backward", error, trace)

        if accumulates_into(self._everything().values()) and not when_raised(tell):
            with contextlib.suppress(KeyboardInterrupt):
                self.before("backward", None)

    def stay(self) -> None:
        """With a pass that was given up, a little, where others need this rank for it.

        When it has told why: in the end of one model's pass they wait for that, and not yet in the next one's.
        """
        with self._queue.lock, torch.no_grad():
            self._queue.transport.flush(FLUSH_SECONDS)

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """Around the end of a pass that has failed; if that fails too, this rank is out of step for good."""
        try:
            yield
        except BaseException as error:
            self._owes_word = True
            self._queue.peers.fall_behind(error)
            raise

    def behind(self, error: BaseException, give_up: Callable[[], object], turn: Iterable[Failing]) -> None:
        """Give up what comes behind the pass that ``error`` has ended: that is what the user is to read, if it is this
        rank's own, and not what came of it. ``turn``: of those that are given up."""
        lost = self._give_up(give_up)
        _tell_owed(turn, error, error.__traceback__)
        if lost is not None and (isinstance(error, CommunicationError) or not isinstance(lost, Exception)):
            raise lost
        self._say(lost, error)

    def _give_up(self, give_up: Callable[[], object]) -> BaseException | None:
        """Give up what backward has reached; if that fails too, why."""
        try:
            give_up()
        except BaseException as error:
            return error
        return None

    def _tell(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Why backward has failed; this rank has lost its place if it could not give up its pass."""
        self._owes_word = False
        self._queue.peers.tell_failed("backward", error, trace, leaves=self.is_lost)

    def _say(self, lost: BaseException | None, error: BaseException | None) -> None:
        """Why the pass could not be given up, but for what the user reads anyway, or another rank has told."""
        if lost is None or isinstance(lost, CommunicationError) or (error and text_of(error) == text_of(lost)):
            return
        log.error("%s: backward failed, and the pass could not be given up.", self._queue.where, exc_info=lost)


def _tell_owed(given_up: Iterable[Failing], error: BaseException | None, trace: TracebackType | None) -> None:
    """Of those that could not be given up: others may wait for what has not left."""
    for one in given_up:
        if one._owes_word:
            one._tell(error, trace)


def refuse_to_send(peers: Peers, phase: str) -> None:
    """Before a pass, a step, or a message of another call.

    Args:
        peers: of the handle.
        phase: what this rank is about to do.

    Raises:
        CommunicationError: this rank has told the others that it takes part in nothing any more, or tells them now.
    """
    if peers.left:  # to spell out where costs a microsecond of every pass
        refuse_if_lost(peers.where, peers.left)
    if peers.alarm.sounds:
        peers.refuse_leftovers(phase)
    for one in peers.leftovers:
        if one.rank is not None:
            peers.refuse_leftovers(phase)
