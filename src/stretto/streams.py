"""The streams of accelerators on which gradients arrive: a stream that reads them must wait for all the others.

[Note: side streams]  The engine accumulates a gradient on the stream that was current when forward first used the
parameter, and brings all streams together only where backward ends. But a bucket is filled and sent before that, on the
stream of the gradient that arrived last. So where parts of forward ran on streams of their own, as two towers do, that
stream first waits for the others. They wait for it after the copy, since the copied memory is freed and belongs to
them.

The host never blocks for this, and where all gradients of one device arrive on one stream, the only cost is to notice
that. The stream on which a pass begins is noted too, because memory that replaces what a user keeps, and zeros for what
does not come, are written on it. It is the stream of the first gradient of any member of a family, or none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .engine import left_uncompiled


class Streams:
    """Those of one model's gradients, in one pass.

    Args:
        devices: of the parameters.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        every, kind = {*devices}, torch.accelerator.current_accelerator()
        kind_name = "" if kind is None else kind.type
        self._number = getattr(torch._C, f"_{kind_name}_getCurrentRawStream", torch.accelerator.current_stream)
        """Tells apart which stream of a device is current; CUDA does it in 0.1 us."""
        self._seen: dict[int, dict[Any, torch.Stream]] = {
            device.index or 0: {} for device in every if device.type == kind_name
        }
        self.any = bool(self._seen)
        """Whether any of the devices has streams; what has to be done for them need not be called else."""
        self._threads = len(every) > 1  # each device has its own, in which other streams of the others are current
        self.differ = self._threads and self.any
        """Whether there is more than one to be brought together."""

    def noting(self, append: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """A hook that notes on which stream a gradient arrives; ``append`` alone where no parameter is on such."""
        if not self.any:
            return append
        seen, number = self._seen, self._number

        @left_uncompiled
        def arrived(parameter: torch.Tensor) -> None:
            if (device := parameter.get_device()) in seen and number(device) not in seen[device]:
                self._note(device)
            append(parameter)  # last: any reader of the list, maybe on another thread, then has its stream

        return arrived

    def note_current(self) -> None:
        """What this thread does on its devices from here on is to be waited for, too."""
        for device in self._seen:
            self._note(device)

    def _note(self, device: int) -> None:
        seen = self._seen[device]
        seen[self._number(device)] = torch.accelerator.current_stream(device)
        self.differ = self._threads or len(seen) > 1

    def join(self) -> None:
        """Order further work on the current streams after what has arrived."""
        if self.differ:
            for current, other in self._pairs():
                current.wait_stream(other)

    def part(self) -> None:
        """Let the gradients' streams go on, ordered after what was done since."""
        if self.differ:
            for current, other in self._pairs():
                other.wait_stream(current)

    def _pairs(self) -> Iterator[tuple[torch.Stream, torch.Stream]]:
        for device, seen in self._seen.items():
            current = torch.accelerator.current_stream(device)
            for stream in [*seen.values()]:  # at once: other threads note theirs
                if stream != current:
                    yield current, stream

    def end(self) -> None:
        """The pass is over. After an exception the engine has not synchronised the streams."""
        self.join()
        self.part()
        for seen in self._seen.values():
            seen.clear()
        self.differ = self._threads and self.any


def synchronize(devices: Iterable[torch.device]) -> None:
    """Block the host until the current streams of these devices have finished their work."""
    kind = torch.accelerator.current_accelerator()
    for device in {one for one in devices if kind is not None and one.type == kind.type}:
        torch.accelerator.current_stream(device).synchronize()
