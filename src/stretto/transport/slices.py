"""How elements are divided over ranks, and in what they are summed."""

from __future__ import annotations

import torch

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""In which dtype sums of half types are taken, to be rounded once."""


def slice_of(numel: int, place: int, places: int) -> tuple[int, int]:
    """First and last (excluded) element of one rank's share; shares begin at multiples of 64 elements."""
    share = -(-numel // (64 * places)) * 64
    return min(place * share, numel), min((place + 1) * share, numel)
