"""What happens in a pass of an attached model, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from .buffers import BufferPlaces
from .comm_hooks import carrier
from .reducer import Reducer
from .wording import counted, name_list


class NoModel:
    """Says so where a handle is taken for a model, as torch's wrapper is one: ``model = stretto.attach(model)``."""

    __slots__ = ()

    if not TYPE_CHECKING:  # to a type checker it has none of these

        def __getattr__(self, name: str) -> NoReturn:
            """Only of what is not there."""
            if not name.startswith("_") and hasattr(torch.nn.Module, name):
                raise AttributeError(f"attach() returns a handle, which has no {name}: {_GO_ON}", name=name, obj=None)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

        def __call__(self, *_: object, **__: object) -> NoReturn:
            """Raises ``TypeError``."""
            raise TypeError(f"attach() returns a handle, which cannot be called: {_GO_ON}")


_GO_ON = (
    "use the model as before.\nWrite sync = stretto.attach(model) and go on with model; for a wrapper like torch's, "
    "model = stretto.DistributedDataParallel(model)."
)


def describe_shortly(module: torch.nn.Module, reducer: Reducer | None, *, was_attached: bool) -> str:
    """In one line, for a debugger's eyes."""
    name = type(module).__name__
    if reducer is None:
        return f"<stretto.Synchronizer of {name}, {'detached' if was_attached else '1 rank'}>"
    transport, number = reducer.transport, reducer.queue.pass_number
    where = f"rank {transport.rank} of {transport.world_size} over {transport.name}"
    return f"<stretto.Synchronizer of {name}, {where}, {counted(len(reducer.plan.buckets), 'buckets')}, pass {number}>"


def describe(reducer: Reducer | None, places: BufferPlaces, optimizers: Sequence[str], *, is_detached: bool) -> str:
    """Several lines, the plan at the end.

    Args:
        reducer: None with one rank, or after the end.
        places: the module's buffers.
        optimizers: a line for each that is sharded; empty for those that are no more.
        is_detached: whether there was one.
    """
    if reducer is None:
        return f"{'detached' if is_detached else '1 rank'}: backward is left alone, nothing is communicated."
    transport = reducer.transport
    return "\n".join(
        [
            f"rank {transport.rank} of {transport.world_size} over {transport.name}",
            f"gradients: {_how(reducer)}, in place when backward returns",
            *_sparse(reducer),
            f"buffers ({len(places)}): {_BUFFERS_IN_WORDS[places.policy]}{_AT_REST if places.at_rest else ''}",
            *filter(None, optimizers),
            str(reducer.plan),
        ]
    )


def _how(reducer: Reducer) -> str:
    if reducer.queue.comm_hook is not None:
        return f"by {carrier(reducer.queue.comm_hook, reducer.transport.name)}"
    options = reducer.members.options
    kind = "weighted mean" if options.weighted and options.reduce == "mean" else options.reduce
    return f"{kind} over ranks, sent {'after backward' if reducer.delay else 'while backward runs'}"


def _sparse(reducer: Reducer) -> list[str]:
    names = reducer.sparse.names
    return [f"sparse gradients ({len(names)}): by rows, when backward has ended: {name_list(names)}"] if names else []


_AT_REST = "; no longer sent, since none changes"
_BUFFERS_IN_WORDS = {
    "rank0": "follow rank 0's at the end of every pass",
    "mean": "become their mean over ranks at the end of every pass (integers follow rank 0's)",
    "none": "stay as they are on each rank",
}
