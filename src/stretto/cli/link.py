"""What an all-reduce costs on a link, computed from bandwidth and latency alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .console import CommandError

_BITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"n": 1e-9, "u": 1e-6, "\u00b5": 1e-6, "\u03bc": 1e-6, "m": 1e-3, "": 1.0}
"""By prefix: the micro sign and the Greek letter look alike."""


@dataclass(frozen=True)
class Link:
    """A link between any two neighbours of a ring, full duplex.

    The ring all-reduce of S bytes over n ranks is 2(n-1) messages one after the other, of S/n bytes each: 2(n-1) a +
    2(n-1)/n S b, with the latency a of a message and b seconds a byte. The bandwidth term is the least that any
    algorithm needs (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    The cost of summing is left out.
    """

    bandwidth: float
    """Bits in a second."""
    latency: float
    """Seconds that even the smallest message takes."""
    ranks: int

    def waiting(self) -> float:
        """Seconds of latency in one all-reduce."""
        return 2 * (self.ranks - 1) * self.latency

    def moving(self, nbytes: int) -> float:
        """Seconds in which bytes move."""
        return self.sent(nbytes) * 8 / self.bandwidth

    def sent(self, nbytes: int) -> float:
        """Bytes that each rank sends, and receives."""
        return 2 * (self.ranks - 1) / self.ranks * nbytes

    def all_reduce(self, nbytes: int) -> float:
        """Seconds."""
        return self.waiting() + self.moving(nbytes)

    def all_reduces(self, sizes: Iterable[int]) -> float:
        """Seconds, one after the other."""
        return sum(map(self.all_reduce, sizes))


def parse_bandwidth(text: str, option: str = "--bandwidth") -> float:
    """Bits per second, from ``1gbit``, ``100Mb/s``, ``125MB/s``: a capital B is a byte, prefixes are powers of 1,000.

    Raises:
        CommandError: it is none.
    """
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kKmMgGtT]?)(bit|bits|bps|b|B)(?:/s|ps)?", text.strip())
    value = _number(match.group(1)) if match else None
    unit = _BITS[match.group(2).lower()] * (8 if match.group(3) == "B" else 1) if match else 0.0
    if not value or (bits := value * unit) == math.inf:
        raise CommandError(f"{option} {text}: give a bandwidth such as 1gbit, 100mbit or 125MB/s")
    return bits


def parse_latency(text: str) -> float:
    """Seconds, from ``100us`` or ``0.2ms``.

    Raises:
        CommandError: it is none.
    """
    match = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*([num\u00b5\u03bc]?)s", text.strip())
    value = _number(match.group(1)) if match else None
    if match is None or value is None:
        raise CommandError(f"--latency {text}: give a time such as 100us or 0.2ms")
    return value * _SECONDS[match.group(2)]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value < math.inf else None
