"""Reducers that one backward reaches together: an attached model inside another one, or beside it.

[Note: one family, one pass]  Collectives match between ranks by their order alone, and two reducers that act for
themselves meet in whatever order their gradients come in, which can differ between ranks. So the members of a family
begin, settle and give up together, in the order in which they were attached: a gradient of any member begins a pass of
all, and a member that this backward does not reach says "absent" in its buckets, as any parameter would. While
backward runs only the first member on a process group launches; the others' buckets leave when it has settled.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch.distributed as dist

from .errors import CommunicationError, SetupError
from .transport.base import Transport


class Member(Protocol):
    """What a family asks of a reducer."""

    synchronize: bool
    running: bool
    delay: bool
    family: Family
    inside: list[weakref.ref[Member]]
    """Those that have parameters of this member's module."""

    @property
    def transport(self) -> Transport:
        """What carries the buckets."""

    def begin(self) -> None:
        """Begin a pass. From a gradient hook."""

    def settle(self) -> None:
        """End it. Collective."""

    def give_up(self) -> None:
        """End it without waiting for anybody."""

    def shadow(self) -> None:
        """Take part in a pass with nothing to give. Collective."""


class Family:
    """Members in the order in which they were attached, which is the same on all ranks."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = [weakref.ref(member) for member in members]  # [Note: weak parameters] in bucket.py
        channels: list[object] = []
        for member in self.members():
            member.family = self
            channel = group_of(member.transport)
            member.delay |= bool(channels) and (None in channels or channel is None or channel in channels)
            channels.append(channel)

    def members(self) -> list[Member]:
        """Those that are alive."""
        return [alive for reference in self._members if (alive := reference()) is not None]

    def leave(self, member: Member) -> None:
        """It acts for itself from now on. All ranks must do so between the same passes.

        Raises:
            SetupError: another member has left parameters to this one.
        """
        if any(reference() is member for other in self.members() for reference in other.inside):
            raise SetupError(
                f"rank {member.transport.rank}: another attached model holds this one and has left its parameters to "
                "this handle.\nCall detach() on the outer handle first."
            )
        self._members = [reference for reference in self._members if reference() is not member]
        member.family = Family([member])

    def begin(self) -> None:
        """A gradient of one of them has arrived. From its hook."""
        for member in self.members():
            if member.synchronize and not member.running:
                member.begin()

    def settle(self) -> None:
        """The outermost backward has ended. Collective. If one fails here, the ones behind it give up."""
        running = [member for member in self.members() if member.running]
        for place, member in enumerate(running):
            try:
                member.settle()
            except BaseException:
                for other in running[place + 1 :]:
                    other.give_up()
                raise

    def give_up(self) -> None:
        """Backward has failed on this rank."""
        for member in self.members():
            if member.running:
                member.give_up()

    def shadow(self) -> None:
        """Take part in one pass of the other ranks, all members whatever happens. Collective."""
        with contextlib.ExitStack() as stack:
            for member in reversed(self.members()):
                stack.callback(member.shadow)


def group_of(transport: Transport) -> object | None:
    """The process group beneath a transport; None if there is none, or if it was destroyed."""
    return None if is_destroyed(transport) else getattr(transport, "process_group", None)


def is_destroyed(transport: Transport) -> bool:
    """Whether there was a process group beneath it, which is no more. Somebody may hold the object all the same."""
    try:
        group = getattr(transport, "process_group", None)
    except CommunicationError:
        return True
    return group is not None and group not in dist.distributed_c10d._world.pg_map


def unite(inside: Sequence[Member], beside: Sequence[Member], newcomer: Member) -> None:
    """``newcomer`` was attached around or beside others: from now on they and their families are one.

    Args:
        inside: members that have parameters of the newcomer's module, in an order that is the same on all ranks.
        beside: others that one backward may reach together with it; the same on all ranks.
        newcomer: comes last.
    """
    newcomer.inside = [weakref.ref(member) for member in inside]
    united: dict[Member, None] = {}
    for member in (*inside, *beside):
        united.update(dict.fromkeys(member.family.members()))
    if united:
        Family([*united, newcomer])
