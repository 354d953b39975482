"""Groups of gradients that one call copies into their slots, while they are in the cache."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import UnsupportedError
from .slots import lies_in, which_lie_in
from .withheld import Withheld
from .wording import name_list

if TYPE_CHECKING:
    from .bucket import Bucket

_numel: Callable[[Any], int] = torch.Tensor.numel  # half of what nbytes costs
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")


class MisfitError(Exception):
    """Among gradients are some that do not fit their slots, or none where one was expected."""


class Part:
    """Some parameters of a bucket that are taken together: one copy call for all, while they are in the cache."""

    __slots__ = ("bucket", "places", "references", "size", "views")

    def __init__(self, bucket: Bucket, places: Sequence[int]) -> None:
        self.bucket = bucket
        self.places, self.size = places, len(places)
        self.references = [bucket.references[place] for place in places]
        self.views = [bucket.views[place] for place in places]

    def check(self) -> None:
        """Raise :class:`MisfitError` before anything is copied."""
        parameters: list[Any] = [reference() for reference in self.references]
        for parameter, view in zip(parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.device != view.device or not fits(gradient, view):
                raise MisfitError

    def take(self) -> None:
        """Copy the gradients into their slots; ``.grad`` is None until the pass settles."""
        parameters: list[Any] = [reference() for reference in self.references]
        gradients = [parameter.grad for parameter in parameters]
        take_gradients(gradients, self.views)
        for place, parameter, gradient, view in zip(self.places, parameters, gradients, self.views, strict=True):
            if not gradient.requires_grad:
                gradient.data = view  # gives its own memory back while it is hot
                self.bucket.aside[place] = gradient
            parameter.grad = None
        self.bucket.pending -= self.size
        self.bucket.taken.append(self.places)


def is_slot(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``.grad`` is the slot, or stands for it."""
    gradient = parameter.grad
    return gradient is not None and (isinstance(gradient, Withheld) or lies_in(gradient, view))


def fits(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the slot can be its ``.grad``."""
    return parameter.dtype is view.dtype and parameter.shape == view.shape


class Kinds:
    """What gradients must have in common with their slots before they are copied, looked at in few calls.

    Numbers of elements and dtypes tell all that a copy would not raise for, but where the slot's first dimension is 1.
    """

    __slots__ = ("_broadcast", "_devices", "_dtypes", "_numels", "_slots")

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self._slots = slots
        self._numels = [*map(_numel, slots)]
        self._dtypes = [*map(_dtype, slots)]
        self._devices = [*map(_device, slots)] if torch.accelerator.is_available() else []
        self._broadcast = [place for place, slot in enumerate(slots) if slot.dim() and len(slot) == 1]

    def refuse_misfits(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Raise :class:`MisfitError` where a copy would cast, broadcast or write over the neighbours."""
        try:
            fit = (
                [*map(_numel, gradients)] == self._numels
                and [*map(_dtype, gradients)] == self._dtypes
                and (not self._devices or [*map(_device, gradients)] == self._devices)
                and (not self._broadcast or self.same_shapes(gradients, self._broadcast))
            )
        except (AttributeError, TypeError):  # of None
            raise MisfitError from None
        if not fit:
            raise MisfitError

    def same_shapes(self, gradients: Sequence[Any], places: Iterable[int] | None = None) -> bool:
        """At these places, or where a copy has failed at all."""
        places = range(len(self._slots)) if places is None else places
        return all(gradients[place].shape == self._slots[place].shape for place in places)


def take_gradients(gradients: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    """Copy gradients into their slots at one call.

    Where ``.grad`` is the slot already (``zero_grad(set_to_none=False)``, or none at all), autograd has accumulated in
    place and there is nothing to copy.
    """
    inside = which_lie_in(gradients, views)
    if any(inside):
        fresh = [i for i, there in enumerate(inside) if not there]
        if fresh:
            torch._foreach_copy_([views[i] for i in fresh], [gradients[i] for i in fresh])
    elif gradients:
        torch._foreach_copy_(views, gradients)


def refuse_sparse(
    parameters: Mapping[str, weakref.ref[torch.nn.Parameter]], where: str, error: RuntimeError | None
) -> None:
    """Say which gradients are sparse although they were to lie in buckets, if any is.

    Raises:
        UnsupportedError: from ``error``.
    """
    gradients = {name: getattr(reference(), "grad", None) for name, reference in parameters.items()}
    sparse = [name for name, grad in gradients.items() if grad is not None and grad.layout != torch.strided]
    if sparse:
        raise UnsupportedError(
            f"{where}: the gradient of {name_list(sparse)} is sparse, which their modules do not declare.\n"
            f"Name them: stretto.attach(model, sparse={sparse[:6]}); or make them dense."
        ) from error
