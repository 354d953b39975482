"""What a step over a link takes at least, when sending costs no processor time: the best order, on an ideal link.

    forward  a layer waits until its parameters are there
    backward a gradient can leave when it is computed
    step     when all gradients are there; in shares, what is stepped can leave while the rest is

A calculation from measured times of one process that does not communicate; no measurement of any library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stretto.bench.models import Loss

STEPS = 8
"""Simulated before the one that counts, so that the beginning does not."""


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own."""

    nbytes: int
    needed: float
    """Seconds into the step, when forward comes to it."""
    ready: float
    """The same, when the last of its gradients is there."""


@dataclass(frozen=True)
class Profile:
    """A step that does not communicate, in seconds. Layers in the order of forward."""

    layers: Sequence[Layer]
    backward_ends: float
    optimizer: float


def profile(model: torch.nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, rounds: int = 9) -> Profile:
    """The step of median length, after two of warm-up."""
    layers = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
    began, needed, ready = 0.0, dict[torch.nn.Module, float](), dict[torch.nn.Module, float]()
    handles = []

    def now() -> float:
        return time.perf_counter() - began

    def enters(layer: torch.nn.Module, _: object) -> None:
        needed.setdefault(layer, now())

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enters))
        for parameter in layer.parameters(recurse=False):
            handles.append(
                parameter.register_post_accumulate_grad_hook(lambda _, one=layer: ready.update({one: now()}))
            )

    found = []
    for _ in range(rounds + 2):
        needed.clear()
        began = time.perf_counter()
        loss(model).backward()
        backward_ends = now()
        optimizer.step()
        ends = now()
        optimizer.zero_grad()
        rows = [
            Layer(sum(one.nbytes for one in layer.parameters(recurse=False)), needed[layer], ready[layer])
            for layer in sorted(needed, key=needed.__getitem__)
        ]
        found.append((ends, Profile(rows, backward_ends, ends - backward_ends)))
    for handle in handles:
        handle.remove()
    middle = statistics.median_low(seconds for seconds, _ in found[2:])
    return next(one for seconds, one in found[2:] if seconds == middle)


def least_seconds(step: Profile, send: Callable[[int], float], *, shares: bool) -> float:
    """A step, of many in a row.

    Args:
        step: without communication.
        send: seconds that so many bytes take, in both directions at once.
        shares: two ranks step a share each, and half of the bytes travel before the step, half behind it; else all
            gradients are summed before, and each rank steps everything.
    """
    half = 0.5 if shares else 1.0
    everything = sum(layer.nbytes for layer in step.layers)
    free = begins = period = 0.0
    arrived = dict[int, float]()
    for _ in range(STEPS):
        late = 0.0
        for number, layer in enumerate(step.layers):
            late += max(0.0, arrived.get(number, 0.0) - (begins + layer.needed + late))
        for layer in sorted(step.layers, key=lambda one: one.ready):
            free = max(free, begins + layer.ready + late) + send(layer.nbytes) * half
        stepped = max(free, begins + step.backward_ends + late)
        for number, layer in enumerate(step.layers):
            stepped += step.optimizer * half * layer.nbytes / everything
            if shares:
                free = max(free, stepped) + send(layer.nbytes) * half
                arrived[number] = free
        period, begins = stepped - begins, stepped
    return period
