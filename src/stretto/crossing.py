"""Whether collectives of one handle can come between those of another, or wait for ranks that are busy with another's.

If so, all ranks must send those of both handles in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from .errors import CommunicationError
from .launch import LaunchQueue
from .transport.base import Transport


def channels_of(queue: LaunchQueue) -> frozenset[object] | None:
    """Where collectives of others that use the same can come between its buckets; None if that is not known."""
    transport = queue.transport
    if queue.has_own_channel:
        return frozenset([id(transport)])
    groups = frozenset(map(group_of, transport.transports))
    return None if None in groups else groups


def share_channel(one: LaunchQueue, other: LaunchQueue) -> bool:
    """Whether collectives of one can come between those of the other."""
    mine, theirs = channels_of(one), channels_of(other)
    return mine is None or theirs is None or not mine.isdisjoint(theirs)


def goes_behind(one: LaunchQueue, others: Iterable[LaunchQueue]) -> bool:
    """Whether its buckets could mix with those of one of the others that goes first, or keep this rank from its end.

    While a comm hook's future is waited for within backward, another rank may be at the end of that one already.
    """
    number, hook = one.peers.seat.number, one.comm_hook
    waits = hook is not None and hook.one_at_a_time
    return any(waits or share_channel(one, other) for other in others if other.peers.seat.number < number)


def waits_for_others(queue: LaunchQueue) -> bool:
    """Whether it may wait for ranks that are in a backward of other groups: see family.py, [Note: other groups]."""
    return (queue.peers.seat.all_know or not queue.pass_number) and queue.waits_within


def group_of(transport: Transport) -> object | None:
    """The process group under a transport; None if there is none, or if it was destroyed."""
    return None if is_destroyed(transport) else transport.process_group


def is_destroyed(transport: Transport) -> bool:
    """Whether there was a process group under it that has been destroyed. The object may still be referenced."""
    try:
        group = transport.process_group
    except CommunicationError:
        return True
    return group is not None and group not in dist.distributed_c10d._world.pg_map
