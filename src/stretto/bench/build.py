"""Builds a contestant's model and optimizer, with one of the libraries around them, or none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..attach import attach
from ..handle import Synchronizer
from ..transport import ProcessGroupTransport, SharedMemoryTransport, Transport, choose
from .contestants import Contestant, OptimizerName
from .floor import StepInShares, least_work, meeting
from .models import LEARNING_RATE, Loss, Workload

Scope = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Training:
    """A model and its optimizer, as one contestant trains it."""

    model: nn.Module
    """The module whose parameters are stepped."""
    called: nn.Module
    """The module, or the wrapper around it."""
    loss: Loss
    after: Callable[[], object] = bool
    """Runs between backward and the optimizer's step."""
    no_sync: Scope = contextlib.nullcontext
    handle: Synchronizer | None = None
    """Of stretto."""
    sync_every: int = 1
    optimizer: torch.optim.Optimizer = field(init=False)
    """Set by :func:`build`."""

    def backward(self) -> None:
        """One forward and backward pass."""
        self.loss(self.called).backward()  # type: ignore[no-untyped-call]

    def steps(self, count: int) -> None:
        """``count`` forward and backward passes, with an optimizer step after every ``sync_every``.

        Nothing is under way afterwards: else stepped parameters would travel in another contestant's time.
        """
        for number in range(1, count + 1):
            if number % self.sync_every:
                with self.no_sync():
                    self.backward()
            else:
                self.backward()
                self.after()
                self.optimizer.step()
                self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.data_ptr()  # a look waits for it

    def close(self) -> None:
        """Release what other ranks depend on."""
        if self.handle is not None:
            self.handle.detach()
            self.handle = None


class Messages(Training):
    """Sends all that a step has to send, in one message over the process group, and does nothing else."""

    def steps(self, count: int) -> None:
        """So many messages."""
        for _ in range(count):
            dist.all_reduce(self._gradients)

    @functools.cached_property
    def _gradients(self) -> torch.Tensor:
        return torch.zeros(sum(one.numel() for one in self.model.parameters() if one.requires_grad))


class InShares(Training):
    """For contestants whose ``after`` takes the optimizer's step as well."""

    def steps(self, count: int) -> None:
        """So many steps."""
        for _ in range(count):
            self.backward()
            self.after()


def build(contestant: Contestant, make: Callable[[], Workload]) -> Training:
    """Build the contestant around a model and an optimizer of its own. Collective.

    Raises:
        Exception: whatever the library raises if it cannot do it.
    """
    training = _shared_out(contestant, *make())
    training.sync_every = contestant.sync_every
    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    training.optimizer = _optimizer(contestant.optimizer, parameters)
    if training.handle is not None and (options := contestant.options.get("shard")) is not None:
        training.optimizer = training.handle.shard(training.optimizer, **options)
    return training


def _optimizer(name: OptimizerName, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)


def _shared_out(contestant: Contestant, model: nn.Module, loss: Loss) -> Training:
    options = {name: value for name, value in contestant.options.items() if name != "shard"}
    if contestant.kind == "torch":
        wrapped = TorchDDP(model, **options)
        training = Training(model, wrapped, loss, no_sync=wrapped.no_sync)
    elif contestant.kind == "stretto":
        groups = [dist.new_group() for _ in range(options.pop("groups", 0))]
        # a group of its own: models on one group ask in every pass whether a backward reaches the other
        own = None if groups else dist.new_group()
        options["check_every"] = 0  # all ranks have the factory's batch: no warning about it
        handle = attach(model, process_group=own, process_groups=groups, **options)
        training = Training(model, model, loss, no_sync=handle.no_sync, handle=handle)
    elif contestant.kind == "replicate":
        training = _replicated(model, loss, options["by_layer"])
    elif contestant.kind == "fully_shard":
        training = _fully_sharded(model, loss, options["by_layer"])
    elif contestant.kind == "messages":
        training = Messages(model, model, loss)
    elif contestant.kind == "loop":
        training = Training(model, model, loss, _message_by_message(model))
    elif contestant.kind == "alone":
        training = Training(model, model, loss)
    elif contestant.options.get("shares"):
        training = InShares(model, model, loss, StepInShares(model, _shared_memory()))
    else:
        shared = _shared_memory()
        work = meeting(shared) if contestant.kind == "lockstep" else least_work(model, shared)
        training = Training(model, model, loss, work)
    return training


def _shared_memory() -> SharedMemoryTransport:
    chosen = choose(ProcessGroupTransport(), "shared_memory")
    assert isinstance(chosen, SharedMemoryTransport), "so it was asked for"
    return chosen


def transport_of(contestant: Contestant) -> Transport:
    """The transport of its messages, or one like it. Collective."""
    asked = contestant.options.get("transport", "auto") if contestant.kind == "stretto" else "process_group"
    return choose(ProcessGroupTransport(), asked)


def _message_by_message(model: nn.Module) -> Callable[[], None]:
    def reduce() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    return reduce


def _fully_sharded(model: nn.Module, loss: Loss, by_layer: bool) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*_layers(model), model] if by_layer else [model]:
        fully_shard(part, mesh=mesh)
    return Training(model, model, loss)


def _replicated(model: nn.Module, loss: Loss, by_layer: bool) -> Training:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    for layer in _layers(model) if by_layer else []:
        replicate(layer, mesh=mesh)
    wrapped = replicate(model, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)

    return Training(model, model, loss, no_sync=no_sync)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters in lists and sequences, from the outside in."""
    lists = [one for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential))]
    inside = {id(inner) for one in lists for layer in one for inner in layer.modules() if inner is not layer}
    found = {id(layer): layer for one in lists if id(one) not in inside for layer in one if [*layer.parameters()]}
    return [layer for key, layer in found.items() if key not in inside]
