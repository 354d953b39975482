"""A small CNN learns scikit-learn's handwritten digits, on any number of ranks.

    python examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py --reducer ddp

`stretto` and `ddp` give the same loss curve on two ranks, number by number. With `none` each rank trains alone.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import common
import stretto  # 1 of 3: this script without the lines marked so is an ordinary one for a single process

BATCH = 64  # of all ranks together


def conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def digits_net() -> nn.Sequential:
    return nn.Sequential(
        *conv(1, 32), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 64), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8) / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, parts)
    return TensorDataset(train_images.float(), train_labels), TensorDataset(test_images.float(), test_labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, labels = data.tensors
    right = (model(images.to(device)).argmax(1) == labels.to(device)).float().mean().item()
    model.train()
    return right


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> int:
    torch.manual_seed(args.seed + rank)  # ranks begin differently on purpose: rank 0's weights go to all
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
    model = digits_net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start = common.resume(args.checkpoint, model, optimizer)

    forward: nn.Module = model
    plan = ""
    if args.reducer == "stretto":
        sync = stretto.attach(model)  # 2 of 3: from here on backward() leaves the mean over the ranks in .grad
    elif args.reducer == "ddp" and world_size > 1:
        forward = DistributedDataParallel(model)

    with common.Record(f"digits, {args.reducer}", rank, (args.epochs - start) * len(loader)) as record:
        for epoch in range(start, args.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(forward(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                record.step(loss)
            common.save(args.checkpoint, model, optimizer, epoch + 1, rank)

    if args.reducer == "stretto":
        plan = str(sync.plan)
        sync.detach()  # 3 of 3: the model is as it was
    if rank != 0:
        return 0
    reached = accuracy(model, test_set, device)
    print(f"test accuracy {reached:.4f}")
    record.write(args.json, rank, accuracy=reached, plan=plan)
    return 1 if reached < args.target_accuracy else 0


def main() -> int:
    flags = common.parser(__doc__.splitlines()[0], epochs=15)
    flags.add_argument("--target-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    args = flags.parse_args()
    with common.ranks() as here:
        return train(args, *here)


if __name__ == "__main__":
    raise SystemExit(main())
