"""Reduction of tensors that do not come from ``backward``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .attach import default_transport
from .broadcast import start_reduce
from .errors import UnsupportedError
from .plan import MIB
from .scaling import Reduce
from .transport import Transport


def reduce(
    tensors: Iterable[torch.Tensor | None],
    *,
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    op: Reduce = "mean",
    bucket_cap_mb: float = 10,
) -> None:
    """Replace tensors by their mean (or sum) over ranks, in place. Collective.

    For gradients that ``torch.autograd.grad`` or ``torch.func.grad`` returns, and for hand-written training loops. All
    ranks give the same shapes and dtypes in the same order. They travel in flat messages, all under way at once.

    Args:
        tensors: floating or complex, dense, any strides; ``None`` is passed over, and must be on all ranks alike.
        process_group: default, the default group; without one nothing is done.
        transport: what carries them, instead of a process group.
        op: ``"mean"`` or ``"sum"``.
        bucket_cap_mb: a message is at most so many MiB, unless one tensor alone is larger.

    Raises:
        UnsupportedError: a tensor that is sparse or of integers, an ``op`` that is not known.

    Example::

        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        stretto.reduce(gradients, transport=transport)
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if op not in ("mean", "sum"):
        raise UnsupportedError(f'op={op!r} is not known: use op="mean" or op="sum"')
    for place, tensor in enumerate(given):
        if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedError(
                f"reduce: tensor {place} is {tensor.layout} of {tensor.dtype}; give dense floating ones"
            )
    carrier = transport if transport is not None else default_transport(process_group)
    if carrier is not None and carrier.world_size > 1:
        divisor = carrier.world_size if op == "mean" else 1
        start_reduce(given, carrier, divisor, message_bytes=int(bucket_cap_mb * MIB)).finish()
