"""Parameters that were given other memory on some ranks alone (``parameter.data = ...``) before a step in shares.

Each rank steps its share from the values that it has, so the new model would be a mixture. Which parameters have
strayed is part of the number by which ranks compare groups. If that differs, they compare values, which may be equal
all the same: say, one rank has evaluated averaged weights, and has then put back clones of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ..check import unlike
from ..errors import ModelMismatchError
from ..peers import Peers
from ..wording import name_list
from .layout import Layout
from .meetings import leave_join


def mark_of(strayed: Sequence[int]) -> int:
    """A number for what has strayed, 0 for nothing. ``strayed``: indices in the plan."""
    return crc32(repr(strayed).encode()) if strayed else 0


def refuse_strays(layout: Layout, strayed: Sequence[int], peers: Peers, idle: int = 0) -> None:
    """Compare what has strayed, where that is not the same on all ranks. Collective.

    Args:
        layout: of the parameters.
        strayed: of this rank, indices in the plan.
        peers: the other ranks.
        idle: how many ranks have no batches.

    Raises:
        ModelMismatchError: some hold other values. On all ranks.
    """
    everywhere = [set(theirs) for theirs in peers.gather([*strayed])]
    if all(theirs == everywhere[0] for theirs in everywhere):
        return
    strays = sorted(set().union(*everywhere))
    parameters = {layout.plan.parameters[index].name: layout.parameters[index] for index in strays}
    names, lines = unlike(parameters, peers.gather)
    if names:
        differences = "\n".join(lines)
        raise ModelMismatchError(
            f"{peers.where}: since the last step some ranks only have given other memory, with other values, to "
            f"{name_list(names)} (parameter.data = ...).\n{differences}\n"
            f"No rank has stepped. Assign the same on all ranks; {leave_join(idle)}then all can go on."
        )
