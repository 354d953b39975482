"""What is known of forward: that it failed on this rank, and whether this rank ran it more often than it used to.

    module(...) raises ──> a note for those who wait ──> FAILED_EARLY in the next pass ──sum──> PeerError on all ranks
                              ^
    backward, from the module's outputs to the first gradient of a parameter, raises

[Note: no answer out of turn]  A rank whose forward has failed has sent nothing, and must not send: what the others do
next may be another model's pass, or the user's own ``all_reduce``. So it says so in its next pass, whenever that comes.
Where some ranks say so and others do not, all raise at the end of that pass, and nobody steps. Where all say so, they
compare how often it failed.

[Note: what is not seen]  An exception outside the module (in the loss, or in its backward) is the user's own. It leaves
one trace: more forwards than usual before the next pass. That does not prove an error, so it gives a warning, and only
where ranks differ.

[Note: outputs]  Where backward comes to an output of the module, it is watched from there on. For this a hook lies in
the table that torch calls for a tensor, at half the cost of ``register_prehook``. Each output has a table of its own;
hooks that the program, or another attached model that hands the output on, sets on it go into that table too.

[Note: the slot]  torch keeps a slot for what ``module.compile()`` makes of a module, and calls what lies there. Using
it costs less than a forward hook, and ``copy.deepcopy``, pickle and TorchScript, which would all take a hook along,
leave it behind. But a copy of ``__dict__`` has it too (functional clones of ``higher`` and learn2learn, replicas of
torch), and the function in the slot is not told which module was called: the calling frame shows that.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .engine import OutermostEnd, RecomputedEnough, compiled_inside, current_task, left_uncompiled
from .failing import Failing
from .launch import LaunchQueue
from .selection import STANDS_FOR
from .watch import refuse_around
from .words import Control

if TYPE_CHECKING:
    from .reducer import Reducer

log = logging.getLogger("stretto")
FEW_COUNTS = 3
"""So many different numbers of forwards before a pass are a habit (accumulation, a penalty at times), not chance."""
REGULAR_AFTER = 8
"""Until this pass, only a single number is a habit."""
_CALLS_THE_SLOT = torch.nn.Module._wrapped_call_impl.__code__
_CONTAINERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    dict: dict.values,
}


class Forwards(NamedTuple):
    """How often a rank ran forward; what it tells the others where some ran it more often than ever."""

    now: int = 0
    """Before this pass."""
    most: int = 0
    """Before any earlier pass."""
    more: bool = False
    """It has said that these are more."""
    usual: bool = False
    """As many as before some earlier pass, where the numbers are few enough to be a habit."""


class ForwardWatch:
    """Stands in the slot of an attached module, see [Note: the slot]. Never communicates.

    Args:
        module: the attached one; held weakly. None if it was freed already.
        passes: knows what a forward that begins now is for; held weakly.
        queue: knows the pass, and the observers.
        failing: told of an exception that came out of such a forward.
        end: watches a backward that comes to the module's outputs; held weakly by these.
    """

    def __init__(
        self, module: torch.nn.Module | None, passes: Reducer, queue: LaunchQueue, failing: Failing, end: OutermostEnd
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._passes = weakref.ref(passes)
        self._failing = failing
        self._mark = functools.partial(_reached, weakref.ref(passes), weakref.ref(end))
        self._mark.__dict__["__torch_unserializable__"] = True  # else saving an output would warn
        self._key = -1 - queue.peers.seat.number  # torch's own count from 0
        self._queue = queue
        self.beneath: Any = None
        self._runs = 0
        self._most = 0
        self._counts = set[int]()  # different numbers of forwards before a pass, as long as these are few
        self._last = 0
        self._said = Forwards()
        self.failures = 0
        """How often it failed before this pass, or backward before it reached a parameter."""
        self._told_once = False
        self._around: weakref.ref[Any] | None = None
        """The last wrapper of torch's that has run this forward and does not reduce what is attached."""
        if module is not None:
            self._stand_in(module)

    def __reduce__(self) -> Any:
        """A copy of the module is not attached."""
        return type(None), ()

    @compiled_inside
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = None if self._module is None else self._module()
        if not is_dynamo_compiling() and (called := called_from(sys._getframe(1), module)) is not module:
            return (lowest(self) or called._call_impl)(*args, **kwargs)
        assert module is not None, "it is being called"
        call, passes = self.beneath or module._call_impl, self._passes()
        learns = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if passes is not None and passes.members.is_bare:
            passes.members.hook_what_is_there()
        elif learns and passes is not None and passes.members.tables.lack_one(STANDS_FOR):
            passes.members.look_before()
        if not learns or passes is None or passes.running:
            return call(*args, **kwargs)
        if (around := TorchDDP._active_ddp_module) is not None:
            self._look_around(around)
        counts = passes.synchronize
        self._runs += counts and current_task() == -1  # else a checkpoint, maybe before the pass has begun
        queue, events = self._queue, self._queue.events
        if events.forward_started:
            events.emit(events.forward_started, queue.pass_number + 1)
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            if counts and not isinstance(error, RecomputedEnough):
                self._failing.before("forward", error, error.__traceback__)
            raise
        self._mark_outputs(result)
        if events.forward_ended:
            events.emit(events.forward_ended, queue.pass_number + 1)
        return result

    def _stand_in(self, module: torch.nn.Module) -> None:
        """Unless it does already, maybe under another one."""
        top = found = module._compiled_call_impl
        while found is not None and found is not self:
            found = getattr(found, "beneath", None)
        if found is None:
            self.beneath, module.__dict__["_compiled_call_impl"] = top, self

    @left_uncompiled
    def _look_around(self, wrapper: Any) -> None:
        """torch's wrapper may be older than the handle, and cannot be seen in the module."""
        if self._around is None or self._around() is not wrapper:
            refuse_around(wrapper, [one() for one in self._queue.references])
            self._around = weakref.ref(wrapper)

    @left_uncompiled
    def _mark_outputs(self, result: Any) -> None:
        """See [Note: outputs]."""
        for output in (result,) if isinstance(result, torch.Tensor) else _tensors_in(result):
            try:
                node = output.grad_fn
            except RuntimeError:  # one of several views, of what was written over since: no backward can begin there
                continue
            if node is not None:
                if (hooks := output._backward_hooks) is not None:
                    hooks[self._key] = self._mark
                else:
                    output._backward_hooks = OrderedDict({self._key: self._mark})
                    node._register_hook_dict(output)

    def remove(self) -> None:
        """Leave the slot. Harmless twice."""
        module = None if self._module is None else self._module()
        above = None if module is None else module.__dict__.get("_compiled_call_impl")
        if module is not None and above is self:
            del module.__dict__["_compiled_call_impl"]  # torch's own says None, for all modules
            if self.beneath is not None:
                module.__dict__["_compiled_call_impl"] = self.beneath
        while above is not None and above is not self:
            below = getattr(above, "beneath", None)
            if below is self:
                above.beneath = self.beneath
            above = below

    def forget(self) -> None:
        """What ran or failed so far is of no pass to come: all ranks are in step."""
        self._runs = self._failing.early = 0

    def says(self, number: int) -> list[Control]:
        """What this rank's pass ``number`` is to tell the others. From here on forwards are of the next pass."""
        if number == self._last:
            return []  # it was said, and then the pass was given up
        self._last = number
        module = None if self._module is None else self._module()
        if module is not None and module.__dict__.get("_compiled_call_impl") is not self:
            self._stand_in(module)  # module.compile() puts what it makes in place of this
        more = self._said.now > 0 and self._runs > self._most  # else the program may mostly run other methods
        few = FEW_COUNTS if number > REGULAR_AFTER else 1  # the episodes of an environment, say, all differ
        usual = self._runs in self._counts and len(self._counts) <= few
        if self._runs and len(self._counts) <= FEW_COUNTS:
            self._counts.add(self._runs)
        self._said, self.failures = Forwards(self._runs, self._most, more, usual), self._failing.early
        self._most, self._runs, self._failing.early = max(self._most, self._runs), 0, 0
        return [Control.FAILED_EARLY] * (self.failures > 0) + [Control.MORE_FORWARDS] * more

    def warn(self, *, idle: bool) -> None:
        """Say once that some ranks ran forward more often than they used to, and others did not. Collective.

        Args:
            idle: this rank had no part in the pass.
        """
        if self._told_once:
            return
        everyone: list[Forwards] = self._queue.peers.gather(Forwards(most=self._most) if idle else self._said)
        if not any(one.usual for one in everyone):
            return
        self._told_once = True
        if self._queue.transport.rank not in (0, *(rank for rank, one in enumerate(everyone) if one.more)):
            return
        told = "; ".join(f"rank {rank} {one.now}, at most {one.most} before" for rank, one in enumerate(everyone))
        log.warning(
            "%s: some ranks ran forward more often for this pass than for any earlier one, others did not (%s).\n"
            "If a rank skipped a batch (an exception that was caught, a loss that needs no gradient, a break or "
            "continue before backward), its passes are shifted by one from here on. Run forwards without a backward "
            "under torch.no_grad(). Shown once.",
            self._queue.where,
            told,
        )


def lowest(slot: Any) -> Any:
    """What was in the slot before all of ours: what ``module.compile()`` has made, or None."""
    while hasattr(slot, "beneath"):
        slot = slot.beneath
    return slot


@left_uncompiled
def called_from(frame: FrameType, module: torch.nn.Module | None) -> Any:
    """The module that was called where this frame is the caller of its slot: a copy, or the attached one."""
    if frame.f_code is not _CALLS_THE_SLOT:
        return module
    names = frame.f_locals
    called = names["self"]
    if type(names) is dict:  # before Python 3.13 the frame keeps it, and with it the inputs of a forward that fails
        names.clear()
    return called


def _tensors_in(result: Any) -> list[torch.Tensor]:
    """Also those in containers, which may contain themselves."""
    found, seen, ahead = list[torch.Tensor](), set[int](), [result]
    while ahead:
        one = ahead.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            ahead += _held_by(one)
    return found


def _held_by(one: Any) -> Iterable[Any]:
    """What it holds if it is a container. A dataclass may itself be among outputs, or have a field that is to come.

    What the program has made of a container may do other things when it is walked through: so it is not asked itself,
    and what only calls itself one (a proxy) is none.
    """
    for kind, held in _CONTAINERS.items():
        if issubclass(type(one), kind):
            return held(one)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return [getattr(one, field.name, None) for field in dataclasses.fields(one)]
    return ()


@left_uncompiled
def _reached(passes: weakref.ref[Reducer], end: weakref.ref[OutermostEnd], *_: object) -> None:
    """The engine has come to an output. After ``detach`` there is nothing left to call."""
    reducer, watch = passes(), end()
    if reducer is not None and watch is not None and reducer.synchronize and not reducer.running:
        watch.expect()
