"""What to do at which arrival, as long as gradients arrive in the order of the last pass.

A chunk is a run of arrivals that is handled together. It is small enough that its gradients are still in the cache when
they are copied into their buckets, and that the allocator reuses their memory for the next ones. It is also cut where a
bucket fills, so that the bucket leaves at once. Only the last arrival of a chunk costs a call into Python.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bucket import Bucket
from .parts import Kinds, MisfitError, Part, take_gradients
from .slots import hand_out, which_lie_in

_grad = operator.attrgetter("grad")
CHUNK_BYTES = 256 * 1024
CHUNK_ARRIVALS = 128
"""On CPUs. Elsewhere a copy is a kernel, and the fewer the better: a chunk goes on until a bucket is full."""
WORTH_A_RUN = 4
"""Shorter runs are copied one by one."""


@dataclass(frozen=True)
class Run:
    """Slots that one call fills, at less than half the cost of a copy each."""

    places: list[int]
    """Of the arrivals in the chunk."""
    pick: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    """This run's gradients out of the chunk's, without a loop in Python."""
    region: torch.Tensor
    """The slots as one tensor, one after the other along the first dimension."""
    first: torch.Size
    """The shape of the first."""


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
    """The slot of each arrival; None where ``.grad`` is not to be the slot before the pass settles."""
    kinds: Kinds
    """What those gradients must be like."""
    runs: list[Run]
    """Slots that lie one after the other."""
    alone: list[int]
    """Places of the other arrivals."""
    formats: list[tuple[weakref.ref[torch.nn.Parameter], tuple[int, ...]]]
    """Images' kernels and their strides: ``.to(memory_format=...)`` gives such parameters others."""

    def take(self, parameters: Sequence[torch.Tensor], with_graph: bool = False) -> None:
        """Take the gradients of these arrivals, which are those that were foreseen.

        Args:
            parameters: in order of arrival.
            with_graph: whether this is a ``backward(create_graph=True)``.

        Raises:
            MisfitError: they do not fit; nothing was taken.
        """
        for reference, strides in self.formats:
            if (one := reference()) is not None and one.stride() != strides:
                raise MisfitError
        if self.views is None:
            for part in self.parts:
                part.check()
            for part in self.parts:
                part.take()
            return
        gradients: list[Any] = [*map(_grad, parameters)]
        in_place = False
        for part in self.parts:
            in_place = in_place or part.bucket.in_place
        if not (in_place and all(which_lie_in(gradients, self.views))):
            self.kinds.refuse_misfits(gradients)
            self._copy(gradients, self.views, fresh=not in_place)
            if with_graph:
                for parameter, gradient, view in zip(parameters, gradients, self.views, strict=True):
                    hand_out(parameter, gradient, view)
            else:
                for gradient, view in zip(gradients, self.views, strict=True):
                    gradient.data = view  # gives its own memory back while it is hot
        for part in self.parts:
            part.bucket.pending -= part.size
            part.bucket.taken.append(part.places)

    def _copy(self, gradients: list[torch.Tensor], views: list[torch.Tensor], *, fresh: bool) -> None:
        try:
            if not fresh:
                take_gradients(gradients, views)
                return
            for run in self.runs:
                picked = run.pick(gradients)
                if picked[0].shape != run.first:  # where all have another shape alike, cat gives it to the region
                    raise MisfitError
                torch.cat(picked, out=run.region)
            if not self.runs:
                torch._foreach_copy_(views, gradients)
            elif self.alone:
                torch._foreach_copy_([views[i] for i in self.alone], [gradients[i] for i in self.alone])
        except RuntimeError:
            if self.kinds.same_shapes(gradients):
                raise
            raise MisfitError from None


def schedule(
    order: Sequence[int],
    ids: Sequence[int],
    bucket_of: Sequence[Bucket],
    *,
    hands_out: bool = True,
    follows_formats: bool = True,
) -> list[Chunk]:
    """Cut a pass into chunks. The buckets forget the runs of an earlier schedule.

    Args:
        order: parameter indices as they arrived; twice where one arrived twice.
        ids: ``id()`` of each parameter, by index.
        bucket_of: each parameter's bucket, by index.
        hands_out: False if gradients may come again after their bucket has left, so that ``.grad`` must not be the
            slot before the pass settles.
        follows_formats: False if no other plan is to be made for parameters whose strides have changed.
    """
    final = {index: place for place, index in enumerate(order)}
    buckets = {id(bucket): bucket for bucket in bucket_of}.values()
    waiting = {id(bucket): len(final.keys() & bucket.indices) for bucket in buckets}
    place_of = {index: place for bucket in buckets for place, index in enumerate(bucket.indices)}
    for bucket in buckets:
        bucket.memory.forget_regions()
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
        is_hot = nbytes >= CHUNK_BYTES or len(complete) >= CHUNK_ARRIVALS
        if full or (is_hot and bucket.flat.is_cpu) or place == len(order) - 1:
            parts = _parts(complete, bucket_of, place_of)
            once = hands_out and len(complete) == place + 1 - start
            views = [bucket_of[i].views[place_of[i]] for i in complete] if once else None
            runs = [run for part in parts for run in _runs(part, complete)] if once else []
            in_runs = {place for run in runs for place in run.places}
            alone = [place for place in range(len(complete)) if place not in in_runs]
            formats = _formats(complete, bucket_of, place_of) if follows_formats else []
            kinds, arrivals = Kinds(views or ()), [ids[i] for i in order[start : place + 1]]
            chunks.append(Chunk(arrivals, parts, index, full, views, kinds, runs, alone, formats))
            start, nbytes, complete, full = place + 1, 0, [], []
    return chunks


def _formats(
    indices: Sequence[int], bucket_of: Sequence[Bucket], place_of: Mapping[int, int]
) -> list[tuple[weakref.ref[torch.nn.Parameter], tuple[int, ...]]]:
    """Of four dimensions and more, where the slot has the strides of the parameter."""
    found = []
    for index in indices:
        slot, reference = bucket_of[index].views[place_of[index]], bucket_of[index].references[place_of[index]]
        if slot.dim() > 3 and (one := reference()) is not None and one.stride() == slot.stride():
            found.append((reference, slot.stride()))
    return found


def _parts(indices: Sequence[int], bucket_of: Sequence[Bucket], place_of: Mapping[int, int]) -> list[Part]:
    buckets = {id(bucket_of[index]): bucket_of[index] for index in indices}
    return [
        Part(bucket, [place_of[index] for index in indices if bucket_of[index] is bucket])
        for bucket in buckets.values()
    ]


def _runs(part: Part, arrivals: Sequence[int]) -> list[Run]:
    """Where slots of the part are neighbours and alike, long enough to be worth it."""
    bucket, wanted = part.bucket, set(part.places)
    place_in_chunk = {index: place for place, index in enumerate(arrivals)}
    found = []
    for alike in bucket.layout:
        for inside, places in itertools.groupby(alike, wanted.__contains__):
            run = list(places)
            if inside and len(run) >= WORTH_A_RUN:
                rows = sum(len(bucket.views[place]) for place in run)
                chunk_places = [place_in_chunk[bucket.indices[place]] for place in run]
                region = bucket.memory.region(run[0], run[-1], rows)
                first = bucket.views[run[0]].shape
                found.append(Run(chunk_places, operator.itemgetter(*chunk_places), region, first))
    return found
