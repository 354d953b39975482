"""Shares between hosts of several ranks each: they travel while all go on, whatever the other ranks of a host do."""

from __future__ import annotations

import array
import gc
import os
import re
import signal
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm_programs
from test_hierarchical import loopback
from test_shard import CARRIERS, assert_alike, assert_same, pair, train

import stretto
from stretto.testing import spawn_ranks
from stretto.testing_network import SeparateHosts
from stretto.transport import ProcessGroupTransport, choose, exchange
from stretto.transport.base import done_within
from stretto.transport.counterparts import Counterparts
from stretto.transport.courier import Courier, Incoming
from stretto.transport.exchange import Exchange
from stretto.transport.futex import Futex
from stretto.transport.hierarchical import HierarchicalTransport
from stretto.transport.life import Life
from stretto.transport.spreading import _FAILED as FAILED
from stretto.transport.spreading import SharesUnderWay, Spreading, Words
from stretto.transport.under_way import UnderWay

__all__ = ["loopback"]  # a fixture
pytestmark = pytest.mark.timeout(60)
HOSTS = (2, 2)


class SimpleGroup:
    """What can be held weakly, in the place of a process group."""


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
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *limit: Any) -> None:
        self._work.wait(*limit)
        raise RuntimeError("Connection reset by peer")


def test_what_never_comes_is_told_on_every_rank_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's message fails while it does something else; rank 1 has its own part, and must not wait for rank 0's."""
    spread, breaks = Counterparts.spread, threading.Event()
    sent: list[list[Exchange]] = [[] for _ in range(4)]

    def spread_or_break(self: Counterparts, *args: Any) -> Exchange:
        exchange = spread(self, *args)
        sent[self._rank].append(exchange)
        broken = breaks.is_set() and self._rank == 0
        return replace(exchange, works=[*map(Broken, exchange.works)]) if broken else exchange

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
        "the exchange of rank 0 with {1}\n"
    )
    spoiled = "rank {0}, shard: a step of this optimizer has failed, so the model may be stepped in part.\n"
    spoiled += "Start again from the last checkpoint."
    first, second, *others = on_hosts(worker, sum(HOSTS))
    own = failed.format(0, "rank 2 of another host has failed: Connection reset by peer")
    other = failed.format(1, "other hosts has failed")
    assert first[0].startswith(own) or other in first[0]
    assert second[0].startswith(other) or own in second[0]
    assert [first[1], second[1]] == [spoiled.format(0), spoiled.format(1)]
    assert others == [[], []]


def words(*said: int, problem: str | None = None) -> SharesUnderWay:
    """Of ranks 4 and 5; 7 would say that it is there."""
    page = memoryview(array.array("I", said))
    found = Words(page, Futex())
    if problem is not None:
        found.sayer(0, 7)(ValueError(problem))
    return SharesUnderWay(found, {0: 4, 1: 5}, 7, Courier([], 1.0), "rank 9 of another host")


@pytest.mark.parametrize(("said", "failed"), [((0, FAILED), 5), ((FAILED, 0), 4), ((FAILED, 7), 4)])
@pytest.mark.parametrize("timeout", [None, timedelta(seconds=5)])
def test_a_failure_is_told_whatever_else_is_awaited(
    said: tuple[int, ...], failed: int, timeout: timedelta | None
) -> None:
    work = words(*said)
    assert work.is_completed()
    with pytest.raises(RuntimeError) as caught:
        work.wait(timeout)
    assert str(caught.value) == f"the exchange of rank {failed} with other hosts has failed"


def test_the_cause_is_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        words(0, 0, problem="no way").wait()
    assert str(caught.value) == "the exchange of rank 4 with rank 9 of another host has failed: no way"


def test_the_cause_of_one_rank_is_not_told_of_another() -> None:
    found = Words(memoryview(array.array("I", (FAILED, 0))), Futex())
    found.sayer(1, 7)(ValueError("no way"))
    with pytest.raises(RuntimeError) as caught:
        SharesUnderWay(found, {0: 4, 1: 5}, 7, Courier([], 1.0), "rank 9 of another host").wait()
    assert str(caught.value) == "the exchange of rank 5 with rank 9 of another host has failed: no way"


def test_a_wait_for_shares_can_be_repeated() -> None:
    work, done = words(7, 6), words(7, 7)
    assert done.is_completed() and not work.is_completed()
    done.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(milliseconds=1))
        assert str(caught.value) == "not done in time"


class Never:
    """Work of a group that is not under way, and never done."""

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        raise RuntimeError("Operation timed out!")


def test_what_is_in_doubt_keeps_no_program_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that somebody has stopped waiting for are given up together; the rest would have a minute each."""
    monkeypatch.setattr("stretto.transport.courier.DOUBT_SECONDS", 0.2)
    courier, said = Courier([object()], 1000.0), list[str]()
    for _ in range(50):
        exchange = Exchange([Never()], [])
        courier.take(Incoming(exchange, torch.empty(0), [], lambda problem: said.append(str(problem))))
    courier.doubt()
    courier.close()
    assert said == ["nothing came within 0 s"] * 50
    courier.close()


def test_whoever_stops_waiting_says_so() -> None:
    """By the work that was waited for, by the transport that was told to abandon it, or for a whole round."""
    told: list[str] = []
    courier = SimpleNamespace(doubt=lambda: told.append("doubt"))
    team = SimpleNamespace(counterparts=SimpleNamespace(courier=courier))
    work = SharesUnderWay(words(7, 6)._words, {0: 4, 1: 5}, 7, courier, "rank 9 of another host")
    work.doubt()
    HierarchicalTransport.abandon(SimpleNamespace(_team=team), work, "", "")
    Spreading.doubt(SimpleNamespace(_team=team))
    assert told == ["doubt"] * 3


def test_a_message_has_as_long_as_a_collective() -> None:
    courier, said = Courier([object()], 0.1), list[str]()
    courier.take(Incoming(Exchange([Never()], []), torch.empty(0), [], lambda problem: said.append(str(problem))))
    courier.close()
    assert said == ["nothing came within 0 s"]


def test_a_message_may_be_sent_while_others_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of what is under way is freed; the rank sends from its own thread."""
    kept = list[object]()
    monkeypatch.setattr("stretto.transport.courier.never_free", kept.append)
    group, exchange, said = object(), Exchange([Never()], []), list[str]()
    message = Incoming(exchange, torch.empty(0), [], lambda problem: said.append(str(problem)))
    courier, sending = Courier([group], 0.1), list[threading.Thread]()

    class Messages(deque[Incoming]):
        def __iter__(self) -> Any:
            for one in super().__iter__():
                if not sending:
                    thread = threading.Thread(target=courier.take, args=(message,))
                    thread.start()
                    sending.append(thread)
                    thread.join(0.2)
                yield one

    courier._messages = Messages()
    courier.take(message)
    while not sending:
        time.sleep(0.01)
    sending[0].join()
    courier.close()
    assert kept[:2] == [group, exchange] and len(said) == 2
    assert all(re.fullmatch(r"nothing came within \d s", one) for one in said)


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    courier, said = Courier([], 1000.0), list[object]()
    message = Incoming(Exchange([], []), torch.empty(0), [], said.append)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        patch.setattr(threading.Thread, "start", refuse)
        courier.take(message)
    courier.close()
    courier.take(message)
    courier.close()
    assert said == [None]


# Processes, which end as programs do, with messages under way

PROGRAM = """
import gc, os, signal, sys, threading, time, warnings
import torch
import torch.distributed as dist
import stretto
from stretto.testing_network import SeparateHosts
from stretto.transport import ProcessGroupTransport, choose, exchange
from stretto.transport.base import done_within
from stretto.transport.counterparts import Counterparts

mode, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
send, slow = Counterparts.spread, []


def spread(self, *args):
    if slow and rank > 1:
        time.sleep(0.3)  # each of some messages
    return send(self, *args)


Counterparts.spread = spread


def total(model):
    return float(sum(one.detach().double().sum() for one in model.parameters()))


def tell():
    os.write(1, f"whole {total(model)}\\n".encode())  # in one piece


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    transport = choose(SeparateHosts(ProcessGroupTransport(), [2, 2]), "auto")
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.02, last_bucket_cap_mb=0.01)
    optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
    for _ in range(2):
        step(model, optimizer)
    model.state_dict()
    dist.barrier()
    slow.append(True)
    if mode == "killed" and rank == 3:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step(model, optimizer)
    return model, sync, optimizer


kept = build()
if mode == "dropped":
    del kept
    for _ in range(4):
        gc.collect()
    sys.exit()
model, sync, optimizer = kept
if mode == "ctrl-c" and rank == 0:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        print("read", total(model))
    except KeyboardInterrupt:
        os.write(1, b"stopped\\n")
if mode == "forks":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own from 3.12 on, of a fork beside threads
if mode == "forks" and not (child := os.fork()):
    tell()
    os._exit(0)
if mode == "ends" and not rank:
    sys.exit()
tell()
if mode == "forks":
    os.waitpid(child, 0)
"""


def program(mode: str, folder: Path) -> list[tuple[int, list[str], str]]:
    """What each of four ranks on two pretended hosts returned, printed and complained of."""
    ranks = [warm_programs.start(["-c", PROGRAM, mode, rank, folder], to_the_end=True) for rank in range(4)]
    try:
        told = [rank.communicate(timeout=45) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.wait(), out.splitlines(), err) for rank, (out, err) in zip(ranks, told, strict=True)]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["ctrl-c", "forks", "dropped", "ends"])
def test_programs_go_on_and_end_with_shares_under_way(tmp_path: Path, mode: str) -> None:
    """Whoever stops waiting can read again, as the others of its host; a child has a whole model; exits are silent."""
    found = program(mode, tmp_path)
    assert [(code, err) for code, _, err in found] == [(0, "")] * 4
    lines = [line for _, out, _ in found for line in out]
    assert lines.count("stopped") == (mode == "ctrl-c")
    values = {line for line in lines if line.startswith("whole")}
    assert len(values) == (mode != "dropped")
    assert sum(line in values for line in lines) == {"ctrl-c": 4, "forks": 8, "dropped": 0, "ends": 3}[mode]


@pytest.mark.ranks
def test_survivors_with_shares_under_way_end_by_their_exception(tmp_path: Path) -> None:
    found = program("killed", tmp_path)
    assert [code for code, *_ in found] == [1, 1, 1, -signal.SIGKILL]
    for _, out, complaints in found[:3]:
        assert out == []
        assert "terminate called" not in complaints, complaints
        assert re.search(r"stretto\.errors\.PeerError: rank \d, pass 3: ", complaints), complaints


def end_first(rank: int, slow: float) -> float:
    """Rank 1 returns at once, and so says that it has ended, before what is under way to it has come."""
    spread = Counterparts.spread

    def late(self: Counterparts, *args: Any) -> Exchange:
        if rank > 1 and slow:
            time.sleep(slow)
        return spread(self, *args)

    Counterparts.spread = late  # type: ignore[method-assign]
    transport = choose(SeparateHosts(ProcessGroupTransport(), [2, 2]), "auto")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sync = stretto.attach(model, transport=transport)
    sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
    model(torch.ones(2, 64)).sum().backward()
    sharded.step()
    return 0.0 if rank == 1 else float(model.weight.double().sum() + model.bias.double().sum())


@pytest.mark.ranks
def test_a_rank_that_has_ended_in_peace_still_passes_on_what_comes() -> None:
    first, _, *others = spawn_ranks(end_first, 4, 3.0)
    assert others == [first, first]


class PieceUnderWay:
    def is_completed(self) -> bool:
        return False

    def wait(self, *limit: Any) -> None:
        raise RuntimeError("not done in time")


class FailedPiece(PieceUnderWay):
    def is_completed(self) -> bool:
        return True

    def wait(self, *limit: Any) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("first", [FailedPiece, PieceUnderWay])
def test_a_piece_that_fails_is_no_piece_that_takes_its_time(first: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind it may never end, and is not waited for."""
    pieces = iter([first(), PieceUnderWay(), PieceUnderWay(), PieceUnderWay()])
    monkeypatch.setattr(exchange, "all_to_all", lambda *_: next(pieces))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    share = exchange.ShareSum(group, torch.zeros(2 * 400_000), 2 * 400_000)
    if first is FailedPiece:
        with pytest.raises(RuntimeError, match="Connection reset by peer"):
            done_within(share, timedelta(seconds=0.1))
    else:
        assert not done_within(share, timedelta(seconds=0.1))


def test_a_sum_of_shares_without_memory_for_a_later_piece_has_sent_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank gave the pass up and sent the first piece again: Gloo ended the program."""
    sent, joined = list[object](), iter([torch.zeros(1)])

    def no_room(_: object) -> torch.Tensor:
        if (one := next(joined, None)) is None:
            raise MemoryError
        return one

    monkeypatch.setattr(exchange, "all_to_all", lambda *message: sent.append(message))
    monkeypatch.setattr(exchange, "_joined", no_room)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(MemoryError):
        exchange.ShareSum(group, torch.zeros(2 * 400_000), 2 * 400_000)
    assert not sent


def test_shares_that_ctrl_c_leaves_under_way_are_never_freed() -> None:
    """A thread of Gloo that lets go of them last would ask for the lock of an interpreter that ends."""

    class Work:
        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta | None = None) -> None:
            raise KeyboardInterrupt

    group = SimpleGroup()
    under_way = UnderWay(weakref.ref(group), rank=0, patience=1.0)
    kept = [weakref.ref(group), weakref.ref(under_way.add(Work()))]
    with pytest.raises(KeyboardInterrupt):
        under_way.let_arrive()
    del under_way, group
    gc.collect()
    assert None not in [one() for one in kept]


def test_two_threads_may_ask_at_once_whether_a_rank_lives() -> None:
    """Python refuses a second poll of one object: "concurrent poll() invocation"."""
    life, found, begin = Life(os.getpid()), [], threading.Barrier(2)

    def ask() -> None:
        begin.wait()
        found.append({life.is_over() for _ in range(20_000)})

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{False}, {False}]
