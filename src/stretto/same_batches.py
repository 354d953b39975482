"""Do ranks train on the same batches? Nothing else would show it: all values agree, but N ranks do the work of one.

[Note: same batches]  In the first passes, each rank weighs a few elements of each of its gradients before they are
summed. One bit of that weight travels behind the last bucket of the next pass, so that no device is waited for, and
ranks learn how many of them say 1. In right programs, that soon is a number which no equal groups of ranks would give,
and weighing stops. If for ``PASSES`` passes all ranks, or pairs, say, may have had the same gradients, ranks compare
their weights, once: this is the only message. A rank says nothing of passes with only zeros, or to which some rank gave
nothing. Gradients that are the same in every pass, NaN among them, tell nothing about batches.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence

from .launch import LaunchQueue
from .spot_checks import SpotCheck
from .wording import describe_ranks, ranks_by
from .words import COUNTS, Control

PASSES = 8
"""So often ranks must seem to have the same gradients before they compare them."""
_GROUPS = 3
"""Of so many groups of ranks a message tells."""
_LAST = 32
"""The last pass that is weighed, whatever was seen."""

log = logging.getLogger("stretto")


class SameBatches:
    """What one rank's gradients of the first passes are, and whether others have the same. An observer of launches.

    Args:
        queue: has the buckets, and the other ranks. Held weakly, since its events hold this.
        wanted: False to look at nothing.
    """

    def __init__(self, queue: LaunchQueue, *, wanted: bool) -> None:
        self._queue = weakref.ref(queue)
        self._pass = 0  # the last that was weighed
        self._checks: list[SpotCheck] = []  # of its buckets
        self._last: tuple[int, list[SpotCheck]] = (0, [])  # the same of the one before
        self._said = 0  # what the pass under way tells a bit of
        self._weights: list[int] = []  # of passes in which others may have had the same
        self._common = queue.transport.world_size  # divides all counts so far
        self._wanted = wanted and self._common > 1
        if self._wanted:
            queue.events.add(self)

    def stop(self) -> None:
        """Look no more. Harmless twice."""
        self._wanted = False
        self._checks, self._last = [], (0, [])
        if (queue := self._queue()) is not None:
            queue.events.remove(self)

    def launch_started(self, pass_number: int, bucket: int) -> None:
        """See :class:`~stretto.events.Observer`: the gradients are there, and not yet summed."""
        queue = self._queue()
        if queue is None or pass_number > _LAST:
            return self.stop()
        if pass_number != self._pass:
            self._last, self._pass, self._checks = (self._pass, self._checks), pass_number, []
        if queue.weight_now:  # else there are no gradients: of a rank without batches, or a pass that was given up
            self._checks.append(SpotCheck(queue.buckets[bucket].views, pass_number))

    def says(self, number: int) -> list[int]:
        """What the last bucket of the pass is to tell of the one before."""
        weighed, checks = self._last if self._pass == number else (self._pass, self._checks)
        self._said = _weight_of(checks) if self._wanted and weighed == number - 1 else 0
        return [Control.WEIGHED, *[Control.WEIGHT] * (self._said & 1)] if self._said else []

    def hear(self, said: Sequence[float]) -> None:
        """Compare gradients if they may be the same, by what all ranks told in the pass. Collective."""
        queue = self._queue()
        if not self._wanted or queue is None:
            return
        ranks = queue.transport.world_size
        if min(said[Control.WEIGHED], COUNTS) == min(ranks, COUNTS):
            self._weights.append(self._said)
            self._common = math.gcd(self._common, round(said[Control.WEIGHT]))
            if self._common == 1:
                self.stop()
            elif len(self._weights) == PASSES:
                self.stop()
                self._compare(queue)

    def _compare(self, queue: LaunchQueue) -> None:
        with_same = ranks_by(enumerate(queue.peers.gather(tuple(self._weights))))
        changing = [some for weights, some in with_same.items() if all(weights) and len({*weights}) > 1]
        groups = [describe_ranks(some) for some in changing if len(some) > 1]
        if groups and queue.transport.rank == 0:
            more = [f"{len(groups) - _GROUPS} more such groups"] * (len(groups) > _GROUPS)
            log.warning(
                "%s: before averaging, the gradients of %s were the same, bit for bit, in each of %d passes. So these "
                "ranks train on the same batches, and together do the work of one rank.\n"
                "Give each rank its own: DataLoader(..., sampler=DistributedSampler(dataset)), with the global rank; "
                "for a stream, datasets.distributed.split_dataset_by_node; for random data, a seed that contains the "
                "rank. If that is intended, ignore this. Shown once; check_every=0 never looks.",
                queue.where,
                " and of ".join([*groups[:_GROUPS], *more]),
                len(self._weights),
            )


def _weight_of(checks: list[SpotCheck]) -> int:
    """One number for all of a pass, the same in every process; 0 if there were zeros alone."""
    weights = [weight for check in checks for weight in check.weights()]
    return hash(tuple(weights)) if any(weights) else 0
