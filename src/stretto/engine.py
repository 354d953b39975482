"""What stretto asks of torch's autograd engine, all in one place.

[Note: end of a pass]  ``queue_callback`` runs a function at the end of the *current* graph task. Inside a reentrant
checkpoint that is a nested one. There the enclosing autograd node is not None, and we queue again from that node's post
hook, until the outermost task ends. If backward raises, the engine drops its callbacks without running them: the
callback object dies and a weak reference tells us at once. So the pass is given up while the exception is still on its
way to the user.

[Note: nested tasks]  Within one graph task, a parameter's gradient is final when its hook fires. But a reentrant
checkpoint runs tasks of its own, and a parameter that is used in two tasks fires twice, maybe after its bucket has
left. A late gradient is noticed at the end of the pass and sent in a second round (late.py); from then on the bucket
waits. Whether a graph with a reentrant checkpoint is alive can be seen beforehand, in the reference count of its nodes'
type: each instance holds one reference.

[Note: an exception on its way]  While the engine drops its callbacks, C++ holds the exception and Python cannot see it.
The next thing that happens in Python is that it comes out of the call that started the engine, and a trace function on
that frame is told. So we set one, for that one event, and then put back what was there before.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

from .errors import PeerError, UnsupportedError

if TYPE_CHECKING:
    from .launch import LaunchQueue

F = TypeVar("F", bound=Callable[..., Any])


def left_uncompiled(called: F) -> F:
    """Keep torch's compiler away from what torch calls, and from all that it calls.

    Within ``torch.compile`` of a whole step a backward runs with the compiler listening. It would compile each of our
    functions that a hook leads to, and what those write into tensors and tables then gets lost.
    """
    return _passed_over(called, torch._C._dynamo.eval_frame._FrameAction.SKIP, inlined=False)


def compiled_inside(called: F, *, inlined: bool = True) -> F:
    """Have torch's compiler trace what this frame calls, as it would without it, and not the frame itself.

    Args:
        called: the function of the frame.
        inlined: whether it goes along into what is compiled, where that calls it; else the graph ends there.
    """
    return _passed_over(called, torch._C._dynamo.eval_frame._FrameAction.DEFAULT, inlined=inlined)


def _passed_over(called: F, what_it_calls: Any, *, inlined: bool) -> F:
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, what_it_calls)
    frames.set_code_exec_strategy(called.__code__, strategy)
    if not inlined:
        vars(called)["_torchdynamo_disable"] = True  # where a compiled function itself calls it
    return called


class OutermostEnd:
    """Tells when the outermost backward that is running ends, or that it was dropped because something raised.

    Args:
        ended: called, if a pass has begun, on the thread that called backward, or on an accelerator's in the engine;
            what it raises comes out of ``backward()``.
        paused: called when a nested task has ended and the enclosing one goes on. If gradients arrive before the
            enclosing node is done, call ``watch`` again: should that node fail while the user keeps its graph, nothing
            else would tell. So ``ended`` may be called twice.
        dropped: called when backward raised, or ``ended`` before it got to :meth:`ends`; with whether a pass had begun.
    """

    def __init__(self, ended: Callable[[], None], paused: Callable[[], None], dropped: Callable[[bool], None]) -> None:
        self._ended = ended
        self._paused = paused
        self._dropped = dropped
        self._held: weakref.ref[functools.partial[None]] | None = None
        self._task = -1
        self._has_begun = False

    def expect(self) -> None:
        """Call from a hook of the engine, where a pass may be about to begin."""
        if self._held is None:
            self._has_begun = False
            self._watch()

    def watch(self) -> None:
        """Call from a gradient hook, at the first of a pass."""
        self._has_begun = True
        if self._held is None or self._task != current_task():
            self._watch()

    def _watch(self) -> None:
        self._task = current_task()
        self._hold(Variable._execution_engine.queue_callback, self._task_ended)

    def ends(self) -> None:
        """Call in ``ended``, from where on failures are dealt with."""
        self._held = None

    def _hold(self, give: Callable[[functools.partial[None]], object], call: Callable[..., None]) -> Any:
        # Held by nobody else, no frame of a traceback either, so that its death means that the engine dropped it.
        callback = functools.partial(call)
        self._held = weakref.ref(callback, self._died)
        return give(callback)

    @left_uncompiled
    def _died(self, reference: weakref.ref[functools.partial[None]]) -> None:
        if reference is self._held:
            self._held = None
            self._dropped(self._has_begun)

    @left_uncompiled
    def _task_ended(self) -> None:
        if self._task != current_task():
            return  # another has taken its place, on another thread maybe
        if not self._has_begun:
            self._held = None
            return
        enclosing: Any = torch._C._current_autograd_node()
        if enclosing is None:
            try:
                self._ended()
            except PeerError as error:  # of another rank: how it was waited for here is of no use to anybody
                raise error.with_traceback(None) from error.__cause__
            self._held = None
            return

        @left_uncompiled
        def again(*_: object) -> None:
            self._watch()
            handle.remove()

        handle = self._hold(enclosing.register_hook, again)
        self._paused()


def refuse_compiled(queue: LaunchQueue) -> None:
    """Raise if torch's compiled autograd runs this backward: it traces hooks, and never calls what is to end a task.

    Raises:
        UnsupportedError: with the queue's rank and pass in front.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise UnsupportedError(
            f"{queue.where}: this backward is run by torch's compiled autograd, in which gradients cannot be reduced.\n"
            "Leave torch._dynamo.config.compiled_autograd False; torch.compile(model) alone is fine."
        )


def without_graph(call: Callable[..., object], *arguments: object) -> None:
    """Call it with grad mode off, which it mostly is during backward: only ``create_graph=True`` switches it on."""
    if not torch.is_grad_enabled():
        call(*arguments)
        return
    with torch.no_grad():
        call(*arguments)


class _AllNodes(torch.autograd.Function):
    """Made only for its ``next_functions``: the accumulating nodes of many parameters at one call."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:  # never run
        return None


def will_arrive(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Inside a gradient hook: which of these leaves the task that is running accumulates into, at 1 us each."""
    with torch.enable_grad():
        meeting: Any = _AllNodes.apply(*parameters)  # type: ignore[no-untyped-call]
    if meeting.grad_fn is None:  # all of them are frozen
        return [False] * len(parameters)
    here = torch._C._current_autograd_node()  # alone in its graph (parameter.backward(...)), it is not counted
    nodes = [node for node, _ in meeting.grad_fn.next_functions]
    return [node is not None and (node is here or torch._C._will_engine_execute_node(node)) for node in nodes]


# One partial for all: it holds a reference, and takes none while it calls, which another thread would count.
_count_checkpoints = functools.partial(sys.getrefcount, getattr(CheckpointFunction, "_backward_cls", None))


class ReentrantCheckpoints:
    """Whether graphs with reentrant checkpoints of torch are alive in this process, asked at 0.2 us."""

    def __init__(self) -> None:
        self._fewest = _count_checkpoints()

    def alive(self) -> bool:
        """Not certain to be seen if some was when this object was made."""
        count = _count_checkpoints()
        self._fewest = min(count, self._fewest)
        return count > self._fewest


RecomputedEnough = _StopRecomputationError
"""What a checkpoint stops forward with in backward, once it has all that it needs: nothing has failed."""

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the engine's task that is running; -1 outside of backward."""


def _is_traced() -> bool:
    """Whether a trace function would be called now."""
    heard: list[bool] = []  # and no frame, which would hold this list and so itself
    before = sys.gettrace()
    sys.settrace(lambda *_: heard.append(True))
    (lambda: None)()
    sys.settrace(before)
    return bool(heard)


_STARTS_ENGINE = _engine_run_backward.__code__


def running(code: CodeType) -> FrameType | None:
    """The innermost call on this thread that runs this code, if one does."""
    found: FrameType | None = sys._getframe()
    while found is not None and found.f_code is not code:
        found = found.f_back
    return found


def accumulates_into(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the engine is to leave gradients in ``.grad`` of some of these, as far as it is seen.

    It is not in ``torch.autograd.grad``, nor in ``backward(inputs=...)`` of others, nor if all are frozen.
    """
    trained = {id(one) for one in parameters if one.requires_grad}
    if not trained or (found := running(_STARTS_ENGINE)) is None:
        return bool(trained)
    given = found.f_locals
    inputs = [id(one) for one in given["args"][3]]
    return given["kwargs"]["accumulate_grad"] and not (inputs and trained.isdisjoint(inputs))


def when_raised(tell: Callable[[BaseException | None, TracebackType | None], None]) -> bool:
    """Call ``tell`` with the exception that the engine is about to raise and its traceback.

    See [Note: an exception on its way].

    Returns:
        False if the exception will not be seen: this thread did not start the engine, or is in a trace function, as
        at the prompt of a debugger. ``tell`` gets None if the engine ends well: what it dropped was of another's.
    """
    found = running(_STARTS_ENGINE)
    if found is None or not _is_traced():
        return False
    frame, on_frame, everywhere = found, found.f_trace, sys.gettrace()

    def elsewhere(*of_event: Any) -> Any:
        return everywhere(*of_event) if everywhere is not None else None

    def here(*of_event: Any) -> Any:
        frame.f_trace = on_frame
        sys.settrace(everywhere)
        _, event, argument = of_event
        tell(*(argument[1:] if event == "exception" else (None, None)))
        return on_frame(*of_event) if on_frame is not None else None

    frame.f_trace = here
    sys.settrace(elsewhere)
    return True
