"""What forward finds in place of parameters: casts (``mixed_precision=``), DTensors (beside tensor parallelism).

    parameter ──cast, or DTensor.from_local──> what forward finds ──> loss ──backward──> .grad of the parameter

torch writes other memory into ``parameter.data`` from forward until the parameter's gradient comes, and replaces
parameters by DTensors for good. Here a substitute is a part of the graph, and is in the module's tables only while
forward runs. At any other time the parameters themselves are there, and gradients arrive on them in their own dtype.

[Note: recomputed]  A checkpoint runs parts of forward again within backward, and must find what forward has found. So
when backward comes to an output, the substitutes of that forward are put in place again until the task ends or the
engine drops it. A recomputation that belongs to no output that can be found sees the parameters themselves.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel.distributed import _find_tensors, _MixedPrecision

from .engine import left_uncompiled
from .errors import SetupError, UnsupportedError
from .forward import called_from, lowest
from .options import gives_rows
from .selection import STANDS_FOR
from .withheld import Alive
from .wording import name_list

Substitute = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""Returns what stands in for a layer's parameter, or for what stands in for that already; itself where nothing does."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One entry of a layer's table."""

    table: dict[str, Any]
    name: str
    parameter: torch.Tensor
    instead: torch.Tensor
    version: int
    """Of the parameter, when the substitute was made."""

    def has_lost(self) -> bool:
        """Whether forward has changed the copy, which is then dropped, or what was copied."""
        if type(self.instead) is not torch.Tensor or self.instead.is_inference():
            return False  # a DTensor lies where the parameter lies
        written = self.instead._version or self.parameter._version != self.version
        return bool(written) or self.instead.requires_grad is not self.parameter.requires_grad


class _InPlace:
    """Substitutes of one forward."""

    def __init__(self, module: torch.nn.Module, substitute: Substitute) -> None:
        self._places = _places(module, substitute)
        self._recurrent = [layer for layer in module.modules() if isinstance(layer, torch.nn.RNNBase)]

    def put(self) -> None:
        """Let them be found."""
        for one in self._places:
            if one.table.get(one.name) is one.parameter:
                one.table[one.name] = one.instead
        self._list_weights()

    def take_away(self) -> None:
        """Let the parameters be found, but where forward has put others. Harmless twice."""
        for one in self._places:
            if one.table.get(one.name) is one.instead:
                one.table[one.name] = one.parameter
        self._list_weights()

    def _list_weights(self) -> None:
        """Recurrent layers keep a list of their parameters, by which they compute."""
        for layer in self._recurrent:
            layer.__dict__["_flat_weights"] = [getattr(layer, name, None) for name in layer._flat_weights_names]

    @left_uncompiled
    def refuse_lost(self, module: torch.nn.Module) -> None:
        """Raise where forward has changed a parameter or its copy."""
        lost = {id(one.parameter) for one in self._places if one.has_lost()}
        if lost:
            names = [name for name, one in module.named_parameters() if id(vars(one).get(STANDS_FOR, one)) in lost]
            raise UnsupportedError(
                f"DistributedDataParallel: forward has changed {name_list(names)}, but with mixed_precision= it gets "
                "copies of them: the change would be lost.\n"
                "Change parameters, or which of them are trained, before forward."
            )

    @left_uncompiled
    def again_in_backward(self, outputs: object) -> None:
        """See [Note: recomputed]."""
        found: Any = _find_tensors(outputs) if self._places else ()  # type: ignore[no-untyped-call]
        for one in found:
            if one.grad_fn is not None:
                held = [self]  # until this output's part of the graph is freed: keeping a loss keeps no copies
                one.register_hook(functools.partial(_until_the_end, held))
                one.grad_fn.register_hook(functools.partial(_let_go, held))


@left_uncompiled
def _until_the_end(held: list[_InPlace], _: torch.Tensor) -> None:
    for one in held:
        one.put()
        callback = functools.partial(one.take_away)
        weakref.finalize(callback, one.take_away).atexit = False  # where backward raises the engine drops it unrun
        Variable._execution_engine.queue_callback(callback)


@left_uncompiled
def _let_go(held: list[_InPlace], *_: Any) -> None:
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        held.clear()


@left_uncompiled
def _places(module: torch.nn.Module, substitute: Substitute) -> list[_Place]:
    """One substitute for all places of a tied parameter, which get one gradient."""
    made: dict[int, torch.Tensor] = {}
    found = []
    # An evaluation may switch grad mode on inside, or share them with another thread; else nothing hangs on them.
    with torch.inference_mode(False), torch.enable_grad():
        for layer in module.modules():
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = substitute(layer, parameter)
                if made[id(parameter)] is not parameter:
                    instead, version = made[id(parameter)], 0 if parameter.is_inference() else parameter._version
                    found.append(_Place(layer._parameters, name, parameter, instead, version))
    return found


class Substitutes:
    """Puts them in place for as long as some thread runs forward.

    Args:
        chain: what is done to a parameter to make its substitute, one after the other.
    """

    def __init__(self, chain: Sequence[Substitute]) -> None:
        self._chain = chain
        self._lock = threading.Lock()
        self._inside = 0
        self._current: _InPlace | None = None

    def run(self, module: torch.nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it with the substitutes of the module's parameters in place."""
        current = self._enter(module)
        try:
            output = call(*args, **kwargs)
            current.refuse_lost(module)
        finally:
            self._leave(current)
        current.again_in_backward(output)
        return output

    @left_uncompiled
    def _enter(self, module: torch.nn.Module) -> _InPlace:
        with self._lock:
            current = self._current or _InPlace(module, self._substitute)
            if self._current is None:
                try:
                    current.put()
                except BaseException:  # Ctrl-C: what stayed would be trained in their place
                    current.take_away()
                    raise
            self._current, self._inside = current, self._inside + 1
            return current

    @left_uncompiled
    def _leave(self, current: _InPlace) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                current.take_away()
                self._current = None

    def _substitute(self, layer: torch.nn.Module, parameter: torch.Tensor) -> torch.Tensor:
        for change in self._chain:
            parameter = change(layer, parameter)
        return parameter


# Mixed precision


def config_of(asked: Any) -> _MixedPrecision | None:
    """What was given, if it is torch's. Raises ``SetupError`` otherwise."""
    if asked is not None and not isinstance(asked, _MixedPrecision):
        raise SetupError(
            f"DistributedDataParallel: mixed_precision={asked!r} must be a "
            "torch.nn.parallel.distributed._MixedPrecision, or None.\nFor one dtype: _MixedPrecision(param_dtype=...)."
        )
    return asked


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
    stay = Alive(one for name, one in module.named_parameters(remove_duplicate=False) if name in ignored)

    def cast(layer: torch.nn.Module, parameter: torch.Tensor) -> torch.Tensor:
        dtype = config.param_dtype
        if dtype is None or dtype is parameter.dtype or not parameter.is_floating_point() or stay.holds(parameter):
            return parameter
        lowered: torch.Tensor = _Rows.apply(parameter, dtype) if gives_rows(layer) else parameter.to(dtype)  # type: ignore[no-untyped-call]
        vars(lowered).update(vars(parameter))  # what a program has noted there
        vars(lowered)[STANDS_FOR] = parameter
        return lowered

    for parameter in module.parameters():
        if not stay.holds(parameter):
            _mark(parameter, config.param_dtype if parameter.is_floating_point() else None)
    return cast


class _Rows(torch.autograd.Function):
    """A cast whose gradient may be sparse, which torch's own refuses."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = whole.dtype
        return whole.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


def _mark(parameter: Any, dtype: torch.dtype | None) -> None:
    """torch's attributes: shapes and dtypes. What torch keeps there has no counterpart here, so they hold no values."""
    parameter._mp_param = torch.empty_like(parameter, dtype=dtype, device="meta")
    parameter._fp_param = torch.empty_like(parameter, device="meta")


# Tensor parallelism

SPEC = "_st_info"
"""torch's name for what a local part knows of the whole."""


def _refuse_fully_sharded(module: torch.nn.Module) -> None:
    """FSDP goes on with its own DTensors: what forward finds in their place would never be trained."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())  # who has not imported it has none
    if found := [name or "the module" for name, one in module.named_modules() if isinstance(one, kind)]:
        raise UnsupportedError(
            f"DistributedDataParallel: {name_list(found)} went through fully_shard, whose parameters would not be "
            "trained here.\nGive fully_shard both dimensions of the mesh, and leave the wrapper out."
        )


def whole(module: torch.nn.Module) -> Substitute:
    """Put the local part of each DTensor in its place, as a parameter; returns what makes DTensors of them again."""
    from torch.distributed.tensor import DTensor  # with it comes much of torch's compiler
    from torch.distributed.tensor.parallel._data_parallel_utils import sync_grad_hook

    _refuse_fully_sharded(module)
    parts: dict[int, torch.nn.Parameter] = {}
    tables: list[dict[str, Any]] = [layer._parameters for layer in module.modules()]
    for table in tables:
        for name, one in table.items():
            if isinstance(one, DTensor):
                if id(one) not in parts:
                    local = one.to_local().detach()
                    parts[id(one)] = torch.nn.Parameter(local, requires_grad=one.requires_grad)
                    setattr(parts[id(one)], SPEC, one._spec)
                table[name] = parts[id(one)]

    def assemble(_: torch.nn.Module, part: torch.Tensor) -> torch.Tensor:
        spec = getattr(part, SPEC, None)
        if spec is None or isinstance(part, DTensor):
            return part
        standing_for = vars(part).get(STANDS_FOR, part)
        if part.requires_grad:
            part = part.view_as(part)
            # Its gradient may still be under way between the shards.
            part.register_hook(sync_grad_hook)  # type: ignore[no-untyped-call]
        made = DTensor.from_local(part, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)
        vars(made)[STANDS_FOR] = standing_for
        return made

    return assemble


class Called:
    """Stands in the module's slot for compiled calls, as in forward.py: who calls the module itself finds the same.

    Args:
        module: the wrapped one.
        substitutes: of its parameters.
    """

    def __init__(self, module: torch.nn.Module, substitutes: Substitutes) -> None:
        self._module, self._substitutes = weakref.ref(module), substitutes
        self.beneath: Any = module._compiled_call_impl
        """What was there before."""
        if not isinstance(self.beneath, Called):
            module.__dict__["_compiled_call_impl"] = self

    def __reduce__(self) -> Any:
        """A copy of the module belongs to no handle."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if not is_dynamo_compiling() and (called := called_from(sys._getframe(1), module)) is not module:
            return (lowest(self) or called._call_impl)(*args, **kwargs)
        assert module is not None, "it is being called"
        return self._substitutes.run(module, self.beneath or module._call_impl, *args, **kwargs)
