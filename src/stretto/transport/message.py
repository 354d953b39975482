"""What one collective of the ranks of a host does with memory. host.py drives it, shared_memory.py has the kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Message(Protocol):
    """What one collective does; each kind is a class of its own."""

    @property
    def action(self) -> bytes:
        """What it is, at most 16 bytes; the same on all ranks."""

    @property
    def numel(self) -> int:
        """Elements; the same on all ranks."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """What the others may read or write, in this rank's arena; None if nothing."""

    @property
    def root(self) -> int | None:
        """The only rank that has to publish before the others' part; None if all have to."""

    @property
    def by_all(self) -> bool:
        """Whether the result is there when all have done their part; else when this rank has."""

    def begin(self, entries: Sequence[bytes]) -> Any:
        """This rank's part, given where each rank's tensor lies.

        May return a torch ``Work``, which is waited for before the end.
        """

    def end(self) -> None:
        """The rest of this rank's part."""

    def release(self) -> None:
        """Nobody reads or writes the memory any more."""
