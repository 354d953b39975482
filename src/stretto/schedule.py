"""What to do at which arrival, as long as gradients arrive in the order of the last pass.

A chunk is a run of arrivals that is looked at together: small enough that its gradients are still in the cache when
they are copied into their buckets, and so that the allocator hands the memory out again for the next ones; and cut
where a bucket fills, so that the bucket leaves at once. Only the last arrival of a chunk costs a call into Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .bucket import Bucket, Part, take_gradients

CHUNK_BYTES = 256 * 1024
CHUNK_ARRIVALS = 128


@dataclass(frozen=True)
class Chunk:
    """A run of arrivals."""

    arrivals: list[int]
    """``id()`` of the parameters that arrive, in order; twice where one arrives twice."""
    parts: list[Part]
    """What is complete with the last of them, by bucket."""
    closer: int
    """Index of the parameter that arrives last."""
    full: list[Bucket]
    """Buckets that are complete with it."""
    views: list[torch.Tensor] | None
    """The slot of each arrival; None where some parameter arrives again later."""

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients of these arrivals, which are those that were foreseen."""
        if self.views is None:
            for part in self.parts:
                part.take()
            return
        take_gradients(parameters, self.views)
        for parameter, view in zip(parameters, self.views, strict=True):
            parameter.grad = view
        for part in self.parts:
            part.mark()


def schedule(order: Sequence[int], ids: Sequence[int], bucket_of: Sequence[Bucket]) -> list[Chunk]:
    """Cut a pass into chunks.

    Args:
        order: parameter indices as they arrived; twice where one arrived twice.
        ids: ``id()`` of each arrival.
        bucket_of: each parameter's bucket, by index.
    """
    final = {index: place for place, index in enumerate(order)}
    buckets = {id(bucket): bucket for bucket in bucket_of}.values()
    waiting = {id(bucket): len(bucket.indices) for bucket in buckets}
    place_of = {index: place for bucket in buckets for place, index in enumerate(bucket.indices)}
    chunks: list[Chunk] = []
    start, nbytes, complete, full = 0, 0, [], []
    for place, index in enumerate(order):
        if final[index] != place:
            continue
        bucket = bucket_of[index]
        complete.append(index)
        nbytes += bucket.views[place_of[index]].nbytes
        waiting[id(bucket)] -= 1
        if not waiting[id(bucket)]:
            full.append(bucket)
        if full or nbytes >= CHUNK_BYTES or len(complete) >= CHUNK_ARRIVALS or place == len(order) - 1:
            parts = _parts(complete, bucket_of, place_of)
            once = len(complete) == place + 1 - start
            views = [bucket_of[i].views[place_of[i]] for i in complete] if once else None
            chunks.append(Chunk(list(ids[start : place + 1]), parts, index, full, views))
            start, nbytes, complete, full = place + 1, 0, [], []
    return chunks


def _parts(indices: Sequence[int], bucket_of: Sequence[Bucket], place_of: Mapping[int, int]) -> list[Part]:
    buckets = {id(bucket_of[index]): bucket_of[index] for index in indices}
    return [
        Part(bucket, [place_of[index] for index in indices if bucket_of[index] is bucket])
        for bucket in buckets.values()
    ]
