"""Streams of an accelerator, without one: they write down who waits for whom. tests/test_cuda.py has real ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from stretto.arrivals import Arrivals
from stretto.bucket import Bucket
from stretto.plan import plan_buckets
from stretto.scaling import Scaling
from stretto.schedule import CHUNK_ARRIVALS, CHUNK_BYTES, Chunk, schedule
from stretto.specs import describe_parameters
from stretto.streams import Streams
from stretto.transport.local import LocalGroup


class FakeStream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} behind {other.name}")


class FakeParameter:
    def __init__(self, device: int) -> None:
        self.device = torch.device("cpu") if device < 0 else torch.device("cuda", device)

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


class Accelerator:
    """What is current on each device is set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.current: dict[int, FakeStream] = {}
        device = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda one: self.current[one])
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda one: id(self.current[one]), raising=False)

    def stream(self, name: str) -> FakeStream:
        return FakeStream(name, self.said)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch)


def noting(devices: list[int]) -> tuple[Streams, Callable[..., None], list[object]]:
    arrived: list[object] = []
    streams = Streams(FakeParameter(one).device for one in devices)
    return streams, streams.noting(arrived.append), arrived  # type: ignore[arg-type]


def test_on_one_stream_nobody_waits(accelerator: Accelerator) -> None:
    streams, hook, arrived = noting([0, 0])
    accelerator.current[0] = accelerator.stream("main")
    for _ in range(3):
        hook(FakeParameter(0))
    streams.join()
    streams.part()
    assert len(arrived) == 3 and accelerator.said == [] and not streams.differ


def test_what_is_read_comes_behind_all_streams_and_they_go_on_behind_that(accelerator: Accelerator) -> None:
    streams, hook, _ = noting([0])
    for name in ("left", "right", "third"):
        accelerator.current[0] = accelerator.stream(name)
        hook(FakeParameter(0))
    streams.join()
    streams.part()
    assert accelerator.said == ["third behind left", "third behind right", "left behind third", "right behind third"]
    streams.end()
    accelerator.said.clear()
    hook(FakeParameter(0))
    streams.join()
    assert accelerator.said == [] and not streams.differ


def test_the_thread_of_another_device_has_streams_of_its_own(accelerator: Accelerator) -> None:
    """A bucket of one device may be sent by the thread of the other, or of the host."""
    for devices in ([0, 1], [-1, 0]):
        streams, hook, arrived = noting(devices)
        for device in devices:
            accelerator.current[device] = accelerator.stream(f"arrival {device}")
            hook(FakeParameter(device))
        accelerator.current[0] = accelerator.stream("other thread")
        accelerator.said.clear()
        streams.join()
        assert accelerator.said == ["other thread behind arrival 0"] and len(arrived) == 2


def test_where_no_parameter_is_on_an_accelerator_a_hook_stays_the_append_of_a_list(accelerator: Accelerator) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    arrivals = Arrivals(parameters, object(), lambda one: None, lambda one: None)
    assert arrivals.append == arrivals.order.append
    arrivals.streams.join()
    assert not arrivals.streams.differ


def chunks(device: str) -> list[Chunk]:
    """Of two buckets, each of more bytes and arrivals than a chunk has."""
    count, numel = CHUNK_ARRIVALS + 2, CHUNK_BYTES // 4 // 8
    parameters = [torch.nn.Parameter(torch.empty(numel, device=device)) for _ in range(2 * count)]
    specs = describe_parameters({str(number): one for number, one in enumerate(parameters)})
    nbytes = count * numel * 4
    plan = plan_buckets(specs, range(2 * count), cap_bytes=nbytes, last_cap_bytes=nbytes)
    transport = LocalGroup(1).transport(0)
    references = [weakref.ref(one) for one in parameters]
    made = [Bucket(plan, one, references, torch.device(device), transport, Scaling(1)) for one in range(2)]
    home = {index: bucket for bucket in made for index in bucket.indices}
    order = [*range(2 * count)]
    return schedule(order, [id(one) for one in parameters], [home[index] for index in order])


def test_on_an_accelerator_a_bucket_is_taken_at_once() -> None:
    """A copy is a kernel there, and no cache of the host's holds what has just arrived."""
    assert len(chunks("cpu")) > 20
    assert [len(one.full) for one in chunks("meta")] == [1, 1]
