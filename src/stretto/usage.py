"""Which ranks had a gradient for what: read from the buckets' summed footers, which stay until the next pass.

Parameters that nobody ever uses are named once, since most often a head was forgotten or a loss does not reach it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .bucket import Bucket
from .errors import UnsupportedError
from .launch import LaunchQueue
from .selection import STAND_IN
from .sparse import SparseGradients
from .wording import name_list

PASSES = 3
"""So many passes are watched: enough not to name parameters that are used every other time."""

log = logging.getLogger("stretto")


@dataclass(frozen=True)
class Statistics:
    """Counts since attaching, on this rank."""

    passes: int = 0
    """Synchronised passes that settled."""
    buckets: int = 0
    """Buckets launched, one collective each."""
    payload_bytes: int = 0
    """Gradient bytes handed to the transport or the comm hook."""
    plans: int = 0
    """Plans used, the first one included."""
    bucket_memory: int = 0
    """Bytes that buckets hold now: gradients with what travels after them, and what users kept of earlier passes."""
    buckets_of_last_pass: int = 0
    """Of ``buckets``, those of the last pass."""


def statistics_of(queue: LaunchQueue, passes: int, nbytes_beside: int) -> Statistics:
    """Counts of a queue, with those that others keep."""
    memory = sum(bucket.memory.nbytes for bucket in queue.buckets)
    nbytes, last = queue.total_bytes + nbytes_beside, queue.total_launched - queue.sent_before
    return Statistics(passes, queue.total_launched, nbytes, queue.replans + 1, memory, last)


def ranks_that_had(buckets: Iterable[Bucket]) -> dict[int, int]:
    """How many ranks had each parameter in the last pass, by index. A sum in bf16 is exact up to 256 of them."""
    found: dict[int, int] = {}
    for bucket in buckets:
        had = bucket.footer.had.tolist()
        found |= {index: round(abs(count)) for index, count in zip(bucket.indices, had, strict=True)}
    return found


def used_by(queue: LaunchQueue) -> dict[str, int]:
    """The same by name."""
    if not queue.tells:
        raise UnsupportedError(
            f"{queue.where}: with torch's noop_hook, which communicates nothing, it is not known "
            "which ranks used which parameters.\nUse another hook, or none, or look at .grad on each rank."
        )
    counts = ranks_that_had(queue.buckets)
    return {name: counts[index] for index, name in enumerate(queue.names) if name != STAND_IN}


def carry_over(counts: Mapping[int, int], buckets: Iterable[Bucket]) -> None:
    """Let new buckets say the same of the last pass, which they did not take part in."""
    for bucket in buckets:
        bucket.footer.had.copy_(torch.tensor([float(counts[index]) for index in bucket.indices], device="cpu"))


def follow_a_change(
    queue: LaunchQueue,
    rows: SparseGradients,
    used: Mapping[str, int],
    renamed: Mapping[str, str],
    loose: Sequence[Mapping[str, bool]],
) -> None:
    """Say of the last pass what was carried, and what was reduced behind it, now that the plan follows the module.

    Args:
        queue: has the new buckets.
        rows: the parameters in no bucket.
        used: how many ranks had something for what the old plan had, by the names there.
        renamed: for those that were carried by another name, wherever they were, that one.
        loose: of each rank, names of what the old plan did not carry there, and whether it had something.
    """

    def count(name: str) -> int:
        replaced = all(name in one for one in loose)  # on all ranks: what the old one got is in no mean
        return (0 if replaced else used.get(renamed.get(name, name), 0)) + sum(one.get(name, False) for one in loose)

    carry_over({index: count(name) for index, name in enumerate(queue.names)}, queue.buckets)
    rows.used_by = {name: count(name) for name in rows.names}


def _has_values(parameter: torch.nn.Parameter | None) -> bool:
    """Whether it has a gradient all the same, of ``torch.autograd.grad``, say."""
    grad = None if parameter is None else parameter.grad
    return type(grad) is torch.Tensor and bool(grad.any())


class NeverUsed:
    """What no rank had a gradient for in any pass so far, and weights that the program never gave.

    Either is right if it is meant, so it is a warning and no error.

    Args:
        queue: has the buckets, whose footers tell what any rank had.
    """

    def __init__(self, queue: LaunchQueue) -> None:
        self.looking = queue.transport.rank == 0
        """Whether ``look`` is to be called: rank 0 speaks for all, and a few passes tell."""
        self._queue = queue
        self._passes = 0
        self._suspects = set(queue.names) - {STAND_IN}

    def look(self, gone: set[int]) -> None:
        """At the end of a pass, before its buckets are emptied. No suspects are left after most first passes.

        Args:
            gone: parameters that come, but without a gradient, as reported by the tracker.
        """
        queue = self._queue
        # On an accelerator to read the footer would stop the host.
        told = queue.tells and all(bucket.flat.is_cpu for bucket in queue.buckets)
        unused = {
            bucket.indices[place]
            for bucket in queue.buckets
            for place in bucket.missing
            if not (told and bucket.footer.had[place])
        } - queue.loose  # which has come, and fits its slot no more
        if not self._passes and queue.scaling.weighted and not queue.has_weight:
            self._warn_of_weight()
        self._suspects &= {queue.names[index] for index in unused}
        self._passes += 1
        if self._passes == PASSES:
            alone = [index for index in sorted(unused - gone) if queue.names[index] in self._suspects]
            if names := [queue.names[index] for index in alone if not _has_values(queue.references[index]())]:
                self._warn(names, told)
        self.looking = bool(self._suspects) and self._passes < PASSES

    def _warn(self, names: list[str], told: bool) -> None:
        log.warning(
            "%s: %s had no gradient in any pass so far, %s. Each is untrained so far, and is sent as zeros if others "
            "share its bucket.\n"
            "If that is intended, as for a target network, freeze it: requires_grad_(False). If it is to come later, "
            "as for an expert that no token has reached yet, ignore this. Shown once.",
            self._queue.where,
            name_list(names),
            "on any rank" if told else "on this rank",
        )

    def _warn_of_weight(self) -> None:
        log.warning(
            "%s: attached with weighted=True, but no weight was set before this pass, so this rank counts as 1.\n"
            "Set it before each backward: sync.weight = len(inputs), or a wrapper's .synchronizer.weight; or leave out "
            "weighted=True.",
            self._queue.where,
        )
