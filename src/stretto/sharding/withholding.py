"""Which gradients are left in shares on the ranks, because of one optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import SetupError
from ..launch import LaunchQueue
from ..withheld import Alive, Withheld, complete, give_back_whole
from .groups import Groups


class Withholding:
    """The gradients that one optimizer wants in shares; several optimizers may ask.

    Args:
        groups: of the optimizer.
        queue: is asked to leave them in shares.
        asked: False to leave every gradient whole.
        divisible: False where each parameter is stepped whole on one rank, which needs its whole gradient.
    """

    def __init__(self, groups: Groups, queue: LaunchQueue, *, asked: bool, divisible: bool) -> None:
        self._groups = groups
        self._queue = queue
        self._asked = asked
        self._divisible = divisible
        self._wanted = asked and divisible
        self._mine = Alive()
        self.left = Alive()
        """Asked for earlier, no longer in the groups: their placeholders in ``.grad`` belong to nobody, or another."""

    def follow(self) -> None:
        """Ask for the parameters now in the groups, instead of those asked for before."""
        if self._wanted:
            others, known = self._others(), [*self._mine, *self.left]
            self._mine = Alive(self._groups.parameters)
            self.left = Alive([one for one in known if not self._mine.holds(one)])
            self._queue.withhold([*others, *self._mine])

    def give_back(self) -> None:
        """Let gradients that wait for a step be whole: a plain optimizer would skip those that are None. Collective."""
        if self._wanted:
            complete(self._queue.buckets, self._queue.transport, self._queue.wait_for)
            give_back_whole(self._queue.buckets, but=self._others())

    def end(self) -> None:
        """Ask for nothing any more."""
        if self._wanted:
            self._queue.withhold(self._others())
            self.drop(one for one in self.left if not self._queue.in_shares.holds(one))

    def _others(self) -> list[torch.Tensor]:
        return [one for one in self._queue.in_shares if not self._mine.holds(one)]

    def refuse_to_lend(self) -> None:
        """Raise ``SetupError`` if ranks without batches could not be given the gradients: see joining.py."""
        if self._wanted:
            raise SetupError(
                f"{self._queue.where}: with keep_grads=False each rank has only its share of the gradients, so nobody "
                "could step for a rank without batches.\nLeave out keep_grads=False, or give all ranks the same number "
                "of batches."
            )

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """The shares of these gradients have been used in a step: remove the placeholders."""
        for parameter in parameters if self._wanted else ():
            if isinstance(parameter.grad, Withheld):
                parameter.grad = None

    def in_words(self, hosts: Sequence[Sequence[int]]) -> str:
        """How gradients arrive, and why; empty if they were asked to be whole.

        Args:
            hosts: groups of ranks that share memory.
        """
        if not self._asked:
            return ""
        sizes, queue = [*map(len, hosts)], self._queue
        why = ""
        if not self._divisible:
            why = "each parameter is stepped whole on one rank"
        elif queue.comm_hook is not None or not queue.scaling.is_plain_mean:
            why = "what is reduced is no plain mean"
        elif len({*sizes}) > 1:
            why = f"hosts have unequal numbers of ranks ({', '.join(map(str, sizes))})"
        elif queue.transport.reduce_shares is None:
            why = f"{queue.transport.name} sends no shares"
        if why:
            return f"gradients arrive whole, since {why}"
        mine = [bucket for bucket in queue.buckets if any(map(self._mine.holds, bucket.parameters))]
        divided = sum(bool(bucket.withheld) for bucket in mine)
        rest = f" in {divided} of {len(mine)} buckets, since the others hold parameters of no such optimizer"
        return "gradients arrive in shares" + rest * (divided < len(mine))
