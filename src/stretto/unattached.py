"""Parameters that an optimizer steps beside a handle, and no handle averages: are they alike on all ranks?

A temperature (``log_alpha``) with an optimizer of its own, say, or a second model that nobody attached. It is right
where the program averages by itself, or where ranks are to differ, and wrong without a word otherwise. So where some
rank has such parameters, and says so in a word of a pass, all ranks compare theirs, once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .arrivals import owner_of
from .check import unlike
from .errors import name_list
from .membership import Membership, wrapping
from .peers import Peers
from .steps import listen, name_in, stepped_by, stop_listening
from .words import Control

PASSES = (32, 256)
"""In which ranks say whether they have such: what has moved on each rank by itself differs by then."""

log = logging.getLogger("stretto")


class Unattached:
    """What is stepped beside one handle. Optimizers that step also what a handle averages are told of by usage.py.

    Args:
        members: the handle's parameters.
        peers: the other ranks.
        speaks: this rank tells for all.
    """

    def __init__(self, members: Membership, peers: Peers, *, speaks: bool) -> None:
        self._members, self._peers, self._speaks = members, peers, speaks
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}  # that have stepped, by id, in order
        if members.options.check_every != 0:
            listen(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        known = self._optimizers.get(id(optimizer))
        if begins and (known is None or known() is not optimizer):
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)

    def stop(self) -> None:
        """Look no more. Harmless twice."""
        self._optimizers.clear()
        stop_listening(self._stepping)

    def says(self, number: int) -> list[int]:
        """What the last bucket of the pass is to tell."""
        if number not in PASSES:
            return []
        if self._found():
            return [Control.UNATTACHED]
        if number == PASSES[-1]:
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
        names, lines = unlike(None if idle else self._found() or None, self._peers.gather)
        if names and self._speaks:
            self._tell(names, lines, number)
        self.stop()

    def _found(self) -> dict[str, torch.Tensor]:
        """By names that tell the optimizer, too. None if a handle that was attached earlier looks."""
        optimizers = [one for reference in self._optimizers.values() if (one := reference()) is not None]
        owners: set[Any] = {owner_of(parameter) for one in optimizers for parameter in stepped_by(one)} - {None}
        if any(owner.queue.peers.seat.number < self._peers.seat.number for owner in owners):
            return {}
        apart = [found for one in optimizers if (found := self._alone_in(one))]
        return {
            f"{kind}{f' {number}' * (len(apart) > 1)}, {name}": parameter
            for number, (kind, found) in enumerate(apart, 1)
            for name, parameter in found.items()
        }

    def _alone_in(self, optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, torch.Tensor]] | None:
        """None if any of them is known: what else an optimizer of such steps is told of at once."""
        own = {id(one) for one in self._members.all_parameters()}
        if any(owner_of(one) is not None or id(one) in own for one in stepped_by(optimizer)):
            return None
        found = {
            name_in(group, number, place): one
            for number, group in enumerate(optimizer.param_groups)
            for place, one in enumerate(group["params"])
            if one.grad is not None and not wrapping({"": one})
        }
        return (type(optimizer).__name__, found) if found else None

    def _tell(self, names: Sequence[str], lines: Sequence[str], number: int) -> None:
        log.warning(
            "pass %s of %s: an optimizer steps %s, which no handle averages, and ranks hold other values of it.\n"
            "%s\n"
            "Attach the module that holds it; or average the gradient of what is in no module before it is stepped, on "
            "all ranks: stretto.reduce([parameter.grad]). Where ranks are to differ there, all is well. Told once; "
            "check_every=0 never looks.",
            number,
            type(self._members.module()).__name__,
            name_list(names),
            "\n".join(lines),
        )
