"""Another rank's memory, mapped here as it comes into use."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import NamedTuple

import torch

from .memory import LINE, Location, open_file, open_peers, private_mapper
from .ordinary import all_bytes


class Segment(NamedTuple):
    """One that is mapped."""

    number: int
    mapping: mmap.mmap
    everything: torch.Tensor
    """All its bytes."""


def not_mapped(rank: int, error: OSError) -> str:
    """What that rank reports for an error of ``bytes_at`` or ``buffer_at``."""
    return (
        f"rank {rank}: the memory of another rank cannot be mapped: {error.strerror or error}.\n"
        "Raise the limits of this process (ulimit -n, ulimit -v) or of the container, or attach with "
        'transport="process_group".'
    )


class PeersMemory:
    """The segments of one rank (maybe this one), mapped for moving data.

    Args:
        pid: of the rank's process.
        table: where that rank says which segments there are.
    """

    def __init__(self, pid: int, table: memoryview) -> None:
        self._pid = pid
        self._table = table
        self._mapped: dict[int, Segment] = {}  # by line of the table
        self._alive: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        """Each mapping by its address, as long as it is used."""
        self._map_privately = private_mapper()
        self._private = False

    def bytes_at(self, location: Location, nbytes: int) -> torch.Tensor:
        """That part of the rank's memory, as uint8.

        Raises:
            OSError: it cannot be opened; the process may be gone.
        """
        return self._segment(location).everything[location.offset : location.offset + nbytes]

    def buffer_at(self, location: Location, nbytes: int) -> memoryview:
        """The same as a buffer, which keeps the mapping alive for anything made of it. Raises ``OSError`` too."""
        return memoryview(self._segment(location).mapping)[location.offset : location.offset + nbytes]

    def _segment(self, location: Location) -> Segment:
        segment = self._mapped.get(location.line)
        if segment is None or segment.number != location.segment:
            number, fd, size = LINE.unpack_from(self._table, location.line * LINE.size)
            if number != location.segment:
                raise OSError(errno.ESTALE, f"segment {location.segment} of process {self._pid} is gone")
            mapping = open_peers(self._pid, fd, size)
            segment = Segment(number, mapping, all_bytes(mapping))
            self._mapped[location.line] = segment
            self._alive[segment.everything.data_ptr()] = mapping
        return segment

    def forget_retired(self) -> None:
        """Drop the mappings of segments that their owner has freed. Messages under way may still need them."""
        for line, segment in [*self._mapped.items()]:
            if LINE.unpack_from(self._table, line * LINE.size)[0] != segment.number:
                del self._mapped[line]

    def make_private(self) -> None:
        """In a forked child: see memory.py, [Note: forked]. In a child of the child they are private already.

        Pages of a segment that its owner still has are copied when they are written. Segments that the owner has freed
        may hold parameters that live on here, so they are copied at once.
        """
        if self._private:
            return
        self._private = True
        lines = {segment.everything.data_ptr(): line for line, segment in self._mapped.items()}
        for address, mapping in [*self._alive.items()]:
            if not (address in lines and self._opened_privately(address, lines[address])):
                values = bytes(mapping)
                self._map_privately(address, len(values), None)
                ctypes.memmove(address, values, len(values))

    def _opened_privately(self, address: int, line: int) -> bool:
        found, fd, nbytes = LINE.unpack_from(self._table, line * LINE.size)
        if found != self._mapped[line].number:
            return False
        try:
            own = open_file(self._pid, fd)
        except OSError:  # the rank has ended
            return False
        self._map_privately(address, nbytes, own)
        os.close(own)
        return True
