"""``train()`` and ``eval()`` of optimizers that have both: schedule-free ones, which move weights between steps."""

from __future__ import annotations

import torch

from ..errors import SetupError


def turns(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """``"train"`` and ``"eval"`` if it has both methods, else nothing."""
    both = "train", "eval"
    return both if all(callable(getattr(optimizer, one, None)) for one in both) else ()


def turn(how: str, *optimizers: torch.optim.Optimizer) -> None:
    """Call this method of each optimizer that has both."""
    for one in optimizers:
        if how in turns(one):
            getattr(one, how)()


def refuse_to_step(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise ``SetupError`` if a step would fail: a share that failed to step could not be repaired.

    Args:
        optimizer: the user's; its groups say in which mode it is.
        where: how the message begins.
    """
    if turns(optimizer) and any(group.get("train_mode") is False for group in optimizer.param_groups):
        raise SetupError(
            f"{where}: step() of {type(optimizer).__name__} after eval(), or before its first train().\n"
            "Call optimizer.train() first, on all ranks. Nothing has changed."
        )
