"""Gradients that no backward brings, of ``torch.autograd.grad``, say: no hook sees them, and nobody averages them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import torch

from .launch import LaunchQueue
from .steps import elements_averaged, is_averaged, listen, stepped_by, stop_listening
from .tracker import ArrivalTracker
from .wording import name_list

STEPS = 3
"""So many steps with such gradients are told of, since torch makes an optimizer's state in one."""
LOOKS = 32
"""Steps are looked at, each of which may stop the host."""

log = logging.getLogger("stretto")


def of_this_rank(
    queue: LaunchQueue, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[int, torch.nn.Parameter]]
) -> list[str]:
    """Names of those, given with their index, that the optimizer steps with what this rank alone has.

    Gradients that were zeroed are as good as none; others ``stretto.reduce`` has averaged since its last step. Nothing
    is said while a CUDA graph is captured, which a look at values would break off.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return []
    stepped = {*map(id, stepped_by(optimizer))}
    return [
        queue.names[index]
        for index, one in parameters
        if id(one) in stepped
        and type(one.grad) is torch.Tensor
        and not is_averaged(one.grad, optimizer)
        and one.grad.any()
    ]


class Unbrought:
    """Looks at the steps before the first pass, where they end: a closure may have made the gradients.

    Later the check of replicas tells, which travels with the passes: spot_checks.py.

    Args:
        queue: has the parameters that are averaged.
        tracker: knows which of them have got a gradient that was not.
    """

    def __init__(self, queue: LaunchQueue, tracker: ArrivalTracker) -> None:
        self._queue, self._tracker = queue, tracker
        self._steps = self._looks = 0
        self._given = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        """How many elements ``stretto.reduce`` had been given by the end of the last step of each."""
        self._begun = elements_averaged()
        self._first: weakref.ref[torch.optim.Optimizer] | None = None  # alone is counted: it may step another
        if queue.transport.rank == 0:
            listen(self._stepping)

    def stop(self) -> None:
        """Look no more. Harmless twice."""
        stop_listening(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        queue, tracker = self._queue, self._tracker
        if queue.pass_number or tracker.unsynchronized or self._looks == LOOKS:
            self.stop()
            return
        if begins:
            return
        stepped = {*map(id, stepped_by(optimizer))}
        mine = [one for one in tracker.alive(range(len(queue.names))) if id(one[1]) in stepped]
        if not (mine := [(index, one) for index, one in mine if one.grad is not None]):
            return
        self._looks += 1
        before, self._given[optimizer] = self._given.get(optimizer, self._begun), elements_averaged()
        if self._given[optimizer] - before >= sum(one.numel() for _, one in mine):  # what is stepped may be made of it
            return
        names = of_this_rank(queue, optimizer, mine)
        if names and self._first is None:
            self._first = weakref.ref(optimizer)
        if names and self._first is not None and self._first() is optimizer:
            self._steps += 1
            if self._steps == STEPS:
                self.stop()
                self._warn(names)

    def _warn(self, names: list[str]) -> None:
        log.warning(
            "%s: %s have gradients that no backward has brought, and that stretto.reduce has not averaged: each rank "
            "seems to step with its own.\n"
            "Call stretto.reduce([p.grad for p in parameters]) before each step, for other than all ranks with "
            "process_group=: so after torch.autograd.grad and torch.func.grad, and after a pipeline that splits "
            "backward, which is to run inside no_sync(). If they are averaged in another way, ignore this. Shown once.",
            self._queue.where,
            name_list(names),
        )
