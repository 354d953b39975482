"""Which ranks had a gradient for what: read from the buckets' summed footers, which stay until the next pass.

Parameters that nobody ever uses are named once, since most often a head was forgotten or a loss does not reach it; and
those that an optimizer steps beside what is averaged, and nobody averages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .arrivals import owner_of
from .bucket import Bucket
from .errors import UnsupportedError, name_list
from .launch import LaunchQueue
from .membership import STAND_IN, Membership
from .sparse import SparseGradients
from .steps import listen, stop_listening

PASSES = 3
"""So many passes are looked at: enough that what is used every other time is not named."""
STEPS = 32
"""And so many steps of optimizers, or ``PASSES`` of those that step what is averaged."""

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
    """Bytes that buckets hold now: gradients with what travels behind them, and what users kept of earlier passes."""


def statistics_of(queue: LaunchQueue, passes: int, nbytes_beside: int, plans: int) -> Statistics:
    """Counts of a queue, with those that others keep."""
    memory = sum(bucket.memory.nbytes for bucket in queue.buckets)
    return Statistics(passes, queue.total_launched, queue.total_bytes + nbytes_beside, plans, memory)


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
            f"{queue.where}: which ranks used which parameters is not known beside torch's noop_hook, which "
            "stands for no communication at all.\nUse another hook, or none, or look at .grad on each rank."
        )
    counts = ranks_that_had(queue.buckets)
    return {name: counts[index] for index, name in enumerate(queue.names) if name != STAND_IN}


def carry_over(counts: Mapping[int, int], buckets: Iterable[Bucket]) -> None:
    """Let new buckets say the same of the last pass, which they did not take part in."""
    for bucket in buckets:
        bucket.footer.had.copy_(torch.tensor([float(counts[index]) for index in bucket.indices]))


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
        renamed: for those that were carried by another name on all ranks, that one.
        loose: of each rank, names of what the old plan did not carry there, and whether it had something.
    """

    def count(name: str) -> int:
        replaced = all(name in one for one in loose)  # on all ranks: what the old one got is in nobody's mean
        return (0 if replaced else used.get(renamed.get(name, name), 0)) + sum(one.get(name, False) for one in loose)

    carry_over({index: count(name) for index, name in enumerate(queue.names)}, queue.buckets)
    rows.used_by = {name: count(name) for name in rows.names}


class NeverUsed:
    """What no rank had a gradient for in any pass so far. It is right that way, so it is a warning and no error.

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
            gone: parameters that come, but without a gradient, of which the tracker has told.
        """
        queue = self._queue
        # On an accelerator to read the footer would stop the host.
        told = queue.tells and all(bucket.flat.device.type == "cpu" for bucket in queue.buckets)
        unused = {
            bucket.indices[place]
            for bucket in queue.buckets
            for place in bucket.missing
            if not (told and bucket.footer.had[place])
        } - queue.loose  # which has come, and fits its slot no more
        self._suspects &= {queue.names[index] for index in unused}
        self._passes += 1
        names = [queue.names[index] for index in sorted(unused - gone) if queue.names[index] in self._suspects]
        if names and self._passes == PASSES:
            self._warn(names, told)
        self.looking = bool(self._suspects) and self._passes < PASSES

    def _warn(self, names: list[str], told: bool) -> None:
        log.warning(
            "%s: %s had no gradient in any pass so far, %s. "
            "Each stays untrained, and is sent as zeros if others share its bucket.\n"
            "If it is meant so, freeze it, requires_grad_(False), or leave it out: attach(..., ignore=[%s]).",
            self._queue.where,
            name_list(names),
            "on any rank" if told else "on this rank",
            ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else ""),
        )


class SteppedAlone:
    """What an optimizer steps beside what is averaged, and nobody averages: a head beside an attached encoder, say.

    Nothing else would tell: its gradients reach no hook, and ranks are only compared in what is attached.

    Args:
        queue: has the parameters that are averaged.
        members: knows the module, whose other parameters are left alone by request.
    """

    def __init__(self, queue: LaunchQueue, members: Membership) -> None:
        self._queue, self._members, self._steps, self._all_steps = queue, members, 0, 0
        if queue.transport.rank == 0:
            listen(self._stepping)

    def _stepping(self, optimizer: torch.optim.Optimizer, begins: bool) -> None:
        queue, module = self._queue, self._members.module()
        if not begins or not queue.pass_number or module is None:
            return
        self._all_steps += 1
        if self._all_steps == STEPS:
            stop_listening(self._stepping)
        stepped = {
            name: one for number, group in enumerate(optimizer.param_groups) for name, one in _named(number, group)
        }
        if {*map(id, stepped.values())}.isdisjoint([id(reference()) for reference in queue.parameters]):
            return
        known = {*map(id, module.parameters())}
        if names := [name for name, one in stepped.items() if id(one) not in known and _is_alone(one)]:
            log.warning(
                "%s: %s steps %s, which no attached module has, beside parameters that are averaged: each rank trains "
                "its own.\nAttach the module that holds all of them, or this part as well. If they are averaged in "
                "another way, or are meant to differ, all is well. Told once.",
                queue.where,
                type(optimizer).__name__,
                name_list(names),
            )
        self._steps += 1
        if names or self._steps == PASSES:
            stop_listening(self._stepping)


def _named(number: int, group: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """By the names that the optimizer was given, or else by place and shape."""
    parameters = group["params"]
    places = [f"param_groups[{number}]['params'][{place}] {tuple(one.shape)}" for place, one in enumerate(parameters)]
    return zip(group.get("param_names", places), parameters, strict=True)


def _is_alone(one: torch.Tensor) -> bool:
    """Whether it is trained, and no handle averages it. What has its values in other tensors is another library's."""
    return one.grad is not None and owner_of(one) is None and not is_traceable_wrapper_subclass(one)
