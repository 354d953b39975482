"""What one collective of the ranks of a host does with memory; driven by host.py.

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
    """Its name, at most 16 bytes; the same on all ranks."""
    numel: int
    """Elements; the same on all ranks."""
    tensor: torch.Tensor | None = None
    """What the other ranks may read or write in this rank's arena; None if nothing."""
    root: int | None = None
    """The only rank that must publish before the others do their part; None if all must."""
    by_all = False
    """True if the result is there when all have done their part; False if when this rank has."""

    def begin(self, entries: Sequence[bytes]) -> Any:
        """Do this rank's part, given where each rank's tensor lies.

        May return a torch ``Work``, which is waited for before the end.
        """

    def end(self) -> None:
        """Do the rest of this rank's part; mostly nothing."""

    def release(self) -> None:
        """Called when no rank uses the memory any more; mostly does nothing."""


class Posted:
    """A message under way: the :class:`~stretto.transport.Work` of this transport."""

    __slots__ = ("_host", "is_over", "message", "needs", "number", "outside")

    def __init__(self, host: Host, message: Message, number: int, needs: Sequence[Peer]) -> None:
        self._host = host
        self.message = message
        self.number = number
        self.needs = needs
        """The ranks that must publish before this rank's part."""
        self.outside: Any = None
        self.is_over = False

    def is_completed(self) -> bool:
        """Whether the result is there, or never will be. Does what work is possible."""
        self._host.advance()
        return self.is_over or self._host.broken is not None

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the result.

        Raises:
            PeerError: a rank that takes part has died, or will never go on.
            CommunicationError: ranks called different things, or there was no memory.
            RuntimeError: it takes longer than ``timeout``, and may be waited for again; or, without a timeout, longer
                than the patience of the host, which ends everything.
        """
        self._host.wait(self, timeout, again=timeout is not None)

    def will_never_begin(self) -> bool:
        """Whether a rank that all need in order to begin has ended, or stopped for good, before it came to this."""
        return self._host.will_never_begin(self)
