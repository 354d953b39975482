"""Optimizers stepped in shares, by all ranks together: kinds ──> ownership ──> layout ──> stretches ──> shares."""

from .begin import begin
from .optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "begin"]
