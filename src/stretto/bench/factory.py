"""The user's own model: from ``script.py:factory`` or ``package.module:factory`` to a model and a loss.

The factory takes nothing and returns one of

    model                   for a comparison, a batch is made up after the model's first layer
    model, batch            the loss is what the model returns if that is a number, its ``.loss`` or ``["loss"]``, or
                            its mean square
    model, batch, loss      loss(model, batch) returns the loss, and runs the model however it likes

``batch`` goes to the model as it is, a tuple or list as positional and a dict as keyword arguments. Where ``batch`` is
a function, it is called without arguments in every step, for batches that differ.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import SetupError
from .load import BrokenModelError, call, load
from .models import BUILT_IN, Loss, Workload

FORMS = (
    f"A built-in model ({', '.join(BUILT_IN)}), or a function of yours: script.py:factory or package.module:factory. "
    "It is called without arguments and returns model, (model, batch) or (model, batch, loss), with loss(model, batch) "
    "the loss of a step."
)
"""The help text of commands that take a model."""
SEED = 0
MADE_UP = 32
"""Examples in a batch that is made up."""
_SIDES: dict[type[nn.Module], tuple[int, ...]] = {nn.Conv1d: (64,), nn.Conv2d: (64, 64), nn.Conv3d: (16, 16, 16)}
_TOKENS = 64


def workload_of(source: str) -> Callable[[], Workload]:
    """Return what makes the model and its loss, the same on every call, since weights are seeded.

    Args:
        source: the name of a built-in workload, ``script.py:factory`` or ``package.module:factory``.

    Raises:
        SetupError: there is no such thing, or it makes something else; in one line.
    """
    if source in BUILT_IN:
        return _seeded(BUILT_IN[source])
    factory = _loaded(source)
    return _seeded(lambda: _workload(source, call(factory, source)))


def model_of(source: str) -> nn.Module:
    """Only the model, in whichever form the factory returns it.

    Args:
        source: as in :func:`workload_of`.

    Raises:
        SetupError: as in :func:`workload_of`.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()[0]
    model: nn.Module = _parts(source, call(_loaded(source), source))[0]
    return model


def try_out(source: str) -> str:
    """Take one step in this process, so that a model that does not work is reported before ranks are started.

    Returns:
        A sentence about the batch that a reader has to know; empty if there is none.

    Raises:
        SetupError: with what it raised.
    """
    model, loss = workload_of(source)()
    if not any(one.requires_grad for one in model.parameters()):
        raise SetupError(f"{source} gives a module without a parameter that requires a gradient")
    batch = getattr(loss, "made_up", None)
    try:
        loss(model).backward()  # type: ignore[no-untyped-call]
    except SetupError:
        raise
    except Exception as error:
        text = f"{source} cannot make one step: {type(error).__name__}: {' '.join(str(error).split())}"
        if batch is not None:
            text += f"; {_described(batch)} went into it, made up to fit its first layer: return (model, batch)"
        elif getattr(loss, "is_given", False):
            text += "; loss(model, batch) is called, and what it returns is to be a tensor of one element"
        elif source not in BUILT_IN:
            text += (
                "; of (model, batch) a step is model(batch), or model(*batch) where that is a tuple: with targets in "
                "it, return (model, batch, loss) with loss(model, batch)"
            )
        raise BrokenModelError(text) from error
    return "" if batch is None else f"The batch is made up to fit the first layer: {_described(batch)}."


def _seeded(make: Callable[[], Workload]) -> Callable[[], Workload]:
    def made() -> Workload:
        torch.manual_seed(SEED)
        return make()

    return made


def _loaded(source: str) -> Any:
    if ":" not in source:
        if os.path.isfile(source):
            raise SetupError(f"{source}: say which function in it returns the model, as {source}:make_model")
        raise SetupError(
            f"{source!r} is neither a built-in model ({', '.join(BUILT_IN)}) nor a function of yours, "
            "script.py:factory or package.module:factory"
        )
    return load(source)


def _parts(source: str, made: Any) -> tuple[Any, ...]:
    """The model, and the batch and the loss if given."""
    parts = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module) or (len(parts) == 3 and not callable(parts[2])):
        raise SetupError(
            f"{source} gives {_shape_of(made)}: return model, (model, batch) or (model, batch, loss), with a "
            "torch.nn.Module and loss(model, batch)"
        )
    return parts


def _workload(source: str, made: Any) -> Workload:
    model, *rest = _parts(source, made)
    if not rest:
        return model, _loss_of_made_up(source, model)
    batch, loss = rest[0], rest[1] if len(rest) == 2 else _default_loss
    give = batch if callable(batch) and not isinstance(batch, torch.Tensor) else lambda: batch
    step = functools.partial(_step, loss=loss, give=give)
    step.is_given = loss is not _default_loss  # type: ignore[attr-defined]
    return model, step


def _step(model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], give: Callable[[], Any]) -> torch.Tensor:
    return loss(model, give())


def _shape_of(made: Any) -> str:
    names = [type(one).__name__ for one in made] if isinstance(made, (tuple, list)) else []
    return f"({', '.join(names)})" if names else f"a {type(made).__name__}"


def _loss_of_made_up(source: str, model: nn.Module) -> Loss:
    batch = next(filter(lambda one: one is not None, map(_batch_for, model.modules())), None)
    if batch is None:
        raise SetupError(
            f"{source} gives only a model, without a layer (Linear, Conv, Embedding) that tells what its input "
            "is: return (model, batch)"
        )
    loss = functools.partial(_default_loss, batch=batch)
    loss.made_up = batch  # type: ignore[attr-defined]
    return loss


def _batch_for(layer: nn.Module) -> torch.Tensor | None:
    if isinstance(layer, nn.Linear):
        return torch.randn(MADE_UP, layer.in_features)
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return torch.randint(layer.num_embeddings, (MADE_UP, _TOKENS))
    sides = next((sides for kind, sides in _SIDES.items() if isinstance(layer, kind)), None)
    return None if sides is None else torch.randn(MADE_UP, int(layer.in_channels), *sides)  # type: ignore[arg-type]


def _described(batch: torch.Tensor) -> str:
    kind = "random numbers" if batch.is_floating_point() else "random tokens"
    return f"{' x '.join(map(str, batch.shape))} {kind}"


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        made = model(**batch)
    elif isinstance(batch, (tuple, list)):
        made = model(*batch)
    else:
        made = model(batch)
    if isinstance(returned := made, Mapping) and "loss" in made:
        made = made["loss"]
    else:
        made = getattr(made, "loss", made)
    lacks = made is None and returned is not None
    while isinstance(made, (tuple, list)):
        made = made[0]
    if not isinstance(made, torch.Tensor):
        what = f"{type(returned).__name__}, whose loss is None," if lacks else f"{type(made).__name__},"
        raise SetupError(
            f"the model returns {what} which cannot be made into a loss.\n"
            "Return (model, batch, loss) from the factory, where loss(model, batch) is the loss of a step."
        )
    return made if made.dim() == 0 else made.square().mean()
