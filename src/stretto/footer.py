"""What travels behind a bucket's payload, and is summed with it.

    footer:  | had p0 | had p1 | ... | control words | marks | values | weight |
                                     └──────── of the last bucket alone ───────┘

So every rank learns, at the same pass and without another message, which parameters any rank had, what some rank asks
for, and to which handle the bucket belongs. Where the dtype is too coarse to count, only "zero or not" is read: a sum
of ones never falls back to zero.

[Note: marks]  Collectives match between ranks by their order alone. If two attached models have the same sizes and
their passes come in another order on some rank, they would be summed with each other, and only the numbers would be
wrong. Therefore the last bucket bears some bits of the handle's key. Where ranks agree, each bit is said by all or by
none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .scaling import encode_weight
from .words import FIRST_MARK, FIRST_VALUE, LENGTH, ControlWords, marks_of, to_host

_ALL_WELL, _NOTHING_CARRIED = ControlWords(), ControlWords(were_carried=False)


class Footer:
    """The footer of one bucket.

    Args:
        flat: all of it.
        parts: those of :func:`parts_of`, which lie in it.
    """

    __slots__ = ("_complete", "_quiet", "_weight_words", "_words", "flat", "had", "weight")

    def __init__(self, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.had, self._words, self.weight = parts  # ``had`` counts the ranks that had each parameter
        self._complete = torch.ones_like(flat)
        self._complete[len(self.had) :] = 0
        self._weight_words = len(self.weight)  # len() of a tensor runs Python
        self._quiet = [0.0] * len(self._words)
        """What is read if no rank has said anything."""

    def bear(self, key: int, world_size: int) -> None:
        """Tell in each pass whose it is, by the handle's key. For the last bucket."""
        marks, had = marks_of(key), len(self.had)
        self._complete[had + FIRST_MARK : had + FIRST_VALUE] = torch.tensor(marks, device="cpu")
        self._quiet[FIRST_MARK:FIRST_VALUE] = [world_size * one for one in marks]

    def write(self, missing: Collection[int], weight: float, says: Collection[int]) -> None:
        """Whose gradients are in the bucket, and what this rank has to say.

        Args:
            missing: places of parameters for which this rank has nothing.
            weight: of this rank in this pass; sent after the last bucket if ranks have weights.
            says: sent after the last bucket.
        """
        self.flat.copy_(self._complete)
        for place in missing:
            self.had[place] = 0
        if self._weight_words:
            self.weight.copy_(torch.tensor(encode_weight(weight, self._weight_words), device="cpu"))
        for word in says:
            self._words[word] = 1

    @property
    def comes_late(self) -> bool:
        """Whether what ``read`` returns is still on its way from a device."""
        return not self.flat.is_cpu

    def read(self, *, summed: bool) -> ControlWords:
        """What ranks said, after the last bucket was reduced; nothing if the footer did not travel."""
        if not summed:
            return _NOTHING_CARRIED
        if self.flat.is_cpu:  # device.type makes a text, for 6 us where the caches are cold
            if self._words.tolist() == self._quiet:
                return _ALL_WELL
            return ControlWords(self._words, marks=self._quiet[FIRST_MARK:FIRST_VALUE])
        words, arrival = to_host(self._words)
        return ControlWords(words, arrival, marks=self._quiet[FIRST_MARK:FIRST_VALUE])


def parts_of(parameters: int, weight_words: int, *, is_last: bool) -> tuple[int, int, int]:
    """How many elements the parts of a footer have."""
    return (parameters, LENGTH, weight_words) if is_last else (parameters, 0, 0)
