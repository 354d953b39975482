"""``attach``: the checks, the first plan, and the handle that the user keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from .agreement import Statement, agree, state_model
from .broadcast import broadcast_coalesced
from .comm_hooks import CommHook, Hook
from .errors import AlreadyAttachedError, SetupError, UnsupportedError, name_list
from .events import Events
from .plan import MIB, BucketPlan, describe_parameters, plan_buckets
from .reducer import Reducer, Statistics, reducer_of
from .transport.base import Transport
from .transport.process_group import ProcessGroupTransport

Buffers = Literal["rank0", "none"]


class BufferPlaces:
    """Where a module's buffers live: the owners' tables and the keys in them, in the order of ``named_buffers``.

    Buffers are looked up by name each time, since users reassign them (``self.count = self.count + 1``). It holds the
    tables and not the modules: see bucket.py, [Note: weak parameters].
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str]) -> None:
        self.policy: Buffers = "rank0"
        self._places = [
            (owner._buffers, key)
            for prefix, owner in module.named_modules()
            for key in owner._buffers
            if (f"{prefix}.{key}" if prefix else key) not in ignored
        ]

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> list[torch.Tensor]:
        """Those that are to follow rank 0's now."""
        if self.policy == "none":
            return []
        return [buffer for table, key in self._places if (buffer := table.get(key)) is not None]


class Synchronizer:
    """What ``attach`` returns: the handle on one attached module. Make it with :func:`attach`."""

    def __init__(
        self,
        module: torch.nn.Module,
        plan: BucketPlan,
        transport: Transport | None,
        ignored: frozenset[str],
        buffers: Buffers,
    ) -> None:
        self.module = module
        self.rank = transport.rank if transport else 0
        self.world_size = transport.world_size if transport else 1
        self._idle_plan = plan
        self._last_statistics = Statistics()
        self._transport = transport
        self._events = Events()
        self._buffer_places = BufferPlaces(module, ignored)
        self.buffers = buffers
        self._reducer: Reducer | None = None
        if transport is not None and transport.world_size > 1:
            self._reducer = Reducer(
                _trained(module, ignored), plan, transport, self._events, self._buffer_places.tensors
            )

    @property
    def buffers(self) -> Buffers:
        """``"rank0"`` or ``"none"``, from the next pass on; all ranks must set the same."""
        return self._buffer_places.policy

    @buffers.setter
    def buffers(self, policy: Buffers) -> None:
        self._buffer_places.policy = policy

    @property
    def plan(self) -> BucketPlan:
        """The plan in use. ``print(sync.plan)`` shows a table."""
        return self._reducer.plan if self._reducer else self._idle_plan

    @property
    def statistics(self) -> Statistics:
        """Counts since attaching, on this rank."""
        return self._reducer.statistics if self._reducer else self._last_statistics

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate in ``.grad`` without communication.

        What counts is where ``backward()`` runs; forward may be inside or outside. The next backward outside reduces
        the accumulated sum, including parameters that only the earlier passes reached. Not collective, but every
        rank must skip the same passes.

        Example::

            for i, batch in enumerate(micro_batches):
                with sync.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
                    loss(batch).backward()
            optimizer.step()
        """
        before = self.synchronize
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = before

    @property
    def synchronize(self) -> bool:
        """Whether the next backward reduces; what ``no_sync`` clears for its time."""
        return self._reducer.synchronize if self._reducer else True

    @synchronize.setter
    def synchronize(self, value: bool) -> None:
        if self._reducer is not None:
            self._reducer.synchronize = value

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Put ``hook(state, bucket)`` in place of the all-reduce of each bucket: torch's contract.

        The hook gets undivided gradients and returns a ``torch.futures.Future`` of the reduced flat tensor, so it also
        divides. All ranks must register the same hook before the same pass. Once only.

        Raises:
            SetupError: a hook is registered already.
            TypeError: ``hook`` is not callable.

        Example::

            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            sync.register_comm_hook(None, fp16_compress_hook)
        """
        if not callable(hook):
            raise TypeError(f"Communication hook must be callable, got {hook!r}")
        if self._reducer is not None:
            self._reducer.comm_hook = CommHook(state, hook)

    def observe(self, observer: object) -> None:
        """Call the observer's methods as things happen: see :class:`stretto.events.Observer`. Not collective."""
        self._events.add(observer)

    def stop_observing(self, observer: object) -> None:
        """Undo :meth:`observe`."""
        self._events.remove(observer)

    def describe(self) -> str:
        """What happens in a pass, in plain words, with the plan."""
        if self._reducer is None:
            return "1 rank: backward is left alone, nothing is communicated."
        how = f"comm hook {self._reducer.comm_hook.hook!r}" if self._reducer.comm_hook else "mean (divide, then sum)"
        sent = {"rank0": "follow rank 0's at the end of every pass", "none": "stay as they are on each rank"}
        return "\n".join(
            [
                f"rank {self.rank} of {self.world_size} over {self._reducer.transport.name}",
                f"gradients: {how} over ranks, in place when backward returns",
                f"buffers ({len(self._buffer_places)}): {sent[self.buffers]}",
                str(self.plan),
            ]
        )

    def detach(self) -> None:
        """Stop reducing: hooks are removed, the module is as before. Gradients keep their values. Harmless twice."""
        if self._reducer is not None:
            self._idle_plan, self._last_statistics = self._reducer.plan, self._reducer.statistics
            self._reducer.detach()
            self._reducer = None
        if self._transport is not None:
            self._transport.close()


def attach(
    module: torch.nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    bucket_cap_mb: float | None = None,
    last_bucket_cap_mb: float | None = None,
    buffers: Buffers = "rank0",
    init_sync: bool = True,
    ignore: frozenset[str] = frozenset(),
) -> Synchronizer:
    """Average the gradients of ``module`` over ranks whenever backward reaches them. Collective.

    The module is not wrapped: hooks sit on its parameters, so any method may run forward, names in ``state_dict`` stay,
    and evaluation on one rank alone just works. All ranks start from rank 0's parameters and buffers.

    Args:
        module: the same model on every rank; at least one parameter must require grad.
        process_group: default, the default group. Without any group, or in a world of one, nothing is done, and the
            handle works all the same.
        transport: what carries the buckets, instead of ``process_group``.
        bucket_cap_mb: a bucket holds at most so many MiB, unless one parameter alone is larger; default, what suits the
            transport (4 for Gloo, 25 for NCCL).
        last_bucket_cap_mb: the same for the last bucket, which backward cannot hide; default a quarter of the cap.
        buffers: ``"rank0"``, all ranks follow rank 0's buffers (BatchNorm's statistics) at the end of every pass;
            ``"none"``, each keeps its own.
        init_sync: False if the ranks are known to hold the same values: nothing is compared or sent.
        ignore: names of parameters and buffers to leave alone.

    Returns:
        The handle. Keep it for ``no_sync``, ``plan``, ``detach``; gradients are reduced without it too.

    Raises:
        SetupError: no parameter requires grad; lazy parameters; ``WORLD_SIZE`` is set and no group is initialised.
        AlreadyAttachedError: a parameter is attached already.
        ModelMismatchError: the ranks differ; the same difference on all of them. Nothing is left attached.

    Example::

        sync = stretto.attach(model)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
    """
    if buffers not in ("rank0", "none"):
        raise UnsupportedError(f'buffers={buffers!r} is not known: use buffers="rank0" or buffers="none"')
    carrier = transport if transport is not None else _default_transport(process_group)
    problem = _problem_with(module, ignore)
    if carrier is None or carrier.world_size == 1:
        if problem is not None:
            raise problem
    elif problem is not None or init_sync:
        _agree(
            module,
            ignore,
            problem,
            carrier,
            dict(
                bucket_cap_mb=bucket_cap_mb,
                last_bucket_cap_mb=last_bucket_cap_mb,
                buffers=buffers,
            ),
        )
    plan = _first_plan(module, ignore, carrier, bucket_cap_mb, last_bucket_cap_mb)
    if carrier is not None and carrier.world_size > 1 and init_sync:
        state = [*_named(module, ignore, "parameters").values(), *_named(module, ignore, "buffers").values()]
        broadcast_coalesced([tensor.detach() for tensor in state], carrier)
    return Synchronizer(module, plan, carrier, ignore, buffers)


def _agree(
    module: torch.nn.Module,
    ignore: frozenset[str],
    problem: SetupError | None,
    carrier: Transport,
    options: dict[str, object],
) -> None:
    """Collective: also a rank with a problem of its own takes part, so that the others learn of it."""
    if problem is not None:
        with contextlib.suppress(SetupError):
            agree(Statement((), str(problem)), carrier)
        raise problem
    agree(state_model(_named(module, ignore, "parameters"), _named(module, ignore, "buffers"), options), carrier)


def _default_transport(process_group: dist.ProcessGroup | None) -> Transport | None:
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return ProcessGroupTransport(process_group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SetupError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} ranks were launched, but no process group is initialised: each "
            "would train alone.\nCall torch.distributed.init_process_group() before stretto.attach(model)."
        )
    return None


def _problem_with(module: torch.nn.Module, ignore: frozenset[str]) -> SetupError | None:
    """What keeps this module from being attached on this rank, if anything."""
    everything = dict(module.named_parameters()) | dict(module.named_buffers())
    lazy = [name for name, tensor in everything.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        return SetupError(
            f"attach: {name_list(lazy)} are not initialised yet (lazy modules).\n"
            "Run one forward with an example batch before stretto.attach(model)."
        )
    unknown = sorted(ignore - set(everything))
    if unknown:
        return SetupError(f"attach: ignore= names {name_list(unknown)}, which the module does not have.")
    trained = _trained(module, ignore)
    if not trained:
        return SetupError(
            "attach: the module has no parameter that requires a gradient, so there is nothing to reduce.\n"
            "Attach the module that is trained, and unfreeze (requires_grad_(True)) before attaching."
        )
    taken = [name for name, parameter in trained.items() if reducer_of(parameter)]
    if taken:
        return AlreadyAttachedError(
            f"attach: {name_list(taken)} already attached, here or as part of another module.\n"
            "Call detach() on the first handle, or attach only once."
        )
    return None


def _first_plan(
    module: torch.nn.Module,
    ignore: frozenset[str],
    carrier: Transport | None,
    cap_mb: float | None,
    last_cap_mb: float | None,
) -> BucketPlan:
    cap = int(cap_mb * MIB) if cap_mb is not None else carrier.bucket_cap_bytes if carrier else 4 * MIB
    last = int(last_cap_mb * MIB) if last_cap_mb is not None else None
    if last is None and cap_mb is None and carrier is not None:
        last = carrier.last_bucket_cap_bytes
    return plan_buckets(describe_parameters(_trained(module, ignore)), cap_bytes=cap, last_cap_bytes=last)


def _named(module: torch.nn.Module, ignore: frozenset[str], kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in getattr(module, f"named_{kind}")() if name not in ignore}


def _trained(module: torch.nn.Module, ignore: frozenset[str]) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignore
    }
