"""Do all ranks hold the same model and ask for the same options? This is settled before anything is sent.

Each rank makes a table of facts (a line for each tensor and each option). Ranks compare fingerprints first. Only if
those differ do they exchange the tables; then every rank raises the same readable difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import ModelMismatchError, SetupError
from .specs import dtype_name, slot_strides
from .wording import describe_ranks, name_list, ranks_by

ADVICE = (
    "Build the model from the same code and options on every rank, and call attach() before anything "
    "that only some ranks do."
)
SAME_MODEL = "hold the same model"
_MOST = 12
"""Lines of a difference that are shown."""
_NOT_ASKED_FOR = frozenset({"option plan", "option attached already", "option sparse parameters"})
"""What ranks state in addition to tensors and arguments."""


@dataclass(frozen=True)
class Statement:
    """What one rank brings: its facts by name, or the problem that keeps it from attaching."""

    facts: tuple[tuple[str, str], ...]
    problem: str | None = None

    @property
    def fingerprint(self) -> str:
        """Equal where everything is equal."""
        return hashlib.sha256(repr((self.facts, self.problem)).encode()).hexdigest()


def state_model(
    parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], options: Mapping[str, object]
) -> Statement:
    """A rank's statement: options first, then parameters and buffers in their order of registration."""
    facts = [(f"option {name}", repr(value)) for name, value in options.items()]
    facts += [(f"parameter {name}", _describe(tensor)) for name, tensor in parameters.items()]
    facts += [(f"buffer {name}", _describe(tensor)) for name, tensor in buffers.items()]
    return Statement(tuple(facts))


def _describe(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    trained = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
    strides = slot_strides(tensor.shape, tensor.stride())
    plain = strides == slot_strides(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
    layout = "" if plain else f", strides {'x'.join(map(str, strides))}"
    return f"{shape} {dtype_name(tensor.dtype)} {tensor.device.type}{layout}{trained}"


def agree(
    statement: Statement,
    rank: int,
    gather: Callable[[Any], list[Any]],
    occasion: str = "attach",
    advice: str = ADVICE,
    wanted: str = SAME_MODEL,
) -> None:
    """Collective. Returns if all ranks state the same and none has a problem.

    Args:
        statement: of this rank.
        rank: this one.
        gather: returns what all ranks bring, in rank order.
        occasion: how messages begin.
        advice: how they end.
        wanted: what they say that the ranks do not.

    Raises:
        SetupError: this rank's own problem.
        ModelMismatchError: on every other rank, with the difference by name.
    """
    fingerprints = gather((statement.fingerprint, statement.problem))
    problems = {rank: problem for rank, (_, problem) in enumerate(fingerprints) if problem}
    if statement.problem:
        raise SetupError(f"{occasion}, rank {rank}: {statement.problem}")
    if problems:
        told = "\n".join(f"  rank {rank}: {problem}" for rank, problem in problems.items())
        raise ModelMismatchError(
            f"{occasion}, rank {rank}: other ranks cannot take part, so this one cannot either:\n{told}"
        )
    if len({fingerprint for fingerprint, _ in fingerprints}) == 1:
        return
    tables: list[Statement] = gather(statement)
    facts = [table.facts for table in tables]
    raise ModelMismatchError(difference(facts, occasion, advice, wanted))


def difference(tables: list[tuple[tuple[str, str], ...]], occasion: str, advice: str, wanted: str) -> str:
    """The difference between ranks' facts (what is missing, what differs), as the same text on every rank."""
    by_rank = [dict(table) for table in tables]
    names = dict.fromkeys(name for table in tables for name, _ in table if name != "option plan")
    differing = {name: line for name in names if (line := _holders(name, by_rank))}
    if "option sparse" in differing:
        differing.pop("option sparse parameters", None)  # which follow from it
    lines = [*differing.values()] or _orders(by_rank) or [_holders("option plan", by_rank)]
    asked = differing and all(name.startswith("option ") and name not in _NOT_ASKED_FOR for name in differing)
    if wanted == SAME_MODEL and (asked or "option ignore" in differing):  # what is ignored is missing too
        wanted, advice = "ask for the same", "Give the same arguments to attach, or to the drop-in, on every rank."
    if len(lines) > _MOST:
        lines[_MOST:] = [f"  (+{len(lines) - _MOST} more)"]
    return f"{occasion}: the {len(tables)} ranks do not {wanted}.\n" + "\n".join(lines) + "\n" + advice


def _orders(by_rank: list[dict[str, str]]) -> list[str]:
    """Where the orders part in which ranks register the same tensors; empty if they do not."""
    orders = [[name for name in facts if not name.startswith("option ")] for facts in by_rank]
    for place, names in enumerate(zip(*orders, strict=True)):
        if len({*names}) > 1:
            lines = [f"  rank {rank} registers {name_list(order[place:])}" for rank, order in enumerate(orders)]
            start = f" from tensor {place + 1} on" * (place > 0)
            return [f"  the same tensors, registered in another order{start}:", *lines]
    return []


def _holders(name: str, by_rank: list[dict[str, str]]) -> str:
    """Which ranks state what about one fact; empty if all state the same."""
    holders = ranks_by((rank, facts.get(name, "missing")) for rank, facts in enumerate(by_rank))
    if len(holders) == 1:
        return ""
    return f"  {name}: " + "; ".join(f"{fact} on {describe_ranks(ranks)}" for fact, ranks in holders.items())
