"""Optimizers stepped in shares, by all ranks together: kinds ──> ownership ──> layout ──> stretches ──> shares."""

from .begin import Asked, begin, refuse_idle
from .clip import clip_to, shares_of, total_norm
from .memory import with_memory
from .optimizer import ShardedOptimizer

__all__ = ["Asked", "ShardedOptimizer", "begin", "clip_to", "refuse_idle", "shares_of", "total_norm", "with_memory"]
