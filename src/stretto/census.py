"""Who reduces gradients in this process, and who is amid a pass: one backward may reach several."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .family import Family


@dataclass(frozen=True)
class Census:
    """Families of one process, in whatever thread they train."""

    alive: weakref.WeakValueDictionary[int, Family] = field(default_factory=weakref.WeakValueDictionary)
    """By number."""
    amid: set[Family] = field(default_factory=set)
    """Those amid a pass, and maybe some whose pass was given up."""


@functools.cache
def census() -> Census:
    """That of this process."""
    return Census()
