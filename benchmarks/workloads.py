"""The built-in workloads of ``stretto.bench`` and those of the two examples: by title, as ``compare`` takes them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from stretto.bench.models import TITLES, resnet18

EXAMPLES = str(Path(__file__).parent.parent / "examples")


def example_digits() -> tuple[nn.Module, torch.Tensor, object]:
    """The CNN of examples/digits.py, 32 images a rank."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from digits import digits_net

    images, labels = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
    return digits_net(), images, lambda model, batch: F.cross_entropy(model(batch), labels)


def example_text() -> tuple[nn.Module, torch.Tensor, object]:
    """The GPT of examples/text.py, 16 rows a rank."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    from text import CONTEXT, GPT, next_byte_loss

    return GPT(), torch.randint(256, (16, CONTEXT + 1)), next_byte_loss


def resnet18_batch_16() -> tuple[nn.Module, None, object]:
    """ResNet18, 16 images of 64 x 64 a rank: what the figures of a step over a network use."""
    model, step = resnet18(16)
    return model, None, lambda called, _: step(called)


RESNET18X16 = f"{__file__}:resnet18_batch_16"
WORKLOADS: dict[str, str] = {title: source for source, title in TITLES.items() if source != "gpt2x8"} | {
    "examples/digits.py": f"{__file__}:example_digits",
    "examples/text.py": f"{__file__}:example_text",
}
