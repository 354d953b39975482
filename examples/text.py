"""A small GPT learns to write like Python's own standard library, on any number of ranks.

    torchrun --nproc-per-node 2 examples/text.py        # or: python examples/text.py

The text is read from the interpreter that runs this, byte by byte. `--reducer none`: each rank trains alone.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import common
import stretto  # 1 of 3: this script without the lines marked so is an ordinary one for a single process

BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 128, 4, 2  # BATCH is that of all ranks together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.layers(self.byte(text) + self.place.weight[: text.shape[1]])


def standard_library(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of CONTEXT + 1 bytes to train on, and the last tenth of them to validate on."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))[:size]
    table = torch.tensor(list(text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)])).view(-1, CONTEXT + 1)
    if len(table) < 10 * BATCH:
        raise SystemExit(f"too little text: {len(text)} bytes, need {10 * BATCH * (CONTEXT + 1)}")
    return table[: -(len(table) // 10)], table[-(len(table) // 10) :]


def next_byte_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def sample(model: nn.Module, device: torch.device, length: int = 200) -> str:
    dice = torch.Generator(device).manual_seed(0)
    text = torch.tensor([list(b"def ")], device=device)
    for _ in range(length):
        chances = (model(text[:, -CONTEXT:])[:, -1] / 0.7).softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=dice)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> int:
    torch.manual_seed(args.seed + rank)  # ranks begin differently on purpose: rank 0's weights go to all
    train_set, validation = standard_library(args.bytes)
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start = common.resume(args.checkpoint, model, optimizer)

    forward, plan = model, ""
    if args.reducer == "stretto":
        sync = stretto.attach(model)  # 2 of 3: from here on backward() leaves the mean over the ranks in .grad
    elif args.reducer == "ddp" and world_size > 1:
        forward = DistributedDataParallel(model)

    with common.Record(f"text, {args.reducer}", rank, (args.epochs - start) * len(loader)) as record:
        for epoch in range(start, args.epochs):
            sampler.set_epoch(epoch)
            for rows in loader:
                optimizer.zero_grad()
                loss = next_byte_loss(forward, rows.to(device))
                loss.backward()
                optimizer.step()
                record.step(loss)
            common.save(args.checkpoint, model, optimizer, epoch + 1, rank)

    if args.reducer == "stretto":
        plan = str(sync.plan)
        sync.detach()  # 3 of 3: the model is as it was
    if rank != 0:
        return 0
    heard = torch.no_grad()(next_byte_loss)(model, validation.to(device)).item()
    print(f"train loss {record.recent_loss():.3f}, validation loss {heard:.3f}\n{sample(model, device)}")
    record.write(args.json, rank, validation_loss=heard, plan=plan)
    return 1 if heard > args.target_loss else 0


def main() -> int:
    flags = common.parser(__doc__.splitlines()[0], epochs=2)
    flags.add_argument("--bytes", type=common.at_least_one, default=600_000, help="of text (default: %(default)s)")
    flags.add_argument("--target-loss", type=float, default=float("inf"), help="exit with 1 above this validation loss")
    args = flags.parse_args()
    with common.ranks() as here:
        return train(args, *here)


if __name__ == "__main__":
    raise SystemExit(main())
