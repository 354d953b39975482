"""The seam between the reducer and whatever carries bytes.

A transport is used by all ranks in the same order of calls; it never has to match messages by name. Calls that move
tensors return at once with a :class:`Work`, calls that move objects return when all ranks have met.
"""

from __future__ import annotations

import abc
import collections
import datetime
import functools
import inspect
import signal
import traceback
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import Store

if TYPE_CHECKING:
    from .common import CommonMemory

SHORTEST_SECONDS = 0.001
"""Torch truncates time limits to whole milliseconds, and takes 0 to mean no limit."""
FLUSH_SECONDS = 5.0
"""How long, at most, a rank that gives up a pass waits for others that need its part: it may not come back."""


class Work(Protocol):
    """One collective under way: torch's, or one of ours.

    Some of ours have further members, for which callers check: ``waits_again`` (an interrupted wait leaves nothing
    unfinished), ``goes_on_by_itself``, ``will_never_begin()``, ``is_carried`` (False if only the store carries it);
    and, for records, ``is_over``, ``future``, ``ended_at``.
    """

    def wait(self) -> Any:
        """Return when the result may be read: on a CPU tensor when it is there, on a CUDA tensor when the current
        stream is ordered behind it (the host does not wait). Raises ``RuntimeError`` if the collective failed."""


class Transport(abc.ABC):
    """Moves and sums flat tensors between ``world_size`` ranks.

    Every abstract method except ``allocate`` and ``close`` is collective: all ranks must call it, in the same order.
    The other members may be left out: the library then does without them.
    """

    name: str
    rank: int
    world_size: int
    bucket_cap_bytes: int
    """The bucket size that suits this transport's latency and bandwidth."""
    last_bucket_cap_bytes: int
    """The same for the last bucket, whose transfer backward cannot hide."""
    caps_follow_link: bool = False
    """Whether these are a guess, and the link is to be timed (sizing.py)."""

    @abc.abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor of ``numel`` elements that ``all_reduce`` can work on."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Replace the flat tensor on every rank by the sum over ranks, the same bits everywhere."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Replace the flat tensor on every rank by that of rank ``root``."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order. For set-up and rare decisions, not for the hot path."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what ``allocate`` took. Harmless twice. Groups that the user made are left to the user."""

    # What carries it

    own_channel: bool = False
    """Whether nobody else's collectives can come between this transport's."""
    global_ranks: Sequence[int] = ()
    """The ranks' numbers in the default group; empty if they are the same."""

    process_group: Any = None
    """The process group underneath, for comm hooks."""
    hosts: Sequence[Sequence[int]] | None = None
    """Groups of ranks that share memory; None if each has its own. ``common`` exists only with them."""

    @property
    def transports(self) -> Sequence[Transport]:
        """The transports underneath if several take turns; else itself."""
        return (self,)

    # Cheaper than an all-reduce. None if not available.

    all_reduce_mean: Callable[[torch.Tensor, int], Work] | None = None
    """Sums like ``all_reduce`` and divides the first ``numel`` elements by the world size, cheaper than separately."""
    reduce_shares: Callable[[torch.Tensor, int], Work] | None = None
    """The same, but each rank gets only its share of those elements."""
    spread_share: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], Work] | None = None
    """``(received, share, numels)``: send this rank's share to all others, receive theirs; see exchange.py."""
    meet: Callable[[MutableSequence[int], bytes], Work] | None = None
    """``(numbers, action)``: the sums of a few numbers."""
    common: Callable[[int, Callable[[Work, str], None], str], CommonMemory] | None = None
    """``(nbytes, wait_for, what)``: memory that exists once for all ranks of a host. Collective."""
    spreading: Callable[[int, Callable[[Work, str], None]], Any] | None = None
    """For shares that go into the memory of hosts, see spreading.py."""

    # How ranks learn why another does not come (peers.py)

    patience: float | None = None
    """Seconds that a collective may take, asked at each wait: a group's time-out can be changed. If set, ``Work.wait``
    accepts a ``timedelta``, raises ``RuntimeError`` when that is over, and may be called again;
    ``Work.is_completed()`` then tells the two kinds of errors apart. Otherwise ``Work.wait`` is called without
    arguments."""
    store: Store | None = None
    """One that all ranks see."""
    leftovers: Sequence[Leftover] = ()
    """Of the groups beneath."""

    @property
    def leftovers_for_hooks(self) -> Sequence[Leftover]:
        """The same for the group that carries what comm hooks send."""
        return self.leftovers

    def dead(self) -> Sequence[tuple[int, int]] | None:
        """Rank and pid of all whose process has ended without giving this transport a reason; None if unknown."""
        return None

    def break_off(self, reason: str) -> None:  # noqa: B027
        """End on all ranks when the patience is over: the memory may be filled again, and must not be summed when a
        late rank comes."""

    def abandon(self, work: Any, handle: str, told: str) -> None:  # noqa: B027
        """Called when nobody waits any more for a work that may be under way: objects whose release would wait for it
        are never freed, and from then on ``leftovers`` say that it would meet what is sent next."""

    def flush(self, seconds: float) -> None:  # noqa: B027
        """If collectives progress only while this rank is in a call: stay for so many seconds, or until nobody needs
        this rank any more."""


@dataclass(eq=False)
class Leftover:
    """A message of a process group for which a rank has stopped waiting: what is sent next would meet it.

    Gloo ends the process if sizes differ; if they do not, it sums what does not belong together.
    """

    group: str = ""
    """The ranks of the group, as Python prints them; empty for the default group."""
    used: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=64))
    """The names of the last handles whose ranks have met in the group: they identify it to other ranks."""
    rank: int | None = None
    """The rank that stopped waiting; None if there is none."""
    handle: str = ""
    """What the message was for, if that had a name."""
    told: str = ""
    """Why that rank stopped waiting."""
    is_sent: bool = True
    """False if there may be no message: the rank has only lost its place, and others may wait for it here. Then only
    that rank knows."""

    def is_of(self, rank: int, handle: str, told: str, *, is_sent: bool = True) -> None:
        """Record it, unless there is one already, which may be the reason for this failure."""
        if self.rank is None or (is_sent and not self.is_sent):
            self.rank, self.handle, self.told, self.is_sent = rank, handle, told.partition("\n")[0], is_sent

    def is_sent_by(self, rank: int) -> bool:
        """Whether that rank has left a message."""
        return self.rank == rank and self.is_sent

    def come_together(self, handle: str) -> None:
        """All ranks have come, so none waits here for another; a ``handle`` that is not empty uses this group."""
        if not self.is_sent:
            self.rank, self.is_sent = None, True
        self.used.extend([handle] if handle and handle not in self.used else ())


def done_within(work: Any, time: datetime.timedelta) -> bool:
    """Whether a collective is done; its own failure is raised. A wait that ran out of time can be repeated."""
    try:
        work.wait(time)
        return True
    except RuntimeError as error:  # raised again below, if it is the collective's own
        if raised_by_handler(error):
            raise
        if not work.is_completed():
            return False
    work.wait()  # it may have completed just after the time was over
    return True


def raised_by_handler(error: BaseException) -> bool:
    """Whether it was raised by the program's signal handler, which Python may call during any wait."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(inspect.unwrap(getattr(handler, "__func__", handler)), "__code__", None) if handler else None


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in reading order, as a flat tensor: a view if they lie so already, else a copy."""
    row = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return row.as_strided(row.shape, (1,))  # torch leaves any stride to a single element, and refuses other dtypes then


def as_reals(row: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which have the same sums; others unchanged. A view of a contiguous row."""
    return torch.view_as_real(row).view(-1) if row.is_complex() else row
