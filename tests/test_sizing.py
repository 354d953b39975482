"""The size of buckets between hosts follows the link, alike on all ranks, where nobody has named one."""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto import DistributedDataParallel as DDP
from stretto import sizing
from stretto.cli.link import Link
from stretto.cli.plan import _cap_for
from stretto.sizing import LEAST, MOST, PROBE_BYTES, AllReduceCost, cost_of
from stretto.specs import describe_parameters
from stretto.testing import DelayTransport, run_ranks, spawn_ranks
from stretto.testing_network import EmulatedHosts
from stretto.transport import LocalTransport
from stretto.wording import MIB

COSTS = st.builds(AllReduceCost, st.floats(0, 1), st.floats(1e3, 1e12))
Caps = tuple[int, int]
"""Of a plan's buckets, and of its last."""
SLOW = (17 * MIB // 16, 17 * MIB // 64)
"""What 110 MB/s need; in the middle of what gives that size, as machines that do much else time it with noise."""


def deep_model() -> torch.nn.Module:
    """16 MB, no parameter larger than 1."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))


def caps_of(sync: Any) -> Caps:
    return sync.plan.cap_bytes, sync.plan.last_cap_bytes


@given(COSTS)
def test_a_size_is_a_power_of_two_and_a_sixteenth(cost: AllReduceCost) -> None:
    power, rest = divmod(16 * cost.bucket_cap_bytes, 17)
    assert rest == 0
    assert LEAST <= power <= MOST
    assert power & (power - 1) == 0


@given(COSTS, COSTS)
def test_sizes_grow_with_the_link_and_with_the_latency(one: AllReduceCost, other: AllReduceCost) -> None:
    low, high = sorted((one.bandwidth, other.bandwidth))
    quick, slow = sorted((one.latency, other.latency))
    assert AllReduceCost(quick, low).bucket_cap_bytes <= AllReduceCost(slow, high).bucket_cap_bytes


def attached(seconds: Callable[[int], float], **options: Any) -> list[tuple[Caps, str, int]]:
    """Caps, hash and how often the link was timed, by rank; the link is that slow on rank 1 alone."""

    def worker(inner: LocalTransport) -> tuple[Caps, str, int]:
        inner.caps_follow_link = True  # type: ignore[attr-defined]
        link = DelayTransport(inner, seconds if inner.rank == 1 else lambda nbytes: 0.0)
        sync = stretto.attach(deep_model(), transport=link, **options)
        return caps_of(sync), sync.plan.hash, link.calls.count(("all_reduce", PROBE_BYTES))

    return run_ranks(worker, 2)


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_all_ranks_follow_the_slowest(caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = attached(lambda nbytes: 0.0), attached(lambda nbytes: nbytes / 110e6)
    for one, other in (fast, slow):
        assert one == other
    assert slow[0][0] == SLOW
    assert fast[0][0][0] > slow[0][0][0]
    assert slow[0][2] == sizing.PROBES

    caplog.set_level(logging.INFO, "stretto")
    attached(lambda nbytes: nbytes / 110e6)
    (told,) = [record.getMessage() for record in caplog.records if "moves" in record.getMessage()]
    assert re.sub(r"moves [\d.]+ MB", "moves N MB", told) == (
        "attach: an all-reduce over local (threads of one process) moves N MB/s, so buckets hold at most 1.1 MB; "
        "to choose: attach(bucket_cap_mb=)"
    )


@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 3}, {"delay": True}, {"init_sync": False}, {"ignore": ["*.weight"]}],
)
def test_nothing_is_timed_where_it_does_not_matter(options: dict[str, Any]) -> None:
    """A size was named, nothing is cut, nothing is to be sent, or the model is small."""
    for caps, _, times in attached(lambda nbytes: 0.0, **options):
        assert times == 0
        assert options != {"bucket_cap_mb": 3} or caps == (3 * MIB, 3 * MIB // 4)


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_defaults_of_torch_change_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ((caps, _, times), _) = attached(lambda nbytes: nbytes / 110e6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (caps, times) == (SLOW, sizing.PROBES)


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_a_last_bucket_that_was_named_stays() -> None:
    for caps, _, times in attached(lambda nbytes: nbytes / 110e6, last_bucket_cap_mb=0.125):
        assert (caps, times) == ((SLOW[0], MIB // 8), sizing.PROBES)


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_a_changed_module_keeps_the_size() -> None:
    def worker(inner: LocalTransport) -> list[tuple[Caps, int]]:
        inner.caps_follow_link = True  # type: ignore[attr-defined]
        link = DelayTransport(inner, lambda nbytes: nbytes / 110e6 if nbytes == PROBE_BYTES else 0.0)
        model = deep_model()
        sync, seen = stretto.attach(model, transport=link), []
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            seen.append((caps_of(sync), sync.plan.buckets[0].indices[0]))
            model[3].requires_grad_(False)
        assert len(sync.plan.parameters) == 30
        return seen

    for seen in run_ranks(worker, 2):
        assert {caps for caps, _ in seen} == {SLOW}


# Over process groups


def sizes_around_join(rank: int) -> list[Caps]:
    sizing.measure_all_reduce = lambda *arguments: AllReduceCost(0.0, 1e9)  # type: ignore[assignment]
    model = DDP(deep_model(), transport="process_group")
    seen = [caps_of(model.synchronizer)]
    with model.join(divide_by_initial_world_size=False):
        seen.append(caps_of(model.synchronizer))
        model(torch.ones(1, 512)).sum().backward()
    return [*seen, caps_of(model.synchronizer)]


@pytest.mark.ranks
def test_join_does_not_forget_it() -> None:
    for seen in spawn_ranks(sizes_around_join, 2):
        assert seen == 3 * [(8 * SLOW[0], 8 * SLOW[1])]


def timed_in_vain(rank: int) -> None:
    if rank == 1:
        sizing._timed = lambda *arguments: 1 / 0  # type: ignore[assignment]
    stretto.attach(deep_model(), transport="process_group")


@pytest.mark.ranks
def test_a_rank_that_fails_meanwhile_is_quoted() -> None:
    with pytest.raises(RuntimeError) as caught:
        spawn_ranks(timed_in_vain, 2)
    assert "PeerError: rank 0, attach: rank 1 failed" in str(caught.value)
    assert "rank 1, attach: ZeroDivisionError: division by zero" in str(caught.value)


def measured(rank: int) -> tuple[Caps, str]:
    sync = stretto.attach(deep_model())
    return caps_of(sync), sync.plan.hash


def caps_measured(hosts: EmulatedHosts, sizes: list[int]) -> int:
    """The median of three attempts: what else runs on this machine can spoil one. All ranks agree in each."""
    found = [hosts.spawn_ranks(measured, sizes) for _ in range(3)]
    assert all(len(set(ranks)) == 1 for ranks in found)
    return statistics.median_low(ranks[0][0][0] for ranks in found)


@pytest.mark.flaky(reruns=2)
@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2]])
def test_slow_links_get_smaller_buckets(sizes: list[int]) -> None:
    try:
        hosts = EmulatedHosts()
    except OSError as error:
        pytest.skip(f"{error}")
    with hosts:
        fast = caps_measured(hosts, sizes)
        hosts.limit("100mbit")
        slow = caps_measured(hosts, sizes)
    assert 4 * slow <= fast


def test_plan_shows_the_size_that_attach_picks_on_a_link_of_high_latency() -> None:
    """attach() cannot tell more bandwidth from its two messages than a quarter of the larger one's time."""
    specs = describe_parameters({"weight": torch.nn.Parameter(torch.zeros(4096, 1024))})
    link = Link(10e9, 5e-3, 2)
    assert _cap_for(specs, link) == cost_of(link.all_reduce(4), link.all_reduce(2**20)).bucket_cap_bytes / 2**20 == 8.5
