"""What is recorded of passes, and what a report makes of it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.optim import optimizer as hooks
from traces import Slow, Truth, Watch, a_trace, assert_true_to_5_percent

import stretto
from stretto import steps
from stretto.activities import activities_of
from stretto.advice import advise
from stretto.analysis import breakdown_of, buckets_of, reports_from, seen_in, side_by_side, tied_names
from stretto.awaited_keys import AwaitedKeys
from stretto.clocks import NOBODY, Clock, ClockTalk, identity
from stretto.flights import Flight
from stretto.line import Line
from stretto.plan import BucketPlan, plan_buckets
from stretto.record import NANO, Launch, PassRecord, Span, covered, percent_hidden
from stretto.recorder import Recorder
from stretto.report import Breakdown, BucketReport, RankReport, Report, ms, share
from stretto.specs import describe_parameters
from stretto.testing import DelayTransport, run_ranks, spawn_ranks
from stretto.trace import read_trace

MS = 1_000_000


class Layers(torch.nn.Module):
    """So many layers, with ``seconds`` of backward between each two."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(number))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(Slow.apply(x, self.seconds))
        return x


@pytest.mark.parametrize(
    "backward, link, hidden, exposed",
    [
        (0.10, 0.05, 0.15, 0.05),  # all but the last is hidden
        (0.05, 0.10, 0.15, 0.25),  # the link is busy from the first gradient on; backward ends 0.15 s later
    ],
)
def test_hidden_and_exposed_times_are_those_of_a_link_that_is_known(
    backward: float, link: float, hidden: float, exposed: float
) -> None:
    """Two ranks, each bucket one of four layers. A watch beside the recorder tells what sleeping really took."""

    def worker(transport: Any) -> tuple[Report, list[PassRecord], dict[int, Truth]]:
        carrier = DelayTransport(transport, lambda _: link)
        sync = stretto.attach(model := Layers(4, backward), transport=carrier, bucket_cap_mb=1e-4, buffers="none")
        watch = Watch(carrier)
        sync.observe(watch)
        for _ in range(9):
            model(torch.ones(2, 8)).sum().backward()
        assert sync.sampler is not None
        return sync.report(), [one for one, _ in sync.sampler.records], watch.truths

    for report, records, truths in run_ranks(worker, 2):
        mine = report.breakdown
        assert [one.number for one in records] == [4, 5, 6, 7, 8] and report.passes == 5
        assert_true_to_5_percent([(one, truths[one.number]) for one in records])
        assert mine == breakdown_of(records)
        assert mine.percent_hidden == percent_hidden(mine.hidden, mine.exposed)
        assert mine.communication >= 0.99 * (hidden + exposed), "sleeping takes longer, never shorter"
        assert mine.hidden >= 0.99 * hidden and mine.backward >= 3 * backward
        assert_adds_up(mine)
        assert [one.bucket for one in report.buckets] == [0, 1, 2, 3]
        assert [one.closed_by for one in report.buckets] == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
        for bucket in report.buckets:
            assert bucket.full is not None and bucket.told
            assert bucket.full <= bucket.launched <= bucket.started <= bucket.ended <= bucket.seen
            assert bucket.first is bucket.before_last is None, "passes are not looked at gradient by gradient unasked"


@pytest.mark.parametrize("future", ["none", "raises", "fires"])
def test_how_one_learns_when_a_result_is_there(future: str) -> None:
    class Work:
        def __init__(self, inner: Any) -> None:
            self.wait, self.is_completed = inner.wait, inner.is_completed

    class HasFuture(Work):
        def get_future(self) -> Any:
            if future == "raises":
                raise RuntimeError("this backend has no futures")
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

    class Link(DelayTransport):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            return (Work if future == "none" else HasFuture)(super().all_reduce(tensor))

    def worker(transport: Any) -> Report:
        sync = stretto.attach(model := Layers(2, 0.0), transport=Link(transport, lambda _: 0.001))
        for _ in range(9):
            model(torch.ones(2, 8)).sum().backward()
        return sync.report()

    for report in run_ranks(worker, 2):
        assert report.passes == 5 and report.told == (future == "fires")
        assert all((one.ended == one.seen) != (future == "fires") for one in report.buckets)


LATE = 0.03


class Ends:
    """An observer: what lies just before and just after a recorder looks at the clock when backward has ended, by pass.

    The only bucket leaves when backward has ended, so whoever waits for ``left`` comes later than that.
    """

    def __init__(self) -> None:
        self.around: dict[int, tuple[float, float]] = {}
        self.left = threading.Semaphore(0)

    def backward_ended(self, number: int) -> None:
        self._before = time.perf_counter()

    def bucket_launched(self, number: int, bucket: int, nbytes: int) -> None:
        self.around[number] = self._before, time.perf_counter()
        self.left.release()


def test_a_rank_that_is_late_is_named_with_where_it_lost_time() -> None:
    """Rank 1 begins when the others have ended backward, and a little later: it is last whatever the load."""
    ends = [Ends() for _ in range(3)]

    def worker(transport: Any) -> Report:
        model = Layers(3, 0.005)
        sync = stretto.attach(model, transport=transport)
        sync.observe(ends[transport.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            if transport.rank == 1:
                assert all(ends[other].left.acquire(timeout=60) for other in (0, 2))
                time.sleep(LATE)
            out = model(torch.ones(2, 8))
            optimizer.zero_grad()
            out.sum().backward()
            optimizer.step()
        return sync.report()

    reports = run_ranks(worker, 3)
    around = [{number: one.around[number] for number in range(4, 9)} for one in ends]
    first = {number: [min(one[number][side] for one in around) for side in (0, 1)] for number in around[0]}
    least = statistics.median(around[1][number][0] - first[number][1] for number in first)
    most = statistics.median(around[1][number][1] - first[number][0] for number in first)
    for report in reports:
        assert report.straggler is not None and report.straggler.rank == 1
        assert report.straggler.behind is not None and LATE <= least <= report.straggler.behind <= most
        assert report.straggler.last == 1
        assert report.clock_uncertainty == 0
        assert report.advice[0].startswith("Rank 1 ends backward last in 100 % of the passes, ")
        assert report.advice[0].endswith("most of the difference lies in the time between passes (data?).")
        others = [one for one in report.ranks if one.rank != 1]
        assert all(one.behind is not None and one.behind <= report.straggler.behind - LATE for one in others)
        assert report.ranks[report.rank].breakdown.optimizer > 0


def test_what_is_recorded_unasked_and_what_a_trace_adds(tmp_path: Any) -> None:
    def worker(transport: Any) -> list[int]:
        model = Layers(2, 0.0)
        sync = stretto.attach(model, transport=transport)
        assert sync.report().passes == 0
        counts = []
        for number in range(1, 203):
            model(torch.ones(2, 8)).sum().backward()
            if number in (3, 4, 8, 99, 100, 200):
                counts.append(sync.report().passes)
        with sync.trace(tmp_path):
            model(torch.ones(2, 8)).sum().backward()
        assert all(one.before_last is None and one.first is not None for one in sync.report().buckets[1:])
        return [*counts, sync.report().passes]

    assert run_ranks(worker, 2) == [[0, 1, 5, 5, 6, 7, 8]] * 2


def test_a_pass_that_is_traced_counts_once(tmp_path: Any) -> None:
    def worker(transport: Any) -> None:
        model = Layers(2, 0.0)
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for _ in range(9):
                model(torch.ones(2, 8)).sum().backward()
        assert [record.number for record, _ in sync.sampler.records] == [*range(1, 10)]
        assert all(record.gradients for record, _ in sync.sampler.records)

    run_ranks(worker, 2)


def test_a_pass_that_nobody_watches_has_no_optimizer_hooks() -> None:
    def listeners() -> int:
        return len(hooks._global_optimizer_pre_hooks[steps.ENTRY].__self__)

    def worker(transport: Any) -> None:
        model = Layers(1, 0.0)
        sync = stretto.attach(model, transport=transport, check_every=0)
        optimizer = torch.optim.SGD(model.parameters())  # rank 0 looks at the first steps
        for passes, listening in ((4, 2), (5, 0)):
            for _ in range(passes):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            transport.all_gather_object(None)
            assert listeners() == listening
            transport.all_gather_object(None)
        sync.detach()
        sync.detach()

    run_ranks(worker, 2)
    assert not hooks._global_optimizer_pre_hooks and not hooks._global_optimizer_post_hooks


def test_only_buckets_that_are_under_way_and_can_tell_are_asked_whether_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what recording costs grows with the square of the number of buckets."""
    asked: list[int] = []
    look = Flight.look
    monkeypatch.setattr(Flight, "look", lambda flight: (asked.append(flight.begin), look(flight)))

    def worker(transport):
        model = torch.nn.ParameterList([torch.zeros(1) for _ in range(20)])
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=1e-6)
        for _ in range(6):
            sum(one.sum() for one in model).backward()
        return sum(len(record.launches) for record, _ in sync.sampler.records)

    assert sum(run_ranks(worker, 2)) == len(asked) >= 2 * 20


def test_a_handle_that_is_dropped_amid_recording_takes_the_recorder_with_it() -> None:
    """It holds what is under way, and so memory that ranks share; torch's hooks on optimizers are of the process."""

    def worker(transport: Any, detach: bool) -> weakref.ref[Any]:
        model = Layers(1, 0.0)
        sync = stretto.attach(model, transport=transport)
        for _ in range(5):
            model(torch.ones(2, 8)).sum().backward()
        if detach:
            sync.detach()
        assert sync.sampler is not None
        return weakref.ref(sync.sampler)

    dropped = run_ranks(lambda transport: worker(transport, detach=False), 2)
    for _ in range(2):
        gc.collect()
    assert [one() for one in dropped] == [None, None]
    torch.optim.SGD([torch.zeros(1)]).step()
    run_ranks(lambda transport: worker(transport, detach=True), 2)
    assert not hooks._global_optimizer_pre_hooks and not hooks._global_optimizer_post_hooks


def test_a_step_on_another_thread_finds_what_is_open_in_another_order_or_gone() -> None:
    """Recorders hear of all steps of the process. It raised IndexError in a step of a model that has nothing to do."""

    class Vanishing(list[Any]):
        def __len__(self) -> int:
            found = super().__len__()
            self.clear()
            return found

    def worker(transport: Any) -> None:
        sync = stretto.attach(Layers(1, 0.0), transport=transport)
        assert sync.sampler is not None
        recorder = Recorder(sync._reducer, sync.sampler.keep)
        recorder.start()
        recorder._open = Vanishing([(None, 1), (None, 2)])
        recorder._stepping(torch.optim.SGD([torch.zeros(1)]), False)
        recorder._open = [(None, 1), (optimizer := torch.optim.SGD([torch.zeros(1)]), 2), (None, 3)]
        recorder._stepping(optimizer, False)
        assert recorder._open == [(None, 1), (None, 3)] and [one.begin for one in recorder._optimizer] == [2]

    run_ranks(worker, 2)


def test_steps_on_another_thread_are_not_disturbed_by_recorders_that_come_and_go() -> None:
    """torch iterates over its table in each step; a table that changes meanwhile raises there."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    stop, failed = threading.Event(), []

    class Slowly:
        def stepping(self, optimizer: Any, begins: bool) -> None:
            time.sleep(0.0005)

    def step() -> None:
        try:
            while not stop.is_set():
                optimizer.step()
        except RuntimeError as error:
            failed.append(error)

    slow = [Slowly() for _ in range(3)]
    steps.listen(slow[0].stepping)
    thread = threading.Thread(target=step)
    thread.start()
    for _ in range(200):
        for one in slow[1:]:
            steps.listen(one.stepping)
            time.sleep(0.0003)
            steps.stop_listening(one.stepping)
    stop.set()
    thread.join()
    steps.stop_listening(slow[0].stepping)
    steps.leave()
    assert failed == []


def test_an_optimizer_of_parameters_that_came_later_is_seen(tmp_path: Any) -> None:
    def worker(transport: Any) -> int:
        model = Layers(2, 0.0)
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for number in range(6):
                if number == 2:
                    model.layers[0] = torch.nn.Linear(8, 8, bias=False)
                    model.layers[1] = torch.nn.Linear(8, 8, bias=False)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        assert sync.sampler is not None
        return [len(one.optimizer) for one, _ in sync.sampler.records]

    assert run_ranks(worker, 2) == [[0, 1, 1, 1, 1, 1]] * 2


class Watched:
    """As much of a reducer as a recorder asks for."""

    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        self.parameters, self.plan, self.sparse = [*parameters], plan_of_one(), SimpleNamespace(total_bytes=0)
        self.queue = SimpleNamespace(presence=SimpleNamespace(waited=(0, 0)))

    def start_watching(self, recorder: Recorder) -> None:
        self.observer = recorder

    def stop_watching(self, recorder: Recorder) -> None:
        del self.observer


def test_an_optimizer_of_another_model_is_not_taken_for_one_of_parameters_that_are_gone() -> None:
    """An id is given again, and the plan follows the module only in the next pass."""
    values = torch.zeros(1)
    watched, kept = Watched(torch.nn.Parameter(values)), []
    known = id(watched.parameters[0])
    recorder = Recorder(watched, lambda record, plan: kept.append(record))  # type: ignore[arg-type]
    recorder.start()
    watched.parameters.clear()
    others = [torch.nn.Parameter(values)]
    while id(others[-1]) != known and len(others) < 10_000:
        others.append(torch.nn.Parameter(values))
    assert id(others[-1]) == known
    torch.optim.SGD([others[-1]]).step()
    recorder.pass_started(1)
    recorder.backward_ended(1)
    recorder.pass_settled(1)
    recorder.stop()
    assert [one.optimizer for one in kept] == [()]


def report_in_a_process(rank: int, transport: str) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    sync = stretto.attach(model, transport=transport)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = sync.report()
    for one in report.buckets:
        assert one.full is not None
        assert one.full <= one.launched <= one.started <= one.ended <= one.seen
    assert report.told, "these transports tell when a result is there"
    assert report.breakdown.hidden >= 0 and report.breakdown.exposed > 0 and report.breakdown.optimizer > 0
    sync.detach()
    assert sync.report().passes == 0
    return str(report), report.to_dict(), tuple(one.closed_by for one in report.buckets)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_reports_of_processes(transport: str) -> None:
    text, numbers, closed_by = spawn_ranks(report_in_a_process, 2, transport)[0]
    name = "shared_memory" if transport == "shared_memory" else "process_group (gloo)"
    assert text.startswith(f"rank 0 of 2 over {name}, means over the middle half of 5 passes, of 9 so far\n")
    assert (
        "\nrank   forward  backward   exposed  (waiting)  (hidden)  optimizer    other      step    behind\n   0  "
        in text
    )
    assert json.loads(json.dumps(numbers))["percent_hidden"] <= 100
    assert numbers["nbytes"] == 4 * (128 * 128 + 128) * 4 <= numbers["bucket_memory"]
    assert closed_by[-1] == "0.weight"


def test_one_rank_has_nothing_to_report(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Layers(1, 0.0)
    sync = stretto.attach(model)
    with sync.trace(tmp_path / "folder"):
        model(torch.ones(2, 8)).sum().backward()
    report = sync.report()
    assert (report.passes, report.world_size, report.advice, report.straggler) == (0, 1, (), None)
    assert str(report) == "rank 0 of 1: there is no other rank, so nothing is sent and no pass is recorded."
    assert not (tmp_path / "folder").exists()
    assert [one.getMessage() for one in caplog.records] == [
        f"rank 0: sync.trace('{tmp_path / 'folder'}') records nothing: there is no other rank to communicate with.\n"
        "Start several: stretto run --ranks 2 script.py"
    ]


def test_a_report_of_a_module_that_is_not_trained_says_so() -> None:
    def worker(transport: Any) -> list[str]:
        model = Layers(1, 0.0)
        sync = stretto.attach(model, transport=transport)
        copy.deepcopy(model)(torch.ones(2, 8)).sum().backward()
        texts = [str(sync.report())]
        given = torch.ones(2, 8, requires_grad=True) * 1
        given.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a pass that fails on all ranks is one, too
            model(given).sum().backward()
        return [*texts, str(sync.report())]

    assert run_ranks(worker, 2)[0] == [
        "rank 0 of 2 over local (threads of one process): no backward has reached the attached module so far, outside "
        "no_sync().\nIf training has begun, it trains another module, or a copy of this one: attach what you train. "
        "Gradients that torch.autograd.grad returns are averaged only by stretto.reduce().",
        "rank 0 of 2 over local (threads of one process): no pass has been recorded so far.\n"
        "Passes 4 to 8 are recorded, then one in a hundred; inside `with sync.trace(folder)` all of them.",
    ]


def test_a_detached_handle_says_that_it_traces_nothing(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    def worker(transport: Any) -> str:
        sync = stretto.attach(Layers(1, 0.0), transport=transport)
        sync.detach()
        with sync.trace("folder"):
            pass
        return str(sync.report())

    assert run_ranks(worker, 2)[0] == (
        "rank 0 of 2: report() after detach() has nothing to show.\nCall it before detach(), on all ranks."
    )
    assert "rank 1: sync.trace('folder') records nothing: the handle is detached.\n" in caplog.text
    assert caplog.records[0].getMessage().endswith("Trace before detach(), or attach again.")


def logged(rank: int) -> list[dict[str, Any]]:
    model = stretto.DistributedDataParallel(Layers(3, 0.01))
    model._set_ddp_runtime_logging_sample_rate(5)
    found = []
    for _ in range(12):
        model(torch.ones(2, 8)).sum().backward()
        found.append(model._get_ddp_logging_data())
    assert len(model.synchronizer.sampler.records) == 6, "passes 4 to 8, and 10"
    return found


@pytest.mark.ranks
def test_the_drop_in_logs_times_by_torchs_keys() -> None:
    for found in spawn_ranks(logged, 2):
        assert "backward_compute_time" not in found[2]
        for said in found[3:]:
            assert (
                said["forward_compute_time"] == said["backward_compute_time_start"] - said["forward_compute_time_start"]
            )
            for kind in ("backward_compute", "backward_comm"):
                assert said[f"{kind}_time"] == said[f"{kind}_time_end"] - said[f"{kind}_time_start"]
            assert said["backward_compute_time"] >= 20 * MS, "two layers sleep"
            assert 0 <= said["backward_compute_comm_overlap_time"] <= said["backward_comm_time"]
        last = [found[number - 1]["backward_compute_time"] for number in (4, 5, 6, 7, 8, 10)]
        assert found[-1]["avg_backward_compute_time"] == sum(last) // 6
        assert found[9]["iteration"] == 10


# Records


def record(**other: Any) -> PassRecord:
    """Times in milliseconds: forward 10 to 30, backward to 90, settled at 100, two buckets."""
    values: dict[str, Any] = {
        "number": 5,
        "plan": "",
        "began": 0,
        "started": 40 * MS,
        "backward_ended": 90 * MS,
        "settled": 100 * MS,
        "forwards": (Span(10 * MS, 30 * MS),),
        "optimizer": (Span(2 * MS, 7 * MS),),
        "gradients": (("b", 40 * MS), ("a", 80 * MS)),
        "launches": (
            Launch(0, 100, "b", 40 * MS, 41 * MS, 42 * MS, 61 * MS, 92 * MS),
            Launch(1, 300, "a", 80 * MS, 90 * MS, 91 * MS, 98 * MS, 99 * MS),
        ),
    }
    return PassRecord(**{**values, **other})


def test_the_parts_of_a_step_add_up() -> None:
    one = record()
    assert (one.forward, one.stepping, one.step) == pytest.approx((0.020, 0.005, 0.100))
    assert one.launching == pytest.approx(0.001), "what is launched after backward is exposed anyway"
    assert one.hidden == pytest.approx(0.019)
    assert one.exposed == pytest.approx(0.011)
    assert one.backward == pytest.approx(0.059)
    assert one.other == pytest.approx(0.005)
    assert one.backward_began == 30 * MS
    assert record(forwards=()).backward_began == 40 * MS
    assert record(forwards=()).backward == pytest.approx(0.049)


def test_micro_batches_are_forward_and_backward_in_turn() -> None:
    forwards = (Span(8 * MS, 10 * MS), Span(20 * MS, 30 * MS))
    one = record(forwards=forwards, unsynchronized=(Span(10 * MS, 18 * MS),))
    assert one.forward == pytest.approx(0.012)
    assert one.backward == pytest.approx(0.008 + 0.060 - 0.001)
    assert one.other == pytest.approx(0.100 - 0.012 - 0.067 - 0.011 - 0.005), "2 ms lie between, 3 before"
    assert record(forwards=forwards).backward == pytest.approx(0.060 - 0.001), "a forward that no backward follows"


def test_two_backwards_of_one_forward_count_once() -> None:
    """The first under ``no_sync``, by ``retain_graph`` or because two forwards came before both."""
    forwards = (Span(20 * MS, 30 * MS),)
    one = record(forwards=forwards, unsynchronized=(Span(30 * MS, 36 * MS),))
    assert one.backward == pytest.approx(record(forwards=forwards).backward)
    parts = one.forward + one.backward + one.exposed + one.stepping + one.other
    assert parts == pytest.approx(one.step)
    drawn = [activity for activity in activities_of(one) if activity.kind == "backward"]
    assert one.backward == pytest.approx(sum(activity.end - activity.begin for activity in drawn) * NANO)


def test_a_wait_amid_backward_is_exposed_and_no_backward() -> None:
    """Where gradients may be missing, over a process group, a rank waits there for all to say what they use."""
    one = record(waits=(Span(50 * MS, 60 * MS),))
    assert one.exposed == pytest.approx(record().exposed + 0.010)
    assert one.backward == pytest.approx(record().backward - 0.010)
    assert one.hidden == pytest.approx(record().hidden - 0.010), "a bucket was on its way, but nothing was computed"
    assert one.launching == record().launching, "nothing was handed over"
    assert one.came == 80 * MS
    parts = one.forward + one.backward + one.exposed + one.stepping + one.other
    assert parts == pytest.approx(one.step)
    drawn = [activity for activity in activities_of(one) if activity.kind == "waiting"]
    assert sum(activity.end - activity.begin for activity in drawn) == 20 * MS and drawn[0].name == "other ranks"
    assert one.moved(5).waits == (Span(50 * MS + 5, 60 * MS + 5),)
    older = one.to_dict()
    del older["waits"]
    assert PassRecord.from_dict(older) == record()


def test_an_optimizer_that_steps_while_buckets_are_waited_for_counts_as_one() -> None:
    """As those of ``_apply_optimizer_in_backward``, in a comm hook: they counted as exposed too, so that parts of a
    step were more than the whole, and as launching, against which larger buckets were advised."""
    one = record(optimizer=(Span(0, 5 * MS), Span(95 * MS, 98 * MS)))
    assert one.stepping == pytest.approx(0.008)
    assert one.exposed == pytest.approx(record().exposed - 0.003)
    assert one.other == pytest.approx(record().other)
    begin = record().launches[0].begin
    launches = (replace(record().launches[0], handed_over=begin + 4 * MS), *record().launches[1:])
    amid = record(launches=launches, optimizer=(Span(0, 5 * MS), Span(begin + MS, begin + 4 * MS)))
    assert (amid.launching, amid.exposed) == pytest.approx((record().launching, record().exposed))
    assert amid.backward == pytest.approx(record().backward - 0.003)
    for each in (one, amid):
        parts = each.forward + each.backward + each.exposed + each.stepping + each.other
        assert parts == pytest.approx(each.step)
        drawn = {kind: 0.0 for kind in ("optimizer", "launching", "waiting", "backward")}
        for activity in activities_of(each):
            drawn[activity.kind] = drawn.get(activity.kind, 0.0) + (activity.end - activity.begin) * NANO
        assert drawn["optimizer"] == pytest.approx(each.stepping)
        assert drawn["launching"] + drawn["waiting"] == pytest.approx(each.exposed)
        assert drawn["backward"] == pytest.approx(each.backward)


def beside_a_late_rank_that_uses_other_layers(rank: int) -> Report:
    layers = torch.nn.ModuleList([torch.nn.Linear(32, 32, bias=False) for _ in range(4)])
    sync = stretto.attach(layers, bucket_cap_mb=1e-6, transport="process_group")
    for number in range(12):
        time.sleep(0.06 * rank)
        out = torch.ones(2, 32)
        for place, layer in enumerate(layers):
            out = out if place == 1 + number % 3 else layer(out)
        out.sum().backward()
    return sync.report()


@pytest.mark.ranks
@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_who_is_late_is_seen_where_graphs_change_over_a_process_group() -> None:
    """All wait for it amid backward, and it seemed that they computed meanwhile, and that nobody was late."""
    for report in spawn_ranks(beside_a_late_rank_that_uses_other_layers, 2):
        early, late = report.ranks
        assert early.breakdown.exposed > 0.04 > early.breakdown.backward
        assert late.behind is not None and late.behind > 0.04 and late.last > 0.9
        assert early.waiting is not None and early.waiting > 0.04


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_gradient_accumulation_is_seen_as_it_is() -> None:
    def worker(transport: Any) -> Report:
        model = Layers(2, 0.02)
        sync = stretto.attach(model, transport=transport)
        for _ in range(9):
            for micro in range(4):
                with sync.no_sync() if micro < 3 else contextlib.nullcontext():
                    model(torch.ones(2, 8)).sum().backward()
                time.sleep(0.005)
            with torch.enable_grad():
                model(torch.ones(2, 8))  # a rollout, say, without a backward
                time.sleep(0.01)
        return sync.report()

    for one in run_ranks(worker, 2):
        assert one.breakdown.backward == pytest.approx(0.080, rel=0.15)
        assert one.breakdown.other == pytest.approx(0.030, rel=0.3)
        assert_adds_up(one.breakdown)


def test_micro_batches_of_another_method_than_forward_are_backwards_of_their_own(tmp_path: Any) -> None:
    """Nobody sees that forward, which is no backward for that: it lies between two tasks of the engine."""

    class Policy(Layers):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x)

    def worker(transport: Any) -> None:
        model = Policy(2, 0.002)
        sync = stretto.attach(model, transport=transport)
        with sync.trace(tmp_path):
            for micro in range(4):
                time.sleep(0.02)
                with sync.no_sync() if micro < 3 else contextlib.nullcontext():
                    model.act(torch.ones(2, 8)).sum().backward()

    run_ranks(worker, 2)
    for trace in read_trace(tmp_path):
        (one,) = trace.passes
        first, second, third = one.unsynchronized
        between = (second.begin - first.end, third.begin - second.end, one.started - third.end)
        assert min(between) >= 20 * MS
        assert one.forward == 0 and one.other >= 0.08


@pytest.mark.parametrize("together", [True, False])
def test_backward_of_several_handles_ends_for_all_before_the_first_of_them_waits(tmp_path: Any, together: bool) -> None:
    """What the second one waits while the first settles is exposed: it was shown as backward."""

    def worker(transport: Any) -> None:
        models = [Layers(2, 0.0), Layers(2, 0.0)]
        first = stretto.attach(models[0], transport=transport)
        second = stretto.attach(models[1], transport=transport, beside=[first] if together else [])
        told: list[str] = []
        second.observe(SimpleNamespace(backward_ended=lambda number: told.append("ended")))
        with first.trace(tmp_path / "first"), second.trace(tmp_path / "second"):
            for _ in range(2):
                models[1](models[0](torch.ones(2, 8))).sum().backward()
        assert told == ["ended"] * 2

    run_ranks(worker, 2)
    for first, second in zip(read_trace(tmp_path / "first"), read_trace(tmp_path / "second"), strict=True):
        for one, other in zip(first.passes, second.passes, strict=True):
            assert one.backward_began < other.backward_ended < one.settled < other.settled


def assert_adds_up(mine: Breakdown) -> None:
    parts = mine.forward + mine.backward + mine.exposed + mine.optimizer + mine.other
    assert parts == pytest.approx(mine.step, rel=1e-6)


@pytest.mark.alone
def test_waiting_for_a_rank_is_no_matter_of_the_link() -> None:
    """Of the passes that are recorded the shortest and the longest are left out, so these times leave some of both."""
    late = {4: (1, 0.03), 5: (0, 0.06), 6: (1, 0.034), 7: (0, 0.015), 8: (1, 0.09)}

    def worker(transport: Any) -> Report:
        model = Layers(2, 0.0)
        sync = stretto.attach(model, transport=transport)
        for number in range(1, 10):
            out = model(torch.ones(2, 8)).sum()
            who, seconds = late.get(number, (0, 0.0))
            if who == transport.rank:
                time.sleep(seconds)
            out.backward()
        return sync.report()

    for one in run_ranks(worker, 2):
        assert one.straggler is None
        mine = one.ranks[one.rank]
        assert mine.waiting is not None and mine.waiting > 0.5 * mine.breakdown.exposed
        assert not any("Communication is" in said for said in one.advice), one.advice


def test_what_several_spans_cover_counts_once() -> None:
    assert covered([Span(0, 10), Span(5, 20), Span(6, 7), Span(30, 40)]) == pytest.approx(30e-9)
    assert covered([]) == 0
    assert covered([Span(-20, -10), Span(-5, 5)]) == pytest.approx(20e-9), "also before the time began"


def test_records_go_through_json() -> None:
    one = record(buffers=91 * MS)
    assert PassRecord.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(TypeError):
        PassRecord.from_dict({**one.to_dict(), "nonsense": 1})
    for wrong in ({"settled": None}, {"began": 0.5}, {"buffers": "x"}, {"gradients": [["a", None]]}):
        with pytest.raises(TypeError, match=re.escape("a time is no number of nanoseconds")):
            PassRecord.from_dict({**one.to_dict(), **wrong})
    for wrong in ({"sparse_bytes": "x"}, {"buffer_bytes": None}, {"began": 2**63}, {"number": True}):
        with pytest.raises(TypeError, match=re.escape("a time is no number of nanoseconds")):
            PassRecord.from_dict({**one.to_dict(), **wrong})
    launch = one.to_dict()["launches"][0]
    for wrong in ({"plan": 7}, {"launches": [{**launch, "closed_by": None}]}, {"launches": [{**launch, "told": 1}]}):
        with pytest.raises(TypeError, match=re.escape("a name is no text")):
            PassRecord.from_dict({**one.to_dict(), **wrong})


def test_buckets_of_records_are_medians_since_the_first_gradient() -> None:
    model = torch.nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(2)})
    plan = plan_buckets(describe_parameters(dict(model.named_parameters())), cap_bytes=12)
    names = [[plan.parameters[index].name for index in spec.indices] for spec in plan.buckets]
    assert names == [["b"], ["a"]]
    first, second = buckets_of([record(), record(started=39 * MS), record(started=41 * MS)], plan)
    assert (first.bucket, first.nbytes, first.parameters, first.closed_by) == (0, 100, ("b",), "b")
    times = (second.full, second.launched, second.started, second.ended, second.seen)
    assert times == pytest.approx((0.04, 0.05, 0.051, 0.058, 0.059))
    assert buckets_of([record(launches=())], plan) == ()


def test_medians_over_no_records_are_zeros() -> None:
    nothing = breakdown_of([])
    assert set(vars(nothing).values()) == {0.0}
    assert nothing.percent_hidden == 100


def test_who_is_behind_is_told_by_one_clock() -> None:
    def passes(ends: dict[int, int]) -> list[PassRecord]:
        return [record(number=number, backward_ended=at * MS, settled=300 * MS) for number, at in ends.items()]

    first = seen_in(0, passes({4: 100, 5: 200, 6: 90}), 0, lambda at: at)
    second = seen_in(2, passes({4: 50, 5: 160}), 10, lambda at: at + 60 * MS)
    behind = side_by_side([first, second])
    assert [one.rank for one in behind] == [0, 2]
    assert [one.behind for one in behind] == pytest.approx([0.0, 0.015])
    assert [one.last for one in behind] == [0, 1]
    unknown = replace(second, uncertainty=None)
    assert [one.behind for one in side_by_side([first, unknown])] == [None, None]
    assert [one.last for one in side_by_side([first, replace(second, ends={})])] == [None, None]
    assert side_by_side([]) == ()


def test_waiting_is_a_mean_over_the_passes_that_exposed_is_of() -> None:
    """In one pass of eight this rank waits for a second: that pass is not in the middle half."""
    mine = [record(number=number, began=-number, settled=(1100 if number == 8 else 100) * MS) for number in range(1, 9)]
    late = [replace(one, backward_ended=one.settled - 4 * MS) for one in mine]
    first, second = side_by_side([seen_in(rank, own, 0, lambda at: at) for rank, own in enumerate((mine, late))])
    assert first.waiting == pytest.approx(0.006) and first.breakdown.exposed == pytest.approx(0.011)
    assert second.waiting == 0


def test_no_rank_waits_longer_than_it_is_exposed() -> None:
    """Its other ranks have recorded but one of the two passes that the breakdown is of."""
    mine = [record(number=1, backward_ended=60 * MS), record(number=2)]
    first, _ = side_by_side(
        [seen_in(rank, own, 0, lambda at: at) for rank, own in enumerate((mine, [record(number=1)]))]
    )
    assert 0.011 < first.breakdown.exposed < 0.030 and first.waiting == first.breakdown.exposed


def test_times_are_as_uncertain_as_those_of_the_rank_whose_clock_is_known_least() -> None:
    clocks = [Clock(0, 0), Clock(5, 2 * MS), Clock(5, MS)]
    traces = [a_trace(rank, 3, clock=clock) for rank, clock in enumerate(clocks)]
    assert [one.clock_uncertainty for one in reports_from(traces)] == [0.002] * 3
    assert [one.clock_uncertainty for one in reports_from([*traces[:2], replace(traces[2], clock=None)])] == [None] * 3


def test_ranks_that_wait_for_each_other_in_turn_wait_both() -> None:
    """The first has the longer backward and waits amid it for the second, which waits for it at the end."""
    mine, other = record(waits=(Span(50 * MS, 70 * MS),), settled=110 * MS), record(backward_ended=70 * MS)
    first, second = side_by_side([seen_in(rank, [own], 0, lambda at: at) for rank, own in enumerate((mine, other))])
    assert (first.waiting, second.waiting) == pytest.approx((0.020, 0.020))
    assert (first.behind, second.behind) == (0, 0), "neither computes longer than the other"


def test_many_ranks_are_put_side_by_side_in_little_time() -> None:
    passes = [record(number=number) for number in range(500)]
    seen = [seen_in(rank, passes, 0, lambda at: at) for rank in range(64)]
    began = time.process_time()
    assert len(side_by_side(seen)) == 64
    assert time.process_time() - began < 2


def test_a_rank_within_what_is_known_of_clocks_is_no_straggler() -> None:
    late = report(ranks=(RankReport(0, breakdown(), 0.0, 0.1), RankReport(1, breakdown(), 0.02, 0.9)))
    assert late.straggler is not None
    assert replace(late, clock_uncertainty=0.03).straggler is None


def test_times_for_people() -> None:
    assert [ms(one) for one in (None, 0.0001234, 0.01234, 0.1234, 1.5)] == [
        *("-", "0.12 ms", "12.3 ms", "123 ms", "1500 ms")
    ]
    assert (share(1, 3), share(1, 0)) == ("33 %", "-")


# Clocks


def talk_of(transport: Any, store: Any, skew: int, kernel: str, drift: float = 0.0) -> ClockTalk:
    """Of a rank whose clock shows ``skew`` more, and runs so much faster."""
    return ClockTalk(
        None if store is None else Line(store),
        transport.rank,
        transport.all_gather_object,
        lambda word, seconds: word.wait(timedelta(seconds=seconds)),
        clock=kernel,
        now=lambda: int(time.perf_counter_ns() * (1 + drift)) + skew,
    )


def clocks_of(skews: list[int], kernels: list[str], *, stores: bool = True) -> list[list[Clock | None]]:
    """What each rank finds, if rank r's clock shows ``skews[r]`` more."""
    store = HashStore()

    def worker(transport: Any) -> list[Clock | None]:
        rank = transport.rank
        return talk_of(transport, store if stores else None, skews[rank], kernels[rank]).compare()

    found = run_ranks(worker, len(skews))
    assert store.num_keys() == 0, "whoever reads a key deletes it"
    return found


def test_clocks_of_other_kernels_are_found_within_what_is_said() -> None:
    skews = [0, 0, 5_000_000_000, 5_000_000_000, -7_000_000_000]
    everyone = clocks_of(skews, ["a", "a", "b", "b", "c"])
    assert all(found == everyone[0] for found in everyone)
    for skew, clock in zip(skews, everyone[0], strict=True):
        assert clock is not None
        assert abs(clock.offset + skew) <= clock.uncertainty < 100 * MS
    assert everyone[0][1] == Clock(0, 0), "one kernel has one clock"


def test_without_a_store_clocks_of_other_hosts_are_unknown() -> None:
    assert clocks_of([0, 0, 9], ["a", "a", "b"], stores=False) == [[Clock(0, 0), Clock(0, 0), None]] * 3


def test_clocks_are_compared_again_and_what_lies_between_is_interpolated() -> None:
    store, drift = HashStore(), 0.01

    def worker(transport: Any) -> tuple[Clock | None, Clock | None]:
        talk = talk_of(transport, store, 7 * MS, "ab"[transport.rank], drift * transport.rank)
        clock = talk.compare()[transport.rank]
        time.sleep(0.3)
        return clock, talk.again()

    (_, nobody), (first, last) = run_ranks(worker, 2)
    assert nobody is None and first is not None and last is not None, "rank 0 has no other clock to ask"
    assert store.num_keys() == 0
    trace = a_trace(1, 2, clock=first, later=last)
    for share_of_time in (0.0, 0.25, 0.5, 1.0, 1.5):
        here = int(first.at + share_of_time * (last.at - first.at))
        there = (here - 7 * MS) / (1 + drift) + 7 * MS
        assert abs(trace.at(here) - there) <= 2 * trace_uncertainty(first, last), share_of_time
    assert abs(a_trace(1, 2, clock=first).at(last.at) - (last.at + last.offset)) > 2 * MS, "as it would be with one"
    times = [trace.at(first.at + step) for step in range(0, 1000, 7)]
    assert times == sorted(times), "what was later stays later"


def trace_uncertainty(first: Clock, last: Clock) -> int:
    return first.right_to(first.at, last)


@pytest.mark.parametrize("gone", [0, 1])
def test_at_the_end_nobody_waits_long_for_a_rank_that_does_not_come(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.clocks.LAST_PATIENCE", 0.5)
    store, left = HashStore(), threading.Event()

    def worker(transport: Any) -> None:
        talk = talk_of(transport, store, 0, "ab"[transport.rank])
        talk.compare()
        if transport.rank == gone:
            assert left.wait(30)
        began = time.monotonic()
        assert talk.again() is None
        left.set()
        assert time.monotonic() - began < (0.4 if transport.rank == gone else 10), "a word was left for the second"

    run_ranks(worker, 2)
    assert store.num_keys() <= 1


def test_clocks_that_cannot_be_compared_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.clocks.PATIENCE", 0.3)
    monkeypatch.setattr("stretto.clocks.identity", lambda: threading.current_thread().name)
    told = threading.Event()

    def silent(self: ClockTalk, *_: Any) -> None:
        assert told.wait(60)
        raise RuntimeError("enough")

    monkeypatch.setattr(ClockTalk, "_ask", silent)

    def worker(transport: Any) -> str:
        sync = stretto.attach(Layers(1, 0.0), transport=transport)
        with pytest.raises(stretto.CommunicationError) as caught:
            sync.report()
        told.set()
        return str(caught.value)

    text = run_ranks(worker, 2)[0]
    assert re.fullmatch(
        r"rank 0, before pass 1: the clocks of hosts could not be compared over local \(threads of one process\): "
        r"not done within 0 s\nrank 0 waits in report\(\) at test_report\.py:\d+ in worker; rank 1 is at .*\.\n"
        r"Expected every rank to call the same\. Look at the first error in the other ranks' logs\.",
        text,
    ), text


def test_a_clock_that_was_compared_long_ago_is_less_certain() -> None:
    hour = 3600 * 10**9
    clock = Clock(5, 100, at=10**9)
    assert clock.right_to(10**9) == clock.right_to(10**9 + hour, Clock(7, 100, at=2 * hour)) == 100
    assert clock.right_to(10**9 + hour) == clock.right_to(10**9 - hour) == 100 + 72 * MS
    assert Clock(0, 0).right_to(hour) == 0, "it is the same clock"


def test_a_word_in_a_store() -> None:
    store = HashStore()
    word = AwaitedKeys(store, "key")
    assert not word.is_completed()
    with pytest.raises(RuntimeError, match=re.escape("no answer within 0 s")):
        word.wait(timedelta(seconds=0.01))
    both = AwaitedKeys(store, "key", "another")
    store.set("key", NOBODY)  # type: ignore[arg-type]
    word.wait()
    assert not both.is_completed()
    assert word.take() == NOBODY and store.num_keys() == 0


def test_a_word_that_is_waited_for_in_slices_is_asked_for_more_rarely_with_time() -> None:
    class Asked:
        times = 0

        def check(self, keys: list[str]) -> bool:
            self.times += 1
            return False

    word = AwaitedKeys(store := Asked(), "key")  # type: ignore[arg-type]

    def wait(seconds: float) -> None:
        with pytest.raises(RuntimeError, match="no answer"):
            word.wait(timedelta(seconds=seconds))

    for _ in range(3):
        wait(0.2)
    store.times = 0
    wait(0.3)
    assert store.times < 9, "with many ranks, each asks rank 0 for all"


def test_threads_and_processes_of_a_host_read_one_clock() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(identity()))
    thread.start()
    thread.join()
    assert found == [identity()]
    assert spawn_ranks(identity_of, 1) == found


def identity_of(rank: int) -> str:
    return identity()


# Advice


def breakdown(**other: float) -> Breakdown:
    values = {"forward": 20, "backward": 50, "exposed": 10, "launching": 1, "hidden": 30, "optimizer": 5, "other": 5}
    return Breakdown(**{name: value / 1000 for name, value in {**values, "step": 90, **other}.items()})


def bucket(number: int, **other: Any) -> BucketReport:
    at = 0.010 * (number + 1)
    values: dict[str, Any] = {
        "nbytes": 2**20,
        "parameters": (f"{number}.bias", f"{number}.weight"),
        "closed_by": f"{number}.weight",
        "first": at - 0.002,
        "before_last": at - 0.001,
        "before": f"{number}.bias",
        "full": at,
        "launched": at,
        "started": at,
        "ended": at + 0.005,
        "seen": 0.055,
    }
    return BucketReport(bucket=number, **{**values, **other})


def report(**other: Any) -> Report:
    """One that gives no reason for advice."""
    step = other.get("breakdown", breakdown())
    values: dict[str, Any] = {
        "rank": 0,
        "world_size": 2,
        "transport": "process_group (gloo)",
        "passes": 5,
        "breakdown": step,
        "buckets": (bucket(0), bucket(1), bucket(2), bucket(3, nbytes=2**18)),
        "ranks": (RankReport(0, step, 0.0, 0.5, 0.0001), RankReport(1, step, 0.0001, 0.5, 0.0)),
        "nbytes": 3 * 2**20 + 2**18,
        "bucket_memory": 2**22,
        "clock_uncertainty": 0.0,
        "plan": "",
    }
    return Report(**{**values, **other})


def test_nothing_is_advised_where_nothing_is_to_be_gained() -> None:
    assert advise(report(), {}) == ()
    assert advise(report(passes=0, breakdown=breakdown(hidden=200, exposed=200)), {}) == ()
    assert advise(report(world_size=1, breakdown=breakdown(hidden=200, exposed=200)), {}) == ()


def test_a_straggler_is_named() -> None:
    slow = breakdown(forward=40)
    late = report(ranks=(RankReport(0, breakdown(), 0.0, 0.1), RankReport(1, slow, 0.02, 0.9)))
    assert advise(late, {}) == (
        "Rank 1 ends backward last in 90 % of the passes, 20.0 ms after the first: the others wait for it, and most of "
        "the difference lies in forward.",
    )
    held_up = RankReport(1, breakdown(exposed=28, forward=21), 0.02, 0.9, 0.001)  # its results come later
    assert advise(report(ranks=(RankReport(0, breakdown(exposed=26), 0.0, 0.1, 0.013), held_up)), {}) == (
        "Rank 1 ends backward last in 90 % of the passes, 20.0 ms after the first: the others wait for it, and most of "
        "the difference lies in communication.",
    )
    nowhere = RankReport(1, breakdown(forward=21), 0.02, 0.9)
    assert advise(report(ranks=(RankReport(0, breakdown(), 0.0, 0.1), nowhere)), {}) == (
        "Rank 1 ends backward last in 90 % of the passes, 20.0 ms after the first: the others wait for it.",
    )
    now_and_then = report(ranks=(RankReport(0, breakdown(), 0.0, 0.5), RankReport(1, slow, 0.02, 0.5)))
    assert advise(now_and_then, {}) == ()


def test_ranks_that_wait_for_each_other_in_turn_are_told() -> None:
    each = tuple(RankReport(rank, breakdown(exposed=60, step=140), 0.015, 0.5, 0.030) for rank in range(2))
    assert advise(report(breakdown=each[0].breakdown, ranks=each), {}) == (
        "This rank waits 30.0 ms a step for others, not always for the same one: batches of equal cost on all ranks, "
        "or fewer ranks where they outnumber the cores, would save that time.",
    )


def test_more_communication_than_backward_cannot_be_hidden() -> None:
    assert advise(report(breakdown=breakdown(hidden=45, exposed=60, step=140)), {}) == (
        "Communication is 2.1x backward: overlap cannot hide it. Send less, by sync.register_comm_hook(None, "
        "bf16_compress_hook) (from torch.distributed.algorithms.ddp_comm_hooks.default_hooks), or less often, by "
        "accumulating under no_sync().",
    )


def test_nobody_is_sent_out_of_shared_memory() -> None:
    """A comm hook speaks to the process group, over which half the bytes take longer."""
    inside = report(breakdown=breakdown(hidden=45, exposed=60, step=140), transport="shared_memory")
    assert advise(inside, {}) == (
        "Communication is 2.1x backward: overlap cannot hide it. Send less often, by accumulating under no_sync(), or "
        "start fewer ranks if they outnumber the cores.",
    )


def test_no_second_comm_hook_is_advised() -> None:
    """``register_comm_hook`` would refuse it."""
    step, hook = breakdown(hidden=45, exposed=60, step=140), "comm hook f16, instead of "
    said = "Communication is 2.1x backward: overlap cannot hide it. Send less often, by accumulating under no_sync()"
    assert advise(report(breakdown=step, transport=f"{hook}process_group (gloo)"), {}) == (f"{said}.",)
    assert advise(report(breakdown=step, transport=f"{hook}shared_memory"), {}) == (
        f"{said}, or leave out the comm hook, so that gradients go through shared memory.",
    )
    last = bucket(3, nbytes=3 * 2**20, launched=0.050, seen=0.060, parameters=("3.weight",))
    hooked = report(buckets=(bucket(0), last), transport=f"{hook}process_group (gloo)")
    assert advise(hooked, {})[0].endswith("(`3.weight` comes last); a parameter is never cut, so freeze it.")


def test_where_a_comm_hook_sends_report_and_trace_do_not_name_the_transport_alone(tmp_path: Any) -> None:
    def worker(transport: Any) -> Report:
        model = torch.nn.Linear(8, 8)
        sync = stretto.attach(model, transport=transport)
        sync.register_comm_hook(None, at_once)
        with sync.trace(tmp_path):
            model(torch.ones(2, 8)).sum().backward()
        return sync.report()

    over = "comm hook test_report.at_once, instead of local (threads of one process)"
    assert [one.transport for one in run_ranks(worker, 2)] == [over] * 2
    assert [one.transport for one in read_trace(tmp_path)] == [over] * 2


def test_buckets_of_a_trace_hold_what_travels_in_another_dtype(tmp_path: Any) -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(8, 8, bias=False).bfloat16()
        sync = stretto.attach(model, transport=transport, reduce_dtype=torch.float32)
        with sync.trace(tmp_path):
            model(torch.ones(2, 8).bfloat16()).sum().backward()

    run_ranks(worker, 2)
    assert [(one.nbytes, one.bucket_memory) for one in reports_from(read_trace(tmp_path))] == [(256, 256)] * 2


def at_once(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook that leaves gradients as they are."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_a_bucket_that_waits_for_one_gradient_is_named() -> None:
    both = ("h.bias", "embed.weight")
    late = bucket(1, parameters=both, closed_by="embed.weight", before_last=0.020, before="h.bias", full=0.032)
    waiting = report(buckets=(bucket(0), late, bucket(2), bucket(3, nbytes=2**18)))
    assert advise(waiting, {"embed.weight": "head.weight"}) == (
        "Bucket 1 waits 12.0 ms for `embed.weight`, which is used as `head.weight` too, and 1 full bucket behind it: "
        'let the rest leave before it with attach(launch_after=["h.bias"]).',
    )
    third = bucket(4, full=0.031)
    unsent = replace(waiting, buckets=(late, bucket(2), third))  # the first bucket of the plan was not sent
    assert ", and 2 full buckets behind it: " in advise(unsent, {})[0]
    alone = replace(waiting, buckets=(bucket(0), late))
    assert advise(alone, {}) == (
        'Bucket 1 waits 12.0 ms for `embed.weight`: let the rest leave before it with attach(launch_after=["h.bias"]).',
    )


def test_a_large_last_bucket_is_named() -> None:
    last = bucket(3, nbytes=3 * 2**20, launched=0.050, seen=0.060)
    assert advise(report(buckets=(bucket(0), bucket(1), bucket(2), last)), {}) == (
        "The last bucket, which leaves when backward has ended, takes 10.0 ms: it holds 3.0 MB (`3.weight` comes "
        "last); lower attach(last_bucket_cap_mb=).",
    )
    single = replace(last, parameters=("3.weight",))
    assert advise(report(buckets=(bucket(0), bucket(1), bucket(2), single)), {})[0].endswith(
        "a parameter is never cut, so freeze it, or send it as bf16 by a comm hook."
    )
    inside = report(buckets=(bucket(0), bucket(1), bucket(2), single), transport="shared_memory")
    assert advise(inside, {})[0].endswith("(`3.weight` comes last); a parameter is never cut, so freeze it.")


def test_many_small_buckets_are_named() -> None:
    small = tuple(bucket(number, nbytes=1000) for number in range(20))
    assert advise(report(buckets=small, nbytes=20_000, breakdown=breakdown(launching=5)), {}) == (
        "5.00 ms of backward go into handing over 20 buckets of 1000 B on average: larger ones cost less, raise "
        "attach(bucket_cap_mb=).",
    )


def test_at_most_three_sentences_the_most_important_first() -> None:
    step = breakdown(hidden=45, exposed=60, step=140, launching=10)  # 60 ms exposed
    late = bucket(1, before_last=0.002, full=0.020)  # 18 ms
    last = bucket(2, nbytes=2**21, launched=0.050, seen=0.090)  # 40 ms
    worst = report(breakdown=step, buckets=(bucket(0, nbytes=9), late, last), nbytes=2**18)
    said = advise(worst, {})
    assert [one.split()[0] for one in said] == ["Communication", "The", "Bucket"]


def test_tied_names() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(3, 2)
            self.head = torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    assert tied_names(Tied()) == {"embed.weight": "head.weight"}
    assert tied_names(torch.nn.Linear(2, 2)) == {}


def test_a_report_is_made_to_be_read() -> None:
    text = str(replace(report(clock_uncertainty=0.0002), advice=("Do this.",)))
    assert text.splitlines()[0] == "rank 0 of 2 over process_group (gloo), means over the middle half of 5 passes"
    assert str(report(passes=1)).splitlines()[0] == "rank 0 of 2 over process_group (gloo), one pass"
    assert text.splitlines()[1] == (
        "a step takes 90.0 ms; buckets are on their way for 40.0 ms: backward hides 75 %, 10.0 ms exposed, "
        "11 % of the step"
    )
    assert text.splitlines()[2] == "3.2 MB of gradients in 4 buckets, with 4.0 MB of memory"
    assert "bucket      size      full  launched   started     ended      seen  closed by" in text
    assert "     3    256 KB   40.0 ms   40.0 ms   40.0 ms   45.0 ms   55.0 ms  3.weight" in text
    assert text.endswith("\ntimes of different hosts are accurate to 0.20 ms\nDo this.")
    unknown = str(report(clock_uncertainty=None))
    assert unknown.endswith("\nclocks of different hosts could not be compared: who was late is not known")


def test_plans_in_records_are_values() -> None:
    assert BucketPlan.from_json(plan_of_one().to_json()).hash == plan_of_one().hash


def plan_of_one() -> BucketPlan:
    return plan_buckets(describe_parameters(dict(torch.nn.Linear(2, 2).named_parameters())), cap_bytes=100)


LEAVES_WITH_A_BUCKET_UNDER_WAY = """
import atexit, threading, time, types
import torch
from stretto.flights import Flight

future = torch.futures.Future()
flight = Flight(0)
atexit.register(lambda: print("ended" if flight.end else "under way"))  # runs last
flight.follow(types.SimpleNamespace(get_future=lambda: future))
carrier = threading.Thread(target=lambda: (time.sleep(2.5), future.set_result(None)), daemon=True)
carrier.start()
"""


def test_the_end_of_the_program_sees_what_was_given_up_end() -> None:
    """Gloo's thread that says so to an interpreter which is gone would end the process by SIGABRT.

    It says so when another rank has gone, whose interpreter takes seconds to end where the machine is busy.
    """
    run = subprocess.run([sys.executable, "-c", LEAVES_WITH_A_BUCKET_UNDER_WAY], capture_output=True, timeout=60)
    assert (run.returncode, run.stdout.decode()) == (0, "ended\n")


LEAVES_WITH_MANY_THAT_NEVER_END = """
import atexit, time, types
import torch
from stretto import flights

flights.EXIT_SECONDS = 0.4
began = []
atexit.register(lambda: print(f"{time.monotonic() - began[0]:.1f}"))
begun = [flights.Flight(0) for _ in range(20)]
futures = [torch.futures.Future() for _ in begun]
for flight, future in zip(begun, futures):
    flight.follow(types.SimpleNamespace(get_future=lambda: future))
atexit.register(lambda: began.append(time.monotonic()))
"""


def test_the_end_of_the_program_waits_once_for_all_that_was_given_up() -> None:
    run = subprocess.run([sys.executable, "-c", LEAVES_WITH_MANY_THAT_NEVER_END], capture_output=True, timeout=60)
    assert run.returncode == 0 and 0.4 <= float(run.stdout) < 20 * 0.4 / 2


def test_what_is_recorded_leaves_nothing_behind_at_the_end_of_the_program() -> None:
    """One function for all of them: Python keeps the places of those that were taken back."""
    for number in range(3):
        if number == 1:
            registered = atexit._ncallbacks()
        future = torch.futures.Future()
        flight = Flight(0)
        flight.follow(SimpleNamespace(get_future=lambda future=future: future))
        future.set_result(None)
        assert flight.end
    assert atexit._ncallbacks() == registered
