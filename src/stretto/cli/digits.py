"""What ``stretto demo`` trains: a small network that reads digits, on two ranks, three times.

The digits are scikit-learn's handwritten ones if that is installed; otherwise they are drawn here: five by three points
each, shifted, dimmed and noisy. Nothing is downloaded. All runs see the same batches and begin with the same weights.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto

Way = Literal["torch DDP", "before", "after"]
WAYS: tuple[Way, ...] = ("torch DDP", "before", "after")
"""Torch's DDP; stretto sending everything when backward has ended, over Gloo; stretto with its defaults."""
STEPS = 160
BATCH = 64
"""Of all ranks together."""
SEED = 0
_TRACED = range(STEPS - 30, STEPS)
_WARM = 20
_DRAWN = 1800
_GLYPHS = (
    ("###", "#.#", "#.#", "#.#", "###"),
    ("..#", ".##", "..#", "..#", "..#"),
    ("###", "..#", "###", "#..", "###"),
    ("###", "..#", "###", "..#", "###"),
    ("#.#", "#.#", "###", "..#", "..#"),
    ("###", "#..", "###", "..#", "###"),
    ("###", "#..", "###", "#.#", "###"),
    ("###", "..#", "..#", "..#", "..#"),
    ("###", "#.#", "###", "#.#", "###"),
    ("###", "#.#", "###", "..#", "###"),
)


@dataclass(frozen=True)
class Trained:
    """One run, as its rank 0 saw it."""

    way: Way
    losses: tuple[float, ...]
    accuracy: float
    """Accuracy on digits that were not trained on."""
    seconds_per_step: float
    """Median, after the first steps and before those that are traced."""
    data: str
    plan: str = ""


def make_net() -> nn.Sequential:
    """Some 180,000 parameters in seven layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    widths = [64, 192, 192, 192, 192, 192, 10]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Pictures of 8 by 8 points, which digit each shows, and whose digits they are."""
    if importlib.util.find_spec("sklearn") and importlib.util.find_spec("numpy"):
        handwritten: Any = importlib.import_module("sklearn.datasets")
        images, labels = handwritten.load_digits(return_X_y=True)
        images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
        return images, labels, "scikit-learn's handwritten digits"
    return *drawn_digits(_DRAWN), "drawn digits (scikit-learn, with handwritten ones, is not installed)"


def drawn_digits(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``number`` digits, the same every time."""
    chance = torch.Generator().manual_seed(SEED)
    labels = torch.arange(number) % 10
    glyphs = torch.tensor([[[float(point == "#") for point in row] for row in glyph] for glyph in _GLYPHS])
    images = torch.zeros(number, 8, 8)
    for image, label in zip(images, labels, strict=True):
        top, left = (1 + int(torch.randint(2, (), generator=chance)) for _ in range(2))
        image[top : top + 5, left : left + 3] = glyphs[label] * (0.8 + 0.2 * torch.rand((), generator=chance))
    noise = 0.05 * torch.randn(images.shape, generator=chance)
    return (images + noise).clamp(0, 1), labels


def train(rank: int, folder: str, ranks: int, tell: Connection) -> list[Trained]:
    """Train in all three ways, one after the other. Collective.

    Args:
        rank: this one.
        folder: traces of stretto's runs go into subfolders, named by the way.
        ranks: how many there are.
        tell: rank 0 says here how many steps were made.
    """
    found = []
    for number, way in enumerate(WAYS):
        found.append(train_once(way, rank, ranks, f"{folder}/{way}", tell, number * STEPS))
        gc.collect()  # torch's wrapper must not outlive the process group
    return found


def train_once(way: Way, rank: int, ranks: int, folder: str, tell: Connection, before: int = 0) -> Trained:
    """Train in one way. Collective; alone if there is no process group.

    Args:
        way: of reducing gradients.
        rank: this one.
        ranks: how many there are.
        folder: where the last steps are recorded, if they are.
        tell: rank 0 says here how many steps were made.
        before: steps made before these.
    """
    images, labels, data = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    test, learn = order[: len(order) // 5], order[len(order) // 5 :]
    torch.manual_seed(SEED)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    model, sync = _shared_out(net, way)
    chance = torch.Generator().manual_seed(SEED)
    losses, seconds = [], []
    with contextlib.ExitStack() as until_trained:
        for step in range(STEPS):
            if sync is not None and step == _TRACED.start:
                until_trained.enter_context(sync.trace(folder))
            began = time.perf_counter()
            batch = learn[torch.randint(len(learn), (BATCH,), generator=chance)][rank::ranks]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
            if rank == 0 and not step % 20:
                tell.send(before + step)
    with torch.no_grad():
        right = (net(images[test]).argmax(1) == labels[test]).float().mean().item()
    plan = ""
    if sync is not None:
        plan = str(sync.plan)
        sync.detach()
    return Trained(way, tuple(losses), right, statistics.median(seconds[_WARM : _TRACED.start]), data, plan)


def _shared_out(net: nn.Module, way: Way) -> tuple[nn.Module, stretto.Synchronizer | None]:
    """The module that runs forward, and stretto's handle."""
    if way == "torch DDP":
        return TorchDDP(net), None
    if way == "before":
        return net, stretto.attach(net, delay=True, transport="process_group")
    return net, stretto.attach(net)
