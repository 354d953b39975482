"""Advice from synthetic traces: what ranks have seen, through the report, to the sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from traces import MS, a_record, a_trace, plan_of

from stretto.analysis import reports_from
from stretto.plan import BucketPlan, plan_buckets
from stretto.record import Launch, PassRecord
from stretto.specs import describe_parameters


def advised(*passes_of_ranks: list[PassRecord], plan: BucketPlan | None = None, **other: Any) -> tuple[str, ...]:
    """What rank 0 is told."""
    world = len(passes_of_ranks)
    plans = {} if plan is None else {"plans": {plan.hash: plan}}
    traces = [a_trace(rank, world, passes, **plans, **other) for rank, passes in enumerate(passes_of_ranks)]
    return reports_from(traces)[0].advice


def later(record: PassRecord, by: int) -> PassRecord:
    """The rank's backward takes so much longer; the others' results come with it."""
    launches = tuple(
        replace(one, full=one.begin + by, begin=one.begin + by, handed_over=one.handed_over + by, end=one.end + by)
        for one in record.launches
    )
    launches = tuple(replace(one, seen=max(one.seen, one.end)) for one in launches)
    ended = record.backward_ended + by
    return replace(record, backward_ended=ended, settled=max(record.settled, ended + 5 * MS), launches=launches)


def calm(number: int) -> PassRecord:
    """A pass in which everything is hidden."""
    one = a_record(number)
    launches = tuple(
        replace(each, handed_over=each.begin, end=each.begin + 2 * MS, seen=one.backward_ended + MS)
        for each in one.launches
    )
    return replace(one, launches=launches, settled=one.backward_ended + MS)


def test_a_calm_run_is_left_alone() -> None:
    assert advised([calm(n) for n in range(4)], [calm(n) for n in range(4)]) == ()


def test_the_rank_that_is_late() -> None:
    said = advised([calm(n) for n in range(4)], [later(calm(n), 30 * MS) for n in range(4)])
    assert said == (
        "Rank 1 ends backward last in 100 % of the passes, 30.0 ms after the first: the others wait for it, and most "
        "of the difference lies in backward.",
    )


def test_ranks_that_are_late_in_turn() -> None:
    fast, slow = [calm(n) for n in range(4)], [later(calm(n), 30 * MS) for n in range(4)]
    mine = [replace(one, settled=other.settled) for one, other in zip(fast, slow, strict=True)]
    turns = [[mine[0], slow[1], mine[2], slow[3]], [slow[0], mine[1], slow[2], mine[3]]]
    assert advised(*turns)[0].startswith("This rank waits 15.0 ms a step for others, not always for the same one: ")


def test_a_link_that_is_too_slow() -> None:
    def slow(number: int) -> PassRecord:
        one = a_record(number)
        launches = tuple(
            replace(
                each, end=one.backward_ended + (place + 1) * 40 * MS, seen=one.backward_ended + (place + 1) * 40 * MS
            )
            for place, each in enumerate(one.launches)
        )
        return replace(one, launches=launches, settled=launches[-1].seen)

    said = advised([slow(n) for n in range(4)], [slow(n) for n in range(4)])
    assert said[0].startswith("Communication is ") and "x backward: overlap cannot hide it." in said[0]


def in_two_buckets(number: int) -> PassRecord:
    """``embed.weight`` shares a bucket with two others and comes 12 ms after them, at the very end."""
    at = 100 * MS * number
    gradients = (
        ("head.bias", at + 30 * MS),
        ("mid", at + 34 * MS),
        ("h.bias", at + 36 * MS),
        ("embed.weight", at + 48 * MS),
    )
    launches = (
        Launch(0, 2048, "mid", at + 34 * MS, at + 34 * MS, at + 34 * MS, at + 40 * MS, at + 53 * MS),
        Launch(1, 2048, "embed.weight", at + 48 * MS, at + 52 * MS, at + 53 * MS, at + 69 * MS, at + 70 * MS),
    )
    return a_record(number, plan=PLAN.hash, gradients=gradients, launches=launches)


PLAN = plan_buckets(
    describe_parameters({name: torch.zeros(256) for name in ("embed.weight", "h.bias", "mid", "head.bias")}),
    cap_bytes=2048,
    last_cap_bytes=2048,
)


def test_a_bucket_that_waits_for_a_tied_parameter() -> None:
    passes = [in_two_buckets(n) for n in range(4)]
    said = advised(passes, passes, plan=PLAN, tied={"embed.weight": "head.weight"})
    assert (
        "Bucket 1 waits 12.0 ms for `embed.weight`, which is used as `head.weight` too: let the rest leave before it "
        'with attach(launch_after=["h.bias"]).'
    ) in said


def test_a_last_bucket_that_is_large() -> None:
    def large(number: int) -> PassRecord:
        one = in_two_buckets(number)
        first, last = one.launches
        return replace(one, launches=(first, replace(last, nbytes=2**23)))

    passes = [large(n) for n in range(4)]
    said = advised(passes, passes, plan=PLAN)
    assert any(one.startswith("The last bucket, which leaves when backward has ended, takes 18.0 ms: ") for one in said)


def test_many_small_buckets() -> None:
    names = [f"p{n}" for n in range(12)]

    def many(number: int) -> PassRecord:
        one = a_record(number, names)
        launches = tuple(replace(each, handed_over=each.begin + MS, end=each.begin + MS) for each in one.launches)
        return replace(one, launches=launches)

    passes = [many(n) for n in range(4)]
    said = advised(passes, passes, plan=plan_of(names))
    assert any("of backward go into handing over 12 buckets of 1.0 KB on average" in one for one in said), said
