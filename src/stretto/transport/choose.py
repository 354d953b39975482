"""Choosing a transport: whether ranks share memory is found out by trying.

Every rank offers a page of memory, every rank tries to open those of all others through /proc and compares a random
token. Host names, LOCAL_WORLD_SIZE and the like are not used, since they do not tell: containers may have the same name
and no common memory. Ranks that have opened each other's memory count as one host, whatever machine they run on.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist

from ..errors import CommunicationError, PeerError, SetupError
from . import futex
from .base import Transport
from .hierarchical import HierarchicalTransport, why_not
from .host import Host
from .page import Address, Page, Peer, first_dead
from .process_group import ProcessGroupTransport
from .round_robin import RoundRobinTransport
from .shared_memory import SharedMemoryTransport

TransportName = Literal["auto", "shared_memory", "process_group"]
DEFAULT_PATIENCE = 1800.0
log = logging.getLogger("stretto")
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes srun or mpirun has started. SLURM_NTASKS is set in a batch script too, which runs once."""


@dataclass(frozen=True)
class Offer:
    """What a rank brings to the choice."""

    asked: str
    address: Address | None
    reason: str = ""
    """Why it cannot offer memory."""


@dataclass(frozen=True)
class Opened:
    """What a rank has found."""

    ranks: tuple[int, ...]
    """Whose memory it can read."""
    problem: str
    """Why it cannot read another rank's memory."""
    name: str
    """Random; rank 0's value names the place in the store where hosts meet."""


def as_groups(process_groups: Iterable[dist.ProcessGroup] | None) -> tuple[dist.ProcessGroup, ...]:
    """Those given as ``process_groups=``; none for None. Raises ``SetupError`` for what is no list."""
    if process_groups and not isinstance(process_groups, Iterable):
        raise SetupError("process_groups= takes a list of groups of the same ranks: for one, write process_group=group")
    return tuple(process_groups or ())


def carrier_of(
    asked: Transport | str | None,
    process_group: dist.ProcessGroup | None,
    process_groups: Sequence[dist.ProcessGroup] = (),
) -> Transport | None:
    """The transport or the groups that were given, else the default group; None in a program of one process.

    Raises:
        SetupError: several were given; ranks were launched, but no group is initialised.
    """
    own = asked if asked is not None and not isinstance(asked, str) else None
    groups = as_groups(process_groups)
    ways = {
        "transport=": own is not None,
        "process_group=": process_group is not None,
        "process_groups=": groups,
    }
    if len(given := [name for name, there in ways.items() if there]) > 1:
        raise SetupError(f"{' and '.join(given)} each say what carries the gradients: leave out all but one")
    if own is not None:
        return own
    if groups:
        return RoundRobinTransport([ProcessGroupTransport(group) for group in groups])
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return ProcessGroupTransport(process_group)
    if launched := _started():
        raise SetupError(
            f"WORLD_SIZE={launched} ranks were launched, but no process group is initialised: each "
            "would train alone.\nCall torch.distributed.init_process_group() before stretto.attach(model)."
        )
    return None


def _started(variable: str = "WORLD_SIZE") -> str:
    """How many processes a launcher has started, according to the environment, if more than one."""
    return "" if (started := os.environ.get(variable, "").strip()) in ("", "0", "1") else started


def warn_of_group_of_one(base: Transport) -> None:
    """Log if a launcher has started several ranks, and each has made a group of its own."""
    if (
        (launched := _started())
        and dist.is_available()
        and dist.is_initialized()
        and base.process_group is dist.group.WORLD
    ):
        log.warning(
            "WORLD_SIZE=%s ranks were launched, but the process group has one: each trains alone.\n"
            "If they are to train together, call torch.distributed.init_process_group() without rank= and world_size=.",
            launched,
        )


def warn_of_tasks() -> None:
    """Log if ``srun``, ``mpirun`` or torch's ``spawn`` has started processes, and no group is initialised.

    It is not an error, as with torchrun, since each task may train a model of its own on purpose. A process that torch
    has spawned cannot see whether there are others.
    """
    target: object = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(target, "__module__", None) == "torch.multiprocessing.spawn":
        log.warning(
            "torch.multiprocessing has started this process, but no process group is initialised: it trains alone.\n"
            "If such processes are to train together, call torch.distributed.init_process_group() before "
            "stretto.attach(model)."
        )
        return
    for name in _TASKS:
        if started := _started(name):
            log.warning(
                "%s=%s processes were started, but no process group is initialised: each trains alone.\n"
                "If they are to train together, call torch.distributed.init_process_group() before "
                "stretto.attach(model).",
                name,
                started,
            )
            return


def choose(
    base: Transport,
    asked: str,
    *,
    on_host: bool = True,
    gather: Callable[[Any], list[Any]] | None = None,
    tell: Callable[[str], object] = lambda why: None,
) -> Transport:
    """The transport that suits the ranks of ``base``. Collective.

    Shared memory if all of them see each other's, shared memory and ``base`` if some do, and ``base`` if each is alone
    on its host.

    Args:
        base: carries the questions, and whatever shared memory cannot.
        asked: ``"auto"``, ``"shared_memory"`` or ``"process_group"``, the same on all ranks.
        on_host: whether this rank has any tensors in the host's memory.
        gather: used instead of ``base.all_gather_object``, which would wait without checking on the other ranks.
        tell: called on each rank with the reason if not all share memory, and ``"auto"`` was asked for.

    Raises:
        SetupError: ``"shared_memory"`` was asked for and cannot be had, or ranks ask differently; on all ranks.
    """
    gather = gather or base.all_gather_object
    offers, page = _exchange_offers(gather, base.rank, asked, on_host)
    _refuse(base.rank, offers)
    if offers[0].asked == "process_group":
        return base
    peers, problem = _open(base.rank, offers)
    seen = _exchange_seen(gather, base.rank, offers, Opened(tuple(peers), problem, secrets.token_hex(8)))
    hosts = hosts_among([one.ranks for one in seen])
    why = next((f"rank {rank}: {one.problem}" for rank, one in enumerate(seen) if one.problem), "")
    if asked == "shared_memory" and len(hosts) != 1:
        raise SetupError(
            f'rank {base.rank}: transport="shared_memory" is not available: {why}.\n'
            'Attach with transport="auto", which then uses the process group.'
        )
    if len(hosts) != 1:
        tell(why)
    if len(hosts) > 1 and (problem := why_not(base) or ""):
        why, hosts = f"{why}; and {problem}", []
    if len(hosts) != 1 and all(len(ranks) == 1 for ranks in hosts):
        if base.rank == 0:
            log.info("gradients go over %s, not through shared memory: %s", base.name, why)
        return base
    assert page is not None, "every rank has opened its own"
    mine = next(ranks for ranks in hosts if base.rank in ranks)

    def patience() -> float:
        return DEFAULT_PATIENCE if (found := base.patience) is None else found

    host = Host(page, [peers[rank] for rank in mine], mine.index(base.rank), patience)
    if len(hosts) == 1:
        return SharedMemoryTransport(host, base)
    if base.rank == 0:
        log.info("gradients are summed in the memory of each of %d hosts, then over hosts: %s", len(hosts), why)
    return HierarchicalTransport(host, hosts, base, seen[0].name)


def _exchange_seen(
    gather: Callable[[Any], list[Any]], own_rank: int, offers: Sequence[Offer], mine: Opened
) -> list[Opened]:
    """Raises ``PeerError`` for a rank that has died meanwhile."""
    try:
        seen: list[Opened] = gather(mine)
    except CommunicationError:
        raise  # it names the cause already
    except RuntimeError as error:
        if dead := first_dead([offer.address for offer in offers if offer.address is not None]):
            rank = next(rank for rank, offer in enumerate(offers) if offer.address == dead)
            told = f"rank {own_rank}: rank {rank} (pid {dead.pid}) died without a word"
            raise PeerError(f"{told}.\nRemove the cause and start again, on all ranks.") from error
        raise
    return seen


def hosts_among(seen: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups of ranks that share memory, in the order of their first ranks.

    No groups if a rank has no such memory, or if two ranks share memory with a third but not with each other.

    Args:
        seen: the ranks whose memory each rank has opened, in rank order.
    """
    opened = [frozenset(ranks) for ranks in seen]
    mutual = [tuple(other for other in sorted(mine) if rank in opened[other]) for rank, mine in enumerate(opened)]
    if any(rank not in ranks for rank, ranks in enumerate(mutual)):
        return []
    if any(mutual[other] != ranks for ranks in mutual for other in ranks):
        return []
    return sorted(set(mutual))


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


def refuse_unknown_name(name: object, where: str) -> None:
    """Raise if no transport has this name. ``where``: how the message begins."""
    known = get_args(TransportName)
    if name not in known:
        of_group = '; Gloo and NCCL come with the process group, "process_group"' if name in ("gloo", "nccl") else ""
        raise SetupError(
            f"{where}: transport={name!r} is not known: use one of "
            + ", ".join(f'"{one}"' for one in known)
            + f", or an instance of a subclass of stretto.transport.Transport{of_group}"
        )


def refuse_other_kinds(transport: object, where: str) -> None:
    """Raise if it is not a transport, or lacks what a subclass must define. ``where``: how the message begins."""
    if not isinstance(transport, Transport):
        refuse_unknown_name(transport, where)
    if missing := [name for name in Transport.__annotations__ if not hasattr(transport, name)]:
        kind = type(transport).__name__
        raise SetupError(
            f"{where}: transport={kind}(...) lacks {', '.join(missing)}.\n"
            f"Set what is missing in {kind}.__init__: stretto.transport.Transport says what each is."
        )


def _refuse(rank: int, offers: Sequence[Offer]) -> None:
    asked = {offer.asked for offer in offers}
    for name in sorted(asked):
        refuse_unknown_name(name, f"rank {rank}")
    if len(asked) > 1:
        told = ", ".join(f'rank {other} "{offer.asked}"' for other, offer in enumerate(offers))
        raise SetupError(f"rank {rank}: ranks ask for different transports: {told}.\nGive the same on all ranks.")


def _open(rank: int, offers: Sequence[Offer]) -> tuple[dict[int, Peer], str]:
    """The ranks whose memory this one can read, and why it cannot read the first of the others."""
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
