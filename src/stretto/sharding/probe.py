"""The numbers on which an optimizer is tried: see [Note: the probe] in kinds.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

STEPS = 7
"""Steps of a trial: some optimizers start differently (RAdam, for five steps)."""
_SHAPES = {
    0: ((), ()),
    1: ((7,), (48,)),
    2: ((6, 8), (3, 5)),
    3: ((2, 3, 4), (5, 2, 2)),
    4: ((2, 3, 2, 2), (4, 1, 3, 3)),
}
"""By number of dimensions: some optimizers take only matrices."""
_MOST = 1 << 14
"""Elements of the large one."""
_LEVELS = 8191
"""A prime, so that there is no pattern, and small enough for exact arithmetic: see ``gradients``."""


def numbers(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Two small tensors for each number of dimensions, and one about as large as the parameters are."""
    shapes: dict[int, list[torch.Size]] = {}
    for one in parameters:
        shapes.setdefault(one.dim(), []).append(one.shape)
    wanted = [
        shape
        for number in sorted(shapes) or (2,)
        for shape in (
            *_SHAPES.get(number, [(1,) * (number - 2) + rest for rest in _SHAPES[2]]),
            *_large_shape(shapes.get(number, ())),
        )
    ]
    found: list[torch.Tensor] = []
    for shape in wanted:
        levels = (torch.arange(math.prod(shape), device="cpu") * 3571 + 1009 * len(found)) % _LEVELS - _LEVELS // 2
        found.append((levels / 4096).view(shape))
    return found


def _large_shape(shapes: Sequence[torch.Size]) -> Iterator[Sequence[int]]:
    """The largest size in each dimension, reduced if that is too much."""
    sizes = [*map(max, zip(*shapes, strict=True))]
    if math.prod(sizes) <= 64:
        return
    while math.prod(sizes) > _MOST:
        place = sizes.index(max(sizes))
        sizes[place] = 1 << (sizes[place] - 1).bit_length() - 1  # some optimizers test for multiples of 256
    yield sizes


class _RandomStateKept:
    """Random numbers drawn inside change nothing outside. Several threads may be inside, and wait for each other there.

    Only one thread at a time asks torch for its state. torch allocates it while holding the generator's lock: if
    garbage is collected at that moment, another thread may run, and if that asks for the state too, it waits for this
    lock while holding Python's.
    """

    def __init__(self) -> None:
        self._inside, self._lock = 0, threading.RLock()  # a finalizer may run during the thread's own call
        self._before = torch.empty(0)
        """The state from before the first of the threads now inside drew a number."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.random.get_rng_state()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.random.set_rng_state(self._before)


random_state_kept = _RandomStateKept()


def gradients(values: Sequence[torch.Tensor], step: int, scale: float) -> list[torch.Tensor]:
    """Computed from the values, so that an element's is the same in any part, by operations that are exact in float32.

    (If two threads compute the process's first cosine at once, torch, or MKL, may be off by 1e-4.)
    """
    flat = (((joined(values) * 4096 + _LEVELS // 2) * 1201 + 2503 * step) % _LEVELS - _LEVELS // 2) / 4096 * scale
    parts = torch.split(flat, [*map(torch.numel, values)])
    return [part.view(one.shape).clone() for one, part in zip(values, parts, strict=True)]


def joined(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their elements."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for rounding."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)
