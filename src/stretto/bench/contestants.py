"""The contestants: values that can be sent to ranks, named after what they do.

Contestant ──build.py──> Training, a model of its own that steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import SetupError

Kind = Literal["alone", "lockstep", "floor", "loop", "messages", "torch", "replicate", "fully_shard", "stretto"]
OptimizerName = Literal["sgd", "adamw", "zero"]
ALONE = "no communication"
LOCKSTEP = "lockstep"
FLOOR = "floor of shared memory"
FLOOR_IN_SHARES = "floor of shared memory, in shares"
SHARDED = "stretto, sharded step"
TUNED = "torch DDP, tuned"
REPLICATE = "FSDP2 replicate"
FULLY_SHARD = "FSDP2 fully_shard"
ZERO = "torch DDP, tuned, with ZeroRedundancyOptimizer"
MESSAGES = "communication alone"


@dataclass(frozen=True)
class Contestant:
    """One way to keep the ranks' gradients equal, or not to."""

    name: str
    kind: Kind
    """``alone``: nothing is sent. ``lockstep``: ranks only wait for each other. ``floor``: see floor.py. ``loop``: one
    all-reduce a parameter after backward. ``messages``: all gradients are sent, and nothing is computed. ``torch``,
    ``replicate``, ``fully_shard``, ``stretto``: the libraries."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the library's constructor; and (stretto) ``groups``, the number of process groups to use in turn,
    and ``shard``, options of ``stretto.shard``; (replicate, fully_shard) ``by_layer``, each layer by itself; (floor)
    ``shares``, whether the optimizer's step is divided."""
    sync_every: int = 1
    """Gradients are accumulated over so many backward passes, the last of which communicates."""
    candidates: tuple[Contestant, ...] = ()
    """If any: the fastest of these, by a short run before, takes part instead."""
    optimizer: OptimizerName = "sgd"
    """``zero``: torch's ``ZeroRedundancyOptimizer`` over AdamW, each rank stepping its part of the parameters."""


def alone(sync_every: int = 1) -> Contestant:
    """The yardstick: the same step without sending anything."""
    return Contestant(ALONE if sync_every == 1 else f"{ALONE}, step every {sync_every}", "alone", {}, sync_every)


def torch_variants() -> tuple[Contestant, ...]:
    """torch DDP, tuned in the ways that help on CPUs."""
    base = {"gradient_as_bucket_view": True, "static_graph": True}
    copying = {"batched_grad_copy": True}
    plain = Contestant("torch DDP, 4 MB", "torch", base | {"bucket_cap_mb": 4})
    return plain, *(
        Contestant(f"torch DDP, {cap} MB, batched copy", "torch", base | copying | {"bucket_cap_mb": cap})
        for cap in (1, 4, 10, 25)
    )


def torch_tuned() -> Contestant:
    """The fastest of :func:`torch_variants`."""
    return Contestant(TUNED, "torch", candidates=torch_variants())


def replicate() -> Contestant:
    """torch's FSDP2 ``replicate``, the module as a whole or each layer by itself, whichever is faster."""
    return _as_whole_or_by_layer(REPLICATE, "replicate")


def steppers() -> tuple[Contestant, ...]:
    """The contestants that step with AdamW, in the order of tables."""
    plain = [alone(), torch_tuned(), replicate(), fully_shard(), Contestant("stretto", "stretto")]
    zero = stepping(replace(torch_tuned(), name=ZERO), "zero")
    found = [stepping(one, "adamw") for one in plain]
    return (*found[:2], zero, *found[2:])


def sharded() -> tuple[Contestant, ...]:
    """stretto with the optimizer's step divided: with and without whole gradients in ``.grad`` afterwards."""
    return (
        Contestant(SHARDED, "stretto", {"shard": {}}, optimizer="adamw"),
        Contestant(f"{SHARDED}, gradients not kept", "stretto", {"shard": {"keep_grads": False}}, optimizer="adamw"),
    )


def least() -> Contestant:
    """The lower limit for a step in shares on one host: see floor.py."""
    return Contestant(FLOOR_IN_SHARES, "floor", {"shares": True}, optimizer="adamw")


def stepping(contestant: Contestant, optimizer: OptimizerName) -> Contestant:
    """The same with another optimizer."""
    candidates = tuple(replace(one, optimizer=optimizer) for one in contestant.candidates)
    return replace(contestant, optimizer=optimizer, candidates=candidates)


def fully_shard() -> Contestant:
    """torch's FSDP2 ``fully_shard``, the module as a whole or each layer by itself, whichever is faster."""
    return _as_whole_or_by_layer(FULLY_SHARD, "fully_shard")


def _as_whole_or_by_layer(name: str, kind: Kind) -> Contestant:
    whole = Contestant(f"{kind}, one message", kind, {"by_layer": False})
    layers = Contestant(f"{kind}, a message a layer", kind, {"by_layer": True})
    return Contestant(name, kind, candidates=(whole, layers))


def naive() -> tuple[Contestant, ...]:
    """The contestants that send nothing before backward has ended."""
    flat = {"delay": True, "transport": "process_group"}
    return (
        Contestant("a message a parameter, after backward", "loop"),
        Contestant("one message, after backward", "stretto", flat),
    )


def everybody(network: bool = False) -> tuple[Contestant, ...]:
    """All contestants, in the order of tables.

    Args:
        network: ranks are on different hosts, so contestants that need shared memory are left out, and stretto uses the
            process group anyway.
    """
    found = [alone(), *naive(), Contestant("torch DDP, default", "torch"), torch_tuned(), replicate()]
    if not network:
        found.append(Contestant("stretto over the process group", "stretto", {"transport": "process_group"}))
    found.append(Contestant("stretto", "stretto"))
    return tuple(found) if network else (*found, Contestant(LOCKSTEP, "lockstep"), Contestant(FLOOR, "floor"))


def chosen(all_of_them: Sequence[Contestant], only: Sequence[str]) -> tuple[Contestant, ...]:
    """Those with one of these texts in their names, and the one without communication; all, if none are given.

    Raises:
        SetupError: no contestant has such a name.
    """
    vain = [text for text in only if not any(text in one.name for one in all_of_them)]
    if vain:
        raise SetupError(
            f"no contestant has {vain[0]!r} in its name.\nThere are: {'; '.join(one.name for one in all_of_them)}."
        )
    return tuple(c for c in all_of_them if not only or c.kind == "alone" or any(text in c.name for text in only))
