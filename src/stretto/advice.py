"""What to change, according to a report's numbers: computed sentences, most important first, never more than three.

Each rule uses only the report, and says nothing where the gain would be small: below ``WORTH`` of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from .report import Report, ms, share
from .wording import counted, format_bytes

MOST = 3
WORTH = 0.03
"""Of a step: less is noise."""
TOO_MUCH = 1.2
"""Communication over backward, above which overlap is not the cure."""
SMALL = 256 * 1024
"""Bytes in a bucket, on average, below which it is worth a thought that there are many."""

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
IN_MEMORY = "shared_memory"
"""With this transport no comm hook is advised: a hook would send over the process group, where half the bytes take
longer than all of them in memory."""

_HOOKED = "comm hook "
"""So begins what carries the buckets where a comm hook does; there is never a second one."""


def advise(report: Report, tied: Mapping[str, str]) -> tuple[str, ...]:
    """At most three sentences.

    Args:
        report: of one rank.
        tied: names of parameters, and under what other name the module uses them too.
    """
    if not report.passes or report.world_size == 1:
        return ()
    rules = (
        _straggler(report),
        _uneven(report),
        _too_much(report),
        _waits(report, tied),
        _last_bucket(report),
        _many_launches(report),
    )
    said = sorted((one for one in rules if one is not None), key=lambda one: -one[0])
    return tuple(sentence for gain, sentence in said if gain >= WORTH * report.breakdown.step)[:MOST]


Said = tuple[float, str] | None
"""Seconds that it is about, and the sentence."""


def _straggler(report: Report) -> Said:
    """All wait for one rank."""
    one = report.straggler
    if one is None or one.behind is None or one.last is None:
        return None
    first = min(report.ranks, key=lambda other: other.behind or 0.0)
    slow, fast = one.breakdown, first.breakdown
    parts = {
        "forward": slow.forward - fast.forward,
        "backward": slow.backward - fast.backward,
        "the optimizer": slow.optimizer - fast.optimizer,
        "the time between passes (data?)": slow.other - fast.other,
        "communication": (slow.exposed - (one.waiting or 0.0)) - (fast.exposed - (first.waiting or 0.0)),
    }
    where = max(parts, key=lambda part: parts[part])
    mostly = f", and most of the difference lies in {where}" if parts[where] > one.behind / 2 else ""
    return (
        one.behind,
        f"Rank {one.rank} ends backward last in {share(one.last, 1)} of the passes, {ms(one.behind)} after the first: "
        f"the others wait for it{mostly}.",
    )


def _uneven(report: Report) -> Said:
    """Ranks wait for each other, but not always for the same one."""
    waiting = _waiting(report)
    if report.straggler is not None:
        return None
    return (
        waiting,
        f"This rank waits {ms(waiting)} a step for others, not always for the same one: batches of equal cost on "
        "all ranks, or fewer ranks where they outnumber the cores, would save that time.",
    )


def _waiting(report: Report) -> float:
    mine = [one.waiting for one in report.ranks if one.rank == report.rank]
    return mine[0] or 0.0 if mine else 0.0


def _too_much(report: Report) -> Said:
    """More communication than backward could ever hide."""
    mine = report.breakdown
    exposed = mine.exposed - _waiting(report)
    if report.straggler is not None or not mine.backward or mine.hidden + exposed <= TOO_MUCH * mine.backward:
        return None
    if report.transport == IN_MEMORY:
        change = "Send less often, by accumulating under no_sync(), or start fewer ranks if they outnumber the cores."
    elif report.transport.startswith(_HOOKED):
        in_memory = report.transport.endswith(IN_MEMORY)
        or_leave = ", or leave out the comm hook, so that gradients go through shared memory" if in_memory else ""
        change = f"Send less often, by accumulating under no_sync(){or_leave}."
    else:
        change = (
            f"Send less, by sync.register_comm_hook(None, bf16_compress_hook) (from {_HOOKS}), or less often, by "
            "accumulating under no_sync()."
        )
    times = (mine.hidden + exposed) / mine.backward
    return exposed, f"Communication is {times:.1f}x backward: overlap cannot hide it. {change}"


def _waits(report: Report, tied: Mapping[str, str]) -> Said:
    """One late gradient holds up its bucket, and full ones after it."""
    waits = [
        (one.full - one.before_last, one)
        for one in report.buckets
        if one.full is not None and one.before_last is not None and one.closed_by and one.before != one.closed_by
    ]
    gap, one = max(waits, key=lambda wait: wait[0], default=(0.0, None))
    if one is None or gap < 0.1 * report.breakdown.backward:
        return None
    why = f", which is used as `{tied[one.closed_by]}` too" if one.closed_by in tied else ""
    later = [other.full for other in report.buckets if other.bucket > one.bucket and other.full is not None]
    behind = sum(full < (one.full or 0.0) for full in later)
    also = f", and {counted(behind, 'full buckets')} behind it" if behind else ""
    return (
        min(gap, report.breakdown.exposed),
        f"Bucket {one.bucket} waits {ms(gap)} for `{one.closed_by}`{why}{also}: let the rest leave before it with "
        f'attach(launch_after=["{one.before}"]).',
    )


def _last_bucket(report: Report) -> Said:
    """What leaves when backward has ended cannot be hidden."""
    if len(report.buckets) < 2 or report.straggler is not None:
        return None
    last, others = report.buckets[-1], sorted(one.nbytes for one in report.buckets[:-1])
    if last.nbytes <= others[len(others) // 2]:
        return None
    exposed, size = last.seen - last.launched, format_bytes(last.nbytes)
    if len(last.parameters) == 1:
        none = report.transport == IN_MEMORY or report.transport.startswith(_HOOKED)
        or_less = "" if none else ", or send it as bf16 by a comm hook"
        change = f"a parameter is never cut, so freeze it{or_less}"
    else:
        change = "lower attach(last_bucket_cap_mb=)"
    return (
        exposed,
        f"The last bucket, which leaves when backward has ended, takes {ms(exposed)}: it holds {size} "
        f"(`{last.closed_by or last.parameters[-1]}` comes last); {change}.",
    )


def _many_launches(report: Report) -> Said:
    """A message costs, whatever is in it."""
    number, mine = len(report.buckets), report.breakdown
    if number < 2 or report.nbytes / number > SMALL:
        return None
    return (
        mine.launching,
        f"{ms(mine.launching)} of backward go into handing over {number} buckets of "
        f"{format_bytes(report.nbytes / number)} on average: larger ones cost less, raise attach(bucket_cap_mb=).",
    )
