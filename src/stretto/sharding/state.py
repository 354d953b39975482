"""The whole state of an optimizer whose ranks keep shares of it, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import SetupError
from ..launch import LaunchQueue
from ..peers import Peers
from ..specs import ParameterSpec, describe_parameters
from ..wording import counted

State = dict[str, Any]
"""What an optimizer keeps for a parameter. If that is flat, 1-d tensors are by element, the rest is for all."""


class Held(NamedTuple):
    """What one rank keeps for some elements of a parameter."""

    first: int
    numel: int
    flat: dict[str, torch.Tensor]
    """By element."""
    rest: State
    """For the whole parameter; the same on all ranks that have a part of it."""


class Kept(NamedTuple):
    """What one rank keeps for a parameter, with the places of its elements."""

    parameter: torch.nn.Parameter
    shape: Sequence[int]
    strides: Sequence[int]
    held: Held
    is_new: bool
    """Nothing was kept so far: the keys are those that there would be, the values mean nothing."""
    is_flat: bool
    """It is stepped as flat pieces, so some of its state is kept by element."""

    @property
    def state(self) -> State:
        """The whole state; what is kept by element is flat."""
        return self.held.flat | self.held.rest


def whole_states(
    held: Mapping[int, Sequence[Held]],
    specs: Sequence[ParameterSpec],
    queue: LaunchQueue,
    place_of: Callable[[int], int],
) -> Iterator[tuple[int, dict[str, torch.Tensor], State]]:
    """For each parameter: its index, its whole by-element tensors, flat, and the rest. Collective; exhaust it.

    Args:
        held: what this rank keeps, by parameter.
        specs: of all parameters of the layout's plan, which may be older than the queue's.
        queue: its transport carries what is kept by element, one message a parameter.
        place_of: says when it is a parameter's turn. Ranks may differ in that: those with lower numbers decide.
    """
    told: dict[int, tuple[int, dict[str, torch.dtype], State]] = {}
    mine = {
        index: (place_of(index), {key: value.dtype for key, value in parts[0].flat.items()}, parts[0].rest)
        for index, parts in held.items()
    }
    for theirs in queue.peers.gather(mine):
        told = theirs | told
    for index in sorted(told, key=lambda index: (told[index][0], index)):
        numel, (_, dtypes, rest) = specs[index].numel, told[index]
        nbytes = sum(numel * dtype.itemsize for dtype in dtypes.values())
        message = torch.zeros(nbytes, dtype=torch.uint8, device=specs[index].device)
        flats = _cut(message, numel, dtypes)
        for part in held.get(index, ()):
            for key, value in part.flat.items():
                flats[key][part.first : part.first + part.numel] = value
        if len(message):
            work = queue.transport.all_reduce(message)
            with queue.peers.in_call():
                queue.wait_for(work, "the optimizer's state")
        yield index, flats, rest


def handed_on(
    states: Mapping[torch.Tensor, State], parameters: Sequence[torch.Tensor], queue: LaunchQueue
) -> dict[torch.Tensor, State]:
    """The whole states that rank 0 has, by parameter, on every rank. Collective.

    Args:
        states: rank 0's; none on other ranks.
        parameters: in the same order on all ranks.
        queue: its transport carries what has the shape of a parameter, one message a parameter.
    """
    specs = describe_parameters({str(place): one for place, one in enumerate(parameters)})
    held = dict[int, list[Held]]()
    for place, (one, spec) in enumerate(zip(parameters, specs, strict=True)):
        if one in states:
            state = flat_state(states[one], spec, ())
            flat = {key: value for key, value in state.items() if value is not states[one][key]}
            rest = {key: value for key, value in state.items() if key not in flat}
            held[place] = [Held(0, spec.numel, flat, rest)]
    return {
        parameters[place]: rest | {key: shaped(flat, specs[place]) for key, flat in flats.items()}
        for place, flats, rest in whole_states(held, specs, queue, lambda place: place)
    }


def refuse_unlike_states(places: Sequence[int], problem: Exception | None, peers: Peers) -> bool:
    """Compare whole states that ranks were given to load. Collective.

    Args:
        places: the parameters with a state here, by place in the groups.
        problem: why nothing can be loaded on this rank.
        peers: the other ranks.

    Returns:
        Whether rank 0 alone was given any, as ``state_dict()`` gives it.

    Raises:
        SetupError: a rank cannot load, or has the state of other parameters than rank 0. On all ranks.
    """
    failed = problem and f"{type(problem).__name__}: {problem}"
    told: list[tuple[str | None, list[int]]] = peers.gather((failed, [] if failed else [*places]))
    for rank, (failure, _) in enumerate(told):
        if failure is not None:
            raise SetupError(
                f"{peers.where}: rank {rank} cannot load the state that it was given, so no rank does.\n  {failure}\n"
                "Load what state_dict() of an optimizer with the same parameter groups has returned, of a sharded one "
                "on rank 0."
            ) from problem
    first = told[0][1]
    if first and len(told) > 1 and not any(theirs for _, theirs in told[1:]):
        return True
    for rank, (_, theirs) in enumerate(told):
        if theirs != first:
            raise SetupError(
                f"{peers.where}: rank {rank} was given the state of {counted(len(theirs), 'parameters')} to load, rank "
                f"0 that of {len(first)}.\nGive each rank the whole state that rank 0's state_dict() returned, or rank "
                "0 alone; with torch.distributed.checkpoint, use stateful()."
            )
    return False


def by_element(value: Any, numel: int) -> bool:
    """Whether it is kept for each element of a flat parameter."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _cut(message: torch.Tensor, numel: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """The widest dtype first, so that each part is aligned."""
    found, start = {}, 0
    for key, dtype in sorted(dtypes.items(), key=lambda item: -item[1].itemsize):
        found[key] = message[start : start + numel * dtype.itemsize].view(dtype)
        start += numel * dtype.itemsize
    return {key: found[key] for key in dtypes}


def laid_flat(value: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """A tensor of the parameter's shape, laid flat as in a bucket."""
    flat = torch.empty(spec.numel, dtype=value.dtype, device=value.device)
    flat.as_strided(spec.shape, spec.strides).copy_(value)
    return flat


def shaped(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """The inverse, without a copy."""
    return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


def flat_state(state: State, spec: ParameterSpec, keys: Collection[str]) -> State:
    """The state of a whole parameter as that of a flat one.

    Args:
        state: of the parameter.
        spec: its own.
        keys: what is kept by element, if the parameter has no dimensions, so that shapes do not tell.
    """
    return {
        key: laid_flat(value, spec)
        if torch.is_tensor(value) and value.shape == spec.shape and (value.dim() or key in keys)
        else value
        for key, value in state.items()
    }


def follow_dtype(state: State, before: torch.dtype, now: torch.dtype) -> None:
    """Convert what was kept in the parameter's former dtype to its present one."""
    for key, value in state.items() if before is not now else ():
        if torch.is_tensor(value) and value.dtype is before and key != "step":
            state[key] = value.to(now)
