"""After the module of some rank has changed: all ranks agree anew, at the same pass, and cut a new plan.

    a hook of membership.py, a misfit, a frozen one ──> noticed() ──> CHANGED in the last bucket ──sum──> all_together()

[Note: loose gradients]  A parameter that is new, or no longer fits its slot (another dtype, another shape), is *loose*
in the pass in which the change is noticed: the old buckets carry nothing for it. Its gradient is reduced here, before
``backward`` returns, in the new bucket. If it is loose on some ranks only (they replaced a layer by one just like it),
a part of its sum is in the old bucket, and is added.

[Note: order of messages]  Each step of ``all_together`` depends only on the results of earlier steps, so all ranks send
the same. 1. They tell which frozen parameters have a gradient all the same. 2. They compare what they have, and raise
here or not at all. 3. What is in shares is put together, so that nothing is half moved if a later step fails. 4. They
tell what is loose, what was trained unseen, what can stay in shares (what no rank has replaced), and what was carried
by another name (if by the same on all ranks, and it fits, nothing is to be done). 5. Rank 0's values of what is loose
or a stranger on any rank, and the buffers. 6. New buckets, which need no message. 7. What is loose, in each new bucket
that has some. 8. What is loose and sparse, if any is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from .agreement import Statement, agree, state_model
from .arrivals import owner_of
from .broadcast import broadcast_coalesced
from .bucket import Bucket
from .buffers import BufferPlaces
from .changes import Changes, warn_of_unseen
from .comm_hooks import fixes_plan
from .errors import SetupError
from .launch import LaunchQueue
from .loose import Contribution, reduce_dense, reduce_rows
from .membership import Membership, named, unfit
from .plan import BucketPlan
from .preset import Preset
from .sizing import plan_for
from .sparse import SparseGradients
from .specs import describe_parameters
from .tracker import ArrivalTracker
from .usage import follow_a_change, used_by
from .withheld import Alive, Withheld, complete, give_back_whole
from .wording import describe_ranks, name_list, ranks_by

log = logging.getLogger("stretto")

ADVICE = "Change the model in the same way on all ranks, between the same two passes."


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others of its parameters."""

    loose: dict[str, bool]
    """Names, and whether there is a gradient of this pass."""
    in_shares: set[str]
    """Names of those whose gradients can stay in shares."""
    renamed: dict[str, str]
    """Names of those that the old buckets or rows have by another name, and that one."""
    misfits: set[str]
    """Names of those that they have, and have not carried."""
    unseen: dict[str, int]
    """As :meth:`Membership.unseen`."""


class Rejoin:
    """Notices changes on this rank, and follows those that any rank has noticed.

    Args:
        members: what the module has.
        places: where its buffers are.
        queue: has the plan.
        tracker: knows what has arrived.
        rows: the parameters in no bucket.
    """

    def __init__(
        self,
        members: Membership,
        places: BufferPlaces,
        queue: LaunchQueue,
        tracker: ArrivalTracker,
        rows: SparseGradients,
    ) -> None:
        self._members = members
        self._places = places
        self._queue = queue
        self._tracker = tracker
        self._rows = rows
        self._changes = Changes(members, queue, rows)
        self._arrived: set[str] = set()
        """Names of planned ones that have got a gradient in the pass in which a change was noticed."""
        self._before: dict[str, torch.Tensor] = {}
        """What was in ``.grad`` before that, where it matters."""
        self._waiting: set[str] = set()
        """Names of frozen ones that nothing carries, with a gradient from before they were frozen."""

    # Noticing, on one rank

    def noticed(self) -> bool:
        """At the end of a pass: does the plan no longer fit the module?"""
        queue, members = self._queue, self._members
        self._arrived, self._before, self._waiting = set(), {}, set()
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
        if not (members.suspect or queue.loose or self._places.changed or (self._rows.any and self._rows.misfits())):
            return False
        self.drop_withheld()
        self._arrived = {queue.names[i] for i in self._tracker.unsynchronized.union(self._tracker.arrival_order())}
        self._arrived |= self._rows.seen()
        self._waiting = self._frozen_with_gradient()
        if queue.preset is not None:
            self._before = self._held_before(queue.preset)
        return self._differs() and (not fixes_plan(queue.comm_hook) or self._loses())

    def drop_withheld(self) -> None:
        """Of parameters no longer in the module: a rank without new gradients in a pass sends what is in ``.grad``."""
        alive = self._tracker.alive(range(len(self._queue.names))) if self._queue.has_left_shares else ()
        if withheld := [one for _, one in alive if isinstance(one.grad, Withheld)]:
            self._members.drop_withheld(withheld)

    def _held_before(self, preset: Preset) -> dict[str, torch.Tensor]:
        """All of ``.grad`` where nothing has come in this pass. Of frozen ones too: another rank may ask for them."""
        held = self._held()
        outside = {name: one for name, one in self._members.everything().items() if held.get(name) is not one}
        came = {name: name in self._arrived for name in held} | self._came(outside)
        before = {name: preset.before(one) if came[name] else one.grad for name, one in {**held, **outside}.items()}
        return {name: value for name, value in before.items() if value is not None}

    def _frozen_with_gradient(self) -> set[str]:
        """It has come in a pass without synchronisation, before they were frozen, and no bucket carries it."""
        queue, members = self._queue, self._members
        planned, old_names = self._tracker.alive(range(len(queue.names))), self._old_names()
        loose = {id(one) for index, one in planned if not queue.fits(index, one)}
        loose |= {id(one) for one in self._rows.misfits().values()}
        frozen = {n: one for n, one in members.everything().items() if not one.requires_grad and one.grad is not None}
        outside = {n for n, one in frozen.items() if id(one) not in old_names and members.hooked(one)}
        came = {n for n, one in frozen.items() if id(one) in loose and old_names[id(one)] in self._arrived}
        return {name for name in outside if members.got_gradient(frozen[name])} | came

    def _loses(self) -> bool:
        module = self._members.module()
        moved = self._places.changed or (module is not None and self._places.moved(module))
        return moved or self._changes.loses()

    def refuse(self) -> None:
        """With a comm hook, which knows buckets by their index, only harmless changes can be followed.

        Collective, unless the hook stands for no communication.

        Raises:
            SetupError: gradients of this pass have stayed on some rank. On all ranks.
        """
        queue = self._queue
        mine = self._changes.in_words() if self._loses() else ""
        everyone = queue.peers.gather(mine) if queue.tells else [mine] * queue.transport.world_size
        changed = ranks_by(enumerate(everyone)).items()
        told = "; ".join(f"{change} on {describe_ranks(ranks)}" for change, ranks in changed if change)
        raise SetupError(
            f"{queue.where}: the module has changed since it was attached ({told}), and a comm hook keeps its "
            "state by bucket, so the plan cannot follow.\n"
            "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
        )

    def _some_do_not_fit(self, buckets: Iterable[Bucket]) -> bool:
        alive, specs = self._tracker.alive(i for bucket in buckets for i in bucket.indices), self._queue.plan.parameters
        frozen = any(not one.requires_grad and self._members.may_leave(self._queue.names[i]) for i, one in alive)
        return frozen or any((p.dtype, p.shape) != (specs[i].dtype, specs[i].shape) for i, p in alive)  # no .grad tells

    def _differs(self) -> bool:
        """Compare the module with the plan; if nothing has changed, know it for the next time."""
        wanted, module = self._members.wanted(), self._members.module()
        if module is None:
            self._changes.refuse_orphans()
        if module is None or not wanted:
            return False
        if (
            self._waiting
            or self._loses()
            or describe_parameters(wanted, self._members.options.reduce_dtypes(wanted)) != self._queue.plan.parameters
            or self._members.strangers()
        ):
            return True
        self._members.remember()
        return False

    # Following, on all ranks

    def all_together(self, *, idle: bool) -> None:
        """Follow the change: see [Note: order of messages]. Collective.

        Args:
            idle: this rank had no part in the pass, and ``.grad`` is to be left alone.

        Raises:
            ModelMismatchError: modules have not changed alike. The same difference on all ranks.
        """
        queue, members = self._queue, self._members
        members.keep({name for waiting in queue.peers.gather(self._waiting) for name in waiting})
        wanted, rows = members.wanted(), members.rows()
        now = {**wanted, **rows}
        plan = plan_for(wanted, members.options, queue.transport, [queue.names[i] for i in queue.plan.order])
        module = self._agree(wanted, rows, plan)
        complete(queue.buckets, queue.transport, queue.wait_for)  # before anything moves, should a rank fail here
        give_back_whole(queue.buckets, but=wanted.values())  # frozen ones that leave the plan may still be stepped
        in_shares = {name for name, one in wanted.items() if queue.in_shares.holds(one)}
        renamed, misfits = self._renamed(now)
        mine = _Told(self._loose(wanted, rows, idle=idle), in_shares, renamed, misfits, members.unseen())
        told = queue.peers.gather(mine)
        olds = {n: old for n, old in renamed.items() if all(one.renamed.get(n) == old for one in told)}
        everyone = [{n: has for n, has in one.loose.items() if n not in olds or n in one.misfits} for one in told]
        in_shares.intersection_update(*(one.in_shares for one in told))
        loose = {name for one in everyone for name in one}
        words, factor = self._changes.in_words(), queue.scaling.after(queue.buckets[-1].footer.weight)
        contributions = self._contributions(everyone[queue.transport.rank], renamed.keys() - misfits, now, idle=idle)
        partly = [name for name in loose if not all(name in one for one in everyone)]
        carried = self._carried({olds.get(name, name): name for name in partly})
        rows_used = self._rows.used_by
        used = used_by(queue) | rows_used
        self._send_values(loose)
        self._places.begin_anew(module, queue.transport, queue.wait_for)
        queue.in_shares = Alive(wanted[name] for name in in_shares)
        queue.rebuild(wanted, plan)
        self._tracker.rebuild(list(wanted.values()))
        dtypes = members.options.reduce_dtypes(rows)
        self._rows.rebuild(rows, dtypes)
        follow_a_change(queue, self._rows, used, olds, everyone)
        members.follow(now)
        had = {name for name in loose if name in carried or any(one.get(name) for one in everyone)}
        reduce_dense(queue, had & wanted.keys(), contributions, carried, factor, release=not idle)
        if loose & rows.keys():
            among = {name: one for name, one in rows.items() if name in loose}
            reduce_rows(queue, among, dtypes, everyone, rows_used, self._before, factor, release=not idle)
        self._arrived, self._before, self._waiting = set(), {}, set()
        self._tell(words, plan, [one.unseen for one in told])

    def _agree(
        self, wanted: Mapping[str, torch.nn.Parameter], rows: Mapping[str, torch.nn.Parameter], plan: BucketPlan
    ) -> torch.nn.Module:
        transport, module = self._queue.transport, self._members.module()
        statement = self._statement(module, {**wanted, **rows}, {"plan": plan.hash, "sparse parameters": [*rows]})
        agree(statement, transport.rank, self._queue.peers.gather, f"pass {self._queue.pass_number}", ADVICE)
        assert module is not None
        return module

    def _statement(
        self, module: torch.nn.Module | None, wanted: Mapping[str, torch.nn.Parameter], facts: Mapping[str, object]
    ) -> Statement:
        mine = self._tracker.arrivals.owner
        everything = self._members.everything()
        foreign = [name for name, one in wanted.items() if owner_of(one) not in (None, mine)]
        if module is None or not wanted:
            return Statement((), "the module was freed, or has no parameter any more that requires a gradient")
        buffers = named(module, self._members.options, "buffers") if self._places.policy != "none" else {}
        if reason := unfit(everything | buffers):
            return Statement((), reason)
        if foreign:
            return Statement((), f"{name_list(foreign)} are attached already, as part of another module")
        return state_model(everything, buffers, facts)

    def _loose(
        self, wanted: Mapping[str, torch.nn.Parameter], rows: Mapping[str, torch.nn.Parameter], *, idle: bool
    ) -> dict[str, bool]:
        """Names of what is loose on this rank, and whether there is a gradient of this pass for it."""
        members, outside = self._members, self._changes.outside()
        found = {name: came and outside[name].grad is not None for name, came in self._came(outside).items()}
        for name in (*self._changes.misfits(), *self._rows.misfits()):
            one = wanted.get(name, rows.get(name))
            found.setdefault(name, name in self._arrived and one is not None and one.grad is not None)
        found = {name: has and not idle for name, has in found.items() if name in wanted or name in rows}
        return found | dict.fromkeys(members.strangers(), False)

    def _came(self, outside: Mapping[str, torch.nn.Parameter]) -> dict[str, bool]:
        """Which of those that nothing carries by their names have got a gradient: some are carried by others."""
        old_names, members = self._old_names(), self._members
        olds = {name: old_names.get(id(one)) for name, one in outside.items()}
        return {n: members.got_gradient(outside[n]) if old is None else old in self._arrived for n, old in olds.items()}

    def _old_names(self) -> dict[int, str]:
        """By ``id()``, what the plan and the rows call the parameters."""
        return {id(one): name for name, one in self._held().items()}

    def _held(self) -> dict[str, torch.nn.Parameter]:
        """What the plan and the rows have and what still lives, by its name there."""
        planned = {self._queue.names[i]: one for i, one in self._tracker.alive(range(len(self._queue.names)))}
        return planned | self._rows.named_parameters()

    def _renamed(self, now: Mapping[str, torch.nn.Parameter]) -> tuple[dict[str, str], set[str]]:
        """Names of what the plan or the rows have by another name, and that one; names of what does not fit there."""
        old_names = self._old_names()
        misfits = {id(one) for one in (*self._changes.misfits().values(), *self._rows.misfits().values())}
        renamed = {name: old for name, one in now.items() if (old := old_names.get(id(one), name)) != name}
        return renamed, {name for name, one in now.items() if id(one) in misfits}

    def _contributions(
        self, loose: Iterable[str], renamed: Collection[str], now: Mapping[str, torch.nn.Parameter], *, idle: bool
    ) -> dict[str, Contribution]:
        """What this rank has of what is loose here. An idle one has no more than what was summed already."""
        gradients = {name: now[name].grad for name in loose if name in now and not idle}
        if self._queue.preset is not None:
            done = self._summed_already([name for name in loose if not idle or name in renamed], now)
            self._before |= done
            gradients |= done
        return {n: Contribution(g, self._before.get(n)) for n, g in gradients.items() if g is not None}

    def _summed_already(self, names: Iterable[str], now: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Gradients of those that have another name now: the old buckets, or rows, have carried them all the same."""
        name_of = {id(now[name]): name for name in names if name in now}
        found = {}
        for bucket in self._queue.buckets:
            for place, reference in enumerate(bucket.references):
                one = reference()
                if one is not None and (name := name_of.get(id(one))) is not None and place not in bucket.loose:
                    found[name] = bucket.views[place].clone() if bucket.footer.had[place] else one.grad
        misfits = self._rows.misfits()
        rows = {id(one): one.grad for name, one in self._rows.named_parameters().items() if name not in misfits}
        found |= {name: rows[key] for key, name in name_of.items() if key in rows}
        return {name: value for name, value in found.items() if value is not None}

    def _carried(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Copies of what the old buckets hold for these, by their names there and now, where any rank had something."""
        found = {}
        for bucket in self._queue.buckets:
            for place, index in enumerate(bucket.indices):
                if (name := names.get(self._queue.names[index])) is not None and bucket.footer.had[place]:
                    found[name] = bucket.views[place].clone()
        return found

    def _send_values(self, loose: set[str]) -> None:
        values = [parameter for name, parameter in self._members.everything().items() if name in loose]
        broadcast_coalesced(values, self._queue.transport, self._queue.wait_for)

    def _tell(self, words: str, plan: BucketPlan, unseen: Iterable[Mapping[str, int]]) -> None:
        queue = self._queue
        if queue.transport.rank == 0:
            log.info("%s: the plan follows the module: %s", queue.where, words)
            warn_of_unseen(queue.where, unseen)
        if queue.events.plan_changed:
            queue.events.emit(queue.events.plan_changed, queue.pass_number, plan)
