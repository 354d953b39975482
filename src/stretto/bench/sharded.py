"""The contestants that divide the optimizer's step among the ranks: ``stretto.shard``."""

from __future__ import annotations

from .contestants import FLOOR_IN_SHARES, Contestant

SHARDED = "stretto, sharded step"
NO_GRADS = "stretto, sharded step, gradients not kept"


def sharded() -> tuple[Contestant, ...]:
    """With and without whole gradients in ``.grad`` afterwards."""
    return (
        Contestant(SHARDED, "stretto", {"shard": {}}, optimizer="adamw"),
        Contestant(NO_GRADS, "stretto", {"shard": {"keep_grads": False}}, optimizer="adamw"),
    )


def least() -> Contestant:
    """What no way to step in shares on one host can beat: see floor.py."""
    return Contestant(FLOOR_IN_SHARES, "floor", {"shares": True}, optimizer="adamw")
