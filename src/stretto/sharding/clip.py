"""The norm of gradients of which each rank has its share, and clipping by it, as torch's ``clip_grad_norm_`` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..blame import NORM
from ..launch import LaunchQueue
from ..withheld import Withheld
from .ownership import pieces_of

_DOUBLE = (torch.float64, torch.complex128)


def shares_of(queue: LaunchQueue) -> list[torch.Tensor]:
    """This rank's share of the gradients that are withheld, flat, where they lie: to look at, or to change in place."""
    plan, carrier = queue.plan, queue.transport
    withheld = {
        index
        for bucket in queue.buckets
        for index, one in zip(bucket.indices, bucket.parameters, strict=True)
        if isinstance(one.grad, Withheld)
    }
    pieces = pieces_of(plan, carrier.rank, carrier.world_size, withheld)
    return [queue.buckets[piece.bucket].slots[piece.start : piece.stop] for piece in pieces]


def clip(
    parameters: Sequence[torch.Tensor],
    queue: LaunchQueue,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``. Returns what it was, on all ranks the same.

    Collective where gradients are in shares; elsewhere each rank has all of them, and nothing is sent.

    Args:
        parameters: with gradients that are the same on all ranks, unless they are withheld.
        queue: has the shares of those.
        max_norm: as torch's.
        norm_type: as torch's.
        error_if_nonfinite: raise ``RuntimeError`` in place of scaling by such a norm.
    """
    shares = shares_of(queue)
    total = _total_norm(parameters, shares, queue, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of all gradients is {total.item()}, so they cannot be clipped.\n"
            "To scale them anyway, leave out error_if_nonfinite."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in (*shares, *_visible(parameters)):
        gradient.detach().mul_(factor.to(gradient.device))
    return total


def _total_norm(
    parameters: Sequence[torch.Tensor], shares: Sequence[torch.Tensor], queue: LaunchQueue, norm_type: float
) -> torch.Tensor:
    """Of all gradients together, 0-dim. In float64 if any of them is."""
    transport, in_shares = queue.transport, any(bucket.withheld for bucket in queue.buckets)
    whole = _visible(parameters) if transport.rank == 0 or not in_shares else ()
    mine = [one for one in (*shares, *whole) if one.numel()]
    device = mine[0].device if mine else next((one.device for one in parameters), torch.device("cpu"))
    norms = torch.zeros(transport.world_size, dtype=torch.float64, device=device)
    if mine:
        own = torch.stack([_norm(one, norm_type) for one in mine])
        norms[transport.rank] = torch.linalg.vector_norm(own, norm_type)
    elif norm_type < 0:  # the smallest counts: nothing at all must not
        norms[transport.rank] = torch.inf
    if in_shares:
        queue.peers.seat.calls += 1  # for those who wait for this rank in another call
        queue.wait_for(transport.all_reduce(norms), NORM)
    of_ranks = norms if in_shares else norms[transport.rank]
    total: torch.Tensor = torch.linalg.vector_norm(of_ranks, norm_type)
    is_double = any(one.grad is not None and one.dtype in _DOUBLE for one in parameters)
    return total if is_double else total.float()


def _visible(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None and not isinstance(one.grad, Withheld)]


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm.cpu().double()
