"""Which tensors of a module are to be looked after, and which cannot be averaged or sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import SetupError
from .options import Options
from .wording import name_list

STANDS_FOR = "_stretto_stands_for"
"""On what stands in a module's table for a parameter while forward runs: the parameter (ddp_substitutes.py)."""


def named(module: torch.nn.Module, options: Options, kind: str) -> dict[str, Any]:
    """The module's parameters or buffers that are not to be left alone, by name."""
    found = getattr(module, f"named_{kind}")()
    return {name: vars(one).get(STANDS_FOR, one) for name, one in found if not options.ignores(name)}


def trained(module: torch.nn.Module, options: Options) -> dict[str, torch.nn.Parameter]:
    """The parameters to reduce, by name, in order of registration."""
    return {
        name: parameter for name, parameter in named(module, options, "parameters").items() if parameter.requires_grad
    }


def wrapping(tensors: Mapping[str, torch.Tensor]) -> str:
    """Names and kinds of those whose values lie in other tensors: a message would not hold all of them."""
    found = [f"{name} ({kind})" for name, one in tensors.items() if (kind := _wraps(one))]
    return name_list(found) if found else ""


def _wraps(one: Any) -> str:
    """Sparse ones have them in rows and values, quantised ones also have a scale. Empty for plain ones."""
    if is_traceable_wrapper_subclass(one):
        return type(one).__name__
    return str(one.dtype) if one.is_quantized else "" if one.layout is torch.strided else str(one.layout)


def cast_gradients(parameters: Mapping[str, torch.Tensor]) -> str:
    """Names of those that are to have gradients of another dtype (torch's ``grad_dtype``), which would fit no slot."""
    trained = [(name, one) for name, one in parameters.items() if one.is_leaf and one.requires_grad]
    found = [f"{name} ({one.grad_dtype})" for name, one in trained if one.grad_dtype not in (None, one.dtype)]
    return name_list(found) if found else ""


def refuse_cast_gradients(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ``SetupError`` for those."""
    if cast := cast_gradients(parameters):
        raise SetupError(
            f"attach: {cast} are to have gradients of another dtype than their own, which cannot lie in a bucket.\n"
            "Leave grad_dtype of parameters alone. To sum in another dtype give reduce_dtype=."
        )


def unfit(tensors: Mapping[str, torch.Tensor]) -> str:
    """Why some of them cannot be averaged or sent; empty if all can."""
    if lazy := [name for name, one in tensors.items() if torch.nn.parameter.is_lazy(one)]:
        return f"{name_list(lazy)} are not initialised yet (lazy modules): run one forward before the next backward"
    if wrapped := wrapping(tensors):
        return f"{wrapped} have their values in other tensors: attach again, with ignore= for these"
    if cast := cast_gradients(tensors):
        return f"{cast} are to have gradients of another dtype than their own: leave their grad_dtype alone"
    return ""


STAND_IN = "(no dense parameter)"


def stand_in(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """A parameter for the plan of a model that has sparse ones alone, these: a last bucket must carry control words.

    It gets no gradient, and need not live longer than the buckets take to be made.
    """
    return {STAND_IN: torch.nn.Parameter(torch.zeros(1, device=next(iter(rows.values())).device))}
