"""Checks that the handle reduces what an optimizer steps, and that no other optimizer steps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

import torch

from ..arrivals import owner_of
from ..errors import SetupError, StrettoError
from ..peers import Peers
from ..reducer import Reducer
from ..slots import has_memory
from ..specs import dtype_name
from ..steps import stepped_by
from ..wording import describe_ranks, name_list


def all_reduced(reducer: Reducer) -> list[torch.nn.Parameter]:
    """The parameters that it reduces, or will reduce from the first pass that reaches them."""
    members = reducer.members
    return [*reducer.parameters, *members.wanted().values(), *members.rows().values()]


def refuse_others(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module,
    parameters: Iterable[torch.Tensor],
    where: str,
    first_group: int = 0,
) -> None:
    """Raise if the optimizer steps a parameter that is not in the module, or one that is trained and not among these.

    Groups before ``first_group`` were checked earlier; parameters in them that the module has since replaced get no
    gradients.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    reduced = {id(parameter): parameter for parameter in parameters}
    own = {id(owner_of(parameter)) for parameter in reduced.values()}
    outsiders = [
        (names.get(id(one), f"parameter {place} of group {number}, {tuple(one.shape)},"), one)
        for number, group in enumerate(optimizer.param_groups[first_group:], first_group)
        for place, one in enumerate(group["params"])
        if id(one) not in names or (one.requires_grad and id(one) not in reduced)
    ]
    if outsiders:  # a frozen one tells of no handle, so one that does goes first
        who, one = min(outsiders, key=lambda outsider: not _elsewhere(outsider[1], own))
        raise SetupError(f"{where}: {who} is stepped by the optimizer, and {_advice(one, own)}")


def _elsewhere(outsider: torch.Tensor, own: set[int]) -> bool:
    """Does another handle reduce it? ``own``: the ``id()`` of the handles that reduce the accepted parameters."""
    owner = owner_of(outsider)
    return outsider.requires_grad and owner is not None and id(owner) not in own  # else no longer in the module


def _advice(outsider: torch.Tensor, own: set[int]) -> str:
    """The problem, and what to do."""
    if _elsewhere(outsider, own):
        return (
            "reduced by another handle.\n"
            "Build one optimizer for each handle, and shard it with that; or attach one module that has both, in place "
            "of the two."
        )
    return (
        "not reduced by this handle.\n"
        "Build the optimizer over parameters of the attached module, or attach one module that has all of them, "
        "torch.nn.ModuleList([model, loss]), or shard it with the handle that reduces them."
    )


def refuse_duplicates(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]], where: str
) -> None:
    """Raise if a parameter is listed twice: torch only warns and steps it twice; its share would be stepped once."""
    times = Counter(map(id, stepped_by(optimizer)))
    if twice := [name for name, one in named if times[id(one)] > 1]:
        raise SetupError(
            f"{where}: the optimizer's groups list more than once: {name_list(twice)}.\nList each parameter once."
        )


def refuse_memory(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, hosts: Sequence[Sequence[int]] | None, where: str
) -> None:
    """Raise if a parameter that it steps cannot lie in the one memory for all ranks of a host.

    Args:
        optimizer: with its groups.
        module: the attached one.
        hosts: the groups of ranks that share memory, if any do.
        where: how the message begins.
    """
    stepped = {*map(id, stepped_by(optimizer))}
    _refuse_twins(stepped, module, where)
    if shared := [ranks for ranks in hosts or () if len(ranks) > 1]:
        _refuse_scaled(stepped, module, shared[0], where)


def _refuse_scaled(stepped: Set[int], module: torch.nn.Module, ranks: Sequence[int], where: str) -> None:
    """torch scales rows in place there, by the norm that it has read: two ranks at once would scale twice."""
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) or layer.max_norm is None or layer.sparse:
            continue
        weight = layer._parameters.get("weight")
        if weight is not None and id(weight) in stepped and weight.requires_grad and weight.is_cpu:
            raise SetupError(
                f"{where}: forward of {name or type(layer).__name__} scales its weight in place "
                f"(max_norm={layer.max_norm}), which {describe_ranks(ranks)} would share in one memory: two ranks at "
                "once would scale a row twice.\n"
                'Set max_norm=None; or leave the weight to a plain optimizer; or attach with transport="process_group".'
            )


def _refuse_twins(stepped: Set[int], module: torch.nn.Module, where: str) -> None:
    """A twin begins in the memory of another tensor of the module, and would get memory of its own."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if not has_memory(one) or not one.data_ptr():
            continue
        twin_name, twin = found.setdefault(one.data_ptr(), (name, one))
        if twin is not one and not stepped.isdisjoint((id(one), id(twin))):
            raise SetupError(
                f"{where}: {name_list([twin_name, name])} are two tensors in one memory (b.data = a.data), which "
                "sharding would separate.\nTie them as one: module_b.weight = module_a.weight, before stretto.attach()."
            )


def refuse_converted(optimizer: torch.optim.Optimizer, reducer: Reducer, where: str) -> None:
    """Raise if a parameter that it steps was converted since the plan was made: laying it out would undo that."""
    stepped = {*map(id, stepped_by(optimizer))}
    queue = reducer.queue
    for spec, reference, device in zip(queue.plan.parameters, queue.references, queue.devices, strict=True):
        one = reference()
        if one is None or id(one) not in stepped:
            continue
        planned, now = (spec.shape, spec.dtype, device), (tuple(one.shape), one.dtype, one.device)
        if now != planned:
            was, is_now = (f"{dtype_name(dtype)} {shape} on {place}" for shape, dtype, place in (planned, now))
            raise SetupError(
                f"{where}: {spec.name} was {was} when the ranks last agreed, and is {is_now} now.\n"
                "Convert the model before stretto.attach(); or run a backward before stretto.shard(): the plan follows."
            )


def refuse_taken(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, others: Iterable[torch.optim.Optimizer], where: str
) -> None:
    """Raise if the optimizer steps a parameter that one of the others steps."""
    twice = {id(parameter) for one in others for parameter in stepped_by(one)}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    both = [names.get(id(one), "?") for one in stepped_by(optimizer) if id(one) in twice]
    if both:
        raise SetupError(
            f"{where}: {name_list(both)} belong to another sharded optimizer.\n"
            "Give each parameter to one optimizer, or call unshard() of the other one before."
        )


def wanted_by_any(problem: StrettoError | None, wanted: bool, peers: Peers) -> bool:
    """Whether any rank wants to follow; if one has a problem with that, all raise. Collective."""
    told = peers.gather((wanted, problem and str(problem)))
    if problem is not None:
        raise problem
    for rank, (_, theirs) in enumerate(told):
        if theirs is not None:
            raise SetupError(f"{peers.where}: rank {rank} cannot shard what its optimizer has now.\n  {theirs}")
    return any(one for one, _ in told)


def refuse_unreduced(optimizer: torch.optim.Optimizer, reducer: Reducer, where: str) -> None:
    """Raise if it is about to step a parameter whose gradient was not averaged over ranks.

    Args:
        optimizer: with its groups, to which parameters may have been added.
        reducer: says which are reduced now.
        where: how the message begins.
    """
    known = {id(parameter) for parameter in reducer.parameters}
    unknown = [
        one for one in stepped_by(optimizer) if one.requires_grad and one.grad is not None and id(one) not in known
    ]
    if not unknown:  # as in most steps, which a walk over the module would make slower
        return
    names = {id(parameter): name for name, parameter in reducer.members.everything().items()}
    for one in unknown:
        if id(one) in names:  # parameters no longer in the module are the user's business
            raise SetupError(
                f"{where}: {names[id(one)]} has a gradient of this rank only: no pass has reduced it since it was "
                "added to the optimizer.\nRun a backward outside no_sync() before the step, or zero_grad()."
            )
