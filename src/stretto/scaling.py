"""What is done to gradients besides summing them: mean or sum, divided before or after, weighted by rank.

    before the sum:  gradient * weight / divisor
    after it:        sum * divisor / (sum of weights)      for a mean; nothing where that factor is 1

The plain mean divides by the world size before the sum and does nothing after it, as torch's DDP does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Reduce = Literal["mean", "sum"]
WEIGHT_BITS = 31
"""A weight is less than two to this power."""
_FRACTION_BITS = 62
"""Of a weight that travels bit by bit; what is smaller counts as nothing."""


@dataclass(frozen=True)
class Scaling:
    """How contributions are scaled around the sum.

    Args:
        world_size: number of ranks.
        reduce: ``"mean"`` or ``"sum"`` over ranks.
        predivide_factor: divide by this before the sum and make up for it after (Apex's ``gradient_predivide_factor``):
            spreads the division over both sides, so that half-precision sums neither overflow nor vanish.
        weighted: ranks give a weight for each pass (samples, tokens), and the mean is weighted by it.
    """

    world_size: int
    reduce: Reduce = "mean"
    predivide_factor: float | None = None
    weighted: bool = False

    @property
    def divisor(self) -> float:
        """Divides each contribution before the sum."""
        if self.predivide_factor is not None:
            return self.predivide_factor
        return self.world_size if self.reduce == "mean" else 1

    @property
    def is_plain_mean(self) -> bool:
        """Whether only a division by the world size is needed, so that the code that sums may do it after the sum."""
        return self.reduce == "mean" and self.predivide_factor is None and not self.weighted

    @property
    def share(self) -> float:
        """What each rank gives of a value that is to come out of the sum as its mean over ranks."""
        return 1 / (self.world_size * self.divisor)

    def factor(self, weight: float) -> float:
        """What each rank's contribution is multiplied by before the sum."""
        return (weight if self.weighted else 1.0) / self.divisor

    def before(self, payload: torch.Tensor, weight: float) -> None:
        """Scale this rank's contribution in place."""
        if self.weighted and weight != 1:
            payload.mul_(weight / self.divisor)
        elif self.divisor != 1:
            payload.div_(self.divisor)

    def after(self, weight_words: torch.Tensor) -> torch.Tensor | float | None:
        """The factor for the sum, None where it is 1. Stays on the device: the host does not wait for it."""
        if self.reduce == "mean" and self.weighted:
            total = total_weight(weight_words)
            return torch.where(total > 0, self.divisor / total, 0.0)
        factor = self.divisor / self.world_size if self.reduce == "mean" else self.divisor
        return None if factor == 1 else factor

    def weight_words(self, dtype: torch.dtype) -> int:
        """How many elements of a bucket of ``dtype`` carry a weight."""
        if not self.weighted:
            return 0
        return WEIGHT_BITS + _FRACTION_BITS if dtype in (torch.float16, torch.bfloat16) else 1


def encode_weight(weight: float, words: int) -> list[float]:
    """A weight as elements that are summed over ranks.

    A half-precision sum of large numbers is not exact, so there the weight travels bit by bit, and each element counts
    the ranks that have the bit.
    """
    if words == 1:
        return [weight]
    units = round(weight * 2.0**_FRACTION_BITS)
    return [float(units >> bit & 1) for bit in range(words)]


def total_weight(words: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' weights, a 0-dim float64 tensor on the words' device."""
    real = (words.real if words.is_complex() else words).double()
    if len(words) == 1:
        return real[0]
    powers: Sequence[float] = [2.0 ** (bit - _FRACTION_BITS) for bit in range(len(words))]
    return real @ torch.tensor(powers, dtype=torch.float64, device=words.device)
