"""The norm of gradients of which each rank has its share, and clipping by it, as torch's ``clip_grad_norm_`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..launch import LaunchQueue
from ..transport import Transport, Work
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


def total_norm(
    parameters: Sequence[torch.Tensor],
    shares: Sequence[torch.Tensor],
    norm_type: float,
    transport: Transport,
    wait_for: Callable[[Work, str], None],
) -> torch.Tensor:
    """The norm of all gradients together, 0-dim, the same bits on all ranks. Collective. In float64 if any of them is.

    Args:
        parameters: with gradients that are the same on all ranks, unless they are withheld.
        shares: this rank's of those that are withheld.
        norm_type: the order of the norm.
        transport: adds up over ranks.
        wait_for: waits for a collective, named by a noun.
    """
    mine = [one for one in (*shares, *(_visible(parameters) if transport.rank == 0 else ())) if one.numel()]
    device = mine[0].device if mine else next((one.device for one in parameters), torch.device("cpu"))
    norms = torch.zeros(transport.world_size, dtype=torch.float64, device=device)
    if mine:
        own = torch.stack([_norm(one, norm_type) for one in mine])
        norms[transport.rank] = torch.linalg.vector_norm(own, norm_type)
    wait_for(transport.all_reduce(norms), "the norm of gradients")
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    is_double = any(one.grad is not None and one.dtype in _DOUBLE for one in parameters)
    return total if is_double else total.float()


def clip_to(
    max_norm: float,
    total: torch.Tensor,
    parameters: Iterable[torch.Tensor],
    shares: Sequence[torch.Tensor],
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, which was ``total``, is at most ``max_norm``. Returns ``total``."""
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of all gradients is {total.item()}, so they cannot be clipped.\n"
            "To scale them anyway, leave out error_if_nonfinite."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in (*shares, *_visible(parameters)):
        gradient.detach().mul_(factor.to(gradient.device))
    return total


def _visible(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None and not isinstance(one.grad, Withheld)]


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm.cpu().double()
