"""Whether the handle reduces what an optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import SetupError


def refuse_others(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, parameters: Iterable[torch.Tensor], where: str
) -> None:
    """Raise if the optimizer steps a parameter that is not of the module, or is trained and not among these."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    reduced = {id(parameter) for parameter in parameters}
    for number, group in enumerate(optimizer.param_groups):
        for place, one in enumerate(group["params"]):
            if id(one) not in names or (one.requires_grad and id(one) not in reduced):
                who = names.get(id(one), f"parameter {place} of group {number}, {tuple(one.shape)},")
                raise SetupError(
                    f"{where}: {who} is stepped by the optimizer, and not reduced by this handle.\n"
                    "Build the optimizer over parameters of the attached module, or shard it with the handle of theirs."
                )
