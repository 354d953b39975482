"""The second round of a pass: gradients that arrived after their bucket had left, or in a bucket nobody was to use.

See engine.py, [Note: nested tasks]. The word LATE in the last bucket tells all ranks that a second round follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .bucket import Bucket
from .scaling import Scaling
from .transport.base import Work

if TYPE_CHECKING:
    from .launch import LaunchQueue


def second_round(queue: LaunchQueue, *, idle: bool) -> None:
    """Sum what came late on any rank, and add it. One message a bucket, in plan order. Collective.

    Args:
        queue: its buckets are reduced and scaled already, but for those that no rank was to use: these leave now.
        idle: this rank has no part in the pass, so what is in its ``.grad`` has not come late.
    """
    factor = queue.scaling.after(queue.buckets[-1].footer.weight.clone())
    works: list[tuple[Bucket, torch.Tensor, Work]] = []
    for bucket in queue.buckets:
        places = [] if idle else bucket.late()
        if bucket.skipped:
            bucket.add_late(places)
            bucket.footer.write(bucket.missing, queue.weight_now, queue.says if bucket.is_last else ())
            queue.send(bucket)
            assert bucket.work is not None
            works.append((bucket, bucket.flat, bucket.work))
        else:
            flat = _late_of(bucket, places, queue.scaling, queue.weight_now)
            works.append((bucket, flat, queue.transport.all_reduce(flat)))
    for bucket, flat, work in works:
        queue.wait_for(work, "what came late")
        if bucket.skipped:
            bucket.skipped = False
            bucket.unpack(factor)
        else:
            late, had = flat[: len(bucket.payload)], flat[len(bucket.payload) :][: len(bucket.indices)]
            bucket.slots.add_(late if factor is None else late.mul_(factor))
            bucket.footer.had.add_(had)


def _late_of(bucket: Bucket, places: Sequence[int], scaling: Scaling, weight: float) -> torch.Tensor:
    """Like the bucket's flat tensor, with what came late alone; the footer counts what was not counted yet."""
    flat = torch.zeros_like(bucket.flat)
    numel, parameters, views = len(bucket.payload), bucket.parameters, bucket.views_of(flat)
    for place in places:
        views[place].copy_(parameters[place].grad)  # type: ignore[arg-type]  # late(): it is not None
    scaling.before(flat[:numel], weight)
    for place in {*places}.intersection(bucket.missing):
        flat[numel + place] = 1
    return flat
