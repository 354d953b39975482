"""Gradients that name the rows they touch: ``nn.Embedding(sparse=True)``. They lie beside the plan, in no bucket.

    settle:  counts of all ranks ──all_reduce──> who has how many rows ──> rows and values, one broadcast a rank
             .grad = the sum in rank order, coalesced

How many rows a gradient has is known only when it is there, and differs between ranks, so no flat buffer can be laid
out beforehand. The counts come first, in one small message for all parameters, and settle waits for it. From then on
all ranks know who sends what; what is empty is not sent, and if no rank used any such parameter nothing follows.

[Note: rank order]  A rank's own gradient is coalesced before it travels, so each row occurs once in it. The ranks'
parts are added one after the other: the result has the same bits on every rank, on any device.

[Note: dense instead]  A tied weight that is used in a ``Linear`` as well has a dense gradient, maybe on some ranks
only. The counts say so, and then that parameter is dense on all ranks and goes through one all-reduce. The same
happens to sparse gradients that are not rows (``gather(sparse_grad=True)``): right, if not small.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from .arrivals import hook_for
from .broadcast import CoalescedMessages, start_broadcast
from .errors import SetupError, name_list
from .scaling import Scaling
from .specs import dtype_name
from .transport.base import Transport, Work


def names_of_sparse(module: torch.nn.Module, patterns: Iterable[str]) -> set[str]:
    """Parameters whose gradient is expected to be sparse: torch's rule, by owner, and those that were named.

    Raises:
        SetupError: a pattern matches no parameter.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = [m for m in module.modules() if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse]
    found = {names[id(parameter)] for owner in owners for parameter in owner.parameters(recurse=False)}
    for pattern in patterns:
        matching = {name for name in names.values() if fnmatchcase(name, pattern)}
        if not matching:
            raise SetupError(
                f"attach: sparse= names {pattern}, which the module does not have.\n"
                "Give names, or patterns of names, of module.named_parameters()."
            )
        found |= matching
    return found


def stand_in(device: torch.device) -> dict[str, torch.nn.Parameter]:
    """A parameter for the plan of a model that has sparse ones alone: a last bucket must carry the control words.

    It gets no gradient, and need not live longer than the buckets take to be made.
    """
    return {"(no dense parameter)": torch.nn.Parameter(torch.zeros(1, device=device))}


@dataclass(frozen=True)
class Share:
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
class _Member:
    name: str
    reference: weakref.ref[torch.nn.Parameter]
    shape: torch.Size
    dtype: torch.dtype
    travels_as: torch.dtype
    device: torch.device

    def nothing(self, entries: int = 0) -> Share:
        rows = torch.empty(entries, dtype=torch.int64, device=self.device)
        return Share(rows, torch.empty(entries, *self.shape[1:], dtype=self.travels_as, device=self.device))


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
        self.given_up = 0
        """How many ranks gave up the pass."""
        self._members = [
            _Member(name, weakref.ref(p), p.shape, p.dtype, reduce_dtypes.get(name, p.dtype), p.device)
            for name, p in parameters.items()
        ]
        self._transport = transport
        self._scaling = scaling
        self._seen: set[int] = set()
        self._lock = threading.Lock()  # each device has its own autograd thread
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._counts: tuple[torch.Tensor, Work] | None = None
        self._messages = CoalescedMessages()
        self._by_row: list[tuple[_Member, list[Share]]] = []
        self._dense: list[tuple[_Member, torch.Tensor, Work]] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def names(self) -> list[str]:
        """In order of registration."""
        return [member.name for member in self._members]

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are alive."""
        return {member.name: alive for member in self._members if (alive := member.reference()) is not None}

    def hook(self, owner: object, arrived: Callable[[str], None]) -> None:
        """Put hooks on the parameters; ``arrived`` is told of every gradient by the parameter's name."""
        for index, member in enumerate(self._members):
            parameter = member.reference()
            assert parameter is not None
            call = functools.partial(self._arrived, index, arrived)
            self._handles.append(hook_for(parameter, owner, call))

    def _arrived(self, index: int, tell: Callable[[str], None], _: torch.Tensor) -> None:
        with self._lock:
            self._seen.add(index)
        tell(self._members[index].name)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # The end of a pass

    def prepare(self, weight: float, where: str) -> list[Share]:
        """What this rank gives. Not collective: what can fail on one rank alone fails here.

        Raises:
            SetupError: a parameter changed its dtype after attaching.
        """
        changed = [
            f"{member.name} ({dtype_name(member.dtype)}, now {dtype_name(parameter.dtype)})"
            for member in self._members
            if (parameter := member.reference()) is not None and parameter.dtype != member.dtype
        ]
        if changed:
            raise SetupError(
                f"{where}: {name_list(changed)} changed dtype after the module was attached.\n"
                "Attach again after .to(dtype): sync.detach(); sync = stretto.attach(model)"
            )
        return [self._share(index, member, weight) for index, member in enumerate(self._members)]

    def _share(self, index: int, member: _Member, weight: float) -> Share:
        parameter = member.reference()
        if parameter is None or parameter.grad is None:
            return member.nothing()
        gradient = parameter.grad.detach()
        share = replace(member.nothing(), new=index in self._seen)
        if gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            values = gradient.values().to(member.travels_as, copy=True)
            self._scaling.before(values, weight)
            return replace(share, rows=gradient.indices()[0].contiguous(), values=values.contiguous())
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        dense = gradient.to(member.travels_as, copy=True, memory_format=torch.contiguous_format)
        self._scaling.before(dense, weight)
        return replace(share, dense=dense)

    def exchange(self, shares: list[Share] | None, wait: Callable[[Work, str], object]) -> None:
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
            if not any(new for _, _, new in facts):
                continue
            if any(dense for _, dense, _ in facts):
                flat = _whole(member, own).reshape(-1)
                self._dense.append((member, flat, self._transport.all_reduce(flat)))
                self.total_bytes += flat.numel() * flat.element_size()
                continue
            by_rank = [own if r == rank else member.nothing(entries) for r, (entries, _, _) in enumerate(facts)]
            self._by_row.append((member, by_rank))
            for tensors, share in zip(to_send, by_rank, strict=True):
                tensors += [share.rows, share.values]
        for root, tensors in enumerate(to_send):
            self._messages.add(start_broadcast(tensors, self._transport, root=root))
        self.total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in to_send[rank])

    def exchange_spoiled(self) -> None:
        """This rank's backward failed: say so in place of the counts, and all ranks send nothing more."""
        self._send_counts([member.nothing() for member in self._members], gave_up=True)

    def _send_counts(self, shares: list[Share], *, gave_up: bool = False) -> None:
        row = [int(gave_up)]
        for share in shares:
            row += [len(share.rows), share.dense is not None, share.new]
        table = torch.zeros(self._transport.world_size, len(row), dtype=torch.int64)
        table[self._transport.rank] = torch.tensor(row)
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
        if self._counts is not None:  # of a pass that this rank gave up
            wait(self._counts[1], self._what)
        self._messages.finish(wait, self._what)
        for _, _, work in self._dense:
            wait(work, self._what)
        for member, shares in self._by_row if release else ():
            _put(member, _sum_of_rows(member, shares, factor))
        for member, flat, _ in self._dense if release else ():
            whole = flat if factor is None else flat.mul_(factor)
            _put(member, whole.to(member.dtype).view(member.shape))

    @property
    def _what(self) -> str:
        return f"the sparse gradients of {name_list(self.names)}"

    def reset(self) -> None:
        """Nothing is under way, for the next pass."""
        self._counts = None
        self._messages = CoalescedMessages()
        self._by_row, self._dense = [], []

    def forget(self) -> None:
        """What has arrived so far is dealt with, or given up."""
        self._seen.clear()


def _sum_of_rows(member: _Member, shares: list[Share], factor: torch.Tensor | float | None) -> torch.Tensor:
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


def _whole(member: _Member, share: Share) -> torch.Tensor:
    if share.dense is not None:
        return share.dense
    whole = torch.zeros(member.shape, dtype=member.travels_as, device=member.device)
    return whole.index_add_(0, share.rows, share.values)


def _put(member: _Member, gradient: torch.Tensor) -> None:
    if (parameter := member.reference()) is not None:
        parameter.grad = gradient
