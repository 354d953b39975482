"""What an optimizer steps although no handle averages it, or with gradients that were not averaged: named once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

from .arrivals import owner_of
from .launch import LaunchQueue
from .membership import Membership, ids_of
from .selection import wrapping
from .steps import leave, listen, name_in, stepped_by, stop_listening, tells_first
from .tracker import ArrivalTracker
from .unbrought import Unbrought, of_this_rank
from .wording import counted, name_list

STEPS = 32
"""So many optimizer steps are watched, or ``OWN_STEPS`` steps of those that step averaged parameters."""
OWN_STEPS = 3

log = logging.getLogger("stretto")


class SteppedAlone:
    """What an optimizer steps along with averaged parameters, and no handle averages: a head, say, next to an encoder.

    Nothing else would tell: its gradients reach no hook, and ranks are only compared in what is attached. Or all of it,
    where another module was attached. And gradients that it steps before they were averaged.

    Args:
        queue: has the parameters that are averaged.
        members: knows the module.
        tracker: knows which of them have got a gradient that was not.
    """

    def __init__(self, queue: LaunchQueue, members: Membership, tracker: ArrivalTracker) -> None:
        self._queue, self._members = queue, members
        self._steps = self._all_steps = 0  # since the first pass: of what is averaged, and of any optimizer
        self._early_steps = 0  # before it, of nothing that a handle averages
        self._optimizer = ""  # the kind that made the last of these
        self._looks_alike = False  # whether what it stepped has all the shapes of what is attached
        self._reached = False  # by a backward that was not synchronised
        self._began_with: tuple[int, list[str]] = 0, []
        self._tracker, self._unbrought = tracker, Unbrought(queue, tracker)
        if queue.transport.rank == 0:
            listen(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        queue = self._queue
        if not begins:
            return
        if not queue.pass_number:
            self._look_whether_others_train(optimizer)
            return
        self._all_steps += 1
        mine = {id(reference()) for reference in queue.references}
        if not mine.isdisjoint(map(id, stepped_by(optimizer))):
            self._steps += 1
            if alone := self._alone_in(optimizer):
                self._all_steps = STEPS
                if tells_first(optimizer):
                    self._warn(type(optimizer).__name__, alone)
        if self._steps == OWN_STEPS or self._all_steps >= STEPS:
            stop_listening(self._stepping)

    def _look_whether_others_train(self, optimizer: torch.optim.Optimizer) -> None:
        """No pass yet: was another module attached than the one that is trained, a copy of it, say?"""
        if self._reached:
            return
        stepped = [one for one in stepped_by(optimizer) if one.grad is not None]
        if not stepped:
            return
        own = ids_of([self._members])
        under_way = any(map(has_torch_function_unary, stepped))  # so a handle has it, and nothing of it is read
        alone = not under_way and all(owner_of(one) is None and id(one) not in own for one in stepped)
        self._early_steps = self._early_steps + 1 if alone else 0
        self._optimizer = type(optimizer).__name__
        wanted = Counter(tuple(spec.shape) for spec in self._queue.plan.parameters)
        self._looks_alike = wanted <= Counter(tuple(one.shape) for one in stepped)
        if self._early_steps == STEPS:
            self._tell_that_others_train()

    def _tell_that_others_train(self) -> None:
        stop_listening(self._stepping)
        log.warning(
            "%s: %s of %s, which no handle averages, and no backward has reached the attached module: each rank may be "
            "training its own model.\n"
            "Attach the module that you train, not an earlier one that it was copied or rebuilt from. If it is "
            "averaged in another way, or each rank is meant to train its own first, ignore this. Shown once.",
            self._queue.where,
            counted(self._early_steps, "steps"),
            self._optimizer,
        )
        self._early_steps = 0

    def kept(self) -> None:
        """A backward is not synchronised, the first one that is not: from here on every step is looked at."""
        self._reached = True
        if self._queue.transport.rank == 0:
            listen(self._stepping_kept)

    def _stepping_kept(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        """With gradients of a backward that was not synchronised? A closure may run another, that is, in the step."""
        if self._queue.peers.seat.in_pass:  # torch's _apply_optimizer_in_backward steps with the mean
            return
        if begins:
            self._began_with = id(optimizer), self._kept_of(optimizer)
            return
        (began, before), self._began_with = self._began_with, (0, [])
        kept = (before if began == id(optimizer) else []) or self._kept_of(optimizer)
        if kept and self._tracker.unsynchronized:
            stop_listening(self._stepping_kept)
            log.warning(
                "%s: a step with gradients of this rank only, from a backward inside no_sync(): %s. Each rank steps "
                "with its own gradients.\n"
                "Run the last backward before each step outside no_sync(), also in the last, shorter round of an "
                "epoch. If gradients, or later the weights, are averaged in another way, ignore this. Shown once.",
                self._queue.where,
                name_list(kept),
            )

    def _kept_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of those that a backward without synchronisation has reached."""
        return of_this_rank(self._queue, optimizer, self._tracker.alive(sorted(self._tracker.unsynchronized)))

    def _alone_in(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Their names. The module's own values are not read, since after a sharded step they may be under way."""
        here, groups = ids_of([self._members]), optimizer.param_groups
        others = [
            (number, place, one)
            for number, group in enumerate(groups)
            for place, one in enumerate(group["params"])
            if id(one) not in here
        ]
        owners: Iterable[Any] = {owner_of(one) for *_, one in others} - {None}
        there = ids_of([owner.members for owner in owners])  # what is not averaged there is left out on request
        return [
            name_in(groups[number], number, place)
            for number, place, one in others
            if id(one) not in there and one.grad is not None and owner_of(one) is None and not wrapping({"": one})
        ]

    def stop(self) -> None:
        """Look no more: the handle ends. Harmless twice."""
        if self._early_steps and self._looks_alike and not (self._queue.pass_number or self._reached):
            self._tell_that_others_train()  # in fewer steps than make sure of it, but of a copy by its looks
        stop_listening(self._stepping)
        stop_listening(self._stepping_kept)
        self._unbrought.stop()
        leave()

    def _warn(self, optimizer: str, names: list[str]) -> None:
        log.warning(
            "%s: %s steps %s, which no handle averages, beside parameters that one does: each rank may train its own.\n"
            "Attach the module that holds all of them, or this part as well. If they are meant to differ, or are "
            "averaged in another way, ignore this. Shown once.",
            self._queue.where,
            optimizer,
            name_list(names),
        )
