"""What moves and sums a bucket. ``base`` has the protocol; each other file is one implementation of it."""

from .base import Transport, Work
from .choose import TransportName, choose
from .hierarchical import HierarchicalTransport
from .local import LocalGroup, LocalTransport
from .process_group import ProcessGroupTransport
from .round_robin import RoundRobinTransport
from .shared_memory import SharedMemoryTransport

__all__ = [
    "HierarchicalTransport",
    "LocalGroup",
    "LocalTransport",
    "ProcessGroupTransport",
    "RoundRobinTransport",
    "SharedMemoryTransport",
    "Transport",
    "TransportName",
    "Work",
    "choose",
]
