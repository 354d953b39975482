"""Parameters that an optimizer steps beside a handle, but no handle averages: are they alike on all ranks?

Examples are a temperature (``log_alpha``) with an optimizer of its own, or a second model that nobody attached. This is
right where the program averages them itself, or where ranks are meant to differ; otherwise it is silently wrong. So if
some rank has such parameters, it says so in a word of a pass, and all ranks compare theirs, once.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

from .arrivals import owner_of
from .check import unlike
from .membership import Membership, ids_of
from .peers import Peers
from .seat import Seat
from .selection import wrapping
from .steps import listen, name_in, stepped_by, stop_listening
from .wording import name_list
from .words import Control

PASSES = (32, 256)
"""In which ranks say whether they have such: what has moved on each rank by itself differs by then."""
_BEFORE = 32
"""Steps are listened to in so many passes before these."""

log = logging.getLogger("stretto")


class Unattached:
    """Parameters stepped outside one handle. Optimizers that also step what a handle averages are reported by usage.py.

    Args:
        members: the handle's parameters.
        peers: the other ranks.
        speaks: this rank tells for all.
    """

    def __init__(self, members: Membership, peers: Peers, *, speaks: bool) -> None:
        self._members, self._peers, self._speaks = members, peers, speaks
        self._seen: dict[int, tuple[weakref.ref[torch.optim.Optimizer], set[int]]] = {}
        """By ``id``, in the order of their first steps: optimizers, and what had a gradient then."""
        self._depth = threading.local()
        """Of steps that have begun: ZeroRedundancyOptimizer steps another, on this rank's part."""
        self._has_compared = False
        peers.seat.looks_beside = members.options.check_every != 0
        if peers.seat.looks_beside:
            listen(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        depth = self._depth.steps = max(getattr(self._depth, "steps", 0) + (1 if begins else -1), 0)
        if not begins or depth > 1 or id(optimizer) in self._seen:
            return
        if found := {id(one) for one in stepped_by(optimizer) if not _is_under_way(one) and one.grad is not None}:
            gone = functools.partial(_forget, self._seen, id(optimizer))
            self._seen[id(optimizer)] = weakref.ref(optimizer, gone), found

    def stop(self) -> None:
        """Look no more. Harmless twice."""
        self._seen.clear()
        stop_listening(self._stepping)

    def says(self, number: int) -> list[int]:
        """What the last bucket of the pass is to tell."""
        self._depth.steps = 0
        if number in PASSES and self._found(number):
            return [Control.UNATTACHED]
        if number + _BEFORE in PASSES and self._peers.seat.looks_beside and not self._has_compared:
            listen(self._stepping)
        elif number in PASSES:
            self._peers.seat.looks_beside &= number < PASSES[-1] or self._has_compared
            self.stop()
        return []

    def hear(self, said: Sequence[float], number: int, *, idle: bool) -> None:
        """Compare, if some rank has what could be compared, and tell of what differs. Collective then.

        Args:
            said: what all ranks told in the pass.
            number: of the pass.
            idle: this rank does not step any more.
        """
        if not said[Control.UNATTACHED]:
            return
        self._has_compared = True
        names, lines = unlike(None if idle else self._found(number) or None, self._peers.gather, in_common=True)
        if names and self._speaks:
            self._tell(names, lines, number)
        self.stop()

    def _found(self, number: int) -> dict[str, torch.Tensor]:
        """By names that tell the optimizer, too. Nothing if a handle that was attached earlier is to look."""
        if self._members.module() is None:
            return {}
        seen = [(one, had) for reference, had in [*self._seen.values()] if (one := reference()) is not None]
        everything = [one for optimizer, _ in seen for one in stepped_by(optimizer) if not _is_under_way(one)]
        owners: set[Any] = {owner_of(one) for one in everything} - {None}
        if any(self._leaves_it_to(owner, number) for owner in owners):
            return {}
        known = ids_of([self._members, *(owner.members for owner in owners)])
        apart = [(type(one).__name__, alone) for one, had in seen if (alone := _alone_in(one, had, known))]
        kinds, numbers, found = Counter(kind for kind, _ in apart), Counter[str](), dict[str, torch.Tensor]()
        for kind, alone in apart:  # with their number: ranks with different numbers compare none
            numbers[kind] += 1
            which = kind if kinds[kind] == 1 else f"{kind} {numbers[kind]} of {kinds[kind]}"
            found |= {f"{name} of {which}": one for name, one in alone.items()}
        return found

    def _leaves_it_to(self, owner: Any, number: int) -> bool:
        """One that was attached earlier, looks or has looked, and trains about as often."""
        seat: Seat = owner.queue.peers.seat
        return seat.looks_beside and seat.number < self._peers.seat.number and 2 * owner.queue.pass_number >= number

    def _tell(self, names: Sequence[str], lines: Sequence[str], number: int) -> None:
        log.warning(
            "pass %s of %s: an optimizer steps %s, which no handle averages, and ranks hold different values of it.\n"
            "%s\n"
            "Attach the module that it belongs to; or, if it belongs to none, average its gradient on all ranks before "
            "each step, stretto.reduce([parameter.grad]), and start from equal values. If ranks are meant to differ "
            "there, ignore this. Shown once; check_every=0 never looks.",
            number,
            type(self._members.module()).__name__,
            name_list(names),
            "\n".join(lines),
        )


def _alone_in(optimizer: torch.optim.Optimizer, had: set[int], known: set[int]) -> dict[str, torch.Tensor]:
    """By name. Nothing, if any of them is known: what else an optimizer of such steps is told of at once."""
    if any(_is_under_way(one) or owner_of(one) is not None or id(one) in known for one in stepped_by(optimizer)):
        return {}
    return {
        name_in(group, number, place): one
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
        if id(one) in had and not wrapping({"": one})
    }


def _forget(seen: dict[int, tuple[weakref.ref[torch.optim.Optimizer], set[int]]], key: int, gone: object) -> None:
    if key in seen and seen[key][0] is gone:
        del seen[key]


def _is_under_way(parameter: torch.Tensor) -> bool:
    """Then it belongs to a handle, and reading it would wait."""
    return has_torch_function_unary(parameter)
