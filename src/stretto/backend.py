"""A torch.distributed backend: collectives of one host in shared memory, for any program, torch's own DDP included.

    import stretto.backend
    dist.init_process_group("stretto")

Importing this module registers the name with torch, which is what it is for, and wraps the method of torch's reducer
that keeps a work; ``import stretto`` alone does neither. From torch 2.14 on the name is enough: torch imports the
module by its entry point.

all_reduce, broadcast, all_gather, reduce_scatter and barrier, in all their variants, move CPU tensors through memory
that the ranks share; in a world of one there is nothing to do. Everything else goes through a Gloo group that the
backend makes for itself: gather, scatter, reduce, all_to_all, send and recv, sparse tensors. If the ranks of a group do
not all share memory (several hosts, containers, users), all of its messages go that way: rank 0 logs the reason once,
to ``stretto`` at level INFO.

[Note: synchronous]  A collective in shared memory is complete when the call returns, even with ``async_op=True``:
torch's C++ waits for futures without calling into Python, and there is no thread that could complete them. So a late
rank stalls the others where they call, not where they wait. And ranks must issue all their collectives, including those
of different groups and sends, in an order that works without ``async_op``.
"""

# torch's stubs have overloads that nothing calls, and other names for some parameters, where C++ has none.
# mypy: disable-error-code="override, assignment, no-any-return"

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Reducer,
    ReduceScatterOptions,
    Work,
    _create_work_from_future,
    _DistributedBackendOptions,
)
from torch.utils._python_dispatch import _disable_current_modes

from .engine import left_uncompiled
from .errors import CommunicationError, PeerError
from .transport import ProcessGroupTransport, SharedMemoryTransport, choose
from .transport.base import as_reals, in_one_row
from .transport.collectives import Collectives, Done, WorldOfOne, can_reduce
from .transport.shared_memory import let_go
from .transport.stand_ins import on_values


class StrettoProcessGroup(dist.ProcessGroup):
    """What ``init_process_group("stretto")`` and ``new_group(backend="stretto")`` make.

    Its ranks find out whether they share memory at their first collective. Other signatures of its methods than those
    that torch itself uses are left to Gloo.

    Args:
        options: the store, rank, size and timeout, as torch gives them to a backend.

    Raises:
        CommunicationError: from collectives, a ``RuntimeError``: a rank has died, did not come within the timeout, or
            called something else.
    """

    # torch lets Python derive from its process group, not from its backends. C++ hands what is not overridden here to
    # the backend that is registered for the device.

    def __init__(self, options: _DistributedBackendOptions) -> None:
        store, rank, size = options.store, options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one for classes of Python is not in the stub
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._rank = rank
        self._ranks = options.global_ranks_in_group
        self._turn = threading.RLock()  # several threads may use one group, as they may with Gloo
        self._transport: SharedMemoryTransport | None = None  # stays for late ranks when it goes, or the program ends
        self._asked = size == 1
        self.begun = 0
        """Collectives in memory, counted for callers that ask whether there were any."""
        self._collectives: Collectives | WorldOfOne | None = WorldOfOne() if size == 1 else None

    def getBackendName(self) -> str:
        """As torch's C++ asks for it."""
        return "stretto"

    @property
    def in_shared_memory(self) -> bool | None:
        """Whether the ranks share memory; None before the first collective, at which they find out. One shares none."""
        return isinstance(self._collectives, Collectives) if self._asked else None

    @on_values
    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """``dist.all_reduce``; in torch's DDP, ranks that have run out of batches give the tensor by itself."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        options = _options(AllreduceOptions, opts, more)
        operation = _operation(options, tensors)
        if operation is None or (shared := self._shared(tensors)) is None:
            return self._gloo.allreduce(tensors, *_if_given(opts), **more)
        with self._named("all_reduce"), _Flat(tensors) as (row,):
            shared.all_reduce(as_reals(row), operation, _timeout(options))
        return Done([*tensors])

    @on_values
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """``dist.all_reduce_coalesced``: one after the other."""
        options = AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        for tensor in tensors:
            self.allreduce([tensor], options).wait()
        return Done([*tensors])

    @on_values
    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """``dist.broadcast``."""
        options = _options(BroadcastOptions, opts, more)
        fits = options is not None and _is_one(tensors) and 0 <= options.rootRank < self.size()
        if not fits or (shared := self._shared(tensors)) is None:
            return self._gloo.broadcast(tensors, *_if_given(opts), **more)
        with self._named("broadcast"), _Flat(tensors) as (row,):
            shared.broadcast(row, options.rootRank, _timeout(options))
        return Done([*tensors])

    @on_values
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> Work:
        """``dist.all_gather``: into one tensor for each rank."""
        options = _options(AllgatherOptions, opts, more)
        fits = options is not None and _is_one(input_tensors) and self._fit(output_tensors[0], input_tensors[0])
        if not fits or (shared := self._shared([input_tensors[0], *output_tensors[0]])) is None:
            return self._gloo.allgather(output_tensors, input_tensors, *_if_given(opts), **more)
        with self._named("all_gather"), _Flat(output_tensors[0]) as rows:
            shared.all_gather(rows, in_one_row(input_tensors[0].data), _timeout(options))
        return Done([*output_tensors[0]])

    @on_values
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """``dist.all_gather_single``, formerly ``all_gather_into_tensor``: results one after the other."""
        options = opts or AllgatherOptions()
        fits = output.dtype == input.dtype and output.numel() == self.size() * input.numel()
        if not fits or (shared := self._shared([output, input])) is None:
            return self._gloo._allgather_base(output, input, options)
        with self._named("all_gather"), _Flat([output]) as (row,):
            shared.all_gather(_parts(row, self.size()), in_one_row(input.data), _timeout(options))
        return Done([output])

    @on_values
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **more: Any) -> Work:
        """``dist.reduce_scatter``: of one tensor for each rank."""
        options = _options(ReduceScatterOptions, opts, more)
        operation = _operation(options, output_tensors)
        fits = operation is not None and self._fit(input_tensors[0], output_tensors[0])
        if operation is None or not fits or (shared := self._shared([output_tensors[0], *input_tensors[0]])) is None:
            return self._gloo.reduce_scatter(output_tensors, input_tensors, *_if_given(opts), **more)
        with self._named("reduce_scatter"), _Flat(output_tensors) as (row,):
            parts = [as_reals(in_one_row(tensor.data)) for tensor in input_tensors[0]]
            shared.reduce_scatter(as_reals(row), parts, operation, _timeout(options))
        return Done([*output_tensors])

    @on_values
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """``dist.reduce_scatter_single``, formerly ``reduce_scatter_tensor``: of as many parts as ranks."""
        options = opts or ReduceScatterOptions()
        operation = _operation(options, [output])
        fits = output.dtype == input.dtype and input.numel() == self.size() * output.numel()
        if operation is None or not fits or (shared := self._shared([output, input])) is None:
            return self._gloo._reduce_scatter_base(output, input, options)
        with self._named("reduce_scatter"), _Flat([output]) as (row,):
            parts = _parts(as_reals(in_one_row(input.data)), self.size())
            shared.reduce_scatter(as_reals(row), parts, operation, _timeout(options))
        return Done([output])

    @on_values
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several, one after the other."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts).wait()
        return Done([*outputs])

    @on_values
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Several, one after the other."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts).wait()
        return Done([*outputs])

    # torch's C++ would hold the interpreter's lock while it calls Gloo for these, whose threads, with a lock of Gloo's,
    # wait for it where they let go of the tensors of an earlier one: ranks hung in one of some fifteen programs.

    @on_values
    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None, **more: Any
    ) -> Work:
        """``dist.all_to_all_single``, by Gloo."""
        options = AllToAllOptions() if opts is None else opts
        options.timeout = more.get("timeout", options.timeout)
        return self._gloo.alltoall_base(output, input, output_split_sizes, input_split_sizes, options)

    @on_values
    def send(self, tensors: Any, dstRank: int, tag: int) -> Work:
        """``dist.send``, by Gloo."""
        return self._gloo.send(tensors, dstRank, tag)

    @on_values
    def recv(self, tensors: Any, srcRank: int, tag: int) -> Work:
        """``dist.recv``, by Gloo."""
        return self._gloo.recv(tensors, srcRank, tag)

    # The names that they had before

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @left_uncompiled
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """``dist.barrier``."""
        options = BarrierOptions() if opts is None else opts
        if timeout is not None:
            options.timeout = timeout
        if (shared := self._shared([])) is None:
            return self._gloo.barrier(options)
        with self._named("barrier"):
            shared.barrier(_timeout(options))
        return Done([])

    def _fit(self, tensors: Sequence[torch.Tensor], one: torch.Tensor) -> bool:
        """Whether these are one for each rank, and like that one; Gloo tells what is wrong if not."""
        same = (one.dtype, one.numel())
        return len(tensors) == self.size() and all((tensor.dtype, tensor.numel()) == same for tensor in tensors)

    def _shared(self, tensors: Sequence[torch.Tensor]) -> Collectives | WorldOfOne | None:
        """What does it in shared memory; None if these tensors, or all of this group, must go through Gloo."""
        if not all(one.is_cpu and one.layout is torch.strided and not one.is_quantized for one in tensors):
            return None
        with self._turn:
            if not self._asked:
                self._asked = True  # before the question, which goes through this group
                with _disable_current_modes():  # in which tensors may be fake
                    chosen = choose(ProcessGroupTransport(self), "auto")
                if isinstance(chosen, SharedMemoryTransport):
                    self._transport = chosen
                    # When the program ends others see that, and may be told why.
                    weakref.finalize(chosen, let_go, weakref.ref(chosen.host)).atexit = False
                    self._collectives = Collectives(chosen.host)
        return self._collectives

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """One thread at a time, hidden from autograd as torch's backends are, and errors that say whose they are."""
        self.begun += 1
        try:
            with self._turn, torch.inference_mode():  # tensors made in that mode can be written in no other
                yield
        except RuntimeError as error:
            within = f" in the group of ranks {self._ranks}" if self._ranks else ""
            if isinstance(error, PeerError):  # it says what to do
                told = str(error).removeprefix(f"rank {self._rank}: ")
                raise PeerError(f"rank {self._rank}: {what}{within} failed: {told}") from error
            raise CommunicationError(
                f"rank {self._rank}: {what}{within} failed: {error}.\n"
                "Look at the first error in the other ranks' logs, and start again, on all ranks."
            ) from error


class _Flat:
    """Tensors as contiguous rows, which are put back where they had to be copies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._rows = [in_one_row(tensor.data) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return self._rows

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for tensor, row in zip(self._tensors, self._rows, strict=True):
                if row.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(row.view(tensor.shape))


def _parts(row: torch.Tensor, number: int) -> list[torch.Tensor]:
    """As many equal parts, which may be empty."""
    return [*row.view(number, -1)] if row.numel() else [row] * number


def _is_one(tensors: Any) -> bool:
    return isinstance(tensors, Sequence) and len(tensors) == 1


def _operation(options: Any, tensors: Any) -> str | None:
    """What it is called in shared memory; None if it is left to Gloo, which may refuse it."""
    if options is None or not _is_one(tensors):
        return None
    operation = options.reduceOp.op
    name = "prod" if operation == ReduceOp.PRODUCT else operation.name.lower()
    if tensors[0].is_complex() and name not in ("sum", "avg"):
        return None
    return name if can_reduce(name, tensors[0].dtype.to_real()) else None


def _options(kind: type, given: Any, more: dict[str, Any]) -> Any:
    """The options of a call, if they were given as such or not at all; else None."""
    if given is None and not more:
        return kind()
    return given if isinstance(given, kind) else None


def _if_given(opts: Any) -> list[Any]:
    return [] if opts is None else [opts]


def _timeout(options: Any) -> timedelta | None:
    return options.timeout if options.timeout > timedelta(0) else None


def _keeping(take: Any) -> Any:
    """For torch's reducer, whose C++ keeps the work of the collective that tells it, in ``DDP.join()``, how many ranks
    still have batches. Of one in Python only a half would be left there, which is never done.
    """

    @functools.wraps(take)
    def call(reducer: Any, work: Work, use_static_world_size: bool) -> None:
        kept = _create_work_from_future(work.get_future()) if isinstance(work, Done) else work
        take(reducer, kept, use_static_world_size)

    return call


def registered() -> None:
    """For torch 2.14, which looks a backend's name up among entry points. Importing this module has registered it."""


Reducer._set_forward_pass_work_handle = _keeping(Reducer._set_forward_pass_work_handle)
dist.Backend.register_backend("stretto", lambda options, _: StrettoProcessGroup(options), True, devices=["cpu"])
