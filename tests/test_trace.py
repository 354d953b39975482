"""Traces on disk: written pass by pass, read whole or cut off, refused with one line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from traces import Ladder, a_trace, written_by

import stretto
from stretto import clocks
from stretto.analysis import reports_from
from stretto.chrome import write_chrome
from stretto.clocks import Clock
from stretto.page import to_html
from stretto.record import PassRecord
from stretto.report import UNTOLD
from stretto.sketch import sketch
from stretto.testing import DelayTransport, run_ranks, spawn_ranks
from stretto.timeline import timeline_of
from stretto.trace import RankTrace, TraceError, read_trace
from stretto.writing import TraceWriter, header_of


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
    told = "rank {0}, pass 2: the trace in {1}/rank{0}.jsonl ends here, training goes on: No space left on device"
    assert sorted(one.getMessage() for one in caplog.records) == [told.format(rank, tmp_path) for rank in range(2)]


def test_a_trace_can_be_a_decorator_and_be_entered_again(tmp_path: Path) -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(2, 1)
        sync = stretto.attach(model, transport=transport)
        trace = sync.trace(tmp_path)

        @trace
        def train() -> None:
            model(torch.ones(1, 2)).sum().backward()

        train()
        with trace:
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert [[one.number for one in trace.passes] for trace in read_trace(tmp_path)] == [[2], [2]]
    assert [[one.number for one in trace.passes] for trace in read_trace(tmp_path / "earlier-1")] == [[1], [1]]


def test_a_trace_that_nobody_enters_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync = stretto.attach(torch.nn.Linear(2, 1))
    sync.trace(tmp_path / "run")
    assert [one.getMessage() for one in caplog.records] == [
        f"rank 0: sync.trace('{tmp_path}/run') by itself records nothing.\n"
        "Write with sync.trace(folder): around the steps to record."
    ]


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
    for rank in range(2):
        (said,) = [text for one in caplog.records if (text := one.getMessage()).startswith(f"rank {rank}")]
        here = f"{tmp_path / f'rank{rank}.jsonl'}"
        assert said in (
            f"rank {rank}, pass 1: the trace in {here} ends here, training goes on: No space left on device",
            f"rank {rank}, pass 2: the trace in {here} ends here, training goes on: No space left on device",
            f"rank {rank}, pass 3: the trace in {here} ends here, training goes on: No space left on device",
            f"rank {rank}: the end of the trace in {here} cannot be written: No space left on device",
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
        assert told.removeprefix("ranks 0, 1: ").startswith(
            "the earlier trace cannot be moved aside: [Errno 17] File exists: "
        )
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
            f"rank 1: the trace cannot be written: {str(tmp_path / 'file')!r} is a file; give a folder"
        )
        model(torch.ones(1, 2)).sum().backward()

    run_ranks(worker, 2)
    assert json.loads((tmp_path / "folder" / "rank0.jsonl").read_text().splitlines()[-1]) == {
        "end": "another rank cannot write",
        "later": None,
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


NO_PART = "{folder}/rank0.jsonl: line %d is not part of a trace: left out"
SPOILT = {  # how: what is told, whose traces are left, and how many passes of rank 0
    "a file is missing": ("{folder}: no file of rank 1; copy those of all ranks into one folder", [0], 3),
    "text": (NO_PART % 1, [1], 0),
    "empty": ("{folder}/rank0.jsonl: is empty: left out", [1], 0),
    "no object": (NO_PART % 1, [1], 0),
    "no pass": (NO_PART % 7, [0, 1], 3),
    "unknown": (NO_PART % 7, [0, 1], 3),
    "cut amid": (NO_PART % 4, [0, 1], 2),
    "bytes amid": (NO_PART % 4, [0, 1], 2),
    "no number": (NO_PART % 4, [0, 1], 2),
    "no such bucket": (NO_PART % 4, [0, 1], 2),
    "no plan": (NO_PART % 2, [0, 1], 3),
    "deep amid": (NO_PART % 4, [0, 1], 2),
    "deep": (NO_PART % 1, [1], 0),
    "much": ("{folder}/rank0.jsonl: lines 7, 8, 9 and 2 more are not part of a trace: left out", [0, 1], 3),
    "a later version": (
        "{folder}/rank0.jsonl: written in version 9 of the format, this is version 1: left out",
        [1],
        0,
    ),
    "another run": ("{folder}: what rank 1 wrote is from another run than that of rank 0: left out", [0], 3),
    "another number of ranks": (
        "{folder}: what rank 1 wrote is from another run than that of rank 0: left out",
        [0],
        3,
    ),
    "a copy": ("{folder}/rank0.jsonl: says that it is the file of rank 1: left out", [1], 0),
    "bytes": (NO_PART % 1, [1], 0),
}


def spoil(folder: Path, how: str) -> None:
    path, other = folder / "rank0.jsonl", folder / "rank1.jsonl"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    if how == "a file is missing":
        other.unlink()
    elif how == "bytes":
        path.write_bytes(b"\xff\xfe\n")
    elif how == "bytes amid":
        path.write_bytes("".join(lines[:3]).encode() + b"\xff\n" + "".join(lines[4:]).encode())
    becomes: dict[str, Any] = {
        "text": "hello\n",
        "empty": "",
        "no object": "[]\n",
        "no pass": text + '{"pass": {}}\n',
        "unknown": text + '{"x": 1}\n',
        "cut amid": "".join([*lines[:3], lines[3][:200] + "\n", *lines[4:]]),
        "no number": "".join([*lines[:3], lines[3].replace('"began":', '"began":0.5,"x":'), *lines[4:]]),
        "no such bucket": "".join([*lines[:3], lines[3].replace('"bucket":0', '"bucket":99'), *lines[4:]]),
        "no plan": "".join([lines[0], lines[1].replace('"parameters"', '"x"'), *lines[2:]]),
        "deep amid": "".join([*lines[:3], '{"pass":' + "[" * 100_000 + "\n", *lines[4:]]),
        "deep": "[" * 100_000 + "\n" + "".join(lines[1:]),
        "much": text + 5 * "x\n",
        "a later version": text.replace('"stretto_trace":1', '"stretto_trace":9'),
        "another run": re.sub('"run":"[0-9a-f]{16}"', '"run":"x"', text),
        "another number of ranks": text.replace('"world_size":2', '"world_size":1'),
        "a copy": other.read_text() if other.exists() else "",
    }
    if how in becomes:
        path.write_text(becomes[how])


@pytest.mark.parametrize("how", SPOILT)
def test_what_can_be_read_is_read_and_one_line_names_the_rest(written: Path, how: str) -> None:
    spoil(written, how)
    line, ranks, passes = SPOILT[how]
    told: list[str] = []
    traces = read_trace(written, tell=told.append)
    assert told == [line.format(folder=written)]
    assert [one.rank for one in traces] == ranks
    assert sum(len(one.passes) for one in traces if one.rank == 0) == passes
    if how == "no plan":
        assert not traces[0].plans and reports_from(traces)[0].buckets == ()
    timeline = timeline_of(traces)
    assert timeline.passes and len(reports_from(traces)) == len(ranks)
    if ranks == [0, 1]:
        assert timeline.numbers == (3, 4, 5)


def leaves(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside, and to what holds it."""
    if way:
        yield way
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from leaves(value[key], (*way, key))


def test_whatever_is_damaged_in_one_line_what_is_left_is_shown(written: Path, tmp_path: Path) -> None:
    """Each value of each kind of line in turn, replaced by others."""
    path = written / "rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kinds = [0, 1, 3, len(lines) - 1]
    for number in kinds:
        for way in leaves(json.loads(lines[number])):
            for wrong in (None, "x", -7, 2**62, 0.5, True, [], {}, [[]], 10**30):
                line = json.loads(lines[number])
                inner = line
                for key in way[:-1]:
                    inner = inner[key]
                inner[way[-1]] = wrong
                damaged = json.dumps(line, separators=(",", ":")) + "\n"
                path.write_text("".join([*lines[:number], damaged, *lines[number + 1 :]]))
                told: list[str] = []
                try:
                    traces = read_trace(written, tell=told.append)
                    timeline = timeline_of(traces)
                    assert timeline.passes and all(str(one) for one in reports_from(traces))
                    write_chrome(timeline, io.StringIO())
                    assert all(len(row) < 200 for row in sketch(timeline, 80).splitlines() if "=" in row or "#" in row)
                except Exception as error:
                    raise AssertionError(f"line {number + 1}, {way} = {wrong!r}: {error!r}; told {told}") from error


def test_a_warning_says_what_is_left_out(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoil(written, "unknown")
    read_trace(written)
    assert [one.getMessage() for one in caplog.records] == [(NO_PART % 7).format(folder=written)]


def test_a_file_that_cannot_be_opened_is_left_out(written: Path) -> None:
    (written / "rank0.jsonl").unlink()
    (written / "rank0.jsonl").mkdir()
    told: list[str] = []
    assert [one.rank for one in read_trace(written, tell=told.append)] == [1]
    assert told == [
        f"{written}/rank0.jsonl: cannot be read: [Errno 21] Is a directory: '{written}/rank0.jsonl': left out"
    ]


def test_the_files_of_the_run_that_has_most_are_kept(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path), 3)
    path = tmp_path / "rank0.jsonl"
    path.write_text(re.sub('"run":"[0-9a-f]{16}"', '"run":"x"', path.read_text()))
    told: list[str] = []
    traces = read_trace(tmp_path, tell=told.append)
    assert [one.rank for one in traces] == [1, 2]
    assert told == [f"{tmp_path}: what rank 0 wrote is from another run than that of rank 1: left out"]
    assert [one.rank for one in reports_from(traces)] == [1, 2]
    assert timeline_of(traces).notes()[0] == "there is no trace of ranks [0]"
    assert all(transfer.joined is None for one in timeline_of(traces).passes for transfer in one.transfers)


def test_a_rank_has_one_file(written: Path) -> None:
    shutil.copy(written / "rank1.jsonl", written / "rank01.jsonl")
    assert [one.rank for one in read_trace(written)] == [0, 1]


def test_where_nothing_can_be_shown_the_folder_is_refused(written: Path) -> None:
    (written / "rank1.jsonl").unlink()
    spoil(written, "text")
    with pytest.raises(TraceError) as caught:
        read_trace(written)
    assert str(caught.value) == f"{written}/rank0.jsonl: line 1 is not part of a trace"
    (written / "rank0.jsonl").unlink()
    with pytest.raises(TraceError) as caught:
        read_trace(written)
    assert str(caught.value) == f"{written}: no trace in it (rank0.jsonl, rank1.jsonl, ...)"
    TraceWriter(written, header_of(1, 2, "somehow", None, "run", {})).close()
    (written / "rank1.jsonl").rename(written / "rank0.jsonl")
    with pytest.raises(TraceError) as caught:
        read_trace(written)
    assert str(caught.value) == f"{written}/rank0.jsonl: says that it is the file of rank 1"


@pytest.mark.parametrize("last, numbers", [
    (None, [3, 4, 5, 6, 7, 8]),
    (2, [7, 8]),
    (99, [3, 4, 5, 6, 7, 8]),
])  # fmt: skip
def test_the_last_passes_are_chosen_when_they_are_read(
    tmp_path: Path, last: int | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(lambda transport: train(transport, tmp_path, 6), 2)
    understood = []
    real = PassRecord.from_dict
    monkeypatch.setattr(PassRecord, "from_dict", lambda value: understood.append(value) or real(value))
    for trace in read_trace(tmp_path, last):
        assert [one.number for one in trace.passes] == numbers and trace.end == "closed"
    assert len(understood) == 2 * len(numbers), "what is not asked for costs no more than its first characters"


def test_the_last_passes_are_those_that_any_rank_has(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path, 6), 2)
    path = tmp_path / "rank1.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"number":8,' not in line))
    assert [[p.number for p in one.passes] for one in read_trace(tmp_path, 2)] == [[7, 8], [7]]


def test_memory_does_not_grow_with_a_trace_of_which_little_is_asked_for(tmp_path: Path) -> None:
    run_ranks(lambda transport: train(transport, tmp_path, 2), 2)
    path = tmp_path / "rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    line = next(one for one in lines if '"number":4,' in one)
    with path.open("w") as file:
        file.writelines(lines[:2])
        file.writelines(line.replace('"number":4,', f'"number":{number},') for number in range(4, 5000))
    size = path.stat().st_size
    tracemalloc.start()
    (trace, _) = read_trace(tmp_path, 5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.number for one in trace.passes] == [4995, 4996, 4997, 4998, 4999]
    assert peak < size / 10


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


# Clocks of hosts, drift included


SKEW, DRIFT = 5_000_000_000, 0.01


def traced_with_another_clock(rank: int, folder: str, how: str) -> float:
    """Rank 1 has a clock of its own, 5 s ahead and one percent too fast."""
    origin = time.perf_counter_ns()
    real = time.perf_counter_ns
    if rank == 1:

        def mine() -> int:
            return real() + SKEW + int(DRIFT * (real() - origin))

        time.perf_counter_ns = mine
        for module in ("stretto.recorder", "stretto.flights"):
            sys.modules[module].now = mine
        clocks.identity = lambda: "another kernel"
        clocks.ClockTalk.__init__.__kwdefaults__["now"] = mine
    sync = stretto.attach(model := torch.nn.Linear(2, 1), transport="process_group")
    failed = ValueError("enough")
    began = time.monotonic()
    with contextlib.suppress(ValueError), sync.trace(folder):
        for _ in range(6):
            time.sleep(0.05)
            model(torch.ones(1, 2)).sum().backward()
        if how == "both fail" or (how == "one fails" and rank == 1):
            raise failed
    took = time.monotonic() - began
    torch.distributed.barrier()
    store = sync._transport.store
    return took, store.num_keys() if hasattr(store, "num_keys") else 0


@pytest.mark.flaky(reruns=2)
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["fine", "both fail", "one fails"])
@pytest.mark.alone
def test_clocks_of_hosts_drift_between_both_ends_of_a_trace(tmp_path: Path, how: str) -> None:
    seconds = [took for took, _ in spawn_ranks(traced_with_another_clock, 2, str(tmp_path), how)]
    assert max(seconds) < 8, "at the end nobody waits long"
    first, second = read_trace(tmp_path)
    assert first.clock == Clock(0, 0) and first.later is None and first.uncertainty == 0
    assert second.clock is not None and second.clock.at
    assert (second.later is not None) == (how == "fine")
    apart = [
        abs(second.at(there.settled) - first.at(here.settled)) / 1e6
        for here, there in zip(first.passes, second.passes, strict=True)
    ]
    if how == "fine":  # 0.3 s and one percent are 3 ms
        assert second.at(second.clock.at) == second.clock.at + second.clock.offset
        assert max(apart) < 2 + second.uncertainty / 1e6 or statistics.median(apart) < 1, apart
    else:
        assert second.at(0) == second.clock.offset


def killed_while_clocks_are_compared(rank: int, folder: str) -> str:
    sync = stretto.attach(torch.nn.Linear(2, 1), transport="process_group")
    clocks.identity = lambda: f"kernel {rank}"
    if rank == 1:
        clocks.ClockTalk._ask = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(stretto.PeerError) as caught, sync.trace(folder):
        raise AssertionError("it does not begin")
    Path(folder, "told").write_text(f"{time.monotonic() - began}\n{caught.value}")
    os._exit(1)


@pytest.mark.ranks
def test_a_rank_that_is_killed_while_clocks_are_compared_is_named_in_seconds(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        spawn_ranks(killed_while_clocks_are_compared, 2, str(tmp_path))
    seconds, _, text = (tmp_path / "told").read_text().partition("\n")
    assert float(seconds) < 8
    assert text.startswith("rank 0, before pass 1: ") and "rank 1" in text, text


# What a transport does not tell, and what travels beside buckets


def test_what_travels_beside_buckets_is_counted(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(10, 4, sparse=True)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.norm(self.words(words)).square().sum()

    def worker(transport: Any) -> Any:
        model = Net()
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for _ in range(3):
                model(torch.arange(3 + transport.rank)).backward()
                model.zero_grad()
        return sync.report()

    rows = [(3 + rank) * (8 + 4 * 4) for rank in range(2)]  # a number of eight bytes and four values each
    buffers = 4 * 4 * 2 + 8
    for rank, report in enumerate(run_ranks(worker, 2)):
        assert (report.nbytes, report.sparse_nbytes, report.buffer_nbytes) == (4 * 4 * 2, rows[rank], buffers)
        assert f"; beside them {rows[rank]} B of sparse gradients and 40 B of the module's buffers\n" in str(report)
        assert report.to_dict()["sparse_nbytes"] == rows[rank]
    assert [one.sparse_nbytes for one in reports_from(read_trace(tmp_path))] == rows


def test_an_end_that_the_transport_does_not_tell_is_marked_everywhere(written: Path) -> None:
    assert UNTOLD == (
        "the transport does not tell when a result is there: buckets end when their rank has finished waiting for "
        "them, and hidden is an upper bound"
    )
    traces = read_trace(written)
    assert all(not one.told and one.end == one.seen for p in traces[0].passes for one in p.launches)
    report = reports_from(traces)[0]
    assert not report.told and not any(one.told for one in report.buckets)
    assert ": backward hides at most " in str(report)
    assert "\n" + UNTOLD in str(report)
    assert re.search(r"^ +0 .*  \(seen\)  ", str(report), re.MULTILINE)
    timeline = timeline_of(traces)
    assert timeline.headline().startswith("at most ") and UNTOLD in timeline.notes()
    assert sketch(timeline).splitlines()[-1] == UNTOLD
    assert "when the result was there is not known, seen at " in to_html(timeline)
    chrome = written_by(timeline)
    assert chrome["otherData"]["summary"].startswith("at most ") and UNTOLD in chrome["otherData"]["notes"]
    ways = [event for event in chrome["traceEvents"] if event.get("cat") == "bucket" and event["ph"] == "X"]
    assert ways and all(one["name"].endswith(", until it was seen") for one in ways)
    assert not any(one["args"]["end_known"] for one in ways)


def test_times_on_accelerators_are_said_to_be_the_hosts(tmp_path: Path) -> None:
    text = "times are the host's, not those of the device (cuda): what was queued there counts as done"
    trace = a_trace(devices=("cpu", "cuda"))
    assert trace.accelerators == ("cuda",) and a_trace().accelerators == ()
    writer = TraceWriter(tmp_path, trace)
    writer.close()
    assert read_trace(tmp_path)[0].accelerators == ("cuda",)
    report = reports_from([a_trace(0, 2, devices=("cuda",)), a_trace(1, 2)])[0]
    assert report.accelerators == ("cuda",) and "\n" + text in str(report)
    timeline = timeline_of([trace])
    assert timeline.notes() == (text,) and text.replace("'", "&#x27;") in to_html(timeline)
    labels = [event for event in written_by(timeline)["traceEvents"] if event["name"] == "process_labels"]
    assert [event["args"] for event in labels] == [{"labels": text}]


def test_passes_under_an_earlier_plan_are_counted(tmp_path: Path) -> None:
    def worker(transport: Any) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for number in range(5):
                if number == 3:
                    model[0].weight.requires_grad_(False)
                model(torch.ones(1, 2)).sum().backward()
        return sync.report()

    for report in [*run_ranks(worker, 2), *reports_from(read_trace(tmp_path))]:
        assert report.left_out >= 3 and report.passes + report.left_out == 5
        assert f"\n{report.left_out} passes recorded under an earlier plan, with other buckets: left out" in str(report)
    other = replace(report, left_out=1)
    assert "\n1 pass recorded under an earlier plan, with other buckets: left out" in str(other)


def test_report_gives_advice_about_a_late_gradient_from_passes_that_were_traced(tmp_path: Path) -> None:
    """Sampled passes are not looked at gradient by gradient; those of a trace are, and count in the report."""

    def worker(transport: Any) -> tuple[Any, Any]:
        model = Ladder(("late", "middle", "early"), 0.0)
        model.rungs["late"].weight.register_hook(lambda _: time.sleep(0.05))
        sync = stretto.attach(model, transport=DelayTransport(transport, lambda _: 0.04))

        def steps() -> None:
            for _ in range(9):
                model(torch.ones(2, 8)).sum().backward()

        steps()
        before = sync.report()
        with sync.trace(tmp_path):
            steps()
        return before, sync.report()

    for before, after in run_ranks(worker, 2):
        assert before.buckets[0].before_last is None
        assert after.buckets[0].before == "rungs.middle.weight"
        (late,) = [one for one in after.advice if one.startswith("Bucket 0 waits ")]
        assert late.endswith(
            ' for `rungs.late.weight`: let the rest leave before it with attach(launch_after=["rungs.middle.weight"]).'
        )
