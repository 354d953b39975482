"""Which gradients will come in this pass, asked at its first one: for models that leave parts of themselves out.

    engine.py: what does this graph reach? ──> map, a number a bucket ──sum──> which buckets does any rank use?

A model that uses all its parameters in every pass never asks, and nothing is sent for this. When some rank lacked a
gradient, the last bucket of the pass says so, and from the next pass on all ranks exchange a small map at the first
gradient. Then a bucket that no rank has anything for is not sent. And a gradient that is absent on one rank no longer
holds up its bucket, and all buckets behind it, until backward ends. After ``QUIET`` passes in which no rank lacked
anything, all stop asking.

Buckets are cut anew where parameters turn out to come and go separately, so that a layer that is left out is a bucket,
or several, by itself.

[Note: nested tasks and absence]  A parameter that is used in a reentrant checkpoint belongs to a task that has not
begun at the first gradient, so "not in this graph" does not prove its absence. A rank that has seen gradients of nested
tasks claims to use everything, and waits as it would without a map.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from .bucket import Bucket
from .plan import BucketPlan
from .transport.base import Transport, Work

QUIET = 16
"""So many passes without an absence end the exchange."""
REMEMBERED = 16
"""Passes for which it is known which parameters came."""
WORTH_A_CUT = 64 * 1024
"""Bytes that a bucket must hold to be cut off for coming and going by itself."""


class Presence:
    """The map of each pass, and whether there is one. What all ranks hold here is equal on all."""

    def __init__(self, transport: Transport) -> None:
        self.active = False
        self._transport = transport
        self._quiet = 0
        self._map: torch.Tensor | None = None
        self._work: Work | None = None
        self._used: list[bool] | None = None
        self._history: dict[int, int] = {}
        """By parameter, a bit for each of the last passes: whether any rank had it."""
        self._recorded = 0
        self.waited = (0, 0)
        """From when to when this rank last waited for the map, in nanoseconds of ``perf_counter_ns``."""

    def announce(self, uses: Sequence[bool], *, later: bool) -> None:
        """Put the map under way: for each bucket, whether this rank has something for it. Collective.

        ``later``: when it is asked for; see family.py, [Note: strangers].
        """
        self._used = self._map = self._work = None
        asked = torch.tensor(uses, dtype=torch.int32, device="cpu")
        if not later:
            self._work = self._transport.all_reduce(asked)
        self._map = asked  # last: one that could not be sent was not announced

    def announce_nothing(self, buckets: int, *, later: bool = False) -> None:
        """The same of a rank that has nothing for any, where maps are exchanged and this pass has none yet."""
        if self.active and self._map is None:
            self.announce([False] * buckets, later=later)

    def under_way(self) -> bool:
        """Whether the map is not there yet. Buckets may leave later then, but only if nothing else uses the channel.

        On a process group what another model or the user sends in this backward would stand between other buckets on
        each rank, by who is faster. There the map is waited for.
        """
        done = getattr(self._work, "is_completed", None)
        return self._used is None and done is not None and not done()

    def unused(self, bucket: int, wait: Callable[[Work, str], None]) -> bool:
        """Whether no rank has anything for the bucket. Waits for the map when it is asked first in a pass."""
        if self._used is None:
            assert self._map is not None, "a map is announced before anything is launched"
            work = self._work if self._work is not None else self._transport.all_reduce(self._map)
            self._used = [True] * len(self._map)  # should the wait fail, what is left is launched without asking again
            began = time.perf_counter_ns()
            wait(work, "the map of what ranks use")
            self.waited = began, time.perf_counter_ns()
            self._used = [bool(count) for count in self._map.tolist()]
        return not self._used[bucket]

    def hear(self, absent: bool, possible: bool) -> None:
        """At the end of a pass, on all ranks alike: has some rank lacked something, and are maps possible?"""
        self._quiet = 0 if absent else self._quiet + 1
        if absent and possible:
            self.active = True
        elif self._quiet >= QUIET:
            self.active = False

    # Who comes and goes together

    def forget(self) -> None:
        """The parameters are others."""
        self._history.clear()
        self._recorded = 0

    def record(self, buckets: Sequence[Bucket]) -> None:
        """After a pass: remember which parameters came on any rank, as the footers of all buckets tell."""
        self._map = None
        self._recorded += 1
        for bucket in buckets:
            for index, ranks in zip(bucket.indices, bucket.footer.had.tolist(), strict=True):
                self._history[index] = (self._history.get(index, 0) << 1 | bool(ranks)) % (1 << REMEMBERED)

    def apart(self, plan: BucketPlan) -> list[int]:
        """Parameters after which a bucket should end, since what follows in it comes and goes by itself.

        Asked after every fourth pass that was recorded; a cut must leave ``WORTH_A_CUT`` bytes on both sides.
        """
        if self._recorded % 4:
            return []
        found = []
        for number, bucket in enumerate(plan.buckets):
            before, rest = 0, plan.bucket_bytes(number)
            for one, following in pairwise(bucket.indices):
                before += plan.parameters[one].nbytes
                rest -= plan.parameters[one].nbytes
                differ = self._history.get(one) != self._history.get(following)
                if differ and min(before, rest) >= WORTH_A_CUT:
                    found.append(one)
                    before = 0
        return found
