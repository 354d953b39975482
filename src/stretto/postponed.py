"""A change that some ranks alone have noticed, where words come late: all follow it together, a pass later.

    CHANGED in the words of pass n, not by all ──> hold_back() ──step──> resume() in pass n + 1 ──> all say CHANGED

On an accelerator, ranks that have noticed nothing read the words after their step. If those that have followed at once,
a layer would be stepped by them first, or the messages would cross those of a sharded step. So the gradients that no
bucket has carried are held back: no rank steps with them before all have their mean. They then count as if they had
come without synchronisation before the next pass in which this rank has a part: to a shadow pass it gives nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch

from .changes import Changes, Followers


@dataclass(frozen=True)
class Noticed:
    """Which gradients this rank has in a pass in which it has noticed a change; empty where it has not."""

    arrived: Set[str] = frozenset()
    """Names of planned ones that have got one."""
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What was in ``.grad`` before that, where it matters."""
    waiting: Set[str] = frozenset()
    """Names of frozen ones that nothing carries, with a gradient from before they were frozen."""


class Postponed:
    """What this rank holds back, and whether it is to notice a change that others have."""

    def __init__(self, changes: Changes, followers: Followers) -> None:
        self._changes = changes
        self._members = followers.members
        self._queue = followers.queue
        self._tracker = followers.tracker
        self._held: list[tuple[weakref.ref[torch.nn.Parameter], torch.Tensor]] = []
        self._is_due = False

    def is_due(self) -> bool:
        """Whether all ranks are to notice something in the pass that ends. Once; and nothing is held back any more."""
        due, self._is_due, self._held = self._is_due, False, []
        return due

    def hold_back(self, noticed: Noticed) -> None:
        """Take out of ``.grad`` what no bucket has carried, and leave there what the other ranks have."""
        lost, planned = self._lost(noticed), self._changes.held()
        here = {id(one) for one in self._members.everything().values()}
        carried = self._changes.carried({name: name for name in lost})
        for name, one in lost.items():
            assert one.grad is not None
            before, others = noticed.before.get(name), carried.get(name)
            self._held.append((weakref.ref(one), one.grad if before is None else one.grad - before))
            one.grad = before
            if others is not None and others.shape == one.shape:
                one.grad = torch.empty_like(one).copy_(others)
                if (old := planned.get(name)) is not None and id(old) not in here:
                    old.grad = None  # of a layer that was replaced: it would be sent once more

    def _lost(self, noticed: Noticed) -> dict[str, torch.nn.Parameter]:
        everything, old_names = self._members.everything().items(), self._changes.old_names()
        outside = {n: one for n, one in everything if id(one) not in old_names and self._members.got_gradient(one)}
        came = {name: one for name, one in self._changes.misfits().items() if name in noticed.arrived}
        return {name: one for name, one in (outside | came).items() if one.grad is not None}

    def follow(self) -> None:
        """All ranks with batches are to follow at the end of the pass that begins."""
        self._is_due = True

    def pass_by(self) -> None:
        """All have followed, in a pass to which this rank gave nothing; what it holds back comes in its next one."""
        self._is_due = self._is_due and bool(self._held)

    def resume(self) -> None:
        """A pass begins in which this rank has a part: give back what was held, if it is to follow."""
        if not self._is_due:
            return
        preset, held, self._held = self._queue.preset, self._held, []  # once, even if the pass is given up
        for reference, gradient in held:
            if (one := reference()) is None or one.shape != gradient.shape:
                continue
            if preset is not None:
                preset.look(one)
            if gradient.layout == torch.strided:
                gradient = torch.empty_like(one).copy_(gradient)  # its dtype and strides may have changed again
            one.grad = gradient if one.grad is None else one.grad + gradient
            if preset is not None:
                preset.accumulated(one)
            if id(one) in self._tracker.index_of:
                self._tracker.unsynchronized.add(self._tracker.index_of[id(one)])
            else:
                self._members.claim(one)  # forgotten, if all others have followed meanwhile
