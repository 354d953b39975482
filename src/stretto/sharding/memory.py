"""What ranks hold for sharded optimizers, in bytes, and what each would hold without shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..report import Footprint, Report
from ..specs import format_bytes


def state_bytes(state: Mapping[str, Any]) -> int:
    """Of one parameter, or of a stretch; single numbers are left out."""
    return sum(value.nbytes for value in state.values() if torch.is_tensor(value) and value.dim())


def with_memory(
    report: Report, held: Sequence[tuple[Footprint, Footprint] | None], gather: Callable[[Any], list[Any]]
) -> Report:
    """The report with what each rank would hold, and what each does. Collective, if an optimizer has shares.

    Args:
        report: without that.
        held: of each optimizer what this rank holds, and would without shares, but for the state that others have;
            None if it has no share.
        gather: the values of all ranks.
    """
    pairs = [pair for pair in held if pair]
    if not pairs:
        return report
    own, alone = (_added([pair[place] for pair in pairs]) for place in (0, 1))
    everyone: tuple[Footprint, ...] = tuple(gather(own))
    state = alone.state + sum(one.state - alone.state for one in everyone)
    return replace(report, unsharded=Footprint(alone.parameters, alone.gradients, state), sharded=everyone)


def _added(several: Sequence[Footprint]) -> Footprint:
    return Footprint(*(sum(getattr(one, name) for one in several) for name in ("parameters", "gradients", "state")))


def describe_shares(
    homes: Sequence[Sequence[int]], rank: int, numels: tuple[int, int], nbytes: int, *, whole: bool, late: bool
) -> str:
    """What is done with the shares of an optimizer, in plain words.

    Args:
        homes: groups of ranks that share memory.
        rank: this one.
        numels: elements that it steps, and that all step together.
        nbytes: of state that it keeps.
        whole: whether parameters stay whole.
        late: whether what was stepped travels while forward runs.
    """
    home = next(ranks for ranks in homes if rank in ranks)
    how = "each parameter whole on one rank" if whole else "in equal shares of each bucket"
    where = [f"lie once for ranks {', '.join(map(str, home))}"] if len(home) > 1 else []
    if len(homes) > 1:
        when = "while the next forward runs" if late else "before step() returns"
        where.append(f"come from {'other hosts' if where else 'other ranks'} {when}")
    return (
        f"{how}: this rank steps {numels[0]} of {numels[1]} elements and keeps {format_bytes(nbytes)} of state; "
        f"parameters {' and '.join(where)}"
    )
