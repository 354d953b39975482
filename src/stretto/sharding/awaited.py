"""Parameters whose new values are on their way: reading one waits for its bucket, and for no other.

[Note: awaited]  Between step and arrival a parameter's class is a subclass of its own with ``__torch_function__``, so
every torch function that gets it comes here first: a layer's forward, ``state_dict``, a print. After arrival the class
is restored, and no cost remains. This works for any module, however it runs forward. Where torch does not consult the
class, the read is not seen (scripted functions, transforms of torch.func that are given the parameter itself,
``torch.tensor(p)``): docs/sharding.md lists these. If a rank died in the middle of a step, the model would be half of
one step and half of another: then every read raises the reason.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from ..engine import left_uncompiled
from ..errors import StrettoError
from ..listeners import before_forks
from .compiled import CompilerWatch

_ATTRIBUTES = "grad requires_grad shape dtype device layout is_sparse is_leaf grad_fn _version ndim is_cpu is_cuda"
_METHODS = "size stride dim numel nelement element_size is_floating_point is_complex register_hook"
_METHODS += " register_post_accumulate_grad_hook requires_grad_ __hash__"


@functools.cache
def _harmless() -> frozenset[Any]:
    """What can be asked without reading values."""
    tensor: Any = torch.Tensor
    found = [getattr(tensor, name).__get__ for name in _ATTRIBUTES.split()]
    found += [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__]
    return frozenset([*found, *(getattr(tensor, name) for name in _METHODS.split())])


class Awaited:
    """What is waited for before the process forks (nothing arrives in a child) and before anything is compiled.

    It holds arrivals weakly, and each of them holds it: so it lives as long as a parameter waits, even if the optimizer
    is gone.

    Args:
        compiler: tells when it begins.
    """

    def __init__(self, compiler: CompilerWatch) -> None:
        self._compiler = compiler
        self._references: list[weakref.ref[Arrival]] = []
        before_forks().change(more=self._finish_here)
        compiler.call(self.finish)

    def add(self, arrival: Arrival) -> None:
        """Add one, after those that are there."""
        alive = [one for one in self._references if (other := one()) is not None and not other.is_over]
        self._references = [*alive, weakref.ref(arrival)]

    def finish(self) -> None:
        """Wait for all of them."""
        for arrival in self._alive():
            arrival.finish()

    def _finish_here(self) -> None:
        for arrival in self._alive():
            with contextlib.suppress(StrettoError):  # a read of the parameter raises it
                arrival.finish()
        self.drop()

    def _alive(self) -> list[Arrival]:
        return [one for reference in self._references if (one := reference()) is not None]

    def drop(self) -> None:
        """Wait for nothing more."""
        self._references = []


class Arrival:
    """Some parameters that become readable together.

    Args:
        parameters: their values are under way.
        arrive: waits for them, and puts them in place. If it raises, they never become readable.
        among: the others that are waited for together with these. Left out if they never come.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], arrive: Callable[[], None], among: Awaited | None = None
    ) -> None:
        self._arrive: Callable[[], None] | None = arrive
        self._failed: tuple[Exception, TracebackType | None] | None = None
        """Why they never become readable, and its first traceback."""
        self._among = among  # which lives as long as this
        self._before = [(weakref.ref(parameter), _plain(parameter)) for parameter in parameters]  # each holds this
        self._lock = threading.RLock()  # one thread may fork or read while another reads
        for parameter, (_, kind) in zip(parameters, self._before, strict=True):
            parameter.__class__ = _awaited(kind)
            parameter.__dict__[_KEY] = self
        if among is not None:
            among.add(self)

    @property
    def is_over(self) -> bool:
        """Whether the parameters can be read."""
        return self._arrive is None and self._failed is None

    def finish(self) -> None:
        """Wait until the parameters can be read. Harmless twice."""
        with self._lock:
            if self._failed is not None:  # its traceback would grow with each read, and hold what all readers have
                raise self._failed[0].with_traceback(self._failed[1])
            if self._arrive is not None:
                try:
                    self._arrive()
                except Exception as error:  # do not wait twice for what does not come
                    self._failed, self._arrive = (error, error.__traceback__), None
                    raise
                self._arrive = None
            for reference, kind in self._before:  # what Ctrl-C has left of it, too
                parameter = reference()
                if parameter is not None and parameter.__dict__.get(_KEY) is self:  # and no other has taken it over
                    parameter.__class__ = kind
                    del parameter.__dict__[_KEY]
            self._before = []


_KEY, _PLAIN = "_stretto_arrival", "_stretto_plain"


def _plain(parameter: torch.nn.Parameter) -> type[torch.nn.Parameter]:
    """Its original class, also if a new arrival takes over from another."""
    found: type[torch.nn.Parameter] = vars(type(parameter)).get(_PLAIN, type(parameter))
    return found


@functools.cache
def _awaited(kind: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class that a parameter of this class has until its values arrive."""

    @left_uncompiled  # below a model that is compiled in place, layers of torch are passed over, and this was not
    def __torch_function__(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = {*_arrivals_in((*args, *kwargs.values()))} if func not in _harmless() else ()
        for arrival in found:
            arrival.finish()
        if found:  # classes are restored: a user's own may have a say
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @left_uncompiled
    def __deepcopy__(self: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
        if (arrival := self.__dict__.get(_KEY)) is not None:
            arrival.finish()  # first: torch asks for the class, then for the values
        return copy.deepcopy(self, memo)

    own = {"__torch_function__": classmethod(__torch_function__), "__deepcopy__": __deepcopy__, _PLAIN: kind}
    return type(kind.__name__, (kind,), own)


def _arrivals_in(values: Any) -> Iterator[Arrival]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if (arrival := value.__dict__.get(_KEY)) is not None:  # another thread may finish it meanwhile
                yield arrival
        elif isinstance(value, (tuple, list)):
            yield from _arrivals_in(value)
        elif isinstance(value, dict):
            yield from _arrivals_in(value.values())
