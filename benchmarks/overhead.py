"""Time a parameter that a reducer adds to bare training, communication taken out.

    python benchmarks/overhead.py [--parameters 100 1000 10000] [--rounds 15] [--block 0.5] [--device cpu] [--json FILE]

Two ranks run a chain of Linear(16) layers, batch 4: zero_grad(set_to_none=True), forward, backward. Every contestant
has torch's noop_hook as comm hook, so nothing is sent. The figure is the paired difference to the mean of two bare
models in the same round, divided by the number of parameters. At world size 1 stretto is measured against them too.

A contestant's turn is half a second of steps, as a training loop makes them, one behind the other. ``--block 0`` gives
it a single step, behind a step of every other contestant, whose code and data fill the caches: what a reducer costs
between other work of the program. Give that more rounds.

Watching: "stretto.attach" is watched by nobody but itself, as always (a few passes for report()). Beside it stand the
same code with every `if` that asks for an observer cut out, and the same with an observer of all events, single
gradients left out or not. A line below the table says what the ifs add to a whole step, in percent.

With ``--device cuda`` a turn ends when the device is done. Where ranks share a device rank 0 is timed alone: else each
would measure how it is divided.

Two rows bound what can be had from Python. "A hook and nothing else" is the least that Python can be called for a
gradient: the append of a list, in C, as a post-accumulate hook on each parameter. "The least from Python" also does
with gradients what every reducer has to, by the calls that take least: a hundred at a time are copied into flat memory,
and ``.grad`` comes to lie there. It looks at nothing and knows of no other rank: a bound, not a method.
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import stretto
from stretto.events import EVENTS
from stretto.schedule import CHUNK_ARRIVALS

sys.path.insert(0, str(Path(__file__).parent))
from common import Quartiles, count, ends_well, interleave, machine, output, show_table, spawn, steps_in, worst_rank
from cut import without_events

BARE = "bare"
ATTACH = "stretto.attach"
CUT = "stretto.attach, events cut out of the code"
WATCHED = "stretto.attach, an observer of all but gradients"
WATCHED_CLOSELY = "stretto.attach, an observer of gradients too"
AGAIN = "the two bare models, one from the other"
TORCH = {
    "torch, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "torch, batched_grad_copy": {"batched_grad_copy": True},
    "torch, static_graph": {"static_graph": True},
    "torch, view + batched": {"gradient_as_bucket_view": True, "batched_grad_copy": True},
    "torch, view + batched + static": {
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
        "static_graph": True,
    },
}

grad_of = operator.attrgetter("grad")


def layers(parameters: int, device: torch.device) -> torch.nn.Sequential:
    """``parameters`` small tensors: weights and biases of a chain."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, device=device) for _ in range(parameters // 2)))


def step(model: torch.nn.Module) -> Callable[[], None]:
    inputs = torch.randn(4, 16, device=next(model.parameters()).device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(inputs).sum().backward()

    return run


def append_hooks(model: torch.nn.Module) -> Callable[[], None]:
    """The engine calls into Python for every gradient, and nothing is done there."""
    arrived: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived.append)
    bare = step(model)

    def run() -> None:
        arrived.clear()
        bare()

    return run


def copying_hooks(model: torch.nn.Module) -> Callable[[], None]:
    """The same, and gradients move into flat memory, in the order in which the first backward has them."""
    arrived: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrived.append)
    bare = step(model)
    bare()
    order = [*arrived]
    for start in range(0, len(order), CHUNK_ARRIVALS):
        chunk = order[start : start + CHUNK_ARRIVALS]
        chunk[-1].register_post_accumulate_grad_hook(partial(move, chunk, *flat_memory(chunk)))

    def run() -> None:
        arrived.clear()
        bare()

    return run


def flat_memory(chunk: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For gradients of a chain of layers, weights and biases in turn: two tensors, and where each lies in them."""
    halves = [torch.cat([one.data for one in chunk[start::2]]) for start in (0, 1)]
    slots = [half.split(len(chunk[start])) for start, half in enumerate(halves)]
    return halves, [slot.data for pair in zip(*slots, strict=True) for slot in pair]


def move(
    chunk: Sequence[torch.Tensor], halves: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], _: torch.Tensor
) -> None:
    """Copy gradients, and let them be what they were copied to."""
    gradients: list[Any] = [*map(grad_of, chunk)]
    for start, half in enumerate(halves):
        torch.cat(gradients[start::2], out=half)
    for gradient, slot in zip(gradients, slots, strict=True):
        gradient.data = slot


def observer(gradients: bool) -> object:
    """One that has every method, and does nothing in it."""
    events = [one for one in EVENTS if gradients or one not in ("gradient_ready", "gradient_kept")]
    return type("Nothing", (), {one: lambda self, *_: None for one in events})()


def contest(parameters: int, world_size: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """Every contestant on a model of its own."""
    made = partial(layers, parameters, device)
    contestants = {BARE: step(made()), AGAIN: step(made())}
    contestants["a hook and nothing else"] = append_hooks(made())
    contestants["the least from Python: hooks, and gradients into flat memory"] = copying_hooks(made())
    packages = {ATTACH: stretto}
    if world_size > 1:  # a rank alone has nothing to be watched
        packages |= {CUT: without_events(), WATCHED: stretto, WATCHED_CLOSELY: stretto}
    for name, package in packages.items():
        attached = made()
        # models of one group ask in every pass whether a backward reaches the other
        group = torch.distributed.new_group() if world_size > 1 else None
        sync = package.attach(attached, process_group=group)
        sync.register_comm_hook(None, noop_hook)
        if name in (WATCHED, WATCHED_CLOSELY):
            sync.observe(observer(gradients=name == WATCHED_CLOSELY))
        contestants[name] = step(attached)
    if world_size > 1:
        for name, options in TORCH.items():
            model = TorchDDP(made(), **options)
            model.register_comm_hook(None, noop_hook)
            contestants[name] = step(model)
        drop_in = stretto.DistributedDataParallel(made())
        drop_in.register_comm_hook(None, noop_hook)
        contestants["stretto.DistributedDataParallel"] = step(drop_in)
    return contestants


def measure(rank: int, parameters: int, rounds: int, block: float, kind: str) -> dict[str, list[float]]:
    """One rank's part; the slower rank's seconds of a step in every round."""
    world_size = torch.distributed.get_world_size()
    device, repeat = torch.device(kind), repeat_on_host
    if kind != "cpu":
        device, repeat = torch.device(kind, rank % torch.accelerator.device_count()), repeat_on_device
        torch.accelerator.set_device_index(device.index)
    contestants = contest(parameters, world_size, device)
    steps = steps_in(block, contestants[BARE])
    gc.collect()
    gc.freeze()
    turns = {name: partial(repeat, step, steps) for name, step in contestants.items()}
    if kind != "cpu" and torch.accelerator.device_count() < world_size:
        for step in contestants.values():
            repeat(step, 5)
        turns = turns if not rank else dict.fromkeys(turns, lambda: None)
    seconds = worst_rank(interleave(turns, rounds, title=f"{parameters} parameters, {world_size} ranks"))
    return {name: [one / steps for one in times] for name, times in seconds.items()}


def repeat_on_host(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()


def repeat_on_device(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()
    torch.accelerator.synchronize()


def extra(seconds: dict[str, list[float]], parameters: int) -> dict[str, Quartiles]:
    """Paired extra seconds a parameter over the mean of the bare models."""
    bare, again = seconds.pop(BARE), seconds.pop(AGAIN)
    means = [(one + other) / 2 for one, other in zip(bare, again, strict=True)]
    found = {AGAIN: Quartiles.of([(other - one) / parameters for one, other in zip(bare, again, strict=True)])}
    for name, times in seconds.items():
        found[name] = Quartiles.of([(one - mean) / parameters for one, mean in zip(times, means, strict=True)])
    return found


def price_of_events(seconds: dict[str, list[float]]) -> Quartiles:
    """What the `if`s add to a whole step, as a share of it; pairs of one round."""
    return Quartiles.of([one / without - 1 for one, without in zip(seconds[ATTACH], seconds[CUT], strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=count, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--block", type=float, default=0.5, help="seconds of steps in a turn; 0: one step")
    parser.add_argument("--device", default="cpu", help="kind of device on which the models are")
    parser.add_argument("--json", type=output)
    options = parser.parse_args()
    if options.block < 0:
        parser.error(f"--block {options.block:g}: seconds of steps, or 0 for one step")
    if min(options.parameters) < 2:
        parser.error("--parameters: a layer has two")
    how = options.rounds, options.block, options.device
    found: dict[str, dict[str, dict[str, float]]] = {}
    looking: dict[str, dict[str, float]] = {}
    for world_size in (2, 1):
        rows: dict[str, list[str]] = {}
        prices: dict[str, Quartiles] = {}
        for parameters in options.parameters:
            seconds = spawn(measure, world_size, parameters, *how, timeout=1800)[0]
            if CUT in seconds:
                prices[f"{parameters} parameters"] = price_of_events(seconds)
            spreads = extra(seconds, parameters)
            best = min((s.median for name, s in spreads.items() if name.startswith("torch")), default=None)
            for name, spread in spreads.items():
                ratio = f"  {spread.median / best:.2f}x" if best else ""
                rows.setdefault(name, [name]).append(spread.show(1e-6) + ratio)
            found[f"{world_size} ranks, {parameters} parameters"] = {name: vars(s) for name, s in spreads.items()}
        header = ["us a parameter over bare", *(f"{n} parameters" for n in options.parameters)]
        show_table(
            f"{world_size} ranks: median (and quartiles), ratio to torch's best variant", header, list(rows.values())
        )
        if prices:
            said = "; ".join(f"{n}: {p.median:+.1%} ({p.low:+.1%} .. {p.high:+.1%})" for n, p in prices.items())
            print(f"What the ifs add to a step, over the code without them: {said}\n")
            looking |= {name: vars(price) for name, price in prices.items()}
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "machine": machine(),
                    "block": options.block,
                    "device": options.device,
                    "seconds a parameter": found,
                    "events, share of a step": looking,
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    ends_well(main)
