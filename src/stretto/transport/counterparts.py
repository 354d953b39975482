"""One rank on each host: the owners of the same slice of a message, connected by a Gloo group of their own."""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import CommunicationError
from .base import Transport, Work
from .courier import Courier
from .exchange import Exchange, all_to_all, exchange_shares
from .letting_go import InFlight, never_free
from .prompt import let_gloo_go_first


class Counterparts:
    """The owners of one slice, one on each host, in the order of the hosts.

    [Note: a group of our own]  ``new_group`` is collective over all ranks, but only those of one handle attach. With
    ``use_local_synchronization`` it is not, but then the group is named after the number of groups that this rank has
    already: ranks with different numbers would look for each other under different names until time runs out. So the
    backend itself is made here, under a key of the store that no other handle uses. It ends with this transport, with
    the base's group or with the interpreter, whichever comes first: threads that outlive the interpreter could abort
    the process.

    Args:
        base: counterparts find each other in its store.
        patience: tells how many seconds a collective may take, which can change.
    """

    def __init__(self, base: Transport, patience: Callable[[], float]) -> None:
        self._rank = base.rank
        self._store = base.store
        self._patience = patience
        self._groups: list[Any] = []  # one or none
        self._sum = dist.AllreduceOptions()  # its default is a sum
        self._in_flight = InFlight()
        self.courier = Courier(self._groups, patience())
        self._close = weakref.finalize(self, _end, self._groups, self.courier, os.getpid())
        if (group := base.process_group) is not None:
            weakref.finalize(group, _end, self._groups, self.courier, os.getpid()).atexit = False

    def connect(self, name: str, number: int, hosts: int) -> None:
        """Find the others. Collective among them.

        Raises:
            RuntimeError: they did not come, or cannot be reached.
        """
        assert self._store is not None, "asked by why_not"
        store = PrefixStore(f"stretto/hosts/{name}", self._store)
        limit = datetime.timedelta(seconds=self.courier.patience)
        self._groups.append(dist.ProcessGroupGloo(store, number, hosts, limit))
        let_gloo_go_first()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum over hosts, in place."""
        work: Work = self._group.allreduce([tensor], self._sum)
        return self._in_flight.add(work)

    def all_gather(self, received: list[torch.Tensor], sent: torch.Tensor) -> Work:
        """Gather what each of them sends, in the order of hosts."""
        work: Work = self._group.allgather([received], [sent])
        return self._in_flight.add(work)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, numels: Sequence[int]) -> Work:
        """Send one part of ``sent`` to each, given the parts' lengths, and receive equally long ones from all."""
        parts = [len(received) // len(numels)] * len(numels)
        return self._in_flight.add(all_to_all(self._group, received, sent, parts, numels))

    def spread(self, received: torch.Tensor, share: torch.Tensor, numels: Sequence[int]) -> Exchange:
        """Send ``share`` to each of them, and receive theirs, one after the other, into ``received``."""
        exchange = exchange_shares(self._group, received, share, numels)
        for work in exchange.works:
            self._in_flight.add(work)
        return exchange

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """From host number ``root``."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        work: Work = self._group.broadcast([tensor], options)
        return self._in_flight.add(work)

    @property
    def _group(self) -> Any:
        if not self._groups:
            raise CommunicationError(
                f"rank {self._rank}: this transport was closed, and the connections to other hosts with it.\n"
                "Call close() after the last collective, or make another transport with stretto.transport.choose."
            )
        if (seconds := self._patience()) != self.courier.patience:
            self.courier.patience = seconds
            self._groups[0].set_timeout(datetime.timedelta(seconds=seconds))
        return self._groups[0]

    def abandon(self) -> None:
        """Never free the group: its threads wait for what will not come."""
        for group in self._groups:
            self._in_flight.never_free(group)

    def close(self) -> None:
        """Leave the others. Harmless twice."""
        self._close()


def _end(groups: list[Any], courier: Courier, pid: int) -> None:
    if pid == os.getpid():
        courier.close()
        groups.clear()
    else:  # its threads did not follow the fork, and would be waited for: leave it to the end of the process
        never_free(groups)
