"""What a plan has to know of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from .errors import PlanError


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan has to know of one parameter.

    ``device`` is a label that is equal on all ranks (``cpu``, ``cuda``, or ``cuda#1`` for a rank's second CUDA device),
    since rank 3's ``cuda:3`` is rank 0's ``cuda:0``. ``strides`` (in elements) are those of its slot in the bucket.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients travel and are summed, if not their own."""

    def __post_init__(self) -> None:
        sizes = (*self.shape, *self.strides)
        if not isinstance(self.name, str) or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise PlanError(f"parameter {self.name!r} cannot have shape {self.shape} and strides {self.strides}")
        if not isinstance(self.device, str):
            raise PlanError(f"parameter {self.name}: device {self.device!r} must be a string, such as 'cpu' or 'cuda'")
        if len(self.shape) != len(self.strides):
            raise PlanError(f"parameter {self.name}: shape {self.shape} and strides {self.strides} differ in length")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def row_major(self) -> bool:
        """Whether the last dimension is the one whose elements are neighbours, and so on to the first."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


def describe_parameters(
    parameters: Mapping[str, torch.Tensor], reduce_dtypes: Mapping[str, torch.dtype] | None = None
) -> tuple[ParameterSpec, ...]:
    """The specs of named parameters, in their order of registration.

    ``reduce_dtypes`` names parameters whose gradients travel in another dtype than their own.
    """
    devices: dict[str, list[torch.device]] = {}
    specs = []
    for name, parameter in parameters.items():
        known = devices.setdefault(parameter.device.type, [])
        if parameter.device not in known:
            known.append(parameter.device)
        ordinal = known.index(parameter.device)
        label = parameter.device.type if not ordinal else f"{parameter.device.type}#{ordinal}"
        shape = tuple(parameter.shape)
        strides = slot_strides(shape, parameter.stride())
        reduce_dtype = (reduce_dtypes or {}).get(name, parameter.dtype)
        other = None if reduce_dtype == parameter.dtype else reduce_dtype
        specs.append(ParameterSpec(name, shape, strides, parameter.dtype, label, other))
    return tuple(specs)


def has_strides(parameter: torch.Tensor, spec: ParameterSpec) -> bool:
    """Whether its slot has the strides in which an optimizer's fused kernels expect its gradient."""
    strides = parameter.stride()
    return strides == spec.strides or slot_strides(spec.shape, strides) == spec.strides


def slot_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The parameter's own strides if it fills its memory without holes or overlaps, else contiguous ones.

    ``strides`` are in elements. channels_last parameters keep theirs, as torch's "gradient layout contract" asks, so
    that the optimizer's fused kernels find gradient and parameter in the same layout.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            break
        expected *= size
    else:
        return tuple(strides)
    contiguous = list(accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1))
    return tuple(reversed(contiguous)) if shape else ()


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """``float32``, as plans and messages write it."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that ``dtype_name`` wrote. Raises ``PlanError`` for anything else."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{name!r} is not a torch dtype")
    return dtype
