"""The state of a sharded optimizer for ``torch.distributed.checkpoint``: each rank writes and reads its own share.

    share of a parameter: elements first .. stop, as they lie ──> a few boxes of its shape ──> chunks of one tensor

Keys and values are those that ``get_optimizer_state_dict`` gives for the original optimizer, so a checkpoint does not
depend on how many ranks have written it, or on whether they had shares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import SetupError, UnsupportedError
from ..steps import stepped_by
from ..wording import name_list
from .keeping import kept_whole, with_first_states
from .state import Kept, State

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""What torch's compiler and ``checkpoint_wrapper`` add to names, and torch's checkpoints leave out."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in each dimension, and how far it goes."""


class Keeper(Protocol):
    """Who has the state."""

    def kept(self) -> list[Kept]:
        """What this rank keeps. Collective if groups or the plan have changed since the last step."""

    def take(self, kept: Sequence[Kept]) -> None:
        """Keep this instead."""


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank has some boxes. To be written and read by ``torch.distributed.checkpoint`` alone."""

    boxes: dict[torch.Size, torch.Tensor]
    """The boxes, by where they begin: views of the state."""
    is_new: bool
    """Nothing is kept so far: this can be read into, and is not written."""
    was_read: bool

    @classmethod
    def of(cls, shape: Sequence[int], boxes: Mapping[tuple[int, ...], torch.Tensor], *, is_new: bool) -> BoxedTensor:
        """Args: the shape of the whole, the boxes by where they begin, and whether their values mean nothing."""
        like = next(iter(boxes.values()))
        made: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        made.boxes = {torch.Size(offsets): box for offsets, box in boxes.items()}
        made.is_new = is_new
        made.was_read = False
        return made

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [] if self.is_new else [self._item(fqn, offsets, box) for offsets, box in self.boxes.items()]

    def _item(self, fqn: str, offsets: torch.Size, box: torch.Tensor) -> WriteItem:
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, box.size()), TensorProperties.create_from_tensor(box), self.size()
        )
        return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.size()) for offsets, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "as it was told"
        self.was_read = True
        return self.boxes[index.offset]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxedTensor({len(self.boxes)} boxes of {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise UnsupportedError(
            f"{func} of a share of optimizer state: the values of other ranks are not here.\n"
            "Pass stateful() only to torch.distributed.checkpoint's save and load; state_dict() gives whole tensors."
        )


class ShardedState:
    """An optimizer's state as ``torch.distributed.checkpoint`` wants it: one of its ``Stateful``.

    Args:
        optimizer: the one that was sharded: has the groups.
        keeper: returns who has the state now.
        module: gives the parameters' names at the time when a checkpoint is made.
        where: how messages begin.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, keeper: Callable[[], Keeper], module: torch.nn.Module, where: str
    ) -> None:
        self._optimizer = optimizer
        self._keeper = keeper
        self._module = module
        self._where = where
        self._kept: dict[str, Kept] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What this rank writes, or reads into. Collective if groups or the plan have changed since the last step.

        Raises:
            SetupError: the optimizer steps a parameter that is no longer in the module.
        """
        keeper, names = self._keeper(), self._names()
        self._kept = {names[id(one.parameter)]: one for one in keeper.kept()}
        return {
            "state": {name: _shares_of(one) for name, one in self._kept.items()},
            "param_groups": [
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": [names[id(one)] for one in group["params"]],
                }
                for group in self._optimizer.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was read into the last ``state_dict()``. Not collective, but all ranks must call it.

        Raises:
            SetupError: it is something else, or has other parameter groups; or the optimizer has ended. Then groups are
                unchanged, but values of the state have been overwritten by the reading.
        """
        keeper, states = self._keeper(), state_dict["state"]
        if self._kept is None or states.keys() != self._kept.keys():
            raise SetupError(
                f"{self._where}: this is not what state_dict() of the same object has returned.\n"
                "Pass stateful() to torch.distributed.checkpoint.load(); a whole state is for load_state_dict() of the "
                "optimizer."
            )
        self._refuse_other_groups(state_dict["param_groups"])
        read = [
            one._replace(held=one.held._replace(rest=_rest_of(one, states[name])))
            for name, one in self._kept.items()
            if not one.is_new or _was_read(states[name])
        ]
        before = [{**group} for group in self._optimizer.param_groups]
        try:
            for group, theirs in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
                group.update({key: value for key, value in theirs.items() if key != "params"})
            keeper.take(read)
        except BaseException:
            for group, mine in zip(self._optimizer.param_groups, before, strict=True):
                group.clear()
                group.update(mine)
            raise
        self._kept = None

    def _names(self) -> dict[int, str]:
        """Of all that the optimizer steps, by ``id``."""
        names = {id(one): _WRAPPERS.sub("", name) for name, one in self._module.named_parameters()}
        for number, group in enumerate(self._optimizer.param_groups):
            for place, one in enumerate(group["params"]):
                if id(one) not in names:
                    raise SetupError(
                        f"{self._where}: parameter {place} of group {number}, {tuple(one.shape)}, is not in the "
                        "module any more, so a checkpoint has no name for it.\n"
                        'Put its replacement into optimizer.param_groups, or remove it: group["params"].'
                    )
        return names

    def _refuse_other_groups(self, loaded: Sequence[dict[str, Any]]) -> None:
        names = self._names()
        none: dict[str, Any] = {"params": []}
        for number, (group, theirs) in enumerate(zip_longest(self._optimizer.param_groups, loaded, fillvalue=none)):
            if different := sorted({names[id(one)] for one in group["params"]} ^ {*theirs["params"]}):
                raise SetupError(
                    f"{self._where}: parameter group {number} of the checkpoint has other parameters than the "
                    f"optimizer's: {name_list(different)} are in only one of them.\n"
                    "Build the optimizer again, with the groups that it was saved with: its previous state has been "
                    "overwritten."
                )


class OnlyRank:
    """The keeper where there is one rank: the optimizer itself.

    Args:
        optimizer: steps whole parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def kept(self) -> list[Kept]:
        """All of it."""
        everything = [*stepped_by(self._optimizer)]
        found = [kept_whole(one, self._optimizer.state.get(one)) for one in everything]
        wanted = [one for one in found if not one.is_new or one.parameter.requires_grad]
        return with_first_states(self._optimizer, wanted)

    def take(self, kept: Sequence[Kept]) -> None:
        """Replaces what the optimizer had."""
        self._optimizer.state.clear()
        self._optimizer.state.update({one.parameter: one.state for one in kept if one.state})


def _shares_of(one: Kept) -> State:
    """The state of one parameter: tensors as shares, the rest as it is."""
    held = one.held
    boxes = [*boxes_in_memory(one.shape, one.strides, held.first, held.first + held.numel)]
    found: State = {}
    for key, value in held.flat.items():
        parts, start = {}, 0
        for (offsets, sizes), order in boxes:
            numel = math.prod(sizes)
            lying = value[start : start + numel].view([sizes[dim] for dim in order])
            parts[offsets] = lying.permute([order.index(dim) for dim in range(len(order))])
            start += numel
        found[key] = BoxedTensor.of(one.shape, parts, is_new=one.is_new)
    for key, value in held.rest.items():
        whole = torch.is_tensor(value)
        found[key] = BoxedTensor.of(value.shape, {(0,) * value.dim(): value}, is_new=one.is_new) if whole else value
    return found


def _rest_of(one: Kept, values: State) -> State:
    """Tensors were read in place; other values were replaced."""
    return {key: value if torch.is_tensor(value) else values[key] for key, value in one.held.rest.items()}


def _was_read(values: State) -> bool:
    shares = [value for value in values.values() if isinstance(value, BoxedTensor)]
    return not shares or any(share.was_read for share in shares)


def boxes_in_memory(
    shape: Sequence[int], strides: Sequence[int], first: int, stop: int
) -> Iterator[tuple[Box, Sequence[int]]]:
    """Elements ``first`` to ``stop`` of a dense tensor, in memory order, as consecutive boxes.

    Each box comes with its dimensions in the order of memory, the outermost first.
    """
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    for offsets, sizes in boxes_of([shape[dim] for dim in order], first, stop):
        placed = sorted(zip(order, offsets, sizes, strict=True))
        yield (tuple(one for _, one, _ in placed), tuple(one for _, _, one in placed)), order


def boxes_of(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The same of a row-major tensor: part of a row, whole rows, part of a row, and so on within these."""
    if first >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), stop // row
    if begin > end:
        yield from _in_row(shape, end, first - end * row, stop - end * row)
        return
    yield from _in_row(shape, begin - 1, first - (begin - 1) * row, row)
    if begin < end:
        yield (begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:])
    yield from _in_row(shape, end, 0, stop - end * row)


def _in_row(shape: Sequence[int], number: int, first: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(shape[1:], first, stop):
        yield (number, *offsets), (1, *sizes)
