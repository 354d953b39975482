"""What is remembered from message to message: views of memory, where it lies, and when it has gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import stretto
from stretto.testing import run_ranks
from stretto.transport import LocalTransport, SharedMemoryTransport, choose, ordinary
from stretto.transport.host import Host
from stretto.transport.memory import LINE_BYTES
from stretto.transport.page import Page, Peer
from stretto.transport.shared_memory import SMALL_BYTES
from stretto.transport.staging import Staging

CPU = torch.device("cpu")


def shared(base: LocalTransport) -> SharedMemoryTransport:
    transport = choose(base, "shared_memory")
    assert isinstance(transport, SharedMemoryTransport)
    return transport


@pytest.mark.parametrize("numel", [3, SMALL_BYTES, 3 * SMALL_BYTES])
def test_what_was_first_used_in_inference_mode_serves_training(numel: int) -> None:
    """A tensor that is made in that mode can be written in no other, and so can a view that changes the dtype."""

    def worker(base: LocalTransport) -> list[float]:
        transport = shared(base)
        found = []

        def all_kinds() -> None:
            inside = transport.allocate(numel, torch.float32, CPU).fill_(1)
            for tensor in (torch.ones(numel), inside):
                transport.all_reduce(tensor).wait()
                transport.broadcast(tensor).wait()
                found.append(tensor[-1].item())

        with torch.inference_mode():
            all_kinds()
        all_kinds()
        return found

    assert run_ranks(worker, 2) == [[2.0] * 4] * 2


def test_memory_begins_at_a_line_of_the_cache_whatever_lies_before_it() -> None:
    """Some kernels round differently where data does not; and another dtype may follow a single byte."""

    def worker(base: LocalTransport) -> set[int]:
        transport = shared(base)
        sizes = [(1, torch.uint8), (3, torch.float64), (5, torch.bfloat16), (7, torch.complex128), (129, torch.uint8)]
        kept = [transport.allocate(numel, dtype, CPU) for numel, dtype in sizes * 2]
        return {one.data_ptr() % LINE_BYTES for one in kept}

    assert run_ranks(worker, 2) == [{0}, {0}]


def test_a_reduction_amid_an_evaluation_does_not_end_the_training() -> None:
    def worker(base: LocalTransport) -> torch.Tensor:
        transport = shared(base)
        torch.manual_seed(0)
        model = torch.nn.Linear(90, 90)
        with torch.inference_mode():
            loss = torch.tensor([1.0 + transport.rank])
            stretto.reduce([loss], transport=transport)
            assert loss == 1.5
        sync = stretto.attach(model, transport=transport)
        for _ in range(2):
            model(torch.full((2, 90), 1.0 + transport.rank)).sum().backward()
            with torch.inference_mode():
                sync.check()
        return model.weight.grad

    first, second = run_ranks(worker, 2)
    assert torch.equal(first, second) and first[0, 0] == 6.0


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are late now and then take staging memory in another order each time."""
    monkeypatch.setattr(ordinary, "MOST_ROUTES", 30)

    def worker(base: LocalTransport) -> list[int]:
        transport, chance = shared(base), random.Random(base.rank)
        counts = []
        for turn in range(12):
            tensors = [torch.full((5,), float(turn + n)) for n in range(25)]
            works = []
            for tensor in tensors:
                works.append(transport.all_reduce(tensor))
                if chance.random() < 0.2:
                    time.sleep(0.0005)
            for work in works:
                work.wait()
            assert [tensor[4].item() for tensor in tensors] == [3.0 * (turn + n) for n in range(25)]
            counts.append(len(transport.host.routes))
        return counts

    for counts in run_ranks(worker, 3):
        assert 0 < max(counts) <= 30


def test_views_of_staging_memory_that_was_never_given_back_are_not_those_of_other_memory() -> None:
    """Ctrl-C between taking memory and posting the message loses it; a tensor made later can have its ``id``."""

    def worker(base: LocalTransport) -> bool:
        host = shared(base).host
        staging, like = Staging(host), torch.ones(16)
        places = []
        for _ in range(50):
            memory = staging.take(64)
            places.append(memory.data_ptr() == staging.view(memory, like).data_ptr())
            del memory
        return all(places)

    assert run_ranks(worker, 1) == [True]


class ByAll:
    """A message of nothing, over when all have done their part."""

    action, numel, tensor, root, by_all = b"nothing", 0, None, None, True

    def begin(self, entries: Sequence[bytes]) -> Any:
        return None

    def end(self) -> None:
        pass

    def release(self) -> None:
        pass


class Elsewhere(ByAll):
    """One of rank 0 that goes on outside the host until it is told to end."""

    root, by_all = 0, False

    def __init__(self) -> None:
        self.told = threading.Event()
        self.limits: list[float] = []
        self.slept = threading.Event()

    def begin(self, entries: Sequence[bytes]) -> Any:
        return self

    def is_completed(self) -> bool:
        return self.told.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is not None:
            self.limits.append(limit.total_seconds())
            self.slept.set()
        if not self.told.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("not done")


def test_a_message_that_lacks_a_peer_does_not_sleep_on_a_later_one_between_hosts() -> None:
    later = Elsewhere()
    published = threading.Event()

    def worker(base: LocalTransport) -> None:
        transport = shared(base)
        host: Host = transport.host
        if base.rank == 0:
            assert published.wait(20)
        first = host.post(ByAll())
        if base.rank == 1:
            published.set()
            assert later.slept.wait(20)
            first.wait()
        else:
            second = host.post(later)
            first.wait()
            assert later.limits and max(later.limits) <= 0.002
            later.told.set()
            second.wait()

    run_ranks(worker, 2)


def test_a_reason_that_is_seen_in_part_is_no_reason_yet() -> None:
    """Its cache lines may arrive in any order, the end before the middle."""
    page = Page(0)
    peer = Peer(0, page.address)
    page.say_broken("left\0 " + "a" * 300)
    whole = page.mapping[:]
    assert peer.reason() == "left  " + "a" * 300
    at = whole.index(b"left")
    for low, high in [(0, 4), (100, 200), (300, 307)]:
        page.mapping[at + low : at + high] = bytes(high - low)
        assert peer.reason() == ""
        page.mapping[:] = whole
    page.say_broken("another")
    assert peer.reason().startswith("left")


def test_a_reason_may_hold_what_cannot_be_encoded() -> None:
    page = Page(0)
    page.say_broken("caf\udce9")
    assert Peer(0, page.address).reason() == "caf?"


def test_a_reason_that_is_longer_than_its_place_is_cut() -> None:
    page = Page(0)
    page.say_broken("ö" * 5000)
    assert set(Peer(0, page.address).reason()) == {"ö"}
