"""What is sent, counted: how many messages, how many bytes, and when none."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, batch, build, gradients, loss, same_bits
from torch import nn

import stretto
from stretto.broadcast import MESSAGE_BYTES, broadcast_coalesced
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.transport import ProcessGroupTransport
from stretto.words import LENGTH

KB = 1 / 1024


def recorded(worker, models, world=2):
    """``worker(model, transport)`` on each rank, with a transport that writes down what it is asked."""
    return run_ranks(lambda inner: worker(models[inner.rank], RecordingTransport(inner)), world)


def kinds(calls):
    return [kind for kind, _ in calls]


ODD_TENSORS = [
    lambda: torch.tensor(True),
    lambda: torch.arange(3, dtype=torch.int8),
    lambda: torch.arange(5, dtype=torch.int64),
    lambda: torch.arange(5, dtype=torch.bfloat16),
    lambda: torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    lambda: torch.randn(3, dtype=torch.complex128),
    lambda: torch.randn(3, dtype=torch.complex64).conj(),
    lambda: torch.randn(4, 3, dtype=torch.float64).t(),
    lambda: torch.empty(0, 2),
]
"""Sizes of elements from 1 to 16 bytes, strides of all kinds, a conjugate that has not been written out."""


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def steady_pass(name, transport, model=None):
    """The calls of the third pass, and what it may send at most."""
    model = model or build(name)
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
    for step in range(2):
        model.zero_grad()
        loss(model, batch(name, transport.rank, step)).backward()
    model.zero_grad()
    before = sync.statistics
    transport.calls.clear()
    value = loss(model, batch(name, transport.rank, 2))
    forward, transport.calls = transport.calls, []
    value.backward()
    sent = sync.statistics.buckets - before.buckets, sync.statistics.payload_bytes - before.payload_bytes
    return forward, transport.calls, sync.plan, sent


def check_steady_pass(name, forward, calls, plan, sent):
    assert forward == []
    buffers = list(build(name).buffers())
    reduced = [size for kind, size in calls if kind == "all_reduce"]
    assert len(reduced) == len(plan.buckets)
    for number, size in enumerate(reduced):
        words = len(plan.buckets[number].indices)
        words += LENGTH * (number == len(plan.buckets) - 1)
        assert size == plan.bucket_bytes(number) + words * plan.buckets[number].dtype.itemsize
    broadcasts = [size for kind, size in calls if kind == "broadcast"]
    assert len(broadcasts) == bool(buffers), "dtypes travel together"
    assert sum(broadcasts) == nbytes(buffers)
    assert len(calls) == len(reduced) + len(broadcasts)
    assert sent == (len(plan.buckets), sum(plan.bucket_bytes(number) for number in range(len(plan.buckets))))


@pytest.mark.parametrize("name", MODELS)
def test_steady_pass_sends_buckets_and_buffers_only(name):
    models = [build(name) for _ in range(2)]
    for result in recorded(lambda model, transport: steady_pass(name, transport, model), models):
        check_steady_pass(name, *result)


def steady_process(rank):
    return {name: steady_pass(name, RecordingTransport(ProcessGroupTransport())) for name in MODELS}


@pytest.mark.ranks
def test_steady_pass_over_gloo():
    for results in spawn_ranks(steady_process, 2):
        for name, result in results.items():
            check_steady_pass(name, *result)


def test_first_pass_sends_the_order_once_more():
    models = [build("scrambled") for _ in range(2)]

    def worker(model, transport):
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        buckets = len(sync.plan.buckets)
        transport.calls.clear()
        loss(model, batch("scrambled", transport.rank)).backward()
        return buckets, transport.calls

    for buckets, calls in recorded(worker, models):
        assert kinds(calls) == ["all_reduce"] * buckets + ["broadcast"]
        assert calls[-1][1] == 8 * len(list(models[0].parameters()))


def test_a_turn_of_another_rank_than_0_sends_nothing():
    """Rank 0's order is the one that counts, so there is nothing to tell."""
    models = [build("scrambled") for _ in range(2)]

    def worker(model, transport):
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        for step in range(6):
            transport.calls.clear()
            if step == 3 and transport.rank == 1:
                model.execution.reverse()
            model.zero_grad()
            loss(model, batch("scrambled", transport.rank, step)).backward()
            if step:
                assert kinds(transport.calls) == ["all_reduce"] * len(sync.plan.buckets), f"step {step}"

    recorded(worker, models)


def test_nothing_is_sent_without_a_synchronised_backward():
    models = [build("cnn") for _ in range(2)]

    def worker(model, transport):
        sync = stretto.attach(model, transport=transport)
        loss(model, batch("cnn", transport.rank)).backward()
        transport.calls.clear()
        for step in range(3):
            with sync.no_sync():
                loss(model, batch("cnn", transport.rank, step)).backward()
        model(batch("cnn", transport.rank)[0])
        model.eval()
        model(batch("cnn", transport.rank)[0])
        with torch.no_grad():
            loss(model, batch("cnn", transport.rank))
        with torch.inference_mode():
            model(batch("cnn", transport.rank)[0])
        model.state_dict()
        sync.describe()
        sync.detach()
        loss(model.train(), batch("cnn", transport.rank)).backward()
        return transport.calls

    assert recorded(worker, models) == [[], []]


def test_one_rank_may_evaluate_alone():
    models = [build("cnn") for _ in range(2)]

    def worker(model, transport):
        stretto.attach(model, transport=transport)
        for step in range(3):
            model.train().zero_grad()
            loss(model, batch("cnn", transport.rank, step)).backward()
            if transport.rank == 0:
                loss(model.eval(), batch("cnn", 0))
        return gradients(model)

    assert not same_bits(*recorded(worker, models))


@pytest.mark.parametrize("name", MODELS)
def test_attaching_sends_state_in_one_message(name):
    models = [build(name, seed=rank) for rank in range(2)]

    def worker(model, transport):
        stretto.attach(model, transport=transport)
        return transport.calls

    tensors = [*models[0].parameters(), *models[0].buffers()]
    for calls in recorded(worker, models):
        sent = [size for kind, size in calls if kind == "broadcast"]
        assert sent == [nbytes(tensors)]
        assert kinds(calls).count("all_reduce") == 2  # how long what ranks hold is, and what they hold
        assert len(calls) == len(sent) + 2


@settings(deadline=None)
@given(st.lists(st.sampled_from(range(len(ODD_TENSORS))), max_size=12))
def test_whatever_is_sent_arrives_to_the_bit(chosen):
    def worker(transport):
        tensors = [ODD_TENSORS[index]() for index in chosen]
        if transport.rank:
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        broadcast_coalesced(tensors, transport, lambda work, what: work.wait())
        return tensors

    with mock.patch("stretto.broadcast.MESSAGE_BYTES", 40):
        sent, received = run_ranks(worker, 2)
    for one, other in zip(sent, received, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride() and one.dtype == other.dtype


def test_attaching_cuts_large_state_into_messages_of_10_mb():
    models = [nn.ParameterList(torch.empty(500, 500) for _ in range(25)) for _ in range(2)]  # a megabyte each

    def worker(model, transport):
        stretto.attach(model, transport=transport)
        return [size for kind, size in transport.calls if kind == "broadcast"]

    for sent in recorded(worker, models):
        assert sent == [10_000_000, 10_000_000, 5_000_000]
        assert max(sent) <= MESSAGE_BYTES


def test_no_more_than_two_of_the_messages_are_in_memory_at_a_time():
    """A model that fills half of the memory could not be attached otherwise."""

    def worker(inner):
        said, tensors = [], [torch.full((10,), float(number)) for number in range(5)]
        transport = RecordingTransport(inner)

        def wait(work, what):
            work.wait()
            said.append(kinds(transport.calls).count("broadcast") - len(said))

        broadcast_coalesced(tensors, transport, wait)
        return said

    with mock.patch("stretto.broadcast.MESSAGE_BYTES", 40):
        assert run_ranks(worker, 2) == [[2, 2, 2, 2, 1]] * 2


def test_attaching_with_init_sync_off_sends_nothing():
    models = [build("cnn") for _ in range(2)]

    def worker(model, transport):
        stretto.attach(model, transport=transport, init_sync=False)
        return transport.calls

    assert recorded(worker, models) == [[], []]


def test_buffers_none_keeps_buffers_at_home():
    models = [build("cnn") for _ in range(2)]

    def worker(model, transport):
        sync = stretto.attach(model, transport=transport, buffers="none")
        for step in range(2):
            transport.calls.clear()
            loss(model, batch("cnn", transport.rank, step)).backward()
        return kinds(transport.calls), len(sync.plan.buckets)

    for calls, buckets in recorded(worker, models):
        assert calls == ["all_reduce"] * buckets
    assert not torch.equal(models[0][1].running_mean, models[1][1].running_mean)


# Observers


class Raises:
    def __init__(self, event):
        self.calls = 0
        setattr(self, event, self.fail)

    def fail(self, *values):
        self.calls += 1
        raise ZeroDivisionError("an observer's own mistake")


class Counts:
    def __init__(self):
        self.seen = []

    def pass_started(self, pass_number):
        self.seen.append(("started", pass_number))

    def pass_settled(self, pass_number):
        self.seen.append(("settled", pass_number))


EVENTS = "pass_started gradient_ready bucket_full bucket_launched bucket_reduced buffers_sent pass_settled plan_changed"


@pytest.mark.parametrize("event", EVENTS.split())
def test_observer_that_raises_is_dropped_and_training_goes_on(event, caplog):
    name = "cnn" if event == "buffers_sent" else "scrambled"
    models = [build(name) for _ in range(2)]
    bare = [build(name) for _ in range(2)]

    def train(model, transport, observers):
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=KB)
        for observer in observers:
            sync.observe(observer)
        for step in range(3):
            model.zero_grad()
            loss(model, batch(name, transport.rank, step)).backward()
        return gradients(model)

    bad, good = Raises(event), [Counts(), Counts()]
    watched = recorded(
        lambda model, transport: train(model, transport, [bad, good[0]] if transport.rank == 0 else [good[1]]), models
    )
    unwatched = recorded(lambda model, transport: train(model, transport, []), bare)
    for one, other in zip(watched, unwatched, strict=True):
        assert not same_bits(one, other)
    assert bad.calls == 1
    for counts in good:
        assert counts.seen == [(what, number) for number in (1, 2, 3) for what in ("started", "settled")]
    told = [record for record in caplog.records if record.name == "stretto"]
    assert len(told) == 1 and "removed" in told[0].getMessage() and told[0].exc_info[0] is ZeroDivisionError


def test_observer_can_leave():
    models = [build("mlp") for _ in range(2)]

    def worker(model, transport):
        sync, counts = stretto.attach(model, transport=transport), Counts()
        sync.observe(counts)
        loss(model, batch("mlp", transport.rank)).backward()
        sync.stop_observing(counts)
        sync.stop_observing(counts)
        loss(model, batch("mlp", transport.rank)).backward()
        return counts.seen

    assert recorded(worker, models) == [[("started", 1), ("settled", 1)]] * 2
