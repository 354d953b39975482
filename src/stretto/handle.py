"""The handle that ``attach`` returns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from .analysis import nothing_seen, report_of, tied_names
from .buffers import BufferPlaces
from .describe import NoModel, describe, describe_shortly
from .engine import left_uncompiled
from .errors import SetupError, UnsupportedError
from .family import unite
from .membership import Membership, parameters_of
from .options import Options
from .peers import Peers
from .plan import BucketPlan
from .preset import Preset
from .recorder import Sampler
from .reducer import Reducer
from .report import Report
from .selection import named, trained
from .settings import Settings
from .sharding import Asked, ShardedOptimizer, begin, clip, refuse_idle, with_memory
from .tracing import ToEnter, nothing_traced, tracing
from .transport.base import Transport
from .uneven import Uneven


class Kept(NamedTuple):
    """What a handle hands on that is made anew amid an accumulation."""

    parameters: list[torch.Tensor]
    """Those with gradients that no pass has reduced so far."""
    preset: Preset | None
    """What their ``.grad`` held before."""


class Synchronizer(Settings, NoModel):
    """What :func:`stretto.attach` returns: the handle on one attached module. The drop-in has one as ``synchronizer``.

    - While training: :meth:`no_sync`, ``weight``, :meth:`clip_grad_norm_`, :meth:`shadow_pass`; :meth:`detach` ends it.
    - To look at: :meth:`describe`, ``plan``, ``used_by``, ``statistics``, and on all ranks :meth:`report`,
      :meth:`trace`, :meth:`check`.
    - To change how gradients travel: ``buffers``, :meth:`register_comm_hook`. To follow events: :meth:`observe`.

    ``rank`` and ``world_size`` are those of the process group (0 and 1 without one); ``module`` is the attached one.
    ``print(sync)`` says in a line what it is. With one rank, and after ``detach()``, nothing is reduced and what can be
    answered alone is answered, so the same program runs on any number of ranks.

    Example::

        sync = stretto.attach(model)
        if sync.rank == 0:
            print(sync)
    """

    __slots__ = (  # noqa: SIM905  # so that sync.wieght = 3 raises
        "module world_size sharded sampler _was_attached _transport _closes __weakref__"
    ).split()

    def __init__(
        self,
        module: torch.nn.Module,
        planned: dict[str, torch.nn.Parameter],
        plan: BucketPlan,
        transport: Transport | None,
        options: Options,
        sparse: Mapping[str, torch.nn.Parameter],
        *,
        closes: bool,
        peers: Peers | None = None,
        inside: Sequence[Reducer] = (),
        beside: Sequence[Synchronizer] = (),
    ) -> None:
        super().__init__(transport.rank if transport else 0, plan, options, BufferPlaces(module, options))
        self.module = module
        self.world_size = transport.world_size if transport else 1
        self._was_attached = peers is not None
        self._transport = transport
        self._closes = closes  # a transport that the user made may carry other handles too
        self.sharded: list[ShardedOptimizer] = []
        self.sampler: Sampler | None = None
        """Records passes now and then; None with one rank."""
        if transport is not None and peers is not None:
            members = Membership(module, options, functools.partial(parameters_of, [one.members for one in inside]))
            self._held = reducer = Reducer(planned, sparse, plan, transport, members, self._buffer_places, peers)
            self.sampler = Sampler(reducer)
            reducer.start_watching(self.sampler)
            unite(inside, [one._reducer for one in beside if one._reducer is not None], reducer)

    def __repr__(self) -> str:
        return describe_shortly(self.module, self._reducer, was_attached=self._was_attached)

    def __deepcopy__(self, memo: object) -> Synchronizer:
        return self  # a copy of a module that holds its handle is not attached

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            f"rank {self.rank}: a handle belongs to its process and cannot be pickled.\n"
            "Save model.state_dict(), or keep the handle beside the module, not in it."
        )

    @property
    def backwards(self) -> tuple[int, int]:
        """How many passes have begun, and how many gradients were kept here because no pass reduced them."""
        return (0, 0) if self._reducer is None else (self._reducer.queue.pass_number, self._reducer.kept)

    @property
    def used_by(self) -> dict[str, int]:
        """How many ranks had a gradient for each parameter in the last pass. Not collective: the pass brought it.

        Zeros before the first pass. Waits for an accelerator. Raises ``UnsupportedError`` with torch's ``noop_hook``,
        and ``SetupError`` after ``detach()``.

        Example::

            forgotten = [name for name, ranks in sync.used_by.items() if ranks == 0]
        """
        self._refuse_ended("used_by")
        if self._reducer is None:
            return {name: int(one.grad is not None) for name, one in trained(self.module, self._options).items()}
        return self._reducer.used_by

    @property
    def sparse_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters with sparse gradients, which lie in no bucket, by name. Empty where there is one rank."""
        return {} if self._reducer is None else self._reducer.sparse.named_parameters()

    @property
    def graph_changed(self) -> bool:
        """Whether passes of this rank have reached different sets of parameters."""
        return self._reducer is not None and self._reducer.tracker.graph_changed

    def _refuse_ended(self, what: str) -> None:
        if self._reducer is None and self._was_attached:
            raise SetupError(
                f"rank {self.rank}: {what} after detach() knows of no other rank.\nUse it before detach()."
            )

    def shadow_pass(self) -> None:
        """Take part in one pass of the other ranks without contributing; ``.grad`` stays as it is. Collective.

        If their backward reaches handles on several process groups, call it on each, in the order of attaching. If this
        rank needs the mean too, to step with the others, run a backward of zeros for any parameter instead, outside
        ``no_grad``: ``parameter.backward(torch.zeros_like(parameter))``. Raises as ``backward`` does.

        Example::

            if sync.rank == 0:  # has one batch more than the others
                model(x).sum().backward()
            else:
                sync.shadow_pass()
        """
        refuse_idle(self.sharded, f"rank {self.rank}")
        if self._reducer is not None:
            self._reducer.family.shadow()

    def join(self, uneven: Uneven | None, *, afresh: bool = False) -> None:
        """For the drop-in: enter torch's ``Join`` or, with None, leave it; ``afresh``: all ranks are in step."""
        if self._reducer is not None:
            self._reducer.join(uneven, afresh=afresh)

    def refuse_anew(self, call: str, advice: str) -> None:
        """For the drop-in, too: raise if attaching anew would end a sharded optimizer, with its state."""
        if any(not one.ended for one in self.sharded):
            raise SetupError(
                f"rank {self.rank}: {call} makes a new handle, which would end the sharded optimizer.\n{advice}"
            )

    def kept_here(self) -> Kept:
        """As it is now, before this is detached."""
        if (reducer := self._reducer) is None:
            return Kept([], None)
        members, rows = reducer.members, reducer.sparse
        kept: list[torch.Tensor] = [one for _, one in reducer.tracker.alive(reducer.tracker.unsynchronized)]
        kept += [one for name, one in rows.named_parameters().items() if name in rows.seen()]
        kept += [one for one in members.outsiders() if members.got_gradient(one)]
        return Kept(kept, None if reducer.queue.preset is None else reducer.queue.preset.copy())

    def renew(self, made: Synchronizer, kept: Kept) -> Synchronizer:
        """For the drop-in, which attaches anew: be the handle just made from here on, with all that was set on this."""
        told, observers, hooks = self._no_reducer, self.observers, self.comm_hooks
        every = None if self.sampler is None else self.sampler.every
        for slot in {*Settings.__slots__, *self.__slots__} - {"__weakref__"}:
            setattr(self, slot, getattr(made, slot))
        self.synchronize = told.synchronize
        if self._options.weighted and told.has_weight:
            self.weight = told.weight
        for observer in observers:
            self.observe(observer)
        for hook, state in hooks:
            self.register_comm_hook(state, hook)
        if self.sampler is not None and every is not None:
            self.sampler.every = every
        if self._reducer is not None:
            self._go_on_with(kept, self._reducer)
        return self

    def _go_on_with(self, kept: Kept, reducer: Reducer) -> None:
        for one in kept.parameters:
            if id(one) in reducer.tracker.index_of:
                reducer.tracker.keep(one)
        ids = {*map(id, kept.parameters)}
        reducer.sparse.claim([name for name, one in reducer.sparse.named_parameters().items() if id(one) in ids])
        if reducer.queue.preset is not None and kept.preset is not None:
            reducer.queue.preset.take_over(kept.preset)

    def heed(self, patterns: Collection[str]) -> None:
        """For the drop-in: buffers that were ignored by these patterns are so no longer. Alike on all ranks."""
        ignore = tuple(pattern for pattern in self._options.ignore if pattern not in patterns)
        if ignore != self._options.ignore:
            self._options = self._buffer_places.options = dataclasses.replace(self._options, ignore=ignore)
            self._buffer_places.follow(self.module)
            if self._reducer is not None:
                self._reducer.members.options = self._options

    def check(self) -> None:
        """Compare all parameters over ranks, and buffers unless each rank keeps its own. Collective.

        Bit by bit, by a fingerprint of each tensor: it reads every value, and sends one small message if none differs.

        Raises:
            ReplicaError: they differ, on every rank, with names of tensors and ranks.
            SetupError: after ``detach()``.
            CommunicationError: a rank does not call it.

        Example::

            sync.check()  # after loading a checkpoint, say
        """
        self._refuse_ended("check()")
        if self._reducer is not None:
            self._reducer.inspection.run(self._reducer.queue.pass_number)

    def describe(self) -> str:
        """What happens in a pass, in plain words, with the plan: ``print(sync.describe())``. Not collective."""
        ended = self._reducer is None and self._was_attached
        optimizers = [one.describe() for one in self.sharded]
        return describe(self._reducer, self._buffer_places, optimizers, is_detached=ended)

    def report(self) -> Report:
        """Where the time of a step goes, on all ranks: ``print(sync.report())``. Collective.

        It covers passes 4 to 8, one in a hundred after that, and traced ones: at most 20, all with the plan in use. On
        accelerators, times are the host's. The process group's store serves to compare the clocks of hosts.
        With sharded optimizers it also says how much memory each rank uses, and would use without sharding. Raises
        ``CommunicationError`` if a rank does not call it.

        Example::

            report = sync.report()
            if sync.rank == 0:
                print(report)
                print(report.breakdown.percent_hidden, report.advice)
        """
        if self._reducer is None or self.sampler is None:
            return nothing_seen(self.rank, self.world_size, self.plan)
        report = report_of(self._reducer, self.sampler.records, tied_names(self.module))
        return with_memory(report, self.sharded, self._reducer.queue.peers.gather)

    def trace(self, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """Record every pass inside into ``folder``, one file a rank, for ``stretto trace``. Collective on entry.

        A trace that is already there is moved into ``folder/earlier-1`` and so on.
        Each pass is on disk when it has settled; an exception is recorded and re-raised. With one rank nothing is
        recorded, and a warning says so. Meanwhile each gradient is looked at, for some microseconds each.

        Raises:
            TraceError: a rank cannot write; all ranks raise the same.
            CommunicationError: a rank does not call it.

        Example::

            with sync.trace("trace"):
                for batch in itertools.islice(loader, 20):
                    train_on(batch)
        """
        if self._reducer is None or self.sampler is None:
            make = functools.partial(nothing_traced, folder, self.rank, self.world_size)
            return ToEnter(make, folder, self.rank)
        known = self._reducer, folder, tied_names(self.module), self.sampler.keep
        return ToEnter(functools.partial(tracing, *known), folder, self.rank)

    def shard(
        self, optimizer: torch.optim.Optimizer, *, keep_grads: bool = True, overlap: bool = True
    ) -> ShardedOptimizer:
        """See :func:`stretto.shard`. Collective."""
        if self._reducer is None and self._was_attached:
            raise SetupError("shard: this handle has been detached.\nShard the optimizer before detach().")
        others = self.sharded = [one for one in self.sharded if not one.ended]
        others.append(begin(optimizer, self.module, self._reducer, others, Asked(keep_grads, overlap)))
        return others[-1]

    @left_uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` for all but ``ignore=``, wherever the gradients are. Returns a 0-dim norm.

        Needed, and collective, with ``stretto.shard(..., keep_grads=False)``, where each rank has a share of the
        gradients alone. Otherwise it sends nothing, and torch's function does as well. Arguments are those of torch's.

        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``, as in torch.
            UnsupportedError: ``norm_type=0`` where gradients are in shares.

        Example::

            loss_function(model(x), torch.ones(3, 1)).backward()
            norm = sync.clip_grad_norm_(1.0)  # before optimizer.step()
        """
        parameters = [*named(self.module, self._options, "parameters").values()]
        if self._reducer is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return clip(parameters, self._reducer.queue, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def detach(self) -> None:
        """Stop reducing. The module is as before; gradients stay, but shares of gradients become None. May be repeated.

        Sends nothing, but all ranks must call it between the same two passes. The state of sharded optimizers is lost:
        call their ``unshard()`` before. Raises ``SetupError`` while backward runs, and where another handle has left
        parameters to this one: detach that one first.
        """
        if self._reducer is not None:
            self._reducer.family.leave(self._reducer)  # first: it may be refused
        for sharded in self.sharded:
            sharded.end()
        if self.sampler is not None:
            self.sampler.stop()
        self._end()
        if self._transport is not None and self._closes:
            self._transport.close()
        self._transport = None  # or a handle that is kept would keep what ranks share, and its file descriptors
