"""After the module of some rank has changed: all ranks agree anew, at the same pass, and cut a new plan.

    a hook of membership.py, a misfit, a frozen one ──> noticed() ──> CHANGED in the last bucket ──sum──>
    all_together(): agree, exchange who has what, rank 0's values, new buckets, and what the old ones did not carry

[Note: loose gradients]  A parameter that is new, or has left its slot (another dtype, shape or storage), is *loose* in
the pass in which the change is noticed: the old buckets carry nothing for it. Its gradient is reduced here, before
``backward`` returns, in the new bucket. One that is loose on some ranks only (they replaced a layer by one just like
it) has part of its sum in the old bucket: that part is added.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from .agreement import Statement, agree, describe_ranks, state_model
from .arrivals import owner_of
from .broadcast import broadcast_coalesced
from .buffers import BufferPlaces
from .errors import SetupError, name_list
from .events import Events
from .launch import LaunchQueue
from .membership import Membership, named, plan_for
from .slots import hand_out
from .specs import describe_parameters, dtype_name
from .tracker import ArrivalTracker

log = logging.getLogger("stretto")

ADVICE = "Change the model alike on all ranks, between the same two passes."


class Rejoin:
    """Notices changes on this rank, and follows those that any rank has noticed.

    Args:
        members: what the module has.
        places: where its buffers are.
        queue: has the plan.
        tracker: knows what has arrived.
        events: told of new plans.
    """

    def __init__(
        self, members: Membership, places: BufferPlaces, queue: LaunchQueue, tracker: ArrivalTracker, events: Events
    ) -> None:
        self._members = members
        self._places = places
        self._queue = queue
        self._tracker = tracker
        self._events = events
        self._arrived: set[int] = set()

    # Noticing, on one rank

    def noticed(self, unsynchronized: set[int]) -> bool:
        """At the end of a pass: does the plan no longer fit the module?

        Args:
            unsynchronized: indices of parameters that got gradients in passes without synchronisation before.
        """
        queue, members = self._queue, self._members
        members.look(queue.pass_number)
        self._places.look()
        missing = queue.comm_hook is None and any(bucket.pending or bucket.missing for bucket in queue.buckets)
        if missing and not members.suspect:
            members.suspect = self._some_are_frozen()
        if not (members.suspect or queue.loose or self._places.changed):
            return False
        self._arrived = unsynchronized.union(self._tracker.arrival_order())
        return self._differs() and (queue.comm_hook is None or self._loses())

    def _loses(self) -> bool:
        """Whether something of this rank stays out of the old buckets; freezing is harmless to them."""
        return bool(self._outside(self._members.wanted()) or self._queue.loose or self._places.changed)

    def refuse(self) -> None:
        """Beside a comm hook, which knows buckets by their index, nothing but harmless changes can be followed.

        Collective, unless the hook is one beside which nothing is communicated.

        Raises:
            SetupError: gradients of this pass have stayed on some rank. On all ranks.
        """
        queue = self._queue
        mine = self._changes(self._members.wanted()) if self._loses() else ""
        everyone = queue.peers.gather(mine) if queue.tells else [mine] * queue.transport.world_size
        changed: dict[str, list[int]] = {}
        for rank, change in enumerate(everyone):
            if change:
                changed.setdefault(change, []).append(rank)
        told = "; ".join(f"{change} on {describe_ranks(ranks)}" for change, ranks in changed.items())
        raise SetupError(
            f"{queue.where}: the module has changed since it was attached ({told}), and a comm hook keeps what it "
            "knows by bucket, so the plan cannot follow.\n"
            "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
        )

    def _some_are_frozen(self) -> bool:
        queue = self._queue
        missing = [index for bucket in queue.buckets if bucket.pending or bucket.missing for index in bucket.indices]
        frozen = [index for index, parameter in self._tracker.alive(missing) if not parameter.requires_grad]
        return any(self._members.may_leave(queue.names[index]) for index in frozen)

    def _differs(self) -> bool:
        """Compare the module with the plan; if nothing has changed, know it for the next time."""
        wanted, module = self._members.wanted(), self._members.module()
        if module is None or not wanted:
            return False
        if (
            self._queue.loose
            or self._places.changed
            or self._places.moved(module)
            or describe_parameters(wanted, self._members.options.reduce_dtypes(wanted)) != self._queue.plan.parameters
            or self._outside(wanted)
            or self._members.strangers(wanted)
        ):
            return True
        self._members.remember()
        return False

    def _outside(self, wanted: Mapping[str, torch.nn.Parameter]) -> list[str]:
        """Names of parameters that the old buckets do not carry."""
        carried = dict(zip(self._queue.names, self._queue.parameters, strict=True))
        return [name for name, one in wanted.items() if name not in carried or carried[name]() is not one]

    # Following, on all ranks

    def all_together(self, *, release: bool) -> None:
        """Collective. Raises the same difference on all ranks if their modules have not changed alike.

        Args:
            release: False if this rank had no part in the pass, and ``.grad`` is to be left alone.
        """
        queue, members, transport = self._queue, self._members, self._queue.transport
        module, wanted = members.module(), members.wanted()
        plan = plan_for(wanted, members.options, transport, [queue.names[index] for index in queue.plan.order])
        gather = queue.peers.gather
        agree(self._statement(module, wanted, plan.hash), transport.rank, gather, f"pass {queue.pass_number}", ADVICE)
        assert module is not None
        everyone: list[dict[str, bool]] = gather(self._loose(wanted))
        names = [name for name in wanted if any(name in one for one in everyone)]
        changes = self._changes(wanted)
        mine = everyone[transport.rank]
        contributions = {n: grad for n in names if n in mine and (grad := wanted[n].grad) is not None}
        carried = self._carried([name for name in names if not all(name in one for one in everyone)])
        factor = queue.scaling.after(queue.buckets[-1].weight)
        news = [one for name, one in members.everything().items() if any(name in other for other in everyone)]
        values = [parameter.detach() for parameter in news]
        if self._places.policy != "none":
            values += named(module, members.options, "buffers").values()
        broadcast_coalesced(values, transport, queue.wait_for)
        queue.rebuild(wanted, plan)
        self._tracker.rebuild(list(wanted.values()))
        members.follow(wanted)
        self._places.follow(module)
        had = {name for name in names if name in carried or any(one.get(name) for one in everyone)}
        self._reduce(had, contributions, carried, factor, release=release)
        if transport.rank == 0:
            log.info("%s: the plan follows the module: %s", queue.where, changes)
        if self._events.plan_changed:
            self._events.emit(self._events.plan_changed, queue.pass_number, plan)

    def _statement(
        self, module: torch.nn.Module | None, wanted: Mapping[str, torch.nn.Parameter], plan: str
    ) -> Statement:
        mine = self._tracker.arrivals.owner
        lazy = [name for name, one in self._members.everything().items() if torch.nn.parameter.is_lazy(one)]
        foreign = [name for name, one in wanted.items() if owner_of(one) not in (None, mine)]
        if module is None or not wanted:
            return Statement((), "the module was freed, or has no parameter any more that requires a gradient")
        if lazy:
            return Statement((), f"{name_list(lazy)} are not initialised yet (lazy modules)")
        if foreign:
            return Statement((), f"{name_list(foreign)} are attached already, as part of another module")
        buffers = named(module, self._members.options, "buffers")
        return state_model(self._members.everything(), buffers, {"plan": plan})

    def _loose(self, wanted: Mapping[str, torch.nn.Parameter]) -> dict[str, bool]:
        """Names of what this rank's old buckets did not carry, and whether there is a gradient of this pass for it."""
        queue, members = self._queue, self._members
        found = {}
        for name in self._outside(wanted):
            parameter = wanted[name]
            seen = id(parameter) in members.arrived or not members.hooked(parameter)
            found[name] = seen and parameter.grad is not None
        for index in queue.loose:
            found.setdefault(queue.names[index], index in self._arrived)
        for index, parameter in self._tracker.alive(range(len(queue.names))):
            if not queue.fits(index, parameter):
                found.setdefault(queue.names[index], False)
        return {name: has for name, has in found.items() if name in wanted} | dict.fromkeys(
            members.strangers(wanted), False
        )

    def _carried(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copies of what the old buckets hold for these, where any rank had something for them."""
        found = {}
        for bucket in self._queue.buckets:
            for place, index in enumerate(bucket.indices):
                if self._queue.names[index] in names and bucket.footer[place]:
                    found[self._queue.names[index]] = bucket.views_of(bucket.slots)[place].clone()
        return found

    def _reduce(
        self,
        had: set[str],
        contributions: Mapping[str, torch.Tensor],
        carried: Mapping[str, torch.Tensor],
        factor: torch.Tensor | float | None,
        *,
        release: bool,
    ) -> None:
        """Sum what is loose in the new buckets: what nobody had stays out, here as in any pass."""
        queue, works = self._queue, []
        for bucket in queue.buckets:
            inside = [(place, name) for place, i in enumerate(bucket.indices) if (name := queue.names[i]) in had]
            if not inside:
                continue
            flat = torch.zeros_like(bucket.flat)
            slots = bucket.views_of(flat)
            for place, name in inside:
                if name in contributions:
                    slots[place].copy_(contributions[name])
            queue.scaling.before(flat, queue.weight)
            works.append((bucket, inside, flat, slots, queue.transport.all_reduce(flat)))
        for bucket, inside, flat, slots, work in works:
            queue.wait_for(work, "what the old buckets did not carry")
            if factor is not None:
                flat.mul_(factor)
            for (place, name), parameter in zip(inside, (bucket.parameters[place] for place, _ in inside), strict=True):
                if not release:
                    continue
                view = bucket.views[place]
                view.copy_(slots[place])
                if name in carried:
                    view.add_(carried[name])
                hand_out(parameter, parameter.grad, view)

    # In words

    def _changes(self, wanted: Mapping[str, torch.nn.Parameter]) -> str:
        queue, everything = self._queue, self._members.everything()
        outside, before = self._outside(wanted), dict(zip(queue.names, queue.parameters, strict=True))
        specs = dict(zip(queue.names, queue.plan.parameters, strict=True))
        inside = [name for name in wanted if name not in outside]
        known = self._members.known(outside)
        told = {
            "added": [name for name in outside if name not in before and name not in known],
            "replaced": [name for name in outside if name in before],
            "unfrozen": [name for name in outside if name in known],
            "frozen": [name for name in before if name not in wanted and name in everything],
            "removed": [name for name in before if name not in everything],
            "added frozen": sorted(self._members.strangers(wanted)),
        }
        for name in inside:
            if wanted[name].dtype != specs[name].dtype:
                told.setdefault(f"now {dtype_name(wanted[name].dtype)}", []).append(name)
            elif wanted[name].shape != specs[name].shape:
                told.setdefault("with another shape", []).append(name)
        parts = [f"{len(names)} {what} ({name_list(names)})" for what, names in told.items() if names]
        if not parts:
            return "its buffers have changed"
        return ", ".join(
            ["{} parameter{} {}".format(n, "s" * (n != "1"), rest) for n, rest in [parts[0].split(" ", 1)]] + parts[1:]
        )
