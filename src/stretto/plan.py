"""The bucket plan: which parameter lies where in which bucket, and in which order buckets leave.

    parameters ──> specs.py ──> ParameterSpec ────────────┐
    order (arrival, or reverse registration) ─────────────┼──> plan_buckets ──> BucketPlan
    size caps ────────────────────────────────────────────┘

A plan is a value made by a pure function, so two ranks that start from the same facts hold the same plan, and
``plan.hash`` proves it. Nothing here communicates or touches tensor data.

[Note: left open]  A parameter that fills the cap, or more, lies alone. If it closed the bucket that is being filled,
small parameters before it (the bias of a large layer) would each become a message of their own. So that bucket stays
open across it, while it holds no more than may be left for the end of backward: the cap of the last bucket.

[Note: aligned]  Processors compute faster on data that begins at a cache line, and some kernels round differently where
it does not begin at a multiple of 16 bytes: a network with a head of 10 classes would give other bits. Most sizes are
multiples of a line. Those that are not come last in their bucket, the least even ones at its end. So every slot begins
at a multiple of the largest power of two that divides its own size, without padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from .errors import PlanError
from .specs import ParameterSpec, dtype_name, dtype_of
from .wording import MIB, columns, counted, format_bytes

_LINE_BYTES = 64


@dataclass(frozen=True)
class BucketSpec:
    """One bucket: parameters by their index in the plan, in order of arrival."""

    indices: tuple[int, ...]
    dtype: torch.dtype
    device: str
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class BucketPlan:
    """Which parameter lies where, and the launch order (that of ``buckets``).

    Equal plans are interchangeable; ``hash`` is the same on every rank and in every process, ``to_json`` and
    ``from_json`` keep it.

    Example::

        from stretto.plan import BucketPlan, plan_buckets
        from stretto.specs import describe_parameters

        plan = plan_buckets(describe_parameters(dict(model.named_parameters())), cap_bytes=2**20)
        print(plan)
        assert BucketPlan.from_json(plan.to_json()) == plan
    """

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[BucketSpec, ...]
    cap_bytes: int
    last_cap_bytes: int
    cut_after: tuple[int, ...] = ()
    """Parameters whose arrival closes every bucket that is being filled."""

    def __post_init__(self) -> None:
        caps = (self.cap_bytes, self.last_cap_bytes)
        if not all(isinstance(cap, int) for cap in caps) or self.cap_bytes <= 0 or self.last_cap_bytes < 0:
            raise PlanError(f"bucket caps must be positive, got cap_bytes={caps[0]}, last_cap_bytes={caps[1]}")
        if sorted(self.order) != list(range(len(self.parameters))):
            raise PlanError("a bucket plan must hold every parameter exactly once")
        if not set(self.cut_after) <= {*range(len(self.parameters))}:
            raise PlanError(f"cut_after must be indices of parameters, got {[*self.cut_after]}")
        for number, bucket in enumerate(self.buckets):
            members = [self.parameters[index] for index in bucket.indices]
            kind = (bucket.dtype, bucket.device, bucket.reduce_dtype)
            if not members or any(_kind(member) != kind for member in members):
                raise PlanError(f"bucket {number} must hold parameters of one dtype and device, and at least one")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Parameter indices in the order in which their buckets leave."""
        return tuple(index for bucket in self.buckets for index in bucket.indices)

    @cached_property
    def hash(self) -> str:
        """Sixteen hexadecimal digits that ranks compare."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def bucket_bytes(self, bucket: int) -> int:
        """Payload of a bucket in bytes."""
        return sum(self.parameters[index].nbytes for index in self.buckets[bucket].indices)

    def sent_bytes(self, bucket: int) -> int:
        """The same as it travels, which may be in another dtype."""
        spec = self.buckets[bucket]
        numel = sum(self.parameters[index].numel for index in spec.indices)
        return numel * (spec.reduce_dtype or spec.dtype).itemsize

    def layout(self, bucket: int) -> tuple[tuple[int, ...], ...]:
        """Places in ``indices`` in the order in which they lie in the bucket's flat buffer, in runs.

        A run holds row-major parameters that differ in their first dimension at most, so that one call concatenates
        their gradients; inside a run they lie in order of arrival. Any other parameter is a run by itself. Runs of odd
        sizes come last: see [Note: aligned].
        """
        runs: dict[tuple[object, int], list[int]] = {}
        for place, index in enumerate(self.buckets[bucket].indices):
            spec = self.parameters[index]
            alike = spec.shape[1:] if spec.shape and spec.row_major else place
            runs.setdefault((alike, _alignment(spec.nbytes)), []).append(place)
        return tuple(tuple(run) for _, run in sorted(runs.items(), key=lambda one: -one[0][1]))

    def offsets(self, bucket: int) -> tuple[int, ...]:
        """By place, a parameter's first element in the bucket's flat buffer; and at the end the buffer's length."""
        indices = self.buckets[bucket].indices
        offsets, end = [0] * len(indices), 0
        for place in chain.from_iterable(self.layout(bucket)):
            offsets[place] = end
            end += self.parameters[indices[place]].numel
        return (*offsets, end)

    def lag(self, order: Sequence[int]) -> float:
        """How late bytes leave if gradients arrive in ``order``: 0 at the first arrival, 1 at the last.

        The byte-weighted mean, over buckets, of the arrival that lets the bucket go. A bucket goes when it and all
        earlier ones are full. Parameters that are not in ``order`` arrive at the very end.
        """
        position = {index: place for place, index in enumerate(order, 1)}
        end = len(self.parameters)
        gate, weighted, total = 0, 0, 0
        for number, bucket in enumerate(self.buckets):
            gate = max(gate, max(position.get(index, end) for index in bucket.indices))
            weighted += gate * self.bucket_bytes(number)
            total += self.bucket_bytes(number)
        return weighted / (total * end) if total else 0.0

    def to_json(self) -> str:
        """One line of JSON, the same for equal plans."""
        return json.dumps(
            {
                "version": 1,
                "cap_bytes": self.cap_bytes,
                "last_cap_bytes": self.last_cap_bytes,
                "cut_after": self.cut_after,
                "parameters": [
                    [p.name, p.shape, p.strides, dtype_name(p.dtype), p.device, dtype_name(p.reduce_dtype)]
                    for p in self.parameters
                ],
                "buckets": [bucket.indices for bucket in self.buckets],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that ``to_json`` wrote. Raises ``PlanError`` on anything else."""
        try:
            data = json.loads(text)
            if data["version"] != 1:
                raise PlanError(f"this is a plan of version {data['version']}; this stretto reads version 1")
            parameters = tuple(
                ParameterSpec(
                    name,
                    tuple(shape),
                    tuple(strides),
                    dtype_of(dtype),
                    device,
                    None if reduce_dtype is None else dtype_of(reduce_dtype),
                )
                for name, shape, strides, dtype, device, reduce_dtype in data["parameters"]
            )
            buckets = tuple(_bucket(parameters, indices) for indices in data["buckets"])
            return cls(parameters, buckets, data["cap_bytes"], data["last_cap_bytes"], tuple(data["cut_after"]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"not a bucket plan in JSON: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        rows = [("bucket", "dtype", "device", "params", "size", "filled by")]
        for number, bucket in enumerate(self.buckets):
            names = [self.parameters[index].name for index in bucket.indices]
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            size = format_bytes(self.bucket_bytes(number))
            dtypes = " as ".join(filter(None, (dtype_name(bucket.dtype), dtype_name(bucket.reduce_dtype))))
            rows.append((str(number), dtypes, bucket.device, str(len(names)), size, span))
        total = format_bytes(sum(p.nbytes for p in self.parameters))
        parameters, buckets = counted(len(self.parameters), "parameters"), counted(len(self.buckets), "buckets")
        title = f"plan {self.hash}: {parameters}, {total}, in {buckets}"
        if len(self.buckets) > 1:
            larger = any(self.bucket_bytes(number) > self.cap_bytes for number in range(len(self.buckets)))
            most = f"{format_bytes(self.cap_bytes)}{' or one larger parameter' if larger else ''}"
            whole = ", but for what is not cut" * (self.bucket_bytes(-1) > self.last_cap_bytes)
            title += f" of at most {most} (the last {format_bytes(self.last_cap_bytes)}{whole})"
        return f"{title}\n{columns(rows, left=(1, 2, 5))}"


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    order: Sequence[int] | None = None,
    *,
    cap_bytes: int = 4 * MIB,
    last_cap_bytes: int | None = None,
    cut_after: Sequence[int] = (),
) -> BucketPlan:
    """Cut parameters into buckets in the order in which their gradients arrive.

    Args:
        parameters: specs in order of registration.
        order: indices in order of arrival; ``None`` stands for the reverse of registration, the best guess before the
            first backward.
        cap_bytes: a bucket's payload is at most this; a parameter that is as large or larger lies alone.
        last_cap_bytes: the same for the bucket that leaves last, the only one that backward can never hide; default a
            quarter of ``cap_bytes``.
        cut_after: indices of parameters whose arrival closes every bucket that is being filled.

    Returns:
        A plan whose buckets are sorted by the arrival of their last parameter.

    Raises:
        PlanError: ``order`` is not a permutation of the parameters, or a cap is not positive.

    Example::

        from stretto.plan import plan_buckets
        from stretto.specs import describe_parameters

        print(plan_buckets(describe_parameters(dict(model.named_parameters())), cap_bytes=2**20))
    """
    last_cap = cap_bytes // 4 if last_cap_bytes is None else last_cap_bytes
    arrivals = list(reversed(range(len(parameters)))) if order is None else list(order)
    if sorted(arrivals) != list(range(len(parameters))):
        raise PlanError(f"order must name each of the {len(parameters)} parameters once, got {len(arrivals)} indices")

    closed: list[list[int]] = []
    filling: dict[tuple[object, ...], list[int]] = {}
    filled: dict[tuple[object, ...], int] = {}
    cuts = set(cut_after)
    for index in arrivals:
        spec = parameters[index]
        key = _kind(spec)
        if spec.nbytes >= cap_bytes and filled.get(key, 0) <= last_cap:
            closed.append([index])  # buckets being filled continue after it: see [Note: left open]
        elif key in filling and filled[key] + spec.nbytes > cap_bytes:
            closed.append(filling.pop(key))
            filling[key], filled[key] = [index], spec.nbytes
        else:
            filling.setdefault(key, []).append(index)
            filled[key] = filled.get(key, 0) + spec.nbytes
        if index in cuts:
            closed.extend(filling.values())
            filling.clear()
            filled.clear()
    closed.extend(filling.values())
    position = {index: place for place, index in enumerate(arrivals)}
    closed.sort(key=lambda members: position[members[-1]])
    if closed:
        closed[-1:] = _split_tail(parameters, closed[-1], last_cap)
        closed.sort(key=lambda members: position[members[-1]])  # what was split off the last may end before others
    buckets = tuple(_bucket(parameters, members) for members in closed)
    return BucketPlan(tuple(parameters), buckets, cap_bytes, last_cap, tuple(cut_after))


def _split_tail(parameters: Sequence[ParameterSpec], members: list[int], last_cap: int) -> list[list[int]]:
    """Cut off as many of the last arrivals as fit into the last bucket, at least one.

    Where even one does not fit, no cut is made for a few bytes before it: a message would cost more than they do.
    """
    sizes = [parameters[index].nbytes for index in members]
    if sizes[-1] > last_cap:
        return [members[:-1], members[-1:]] if members[:-1] and sum(sizes[:-1]) > last_cap else [members]
    size = 0
    for cut in range(len(members) - 1, -1, -1):
        size += sizes[cut]
        if size > last_cap:
            return [members[: cut + 1], members[cut + 1 :]]
    return [members]


def _bucket(parameters: Sequence[ParameterSpec], indices: Sequence[int]) -> BucketSpec:
    first = parameters[indices[0]]
    return BucketSpec(tuple(indices), first.dtype, first.device, first.reduce_dtype)


def _alignment(nbytes: int) -> int:
    """The largest power of two that divides it, up to a line of the processor's cache."""
    return min(nbytes & -nbytes or _LINE_BYTES, _LINE_BYTES)


def _kind(spec: ParameterSpec) -> tuple[object, ...]:
    """What the parameters of a bucket have in common."""
    return (spec.dtype, spec.device, spec.reduce_dtype)
