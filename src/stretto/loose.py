"""Gradients of a pass that the old buckets did not carry. They are reduced in the new ones: see rejoin.py.

Each function is collective, and every rank calls it with the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .launch import LaunchQueue
from .scaling import Scaling
from .slots import hand_out
from .sparse import SparseGradients

WHAT = "what the old buckets did not carry"


@dataclass(frozen=True)
class Contribution:
    """What this rank has in ``.grad`` of one parameter."""

    gradient: torch.Tensor
    before: torch.Tensor | None = None
    """What was there before what is new, where a sum must count it once: see preset.py."""

    def put(self, slot: torch.Tensor) -> None:
        """Copy what is new into zeros."""
        if self.before is self.gradient:
            return
        slot.copy_(self.gradient)
        if self.before is not None:
            slot.sub_(self.before)


def reduce_dense(
    queue: LaunchQueue,
    names: set[str],
    contributions: Mapping[str, Contribution],
    carried: Mapping[str, torch.Tensor],
    factor: torch.Tensor | float | None,
    *,
    release: bool,
) -> None:
    """Sum in the new buckets, one message for each that has something.

    Args:
        queue: has the new buckets.
        names: what any rank had; everything else stays as it is, here as in any pass.
        contributions: this rank's.
        carried: what the old buckets held for some of them, which is added.
        factor: for the sum, as in the pass.
        release: False if ``.grad`` is to be left alone.
    """
    works = []
    for bucket in queue.buckets:
        inside = [(place, name) for place, i in enumerate(bucket.indices) if (name := queue.names[i]) in names]
        if not inside:
            continue
        flat = torch.zeros_like(bucket.flat)
        slots = bucket.views_of(flat)
        mine = [(slots[place], contributions[name]) for place, name in inside if name in contributions]
        for slot, contribution in mine:
            contribution.put(slot)
        queue.scaling.before(flat, queue.weight_now)
        for slot, contribution in mine:
            if contribution.before is not None:
                slot.add_(contribution.before, alpha=queue.scaling.share)
        works.append((bucket, inside, flat, slots, queue.transport.all_reduce(flat)))
    for bucket, inside, flat, slots, work in works:
        queue.wait_for(work, WHAT)
        if factor is not None:
            flat.mul_(factor)
        parameters = bucket.parameters
        for place, name in inside if release else ():
            view = bucket.views[place]
            view.copy_(slots[place])
            if name in carried:
                view.add_(carried[name])
            hand_out(parameters[place], parameters[place].grad, view)


def reduce_rows(
    queue: LaunchQueue,
    parameters: Mapping[str, torch.nn.Parameter],
    dtypes: Mapping[str, torch.dtype],
    loose: Sequence[Mapping[str, bool]],
    used: Mapping[str, int],
    before: Mapping[str, torch.Tensor],
    factor: torch.Tensor | float | None,
    *,
    release: bool,
) -> None:
    """The same for gradients by rows. Two rounds: what is loose, and what ranks on which it is not have got already.

    Args:
        queue: has the transport, the scaling and this rank's weight.
        parameters: by name.
        dtypes: in which they travel, as :class:`SparseGradients` has them.
        loose: for each rank, the names that are loose there, and whether there is something new.
        used: how many ranks had something for each name in the pass, those on which it is loose aside.
        before: what ``.grad`` held before what is new, where a sum must count it once, by name.
        factor: for the sum, as in the pass.
        release: False if ``.grad`` is to be left alone.
    """
    rank, held = queue.transport.rank, {id(one): before.get(name) for name, one in parameters.items()}

    def exchange(
        scaling: Scaling, names: set[str], beside: Iterable[str], weight: float, factor: torch.Tensor | float | None
    ) -> dict[str, torch.Tensor]:
        rows = SparseGradients(parameters, queue.transport, scaling, dtypes)
        rows.claim(names)
        if queue.preset is not None:
            rows.before = lambda parameter: held.get(id(parameter))
        rows.exchange(rows.prepare(weight, only={*names, *beside}), queue.wait_for)
        return rows.results(factor, queue.wait_for)

    mine = {name for name, has in loose[rank].items() if has}
    stands = loose[rank] if release else ()  # in .grad with nothing new: it travels as in any pass
    found = exchange(queue.scaling, mine, stands, queue.weight_now, factor)
    partly = [name for name in parameters if not all(name in one for one in loose) and used.get(name)]
    first = {name: next(r for r, one in enumerate(loose) if name not in one) for name in partly}
    plain = Scaling(queue.scaling.world_size, "sum")
    done = exchange(plain, {name for name in partly if first[name] == rank}, (), 1.0, None) if partly else {}
    for name, parameter in parameters.items() if release else ():
        parts = [part[name] for part in (found, done) if name in part]
        if len(parts) == 2 and parts[0].layout != parts[1].layout:
            parts = [part if part.layout == torch.strided else part.to_dense() for part in parts]
        if parts:
            total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            parameter.grad = total.coalesce() if total.is_sparse else total
