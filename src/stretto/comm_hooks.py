"""What a user may put in place of the all-reduce of a bucket: torch's ``register_comm_hook`` contract.

A hook is called as ``hook(state, bucket)`` with a :class:`GradBucket` that is not yet divided by the world size, and
returns a ``torch.futures.Future`` of the reduced flat tensor. Hooks of ``torch.distributed.algorithms.ddp_comm_hooks``
work unchanged.

[Note: stateful hooks]  PowerSGD and others keep tensors by bucket index. With such a hook buckets are cut anew at most
once, when the first pass has settled and its order of arrival is known. torch does the same: these hooks begin later,
or ask ``_has_rebuilt_buckets``. This applies to any hook except those of torch's that are known to keep nothing. With
those, the plan follows the module and the order of arrival as it does without a hook.

[Note: one at a time]  PowerSGD and others communicate again in callbacks of their future, which Gloo runs on threads of
its own. With two buckets under way, these collectives come in another order on each rank, and torch's DDP aborts. So a
bucket is handed to the hook only when the future of the one before is done, and the last bucket is waited for before
buffers or anything else are sent. Polling would not be enough: what another model or the user sends in the same
backward must come between the same buckets on every rank, whichever rank is faster. torch's own hooks that communicate
once, when they are called, need none of this, and their last bucket is not waited for before the rest is sent. NCCL's
futures are done as soon as the work is in its stream, so there nothing waits.

[Note: a hook that fails]  If no process group has begun a collective, the hook is called again for the same bucket when
the pass is given up. If one has, a second call would send the bucket twice. And if the hook's future fails, a callback
may have had more to send. Whatever this rank sent next would meet something else on the other ranks, so it takes part
in nothing more. For the same reason, a future that is done is checked for failure before anything else is sent.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

from .bucket import Bucket
from .errors import CommunicationError, SetupError
from .hook_work import HookWork, collectives_begun, is_of_hook
from .notes import text_of
from .options import Options
from .transport.base import Transport, Work, as_reals
from .wording import counted

if TYPE_CHECKING:
    from .peers import Peers

Hook = Callable[[Any, Any], torch.futures.Future[Any]]
_KEEP_NOTHING = (allreduce_hook, bf16_compress_hook, fp16_compress_hook)
_COMMUNICATE_ONCE = (noop_hook, *_KEEP_NOTHING)


class GradBucket:
    """The face of a bucket that a comm hook sees, with the methods of ``torch.distributed.GradBucket``.

    As in torch, hooks see complex gradients as pairs of reals: they compress by casting, and collectives resolve to it.
    (torch's ``gradients()`` then has half of them, in the parameter's shape.)
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = as_reals(bucket.payload)

    def index(self) -> int:
        """Place in the launch order, from 0."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients of this rank, undivided, without stretto's numbers at the end."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in place of ``buffer()``, for hooks that are chained."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of ``buffer()``, one a parameter, in the parameter's shape and strides, as they lie in it.

        Of complex parameters with a last dimension of two.
        """
        payload, flat, views = self._bucket.payload, self._buffer, self._bucket.views
        places = [place for alike in self._bucket.layout for place in alike]
        if not payload.is_complex() or flat.is_complex():
            views = self._bucket.views_of(flat)
            return [views[place] for place in places]
        starts, begin = self._bucket.offsets, flat.storage_offset()
        return [
            flat.as_strided(
                (*views[place].shape, 2),
                (*(2 * stride for stride in views[place].stride()), 1),
                begin + 2 * starts[place],
            )
            for place in places
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the same order."""
        parameters = self._bucket.parameters
        return [parameters[place] for alike in self._bucket.layout for place in alike]

    def is_last(self) -> bool:
        """Whether this is the bucket that leaves last in a pass."""
        return self._bucket.is_last


class CommHook:
    """A registered hook with its state. See [Note: one at a time]."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self.state = state
        self.hook = hook
        self.silent = hook is noop_hook
        """Whether nothing at all is to be communicated."""
        self.one_at_a_time = hook not in _COMMUNICATE_ONCE
        """Whether a bucket waits for the one before: see [Note: one at a time]."""
        self.knows_buckets = hook not in _KEEP_NOTHING
        """Whether it may keep something by a bucket's index: see [Note: stateful hooks]."""
        self.failure = ""
        """What it has failed with, if something had been sent by then: see [Note: a hook that fails]."""
        self._current: HookWork | None = None
        self._where: Callable[[], str] = str  # empty

    def use(self, peers: Peers) -> None:
        """Say in messages where these are. They are not kept: callbacks of futures keep a bucket, and so this hook."""
        seen = weakref.ref(peers)
        self._where = lambda: "" if (alive := seen()) is None else f"{alive.where}: "

    def launch(self, bucket: Bucket, wait_for: Callable[[HookWork, Bucket], object]) -> HookWork:
        """Hand the bucket to the hook when the one before is through, unless it is not to be called any more.

        Args:
            bucket: a full one.
            wait_for: waits; its errors say which rank did not come.
        """
        if self.failure:
            where = self._where()
            raise CommunicationError(
                f"{where}{self} has failed, so it is not called again.\n  {self.failure}\n"
                "Remove the cause and start again, on all ranks."
            )
        if self._current is not None:
            if not self._current.is_well():
                wait_for(self._current, self._current.bucket)  # stopped there, it is waited for when giving up
            self._refuse_overrun(self._current)
        self._current = None  # should the hook raise, the pass has failed
        begun = 0 if self.silent else collectives_begun()
        behind = bucket.footer.flat.clone() if self.one_at_a_time and bucket.flat.is_cpu else None
        try:
            work = HookWork(bucket, self._call(bucket), self, behind)
        except BaseException as error:
            if not self.silent and (begun is None or collectives_begun() != begun):
                self.failure = text_of(error)
            raise
        if self.one_at_a_time and bucket.is_last:
            try:
                wait_for(work, bucket)
                self._refuse_overrun(work)
            except BaseException as error:  # it has left, and would leave again when the pass is given up
                self.failure = text_of(error)
                raise
        elif self.one_at_a_time:
            self._current = work
        return work

    def _call(self, bucket: Bucket) -> Any:
        seen = GradBucket(bucket)
        flat, numel = seen.buffer(), seen.buffer().numel()
        future = self.hook(self.state, seen)
        if flat.numel() != numel:
            self._refuse_resized(f", from {counted(numel, 'elements')} to {flat.numel()}")
        if not (hasattr(future, "done") and hasattr(future, "wait")):
            error = TypeError(
                f"{self} returned a {type(future).__name__}, not a torch.futures.Future of "
                "the reduced flat tensor.\nReturn the future of the collective, dist.all_reduce(tensor, async_op=True)"
                ".get_future(); or one that is done: future = torch.futures.Future(); future.set_result(tensor)."
            )
            self.failure = text_of(error)  # called again, it would do the same
            raise error
        return future

    def _refuse_overrun(self, work: HookWork) -> None:
        """It is through with that bucket. It may have resized the buffer for a while, as batched PowerSGD does."""
        if work.behind is not None and not torch.equal(work.behind, work.bucket.footer.flat):
            self._refuse_resized(" and back, and written behind it")

    def _refuse_resized(self, how: str) -> NoReturn:
        error = ValueError(
            f"{self} has resized bucket.buffer() in place{how}.\n"
            "It is a part of what ranks send each other: resize a copy, bucket.buffer().clone(), and let the future "
            "have as many elements as there were."
        )
        self.failure = text_of(error)  # called again, it would do the same
        raise error

    def blame(self, error: BaseException) -> None:
        """Remember what its future has failed with, and raise it as the hook's own if no other rank can be to blame."""
        self.failure = text_of(error)
        if (where := self._where()) and is_of_hook(error):
            rank, _, _ = where.partition(",")
            raise CommunicationError(f"{rank}: {error}\nRemove the cause and start again, on all ranks.") from error

    def __str__(self) -> str:
        return f"comm hook {hook_name(self.hook)}"


class Footers:
    """The footers of all buckets in one message of their own, since a hook moves the payload alone. Collective.

    Sent after the last bucket: see [Note: one at a time].
    """

    def __init__(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        self._footers = [bucket.footer.flat for bucket in buckets]
        device = buckets[-1].flat.device
        reals = [footer.real if footer.is_complex() else footer for footer in self._footers]
        self._flat = torch.cat([real.to(device, torch.float32) for real in reals])
        self._work = transport.all_reduce(self._flat)

    def finish(self, wait: Callable[[Work, str], None]) -> None:
        """Wait, and put the sums where they would be without a hook."""
        wait(self._work, "the footers of the buckets")
        sums = torch.split(self._flat, [len(footer) for footer in self._footers])
        for footer, summed in zip(self._footers, sums, strict=True):
            footer.copy_(summed)


def fixes_plan(hook: CommHook | None) -> bool:
    """Whether buckets have to stay what they are for it."""
    return hook is not None and hook.knows_buckets


def check_hook(hook: Any) -> Exception | None:
    """What torch would find wrong with a hook: its annotations, if it has some."""
    if not callable(hook):
        return TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):  # names that exist for a type checker only; a builtin
        return None
    bucket = signature.parameters.get("bucket")
    known = (inspect.Parameter.empty, Any, dist.GradBucket, GradBucket)  # type: ignore[attr-defined]
    if bucket is not None and bucket.annotation not in known:
        return ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (inspect.Signature.empty, Any, torch.futures.Future[torch.Tensor]):
        return ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    return None


def sum_hook(process_group: Any, bucket: Any) -> torch.futures.Future[Any]:
    """The sum over ranks, undivided."""
    work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)
    future: torch.futures.Future[Any] = work.get_future().then(lambda done: done.value()[0])
    return future


def hook_name(hook: object) -> str:
    """Where a user finds it, rather than where it lies in memory."""
    if isinstance(hook, functools.partial):
        return f"functools.partial({hook_name(hook.func)}, ...)"
    own = type(hook).__repr__ is not object.__repr__
    name = getattr(hook, "__qualname__", None if own else type(hook).__qualname__)
    return repr(hook) if name is None else f"{hook.__module__}.{name}"


def carrier(hook: CommHook | None, transport: str) -> str:
    """What carries the buckets, in words: a hook's collectives go over the process group, whatever the transport is."""
    return transport if hook is None else f"comm hook {hook_name(hook.hook)}, instead of {transport}"


def refuse_hook(hook: object, options: Options, rank: int) -> None:
    """Raise what keeps it from being registered with these options, if anything."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {hook!r}")
    signature = None
    with contextlib.suppress(NameError, ValueError, TypeError):  # as in check_hook, from Python 3.14 on
        signature = inspect.signature(hook, follow_wrapped=False)
    try:
        if signature is not None:
            signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"comm hook {hook_name(hook)} cannot be called as hook(state, bucket): {error}.\n"
            "Call register_comm_hook(state, hook): the hook gets that state and a bucket."
        ) from None
    if options.weighted or options.reduce != "mean" or options.predivide_factor is not None:
        raise SetupError(
            f"rank {rank}: a comm hook does its own scaling, so reduce=, weighted= and predivide_factor= of "
            "attach() have no effect with one.\nLeave them out, or leave out the hook."
        )


def refuse_second_hook(registered: Sequence[tuple[Hook, Any]], rank: int) -> None:
    """Raise if there is one already."""
    if registered:
        raise SetupError(
            f"rank {rank}: a comm hook is registered already ({registered[0][0]!r}).\n"
            "Detach and attach again to use another one: sync.detach(); sync = stretto.attach(model)"
        )
