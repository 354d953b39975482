"""The norm of gradients that ranks hold in shares, and clipping by it, as torch's ``clip_grad_norm_`` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

import torch

from ..blame import NORM, SAME_CALLS
from ..crossing import group_of
from ..errors import CommunicationError, SetupError, UnsupportedError
from ..failing import refuse_to_send
from ..launch import LaunchQueue
from ..reducer import reducer_of
from ..withheld import Withheld
from ..wording import describe_ranks, name_list
from .ownership import pieces_of

_DOUBLE = (torch.float64, torch.complex128)


def shares_of(queue: LaunchQueue, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's share of their withheld gradients, as flat tensors in place: to read, or to change in place.

    Parameters that are no longer in the module may have such gradients too.
    """
    plan, carrier, wanted = queue.plan, queue.transport, {id(one) for one in parameters}
    withheld = {
        index
        for bucket in queue.buckets
        for index, one in zip(bucket.indices, bucket.parameters, strict=True)
        if isinstance(one.grad, Withheld) and id(one) in wanted
    }
    pieces = pieces_of(plan, carrier.rank, carrier.world_size, withheld)
    return [queue.buckets[piece.bucket].slots[piece.start : piece.stop] for piece in pieces]


def clip(
    parameters: Sequence[torch.nn.Parameter],
    queue: LaunchQueue,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``. Returns the old norm, the same on all ranks.

    Collective where gradients are, or were, in shares; elsewhere each rank has all of them, and nothing is sent.

    Args:
        parameters: with gradients that are the same on all ranks, unless they are withheld.
        queue: has the shares of withheld ones; for models attached inside this one, their own queues have them.
        max_norm: as torch's.
        norm_type: as torch's; 0 only where each rank has all gradients.
        error_if_nonfinite: raise ``RuntimeError`` in place of scaling by such a norm.
    """
    _refuse_parameters(max_norm)
    in_shares = [one for one in _queues_of(parameters, queue) if one.has_left_shares]
    shares = [share for one in in_shares for share in shares_of(one, parameters)]
    total = _total_norm(parameters, shares, queue if in_shares else None, float(norm_type))  # torch takes "inf" too
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of all gradients is {total.item()}, so they cannot be clipped.\n"
            "To scale them anyway, leave out error_if_nonfinite."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in (*shares, *_visible(parameters)):
        gradient.detach().mul_(factor.to(gradient.device))
    return total


def _refuse_parameters(max_norm: object) -> None:
    """torch's function takes them first."""
    if not isinstance(max_norm, (Real, torch.Tensor)):
        raise TypeError(
            f"clip_grad_norm_: max_norm must be a number, not {type(max_norm).__name__}.\n"
            "It clips all parameters of the attached module, so do not pass them: sync.clip_grad_norm_(1.0)"
        )


def _queues_of(parameters: Iterable[torch.nn.Parameter], queue: LaunchQueue) -> list[LaunchQueue]:
    """The queues of all handles that reduce some of these. Raises ``SetupError`` if other ranks have the shares."""
    reducers = dict.fromkeys(reducer for one in parameters if (reducer := reducer_of(one)) is not None)
    queues = [*dict.fromkeys((queue, *(reducer.queue for reducer in reducers)))]
    for other in queues:
        if other.has_left_shares and group_of(other.transport) is not group_of(queue.transport):
            raise SetupError(
                f"{queue.where}: {name_list(other.names)} are reduced over another process group, and with "
                "keep_grads=False each of its ranks has only its share.\n"
                "Clip with their own handle; or stretto.shard(..., keep_grads=True)."
            )
    return queues


def _total_norm(
    parameters: Sequence[torch.nn.Parameter],
    shares: Sequence[torch.Tensor],
    queue: LaunchQueue | None,
    norm_type: float,
) -> torch.Tensor:
    """The norm of all gradients, 0-dim; in float64 if any of them is. ``queue``: if other ranks must be asked."""
    device = next((one.device for one in parameters), torch.device("cpu"))
    whole = _visible(parameters) if queue is None or queue.transport.rank == 0 else ()
    values = [one for gradient in (*shares, *whole) if (one := _values(gradient)).numel()]
    own = [torch.linalg.vector_norm(one, norm_type).to(device, torch.float64) for one in values]
    norms = torch.stack(own) if own else torch.zeros(0, dtype=torch.float64, device=device)
    if queue is not None:
        norms = _of_all_ranks(norms, queue, norm_type)
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type) if len(norms) else norms.sum()
    is_double = any(one.grad is not None and one.dtype in _DOUBLE for one in parameters)
    return total if is_double else total.float()


def _of_all_ranks(norms: torch.Tensor, queue: LaunchQueue, norm_type: float) -> torch.Tensor:
    """The norm of each rank that has gradients; ranks without any do not count. Collective."""
    transport = queue.transport
    if not norm_type:
        raise UnsupportedError(
            f"{queue.where}: norm_type=0 counts gradients that are not zero, and with keep_grads=False no rank has "
            "whole ones.\nUse another norm, or stretto.shard(..., keep_grads=True)."
        )
    queue.peers.refuse_misplaced()
    seat, told = queue.peers.seat, norms.new_zeros(3, transport.world_size)
    norm_of, has_gradients, key_of = told.unbind()  # by rank
    key_of[transport.rank] = seat.key
    if len(norms):
        norm_of[transport.rank] = torch.linalg.vector_norm(norms, norm_type)
        has_gradients[transport.rank] = 1
    refuse_to_send(queue.peers, "waiting")
    seat.calls += 1  # for ranks that wait for this one in another call
    work = transport.all_reduce(told.view(-1))
    with queue.peers.in_call():
        queue.wait_for(work, NORM)
    if others := [rank for rank, whose in enumerate(key_of.tolist()) if whose != seat.key]:
        raise CommunicationError(
            f"{queue.where}: gradients of another attached model were clipped on {describe_ranks(others)}, so "
            f"those of this one were not.\n{SAME_CALLS}"
        )
    return norm_of[has_gradients > 0]


def _visible(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None and not isinstance(one.grad, Withheld)]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
