"""What stands in ``.grad`` where this rank has only its share of the mean. It raises an error when it is read.

``clip_grad_norm_`` would silently skip a missing gradient, and a partial one would be taken for the mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .errors import WithheldError
from .transport import Transport, Work, slice_of

if TYPE_CHECKING:
    from .bucket import Bucket


class Withheld(torch.Tensor):
    """Has the shape and dtype of a gradient, and no values. Everything that reads or writes it raises."""

    said: str

    @classmethod
    def of(cls, parameter: torch.Tensor, where: str, name: str) -> Withheld:
        """In place of the gradient of a parameter.

        Args:
            parameter: what it is the gradient of.
            where: how the message begins.
            name: of the parameter.
        """
        made: Withheld = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.said = (
            f"{where}: the gradient of {name} is not here: with keep_grads=False each rank has only its share of "
            "it.\n"
            "To clip: sync.clip_grad_norm_(). For several backwards before step() or zero_grad(): run all but the last "
            "inside sync.no_sync(). If a backward only passes through this module, like an actor's loss through its "
            "critic: requires_grad_(False) on it meanwhile. For GradScaler, or to read gradients: stretto.shard(..., "
            "keep_grads=True)."
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse((*args, *(kwargs or {}).values()))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def _refuse(values: Sequence[Any]) -> NoReturn:
    for value in values:
        if isinstance(value, Withheld):
            raise WithheldError(value.said)
        if isinstance(value, (tuple, list)) and any(isinstance(one, Withheld) for one in value):
            _refuse(value)
    raise AssertionError  # it is called for one that is withheld


class Alive:
    """Some parameters, held weakly, and known by identity: the ``id`` of one that is gone may be a later one's.

    Args:
        parameters: which.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._references = {id(one): weakref.ref(one) for one in parameters}

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of them."""
        reference = self._references.get(id(parameter))
        return reference is not None and reference() is parameter

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([one for reference in self._references.values() if (one := reference()) is not None])


def leave_in_shares(buckets: Sequence[Bucket], names: Sequence[str], parameters: Alive, rank: int) -> bool:
    """Buckets that hold none but these parameters are reduced no further than to each rank's share. Alike on all ranks.

    Returns whether there are such.

    Args:
        buckets: all of a plan.
        names: of its parameters.
        parameters: those.
        rank: for messages.
    """
    for bucket in buckets:
        alive, named = bucket.parameters, [names[index] for index in bucket.indices]
        if not all(map(parameters.holds, alive)):
            bucket.withheld = ()
        elif not bucket.withheld:
            bucket.withheld = [Withheld.of(one, f"rank {rank}", name) for one, name in zip(alive, named, strict=True)]
        bucket.withhold()
    return any([bucket.withheld for bucket in buckets])


def give_back_whole(buckets: Sequence[Bucket], but: Iterable[torch.Tensor]) -> None:
    """Whole gradients, as ``complete`` has left them, for all but those for which a share now suffices."""
    stay = {id(one) for one in but}
    for bucket in buckets:
        for one, view in zip(bucket.parameters, bucket.views, strict=True):
            if isinstance(one.grad, Withheld) and id(one) not in stay:
                one.grad = view.clone()


def complete(buckets: Sequence[Bucket], transport: Transport, wait_for: Callable[[Work, str], None]) -> None:
    """Let every rank have the whole of gradients that are in shares, since another plan has other shares. Collective.

    What is added to a share are zeros, of all other ranks.
    """
    works = []
    for bucket in buckets:
        if bucket.withheld:
            low, high = slice_of(len(bucket.slots), transport.rank, transport.world_size)
            bucket.slots[:low].zero_()
            bucket.slots[high:].zero_()
            works.append(transport.all_reduce(bucket.slots))
            bucket.withheld = ()
    for work in works:
        wait_for(work, "gradients in shares")
