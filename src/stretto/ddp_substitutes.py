"""What forward finds in the place of parameters: casts (``mixed_precision=``), DTensors (beside tensor parallelism).

    parameter ──cast, or DTensor.from_local──> what forward finds ──> loss ──backward──> .grad of the parameter

torch writes other memory into ``parameter.data`` from forward until its gradient comes, and puts DTensors in the place
of parameters for good. Here a substitute is a part of the graph, in the module's table only while forward runs: to
whoever looks at another time, parameters are themselves, and gradients arrive on them in their own dtype.

[Note: recomputed]  A checkpoint runs layers again within backward, when their substitutes are gone. So each layer
makes its own if it is called there. It stands in torch's slot for compiled calls, as in forward.py, for the same
reasons. A checkpoint around a function that uses parameters without calling their layer finds the parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel.distributed import _MixedPrecision

from .engine import current_task
from .forward import keep_from_compiler

Substitute = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns what stands in for a parameter, by its name in the wrapped module; itself where nothing does."""


class Substitutes:
    """Puts them in place. Layers let go of it when it is freed.

    Args:
        chain: what is done to a parameter to make its substitute, one after the other.
    """

    def __init__(self, chain: Sequence[Substitute]) -> None:
        self._chain = chain
        keep_from_compiler(_exchanges, callees=True)
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def substitute(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What forward is to find in the place of a parameter."""
        for change in self._chain:
            parameter = change(name, parameter)
        return parameter

    @contextlib.contextmanager
    def in_forward(self, module: torch.nn.Module) -> Iterator[None]:
        """In the wrapped module and all its layers."""
        layers = [*module.named_modules()]
        for prefix, layer in layers[1:]:
            if layer not in self._known:
                self._known.add(layer)
                _Recomputed(prefix, layer, self)
        with _exchanged(layers, self.substitute):
            yield


class _Recomputed:
    """Stands in a layer's slot: see [Note: recomputed]."""

    def __init__(self, prefix: str, layer: torch.nn.Module, owner: Substitutes) -> None:
        self._prefix, self._layer, self._owner = prefix, weakref.ref(layer), weakref.ref(owner)
        self._compiled: Any = layer._compiled_call_impl
        layer.__dict__["_compiled_call_impl"] = self

    def __reduce__(self) -> Any:
        """A copy of the layer is nobody's."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        assert layer is not None, "it is being called"
        call = self._compiled or layer._call_impl
        if torch.compiler.is_compiling() or current_task() == -1 or (owner := self._owner()) is None:
            return call(*args, **kwargs)
        with _exchanged([(self._prefix, layer)], owner.substitute):
            return call(*args, **kwargs)


@contextlib.contextmanager
def _exchanged(layers: Sequence[tuple[str, torch.nn.Module]], substitute: Substitute) -> Iterator[None]:
    exchanges = _exchanges(layers, substitute)
    recurrent = [layer for _, layer in layers if isinstance(layer, torch.nn.RNNBase)]
    try:
        for one in exchanges:
            one.table[one.name] = one.instead
        _list_weights(recurrent)
        yield
    finally:
        for one in exchanges:
            if one.table.get(one.name) is one.instead:  # else forward has put another there
                one.table[one.name] = one.parameter
        _list_weights(recurrent)


@dataclass(frozen=True)
class _Exchange:
    table: Any
    name: str
    parameter: torch.nn.Parameter
    instead: torch.Tensor


def _exchanges(layers: Sequence[tuple[str, torch.nn.Module]], substitute: Substitute) -> list[_Exchange]:
    """One substitute for all places of a tied parameter, which get one gradient."""
    made: dict[int, torch.Tensor] = {}
    found = []
    for prefix, layer in layers:
        for name, parameter in layer._parameters.items():
            if isinstance(parameter, torch.nn.Parameter):
                if id(parameter) not in made:
                    made[id(parameter)] = substitute(f"{prefix}.{name}" if prefix else name, parameter)
                found.append(_Exchange(layer._parameters, name, parameter, made[id(parameter)]))
    return found


def _list_weights(layers: Sequence[torch.nn.RNNBase]) -> None:
    """Recurrent layers keep a list of their parameters, by which they compute."""
    for layer in layers:
        layer.__dict__["_flat_weights"] = [getattr(layer, name, None) for name in layer._flat_weights_names]


def lower(module: torch.nn.Module, config: _MixedPrecision, ignored: Collection[str]) -> Substitute:
    """Cast buffers for good, as torch does; returns what casts parameters. Only floating-point ones, of both.

    Args:
        module: the wrapped one.
        config: torch's; a dtype that is None changes nothing.
        ignored: names of parameters and buffers that stay as they are.
    """
    for name, buffer in module.named_buffers():
        if config.buffer_dtype is not None and buffer.is_floating_point() and name not in ignored:
            buffer.data = buffer.to(config.buffer_dtype)

    def cast(name: str, parameter: torch.Tensor) -> torch.Tensor:
        if config.param_dtype is None or name in ignored or not parameter.is_floating_point():
            return parameter
        return parameter.to(config.param_dtype)

    for name, parameter in module.named_parameters():
        if name not in ignored:
            _mark(parameter, cast(name, torch.empty_like(parameter, device="meta")))
    return cast


def _mark(parameter: Any, lowered: torch.Tensor) -> None:
    """torch's attributes: shapes and dtypes. What torch keeps there has no counterpart here, so they hold no values."""
    parameter._mp_param = lowered
    parameter._fp_param = torch.empty_like(parameter, device="meta")


def whole(module: torch.nn.Module) -> Substitute:
    """Put the local part of each DTensor in its place, as a parameter; returns what makes DTensors of them again."""
    from torch.distributed.tensor import DTensor  # with it comes much of torch's compiler
    from torch.distributed.tensor.parallel._data_parallel_utils import sync_grad_hook

    specs: dict[str, Any] = {}
    parts: dict[int, torch.nn.Parameter] = {}
    for prefix, layer in module.named_modules():
        for name, one in layer._parameters.items():
            if isinstance(one, DTensor):
                if id(one) not in parts:
                    local = one.to_local().detach()
                    parts[id(one)] = torch.nn.Parameter(local, requires_grad=one.requires_grad)
                specs[f"{prefix}.{name}" if prefix else name] = one._spec
                layer._parameters[name] = parts[id(one)]

    def assemble(name: str, part: torch.Tensor) -> torch.Tensor:
        spec = specs.get(name)
        if spec is None:
            return part
        if part.requires_grad and torch.is_grad_enabled():
            part = part.view_as(part)
            # Its gradient may still be under way between the shards.
            part.register_hook(sync_grad_hook)  # type: ignore[no-untyped-call]
        return DTensor.from_local(part, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)

    return assemble
