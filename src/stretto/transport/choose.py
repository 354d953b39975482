"""Which transport: whether ranks share memory is found out by doing it.

Every rank offers a page of memory, every rank tries to open those of all others through /proc and compares a random
token. Names of hosts, LOCAL_WORLD_SIZE and the like are not asked: containers share names, and hosts do not.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import SetupError
from . import futex
from .base import Transport
from .host import Host
from .page import Address, Page, Peer
from .shared_memory import SharedMemoryTransport

TransportName = Literal["auto", "shared_memory", "process_group"]
DEFAULT_PATIENCE = 1800.0
log = logging.getLogger("stretto")


@dataclass(frozen=True)
class Offer:
    """What a rank brings to the choice."""

    asked: str
    address: Address | None
    reason: str = ""
    """Why it has nothing to offer."""


def choose(
    base: Transport, asked: str, *, on_host: bool = True, gather: Callable[[Any], list[Any]] | None = None
) -> Transport:
    """Shared memory where all ranks of ``base`` can see each other's, else ``base``. Collective.

    Args:
        base: carries the questions, and whatever shared memory cannot.
        asked: ``"auto"``, ``"shared_memory"`` or ``"process_group"``, the same on all ranks.
        on_host: whether this rank has tensors in the host's memory at all.
        gather: takes the part of ``base.all_gather_object``, which waits without a look at the other ranks.

    Raises:
        SetupError: ``"shared_memory"`` was asked for and cannot be had, or ranks ask differently; on all ranks.
    """
    gather = gather or base.all_gather_object
    offers, page = _exchange_offers(gather, base.rank, asked, on_host)
    _refuse(base.rank, offers)
    if offers[0].asked == "process_group":
        return base
    peers, problem = _open(base.rank, offers)
    found: list[tuple[tuple[int, ...], str]] = gather((tuple(peers), problem))
    if all(len(seen) == base.world_size for seen, _ in found):
        assert page is not None, "this rank's page was opened by all"
        host = Host(page, [peers[rank] for rank in range(base.world_size)], base.rank, _patience(base))
        return SharedMemoryTransport(host, base)
    why = next(f"rank {rank}: {told}" for rank, (_, told) in enumerate(found) if told)
    if asked == "shared_memory":
        raise SetupError(
            f'rank {base.rank}: transport="shared_memory" cannot be had: {why}.\n'
            'Attach with transport="auto", which then uses the process group.'
        )
    if base.rank == 0:
        log.info("gradients go over %s, not through shared memory: %s", base.name, why)
    return base


def _exchange_offers(
    gather: Callable[[Any], list[Any]], rank: int, asked: str, on_host: bool
) -> tuple[list[Offer], Page | None]:
    page: Page | None = None
    reason = ""
    if asked != "process_group":
        reason = _why_not() or ("" if on_host else "its parameters and buffers are all on an accelerator")
        if not reason:
            try:
                page = Page(rank)
            except OSError as error:
                reason = f"memfd_create: {error.strerror or error}"
    offers: list[Offer] = gather(Offer(asked, page.address if page else None, reason))
    return offers, page


def _why_not() -> str | None:
    if not hasattr(os, "memfd_create") or not hasattr(mmap, "MAP_POPULATE"):
        return f"{sys.platform} has no memfd_create"
    return futex.why_not()


def _refuse(rank: int, offers: Sequence[Offer]) -> None:
    asked = {offer.asked for offer in offers}
    known = get_args(TransportName)
    if unknown := sorted(asked.difference(known)):
        raise SetupError(
            f"rank {rank}: transport={unknown[0]!r} is not known: use one of "
            + ", ".join(f'"{name}"' for name in known)
            + ", or an object that is a stretto.transport.Transport"
        )
    if len(asked) > 1:
        told = ", ".join(f'rank {other} "{offer.asked}"' for other, offer in enumerate(offers))
        raise SetupError(f"rank {rank}: ranks ask for different transports: {told}.\nGive the same on all ranks.")


def _open(rank: int, offers: Sequence[Offer]) -> tuple[dict[int, Peer], str]:
    """The ranks whose memory this one can read, and why not that of the first of the rest."""
    peers: dict[int, Peer] = {}
    problem = offers[rank].reason
    for other, offer in enumerate(offers):
        if offer.address is None or offers[rank].address is None:
            continue
        try:
            peers[other] = Peer(other, offer.address)
        except OSError as error:
            problem = problem or f"the memory of rank {other} cannot be opened: {error.strerror or error}"
    return peers, problem


def _patience(base: Transport) -> float:
    patience: float | None = getattr(base, "patience", None)
    return DEFAULT_PATIENCE if patience is None else patience
