"""Traces on disk: written pass by pass, read whole or cut off, refused with one line."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.clocks import Clock
from stretto.testing import run_ranks, spawn_ranks
from stretto.trace import RankTrace, TraceError, TraceWriter, header_of, read_trace


def train(transport: Any, folder: Path, passes: int = 3) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-4)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    with sync.trace(folder):
        for _ in range(passes):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    model(torch.randn(3, 4)).sum().backward()


def test_a_trace_has_every_pass_inside_and_no_other(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path / "new" / "folder"), 3)
    traces = read_trace(tmp_path / "new" / "folder")
    assert [one.rank for one in traces] == [0, 1, 2]
    for trace in traces:
        assert (trace.world_size, trace.host, trace.pid) == (3, platform.node(), os.getpid())
        assert trace.transport == "local (threads of one process)"
        assert trace.clock == Clock(0, 0) and trace.at(5) == 5
        assert trace.end == "closed" and trace.versions["torch"] == torch.__version__
        assert [one.number for one in trace.passes] == [3, 4, 5]
        for one in trace.passes:
            assert one.began <= one.forwards[0].begin < one.forwards[0].end <= one.started
            assert one.started <= one.backward_ended <= one.settled
            names = [name for name, _ in one.gradients]
            assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight"]
            assert [at for _, at in one.gradients] == sorted(at for _, at in one.gradients)
            assert [launch.bucket for launch in one.launches] == [*range(len(trace.plans[one.plan].buckets))]
            for launch in one.launches:
                assert launch.full is not None
                assert launch.full <= launch.begin <= launch.handed_over <= launch.end <= launch.seen <= one.settled
            assert one.buffers is not None and one.backward_ended <= one.buffers <= one.settled
        assert [len(one.optimizer) for one in trace.passes] == [0, 1, 1], "a step belongs to the pass after it"


def test_an_exception_closes_the_trace_and_goes_on(tmp_path: Path) -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        with pytest.raises(KeyError, match="nowhere"), sync.trace(tmp_path):
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError("nowhere")
        model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    for trace in read_trace(tmp_path):
        assert trace.end == "KeyError: 'nowhere'"
        assert len(trace.passes) == 1


def killed(rank: int, folder: str) -> None:
    model = torch.nn.Linear(2, 1)
    sync = stretto.attach(model)
    with sync.trace(folder):
        for number in range(1, 6):
            if rank == 1 and number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 2)).sum().backward()


@pytest.mark.ranks
def test_a_rank_that_is_killed_leaves_the_passes_that_settled(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="PeerError"):
        spawn_ranks(killed, 2, str(tmp_path))
    survivor, victim = read_trace(tmp_path)
    assert [one.number for one in victim.passes] == [one.number for one in survivor.passes] == [1, 2, 3]
    assert victim.end is None
    assert survivor.end is not None and survivor.end.startswith("PeerError: rank 0, pass 4: ")


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()

    real = TraceWriter._write

    def full(self: TraceWriter, value: dict[str, Any]) -> None:
        if value.get("pass", {}).get("number") == 2:
            raise OSError(28, "No space left on device")
        real(self, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "_write", full)
        run_ranks(worker, 2)
    for trace in read_trace(tmp_path):
        assert [one.number for one in trace.passes] == [1]
        assert trace.end == "OSError: [Errno 28] No space left on device"
    assert any("raised and was dropped; training goes on." in one.getMessage() for one in caplog.records)


def test_a_disk_that_stays_full_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    real, full = TraceWriter._write, threading.Event()

    def write(self: TraceWriter, value: dict[str, Any]) -> None:
        if full.is_set() or value.get("pass", {}).get("number") == 2:
            full.set()
            raise OSError(28, "No space left on device")
        real(self, value)

    def worker(transport: Any) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
            transport.all_gather_object(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "_write", write)
        run_ranks(worker, 2)
    assert [trace.end for trace in read_trace(tmp_path)] == [None, None]
    said = [one.getMessage() for one in caplog.records if "ends early" in one.getMessage()]
    assert (
        f"the trace in {tmp_path / 'rank0.jsonl'} ends early: OSError: [Errno 28] No space left on device" in said
        or f"the trace in {tmp_path / 'rank0.jsonl'} ends early: closed" in said
    )


def test_a_disk_that_is_full_at_the_beginning_is_an_error_on_all(tmp_path: Path) -> None:
    def worker(transport: Any) -> str:
        sync = stretto.attach(torch.nn.Linear(2, 1), transport=transport)
        if transport.rank == 1:
            (tmp_path / "one").mkdir()
            os.symlink("/dev/full", tmp_path / "one" / "rank1.jsonl")
        with pytest.raises(TraceError) as caught, sync.trace(tmp_path / ("one" if transport.rank else "zero")):
            raise AssertionError("it does not begin")
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.tracing.set_aside", lambda *_: None)
        told = run_ranks(worker, 2)
    assert told == ["rank 1: the trace cannot be written: [Errno 28] No space left on device"] * 2


def test_an_earlier_trace_is_moved_aside_and_never_lost(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path, 2), 3)
    run_ranks(lambda transport: train(transport, tmp_path, 4), 2)
    (tmp_path / "rank1-copy.jsonl").write_text("no trace")
    assert [len(one.passes) for one in read_trace(tmp_path)] == [4, 4]
    assert [len(one.passes) for one in read_trace(tmp_path / "earlier-1")] == [2, 2, 2]


def test_two_handles_trace_into_one_folder(tmp_path: Path) -> None:
    """The first goes on writing where it was moved to."""

    def worker(transport: Any) -> None:
        models = [torch.nn.Linear(2, 1) for _ in range(2)]
        first, second = (stretto.attach(model, transport=transport) for model in models)
        with first.trace(tmp_path):
            models[0](torch.ones(1, 2)).sum().backward()
            with second.trace(tmp_path):
                for model in models:
                    model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert [len(one.passes) for one in read_trace(tmp_path)] == [1, 1]
    assert [len(one.passes) for one in read_trace(tmp_path / "earlier-1")] == [2, 2]


def test_an_earlier_trace_that_cannot_be_moved(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path), 2)
    (tmp_path / "earlier-1").write_text("")

    def worker(transport: Any) -> str:
        sync = stretto.attach(torch.nn.Linear(2, 1), transport=transport)
        with pytest.raises(TraceError) as caught, sync.trace(tmp_path):
            raise AssertionError("it does not begin")
        return str(caught.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.tracing.next_aside", lambda _: 1)
        found = run_ranks(worker, 2)
    for told in found:
        assert told.startswith("rank 0: the earlier trace cannot be moved aside: [Errno 17] File exists: ")
    assert len(read_trace(tmp_path)) == 2


def test_a_pass_given_up_before_and_inside(tmp_path: Path) -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)

        def step(*, fails: bool = False) -> None:
            with contextlib.suppress(ZeroDivisionError, stretto.PeerError):
                out = model(torch.ones(1, 2)).sum()
                if fails and transport.rank == 1:
                    model[0].weight.register_hook(lambda _: 1 / 0)
                out.backward()
            model[0].weight._backward_hooks = None
            model.zero_grad()

        step()
        step(fails=True)
        with sync.trace(tmp_path):
            step()
            step()
            step(fails=True)
            time.sleep(0.2)
            step()
            step()

    run_ranks(worker, 2)
    for trace in read_trace(tmp_path):
        assert trace.end == "closed"
        assert [one.number for one in trace.passes][-2:] == [6, 7]
        after = trace.passes[-2]
        assert len(after.forwards) == 1 and after.backward < 0.1, "what was given up is no part of it"


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def worker(transport: Any) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        folder = tmp_path / ("file" if transport.rank else "folder")
        with pytest.raises(TraceError) as caught, sync.trace(folder):
            raise AssertionError("it does not begin")
        assert str(caught.value) == (
            f"rank 1: the trace cannot be written: [Errno 17] File exists: '{tmp_path / 'file'}'"
        )
        model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert json.loads((tmp_path / "folder" / "rank0.jsonl").read_text().splitlines()[-1]) == {
        "end": "another rank cannot write"
    }


# Reading


@pytest.fixture
def written(tmp_path: Path) -> Path:
    run_ranks(lambda transport: train(transport, tmp_path), 2)
    return tmp_path


def test_a_file_that_was_cut_off_gives_what_is_whole(written: Path) -> None:
    path = written / "rank1.jsonl"
    text = path.read_text()
    for length in range(len(text.splitlines()[0]) + 1, len(text), 97):
        path.write_text(text[:length])
        trace = read_trace(written)[1]
        assert trace.end is None
        whole = text[:length].rsplit("\n", 1)[0].splitlines()
        assert len(trace.passes) == sum(line.startswith('{"pass"') for line in whole)


NO_PART = "{folder}/rank0.jsonl: line %d is no part of a trace"
SPOILT = {
    "a file is missing": "{folder}: the files of ranks [1] are missing; copy all of them into one folder",
    "all are missing": "{folder}: no trace in it (rank0.jsonl, rank1.jsonl, ...)",
    "text": NO_PART % 1,
    "empty": NO_PART % 1,
    "no object": NO_PART % 1,
    "no pass": NO_PART % 7,
    "unknown": NO_PART % 7,
    "a later version": "{folder}/rank0.jsonl: written in version 9 of the format, this is version 1",
    "another run": "{folder}: the files of ranks [1] are of another run than that of rank 0",
    "another number of ranks": "{folder}: the files of ranks [1] are of another run than that of rank 0",
    "bytes": "{folder}/rank0.jsonl: cannot be read: "
    "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
}


def spoil(folder: Path, how: str) -> None:
    path = folder / "rank0.jsonl"
    text = path.read_text()
    for other in folder.iterdir():
        if how == "all are missing" or (how == "a file is missing" and other != path):
            other.unlink()
    becomes: dict[str, Any] = {
        "text": "hello\n",
        "empty": "",
        "no object": "[]\n",
        "no pass": text + '{"pass": {}}\n',
        "unknown": text + '{"x": 1}\n',
        "a later version": text.replace('"stretto_trace":1', '"stretto_trace":9'),
        "another run": re.sub('"run":"[0-9a-f]{16}"', '"run":"x"', text),
        "another number of ranks": text.replace('"world_size":2', '"world_size":5'),
    }
    if how in becomes:
        path.write_text(becomes[how])
    elif how == "bytes":
        path.write_bytes(b"\xff\xfe\n")


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_no_trace_is_refused_in_one_line(written: Path, how: str) -> None:
    spoil(written, how)
    with pytest.raises(TraceError) as caught:
        read_trace(written)
    assert str(caught.value) == SPOILT[how].format(folder=written)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "no")
    assert str(caught.value) == f"{tmp_path / 'no'}: no such folder"


def test_clocks_of_a_header_are_kept(tmp_path: Path) -> None:
    for rank, clock in enumerate((Clock(0, 0), None)):
        writer = TraceWriter(tmp_path, header_of(rank, 2, "somehow", clock, "run", {"a": "b"}))
        writer.close()
        writer.close("later")
    first, second = read_trace(tmp_path)
    assert isinstance(first, RankTrace) and first.end == "closed" and first.tied == {"a": "b"}
    assert (first.clock, second.clock, second.at(7)) == (Clock(0, 0), None, 7)
