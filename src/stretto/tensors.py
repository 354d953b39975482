"""Reduction of tensors that do not come from ``backward``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .agreement import Statement, agree
from .broadcast import start_reduce
from .engine import left_uncompiled
from .errors import SetupError, UnsupportedError
from .options import can_be_added, positive, refuse_unlisted
from .peers import Peers
from .scaling import Reduce
from .specs import dtype_name
from .steps import were_averaged
from .transport import Transport
from .transport.choose import carrier_of, refuse_other_kinds
from .wording import MIB

ADVICE = "Give the same tensors in the same order on every rank."


@left_uncompiled
def reduce(
    tensors: Iterable[torch.Tensor | None],
    *,
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    op: Reduce = "mean",
    bucket_cap_mb: float = 10,
) -> None:
    """Replace tensors by their mean (or sum) over ranks, in place: an all-reduce in buckets. Collective.

    For gradients from ``torch.autograd.grad`` or ``torch.func.grad``, and for hand-written training loops. All ranks
    must give the same shapes and dtypes in the same order; one small message compares them first. The tensors then
    travel in flat messages, all at the same time.

    Args:
        tensors: floating or complex, dense, any strides; ``None`` items are skipped, and must be the same on all ranks.
        process_group: by default the default group; if there is none, nothing is done.
        transport: what carries them, instead of a process group.
        op: ``"mean"`` or ``"sum"``.
        bucket_cap_mb: the largest size of a message in MiB, unless one tensor alone is larger.

    Raises:
        UnsupportedError: a tensor is sparse or of integers, or ``op`` is unknown.
        SetupError: ``bucket_cap_mb`` is not a positive number. The rank with the mistake raises one of these two, and
            the others raise ModelMismatchError. Also, on this rank alone: ``transport`` is not one.
        ModelMismatchError: the ranks give different tensors or options; all name the same difference.
        CommunicationError: a rank does not call ``reduce``; it says where all ranks are. ``PeerError`` if that rank has
            failed, ended or died.

    Example::

        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        stretto.reduce(gradients)
    """
    alone = isinstance(tensors, torch.Tensor | torch.nn.Module) or not hasattr(type(tensors), "__iter__")
    everything: list[Any] = [tensors] if alone else [*tensors]
    nothing = UnsupportedError("reduce: None was given; give dense floating tensors") if tensors is None else None
    problem, given = nothing or _problem(everything, op, bucket_cap_mb), [one for one in everything if one is not None]
    _refuse_transport(transport)
    carrier = carrier_of(transport, process_group)
    if carrier is None or carrier.world_size == 1:
        if problem is not None:
            raise problem
        return
    peers = Peers(carrier, "reduce")
    try:
        _agree(everything, (op, bucket_cap_mb), problem, carrier.rank, peers)
        divisor = carrier.world_size if op == "mean" else 1
        messages = start_reduce(given, carrier, divisor, message_bytes=int(bucket_cap_mb * MIB))
        messages.finish(peers.wait_for, "the tensors")
        were_averaged(given)
    finally:
        peers.close()


def _refuse_transport(transport: object) -> None:
    """Raise for what ``attach`` would take as a name, and for what it refuses."""
    if transport is not None and not isinstance(transport, Transport):
        raise SetupError(
            f"reduce: transport={transport!r} must be an instance of a subclass of stretto.transport.Transport.\n"
            "Leave it out: then the process group carries the tensors."
        )
    if transport is not None:
        refuse_other_kinds(transport, "reduce")


def _problem(given: Sequence[object], op: object, bucket_cap_mb: object) -> SetupError | None:
    try:
        refuse_unlisted("reduce: op", op, Reduce)
        positive("reduce: bucket_cap_mb", bucket_cap_mb)
    except SetupError as problem:
        return problem
    for place, tensor in enumerate(given):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            hint = ", such as [p.grad for p in model.parameters()]" if isinstance(tensor, torch.nn.Module) else ""
            kind = type(tensor).__name__
            return UnsupportedError(f"reduce: item {place} is a {kind}; give dense floating tensors{hint}")
        if tensor.layout != torch.strided:
            return UnsupportedError(f"reduce: tensor {place} is {tensor.layout}: give a dense one, tensor.to_dense()")
        if not can_be_added(tensor.dtype):
            return UnsupportedError(
                f"reduce: tensor {place} is {tensor.dtype}: give one of a floating dtype that can be added, "
                "tensor.float()"
            )
    return None


def _agree(given: Sequence[Any], asked: object, problem: SetupError | None, rank: int, peers: Peers) -> None:
    """Collective, in one message if all is well; Gloo ends the process where messages differ in length."""
    facts = [("option op, bucket_cap_mb", f"{asked}")]
    facts += [
        (f"tensor {place}", f"{tuple(one.shape)} {dtype_name(one.dtype)}")
        for place, one in enumerate(given if problem is None else ())
        if one is not None
    ]
    statement = Statement(tuple(facts), None if problem is None else f"{problem}")
    if not peers.all_equal(statement.fingerprint):
        with contextlib.suppress(SetupError) if problem is not None else contextlib.nullcontext():
            agree(statement, rank, peers.gather, "reduce", ADVICE, "give the same tensors")
    if problem is not None:
        raise problem
