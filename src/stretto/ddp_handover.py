"""Wrapping again: what averaged gradients here before gives way to the new wrapper, or the new one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .crossing import group_of, is_destroyed
from .errors import AlreadyAttachedError, SetupError
from .reducer import reducer_of
from .wording import name_list

if TYPE_CHECKING:
    from .ddp_compat import TorchSurface


def hand_over(ddp: TorchSurface) -> bool:
    """A module is wrapped again, or one that holds a wrapped one: the earlier reducer ends, the new one takes over.

    As in torch, where both would reduce, one after the other, for the same result. Hooks sit on parameters, so the
    earlier wrapper goes on to work through the new reducer. One that has other parameters besides (a trunk with two
    heads, each head wrapped with it) goes on, and the new one takes the rest. Not where another group's mean would be
    lost, unless that group is destroyed. Returns whether any has ended.
    """
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    mine = {id(one): names[id(one)] for one in ddp._module_parameters}
    earlier = dict.fromkeys(reducer for one in ddp._module_parameters if (reducer := reducer_of(one)) is not None)
    alive = [reducer for reducer in earlier if not is_destroyed(reducer.transport)]
    stay = [reducer for reducer in alive if any(id(one) not in mine for one in reducer.parameters)]
    for reducer in alive:
        if group_of(reducer.transport) is not ddp.process_group:
            held = [mine[id(one)] for one in ddp._module_parameters if reducer_of(one) is reducer]
            raise AlreadyAttachedError(
                f"DistributedDataParallel: {name_list(held)} already reduced by another wrapper or handle, over "
                "another group.\nWrap both over the same group."
            )
    trained = [one for one in ddp._module_parameters if one.requires_grad]
    if trained and all(reducer_of(one) in stay for one in trained):
        raise AlreadyAttachedError(
            f"DistributedDataParallel: {name_list(mine.values())} already reduced by another wrapper or handle, with "
            "parameters that this module does not have.\nUse this one as it is, unwrapped: its gradients are the mean. "
            "Or wrap the outer module last, or delete its wrapper first if it is not needed any more."
        )
    for reducer in sorted(earlier, key=lambda one: -len(one.inside)):  # the outer ones first
        if reducer in stay:
            continue
        try:
            reducer.detach()
        except SetupError as error:
            raise AlreadyAttachedError(
                "DistributedDataParallel: this module is wrapped already, and another wrapper leaves the layers that "
                "both share to that one.\nUse the existing wrapper."
            ) from error
    return any(reducer not in stay for reducer in earlier)
