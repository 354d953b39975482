"""Where parameters that are stepped in shares lie: flat, one after the other, once for all ranks of a host.

    bucket of the plan:    | slot of p0 | slot of p1 | slot of p2 |         gradients: a memory on every rank
    layout:                | p0         | p1         | p2         |         parameters: one memory for a host

A parameter becomes a tensor in that memory by ``parameter.data``; its strides stay. It has a storage of its own, so
that a state dict, a copy or a pickle of one module holds only that module's bytes.

[Note: shared parameters]  What one rank of a host writes into a parameter, all ranks of the host see. The step is
divided, so it writes nothing twice. But a change by hand on every rank (``parameter.mul_(0.9)``) happens once for each
rank. Copying values into parameters, as ``load_state_dict`` does, is harmless between two barriers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from ..errors import SetupError
from ..launch import LaunchQueue
from ..plan import BucketPlan
from ..slots import has_memory, use_count, which_lie_in
from ..specs import slot_strides
from ..transport import CommonMemory, own_memory
from ..transport.memory import LINE_BYTES
from ..wording import name_list
from .aliases import immovable, move
from .ownership import Piece, pieces_of
from .state import laid_flat, shaped

log = logging.getLogger("stretto")

_OWN_USES = 3
"""References to a parameter's storage: the parameter's, its view's, and the storage's Python object."""


class Layout:
    """The memory of some parameters of a plan. Collective to make.

    Args:
        queue: has the plan of the gradients, and a transport that may have memory that ranks share.
        parameters: those that lie here, by index in the plan.
    """

    def __init__(self, queue: LaunchQueue, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self.plan, transport = queue.plan, queue.transport
        self.parameters = dict(parameters)
        self._whole = {piece.index: piece for piece in pieces_of(self.plan, 0, 1, self.parameters)}
        self._at: dict[int, int] = {}
        """By parameter: the number of elements before it here, less the number before it in the bucket."""
        self._begin: dict[int, tuple[torch.device, int]] = {}
        """By bucket: where its parameters begin, in bytes."""
        sizes: dict[torch.device, int] = {}
        for number, pieces in groupby(self._whole.values(), lambda piece: piece.bucket):
            end = 0
            for piece in pieces:
                self._at[piece.index] = end - piece.start
                end += piece.numel
            device = self.parameters[piece.index].device
            self._begin[number] = device, sizes.setdefault(device, 0)
            sizes[device] += -(-end * self.plan.buckets[number].dtype.itemsize // LINE_BYTES) * LINE_BYTES
        self.nbytes = sum(sizes.values())
        on_host = all(device.type == "cpu" for device in sizes)
        alone = [(rank,) for rank in range(transport.world_size)]
        self.hosts = (transport.hosts if on_host else None) or alone
        """The groups of ranks that share memory for parameters."""
        self.host = next(ranks for ranks in self.hosts if transport.rank in ranks)
        self.is_shared = any(len(ranks) > 1 for ranks in self.hosts)
        self._is_first = self.host[0] == transport.rank
        self._memories: dict[torch.device, Any] = {}
        if self.is_shared:
            assert transport.common is not None, "it has hosts"
            memory = transport.common(max(self.nbytes, 1), queue.wait_for, "memory for parameters")
            self._memories[torch.device("cpu")] = memory
        else:
            self._memories |= {device: _own(size, device) for device, size in sizes.items()}
        self.views = {index: self._view(index) for index in self.parameters}
        self._addresses = self._where_views_lie()
        self.moved: list[int] = []
        """Parameters that torch has moved to its own shared memory, when it last moved any."""

    def _view(self, index: int) -> torch.Tensor:
        view = shaped(self.flat(self._whole[index]), self.plan.parameters[index])
        return immovable(view.data)  # without a base tensor, which would be one more user of the storage

    def flat(self, first: Piece, last: Piece | None = None) -> torch.Tensor:
        """The elements of a piece, or of consecutive pieces from the first to the last."""
        dtype, stop = self.plan.buckets[first.bucket].dtype, (last or first).stop
        device, begin = self._begin[first.bucket]
        begin += (first.start + self._at[first.index]) * dtype.itemsize
        tensor: torch.Tensor = self._memories[device].tensor(begin, stop - first.start, dtype)
        return tensor

    def follows(self, one: Piece, other: Piece) -> bool:
        """Whether the second piece directly follows the first, in the bucket and here."""
        behind = one.bucket == other.bucket and one.stop == other.start
        return behind and self._at[one.index] == self._at[other.index]

    def rows(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """These pieces, given in order, as as few flat tensors as possible."""
        rows: list[list[Piece]] = []
        for piece in pieces:
            if rows and self.follows(rows[-1][-1], piece):
                rows[-1].append(piece)
            else:
                rows.append([piece])
        return [self.flat(row[0], row[-1]) for row in rows]

    # Parameters

    @torch.no_grad()
    def fill(self) -> None:
        """Write the parameters' current values: the first rank of a host writes its own, and the others wait."""
        if self._is_first:
            for index, parameter in self.parameters.items():
                self.views[index].copy_(parameter)

    def adopt(self, lying: Iterable[torch.Tensor]) -> None:
        """Move the parameters here. ``lying``: tensors that show their former memory, and keep it."""
        move([(parameter, self.views[index]) for index, parameter in self.parameters.items()], lying)

    def shown(self) -> list[str]:
        """The parameters whose memory other tensors show (see aliases.py), or a live graph does, by name."""
        return [
            self.plan.parameters[index].name
            for index, view in self.views.items()
            if use_count(view.untyped_storage()._cdata) > _OWN_USES
        ]

    def strayed(self) -> list[int]:
        """Parameters that have been moved or changed since (``parameter.data = ...``, ``module.to()``)."""
        self._renew_views()
        inside = which_lie_in([*self.parameters.values()], [*self.views.values()])
        return [index for index, lies in zip(self.parameters, inside, strict=True) if not lies]

    def _where_views_lie(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self.views.values())]

    def _renew_views(self) -> None:
        """Follow ``share_memory_()``, or a pickle for another process: the storage of view and parameter has moved."""
        now = self._where_views_lie()
        if now != self._addresses:
            self.moved = [i for i, new, old in zip(self.views, now, self._addresses, strict=True) if new != old]
            self.views |= {index: self._view(index) for index in self.moved}

    def refuse_other_sizes(self, indices: Collection[int], where: str, plan: BucketPlan) -> None:
        """Checks parameters that were changed by hand. Changed strides are reported in one log line.

        Args:
            indices: those to look at.
            where: how the message begins.
            plan: of the gradients. A new one may have other dtypes or strides; these are followed.

        Raises:
            SetupError: with the name of one that cannot be followed.
        """
        if not indices:  # as in most steps
            return
        restrided, planned = [], {(spec.name, spec.shape): spec.strides for spec in plan.parameters}
        for index in indices:
            parameter, spec = self.parameters[index], self.plan.parameters[index]
            now = slot_strides(parameter.shape, parameter.stride())
            if now != planned.get((spec.name, parameter.shape), now):
                restrided.append(spec.name)
            if parameter.shape != spec.shape or (plan is self.plan and parameter.dtype is not spec.dtype):
                raise SetupError(
                    f"{where}: {spec.name} was {tuple(spec.shape)} {spec.dtype} when its optimizer was "
                    f"sharded, and is {tuple(parameter.shape)} {parameter.dtype} now.\n"
                    "Run a backward that reaches it before the step where the dtype has changed; where the size has, "
                    "build another parameter, and another optimizer for it."
                )
        if restrided:
            log.warning(
                f"{where}: {name_list(restrided)} had other strides than in the plan; they get the plan's back, and "
                "keep their values.\nCall .to(memory_format=...) before a backward, and not between that and the step."
            )

    def refuse_tied(self, strayed: Collection[int], where: str) -> None:
        """Raise ``SetupError`` where one of these lies where another parameter does: one step cannot be that of both.

        Args:
            strayed: parameters that lie elsewhere by now.
            where: how the message begins.
        """
        if not strayed:
            return
        moved = {*strayed}
        lying = {view.data_ptr(): index for index, view in self.views.items() if index not in moved}
        for index in strayed:
            address = self.parameters[index].data_ptr()  # 0 if it has no elements
            if address and (other := lying.setdefault(address, index)) != index:
                name, its = (self.plan.parameters[one].name for one in (index, other))
                raise SetupError(
                    f"{where}: {name} was given the memory of {its} (parameter.data = other.data), and a sharded "
                    "optimizer steps each in memory of its own.\n"
                    "Let both modules hold one parameter, before stretto.shard(...): module.weight = other.weight; or, "
                    "for its values alone, parameter.data = other.data.clone()."
                )

    def copies(
        self,
        strayed: Collection[int],
        pieces: Sequence[Piece],
        others: Callable[[], Iterable[torch.nn.Parameter]],
    ) -> dict[Piece, torch.Tensor]:
        """The values of what strayed, in bucket layout. Take them before any rank writes: see ``bring_back``.

        Args:
            strayed: parameters that lie elsewhere by now.
            pieces: this rank's.
            others: all parameters of the module. One that is not in this layout, but lies where some of these will lie
                (the two were swapped: it is frozen, ignored, or another optimizer's), gets memory of its own.
        """
        if strayed:
            taken = {self.views[index].data_ptr() for index in strayed}
            self._part_from(others(), taken, but=self.parameters.values())
        among, found = {*strayed}, dict[Piece, torch.Tensor]()
        for index, own in groupby(pieces if among else (), lambda piece: piece.index):
            if index in among:
                flat = laid_flat(self.parameters[index], self.plan.parameters[index])
                found |= {piece: flat[piece.first : piece.end].clone() for piece in own}  # a view would keep it whole
        return found

    def bring_back(self, strayed: Iterable[int], copies: Mapping[Piece, torch.Tensor]) -> None:
        """Each rank writes its own part of what strayed, and all of that lies here again.

        A strayed parameter may lie in the layout's memory, in another one's place (``a.data, b.data = b.data,
        a.data``): therefore ranks meet between taking the values and this.
        """
        for piece, copy in copies.items():
            self.flat(piece).copy_(copy)
        move([(self.parameters[index], self.views[index]) for index in strayed], self.views.values())

    def give_way(self, later: Layout, others: Iterable[torch.nn.Parameter]) -> None:
        """Parameters that do not lie in a later layout get memory of their own. ``others``: as of ``release``."""
        now = {id(one) for one in later.parameters.values()}
        self.release(others, {index for index, one in self.parameters.items() if id(one) in now})

    def release(self, others: Iterable[torch.nn.Parameter], keep: Collection[int] = ()) -> None:
        """Parameters get memory of their own again, except those that already lie in another layout.

        Args:
            others: parameters that may have taken over the memory of one: ``nn.Parameter(parameter.data)``.
            keep: those that lie in another layout.
        """
        addresses = {view.data_ptr() for view in self.views.values()}
        own = [one for index, one in self.parameters.items() if index not in keep]
        self._part_from((*own, *others), addresses)

    def _part_from(
        self, parameters: Iterable[torch.nn.Parameter], addresses: Collection[int], but: Iterable[torch.Tensor] = ()
    ) -> None:
        """Those that lie at these addresses get memory of their own."""
        stay, moves = {*map(id, but)}, list[tuple[torch.Tensor, torch.Tensor]]()
        with torch._C.DisableTorchFunctionSubclass():  # another optimizer's values may be under way, or never come
            lying = [one for one in parameters if has_memory(one) and one.data_ptr() in addresses]
        for parameter in lying:
            if id(parameter) not in stay:
                stay.add(id(parameter))
                moves.append((parameter, parameter.data.clone(memory_format=torch.preserve_format)))
        move(moves, self.views.values())


def warn_of_other_processes(where: str, names: Sequence[str]) -> None:
    """Log parameters that torch has moved to its own shared memory. ``where``: how the message begins."""
    log.warning(
        f"{where}: {name_list(names)} lie in memory shared with other processes (share_memory(), or pickled for one) "
        "and are moved out of it, with their values: those processes will not see steps from here on.\n"
        "Send them a copy after each step: copy.deepcopy(model), or clones of its state_dict(). If you do that "
        "already, nothing needs to change."
    )


class DeviceMemory:
    """Memory of an accelerator from which tensors are cut, as from the shared memory of a host.

    Each tensor has a storage of its own, unless the device has no DLPack. Then each step waits for what it has sent,
    since it always looks as if another tensor showed the parameter.

    Args:
        nbytes: how much.
        device: where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements from byte ``start`` on."""
        part = self._bytes[start : start + numel * dtype.itemsize]
        with contextlib.suppress(BufferError, RuntimeError, ValueError):  # other code does not know this device
            part = torch.utils.dlpack.from_dlpack(part)
        return part.view(dtype)


def _own(nbytes: int, device: torch.device) -> CommonMemory | DeviceMemory:
    return own_memory(nbytes) if device.type == "cpu" else DeviceMemory(nbytes, device)
