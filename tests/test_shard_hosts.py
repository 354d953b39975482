"""Shares between hosts of several ranks each: they travel while all go on, whatever the other ranks of a host do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from test_hierarchical import loopback
from test_shard import CARRIERS, assert_alike, assert_same, pair, train

import stretto
from stretto.transport.counterparts import Counterparts
from stretto.transport.exchange import Exchange
from stretto.transport.spreading import _FAILED as FAILED
from stretto.transport.spreading import SharesUnderWay, Spreading

__all__ = ["loopback"]  # a fixture
pytestmark = pytest.mark.timeout(60)
HOSTS = (2, 2)
on_hosts = CARRIERS["hosts"]


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing that the second host has stepped leaves it before this is set."""
    event, spread = threading.Event(), Counterparts.spread

    def wait_and_spread(self: Counterparts, *args: Any) -> Any:
        if self._rank >= HOSTS[0]:
            assert event.wait(20), "a step waits for what it has sent"
        return spread(self, *args)

    event.set()
    monkeypatch.setattr(Counterparts, "spread", wait_and_spread)
    return event


@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_step_returns_before_what_other_hosts_have_stepped_is_there(road: threading.Event, keep_grads: bool) -> None:
    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport, keep_grads=keep_grads)
        for number in range(4):
            transport.all_gather_object(None)
            if transport.rank == 0:
                road.clear()
            transport.all_gather_object(None)
            train(model, sharded, transport.rank, [number])
            if transport.rank == 0:
                road.set()
            train(plain, optimizer, transport.rank, [number])
            assert_alike(transport, model, sharded, plain, optimizer)

    on_hosts(worker, sum(HOSTS))


@pytest.mark.parametrize("reader", range(4))
def test_a_rank_that_reads_by_itself_needs_none_of_its_host(reader: int) -> None:
    """The others are in a barrier, say, and wait for it."""
    has_read = threading.Event()

    def worker(transport: Any) -> None:
        model, sharded, _, plain, optimizer = pair(transport)
        train(plain, optimizer, transport.rank, range(3))
        train(model, sharded, transport.rank, range(3))
        if transport.rank == reader:
            assert_same(model, plain)
            has_read.set()
        assert has_read.wait(20), "it waits for the others"
        assert_same(model, plain)

    on_hosts(worker, sum(HOSTS))


class Broken:
    """A message between hosts that ends, and has failed."""

    def __init__(self, work: Any) -> None:
        self._future = work.get_future()

    def get_future(self) -> Broken:
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self._future.add_done_callback(lambda _: call(self))

    def value(self) -> None:
        raise RuntimeError("Connection reset by peer")


def test_what_never_comes_is_told_on_every_rank_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's message fails while it does something else; rank 1 has its own part, and must not wait for rank 0's."""
    spread, breaks = Counterparts.spread, threading.Event()
    sent: list[list[Exchange]] = [[] for _ in range(4)]

    def spread_or_break(self: Counterparts, *args: Any) -> Exchange:
        exchange = spread(self, *args)
        sent[self._rank].append(exchange)
        broken = breaks.is_set() and self._rank == 0
        return exchange._replace(works=[*map(Broken, exchange.works)]) if broken else exchange

    monkeypatch.setattr(Counterparts, "spread", spread_or_break)

    def worker(transport: Any) -> list[str]:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(1))
        transport.all_gather_object(None)
        breaks.set()
        train(model, sharded, transport.rank, range(1))
        while sent[transport.rank]:
            sent[transport.rank].pop().wait()  # a group of which something is under way would be kept
        said = []
        for look in (model.state_dict, sharded.step)[: HOSTS[0] - transport.rank // 2]:
            try:
                look()
            except stretto.CommunicationError as error:
                said.append(str(error))
        transport.all_gather_object(None)
        return said

    failed = (
        "rank {0}, pass 2: what other hosts have stepped could not be reduced over hierarchical (4 ranks on 2 hosts): "
        "the exchange of rank 0 with other hosts has failed{1}\n"
    )
    spoiled = "rank {0}, shard: a step of this optimizer has failed, so the model may be stepped in part.\n"
    spoiled += "Start again from the last checkpoint."
    first, second, *others = on_hosts(worker, sum(HOSTS))
    assert first[0].startswith(failed.format(0, ": Connection reset by peer"))
    assert second[0].startswith(failed.format(1, ""))
    assert [first[1], second[1]] == [spoiled.format(0), spoiled.format(1)]
    assert others == [[], []]


class Words(Spreading):
    """As they stand when one of two messages has failed, and nothing is heard of the other."""

    def __init__(self, *said: int) -> None:
        self.said = said

    def seen(self, place: int) -> int:
        return self.said[place]

    def refuse(self, place: int) -> NoReturn:
        raise RuntimeError(f"{place} has failed")

    def sleep(self, *_: Any) -> None:
        """For as long as it likes: words do not change."""


@pytest.mark.parametrize(("said", "failed"), [((0, FAILED), 1), ((FAILED, 0), 0), ((FAILED, 7), 0)])
@pytest.mark.parametrize("timeout", [None, timedelta(seconds=5)])
def test_a_failure_is_told_whatever_else_is_awaited(
    said: tuple[int, ...], failed: int, timeout: timedelta | None
) -> None:
    work = SharesUnderWay(Words(*said), (0, 1), 7)
    assert work.is_completed()
    with pytest.raises(RuntimeError, match=f"^{failed} has failed$"):
        work.wait(timeout)


def test_a_wait_for_shares_can_be_repeated() -> None:
    work, done = SharesUnderWay(Words(7, 6), (0, 1), 7), SharesUnderWay(Words(7, 7), (0, 1), 7)
    assert done.is_completed() and not work.is_completed()
    done.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^not done in time$"):
            work.wait(timedelta(milliseconds=1))
