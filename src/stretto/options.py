"""What a user may ask of ``attach``, checked and in one value, the same on all ranks."""

from __future__ import annotations

import difflib
import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch

from .errors import SetupError, UnsupportedError
from .scaling import WEIGHT_BITS, Reduce

Buffers = Literal["rank0", "mean", "none"]

_NEVER_NEEDED = "Leave it out: any graph works without it."
_STAYS = "Leave it out: the module is not moved, so call model.to(device) before."
_MEANS_TOO = "Leave it out: their gradients are means too when backward returns."
_GROUPS = "Write process_groups=, several groups of the same ranks; buckets take turns among them."
_HOOK = "Call register_comm_hook(state, hook) afterwards."
INSTEAD = {
    "find_unused_parameters": _NEVER_NEEDED,
    "static_graph": _NEVER_NEEDED,
    "skip_all_reduce_unused_params": "Leave it out: parameters that no rank uses are not sent, once that is seen.",
    "gradient_as_bucket_view": "Leave it out: .grad lies in its bucket anyway.",
    "batched_grad_copy": "Leave it out: gradients are copied together anyway.",
    "device_ids": _STAYS,
    "output_device": _STAYS,
    "broadcast_buffers": 'Write buffers="rank0", the default, or buffers="none".',
    "forward_sync_buffers": 'Write buffers="rank0", the default, or buffers="none".',
    "bucket_cap_mb_list": "Write bucket_cap_mb=.",
    "delay_all_reduce_named_params": _MEANS_TOO,
    "param_to_hook_all_reduce": _MEANS_TOO,
    "beside": "Leave it out where the models are on one process group; else attach the later one by "
    "stretto.attach(model, beside=[wrapper.synchronizer]).",
    "device_mesh": "Use stretto.DistributedDataParallel(model, device_mesh=...).",
    "mixed_precision": "Use torch.autocast around forward, or stretto.DistributedDataParallel(model, "
    "mixed_precision=...); reduce_dtype= is only the dtype in which gradients travel.",
    "hook": _HOOK,
    "comm_hook": _HOOK,
    "no_sync": "Write with sync.no_sync(): around backwards whose gradients are to be kept.",
    "gradient_predivide_factor": "Write predivide_factor=.",
    "gradient_average": 'Write reduce="mean", the default, or reduce="sum".',
    "delay_allreduce": "Write delay=.",
    "allreduce_trigger_params": "Write launch_after=.",
    "allreduce_always_fp32": "Write reduce_dtype=torch.float32.",
    "retain_allreduce_buffers": "Leave it out: .grad lies in its bucket anyway.",
    "message_size": "Write bucket_cap_mb=, in MiB, not in elements.",
    "num_allreduce_streams": _GROUPS,
    "allreduce_communicators": _GROUPS,
    "shared_param": "Leave it out: parameters that layers share are right anyway.",
    "prof": "Leave it out: stretto trace shows what happens in a pass.",
}
"""What to write for arguments of torch's DistributedDataParallel and of Apex's that ``attach`` does not have, and for
those of ``attach`` that the drop-in does not have."""


def refuse_arguments(call: Callable[..., object], unknown: Collection[str]) -> None:
    """Raise ``UnsupportedError`` for arguments that there are not, with what to write instead."""
    if not unknown:
        return
    known = [*inspect.signature(call).parameters][:-1]
    elsewhere = INSTEAD.keys() - {*known}  # the drop-in has most of torch's
    lines = []
    for name in unknown:
        theirs = difflib.get_close_matches(name, elsewhere, 1, 0.9)  # misspelt, and no other one: the advice differs
        near = ", ".join(difflib.get_close_matches(name, known, 1) or known)
        advice = INSTEAD[theirs[0]] if theirs else f"Use one of: {near}."
        lines.append(f"{call.__name__}: there is no argument {name}=. {advice}")
    raise UnsupportedError("\n".join(lines))


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`stretto.attach` that all ranks must give alike. Names are matched as shell patterns."""

    bucket_cap_mb: float | None = None
    last_bucket_cap_mb: float | None = None
    buffers: Buffers = "rank0"
    reduce: Reduce = "mean"
    weighted: bool = False
    predivide_factor: float | None = None
    reduce_dtype: tuple[tuple[str, torch.dtype], ...] = ()
    ignore: tuple[str, ...] = ()
    delay: bool = False
    launch_after: tuple[str, ...] = ()
    check_every: int | None = None
    sparse: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "last_bucket_cap_mb", "predivide_factor"):
            if (value := getattr(self, name)) is not None:
                number = positive(name, value, or_zero=name == "last_bucket_cap_mb", or_none=True)
                object.__setattr__(self, name, number)
        for name in ("weighted", "delay"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        refuse_unlisted("buffers", self.buffers, Buffers)
        refuse_unlisted("reduce", self.reduce, Reduce)
        if self.check_every is not None:
            every = _number(self.check_every)
            if not (every >= 0 and every.is_integer()):
                shown = reprlib.repr(self.check_every)
                raise SetupError(f"check_every={shown} must be a number of passes, 0 for never, or None")
            object.__setattr__(self, "check_every", int(every))

    def ignores(self, name: str) -> bool:
        """Whether the parameter or buffer is to be left alone."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def reduce_dtypes(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
        """The dtype in which each parameter's gradient travels, where one was asked for; the first match counts.

        For ``"*"``, complex parameters travel in the complex dtype of that precision, and real ones in the real one.

        Raises:
            UnsupportedError: a real dtype was asked for a complex parameter by its name.
        """
        found: dict[str, torch.dtype] = {}
        for name, parameter in parameters.items():
            asked = next(((pattern, dtype) for pattern, dtype in self.reduce_dtype if fnmatchcase(name, pattern)), None)
            if asked is None:
                continue
            pattern, dtype = asked
            if pattern == "*":
                dtype = dtype.to_complex() if parameter.is_complex() else dtype.to_real()
                if dtype is torch.complex32:  # torch has no arithmetic for it
                    continue
            elif parameter.is_complex() and not dtype.is_complex:
                raise UnsupportedError(
                    f"reduce_dtype for {pattern!r} is {dtype}, which would drop the imaginary part of {name} "
                    f"({parameter.dtype}).\nAsk for {dtype.to_complex()}, or leave it out."
                )
            found[name] = dtype
        return found


def refuse_unlisted(name: str, value: object, literal: Any) -> None:
    """Raise ``UnsupportedError`` for what is none of a ``Literal``'s words."""
    if not isinstance(value, str) or value not in get_args(literal):
        known = ", ".join(f'"{one}"' for one in get_args(literal))
        raise UnsupportedError(f"{name}={reprlib.repr(value)} is not known: use one of {known}")


def positive(name: str, value: Any, *, or_zero: bool = False, or_none: bool = False) -> float:
    """A finite number. Raises ``SetupError`` otherwise."""
    number = _number(value)
    if not (0.0 if or_zero else math.ulp(0.0)) <= number < math.inf:
        wanted = ("0 or " if or_zero else "") + "a positive number" + (", or None" if or_none else "")
        raise SetupError(f"{name}={reprlib.repr(value)} must be {wanted}")
    return number


def truth(name: str, value: Any) -> bool:
    """What may come from anywhere that truth values come from; ``None`` for False. Raises ``SetupError`` otherwise."""
    if getattr(value, "ndim", 0) or value not in (True, False, None):
        raise SetupError(f"{name}={reprlib.repr(value)} must be True or False")
    return bool(value)


def weight_of(value: Any, options: Options, rank: int) -> float:
    """What was given for a pass. Raises ``SetupError`` if it cannot be one, or there are none."""
    if not options.weighted:
        raise SetupError(
            f"rank {rank}: weight={value} has no effect on a model that was attached without weights.\n"
            "Use stretto.attach(model, weighted=True)."
        )
    if not 0 <= (weight := _number(value)) < 2**WEIGHT_BITS:
        raise SetupError(
            f"rank {rank}: weight={reprlib.repr(value)} must be between 0 and 2**{WEIGHT_BITS}.\n"
            "Set it to this rank's number of samples or tokens in the batch."
        )
    return weight


def _number(value: Any) -> float:
    """What may come from anywhere that numbers come from, a tensor too; NaN if it is none."""
    if isinstance(value, (bool, str, bytes, bytearray)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def listed(asked: Any) -> Any:
    """What can be gone through more than once, or what was given where it is no list and ``attach`` will say so."""
    return asked if isinstance(asked, (str, torch.Tensor)) or not isinstance(asked, Iterable) else tuple(asked)


def patterns(option: str, asked: Iterable[str]) -> tuple[str, ...]:
    """Names or patterns of names, in order of the alphabet. Raises ``SetupError`` if that is not what was given."""
    found = listed(asked)
    if not isinstance(found, tuple) or not all(isinstance(one, str) for one in found):
        raise SetupError(
            f'attach: {option}={reprlib.repr(asked)} must be a list of names or patterns, such as ["head.*"]'
        )
    return tuple(sorted(found))


def dtype_patterns(asked: torch.dtype | Mapping[str, torch.dtype] | None) -> tuple[tuple[str, torch.dtype], ...]:
    """``reduce_dtype`` as pairs of pattern and dtype. One dtype alone stands for all parameters."""
    if asked is None:
        return ()
    pairs = tuple(asked.items()) if isinstance(asked, Mapping) else (("*", asked),)
    for pattern, dtype in pairs:
        if not isinstance(pattern, str):
            raise SetupError(
                f"reduce_dtype names {reprlib.repr(pattern)}, which is not a name.\n"
                "Give names, or patterns of names, of module.named_parameters()."
            )
        if not isinstance(dtype, torch.dtype) or not can_be_added(dtype):
            raise UnsupportedError(
                f"reduce_dtype for {pattern!r} must be a floating dtype that can be added, such as torch.float32, not "
                f"{dtype!r}"
            )
    return pairs


def can_be_added(dtype: torch.dtype) -> bool:
    """Whether gradients can have it: not of 8 bits, in which torch computes nothing."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def names_of(module: torch.nn.Module, asked: Iterable[str | torch.nn.Parameter]) -> tuple[str, ...]:
    """The names of parameters that were given as such or by name."""
    by_identity = {id(parameter): name for name, parameter in module.named_parameters()}
    names = set(by_identity.values())
    found = []
    given = listed(asked)
    for one in given if isinstance(given, tuple) else [given]:
        name = one if isinstance(one, str) else by_identity.get(id(one), "")
        if name not in names:
            raise SetupError(
                f"launch_after names {one if isinstance(one, str) else 'a parameter'}, which is not in this module.\n"
                "Give parameters of the attached module, or names as in module.named_parameters()."
            )
        found.append(name)
    return tuple(found)


def gives_rows(layer: torch.nn.Module) -> bool:
    """Whether gradients of what it owns are sparse."""
    return isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse


def names_of_sparse(module: torch.nn.Module, patterns: Iterable[str], *, strict: bool = True) -> set[str]:
    """Parameters whose gradient is expected to be sparse: torch's rule, by owner, and those that were named.

    Raises:
        SetupError: a pattern matches no parameter; unless ``strict`` is False.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = filter(gives_rows, module.modules())
    found = {names[id(parameter)] for owner in owners for parameter in owner.parameters(recurse=False)}
    for pattern in patterns:
        matching = {name for name in names.values() if fnmatchcase(name, pattern)}
        if strict and not matching:
            raise SetupError(
                f"attach: sparse= names {pattern}, which the module does not have.\n"
                "Give names, or patterns of names, of module.named_parameters()."
            )
        found |= matching
    return found
