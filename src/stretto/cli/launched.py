"""The doctor on ranks that torchrun has started, on one host or several."""

from __future__ import annotations

import datetime
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import SetupError
from ..wording import ranks_by
from .console import note
from .speed import Speed, measure_here

PATIENCE = datetime.timedelta(seconds=120)
"""How long to wait for ranks that do not come, or do not answer."""
SILENCE = 5.0
"""Seconds until a line says that they are waited for: the environment may be that of another run."""
_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RanksOfHost:
    """A host, with some of the ranks."""

    hostname: str
    gloo: str
    """The interface or address that Gloo listens on there."""
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.ranks))}: {self.hostname}, Gloo listens on {self.gloo}"


@dataclass(frozen=True)
class Launched:
    """What ranks have found out together."""

    rank: int
    """This one."""
    world_size: int
    places: tuple[RanksOfHost, ...]
    speed: Speed


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several ranks. Raises ``SetupError`` if it is unclear."""
    if not all(name in os.environ for name in _TOLD):
        return False
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise SetupError(f"{name}={os.environ[name]!r} in the environment is not a number: correct it, or unset it")
    return int(os.environ["WORLD_SIZE"]) > 1


def look_together(hostname: str, gloo: str, *, quick: bool) -> Launched:
    """Meet the other ranks and measure. Collective.

    Args:
        hostname: of this host.
        gloo: the interface or address that Gloo listens on here.
        quick: only a few rounds.

    Raises:
        RuntimeError: they do not come together.
    """
    with _process_group():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        everyone: list[tuple[str, str]] = [("", "")] * world_size
        dist.all_gather_object(everyone, (hostname, gloo))
        by_place = ranks_by(enumerate(everyone)).items()
        places = tuple(RanksOfHost(*place, tuple(ranks)) for place, ranks in by_place)
        return Launched(rank, world_size, places, measure_here(quick=quick))


@contextmanager
def _process_group() -> Iterator[None]:
    reminder = threading.Timer(SILENCE, _say_who_is_awaited)
    reminder.daemon = True
    reminder.start()
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    finally:
        reminder.cancel()
    try:
        yield
        dist.barrier()
    finally:
        gc.collect()  # nothing may refer to the group when it ends
        dist.destroy_process_group()


def _say_who_is_awaited() -> None:
    rank, world_size, host, port = (os.environ[name] for name in _TOLD)
    note(
        f"waiting for other ranks: the environment says RANK={rank}, WORLD_SIZE={world_size}, MASTER_ADDR={host}, "
        f"MASTER_PORT={port}; to look at this host alone, unset RANK"
    )
