"""Where a module's buffers live, and what all ranks know them to be.

[Note: agreed shapes]  Buffers are sent without a prior exchange. If a rank's buffer has come, gone or changed its shape
since the ranks agreed, sending it would make messages mismatch, in a failure that names nothing. So the rank sends a
stand-in of the agreed shape and says so in the last bucket; rejoin.py then has all ranks agree anew.

[Note: at rest]  Causal masks and tables of positions never change, and can be larger than the gradients. So each rank
compares its buffers with what all ranks had, and says in the last bucket if they differ. Once none differed, none are
sent until one does; then all of them follow in that same pass. Whether buffers rest is checked after passes 4, 8, 16
and so on, since those of BatchNorm never do. Comparing costs a read of the buffers and of a copy. A version counter
would not see what BatchNorm's kernels write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .broadcast import CoalescedMessages, start_broadcast, start_reduce
from .options import Buffers, Options
from .transport.base import Transport, Work, in_one_row
from .wording import MIB


class BufferPlaces:
    """The owners' tables and the keys in them, in the order of ``named_buffers``.

    Buffers are looked up by name each time, since users reassign them (``self.count = self.count + 1``). It holds the
    tables and not the modules: see bucket.py, [Note: weak parameters].
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self.policy: Buffers = options.buffers
        self.follows: int | None = None
        """The rank whose buffers all follow, if any are sent. None but inside torch's ``Join``: by the policy."""
        self.options = options
        self._seen: list[int] | None = None
        self.known: list[torch.Tensor] | None = None
        """What all ranks had at the last check; None while changes are not tracked."""
        self.at_rest = False
        """Whether none are sent, since none change: see [Note: at rest]."""
        self.follow(module)

    def __len__(self) -> int:
        return len(self._places)

    def use(self, policy: Buffers) -> None:
        """Another policy from the next pass on. On all ranks alike."""
        self.policy = policy
        self.wake()

    def follow(self, module: torch.nn.Module) -> None:
        """All ranks have agreed on the buffers that the module has now. Its tables may be others than before."""
        self._places = self._places_in(module)
        self.any = bool(self._places)
        """Whether the module has some."""
        self._agreed = [None if (buffer := _at(table, key)) is None else _kind(buffer) for table, key in self._places]
        self._to_send: list[torch.Tensor] = []
        self.wake()
        self.changed = False
        """Whether this rank's buffers differ from what was agreed."""

    def moved(self, module: torch.nn.Module) -> bool:
        """Whether the module keeps its buffers in other places than before, and that matters to anybody."""
        if self.policy == "none":
            return False
        now = [(id(table), key) for table, key in self._places_in(module)]
        return now != [(id(table), key) for table, key in self._places]

    def _places_in(self, module: torch.nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        ignores = self.options.ignores
        alone = {id(one) for name, one in module.named_buffers() if ignores(name)}  # by whichever name it has besides
        return [
            (owner._buffers, key)
            for prefix, owner in module.named_modules()
            for key, one in owner._buffers.items()
            if not (id(one) in alone or ignores(f"{prefix}.{key}" if prefix else key))
        ]

    def look(self) -> None:
        """Compare buffers with what was agreed, where any is another tensor than at the last look."""
        if self.policy == "none" or not self._places:
            self._to_send, self._seen, self.changed = [], None, False
            return
        found = [_at(table, key) for table, key in self._places]
        seen = [*map(id, found)]
        if seen == self._seen and not self.changed:
            self._to_send = [buffer for buffer in found if buffer is not None]
            return
        self._seen = seen
        kinds = [None if buffer is None else _kind(buffer) for buffer in found]
        self.changed = kinds != self._agreed
        self._to_send = [
            buffer
            if buffer is not None and kind == agreed
            else torch.zeros(agreed[0], dtype=agreed[1], device=agreed[2])
            for buffer, kind, agreed in zip(found, kinds, self._agreed, strict=True)
            if agreed is not None
        ]

    def send(self, transport: Transport) -> CoalescedMessages:
        """Put under way what is to be equal on all ranks when the pass has settled. Collective."""
        if self.at_rest or not self._places:
            return CoalescedMessages()
        (follow, average), sent = self._to_send_now(), CoalescedMessages()
        if follow:
            sent.add(start_broadcast(follow, transport, root=self.follows or 0))
        if average:
            sent.add(start_reduce(average, transport, transport.world_size))
        return sent

    def begin_anew(self, module: torch.nn.Module, transport: Transport, wait: Callable[[Work, str], object]) -> None:
        """Follow the module, in whose pass none were written, since stand-ins may have been among them. Collective."""
        self.follow(module)
        self.send(transport).finish(wait, "the buffers")

    def _to_send_now(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that are to follow one rank's now, and those that are to become the mean over ranks."""
        self.look()
        if self.policy != "mean" or self.follows is not None:
            return self._to_send, []
        exact = [buffer for buffer in self._to_send if not _has_mean(buffer)]
        return exact, [buffer for buffer in self._to_send if _has_mean(buffer)]

    # See [Note: at rest]

    def have_moved(self) -> bool:
        """Whether this rank's differ from what all had; False while changes are not tracked."""
        if self.known is None:
            return False
        self.look()
        return len(self.known) != len(self._to_send) or not all(map(_same, self.known, self._to_send))

    def hear(self, number: int, *, some_have_moved: bool) -> bool:
        """At the end of a pass, on all ranks alike: whether they have to be sent after all. Returns True if so.

        Args:
            number: of the pass.
            some_have_moved: of any rank.
        """
        rested, asked = self.at_rest, self.known is not None
        self.at_rest = asked and not some_have_moved
        if asked and some_have_moved:
            self.known = None
        elif not asked and number >= _FIRST_LOOK and not number & (number - 1):
            self.look()
            if self._to_send:
                self.known = [_bits(one).clone() for one in self._to_send] if _can_rest(self._to_send) else []
        return rested and some_have_moved

    def wake(self) -> None:
        """They are sent in every pass, until it is known again that they do not change. On all ranks alike."""
        self.known, self.at_rest = None, False


def _has_mean(buffer: torch.Tensor) -> bool:
    """One-byte dtypes are floating too, but torch cannot add them."""
    return buffer.is_floating_point() and buffer.itemsize > 1


_FIRST_LOOK = 4
_MOST_BYTES = 256 * MIB
"""At most so many bytes of buffers may rest, since a copy of them is kept."""


def _can_rest(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether they can be compared by their bits."""
    plain = all(type(one) is torch.Tensor and one.layout is torch.strided and not one.is_quantized for one in buffers)
    return plain and sum(buffer.nbytes for buffer in buffers) <= _MOST_BYTES


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """As whole numbers: a zero has two signs, a NaN is not equal to itself, and truth values take 8 times as long."""
    flat = in_one_row(buffer).view(torch.uint8)
    return flat if flat.nbytes % 8 or flat.storage_offset() % 8 else flat.view(torch.int64)


def _same(known: torch.Tensor, buffer: torch.Tensor) -> bool:
    bits = _bits(buffer)
    return bits.dtype is known.dtype and torch.equal(bits, known)


def _at(table: Mapping[str, torch.Tensor | None], key: str) -> torch.Tensor | None:
    """``table.get(key)``, which tables of scripted modules do not have."""
    return table[key] if key in table else None  # noqa: SIM401


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device, torch.layout, bool]:
    return buffer.shape, buffer.dtype, buffer.device, buffer.layout, is_traceable_wrapper_subclass(buffer)
