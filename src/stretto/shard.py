"""``shard``: divide an optimizer over the ranks, so that each keeps and steps only its share."""

from __future__ import annotations

import torch

from .ddp import DistributedDataParallel
from .errors import SetupError
from .handle import Synchronizer
from .sharding import ShardedOptimizer


def shard(
    optimizer: torch.optim.Optimizer,
    sync: Synchronizer | DistributedDataParallel,
    *,
    keep_grads: bool = True,
    overlap: bool = True,
) -> ShardedOptimizer:
    """Divide an optimizer over the ranks: each keeps 1/N of its state and steps 1/N of the model. Collective.

    This is ZeRO, stage 1 (Rajbhandari et al., 2020), and exact: the same numbers as without sharding. Ranks of one host
    keep the parameters once, in memory that all of them share, so nothing has to be gathered after the step, and a step
    costs about as much as one of a single process. Between hosts each rank sends what it has stepped.

    Use the result like the optimizer: ``step``, ``zero_grad``, ``param_groups``, schedulers, gradient scalers.
    ``.grad`` is the mean over ranks as before, so ``clip_grad_norm_`` and the like work as always.

    Ranks of a host share the parameters. If every rank changes them by hand (``p.mul_(0.9)`` under ``no_grad``), the
    change happens once per rank. To copy values into them (``load_state_dict``), call a barrier before and after, since
    another rank may still compute with them. If you want to restore the old values later, copy them before the first
    barrier.

    Args:
        optimizer: of any class that steps each element by itself (SGD, Adam, AdamW, RMSprop, Adagrad and so on), or
            each parameter by itself (Adafactor, Muon, LAMB); then each parameter stays whole on one rank. Which it is,
            is found out by trying. It may hold parameters that ``sync`` reduces, and frozen ones of its module, and
            must not have stepped before.
        sync: the handle from :func:`stretto.attach`, or the drop-in.
        keep_grads: False leaves each rank with only its share of the mean gradient: all that its step needs, and less
            to send. Then reading ``.grad``, even its shape, raises ``WithheldError``; ``step`` sets it to None, and
            ``sync.clip_grad_norm_`` clips. No effect where parameters stay whole.
        overlap: where ranks do not share memory, the stepped parameters travel while the next forward runs, and reading
            one waits until it has arrived (docs/sharding.md lists exceptions). False waits for all of them in ``step``,
            as happens anyway where hosts have unequal numbers of ranks.

    Returns:
        The optimizer to use from here on. The original keeps the parameter groups, but no state. ``sync.detach()``
        ends the sharded one; ``unshard()`` returns a plain optimizer with the whole state.

    Raises:
        UnsupportedError: parameters depend on each other in its step (LBFGS), or it cannot be built for a part of them.
        SetupError: it has stepped already; it has parameters that ``sync`` does not reduce, that another sharded
            optimizer has, or that were converted since the last backward. Raised on all ranks if true on one.
        ModelMismatchError: ranks have different optimizers or groups.
        CommunicationError: a rank does not call ``shard``; there is no memory to share.

    Example::

        sync = stretto.attach(model)
        optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
    """
    handle: object = sync.synchronizer if isinstance(sync, DistributedDataParallel) else sync
    if not isinstance(handle, Synchronizer):
        given = f"{type(optimizer).__name__}, {type(sync).__name__}"
        several = isinstance(handle, (list, tuple))
        raise SetupError(
            f"shard: takes an optimizer and the handle that attach() has returned, or the drop-in, not ({given}).\n"
            "Call optimizer = stretto.shard(optimizer, sync)."
            + " For several models build an optimizer for each, or attach one module that has all of them, "
            "torch.nn.ModuleList([a, b]): each is still called by itself." * several
        )
    return handle.shard(optimizer, keep_grads=keep_grads, overlap=overlap)
