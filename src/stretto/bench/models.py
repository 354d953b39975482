"""The models that steps are timed on unless a user brings one: the five of docs/design.md, section 6.

Batches are random and the same in every step: arithmetic is timed, not learning. Nor do models learn: a batch learnt by
heart has gradients close to zero, and on subnormal numbers a processor is several times slower. GPT-2's backward took
29 ms at first and 80 ms after 60 steps of AdamW with a rate of 1e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

Loss = Callable[[nn.Module], torch.Tensor]
"""Runs the module forward on this rank's batch."""
Workload = tuple[nn.Module, Loss]
LEARNING_RATE = 1e-9
"""A learning rate at which a model stays the same, however long it is stepped."""


def policy() -> Workload:
    """An RL policy: two hidden layers of 64."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    inputs, targets = torch.randn(256, 16), torch.randint(4, (256,))
    return model, lambda m: F.cross_entropy(m(inputs), targets)


def many_small_layers() -> Workload:
    """100 layers of 64.

    Weights are orthogonal, so that gradients keep their size. With torch's own initial values each layer makes them 0.6
    times as large: after 100 layers their squares are subnormal, on which a processor is three times slower, and the
    rank that steps those would keep the others waiting.
    """
    layers = [nn.Linear(64, 64) for _ in range(100)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers)
    inputs = torch.randn(32, 64)
    return model, lambda m: m(inputs).square().mean()


def wide_mlp() -> Workload:
    """8 layers of 1024: much to send, little to compute."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))
    inputs = torch.randn(32, 1024)
    return model, lambda m: m(inputs).square().mean()


class Gpt2(nn.Module):
    """4 blocks of GPT-2, 256 wide, 4 heads, vocabulary 1024, head tied to the embedding."""

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 1024, context: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes token numbers, batch x context; returns a logit for each token of the vocabulary."""
        hidden = self.token(tokens) + self.place.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return cast(torch.Tensor, self.head(self.norm(hidden)))


def gpt2(batch: int = 2) -> Workload:
    """A small GPT-2, batch 2 x 64."""
    tokens = torch.randint(1024, (batch, 65))
    return Gpt2(), lambda m: F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Takes batch x channels x height x width."""
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


def resnet18(batch: int = 4) -> Workload:
    """ResNet18 (He et al., 2015), 10 classes, batch 4 of 64 x 64."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Residual(*width) for width in widths]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    images, labels = torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))
    return model, lambda m: F.cross_entropy(m(images), labels)


BUILT_IN: dict[str, Callable[[], Workload]] = {
    "policy": policy,
    "layers": many_small_layers,
    "mlp": wide_mlp,
    "gpt2": gpt2,
    "gpt2x8": functools.partial(gpt2, 8),  # used for the figures with a network
    "resnet18": resnet18,
}
TITLES = {
    "policy": "policy, 2 x Linear(64), batch 256",
    "layers": "100 x Linear(64), batch 32",
    "mlp": "8 x Linear(1024), batch 32",
    "gpt2": "GPT-2, 4 x 256, batch 2 x 64",
    "gpt2x8": "GPT-2, 4 x 256, batch 8 x 64",
    "resnet18": "ResNet18, batch 4 x 64 x 64",
}


def title_of(source: str) -> str:
    """For display: a built-in workload with its size, any other by its name."""
    return TITLES.get(source, source)
