"""What the parameter groups of an optimizer say, whether that has changed, and whether it is the same on all ranks.

[Note: one number]  Each rank steps its share with its own groups. If these differed, the model would silently become a
patchwork. So ranks compare a number whenever they meet anyway. It is a hash of the plain options and of which
parameters are in which group, by Python's own hash function, which for numbers gives the same result in each process.
It is computed again only if some option is another object than before. Options that are objects, and tensors on an
accelerator, are left out. In the first meeting of a step the number also stands for the parameters that were given
other memory: see strays.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ..errors import ModelMismatchError, SetupError
from ..launch import LaunchQueue
from ..specs import dtype_name
from ..wording import describe_ranks, name_list
from .attributes import are_same, comparable, is_scalar, values_of
from .meetings import leave_join
from .rebuilt import options_of
from .state import State
from .turns import turns

_MASK = (1 << 40) - 1


class _LastLook(NamedTuple):
    """What was compared in the last step, and the resulting number: most options stay the same objects."""

    mark: int
    values: Sequence[Any]
    """Empty if one of them could change in place."""
    number: int


class Groups:
    """The parameter groups of one optimizer.

    Args:
        optimizer: has them.
        queue: knows which parameters are reduced, by name and in which order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, queue: LaunchQueue) -> None:
        self.optimizer = optimizer
        self._queue = queue
        self._seen = _LastLook(0, (), 0)
        self.departed: dict[torch.Tensor, tuple[State, torch.dtype]] = {}
        """State and dtype of parameters that have left all groups and may come back; torch keeps the state too."""
        self.forgotten = set[torch.Tensor]()
        """Those that have left since the layout was made, and whose state the program has dropped."""
        self.remember()

    @property
    def all(self) -> list[dict[str, Any]]:
        """As they are now."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all groups."""
        return [one for group in self.all for one in group["params"]]

    # Changes

    def remember(self) -> None:
        """Remember which parameters are in which group now."""
        self._members = [[*group["params"]] for group in self.all]
        self._dtypes: dict[int, torch.dtype] = {id(one): one.dtype for group in self._members for one in group}
        self._plan = self._queue.plan
        self._mark = self._mark_now()

    def _mark_now(self) -> int:
        places = {id(one()): place for place, one in enumerate(self._queue.references)}
        members = [
            [(places.get(id(one), -1 - one.numel()), one in self.forgotten) for one in group["params"]]
            for group in self.all
        ]
        return hash((self._queue.peers.seat.key, *map(tuple, members)))

    def have_moved(self) -> bool:
        """Whether groups have other parameters than remembered, or one that has been away, and lost its state there."""
        now = [group["params"] for group in self.all]
        if self.forgotten and not self.forgotten.isdisjoint(self.parameters):
            return True
        return [*map(len, now)] != [*map(len, self._members)] or not all(
            all(map(operator.is_, ours, known)) for ours, known in zip(now, self._members, strict=True)
        )

    def dtype_before(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype of a parameter that is remembered, or has left the groups."""
        return self._dtypes[id(parameter)] if id(parameter) in self._dtypes else self.departed[parameter][1]

    def part_from(self, states: Mapping[torch.Tensor, State], alive: Iterable[torch.nn.Parameter]) -> None:
        """Keep the whole state of parameters that have left all groups, as long as they are in the module.

        Args:
            states: by parameter, including what was kept before.
            alive: the module's parameters.
        """
        known = {id(one) for one in self.parameters}
        gone = [one for one in alive if one in states and id(one) not in known]
        self.departed = {one: (states[one], one.dtype) for one in gone}
        self.forgotten.clear()

    def refuse_other_dtypes(self) -> None:
        """Raise ``SetupError`` if parameters have another dtype than in a new plan, and so than their gradients."""
        if self._queue.plan is self._plan:
            return
        known = {id(one) for one in self.parameters}
        for reference, spec in zip(self._queue.references, self._queue.plan.parameters, strict=True):
            one = reference()
            if one is not None and id(one) in known and one.dtype is not spec.dtype:
                raise SetupError(
                    f"{self._queue.where}: {spec.name} was {dtype_name(spec.dtype)} in the last backward, and is "
                    f"{dtype_name(one.dtype)} now.\nRun a backward between a change of the dtype and this call."
                )

    # Ranks

    def number(self, *, has_moved: bool, turn: str = "") -> int:
        """The same on all ranks whose groups are alike: see [Note: one number]. Less than 2**40.

        Args:
            has_moved: what ``have_moved`` says.
            turn: what is done instead of a step.
        """
        return self._number(has_moved=has_moved) ^ crc32(turn.encode())

    def _number(self, *, has_moved: bool) -> int:
        lags = has_moved or self._queue.plan is not self._plan  # what is remembered goes with the layout
        mark = self._mark_now() if lags else self._mark
        values = values_of(self.optimizer)
        seen = self._seen
        if mark == seen.mark and are_same(values, seen.values):
            return seen.number
        self._refuse_texts()
        options = [value for group in self.all for value in options_of(group).values()]
        number = hash((mark, *map(_number_of, options))) & _MASK
        self._seen = _LastLook(mark, [] if any(map(_is_changeable, options)) else values, number)
        return number

    def _refuse_texts(self) -> None:
        """Raise ``TypeError``, as torch would amid its step, when other ranks may have stepped; this one has not."""
        known = self.optimizer.defaults.items()
        numbers = [key for key, value in known if isinstance(value, (int, float)) and not isinstance(value, bool)]
        for place, group in enumerate(self.all):
            for key in numbers:
                if isinstance(group.get(key), str):
                    raise TypeError(
                        f"{self._queue.where}: parameter group {place} has {key}={group[key]!r}, a str instead of a "
                        "number.\nThis rank has not stepped. Set a number."
                    )

    def refuse_others(self, call: str = "step") -> None:
        """Compare in full, since the numbers differ. Collective.

        Args:
            call: the method of the optimizer that this rank has called.

        Raises:
            ModelMismatchError: with the first difference. On all ranks.
        """
        told, where = self._queue.peers.gather((call, self.facts())), self._queue.where
        first_call, first = told[0]
        for rank, (theirs, facts) in enumerate(told):
            if theirs != first_call:
                raise ModelMismatchError(
                    f"{where}: rank {rank} calls optimizer.{theirs}(), rank 0 optimizer.{first_call}().\n"
                    "Nothing has changed. Make the same calls on all ranks; then all can go on."
                )
            if facts != first:
                raise unlike_groups(where, rank, facts, first)

    def facts(self) -> list[Any]:
        """See the function of this name."""
        names = {id(one()): name for name, one in zip(self._queue.names, self._queue.references, strict=True)}
        lost = {id(one): f"{names.get(id(one), '?')} (without its state)" for one in self.forgotten}
        return facts(self.optimizer, {**names, **lost})

    def refuse_patchwork(self, stepped: Sequence[Sequence[int]]) -> None:
        """Raise ``ModelMismatchError`` if ranks have stepped different optimizers, or with groups that are not alike.

        ``stepped``: by rank, the number of its groups and that of the optimizer.
        """
        where, rank = self._queue.where, self._queue.transport.rank
        if elsewhere := [other for other, (_, whose) in enumerate(stepped) if whose != stepped[rank][1]]:
            raise ModelMismatchError(
                f"{where}: the last step was that of another sharded optimizer on {describe_ranks(elsewhere)}, so the "
                "model is a mixture of two.\n"
                "Step optimizers in the same order on all ranks, and start again from the last checkpoint."
            )
        if not (others := [other for other, (groups, _) in enumerate(stepped) if groups != stepped[rank][0]]):
            return
        calls = ", or was a train() or an eval() on some" if turns(self.optimizer) else ""
        raise ModelMismatchError(
            f"{where}: the last step was taken with other parameter groups on {describe_ranks(others)} than here "
            f"({self._in_words()}){calls}, so the model is a mixture.\n"
            "Set the same on all ranks, schedules included, and start again from the last checkpoint."
        )

    def _in_words(self) -> str:
        return "; ".join(", ".join(f"{key}={value}" for key, value in options_of(group).items()) for group in self.all)


def _number_of(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_number_of, value))
    if isinstance(value, torch.Tensor):
        return _number_of(value.item()) if value.numel() == 1 and value.is_cpu else 0
    if isinstance(value, Number) and not isinstance(value, Enum) and value == value:
        return value
    return crc32(str(value).encode()) if is_scalar(value) else 0  # a text, or NaN: its hash differs between processes


def _is_changeable(value: Any) -> bool:
    return any(map(_is_changeable, value)) if isinstance(value, tuple) else isinstance(value, (torch.Tensor, list))


def facts(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[Any]:
    """What must be equal on all ranks: options of each group, and whose parameters it has.

    Args:
        optimizer: has the groups.
        names: of parameters, by ``id``.
    """
    options = [{key: comparable(value) for key, value in options_of(group).items()} for group in optimizer.param_groups]
    members = [
        [names.get(id(one), str(tuple(one.shape))) for one in group["params"]] for group in optimizer.param_groups
    ]
    return [options, *members]


def unlike_groups(
    where: str, rank: int, theirs: list[Any], first: list[Any], from_rank: int = 0, *, idle: int = 0
) -> ModelMismatchError:
    """An error for groups that are not alike where no rank has stepped. ``where``: how the message begins."""
    several = (
        ""
        if theirs[1:] == first[1:]
        else " Step several optimizers in one order, which inside Join is that of its list."
    )
    return ModelMismatchError(
        f"{where}: {difference(rank, theirs, first, from_rank)}\n"
        f"No rank has stepped. Set the same on all ranks, schedules included; {leave_join(idle)}then all can go on."
        f"{several}"
    )


def difference(rank: int, theirs: list[Any], first: list[Any], from_rank: int = 0) -> str:
    """The difference, in words, between the unequal ``facts`` of two ranks."""
    if len(theirs) != len(first):
        return f"rank {rank} has {len(theirs) - 1} parameter groups, rank {from_rank} {len(first) - 1}."
    for number, (names, other_names) in enumerate(zip(theirs[1:], first[1:], strict=True)):
        if names != other_names:
            here = sorted({*names} ^ {*other_names}) or names
            return f"parameter group {number} differs between rank {from_rank} and rank {rank}: {name_list(here)}."
    number = next(i for i, (one, other) in enumerate(zip(theirs[0], first[0], strict=True)) if one != other)
    one, other = theirs[0][number], first[0][number]
    key = next(key for key in one | other if one.get(key) != other.get(key))
    return (
        f"parameter group {number} has {key}={one.get(key)} on rank {rank}, {key}={other.get(key)} on rank {from_rank}."
    )
