"""Gradients that name the rows they touch: ``nn.Embedding(sparse=True)``. They lie beside the plan, in no bucket.

    settle:  counts of all ranks ──all_reduce──> who has how many rows ──> rows and values, one broadcast a rank
             .grad = the sum in rank order, coalesced

How many rows a gradient has is known only when it is there, and differs between ranks, so no flat buffer can be laid
out beforehand. The counts come first, in one small message for all parameters, and settle waits for it. From then on
all ranks know who sends what. Nothing empty is sent, and if no rank used any such parameter, nothing follows.

[Note: rank order]  A rank's own gradient is coalesced before it travels, so each row occurs once in it. The ranks'
parts are added one after the other: the result has the same bits on every rank, on any device.

[Note: dense instead]  A tied weight that is used in a ``Linear`` as well has a dense gradient, maybe on some ranks
only. The counts say so, and then that parameter is dense on all ranks and goes through one all-reduce. The same happens
to sparse gradients that are not rows (``gather(sparse_grad=True)``): the result is right, though not small.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from .arrivals import hook_for
from .broadcast import CoalescedMessages, start_broadcast
from .engine import left_uncompiled
from .scaling import Scaling
from .transport.base import Transport, Work
from .wording import name_list


@dataclass(frozen=True)
class GivenRows:
    """What one rank gives for one parameter, scaled and in the dtype in which it travels."""

    rows: torch.Tensor
    """(entries,) int64: the rows that are not zero, each once."""
    values: torch.Tensor
    """(entries, *shape of a row)."""
    dense: torch.Tensor | None = None
    """The whole gradient instead, if it is not sparse on this rank."""
    new: bool = False
    """Whether this rank has something new, from this pass or from those without synchronisation before it."""


@dataclass(frozen=True)
class _SparseParameter:
    name: str
    reference: weakref.ref[torch.nn.Parameter]
    shape: torch.Size
    dtype: torch.dtype
    travels_as: torch.dtype
    device: torch.device

    def fits(self, parameter: torch.Tensor) -> bool:
        return (parameter.shape, parameter.dtype, parameter.device) == (self.shape, self.dtype, self.device)

    def nothing(self, entries: int = 0) -> GivenRows:
        rows = torch.empty(entries, dtype=torch.int64, device=self.device)
        return GivenRows(rows, torch.empty(entries, *self.shape[1:], dtype=self.travels_as, device=self.device))


class SparseGradients:
    """The sparse parameters of one reducer, and what is under way for them.

    Args:
        parameters: by name, in order of registration; held weakly.
        transport: carries counts, rows and values.
        scaling: as for the buckets.
        reduce_dtypes: the dtype in which gradients travel and are summed, by name, where it is not their own.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        transport: Transport,
        scaling: Scaling,
        reduce_dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.total_bytes = 0
        """Bytes of this rank's own gradients that were sent."""
        self._transport = transport
        self._scaling = scaling
        self._seen: set[str] = set()
        self._lock = threading.Lock()  # each device has its own autograd thread
        self._owner: object = None
        self._tell: Callable[[str, torch.Tensor], None] | None = None
        self._members: list[_SparseParameter] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.before: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        """What ``.grad`` held before what is new, where a sum must count it once: see preset.py."""
        self._counts: tuple[torch.Tensor, Work] | None = None
        self.rebuild(parameters, reduce_dtypes)
        self.reset()

    def rebuild(self, parameters: Mapping[str, torch.nn.Parameter], reduce_dtypes: Mapping[str, torch.dtype]) -> None:
        """Look after these parameters from here on. What has a gradient keeps it, by whatever name."""
        seen = {id(one) for name, one in self.named_parameters().items() if name in self._seen}
        self._seen = {name for name, one in parameters.items() if id(one) in seen}
        self._members = [
            _SparseParameter(name, weakref.ref(p), p.shape, p.dtype, reduce_dtypes.get(name, p.dtype), p.device)
            for name, p in parameters.items()
        ]
        self.any = bool(self._members)
        """Whether there are some."""
        self.used_by = {name: 0 for name in parameters}
        """How many ranks had something new for each parameter in the last pass."""
        self.given_up = 0
        """How many ranks gave up the last pass."""
        self._put_hooks()

    @property
    def names(self) -> list[str]:
        """In order of registration."""
        return [member.name for member in self._members]

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are alive."""
        return {member.name: alive for member in self._members if (alive := member.reference()) is not None}

    def misfits(self) -> dict[str, torch.nn.Parameter]:
        """Those that have another dtype, shape or device than when they were taken in: not sent."""
        alive = ((member, member.reference()) for member in self._members)
        return {member.name: one for member, one in alive if one is not None and not member.fits(one)}

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes, by name."""
        return {member.name: (tuple(member.shape), member.dtype) for member in self._members}

    def outside(self, wanted: Mapping[str, torch.nn.Parameter]) -> list[str]:
        """Names of parameters, out of these, that are not looked after."""
        carried = {member.name: member.reference() for member in self._members}
        return [name for name, parameter in wanted.items() if carried.get(name) is not parameter]

    def seen(self) -> set[str]:
        """Names of those that have got a gradient since ``forget``."""
        return set(self._seen)

    def claim(self, names: Collection[str]) -> None:
        """These have got a gradient, as another observer has seen."""
        self._seen.update(names)

    def hook(self, owner: object, arrived: Callable[[str, torch.Tensor], None]) -> None:
        """Put hooks on the parameters; ``arrived`` is told of every gradient, by the parameter and its name."""
        self._owner, self._tell = owner, arrived
        self._put_hooks()

    def _put_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._tell is not None:
            for name, parameter in self.named_parameters().items():
                hook = functools.partial(self._arrived, name, self._tell)
                self._handles.append(hook_for(parameter, self._owner, hook))

    @left_uncompiled
    def _arrived(self, name: str, tell: Callable[[str, torch.Tensor], None], parameter: torch.Tensor) -> None:
        with self._lock:
            self._seen.add(name)
        tell(name, parameter)

    def unhook(self) -> None:
        """Take the hooks off: no more gradients are told of, whatever changes."""
        self._owner = self._tell = None
        self._put_hooks()

    # The end of a pass

    def prepare(self, weight: float, only: Collection[str] | None = None) -> list[GivenRows]:
        """What this rank gives, for all or for some. Not collective: what can fail on one rank alone fails here."""
        return [
            self._share(member, weight) if only is None or member.name in only else member.nothing()
            for member in self._members
        ]

    def _share(self, member: _SparseParameter, weight: float) -> GivenRows:
        parameter = member.reference()
        if parameter is None or parameter.grad is None or not member.fits(parameter):
            return member.nothing()
        gradient, new = parameter.grad.detach(), member.name in self._seen
        by_rows = gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1
        gradient = gradient.coalesce() if by_rows else gradient if _is_dense(gradient) else gradient.to_dense()
        before = None if self.before is None else self.before(parameter) if new else gradient
        gradient = gradient.to(member.travels_as, copy=True)
        if before is not None:
            gradient = self._averaging(gradient, before.to(member.travels_as), weight)
            by_rows = not _is_dense(gradient)
        values = gradient.values() if by_rows else gradient.contiguous()
        if before is None:
            self._scaling.before(values, weight)
        share = replace(member.nothing(), new=new)
        if not by_rows:
            return replace(share, dense=values)
        return replace(share, rows=gradient.indices()[0].contiguous(), values=values.contiguous())

    def _averaging(self, gradient: torch.Tensor, before: torch.Tensor, weight: float) -> torch.Tensor:
        """Scaled, but for what was there before: see preset.py."""
        if _is_dense(gradient) or _is_dense(before):
            gradient, before = (one if _is_dense(one) else one.to_dense() for one in (gradient, before))
        new = (gradient - before) * self._scaling.factor(weight) + before * self._scaling.share
        return new if _is_dense(new) else new.coalesce()

    def exchange(self, shares: list[GivenRows] | None, wait: Callable[[Work, str], object]) -> None:
        """Put rows and values under way, or what is dense. Collective; waits for the counts.

        Args:
            shares: from ``prepare``; None if this rank has nothing to give.
            wait: called with each message and what to call it.
        """
        mine = [member.nothing() for member in self._members] if shares is None else shares
        self._send_counts(mine)
        counts = self._receive_counts(wait)
        self.given_up = sum(row[0] for row in counts)
        if self.given_up:
            return
        rank, world_size = self._transport.rank, self._transport.world_size
        to_send: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        for index, (member, own) in enumerate(zip(self._members, mine, strict=True)):
            facts = [row[1 + 3 * index : 4 + 3 * index] for row in counts]
            self.used_by[member.name] = sum(new for _, _, new in facts)
            if not self.used_by[member.name]:
                continue
            if any(dense for _, dense, _ in facts):
                flat = _whole(member, own).reshape(-1)
                self._dense.append((member, flat, self._transport.all_reduce(flat)))
                self.total_bytes += flat.nbytes
                continue
            by_rank = [own if r == rank else member.nothing(entries) for r, (entries, _, _) in enumerate(facts)]
            self._by_row.append((member, by_rank))
            for tensors, share in zip(to_send, by_rank, strict=True):
                tensors += [share.rows, share.values]
        for root, tensors in enumerate(to_send):
            self._messages.add(start_broadcast(tensors, self._transport, root=root))
        self.total_bytes += sum(tensor.nbytes for tensor in to_send[rank])

    def exchange_given_up(self) -> None:
        """This rank's backward failed: say so in place of the counts, and all ranks send nothing more."""
        self._send_counts([member.nothing() for member in self._members], gave_up=True)

    def _send_counts(self, shares: list[GivenRows], *, gave_up: bool = False) -> None:
        row = [int(gave_up)]
        for share in shares:
            row += [len(share.rows), share.dense is not None, share.new]
        table = torch.zeros(self._transport.world_size, len(row), dtype=torch.int64, device="cpu")
        table[self._transport.rank] = torch.tensor(row, device="cpu")
        flat = table.reshape(-1).to(self._members[0].device)
        self._counts = flat, self._transport.all_reduce(flat)

    def _receive_counts(self, wait: Callable[[Work, str], object]) -> list[list[int]]:
        assert self._counts is not None
        (flat, work), self._counts = self._counts, None
        wait(work, self._what)
        table: list[list[int]] = flat.view(self._transport.world_size, -1).tolist()
        return table

    def finish(
        self, factor: torch.Tensor | float | None, wait: Callable[[Work, str], object], *, release: bool = True
    ) -> None:
        """Wait, and put the results in ``.grad``.

        Args:
            factor: for the sum, as the buckets have it; None for 1.
            wait: called with each message and what to call it.
            release: False if ``.grad`` is to be left alone.
        """
        results = self.results(factor, wait)
        for name, parameter in self.named_parameters().items() if release else ():
            if name in results:
                parameter.grad = results[name]

    def results(
        self, factor: torch.Tensor | float | None, wait: Callable[[Work, str], object]
    ) -> dict[str, torch.Tensor]:
        """Wait, and return the new gradients of parameters for which any rank had something new."""
        if self._counts is not None:  # of a pass that this rank gave up
            wait(self._counts[1], self._what)
        self._messages.finish(wait, self._what)
        found = {member.name: _sum_of_rows(member, shares, factor) for member, shares in self._by_row}
        for member, flat, work in self._dense:
            wait(work, self._what)
            whole = flat if factor is None else flat.mul_(factor)
            found[member.name] = whole.to(member.dtype).view(member.shape)
        return found

    @property
    def _what(self) -> str:
        return f"the sparse gradients of {name_list(self.names)}"

    def reset(self) -> None:
        """Nothing is under way, for the next pass."""
        self._counts = None
        self._messages = CoalescedMessages()
        self._by_row: list[tuple[_SparseParameter, list[GivenRows]]] = []
        self._dense: list[tuple[_SparseParameter, torch.Tensor, Work]] = []

    def forget(self) -> None:
        """What has arrived so far is dealt with, or given up."""
        self._seen.clear()


def _sum_of_rows(
    member: _SparseParameter, shares: list[GivenRows], factor: torch.Tensor | float | None
) -> torch.Tensor:
    """See [Note: rank order]."""
    rows, places = torch.unique(torch.cat([share.rows for share in shares]), return_inverse=True)
    total = torch.zeros(len(rows), *member.shape[1:], dtype=member.travels_as, device=member.device)
    for share, own in zip(shares, places.split([len(share.rows) for share in shares]), strict=True):
        total.index_add_(0, own, share.values)
    if factor is not None:
        total.mul_(factor)
    return torch.sparse_coo_tensor(
        rows[None], total.to(member.dtype), member.shape, is_coalesced=True, check_invariants=False
    )


def _whole(member: _SparseParameter, share: GivenRows) -> torch.Tensor:
    if share.dense is not None:
        return share.dense
    whole = torch.zeros(member.shape, dtype=member.travels_as, device=member.device)
    return whole.index_add_(0, share.rows, share.values)


def _is_dense(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided
