"""The checks before an optimizer is sharded: they fail on all ranks alike, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch

from ..errors import CommunicationError, ModelMismatchError, SetupError, StrettoError
from ..notes import text_of
from ..options import truth
from ..peers import Peers
from ..reducer import Reducer
from ..slots import has_memory
from ..steps import IN_SHARES, stepped_by
from .groups import difference, facts
from .kinds import Kind, kind_of
from .layout import warn_of_other_processes
from .members import all_reduced, refuse_converted, refuse_duplicates, refuse_memory, refuse_others, refuse_taken
from .optimizer import ShardedOptimizer
from .shares import Shares

_known = WeakKeyDictionary[ShardedOptimizer, ReferenceType[Reducer]]()
"""All of this process that have shares, and who had their gradients when they were made."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for; see :func:`stretto.shard`."""

    keep_grads: bool
    overlap: bool

    def __post_init__(self) -> None:
        for name in ("keep_grads", "overlap"):
            object.__setattr__(self, name, truth(f"shard: {name}", getattr(self, name)))


@torch.inference_mode(False)  # tensors made here are written to in every backward
def begin(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module,
    reducer: Reducer | None,
    others: Sequence[ShardedOptimizer],
    asked: Asked,
) -> ShardedOptimizer:
    """Shard it. Collective.

    Args:
        optimizer: over parameters of the module.
        module: the attached one.
        reducer: has its gradients; None with one rank, which then steps everything.
        others: sharded optimizers of the handle.
        asked: the options.

    Raises:
        SetupError: see :func:`stretto.shard`.
    """
    beside = next((one.beside for one in others), WeakSet[ShardedOptimizer]())
    if reducer is None:
        _refuse(optimizer, module, others, "shard")
        kind_of(optimizer, "shard")
        reduced = [one for one in module.parameters() if one.requires_grad]
        refuse_others(optimizer, module, reduced, "shard")
        return ShardedOptimizer(optimizer, module, None, beside, "shard")
    peers = reducer.queue.peers
    kind, stated, problem = Kind.ELEMENTWISE, list[Any](), None
    where = f"rank {reducer.transport.rank}, shard"
    try:
        _refuse(optimizer, module, others, where)
        kind = kind_of(optimizer, where)
        refuse_others(optimizer, module, all_reduced(reducer), where)
        refuse_memory(optimizer, module, reducer.transport.hosts, where)
        refuse_converted(optimizer, reducer, where)
        stated = [asked, kind.name, *_facts(optimizer, module)]
    except Exception as error:  # whatever it is: the other ranks are to hear of it
        problem = error
    _refuse_unlike(stated, problem, peers, where)
    lying = {name: one for name, one in _stepped(optimizer, module).items() if one.is_cpu and has_memory(one)}
    if elsewhere := [name for name, one in lying.items() if one.untyped_storage().is_shared()]:
        warn_of_other_processes(where, elsewhere)
    shares: Shares | None = None
    try:
        for one in _replaced(optimizer):
            one.end()
        shares = Shares(optimizer, kind, reducer, keep_grads=asked.keep_grads, overlap=asked.overlap)
        sharded = ShardedOptimizer(optimizer, module, shares, beside, where)
    except BaseException as error:
        if not isinstance(error, CommunicationError):  # the others would wait for this rank's step
            peers.leave("shard", error, error.__traceback__, sent=False)
        if shares is not None:
            shares.release()
        raise
    vars(sharded)[IN_SHARES] = True
    _known[sharded] = ref(reducer)
    return sharded


def _replaced(optimizer: torch.optim.Optimizer) -> list[ShardedOptimizer]:
    """Those that step some of its parameters, of wrappers that another has replaced: a notebook's cell runs again."""
    own = {*map(id, stepped_by(optimizer))}
    alive = [one for reference in _known.keyrefs() if (one := reference()) is not None and not one.ended]
    found = [one for one in alive if (reducer := _known[one]()) is not None and reducer.detached]
    return [one for one in found if not own.isdisjoint(map(id, stepped_by(one)))]


def _refuse_unlike(stated: list[Any], problem: Exception | None, peers: Peers, where: str) -> None:
    """Raise, on all ranks, if one cannot shard, or has something else than the others. Collective."""
    told = peers.gather((str(problem) if isinstance(problem, StrettoError) else text_of(problem), stated))
    if problem is not None:
        raise problem
    for rank, (theirs, other) in enumerate(told):
        if theirs:
            raise SetupError(f"{where}: the optimizer cannot be sharded on rank {rank}.\n  {theirs}")
        if other != told[0][1]:
            raise ModelMismatchError(f"{where}: {_difference(rank, other, told[0][1])}\nBuild the same on all ranks.")


def _refuse(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, others: Sequence[ShardedOptimizer], where: str
) -> None:
    """Raise if it cannot be sharded, with any number of ranks."""
    it: Any = optimizer
    if not isinstance(it, torch.optim.Optimizer):
        given = f"the class {it.__name__}" if isinstance(it, type) else type(it).__name__
        raise SetupError(
            f"{where}: {given} is not a torch.optim.Optimizer.\n"
            "Call optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)."
        )
    if isinstance(optimizer, ShardedOptimizer) and optimizer.ended:
        raise SetupError(
            f"{where}: what you give has ended: by detach() or unshard(), or for a later one.\nBuild a new optimizer, "
            "and shard that. To go on with the state that unshard() gave back: load_state_dict() it then."
        )
    if isinstance(optimizer, ShardedOptimizer) or any(
        one.original is optimizer for one in (*others, *_replaced(optimizer))
    ):
        raise SetupError(f"{where}: the optimizer is sharded already.\nUse what the first call returned.")
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise SetupError(
            f"{where}: the optimizer has a state already, as after a step.\nShard it before its first step. To go on "
            "with its state: state = optimizer.state_dict(), build it again, shard that, load_state_dict(state). An "
            "optimizer that makes its state when it is built, without a count of steps, cannot be sharded."
        )
    refuse_taken(optimizer, module, others, where)
    refuse_duplicates(optimizer, module.named_parameters(), where)


def _has_stepped(state: dict[str, Any]) -> bool:
    """Some optimizers have a state before their first step (Adagrad), with a count of 0."""
    return bool(state) and float(state.get("step", 1)) != 0


def _stepped(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = {*map(id, stepped_by(optimizer))}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) in own}


def _facts(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[Any]:
    """What must be equal on all ranks."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [type(optimizer).__qualname__, *facts(optimizer, names)]


def _difference(rank: int, theirs: list[Any], first: list[Any]) -> str:
    (asked, kind, name, *others), (first_asked, first_kind, first_name, *firsts) = theirs, first
    if asked != first_asked:
        return f"rank {rank} was given {_shown(asked)}, rank 0 {_shown(first_asked)}."
    if name != first_name:
        return f"rank {rank} has {name}, rank 0 {first_name}."
    if others == firsts and kind != first_kind:
        ranks = (rank, 0) if kind == Kind.WHOLE.name else (0, rank)
        return (
            f"{name}, tried on a few numbers, looked at whole parameters or failed on rank {ranks[0]}, and not on rank "
            f"{ranks[1]}. What only one rank does in its step, such as logging a norm, belongs after the step."
        )
    return difference(rank, others, firsts)


def _shown(asked: Asked) -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(asked).items())


def refuse_idle(others: Sequence[ShardedOptimizer], where: str) -> None:
    """Raise if a rank would take part in passes without stepping: its share of the model would stand still."""
    _refuse_idle([one for one in others if not one.ended and not one.is_inside], where)


def _refuse_idle(others: Sequence[ShardedOptimizer], where: str) -> None:
    if others:
        raise SetupError(
            f"{where}: a rank without batches cannot leave the step to the others while an optimizer is sharded: its "
            "share of the model would not be updated.\n"
            "Give all ranks the same number of batches; or join the optimizer too, with Join([model, optimizer]); or "
            "let that rank step as well: a backward of zeros, parameter.backward(torch.zeros_like(parameter)), then "
            "optimizer.step()."
        )


def refuse_half_joined(others: Sequence[ShardedOptimizer], where: str) -> None:
    """A pass inside ``Join`` begins: raise if ranks without batches would wait for steps in vain, or take none."""
    _refuse_idle([one for one in others if not one.ended and not one.joins], where)
    for one in others:
        one.refuse_to_leave_out()
