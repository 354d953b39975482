"""``shard``: an optimizer of which each rank keeps and steps a share."""

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

    What the field calls ZeRO, stage 1 (Rajbhandari et al., 2020), exactly: the same numbers as without. Ranks of one
    host keep the parameters once, in memory that all of them share, so nothing has to be gathered after the step, and
    a step costs about what one of a single process does. Between hosts each rank sends what it has stepped.

    Use what is returned like the optimizer: ``step``, ``zero_grad``, ``param_groups``, schedulers, gradient scalers.
    ``.grad`` is the mean over ranks as before, so ``clip_grad_norm_`` and the like act as always.

    Ranks of a host share the parameters: whoever changes them by hand on every rank (``p.mul_(0.9)`` under ``no_grad``)
    does so as often as there are ranks. To copy values into them (``load_state_dict``) is fine with a barrier before
    and after: another rank may still compute with them. What is to be put back later is copied before the first.

    Args:
        optimizer: of any class whose step of an element depends on that element alone (SGD, Adam, AdamW, RMSprop,
            Adagrad and so on), which is found out by trying; or on its parameter alone (Adafactor, Muon, LAMB), and
            then each parameter stays whole on one rank. Over parameters that ``sync`` reduces, and frozen ones of its
            module; not stepped before.
        sync: the handle from :func:`stretto.attach`, or the drop-in.
        keep_grads: False to leave each rank with its share of the mean gradient: all that its step needs, and less to
            send. ``.grad`` has a shape and no values then: to compute with it raises ``WithheldError``; ``step`` sets
            it to None, ``sync.clip_grad_norm_`` clips. Without effect where parameters stay whole.
        overlap: where ranks do not share memory, let what was stepped travel while the next forward goes on; whoever
            reads a parameter, in whatever way, waits until it is there. False to wait for all of it in ``step``, as is
            done anyway where hosts have unequal numbers of ranks.

    Returns:
        The optimizer to use from here on. The one given keeps the parameter groups, and no state. ``sync.detach()``
        ends it; ``unshard()`` gives back a plain optimizer with all of the state.

    Raises:
        UnsupportedError: parameters depend on each other in its step (LBFGS), or it cannot be built for a part of them.
        SetupError: it has stepped already; it has parameters that ``sync`` does not reduce, that another sharded
            optimizer has, or that were converted since the last backward. On all ranks, if it is so on one.
        ModelMismatchError: ranks have different optimizers or groups.
        CommunicationError: a rank does not come; there is no memory to share.

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
        raise SetupError(
            f"shard: takes an optimizer and the handle that attach() has returned, or the drop-in, not ({given}).\n"
            "Call optimizer = stretto.shard(optimizer, sync)."
        )
    return handle.shard(optimizer, keep_grads=keep_grads, overlap=overlap)
