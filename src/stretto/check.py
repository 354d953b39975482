"""Are the replicas still equal? A cheap fingerprint of every tensor, compared over the ranks.

[Note: samples]  Unasked, a few elements of each parameter are weighed at the end of the optimizer's step behind passes
1, 2, 4, 8 and so on: there ranks hold the same, also where each of them moves its weights for a backward and back, as
SAM does. Of the weight some bits travel behind the last bucket of the next pass, so no message is sent for it and no
device waited for. Where the ranks that compare do not all say the same, all know it at the same pass, look at all
parameters together, and rank 0 tells of it once: of weights or an optimizer's state that one rank alone has loaded
mostly in the second pass. Ranks without batches, or that gave up the pass between, say nothing.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .agreement import describe_ranks
from .buffers import BufferPlaces
from .errors import ReplicaError, name_list
from .membership import wrapping
from .options import Options
from .steps import listen, stop_listening
from .transport.base import as_reals, in_one_row
from .words import COUNTS, FIRST_VALUE, LENGTH, VALUES, Control, to_host

log = logging.getLogger("stretto")

_PIECE = 1 << 16
"""Words that are weighed at a time: what is in between stays in the processor's cache."""
_MOST = 6
"""Of so many tensors a message tells."""
_CAMPS = 3
"""And for each of so many ranks, or groups of them, that hold other values than the first."""
_LOOKED_AT = 1 << 16
"""Elements that are sent to tell how far two tensors are apart."""
_FACTOR = 6364136223846793005
"""Odd, so that no bit is lost; each piece counts this many times what the one behind it does."""
_FEW = 64
"""Elements of a parameter that a sample looks at."""
_SAMPLE_EVERY = 1 << 10
"""Passes, at most, from one sample to the next."""
_FRUITLESS = 2
"""So often samples may be unlike where parameters are equal, before no more are taken."""


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor; equal for equal bits, on any device and in any layout.

    An exclusive or sees every single flipped bit. The other sum weighs each element by its place, so that it sees also
    what the first cancels, and elements that have changed places.
    """
    if not tensor.numel():
        return 0, 0
    words = _words_of(tensor)
    return int(torch.hash_tensor(words).item()), int(_weigh(words).item())


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, as they read."""
    flat = as_reals(in_one_row(tensor))
    # At most 32 bits, or two numbers that differ in the sign alone could change places: weights differ by even numbers.
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[flat.element_size()])


def _weigh(words: torch.Tensor) -> torch.Tensor:
    """A sum that sees where each is, in 64 bits, where they are."""
    weights = torch.arange(1, 2 * min(_PIECE, len(words)), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in torch.split(words, _PIECE):
        total = total * _FACTOR + (piece * weights[: len(piece)]).sum()
    return total


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether its values are here: not on meta, in other tensors, or in memory that is lent out between uses."""
    if tensor.is_meta or is_lazy(tensor) or wrapping({"": tensor}):
        return False
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _few_of(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Some elements, neighbours as they read, others for each number. Not many more are copied for that."""
    row = tensor.detach().as_subclass(torch.Tensor)
    while row.dim():
        place, inner = number % len(row), row.numel() // len(row)
        if inner < _FEW:
            rows = -(-_FEW // inner)
            first = max(min(place, len(row) - rows), 0)
            row = row[first : first + rows]
            break
        row = row[place]
    return row.reshape(-1)[:_FEW]


class Sample:
    """A few elements of each tensor, weighed, on their way to the host. See [Note: samples].

    Args:
        tensors: those that cannot be read are left out.
        number: says which elements.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], number: int = 0) -> None:
        found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            if _is_readable(tensor) and tensor.numel():
                words = _words_of(_few_of(tensor, number))
                found.setdefault((words.dtype, words.device), []).append(words)
        self._weights = [to_host(_weigh(torch.cat(some))) for some in found.values()]

    def says(self) -> list[int]:
        """The words for it."""
        bits = 0
        for weight, arrival in self._weights:
            if arrival is not None:
                arrival.synchronize()
            bits = zlib.crc32(int(weight).to_bytes(8, "little", signed=True), bits)  # each of its bits depends on all
        return [Control.COMPARES, *(FIRST_VALUE + place for place in range(VALUES) if bits >> place & 1)]


def check_replicas(tensors: Mapping[str, torch.Tensor] | None, gather: Callable[[Any], list[Any]], where: str) -> None:
    """Compare tensors over all ranks. Collective; waits for the device.

    Args:
        tensors: by name, the same names on every rank. None: this rank has none that could be compared, and takes part
            all the same.
        gather: returns the fingerprints of all ranks in rank order, some tens of bytes a tensor.
        where: how the message begins.

    Raises:
        ReplicaError: on every rank, naming each tensor that differs, the ranks that agree on it, and how far apart they
            are. What some rank cannot read is left out.
    """
    readable = {name: one for name, one in (tensors or {}).items() if _is_readable(one)}
    mine = (
        None if tensors is None else dict.fromkeys(tensors) | {name: fingerprint(readable[name]) for name in readable}
    )
    brought: list[dict[str, tuple[int, int] | None] | None] = gather(mine)
    unread = {name for other in brought for name, one in (other or {}).items() if one is None}
    everyone = {
        rank: {name: one for name, one in other.items() if name not in unread}
        for rank, other in enumerate(brought)
        if other is not None
    }
    first = next(iter(everyone.values()), {})
    if all(other == first for other in everyone.values()):
        return
    lines, names = [], [name for name in first if len({other.get(name) for other in everyone.values()}) > 1]
    shown = names[:_MOST]
    values = gather({name: _beginning(tensors[name]) for name in shown if name in tensors} if tensors else {})
    for name in shown:
        camps: dict[object, list[int]] = {}
        for rank, other in everyone.items():
            camps.setdefault(other.get(name), []).append(rank)
        found = [values[ranks[0]].get(name) for ranks in camps.values()]
        some, *rest = camps.values()
        told = " and from ".join(map(describe_ranks, rest[:_CAMPS]))
        told += f" and {len(rest) - _CAMPS} others" if len(rest) > _CAMPS else ""
        differ = "differs" if len(some) == 1 else "differ"
        lines.append(f"  {name}: {describe_ranks(some)} {differ} from {told}{_by_how_much(found)}")
    raise ReplicaError(
        f"{where}: the ranks no longer hold the same values of {name_list(names)}.\n" + "\n".join(lines) + "\n"
        "Something changed them on some ranks only: a step that was skipped, or behind a backward inside no_sync(); "
        "weights or an optimizer's state that were loaded there alone; another learning rate, as of a scheduler that "
        "looks at one rank's loss; a random number.\n"
        "To go on with rank 0's: sync.detach(); sync = stretto.attach(model), and load or build the optimizer on all "
        "ranks."
    )


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


def replicated(module: torch.nn.Module, options: Options, places: BufferPlaces) -> dict[str, torch.Tensor]:
    """What is to be equal on all ranks, by name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    if places.policy != "none":
        tensors.update(module.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if not options.ignores(name)}


def _are_unlike(said: Sequence[float]) -> bool:
    """Whether of the ranks that compare some said a word of the values, and others did not."""
    compare, *values = (min(one, COUNTS) for one in (said[Control.COMPARES], *said[FIRST_VALUE:LENGTH]))
    return any(0 < one < compare for one in values)


class Inspection:
    """``check_replicas`` at the end of every n-th pass, on all ranks, those without batches included.

    Where nothing is said of it, of the parameters alone, in a pass whose samples were unlike.

    Args:
        module: what is looked at; it is not kept alive.
        options: say how often, and what is left alone.
        places: know whether each rank keeps its own buffers, which may change.
        gather: as for ``check_replicas``.
    """

    def __init__(
        self, module: torch.nn.Module, options: Options, places: BufferPlaces, gather: Callable[[Any], list[Any]]
    ) -> None:
        self._module = weakref.ref(module)
        self._options, self._places = options, places
        self.every = options.check_every or None
        """Passes from one to the next; None for never."""
        self._gather = gather
        self.samples = options.check_every is None
        """Whether samples are taken."""
        self._passed, self._listens, self._fruitless = 0, False, 0
        self._sample: tuple[int, Sample] | None = None  # and behind which pass it was taken

    def due(self, number: int) -> bool:
        """Whether this pass ends with one."""
        return self.every is not None and number % self.every == 0

    def run(self, number: int, *, idle: bool = False) -> None:
        """Collective. ``idle``: this rank does not step any more, so its values are not those of the others."""
        module = None if idle else self._module()
        tensors = None if module is None else replicated(module, self._options, self._places)
        check_replicas(tensors, self._gather, f"pass {number}")

    def ended(self, number: int) -> None:
        """A pass has. Collective where one is due; behind some a sample is to be taken, for the next pass to tell."""
        self._passed = number
        if self.due(number):
            self.run(number)
        elif self.samples and not (self._listens or (number & number - 1 and number % _SAMPLE_EVERY)):
            self._listens = True
            listen(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        """Take the sample, if it was a step of these parameters."""
        if begins:
            return
        mine = self._parameters()
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if not stepped.isdisjoint(map(id, mine.values())):
            self.stop()
            with torch.no_grad():
                self._sample = self._passed, Sample(mine.values(), self._passed)

    def stop(self) -> None:
        """Take no sample behind the next step. Harmless twice."""
        self._listens = False
        stop_listening(self._stepped)

    def says(self, number: int) -> list[int]:
        """What the last bucket of the pass is to tell."""
        taken, self._sample = self._sample, None
        return taken[1].says() if taken is not None and taken[0] == number - 1 else []

    def hear(self, said: Sequence[float], number: int, *, idle: bool, speaks: bool) -> None:
        """Look closely if samples were unlike, and tell of what differs. Collective.

        Args:
            said: what all ranks told in the pass.
            number: of the pass.
            idle: this rank does not step any more.
            speaks: this rank tells for all.
        """
        if not (self.samples and _are_unlike(said)):
            return
        try:
            module = type(self._module()).__name__
            where = f"pass {number} of {module}"
            check_replicas(None if idle else self._parameters(), self._gather, where)
            self._fruitless += 1
            self.samples = self._fruitless < _FRUITLESS
        except ReplicaError as error:
            self.samples = False
            if speaks:
                log.warning(
                    "%s\n"
                    "stretto looks at a few elements unasked. Where ranks are meant to move their weights by "
                    "themselves for a while, all is well. Told once; check_every=n looks at everything, and raises; "
                    "check_every=0 never looks.",
                    error,
                )

    def _parameters(self) -> dict[str, torch.Tensor]:
        module = self._module()
        everything = () if module is None else module.named_parameters()
        return {name: one for name, one in everything if not self._options.ignores(name)}
