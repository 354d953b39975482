"""What one rank notices at the end of a pass: its module is not what the plan is for. All then follow: rejoin.py."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from .bucket import Bucket
from .changes import Changes, Followers
from .comm_hooks import fixes_plan
from .postponed import Noticed, Postponed
from .preset import Preset
from .specs import describe_parameters
from .withheld import Withheld


class Noticing:
    """Looks at this rank's module."""

    def __init__(self, followers: Followers) -> None:
        self.changes = Changes(followers)
        """Compares it with the plan."""
        self.postponed = Postponed(self.changes, followers)
        self._members = followers.members
        self._places = followers.places
        self._queue = followers.queue
        self._tracker = followers.tracker
        self._rows = followers.rows

    def look(self) -> Noticed | None:
        """At the end of a pass: does the plan no longer fit the module?"""
        queue, members, due = self._queue, self._members, self.postponed.is_due()
        # To wait for its first gradient, which may come on some ranks only, lets the others follow a pass too late.
        asks = queue.buckets[-1].footer.comes_late and not fixes_plan(queue.comm_hook)
        unfrozen = asks and members.some_unfrozen()
        if members.tables.have_changed(queue.pass_number) or unfrozen:
            members.suspect = True
        if self._places.any:
            self._places.look()
        incomplete = [bucket for bucket in queue.buckets if bucket.pending or bucket.missing]
        if incomplete and not fixes_plan(queue.comm_hook) and not members.suspect and self._some_do_not_fit(incomplete):
            members.suspect = True
        moved = self._places.changed or (self._rows.any and self._rows.misfits())
        if not (due or members.suspect or queue.loose or moved):
            return None
        self.drop_withheld()
        arrived = {queue.names[i] for i in self._tracker.unsynchronized.union(self._tracker.arrival_order())}
        arrived |= self._rows.seen()
        waiting = self._frozen_with_gradient(arrived)
        before = {} if queue.preset is None else self._before(queue.preset, arrived)
        differs = due or (self._differs(waiting) and (not fixes_plan(queue.comm_hook) or self.changes.loses()))
        return Noticed(arrived, before, waiting) if differs else None

    def drop_withheld(self) -> None:
        """Of parameters no longer in the module: a rank without new gradients in a pass sends what is in ``.grad``."""
        alive = self._tracker.alive(range(len(self._queue.names))) if self._queue.has_left_shares else ()
        if withheld := [one for _, one in alive if isinstance(one.grad, Withheld)]:
            self._members.drop_withheld(withheld)

    def _before(self, preset: Preset, arrived: Set[str]) -> dict[str, torch.Tensor]:
        """Where something has come in this pass; all of ``.grad`` was there elsewhere."""
        held = self.changes.held()
        outside = {name: one for name, one in self._members.everything().items() if held.get(name) is not one}
        came = {name: name in arrived for name in held} | self.changes.came(outside, arrived)
        before = {name: preset.before(one) for name, one in {**held, **outside}.items() if came[name]}
        return {name: value for name, value in before.items() if value is not None}

    def _frozen_with_gradient(self, arrived: Set[str]) -> set[str]:
        """It has come in a pass without synchronisation, before they were frozen, and no bucket carries it."""
        queue, members = self._queue, self._members
        planned, old_names = self._tracker.alive(range(len(queue.names))), self.changes.old_names()
        loose = {id(one) for index, one in planned if not queue.fits(index, one)}
        loose |= {id(one) for one in self._rows.misfits().values()}
        frozen = {n: one for n, one in members.everything().items() if not one.requires_grad and one.grad is not None}
        outside = {n for n, one in frozen.items() if id(one) not in old_names and members.hooked(one)}
        came = {n for n, one in frozen.items() if id(one) in loose and old_names[id(one)] in arrived}
        return {name for name in outside if members.got_gradient(frozen[name])} | came

    def _some_do_not_fit(self, buckets: Iterable[Bucket]) -> bool:
        alive, specs = self._tracker.alive(i for bucket in buckets for i in bucket.indices), self._queue.plan.parameters
        frozen = any(not one.requires_grad and self._members.may_leave(self._queue.names[i]) for i, one in alive)
        return frozen or any((p.dtype, p.shape) != (specs[i].dtype, specs[i].shape) for i, p in alive)  # no .grad tells

    def _differs(self, waiting: Set[str]) -> bool:
        """Compare the module with the plan; if nothing has changed, know it for the next time."""
        wanted, module = self._members.wanted(), self._members.module()
        if module is None:
            self.changes.refuse_orphans()
        if module is None or not wanted:
            return False
        if (
            waiting
            or self.changes.loses()
            or describe_parameters(wanted, self._members.options.reduce_dtypes(wanted)) != self._queue.plan.parameters
            or self._members.strangers()
        ):
            return True
        self._members.remember()
        return False
