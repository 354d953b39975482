"""A model of your own under `stretto bench`: a function that makes it, with a batch of each rank.

stretto bench examples/own_model.py:classifier
stretto bench examples/own_model.py:reader --ranks 2 --only torch --only stretto --plot reader.svg
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def classifier() -> tuple[nn.Module, torch.Tensor]:
    """(model, batch): the loss is the mean square of what the model returns, which costs what any loss costs."""
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(64, 128)


def reader() -> tuple[nn.Module, object, object]:
    """(model, batch, loss): a new batch in every step, since batch is a function, and a loss of one's own."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * 16, 256))

    def batch() -> torch.Tensor:
        return torch.randint(256, (32, 17))

    def loss(called: nn.Module, text: torch.Tensor) -> torch.Tensor:
        return cross_entropy(called(text[:, :16]), text[:, 16])

    return model, batch, loss
