"""Where a module's buffers live, and what all ranks know them to be.

[Note: agreed shapes]  Buffers travel without a word beforehand, so a rank whose buffer has come, gone or changed its
shape since the ranks agreed must not send what it has: messages would not match, and the failure would have no name. It
sends a stand-in of the agreed shape and says so in the last bucket; rejoin.py then has all ranks agree anew.
"""

from __future__ import annotations

import torch

from .broadcast import CoalescedMessages, start_broadcast, start_reduce
from .options import Buffers, Options
from .transport.base import Transport


class BufferPlaces:
    """The owners' tables and the keys in them, in the order of ``named_buffers``.

    Buffers are looked up by name each time, since users reassign them (``self.count = self.count + 1``). It holds the
    tables and not the modules: see bucket.py, [Note: weak parameters].
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self.policy: Buffers = options.buffers
        self._options = options
        self._seen: list[int] | None = None
        self.follow(module)

    def __len__(self) -> int:
        return len(self._places)

    def follow(self, module: torch.nn.Module) -> None:
        """All ranks have agreed on the buffers that the module has now. Its tables may be others than before."""
        self._places = self._places_in(module)
        self._agreed = [None if (buffer := table.get(key)) is None else _kind(buffer) for table, key in self._places]
        self._to_send: list[torch.Tensor] = []
        self.changed = False
        """Whether what is here is not what was agreed."""

    def moved(self, module: torch.nn.Module) -> bool:
        """Whether the module keeps its buffers in other places than before."""
        now = [(id(table), key) for table, key in self._places_in(module)]
        return now != [(id(table), key) for table, key in self._places]

    def _places_in(self, module: torch.nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        return [
            (owner._buffers, key)
            for prefix, owner in module.named_modules()
            for key in owner._buffers
            if not self._options.ignores(f"{prefix}.{key}" if prefix else key)
        ]

    def look(self) -> None:
        """Compare buffers with what was agreed, where any is another tensor than at the last look."""
        if self.policy == "none" or not self._places:
            self._to_send = []
            return
        found = [table.get(key) for table, key in self._places]
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
        (follow, average), sent = self._to_send_now(), CoalescedMessages()
        if follow:
            sent.add(start_broadcast(follow, transport))
        if average:
            sent.add(start_reduce(average, transport, transport.world_size))
        return sent

    def _to_send_now(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those that are to follow rank 0's now, and those that are to become the mean over ranks."""
        self.look()
        if self.policy != "mean":
            return self._to_send, []
        exact = [buffer for buffer in self._to_send if not buffer.is_floating_point()]
        return exact, [buffer for buffer in self._to_send if buffer.is_floating_point()]


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return buffer.shape, buffer.dtype, buffer.device
