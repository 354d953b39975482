"""After the module of some rank has changed: all ranks agree anew, at the same pass, and cut a new plan.

    a hook of membership.py, a misfit, a frozen one ──> look() ──> CHANGED in the last bucket ──sum──> all_together()

[Note: loose gradients]  A parameter that is new, or no longer fits its slot (another dtype, another shape), is *loose*
in the pass in which the change is noticed: the old buckets carry nothing for it. Its gradient is reduced here, before
``backward`` returns, in the new bucket. If it is loose on some ranks only (they replaced a layer by one just like it),
a part of its sum is in the old bucket, and is added.

[Note: order of messages]  Each step of ``all_together`` depends only on the results of earlier steps, so all ranks send
the same. 1. They tell which frozen parameters have a gradient all the same. 2. They compare what they have, and raise
here or not at all. 3. What is in shares is put together, so that nothing is half moved if a later step fails. 4. They
tell what is loose, what was trained unseen, what can stay in shares (what no rank has replaced), and what was carried
by another name (if by the same on all ranks that have not built it anew, and it fits, those have nothing to do). 5.
Rank 0's values of what is loose or a stranger on any rank, and the buffers. 6. New buckets, which need no message. 7.
What is loose, in each new bucket that has some. 8. What is loose and sparse, if any is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from .agreement import Statement, agree, state_model
from .arrivals import owner_of
from .broadcast import broadcast_coalesced
from .changes import Followers, warn_of_unseen
from .errors import SetupError
from .loose import Contribution, reduce_dense, reduce_rows
from .noticing import Noticing
from .plan import BucketPlan
from .postponed import Noticed
from .selection import named, unfit
from .sizing import plan_for
from .usage import follow_a_change, used_by
from .withheld import Alive, complete, give_back_whole
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


class _AllTold:
    """What follows from it, the same on all ranks."""

    def __init__(self, told: Sequence[_Told]) -> None:
        taken = {name for one in told for name in (*one.loose, *one.renamed)}

        def is_of(one: _Told, name: str, old: str) -> bool:
            """Whether the old sum by that name is of nothing else on that rank, which may have a new one instead."""
            return one.renamed[name] == old if name in one.renamed else name in one.loose and is_free(one, old)

        def is_free(one: _Told, old: str) -> bool:
            return (old in one.loose or old not in taken) and old not in one.renamed.values()

        renamed = {name: old for one in told for name, old in one.renamed.items()}
        self.renamed = {name: old for name, old in renamed.items() if all(is_of(one, name, old) for one in told)}
        self.loose_on = [
            {name: has for name, has in one.loose.items() if name in one.misfits or not self._is_kept(one, name)}
            for one in told
        ]
        """For each rank, what is loose there, and whether there is a gradient of this pass."""
        self.loose = {name for one in self.loose_on for name in one}
        self.loose_on_some = [name for name in self.loose if not all(name in one for one in self.loose_on)]
        self.in_shares = set.intersection(*(one.in_shares for one in told))
        self.unseen = [one.unseen for one in told]

    def _is_kept(self, one: _Told, name: str) -> bool:
        """Whether the old sums have it on that rank, by its old name."""
        return name in self.renamed and name in one.renamed


@dataclass(frozen=True)
class _Owed:
    """What this rank has of gradients that the old buckets did not carry, or not for all ranks."""

    contributions: dict[str, Contribution]
    before: Mapping[str, torch.Tensor]
    """What was in ``.grad`` before, where it matters."""
    carried: dict[str, torch.Tensor]
    """Sums that the old buckets have from the other ranks."""


class Rejoin:
    """Follows, on all ranks, what any of them has noticed."""

    def __init__(self, followers: Followers) -> None:
        self.noticing = Noticing(followers)
        """What this rank has noticed."""
        self._changes, self.postponed = self.noticing.changes, self.noticing.postponed
        self._members = followers.members
        self._places = followers.places
        self._queue = followers.queue
        self._tracker = followers.tracker
        self._rows = followers.rows

    def refuse(self) -> None:
        """With a comm hook, which knows buckets by their index, only harmless changes can be followed.

        Collective, unless the hook stands for no communication.

        Raises:
            SetupError: gradients of this pass have stayed on some rank. On all ranks.
        """
        queue = self._queue
        mine = self._changes.in_words() if self._changes.loses() else ""
        everyone = queue.peers.gather(mine) if queue.tells else [mine] * queue.transport.world_size
        changed = ranks_by(enumerate(everyone)).items()
        told = "; ".join(f"{change} on {describe_ranks(ranks)}" for change, ranks in changed if change)
        raise SetupError(
            f"{queue.where}: the module has changed since it was attached ({told}), and a comm hook keeps its "
            "state by bucket, so the plan cannot follow.\n"
            "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
        )

    def all_together(self, noticed: Noticed, *, idle: bool) -> None:
        """Follow the change: see [Note: order of messages]. Collective.

        Args:
            noticed: by this rank, in the pass that ends.
            idle: this rank had no part in the pass, and ``.grad`` is to be left alone.

        Raises:
            ModelMismatchError: modules have not changed alike. The same difference on all ranks.
        """
        queue, members = self._queue, self._members
        members.keep({name for waiting in queue.peers.gather(noticed.waiting) for name in waiting})
        wanted, rows = members.wanted(), members.rows()
        plan = plan_for(wanted, members.options, queue.transport, [queue.names[i] for i in queue.plan.order])
        module = self._agree(wanted, rows, plan)
        complete(queue.buckets, queue.transport, queue.wait_for)  # before anything moves, should a rank fail here
        give_back_whole(queue.buckets, but=wanted.values())  # frozen ones that leave the plan may still be stepped
        now = {**wanted, **rows}
        loose = self._loose(wanted, rows, noticed.arrived, idle=idle)
        in_shares = {name for name, one in wanted.items() if queue.in_shares.holds(one)}
        mine = _Told(loose, in_shares, *self._renamed(now), members.unseen())
        told = _AllTold(queue.peers.gather(mine))
        owed = self._take_out(told, mine, now, noticed.before, idle=idle)
        words, factor = self._changes.in_words(), queue.scaling.after(queue.buckets[-1].footer.weight)
        self._send_values(told.loose)
        self._places.begin_anew(module, queue.transport, queue.wait_for)
        rows_used = {name: self._rows.used_by.get(told.renamed.get(name, name), 0) for name in rows}
        self._follow(told, wanted, rows, plan)
        had = {n for n in told.loose if n in owed.carried or any(one.get(n) for one in told.loose_on)}
        reduce_dense(queue, had & wanted.keys(), owed.contributions, owed.carried, factor, release=not idle)
        if among := {name: one for name, one in rows.items() if name in told.loose}:
            dtypes = members.options.reduce_dtypes(rows)
            reduce_rows(queue, among, dtypes, told.loose_on, rows_used, owed.before, factor, release=not idle)
        queue.replans += 1
        if idle:
            self.postponed.pass_by()
        self._tell(words, plan, told.unseen)

    def _take_out(
        self,
        told: _AllTold,
        mine: _Told,
        now: Mapping[str, torch.nn.Parameter],
        before: Mapping[str, torch.Tensor],
        *,
        idle: bool,
    ) -> _Owed:
        """Before the old buckets go."""
        queue = self._queue
        is_new = {name: has for name, has in told.loose_on[queue.transport.rank].items() if name in now}
        carried_by_name = mine.renamed.keys() - mine.misfits
        done = self._summed_already([name for name in is_new if not idle or name in carried_by_name], now)
        gradients = {name: now[name].grad for name in is_new if not idle} | done
        if queue.preset is not None:
            stand = {n: g for n, g in gradients.items() if g is not None and (n in done or not is_new[n])}
            before = {**before, **stand}
        contributions = {n: Contribution(g, before.get(n)) for n, g in gradients.items() if g is not None}
        carried = self._changes.carried({told.renamed.get(name, name): name for name in told.loose_on_some})
        return _Owed(contributions, before, carried)

    def _follow(
        self,
        told: _AllTold,
        wanted: Mapping[str, torch.nn.Parameter],
        rows: Mapping[str, torch.nn.Parameter],
        plan: BucketPlan,
    ) -> None:
        """New buckets; everything else of the handle after them."""
        queue = self._queue
        used = used_by(queue) | self._rows.used_by
        queue.in_shares = Alive(wanted[name] for name in told.in_shares)
        queue.rebuild(wanted, plan)
        self._tracker.rebuild(list(wanted.values()))
        self._rows.rebuild(rows, self._members.options.reduce_dtypes(rows))
        follow_a_change(queue, self._rows, used, told.renamed, told.loose_on)
        self._members.follow({**wanted, **rows})

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
        self,
        wanted: Mapping[str, torch.nn.Parameter],
        rows: Mapping[str, torch.nn.Parameter],
        arrived: Set[str],
        *,
        idle: bool,
    ) -> dict[str, bool]:
        """Names of what is loose on this rank, and whether there is a gradient of this pass for it."""
        members, outside = self._members, self._changes.outside()
        came = self._changes.came(outside, arrived)
        found = {name: has and outside[name].grad is not None for name, has in came.items()}
        for name in (*self._changes.misfits(), *self._rows.misfits()):
            one = wanted.get(name, rows.get(name))
            found.setdefault(name, name in arrived and one is not None and one.grad is not None)
        found = {name: has and not idle for name, has in found.items() if name in wanted or name in rows}
        return found | dict.fromkeys(members.strangers(), False)

    def _renamed(self, now: Mapping[str, torch.nn.Parameter]) -> tuple[dict[str, str], set[str]]:
        """Names of what the plan or the rows have by another name, and that one; names of what does not fit there."""
        old_names = self._changes.old_names()
        misfits = {id(one) for one in (*self._changes.misfits().values(), *self._rows.misfits().values())}
        renamed = {name: old for name, one in now.items() if (old := old_names.get(id(one), name)) != name}
        return renamed, {name for name, one in now.items() if id(one) in misfits}

    def _summed_already(self, names: Iterable[str], now: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Gradients of those that have another name now: the old buckets, or rows, have carried them all the same.

        An idle rank has no more than these; where nothing was there before, they need no look.
        """
        if self._queue.preset is None:
            return {}
        name_of = {id(now[name]): name for name in names}
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
