"""What ranks hold for sharded optimizers, in bytes, and what each would hold without shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..report import Footprint, Report
from ..wording import format_bytes, name_list
from .division import Division
from .kinds import Kind

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer


def state_bytes(state: Mapping[str, Any]) -> int:
    """The bytes of one parameter's or stretch's state; single numbers are left out."""
    return sum(value.nbytes for value in state.values() if torch.is_tensor(value) and value.dim())


def footprint_of(division: Division) -> tuple[Footprint, Footprint]:
    """What a rank holds for one optimizer; and would hold without shares, less the state that other ranks have."""
    layout, states, apart = division.layout, division.inner.state, division.apart
    own, of_every_rank = sum(map(state_bytes, states.values())), sum(state_bytes(states.get(one, {})) for one in apart)
    whole = sum(one.nbytes for one in apart)
    dense = sum(layout.plan.parameters[index].nbytes for index in layout.parameters)
    held = Footprint(layout.nbytes // len(layout.host) + whole, dense, own)
    return held, Footprint(dense + whole, dense, of_every_rank)


def with_memory(report: Report, holders: Sequence[ShardedOptimizer], gather: Callable[[Any], list[Any]]) -> Report:
    """The report with what each rank would hold unsharded, and what it holds. Collective if an optimizer has shares.

    Args:
        report: without these figures.
        holders: the optimizers.
        gather: returns the values of all ranks.
    """
    pairs = [pair for one in holders if (pair := one.footprint())]
    if not pairs:
        return report
    own, alone = (_added([pair[place] for pair in pairs]) for place in (0, 1))
    everyone: tuple[Footprint, ...] = tuple(gather(own))
    state = alone.state + sum(one.state - alone.state for one in everyone)
    unsharded = Footprint(alone.parameters, alone.gradients, state)
    arriving = tuple(told for one in holders if (told := one.describe_gradients()))
    return replace(report, unsharded=unsharded, sharded=everyone, arriving=arriving)


def _added(several: Sequence[Footprint]) -> Footprint:
    return Footprint(*(sum(getattr(one, name) for one in several) for name in ("parameters", "gradients", "state")))


def describe_shares(division: Division) -> str:
    """What is done with the shares of an optimizer, in plain words."""
    layout, host, late = division.layout, division.layout.host, division.spread.is_late
    own, everything = sum(piece.numel for piece in division.pieces), sum(map(torch.numel, layout.views.values()))
    nbytes = footprint_of(division)[0].state
    how = "each parameter whole on one rank" if division.kind is Kind.WHOLE else "in equal shares of each bucket"
    where = [f"lie once for ranks {', '.join(map(str, host))}"] if len(host) > 1 else []
    if len(layout.hosts) > 1:
        when = "while the next forward runs" if late else "before step() returns"
        if late and (names := layout.shown()):
            when = (
                f"before step() returns, since {name_list(names)} are visible through tensors that do not wait "
                "(p.detach())"
            )
        where.append(f"come from {'other hosts' if where else 'other ranks'} {when}")
    return (
        f"{how}: this rank steps {own} of {everything} elements and keeps {format_bytes(nbytes)} of state; "
        f"parameters {' and '.join(where)}"
    )
