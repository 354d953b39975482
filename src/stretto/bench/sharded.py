"""The contestants that divide the optimizer's step among the ranks: ``stretto.shard``."""

from __future__ import annotations

import torch

import stretto

from ..handle import Synchronizer
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


def divide(
    optimizer: torch.optim.Optimizer, handle: Synchronizer, options: dict[str, bool] | None
) -> torch.optim.Optimizer:
    """The optimizer that steps this rank's part; as it is where no options are given. Collective."""
    return optimizer if options is None else stretto.shard(optimizer, handle, **options)
