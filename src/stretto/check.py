"""Are the replicas still equal? A cheap fingerprint of every tensor, compared over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .buffers import BufferPlaces
from .errors import ReplicaError
from .membership import Membership
from .selection import wrapping
from .transport.base import as_reals, in_one_row
from .wording import describe_ranks, name_list, ranks_by

_PIECE = 1 << 16
"""Words that are weighed at a time: what is in between stays in the processor's cache."""
_MOST = 6
"""A message names at most so many tensors."""
_CAMPS = 3
"""And for each of so many ranks, or groups of them, that hold other values than the first."""
_LOOKED_AT = 1 << 16
"""Elements that are sent to tell how far two tensors are apart."""
_FACTOR = 6364136223846793005
"""Odd, so that no bit is lost; each piece counts this many times as much as the next one."""


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor; equal for equal bits, on any device and in any layout.

    An exclusive or sees every single flipped bit. The other sum weighs each element by its place, so that it sees also
    what the first cancels, and elements that have changed places.
    """
    if not tensor.numel():
        return 0, 0
    words = words_of(tensor)
    return int(torch.hash_tensor(words).item()), int(weigh(words).item())


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, as they read."""
    flat = as_reals(in_one_row(tensor))
    # At most 32 bits, or two numbers that differ in the sign alone could change places: weights differ by even numbers.
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[flat.element_size()])


def weigh(words: torch.Tensor) -> torch.Tensor:
    """A sum that sees where each is, in 64 bits, where they are."""
    weights = torch.arange(1, 2 * min(_PIECE, len(words)), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in torch.split(words, _PIECE):
        total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
    return total


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether its values are here: not on meta, in other tensors, or in memory that is lent out between uses."""
    if tensor.is_meta or is_lazy(tensor) or wrapping({"": tensor}):
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def check_replicas(
    tensors: Mapping[str, torch.Tensor] | None,
    gather: Callable[[Any], list[Any]],
    where: str,
    buffers: Container[str] = (),
    *,
    untrained: bool = False,
) -> None:
    """Compare tensors over all ranks. Collective; waits for the device.

    Args:
        tensors: as in ``unlike``.
        gather: as there.
        where: how the message begins.
        buffers: names of those that are no parameters.
        untrained: no pass has begun yet.

    Raises:
        ReplicaError: on every rank, naming each tensor that differs, the ranks that agree on it, and how far apart they
            are.
    """
    names, lines = unlike(tensors, gather)
    if names:
        told = f"{where}: the ranks no longer hold the same values of {name_list(names)}.\n" + "\n".join(lines) + "\n"
        if all(name in buffers for name in names):
            raise ReplicaError(told + _BUFFERS)
        raise ReplicaError(told + _UNTRAINED * untrained + _PARAMETERS)


_PARAMETERS = (
    "Something changed them on some ranks only, mostly one of these:\n"
    "  - a step that one rank skipped, or took after a backward inside no_sync()\n"
    "  - gradients that no backward brings, as of torch.autograd.grad: stretto.reduce averages them\n"
    "  - batches that ran out on one rank inside join(): its optimizer and schedulers stood still meanwhile\n"
    "  - one backward more or fewer on one rank, as in an evaluation or after a break, which shifts its passes\n"
    "  - weights or an optimizer's state that only some ranks have loaded\n"
    "  - another learning rate, as from a scheduler that looks at one rank's loss\n"
    "  - LBFGS, whose closure runs more often on one rank, because of its own loss\n"
    "  - random numbers, such as weights drawn in the first forward (run one before attach)\n"
    "  - attach(init_sync=False), where each rank drew its own\n"
    "To go on with rank 0's: sync.detach(); sync = stretto.attach(model), and load or build the optimizer on all ranks."
)
_UNTRAINED = "No gradient was averaged so far: no backward outside no_sync() has reached the attached module.\n"
_BUFFERS = (
    "They are buffers, and the parameters are equal. Usually only some ranks have run a forward in train() mode since "
    "the last backward, for example to evaluate without model.eval(); the next backward makes them equal again."
)


def unlike(
    tensors: Mapping[str, torch.Tensor] | None, gather: Callable[[Any], list[Any]], *, in_common: bool = False
) -> tuple[list[str], list[str]]:
    """Which tensors are not the same on all ranks, by name, and a line to be read for each of the first. Collective.

    Args:
        tensors: by name; what some rank cannot read is left out. None: this rank has none that could be compared, and
            takes part all the same.
        gather: returns the fingerprints of all ranks in rank order, some tens of bytes a tensor.
        in_common: what some rank does not have is left out too.
    """
    mine = None
    if tensors is not None:
        mine = {name: fingerprint(one) if is_readable(one) else None for name, one in tensors.items()}
    brought: list[dict[str, tuple[int, int] | None] | None] = gather(mine)
    everyone = {rank: other for rank, other in enumerate(brought) if other is not None}
    first = next(iter(everyone.values()), {})
    if all(other == first for other in everyone.values()):
        return [], []
    every_name = dict.fromkeys(name for other in everyone.values() for name in other)
    found = {name: {other.get(name, ()) for other in everyone.values()} for name in every_name}
    left_out = {None, ()} if in_common else {None}
    names = [name for name, held in found.items() if len(held) > 1 and held.isdisjoint(left_out)]
    if not names:
        return names, []
    lines, shown = [], names[:_MOST]
    values = gather({name: _beginning(tensors[name]) for name in shown if name in tensors} if tensors else {})
    for name in shown:
        camps = [*ranks_by((rank, other.get(name, ())) for rank, other in everyone.items()).values()]
        samples = [values[ranks[0]].get(name) for ranks in camps]
        some, *rest = camps
        told = " and from ".join(map(describe_ranks, rest[:_CAMPS]))
        told += f" and {len(rest) - _CAMPS} others" if len(rest) > _CAMPS else ""
        differ = "differs" if len(some) == 1 else "differ"
        lines.append(f"  {name}: {describe_ranks(some)} {differ} from {told}{_by_how_much(samples)}")
    return names, lines


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype that torch can pickle, and subtract."""
    flat = as_reals(in_one_row(tensor))[:_LOOKED_AT].cpu().clone()
    if flat.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return flat.to(torch.int64)
    if flat.is_floating_point() and flat.itemsize == 1:
        return flat.view(torch.uint8) if flat.dtype is torch.float4_e2m1fn_x2 else flat.float()
    return flat


def _by_how_much(found: Sequence[torch.Tensor | None]) -> str:
    """How far the others are from the first: a rounding, or another value. Empty where they cannot be compared."""
    first, *others = found
    if first is None or any(one is None or one.shape != first.shape for one in others):
        return ""
    differs = torch.stack([(one != first) & ~(one.isnan() & first.isnan()) for one in others if one is not None])
    wide = torch.float64 if first.is_floating_point() else torch.int64
    far = torch.stack([(one.to(wide) - first.to(wide)).abs() for one in others if one is not None])[differs]
    number, of = int(differs.any(0).sum()), f"{len(first):,} element{'s' * (len(first) > 1)}"
    of = f"the first {of}" if len(first) == _LOOKED_AT else of
    if not number:
        return f", though {of} compare equal"
    most = far.double().nan_to_num(torch.inf, torch.inf).max().item()
    return f" by up to {most:.2g}, in {number:,} of {of}"


def replicated(members: Membership, places: BufferPlaces) -> dict[str, torch.Tensor]:
    """What is to be equal on all ranks, by name; of parameters those that this handle looks after."""
    tensors: dict[str, torch.Tensor] = dict(members.everything())
    module = members.module()
    if places.policy != "none" and module is not None:
        tensors |= {name: one for name, one in module.named_buffers() if not members.options.ignores(name)}
    return tensors


class Inspection:
    """``check_replicas`` at the end of every n-th pass, on all ranks, those without batches included.

    Args:
        members: what is looked at, and how often.
        places: know whether each rank keeps its own buffers, which may change.
        gather: as for ``check_replicas``.
    """

    def __init__(self, members: Membership, places: BufferPlaces, gather: Callable[[Any], list[Any]]) -> None:
        self._members, self._places = members, places
        self.every = members.options.check_every or None
        """Passes from one to the next; None for never."""
        self._gather = gather

    def due(self, number: int) -> bool:
        """Whether this pass ends with one."""
        return self.every is not None and number % self.every == 0

    def run(self, number: int, *, idle: bool = False) -> None:
        """Collective. ``idle``: this rank does not step any more, so its values are not those of the others."""
        tensors = replicated(self._members, self._places)
        buffers = tensors.keys() - self._members.everything().keys()
        gone = idle or self._members.module() is None
        check_replicas(None if gone else tensors, self._gather, f"pass {number}", buffers, untrained=not number)
