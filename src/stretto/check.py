"""Are the replicas still equal? A cheap fingerprint of every tensor, compared over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .agreement import describe_ranks
from .errors import ReplicaError, name_list
from .transport.base import Transport


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor; equal for equal bits, on any device and in any layout.

    An exclusive or sees every single flipped bit, an integer sum what an exclusive or cancels.
    """
    if not tensor.numel():
        return 0, 0
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return int(torch.hash_tensor(words).item()), int(words.sum(dtype=torch.int64).item())


def check_replicas(tensors: Mapping[str, torch.Tensor], transport: Transport, where: str) -> None:
    """Compare tensors over all ranks. Collective; waits for the device.

    Args:
        tensors: by name, the same names on every rank.
        transport: carries the fingerprints, some tens of bytes a tensor.
        where: how the message begins.

    Raises:
        ReplicaError: on every rank, naming each tensor that differs and the ranks that agree on it.
    """
    mine = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, tuple[int, int]]] = transport.all_gather_object(mine)
    if all(other == everyone[0] for other in everyone):
        return
    lines, names = [], [name for name in mine if len({other.get(name) for other in everyone}) > 1]
    for name in names[:6]:
        camps: dict[object, list[int]] = {}
        for rank, other in enumerate(everyone):
            camps.setdefault(other.get(name), []).append(rank)
        lines.append(f"  {name}: " + " differs from ".join(describe_ranks(ranks) for ranks in camps.values()))
    raise ReplicaError(
        f"{where}: the ranks no longer hold the same values of {name_list(names)}.\n" + "\n".join(lines) + "\n"
        "Something changed them on some ranks only: a step that was skipped, or a random number.\n"
        "To go on with rank 0's: sync.detach(); sync = stretto.attach(model)"
    )
