"""Optimizers stepped in shares, by all ranks together.

kinds ──> ownership ──> layout ──> stretches ──> inner ──> division ──> succession ──> shares ──> optimizer
"""

from .begin import Asked, begin, refuse_half_joined, refuse_idle
from .clip import clip
from .memory import with_memory
from .optimizer import ShardedOptimizer

__all__ = [
    "Asked",
    "ShardedOptimizer",
    "begin",
    "clip",
    "refuse_half_joined",
    "refuse_idle",
    "with_memory",
]
