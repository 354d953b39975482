"""Parameters that were given other memory on some ranks alone (``parameter.data = ...``) before a step in shares.

Each rank steps its share from the values that it has, so the model would be put together of several. Which parameters
have strayed goes into the number by which ranks compare groups; where it differs, they look at values, which may be
the same: one rank has evaluated averaged weights, say, and has put clones of its own back.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ..check import unlike
from ..errors import ModelMismatchError, name_list
from ..peers import Peers
from .layout import Layout


def mark_of(strayed: Sequence[int]) -> int:
    """A number for what has strayed, 0 for nothing. ``strayed``: indices in the plan."""
    return crc32(repr(strayed).encode()) if strayed else 0


def refuse_strays(layout: Layout, strayed: Sequence[int], peers: Peers) -> None:
    """Compare what has strayed on some ranks alone. Collective.

    Args:
        layout: of the parameters.
        strayed: of this rank, indices in the plan.
        peers: the other ranks.

    Raises:
        ModelMismatchError: it holds other values there. On all ranks.
    """
    everywhere = [set(theirs) for theirs in peers.gather([*strayed])]
    some = sorted(set.union(*everywhere) - set.intersection(*everywhere))
    named = {layout.plan.parameters[index].name: layout.parameters[index] for index in some}
    names, lines = unlike(named, peers.gather)
    if names:
        raise ModelMismatchError(
            f"{peers.where}: {name_list(names)} have been given other memory (parameter.data = ...) on some ranks "
            "only, and hold other values there.\n"
            + "\n".join(lines)
            + "\nNo rank has stepped. Assign the same on all ranks; "
            "then all can go on."
        )
