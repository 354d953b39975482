"""How elements are divided over ranks, and in what they are summed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The dtype in which half types are summed, to be rounded once."""


def slice_of(numel: int, place: int, places: int) -> tuple[int, int]:
    """First and last (excluded) element of one rank's share; shares begin at multiples of 64 elements."""
    share = -(-numel // (64 * places)) * 64
    return min(place * share, numel), min((place + 1) * share, numel)


def add_in_order(
    parts: Sequence[torch.Tensor], out: torch.Tensor, divisor: int = 1, first: int | None = None
) -> torch.Tensor:
    """The sum of all parts, in their order, into ``out``, which may be one of them.

    Args:
        parts: of one shape and dtype; half types are summed in float32, and rounded once.
        out: of the same shape and dtype.
        divisor: the sum is divided by it.
        first: if given, only so many of its first elements are divided.
    """
    if wide := WIDER.get(out.dtype):
        total, rest = parts[0].to(wide), parts[1:]
    elif len(parts) == 1:
        total, rest = out.copy_(parts[0]), ()
    else:
        rest = parts[2:]
        is_later = any([part is out for part in rest])  # it would be overwritten before its turn
        total = torch.add(parts[0], parts[1], out=None if is_later else out)
    for part in rest:
        total.add_(part)
    if divisor != 1:
        (total if first is None else total[:first]).div_(_as_tensor(divisor, total.dtype))
    return out if total is out else out.copy_(total)


@functools.cache
@torch.inference_mode(False)
def _as_tensor(divisor: int, dtype: torch.dtype) -> torch.Tensor:
    """torch makes such a tensor of a number at each call, which takes 8 of 13 us where the caches are cold."""
    return torch.tensor(divisor, dtype=dtype, device="cpu")
