"""How elements are divided over ranks."""

from __future__ import annotations


def slice_of(numel: int, place: int, places: int) -> tuple[int, int]:
    """First and last (excluded) element of one rank's share; shares begin at multiples of 64 elements."""
    share = -(-numel // (64 * places)) * 64
    return min(place * share, numel), min((place + 1) * share, numel)
