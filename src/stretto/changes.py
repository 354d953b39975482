"""How the module differs from what the ranks have agreed on: which parameters no bucket carries, and a text about
it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch

from .buffers import BufferPlaces
from .errors import SetupError
from .launch import LaunchQueue
from .membership import Membership
from .parts import fits
from .selection import STAND_IN
from .sparse import SparseGradients
from .specs import dtype_name
from .tracker import ArrivalTracker
from .wording import counted, name_list

log = logging.getLogger("stretto")


@dataclass(frozen=True)
class Followers:
    """The parts of a handle that follow its module."""

    members: Membership
    """What the module has."""
    places: BufferPlaces
    """Where its buffers are."""
    queue: LaunchQueue
    """Has the plan."""
    tracker: ArrivalTracker
    """Knows what has arrived."""
    rows: SparseGradients
    """The parameters in no bucket."""


class Changes:
    """Compares, on this rank, the module with what follows it."""

    def __init__(self, followers: Followers) -> None:
        self._members = followers.members
        self._places = followers.places
        self._queue = followers.queue
        self._rows = followers.rows

    def outside(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the module that neither the buckets nor ``rows`` carry, though they should, by name."""
        wanted, rows = self._members.wanted(), self._members.rows()
        carried = {name: one() for name, one in zip(self._queue.names, self._queue.references, strict=True)}
        new = {name: one for name, one in wanted.items() if carried.get(name) is not one and name != STAND_IN}
        return new | {name: rows[name] for name in self._rows.outside(rows)}

    def misfits(self) -> dict[str, torch.nn.Parameter]:
        """What the buckets carry no more, by its name in the plan: what fits its slot no more, and came or stayed away.

        If only strides have changed, and gradients came as scheduled, this was not noticed: the slot has the mean.
        """
        queue, found = self._queue, {}
        for bucket in queue.buckets:
            for place, (index, reference) in enumerate(zip(bucket.indices, bucket.references, strict=True)):
                if (one := reference()) is None or (index not in queue.loose and queue.fits(index, one)):
                    continue
                if index in queue.loose or not (bucket.footer.had[place] and fits(one, bucket.views[place])):
                    found[queue.names[index]] = one
        return found

    def came(self, outside: Mapping[str, torch.nn.Parameter], arrived: Set[str]) -> dict[str, bool]:
        """Which of those that nothing carries by their names have got a gradient: some are carried by others.

        Args:
            outside: those.
            arrived: names of planned ones that have got one in this pass.
        """
        old_names, members = self.old_names(), self._members
        olds = {name: old_names.get(id(one)) for name, one in outside.items()}
        return {n: members.got_gradient(outside[n]) if old is None else old in arrived for n, old in olds.items()}

    def old_names(self) -> dict[int, str]:
        """By ``id()``, what the plan and the rows call the parameters."""
        return {id(one): name for name, one in self.held().items()}

    def held(self) -> dict[str, torch.nn.Parameter]:
        """What the plan and the rows have and what still lives, by its name there."""
        planned = zip(self._queue.names, (one() for one in self._queue.references), strict=True)
        return {name: one for name, one in planned if one is not None} | self._rows.named_parameters()

    def carried(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Copies of what the old buckets hold for these, by their names there and now, where any rank had something."""
        found = {}
        for bucket in self._queue.buckets:
            for place, index in enumerate(bucket.indices):
                if (name := names.get(self._queue.names[index])) is not None and bucket.footer.had[place]:
                    found[name] = bucket.views[place].clone()
        return found

    def loses(self) -> bool:
        """Whether gradients of this rank may be missing from what is sent, or its buffers are other ones now.

        Freezing alone does not cause that.
        """
        module = self._members.module()
        moved = self._places.changed or (module is not None and self._places.moved(module))
        return bool(moved or self._queue.loose or self._rows.misfits() or self.outside())

    def refuse_orphans(self) -> None:
        """Raise where parameters live on and have changed though their module was freed: there is nothing to follow."""
        changed = [self._queue.names[index] for index in sorted(self._queue.loose)]
        if names := [*changed, *self._rows.misfits(), *self._members.orphans()]:
            raise SetupError(
                f"{self._queue.where}: nothing averages the gradient of {name_list(names)}, unfrozen, converted or "
                "added after the module was attached. That module has been freed, so the plan cannot follow the "
                "change.\n"
                "Keep the module, or its handle, as long as its parts are trained: sync = stretto.attach(module)"
            )

    def in_words(self) -> str:
        """``2 parameters added (c.weight, c.bias), 1 frozen (b.bias)``."""
        told = {what: names for what, names in self._by_kind().items() if names}
        if not told:
            return "its buffers have changed"
        (first, names), *others = told.items()
        begun = f"{counted(len(names), 'parameters')} {first} ({name_list(names)})"
        return ", ".join([begun, *(f"{len(names)} {what} ({name_list(names)})" for what, names in others)])

    def _by_kind(self) -> dict[str, list[str]]:
        members, everything = self._members, self._members.everything()
        now = {**members.wanted(), **members.rows()}
        before = [name for name in (*self._queue.names, *self._rows.names) if name != STAND_IN]
        outside = self.outside()
        unfrozen = members.known(outside)
        told = {
            "added": [name for name in outside if name not in before and name not in unfrozen],
            "replaced": [name for name in outside if name in before],
            "unfrozen": [name for name in outside if name in unfrozen],
            "frozen": [name for name in before if name not in now and name in everything],
            "removed": [name for name in before if name not in everything],
            "added frozen": sorted(members.strangers()),
        }
        planned = {spec.name: (spec.shape, spec.dtype) for spec in self._queue.plan.parameters}
        kinds = planned | self._rows.kinds()
        for name, parameter in now.items():
            if name not in outside and name in kinds:
                told.setdefault(_difference(parameter, *kinds[name]), []).append(name)
        told.pop("", None)
        return told


def _difference(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if parameter.dtype != dtype:
        return f"now {dtype_name(parameter.dtype)}"
    return "with another shape" if tuple(parameter.shape) != tuple(shape) else ""


def warn_of_unseen(where: str, told: Iterable[Mapping[str, int]]) -> None:
    """Of what was trained by each rank alone before it was seen.

    Args:
        where: rank and pass.
        told: as :meth:`Membership.unseen`, of each rank.
    """
    passes: dict[str, int] = {}
    for unseen in told:
        passes |= {name: max(number, passes.get(name, 0)) for name, number in unseen.items()}
    if passes:
        log.warning(
            "%s: seen only now: %s, written directly into _parameters or _modules, which torch does not report. "
            "Gradients were not averaged in up to %s before this one. From here on all ranks have rank 0's "
            "values, but the state of an optimizer may differ between ranks.\n"
            "Assign the layer, module.name = layer, which is seen at once, or attach again after such a change.",
            where,
            name_list([*passes]),
            counted(max(passes.values()), "passes"),
        )
