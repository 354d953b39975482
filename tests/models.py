"""Tiny models, batches for their ranks, and one loss whose mean over ranks is that of the joined batch.

model = build("cnn", seed=rank)         # another start on each rank: attaching has to level it
loss(model, batch("cnn", rank, step)).backward()
loss(model, joined("cnn", world_size, step)).backward()
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from stretto.footer import Footer
from stretto.words import ControlWords

# torch locks its generator to read it. Python's collector, which may run meanwhile, lets other threads run; one of them
# that wants to read it too waits with the interpreter in its hand, for ever. Ranks as threads do not share it well.
checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, preserve_rng_state=False)

ROWS = 4
WIDTH = 8
CLASSES = 8
TOKENS = ("transformer", "tied")


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, CLASSES))


class BatchNormCnn(nn.Sequential):
    """No bias before BatchNorm: its gradient would be rounding noise alone."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 2 * 2, CLASSES),
        )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)))


class Tied(nn.Module):
    """The output layer is the embedding: one parameter under two names, with two contributions to its gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


class Blocks(nn.Module):
    """Blocks of different sizes, registered in one order and run in another, which may change at any time."""

    def __init__(self, registered):
        super().__init__()
        for i in registered:
            inner = 4 + 2 * i
            self.add_module(f"block{i}", nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH)))
        self.execution = list(range(len(registered)))

    def forward(self, x):
        for i in self.execution:
            x = x + getattr(self, f"block{i}")(x)
        return x


class Mixed(nn.Module):
    """bf16 and fp64 in turn."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 12, dtype=torch.bfloat16)
        self.b = nn.Linear(12, 12, dtype=torch.float64)
        self.c = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.d = nn.Linear(12, CLASSES, dtype=torch.float64)

    def forward(self, x):
        x = torch.tanh(self.a(x.bfloat16())).double()
        x = torch.tanh(self.b(x)).bfloat16()
        return self.d(torch.tanh(self.c(x)).double())


def scrambled():
    return Blocks([3, 0, 4, 1, 2])


def opposite():
    return Blocks([4, 3, 2, 1, 0])


def in_order():
    return Blocks([0, 1, 2, 3, 4])


MODELS = {
    "mlp": Mlp,
    "cnn": BatchNormCnn,
    "transformer": Transformer,
    "tied": Tied,
    "scrambled": scrambled,
    "mixed": Mixed,
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(name, rank, step=0):
    """What ``rank`` sees at ``step``: inputs and the class of each row (of each token, where rows are sentences)."""
    random = torch.Generator().manual_seed(1000 * step + rank + 1)
    if name in TOKENS:
        shape = (ROWS, 5)
        return torch.randint(CLASSES, shape, generator=random), torch.randint(CLASSES, shape, generator=random)
    shape = (ROWS, 3, 6, 6) if name == "cnn" else (ROWS, WIDTH)
    return torch.randn(shape, generator=random), torch.randint(CLASSES, (ROWS,), generator=random)


def joined(name, world_size, step=0):
    """The batches of all ranks as one."""
    inputs, targets = zip(*(batch(name, rank, step) for rank in range(world_size)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss(model, data):
    """A mean over rows, so with as many rows on every rank the mean of the ranks' gradients is the joined batch's."""
    inputs, targets = data
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def gradients(model):
    """Copies by name; None where there is none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def state(model):
    """Copies of parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(first, second):
    """Names in which two tables of tensors differ; empty if they are equal bit by bit."""
    return [name for name in first.keys() | second.keys() if not _same(first.get(name), second.get(name))]


def far_apart(first, second, ulps=0.0, tolerance=0.0):
    """Names in which two tables differ by more than so many ulp, or so large a part, of a tensor's largest element."""
    return [name for name in first.keys() | second.keys() if _distance(first[name], second[name], ulps, tolerance) > 1]


def _same(first, second):
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def _distance(first, second, ulps, tolerance):
    if first.dtype != second.dtype or first.shape != second.shape or not first.isfinite().all():
        return float("inf")
    if not first.is_floating_point():
        return float("inf") if not torch.equal(first, second) else 0.0
    allowed = (ulps * torch.finfo(first.dtype).eps + tolerance) * second.abs().max()
    return ((first - second).abs().max() / allowed).item() if allowed else float((first != second).any())


class Fails(torch.autograd.Function):
    """Raises when backward comes by."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("on purpose")


class Here:
    def synchronize(self) -> None:
        """Of an event of an accelerator, which has passed."""


def words_come_late(patch: pytest.MonkeyPatch | None = None) -> None:
    """In this process, as on an accelerator: the words of a pass are mostly read when the next begins."""
    read = Footer.read

    def late(footer: Footer, *, summed: bool) -> ControlWords:
        said = read(footer, summed=summed)
        return said if said.words is None else replace(said, words=said.words.clone(), arrival=Here())

    patch = patch or pytest.MonkeyPatch()  # else for as long as the process lives
    patch.setattr(Footer, "read", late)
    patch.setattr(Footer, "comes_late", True)
