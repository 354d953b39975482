"""What ranks say to each other behind the last bucket of a pass, and what all of them then do at the same pass.

tracker.py, replanning.py ──> says() ──> words in the last bucket ──sum──> act_on() ──> PeerError, new plan
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NoReturn

from . import void
from .beside import Beside
from .check import fingerprint
from .comm_hooks import fixes_plan
from .errors import CommunicationError, PeerError, StrettoError, UnsupportedError
from .forward import ForwardWatch
from .launch import LaunchQueue
from .membership import Membership
from .postponed import Noticed
from .rejoin import Rejoin
from .replanning import Replanning
from .same_batches import SameBatches
from .spot_checks import SpotChecks
from .tracker import ArrivalTracker
from .unattached import Unattached
from .uneven import Uneven
from .wording import name_list
from .words import COUNTS, Control, ControlWords

log = logging.getLogger("stretto")


class Consensus:
    """What this rank says, and how it follows what was said.

    Args:
        queue: has the plan, and the bucket that carries the words.
        tracker: knows what has arrived in which order.
        rejoin: follows changes of the module.
        forward: knows how forward went.
        beside: what travels after the last bucket.
        members: the parameters, which are compared now and then.
    """

    def __init__(
        self,
        queue: LaunchQueue,
        tracker: ArrivalTracker,
        rejoin: Rejoin,
        forward: ForwardWatch,
        beside: Beside,
        members: Membership,
    ) -> None:
        self._queue = queue
        self._tracker = tracker
        self._rejoin = rejoin
        self._forward = forward
        self._beside = beside
        self.spot_checks = SpotChecks(members, queue.peers, speaks=queue.transport.rank == 0)
        """Whether all ranks still have the same parameters."""
        self.unattached = Unattached(members, queue.peers, speaks=queue.transport.rank == 0)
        """Whether ranks hold equal values of parameters that are stepped but not reduced here."""
        self._same_batches = SameBatches(queue, wanted=members.options.check_every != 0)
        self.replanning = Replanning(queue, tracker)
        """Whether buckets in another order are worth it."""
        self._late_words: ControlWords | None = None
        self._was_idle = False  # in the pass that they are of
        self._failure: PeerError | None = None  # of the pass before, to be told at the end of this one
        self.uneven: Uneven | None = None  # of this handle, inside torch's Join

    def stop(self) -> None:
        """Compare nothing any more."""
        self.spot_checks.stop()
        self.unattached.stop()
        self._same_batches.stop()

    def meet(self) -> None:
        """Before the first pass: have a name that all ranks know. Collective, if that has not been done."""
        queue = self._queue
        places, numbers = zip(*(queue.peers.meet() or [(0, 1)]), strict=True)
        if len({*places}) > 1 and len({*numbers}) == 1:  # else a rank alone has made, or kept, one more
            self._look_whether_others(places)
        queue.buckets[-1].footer.bear(queue.peers.seat.key, queue.transport.world_size)

    def _look_whether_others(self, places: Sequence[int]) -> None:
        """Ranks that begin with another of several handles without a name have agreed on one for different models.

        Raises ``CommunicationError`` if their values differ, on all ranks; equal ones are warned of. Collective.
        """
        queue, where = self._queue, self._queue.where
        alive = zip(queue.names, (one() for one in queue.references), strict=True)
        values = queue.peers.gather({name: fingerprint(one) for name, one in alive if one is not None})
        told = ", ".join(f"rank {rank}'s number {place + 1}" for rank, place in enumerate(places))
        text = f"{where}: ranks have begun with different handles ({told})"
        advice = "All ranks must begin with the same one of models that were copied, or attached with init_sync=False."
        if all(one == values[0] for one in values):
            log.warning("%s. Their values are equal, so it may be the same model.\n%s", text, advice)
            return
        error = CommunicationError(f"{text}, and their values differ.\n{advice}")
        queue.peers.tell_failed("backward", error, leaves=True)
        raise error

    def says(self, *, scheduled: bool) -> list[int]:
        """What the last bucket is to tell the other ranks.

        Args:
            scheduled: whether the pass was what the schedule foresaw.
        """
        said, seat = list[int](self._forward.says(self._queue.pass_number)), self._queue.peers.seat
        if self._beside.places.known is not None:
            said += self._beside.says()
        said += [Control.WITH_OTHERS] * (seat.with_others and not seat.all_know)
        said += () if self.uneven is None else self.uneven.says()
        if self._queue.comm_hook is None:  # which may have each rank step by itself, as post-localSGD
            said += self.spot_checks.says(self._queue.pass_number)
        said += self.unattached.says(self._queue.pass_number)
        said += self._same_batches.says(self._queue.pass_number)
        if scheduled and not self.replanning.is_deferred:
            return said
        if not scheduled:
            self._refuse_late()
            left = self._queue.buckets[: self._queue.launched]
            if self._tracker.unforeseen() or any(bucket.late() for bucket in left):
                said.append(Control.LATE)
        if self.replanning.wants():
            said.append(Control.WANTS_REPLAN)
        return said

    def says_idle(self) -> list[int]:
        """The same of a pass to which this rank gives nothing."""
        return [Control.RAN_OUT, *(() if self.uneven is None else self.uneven.says()), *self._beside.says()]

    def _refuse_late(self) -> None:
        """Raise where a second round is out of reach: to ask for one would stop the host, or the word cannot travel."""
        queue = self._queue
        on_host = all(bucket.flat.is_cpu for bucket in queue.buckets)
        late = self._tracker.overtaken()
        if not late and (queue.comm_hook is not None or not (on_host or queue.pass_number == 1)):
            left = queue.buckets[: queue.launched]  # in the others gradients may just wait for what never comes
            late = [queue.names[bucket.indices[i]] for bucket in left for i in bucket.late()]
        if late:
            raise UnsupportedError(
                f"{queue.where}: {name_list(late)} got one more gradient than in earlier passes, after the bucket "
                "had left (a backward inside backward, around a layer that is used again).\n"
                "Do not step with these gradients: zero_grad() and go on; the next pass expects it. To avoid this, use "
                "torch.utils.checkpoint(..., use_reentrant=False), or attach(..., delay=True)."
            )

    # Following

    def hear(
        self, words: ControlWords, noticed: Noticed | None, *, at_once: bool, idle: bool = False, given_up: int = 0
    ) -> None:
        """At the end of a pass: act, now or, if the words are on their way from a device, before the next pass.

        Args:
            words: what was said.
            noticed: a change of this rank's module. Wait for the words too, and follow if all have noticed one, whose
                gradients of this very pass are to be reduced; else see postponed.py.
            at_once: wait for the words if need be.
            idle: this rank had no part in the pass. It follows a change when those with batches do.
            given_up: so many ranks gave up the pass, as is known without words.
        """
        error, self._failure = self._failure, None  # first: it belongs to no later pass
        at_once |= self.uneven is not None  # a rank without batches goes on to the step, unless the pass has failed
        at_once |= given_up > 0 or words.on_host or self._queue.pass_number == 1
        try:
            if at_once or ((idle or noticed is not None) and words.all_have_noticed(self._queue.transport.world_size)):
                self.act_on(words, noticed, idle=idle)
            else:
                self._late_words, self._was_idle = words, idle
                if noticed is not None and error is None:  # else no rank is to step
                    self._rejoin.postponed.hold_back(noticed)
            if given_up:  # and a comm hook carries no words
                raise void.given_up(self._queue, given_up)
        except StrettoError as later:
            if error is not None:
                if isinstance(later, PeerError) and later.can_go_on:
                    raise error from later  # it needs more than that
                log.error("%s", error)
            raise
        if error is not None:
            self._queue.peers.seat.void = self._queue.pass_number  # too: it was that of the pass before
            raise error
        if not idle:
            self.spot_checks.ended(self._queue.pass_number)

    def hear_of_own_failure(self, words: ControlWords, *, known: bool, crosses: bool) -> None:
        """Before a pass: words of the last one, which this rank gave up. Unless the others have ``known``, they raise
        at the end of the next, and so must this rank, or it would step alone.

        Args:
            words: what was said.
            known: the others knew at the end of that pass.
            crosses: else they may have taken a step that is collective, a sharded optimizer's, and this rank has not.
                What they have sent would meet this rank's next pass, so it leaves.
        """
        if self._failure is not None:
            log.error("%s", self._failure)  # it was for the end of the pass that was given up
            self._failure = None
        self.act_on(dataclasses.replace(words, own_failure=True))
        said = words.read()
        by_all = said[Control.GAVE_UP] >= min(self._queue.transport.world_size, COUNTS)
        known = known or by_all or words.on_host or self._queue.pass_number == 1
        if said[Control.GAVE_UP] and not known:
            if crosses:
                error = void.stepped_apart(self._queue)
                self._queue.peers.tell_failed("backward", error, leaves=True)
                raise error
            self._failure = void.given_up_here(self._queue)

    def catch_up(self, *, idle: bool) -> None:
        """Before a pass, to which this rank gives nothing if ``idle``: act on words of the last that arrived late."""
        if self._late_words is not None:
            try:
                self.act_on(self._late_words, idle=self._was_idle)
            except PeerError as error:  # all ranks are about to run this pass: run it too, and tell at its end
                if self._queue.peers.left:
                    raise
                self._failure = error
            finally:
                self._late_words = None
        if not idle:
            self._rejoin.postponed.resume()

    def act_on(self, words: ControlWords, noticed: Noticed | None = None, *, idle: bool = False) -> None:
        """Do what all ranks do after these words. Collective.

        Args:
            words: what was said.
            noticed: by this rank, in the pass that they are of.
            idle: this rank had no part in the pass.

        Raises:
            CommunicationError: buckets were summed with those of another attached model; this rank has lost its place.
            PeerError: another rank gave up the pass, or failed on some ranks only before it began.
        """
        presence, is_first = self._queue.presence, self._queue.pass_number == 1
        if not (words.were_carried or is_first):
            return
        if words.all_well and not (is_first or presence.active):  # as most passes end
            if self._beside.places.any:
                self._beside.hear(some_have_moved=False)
            return
        said = words.read()
        if words.are_mixed:
            self._refuse_mixed()
        if self._ends_with(said, words, noticed, idle):
            return
        if words.on_host:
            self._beside.hear(some_have_moved=bool(said[Control.BUFFERS]))
        elif self._beside.places.any:
            self._beside.places.wake()  # the last bucket may have been on the host so far
        if said[Control.WITH_OTHERS]:
            self._queue.peers.seat.all_know = True
        if self.uneven is not None:
            self.uneven.hear(said, self._queue.transport.world_size)
        self.spot_checks.hear(said, self._queue.pass_number, some=self._on_some(said, Control.COMPARES), idle=idle)
        self.unattached.hear(said, self._queue.pass_number, idle=idle)
        self._same_batches.hear(said)
        presence.hear(bool(said[Control.ABSENT]), possible=words.on_host and self._queue.comm_hook is None)
        if said[Control.WANTS_REPLAN] or is_first:
            self.replanning.follow_order()
        elif presence.active and (cuts := presence.apart(self._queue.plan)):
            self.replanning.cut(cuts)

    def _refuse_mixed(self) -> NoReturn:
        """What each rank holds is nobody's mean, and each is amid another call: see footer.py, [Note: marks]."""
        peers, others = self._queue.peers, RuntimeError("they were summed with those of another attached model")
        try:
            what = f"gradients of {name_list(self._queue.names)} could not be reduced"
            peers.fail(what, others, "backward of the same models in the same order")
        except CommunicationError as error:
            peers.tell_failed("backward", error, leaves=True)
            raise error from None

    def _ends_with(self, said: Sequence[float], words: ControlWords, noticed: Noticed | None, idle: bool) -> bool:
        """Whether nothing more follows: a pass was given up, or the module has changed."""
        if said[Control.GAVE_UP]:
            if words.own_failure:
                return True
            raise void.given_up(self._queue, round(said[Control.GAVE_UP]), too_late=words is self._late_words)
        if said[Control.FAILED_EARLY]:
            self._refuse_early_failure(said, idle=idle, too_late=words is self._late_words)
        if self._on_some(said, Control.MORE_FORWARDS):
            self._forward.warn(idle=idle)
        if not said[Control.CHANGED]:
            return False
        if fixes_plan(self._queue.comm_hook):
            self._rejoin.refuse()
        if words is self._late_words:
            self._rejoin.postponed.follow()
        else:
            self._rejoin.all_together(noticed or Noticed(), idle=idle)
            self.replanning.begin_anew()
        return True

    def _refuse_early_failure(self, said: Sequence[float], *, idle: bool, too_late: bool) -> None:
        """Raise the same on all ranks, including those that failed: none must step. Collective."""
        more: list[int] = []
        if not self._on_some(said, Control.FAILED_EARLY):
            often = dict(enumerate(self._queue.peers.gather(None if idle else self._forward.failures)))
            least = min(number for number in often.values() if number is not None)
            more = [rank for rank, number in often.items() if number is not None and number > least]
            if not more:
                return
        raise void.begun_anew(self._queue, round(said[Control.FAILED_EARLY]), more, too_late=too_late)

    def _on_some(self, said: Sequence[float], word: Control) -> bool:
        """Whether some ranks said so, and others that have batches did not."""
        could = self._queue.transport.world_size - round(said[Control.RAN_OUT])
        return 0 < round(said[word]) < min(could, COUNTS)
