"""After a step: what each rank has stepped goes to the ranks that do not share its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..transport import Transport, Work
from .layout import Layout
from .ownership import Piece


class Spread:
    """The shares of all ranks, as messages.

    Args:
        layout: where parameters lie.
        owned: the pieces of each rank, in rank order.
        transport: carries them.
        wait_for: waits for a collective, named by a noun.
    """

    def __init__(
        self,
        layout: Layout,
        owned: Sequence[Sequence[Piece]],
        transport: Transport,
        wait_for: Callable[[Work, str], None],
    ) -> None:
        self._transport = transport
        self._wait_for = wait_for
        self.is_needed = len(layout.homes) > 1
        self._shares = [_by_kind(layout, pieces) for pieces in owned] if self.is_needed else []

    def send(self) -> None:
        """All ranks hold all parameters when this returns. Collective."""
        under_way = []
        for root, share in enumerate(self._shares):
            for flats in share:
                message = torch.cat(flats)
                under_way.append((self._transport.broadcast(message, root), message, flats, root))
        for work, message, flats, root in under_way:
            self._wait_for(work, f"what rank {root} has stepped")
            if root != self._transport.rank:
                torch._foreach_copy_([*flats], [*torch.split(message, [len(flat) for flat in flats])])


def _by_kind(layout: Layout, pieces: Sequence[Piece]) -> list[list[torch.Tensor]]:
    """The pieces as flat tensors, those of one dtype and device together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for piece in pieces:
        flat = layout.flat(piece.bucket, piece.start, piece.stop, piece.index)
        kinds.setdefault((flat.dtype, flat.device), []).append(flat)
    return list(kinds.values())
