"""The traces of all ranks side by side: nothing negative, nothing twice, and the times that were put in."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from traces import MS, Ladder, Watch, a_record, a_trace, assert_true_to_5_percent, plan_of, recorded, records

import stretto
from stretto.activities import transfers_of
from stretto.clocks import Clock
from stretto.record import NANO, Launch, PassRecord
from stretto.report import UNTOLD
from stretto.testing import DelayTransport, run_ranks, spawn_ranks
from stretto.timeline import RankPass, Timeline, timeline_of
from stretto.trace import read_trace

NAMES = ("first", "middle", "last")


def check_spans(one: RankPass) -> None:
    """Activities follow each other from the step's beginning to its end, transfers lie in it."""
    assert one.activities[0].begin == one.record.began >= 0
    assert one.activities[-1].end == one.record.settled
    assert all(activity.begin <= activity.end for activity in one.activities)
    assert all(
        activity.end == following.begin for activity, following in zip(one.activities, one.activities[1:], strict=False)
    )
    for transfer in one.transfers:
        launch = transfer.launch
        assert 0 <= launch.begin <= launch.handed_over <= launch.end <= launch.seen <= one.record.settled
        assert transfer.hidden >= 0 and transfer.exposed >= 0
        assert transfer.hidden + transfer.exposed == launch.end - launch.begin


def seconds(one: RankPass, *kinds: str) -> float:
    return sum(activity.end - activity.begin for activity in one.activities if activity.kind in kinds) * NANO


def check_sums(one: RankPass) -> None:
    """The activities are those of the record's breakdown."""
    record = one.record
    assert seconds(one, "launching", "waiting") == pytest.approx(record.exposed)
    assert seconds(one, "backward") == pytest.approx(record.backward)
    assert seconds(one, "forward") == pytest.approx(record.forward)
    assert seconds(one, "optimizer") == pytest.approx(record.stepping)
    assert seconds(one, "other") == pytest.approx(record.other)


def test_a_run_of_three_ranks(tmp_path: Path) -> None:
    traces = recorded(tmp_path, 3)
    timeline = timeline_of(traces)
    assert timeline.world_size == 3 and [rank.rank for rank in timeline.ranks] == [0, 1, 2]
    assert timeline.numbers == (3, 4, 5) and timeline.typical in timeline.numbers
    assert min(one.record.began for one in timeline.passes) == 0
    for rank, trace in zip(timeline.ranks, traces, strict=True):
        (plan,) = trace.plans.values()
        settled = [0, *(one.record.settled for one in rank.passes)]
        assert [one.record.began for one in rank.passes[1:]] == settled[1:-1]
        for one in rank.passes:
            check_spans(one)
            check_sums(one)
            assert [transfer.launch.bucket for transfer in one.transfers] == list(range(len(plan.buckets))) == [0, 1, 2]
            assert [transfer.parameters for transfer in one.transfers] == [
                (f"rungs.{name}.weight",) for name in reversed(NAMES)
            ]
            named = [activity.name for activity in one.activities if activity.kind == "backward" and activity.name]
            assert named == [f"rungs.{name}.weight" for name in reversed(NAMES)]


def train_over_gloo(rank: int, folder: str) -> list[list[str]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.BatchNorm1d(64))
    sync = stretto.attach(model, transport="process_group", bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with sync.trace(folder):
        for _ in range(8):
            step()
    return [[sync.plan.parameters[index].name for index in spec.indices] for spec in sync.plan.buckets]


@pytest.mark.ranks
def test_a_run_of_three_processes(tmp_path: Path) -> None:
    """What a merged trace must be: nothing negative, nothing out of order, buckets as in the plan on every rank."""
    (buckets, *others) = spawn_ranks(train_over_gloo, 3, str(tmp_path))
    assert others == [buckets, buckets] and len(buckets) > 3
    timeline = timeline_of(read_trace(tmp_path))
    assert timeline.told and timeline.notes() == () and timeline.numbers == (4, 5, 6, 7, 8, 9, 10, 11)
    for rank in timeline.ranks:
        at = 0
        for one in rank.passes:
            check_spans(one)
            check_sums(one)
            record = one.record
            assert at <= record.began <= record.started <= record.backward_ended <= record.settled
            at = record.settled
            begins = [transfer.launch.begin for transfer in one.transfers]
            assert begins == sorted(begins) and [list(transfer.parameters) for transfer in one.transfers] == buckets
            assert [transfer.launch.bucket for transfer in one.transfers] == [*range(len(buckets))]
            assert record.buffers is not None and record.buffers >= record.backward_ended
            assert all(transfer.joined is not None for transfer in one.transfers)
            gradients = [came for _, came in record.gradients]
            assert gradients == sorted(gradients) and len(gradients) == 14
    for number in timeline.numbers:
        passes = [one for rank in timeline.ranks for one in rank.passes if one.record.number == number]
        for transfers in zip(*(one.transfers for one in passes), strict=True):
            last = max(transfer.launch.begin for transfer in transfers)
            assert min(transfer.launch.end for transfer in transfers) >= last, "no result before all have launched"


def test_arrows_go_from_the_gradient_to_the_launch_to_the_settle(tmp_path: Path) -> None:
    for one in timeline_of(recorded(tmp_path, 3)).passes:
        assert len(one.arrows) == 3
        for arrow in one.arrows:
            launch = arrow.transfer.launch
            assert arrow.source is not None and arrow.source in one.activities and arrow.settle in one.activities
            assert (arrow.source.kind, arrow.source.name) == ("backward", launch.closed_by)
            assert arrow.source.end <= launch.begin
            assert arrow.settle.kind == "waiting" and arrow.settle.begin < launch.seen <= arrow.settle.end
            assert arrow.settle.name == f"bucket {launch.bucket}"


def test_the_activities_of_a_known_pass() -> None:
    (one,) = timeline_of([a_trace()]).passes
    assert [
        (activity.kind, activity.begin // MS, activity.end // MS, activity.name) for activity in one.activities
    ] == [
        ("other", 0, 2, ""),
        ("optimizer", 2, 4, ""),
        ("other", 4, 10, ""),
        ("forward", 10, 20, ""),
        ("backward", 20, 30, "c"),
        ("launching", 30, 31, "bucket 0"),
        ("backward", 31, 40, "b"),
        ("launching", 40, 41, "bucket 1"),
        ("backward", 41, 50, "a"),
        ("launching", 50, 51, "bucket 2"),
        ("backward", 51, 52, ""),
        ("waiting", 52, 53, "bucket 0"),
        ("waiting", 53, 55, "bucket 1"),
        ("waiting", 55, 65, "bucket 2"),
        ("waiting", 65, 70, ""),
    ]
    assert [(one.hidden // MS, one.exposed // MS) for one in one.transfers] == [(13, 2), (10, 5), (1, 14)]


def test_a_bucket_that_lacked_a_gradient_has_no_source() -> None:
    launches = tuple(replace(one, full=None, closed_by="") for one in a_record().launches)
    (one,) = timeline_of([a_trace(passes=[a_record(launches=launches)])]).passes
    assert [arrow.source for arrow in one.arrows] == [None] * 3


@given(st.lists(records(), min_size=1, max_size=3), st.lists(st.integers(-1000, 1000), min_size=3, max_size=3))
def test_whatever_was_recorded_by_whatever_clock_spans_follow_each_other(
    several: list[PassRecord], offsets: list[int]
) -> None:
    traces = [
        a_trace(rank, len(several), [one], plans={}, clock=Clock(offset, 5))
        for rank, (one, offset) in enumerate(zip(several, offsets, strict=False))
    ]
    timeline = timeline_of(traces)
    assert min(one.activities[0].begin for one in timeline.passes) == 0
    for one in timeline.passes:
        check_spans(one)
        assert len(one.arrows) == len(one.transfers)


def calmest(timeline: Timeline) -> Timeline:
    """The pass that other programs on this machine have disturbed least."""
    return min((timeline.only([number]) for number in timeline.numbers), key=lambda shown: shown.end)


@pytest.mark.alone
@pytest.mark.parametrize("link", [0.05, 0.1])
def test_on_a_link_with_known_delays_hidden_and_exposed_are_right_to_5_percent(tmp_path: Path, link: float) -> None:
    """Gradients come every 60 ms, on a link that keeps up and on one that does not."""
    watches: list[Watch] = [None, None]  # type: ignore[list-item]

    def worker(transport):
        carrier = DelayTransport(transport, lambda nbytes: link)
        watch = watches[transport.rank] = Watch(carrier)
        model = Ladder("abcd", 0.06)
        sync = stretto.attach(model, transport=carrier, bucket_cap_mb=1e-6)
        with sync.trace(tmp_path):
            sync.observe(watch)
            for _ in range(7):
                model(torch.ones(2, 8)).sum().backward()
        sync.detach()

    run_ranks(worker, 2)
    timeline = timeline_of(read_trace(tmp_path))
    assert timeline.told
    for rank, watch in zip(timeline.ranks, watches, strict=True):
        assert_true_to_5_percent([(one.record, watch.truths[one.record.number]) for one in rank.passes])
        summed = [sum(transfer.hidden for transfer in one.transfers) * NANO for one in rank.passes]
        wrong = [
            abs(hidden / watch.truths[one.record.number].over_backward - 1)
            for hidden, one in zip(summed, rank.passes, strict=True)
        ]
        assert min(wrong) < 0.05, wrong


def test_a_bucket_has_not_arrived_before_the_last_rank_has_launched_it(tmp_path: Path) -> None:
    slow = {"backward": 0.01, "link": lambda nbytes: 0.002, "late": lambda rank: 0.1 * rank}
    early, late = (rank.passes[0] for rank in calmest(timeline_of(recorded(tmp_path, 2, passes=6, **slow))).ranks)
    for mine, theirs in zip(early.transfers, late.transfers, strict=True):
        assert mine.launch.begin + 30 * MS < theirs.launch.begin == mine.joined == theirs.joined
        assert mine.launch.end >= theirs.launch.begin
    assert early.record.exposed > 0.05


def test_when_the_last_rank_has_launched_a_bucket_is_known_where_all_have() -> None:
    """By clocks that are a little apart it may lie behind the result."""
    here = a_record()
    first, _, last = here.launches
    there = a_record(launches=(replace(first, begin=first.end + MS), replace(last, begin=last.begin + 2 * MS)))
    mine, _ = timeline_of([a_trace(0, 2, [here]), a_trace(1, 2, [there])]).ranks
    ends = [one.launch for one in mine.passes[0].transfers]
    assert [one.joined for one in mine.passes[0].transfers] == [ends[0].end, None, ends[2].begin + 2 * MS]


def test_an_arrow_begins_at_the_gradient_that_filled_the_bucket_and_not_at_one_that_comes_again() -> None:
    once = a_record()
    (name, came), *others = once.gradients
    again = a_record(gradients=((name, came), others[0], (name, others[0][1] + 5 * MS), others[1]))
    (one,) = timeline_of([a_trace(0, 1, [again], plans={})]).passes
    sources = [arrow.source for arrow in one.arrows]
    assert [source and (source.name, source.end) for source in sources] == [
        (launch.closed_by, launch.full) for launch in one.record.launches
    ]


# Clocks


def test_clocks_of_other_hosts_are_brought_to_rank_0s() -> None:
    ahead = a_record().moved(-7 * MS)
    timeline = timeline_of([a_trace(0, 2), a_trace(1, 2, [ahead], clock=Clock(9 * MS, 1 * MS))])
    here, there = (rank.passes[0].record.began for rank in timeline.ranks)
    assert (here, there) == (0, 2 * MS)
    assert timeline.ranks[1].uncertainty == MS
    assert timeline.notes() == ("rank 1: times are accurate to 1.00 ms relative to rank 0",)
    assert [one.joined for one in timeline.ranks[0].passes[0].transfers] == [
        one.launch.begin for one in timeline.ranks[1].passes[0].transfers
    ]


def test_a_rank_that_clocks_place_before_rank_0_begins_the_time() -> None:
    timeline = timeline_of([a_trace(0, 2), a_trace(1, 2, clock=Clock(-3 * MS, 4 * MS))])
    assert [rank.passes[0].activities[0].begin for rank in timeline.ranks] == [3 * MS, 0]


def test_without_clocks_passes_settle_together() -> None:
    boots_earlier = [a_record(number).moved(10**15) for number in (1, 2)]
    timeline = timeline_of([a_trace(0, 2, [a_record(1), a_record(2)]), a_trace(1, 2, boots_earlier, clock=None)])
    assert [one.record for one in timeline.ranks[0].passes] == [one.record for one in timeline.ranks[1].passes]
    assert timeline.notes() == ("rank 1: its clock is not known, so its passes are drawn to settle with rank 0's",)
    assert all(transfer.joined is None for one in timeline.passes for transfer in one.transfers)
    other = timeline_of([a_trace(0, 2, [a_record(1)]), a_trace(1, 2, [a_record(2).moved(10**15)], clock=None)])
    assert [one.record.settled for one in other.passes] == [70 * MS] * 2


# Which passes


def longer(number: int, by: int) -> PassRecord:
    record = a_record(number)
    return replace(record, began=record.began - by * MS)


def test_the_typical_pass_is_the_one_in_the_middle_that_all_have() -> None:
    first = [longer(1, 90), longer(2, 0), longer(3, 8), longer(4, 4), longer(5, 2)]
    second = [longer(2, 0), longer(3, 0), longer(4, 5), longer(5, 50)]
    timeline = timeline_of([a_trace(0, 2, first), a_trace(1, 2, second)])
    assert timeline.typical == 4
    assert timeline.numbers == (1, 2, 3, 4, 5)


def test_time_begins_anew_with_the_passes_that_are_chosen() -> None:
    traces = [a_trace(rank, 2, [a_record(1), a_record(2), longer(3, 20)]) for rank in range(2)]
    timeline = timeline_of(traces)
    assert [one.record.began // MS for one in timeline.ranks[0].passes] == [0, 100, 180]
    assert timeline.end == 270 * MS
    assert timeline.only().numbers == (1,)
    assert [one.record.began // MS for one in timeline.only([2, 3]).ranks[1].passes] == [0, 80]
    assert timeline.only([9]).passes == ()


def test_hidden_is_what_is_left_of_the_way_without_the_launches_in_it() -> None:
    numbers = random.Random(0)
    names = [f"p{number}" for number in range(40)]
    launches = []
    for number, name in enumerate(names):
        begin = numbers.randrange(100)
        times = (begin, begin + numbers.randrange(5), begin + numbers.randrange(40))
        launches.append(Launch(number, 1024, name, begin, *times, 150))
    record = a_record(names=names, launches=tuple(launches), backward_ended=80)
    for one in transfers_of(record, plan_of(names)):
        begin, end = one.launch.begin, min(one.launch.end, 80)
        stopped = {at for other in launches for at in range(other.begin, other.handed_over)}
        assert one.hidden == len({*range(begin, end)} - stopped)
        assert one.hidden + one.exposed == one.launch.end - begin and one.parameters == (names[one.launch.bucket],)


# What is not there


def test_nothing_at_all() -> None:
    for timeline in (timeline_of([]), timeline_of([]).only()):
        assert timeline == Timeline(0, ())
        assert (timeline.typical, timeline.numbers, timeline.end, timeline.exposed) == (None, (), 0, 0.0)
        assert timeline.headline() == "no pass was recorded"


def test_a_rank_without_passes() -> None:
    timeline = timeline_of([a_trace(0, 2, [a_record(1), a_record(2)]), a_trace(1, 2, [], end=None)])
    assert timeline.typical == 1
    assert timeline.notes() == (
        "rank 1: none of these passes was recorded",
        "rank 1: its trace was cut off, the process may have been killed",
    )
    assert timeline_of([a_trace(0, 2, []), a_trace(1, 2)]).end == 70 * MS


def test_a_pass_that_sent_nothing() -> None:
    timeline = timeline_of([a_trace(passes=[a_record(launches=())])])
    check_spans(timeline.passes[0])
    assert timeline.headline() == "no bucket was sent"


def test_the_headline() -> None:
    record = a_record()
    assert record.hidden == pytest.approx(0.019) and record.exposed == pytest.approx(0.021)
    assert timeline_of([a_trace()]).headline() == (
        "48 % of communication hidden behind backward; 21.0 ms exposed, 30 % of the step"
    )


def test_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    file = tmp_path / "rank1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:40])
    timeline = timeline_of(read_trace(tmp_path))
    assert [len(rank.passes) for rank in timeline.ranks] == [3, 1]
    assert timeline.typical == timeline.ranks[1].passes[0].record.number
    assert timeline.notes() == ("rank 1: its trace was cut off, the process may have been killed", UNTOLD)


def test_a_run_that_ended_in_an_exception_says_so() -> None:
    assert timeline_of([a_trace(end="KeyError: 'x'")]).notes() == ("rank 0: ended with KeyError: 'x'",)
    told = "PeerError: rank 0, pass 7: rank 3 left.\n  rank 3: ValueError: x\nRemove the cause."
    in_one_line = "rank 0: ended with PeerError: rank 0, pass 7: rank 3 left. rank 3: ValueError: x Remove the cause."
    assert timeline_of([a_trace(end=told)]).notes() == (in_one_line,)
