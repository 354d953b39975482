"""What one collective of the ranks of a host does with memory. host.py drives it.

Kinds: sums and broadcasts in sums.py and hierarchical.py, shares in host_shares.py, what lies once for all in
common.py, the rest in collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .host import Host
    from .page import Peer


class Message:
    """What one collective does; each kind is a class of its own."""

    action: bytes
    """What it is, at most 16 bytes; the same on all ranks."""
    numel: int
    """Elements; the same on all ranks."""
    tensor: torch.Tensor | None = None
    """What the others may read or write, in this rank's arena; None if nothing."""
    root: int | None = None
    """The only rank that has to publish before the others' part; None if all have to."""
    by_all = False
    """Whether the result is there when all have done their part; else when this rank has."""

    def begin(self, entries: Sequence[bytes]) -> Any:
        """This rank's part, given where each rank's tensor lies.

        May return a torch ``Work``, which is waited for before the end.
        """

    def end(self) -> None:
        """The rest of this rank's part; mostly there is none."""

    def release(self) -> None:
        """Nobody reads or writes the memory any more; mostly there is nothing to do."""


class Posted:
    """A message under way: the :class:`~stretto.transport.Work` of this transport."""

    __slots__ = ("_host", "is_over", "message", "needs", "number", "outside")

    def __init__(self, host: Host, message: Message, number: int, needs: Sequence[Peer]) -> None:
        self._host = host
        self.message = message
        self.number = number
        self.needs = needs
        """Those that have to publish before this rank's part."""
        self.outside: Any = None
        self.is_over = False

    def is_completed(self) -> bool:
        """Whether the result is there, or never will be. Does what can be done for it."""
        self._host.advance()
        return self.is_over or self._host.broken is not None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until the result is there.

        Raises:
            PeerError: a rank that has a part in it has died, or will never go on.
            CommunicationError: ranks called different things, or there was no memory.
            RuntimeError: it lasts longer than ``timeout``, and may be waited for again; without one, longer than the
                patience of the host, and nothing is done any more.
        """
        self._host.wait(self, timeout, again=timeout is not None)

    def will_never_begin(self) -> bool:
        """Whether a rank without which no rank can begin has ended, or will never go on, before it came to this."""
        return self._host.will_never_begin(self)
