"""What moves and sums a bucket: ``base`` has the protocol, ``choose`` picks the implementation for these ranks."""

from .base import Transport, Work
from .choose import TransportName, as_groups, choose
from .common import CommonMemory, own_memory
from .hierarchical import HierarchicalTransport
from .local import LocalGroup, LocalTransport
from .process_group import ProcessGroupTransport
from .round_robin import RoundRobinTransport
from .shared_memory import SharedMemoryTransport
from .slices import slice_of

__all__ = [
    "CommonMemory",
    "HierarchicalTransport",
    "LocalGroup",
    "LocalTransport",
    "ProcessGroupTransport",
    "RoundRobinTransport",
    "SharedMemoryTransport",
    "Transport",
    "TransportName",
    "Work",
    "as_groups",
    "choose",
    "own_memory",
    "slice_of",
]
