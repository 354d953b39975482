"""Memory that the ranks of one host share, with no name in any file system.

    allocate ──> Segment (memfd_create) ──> tensor           a peer: /proc/PID/fd/FD ──> the same bytes

A segment lives as long as tensors in it: they hold its mapping, everything else holds it weakly. When the last tensor
is gone, its line in the owner's table is cleared, and peers drop their mapping when they next check. A process that
ends in any way takes its descriptors and mappings with it, so nothing is left behind.

[Note: reserved]  Pages are allocated when the segment is made. If they were allocated at the first write, a full
machine would raise SIGBUS in the middle of backward, and a full control group would kill a process. So a rank first
checks how much memory there is, one rank of the host after the other: all of them allocate at the same moment, and each
would find enough for itself.

[Note: forked]  A forked child has the mappings of its parent. If they stayed shared, a backward in the child would add
to the parent's gradients. So in the child they become private copies, page by page as they are written; only the
process that made them touches the table and the descriptors.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..errors import CommunicationError
from ..system_memory import available_bytes
from ..wording import MIB
from .ordinary import all_bytes

if sys.platform != "win32":  # which lacks all that this file uses: see choose.py
    import fcntl

CHUNK_BYTES = 4 * MIB
"""Smallest size of a segment for several tensors; later ones take a quarter of all in use, up to the next constant."""
LARGEST_CHUNK_BYTES = 64 * MIB
_SPARE_BYTES = 16 * MIB
"""Left for the program: in a full control group its next object would get a process killed."""
LINE_BYTES = 128  # two cache lines: processors fetch them in pairs
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_MAP_FIXED = 16
_TURN_SECONDS = 5.0
_GONE = (0, 0, 0)  # what was below an address has been freed since: it lies elsewhere

SEGMENTS = 512
LINE = struct.Struct("<QQQ")  # number of the segment (0: none), file descriptor, bytes
TABLE_BYTES = SEGMENTS * LINE.size


class Location(NamedTuple):
    """Where in a rank's memory a tensor lies. Made for every message; costs a third of a dataclass."""

    line: int
    """Of the table of segments."""
    segment: int
    offset: int
    """Bytes."""

    def plus(self, nbytes: int) -> Location:
        """So many bytes further on."""
        return Location(self.line, self.segment, self.offset + nbytes)


def _map_fresh(fd: int, nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    with contextlib.suppress(OSError):  # not every kernel has either
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return mapping


def create(nbytes: int) -> tuple[int, mmap.mmap]:
    """A new file without a name, reserved and mapped; only for this user, and of a fixed size.

    Raises:
        OSError: the system does not allow it, or has no memory for it.
    """
    _refuse_more_than_there_is(nbytes)
    fd = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        mapping = _map_fresh(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def open_peers(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map what another process has created.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    own = open_file(pid, fd)
    try:
        if os.fstat(own).st_size < nbytes:
            raise OSError(errno.ESTALE, "is a different file now", f"/proc/{pid}/fd/{fd}")
        return mmap.mmap(own, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(own)


def open_file(pid: int, fd: int) -> int:
    """A descriptor of what another process has created. Raises ``OSError`` like ``open_peers``."""
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith("/memfd:stretto"):  # opening a pipe of some other process would block
        raise OSError(errno.ENOENT, "is not stretto's", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def close_with(owner: object, fd: int) -> None:
    """Close the descriptor when its owner is gone; not needed when the process ends."""
    weakref.finalize(owner, _close, os.getpid(), fd).atexit = False


def _close(pid: int, fd: int) -> None:
    if pid == os.getpid():  # in a forked child the number may mean something else
        os.close(fd)


def _refuse_more_than_there_is(nbytes: int) -> None:
    if (there := available_bytes()) is None:
        return
    available = max(there - _SPARE_BYTES, 0)
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{nbytes / MIB:.0f} MiB asked for, {available / MIB:.0f} MiB available")


@contextlib.contextmanager
def _turn(fd: int | None) -> Iterator[None]:
    """Hold the lock of a file that all ranks of the host know; a process that ends releases it."""
    until = time.monotonic() + _TURN_SECONDS  # one that was stopped does not
    held = False
    while fd is not None and not held and time.monotonic() < until:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            time.sleep(0.001)
    try:
        yield
    finally:
        if held and fd is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)


class Arena:
    """The segments of this rank.

    Args:
        table: ``TABLE_BYTES`` of shared memory in which peers read where segments are.
        changed: called when the table has changed.
        rank: for messages.
    """

    def __init__(self, table: memoryview, changed: weakref.WeakMethod[Callable[[], None]], rank: int) -> None:
        self._table = table
        self._changed = changed
        self._rank = rank
        self._lines: dict[int, tuple[int, int, int]] = {}  # base address: line, number of the segment, end address
        self._bases: list[int] = []  # in order
        self._mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self._in_use = 0  # bytes
        self._free_lines = list(range(SEGMENTS))
        self._made = 0
        self._space: weakref.ref[mmap.mmap] | None = None
        self._used = self._size = 0
        self._private = False
        self._map_privately = private_mapper()
        self._turns: int | None = None

    def take_turns_at(self, fd: int) -> None:
        """See [Note: reserved]: a file whose lock the ranks of the host share. It is closed with the arena."""
        self._turns = fd
        close_with(self, fd)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` zeros, as uint8, aligned for every dtype.

        Raises:
            CommunicationError: there is no memory, or there are too many segments.
        """
        needed = max(nbytes, 1)
        chunk = min(max(CHUNK_BYTES, self._in_use // 4), LARGEST_CHUNK_BYTES)
        mapping = self._space() if self._space is not None else None
        if mapping is None or self._used + needed > self._size:
            if needed >= chunk:  # given its own size: the rest of the last segment serves others
                return all_bytes(self._new_segment(needed))[:nbytes]
            mapping = self._new_segment(chunk)
            self._space, self._used, self._size = weakref.ref(mapping), 0, len(mapping)
        start = self._used
        self._used += -(-needed // LINE_BYTES) * LINE_BYTES
        return all_bytes(mapping)[start : start + nbytes]

    def locate(self, tensor: torch.Tensor) -> Location | None:
        """Where in this arena the tensor lies; None if it lies elsewhere."""
        address, bases = tensor.data_ptr(), self._bases.copy()  # a segment may retire between any two lines
        place = bisect.bisect_right(bases, address)
        if not place:
            return None
        base = bases[place - 1]
        line, number, end = self._lines.get(base, _GONE)
        return Location(line, number, address - base) if address < end else None

    def buffer_of(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of a tensor of this arena; they keep its segment alive for anything made of them."""
        address, bases = tensor.data_ptr(), self._bases.copy()
        base = bases[bisect.bisect_right(bases, address) - 1]
        return memoryview(self._mappings[base])[address - base : address - base + tensor.nbytes]

    def _new_segment(self, needed: int) -> mmap.mmap:
        nbytes = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
        if not self._free_lines:
            raise CommunicationError(
                f"rank {self._rank}: more than {SEGMENTS} pieces of shared memory are in use.\n"
                'Detach handles that are not needed any more, or attach with transport="process_group".'
            )
        try:
            with _turn(self._turns):
                fd, mapping = create(nbytes)
        except OSError as error:
            raise CommunicationError(
                f"rank {self._rank}: no shared memory for gradients: {error.strerror or error}.\n"
                "Free memory, raise the limits of this process (ulimit -n, -v, -f) or of the container, or attach "
                'with transport="process_group".'
            ) from error
        self._made += 1
        line, base = self._free_lines.pop(0), torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._lines[base] = (line, self._made, base + nbytes)
        self._mappings[base] = mapping
        bisect.insort(self._bases, base)
        self._in_use += nbytes
        LINE.pack_into(self._table, line * LINE.size, self._made, fd, nbytes)
        weakref.finalize(mapping, _retire, weakref.ref(self), os.getpid(), base, line, fd).atexit = False
        return mapping

    def retire(self, base: int, line: int) -> None:
        """Called when the last tensor of a segment is gone."""
        del self._lines[base]
        self._bases.remove(base)
        self._in_use -= LINE.unpack_from(self._table, line * LINE.size)[2]
        LINE.pack_into(self._table, line * LINE.size, 0, 0, 0)
        self._free_lines.append(line)
        if (changed := self._changed()) is not None:
            changed()

    def make_private(self) -> None:
        """See [Note: forked]. In a child of the child mappings are private already."""
        if self._private:
            return
        self._private = True
        for base, (line, _, _) in self._lines.items():
            _, fd, nbytes = LINE.unpack_from(self._table, line * LINE.size)
            self._map_privately(base, nbytes, fd)


def _retire(arena: weakref.ref[Arena], pid: int, base: int, line: int, fd: int) -> None:
    if pid != os.getpid():  # see [Note: forked]
        return
    os.close(fd)
    if (alive := arena()) is not None:
        alive.retire(base, line)


def private_mapper() -> Callable[[int, int, int | None], None]:
    """Returns what makes a mapping (address, bytes, descriptor) private: see [Note: forked]; zeros if no descriptor.

    Bound before the fork: in the child, another thread may have held the loader's lock for ever.
    """
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

    def map_privately(base: int, nbytes: int, fd: int | None) -> None:
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if fd is None else 0)
        call(base, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1 if fd is None else fd, 0)

    return map_privately
