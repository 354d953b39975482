"""``stretto plan``: the buckets of a model, and what they cost on a link."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from torch.nn.parameter import is_lazy

from ..bench.factory import FORMS, model_of
from ..options import names_of_sparse
from ..plan import BucketPlan, plan_buckets
from ..report import ms, share
from ..sizing import PROBE_BYTES, cost_of
from ..specs import ParameterSpec, describe_parameters
from ..terminal import progress
from ..wording import MIB, columns, format_bytes, name_list
from .console import FINE, AsJson, CommandError, say, say_json
from .link import Link, parse_bandwidth, parse_latency

DEFAULT_CAP_MB = 4.0
"""The size that attach() takes if it does not matter."""
OTHER_CAPS = (0.25, 1.0, 4.0, 25.0)


def plan(
    target: Annotated[str, typer.Argument(help=f"{FORMS} Only the model is used.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Number of ranks.")] = 2,
    bandwidth: Annotated[str, typer.Option(help="Of the link, in each direction: 1gbit, 100mbit, 125MB/s.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of one message: 100us, 0.2ms.")] = "100us",
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="As in attach(). Default: what attach() picks over Gloo on such a link.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the buckets of a model, and what a pass costs on a link.

    The plan is the one before the first backward, in reverse order of registration; attach() learns the true order of
    arrival and plans again. Times are those of the ring all-reduce, computed, not measured; overlap with backward can
    hide all but the last bucket's.
    """
    if ranks < 1:
        raise CommandError(f"--ranks {ranks}: must be 1 or more")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise CommandError(f"--bucket-cap-mb {bucket_cap_mb:g}: must be positive")
    link = Link(parse_bandwidth(bandwidth), parse_latency(latency), ranks)
    with progress(f"making {target}"):
        model = model_of(target)
    if lazy := [name for name, one in model.named_parameters() if is_lazy(one)]:
        raise CommandError(
            f"{target} gives a module whose {name_list(lazy)} have no size yet: run one forward in the factory"
        )
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not trained:
        raise CommandError(f"{target} gives a module without a parameter that requires a gradient")
    sparse = names_of_sparse(model, ())
    by_rows = [name for name in trained if name in sparse]
    specs = describe_parameters({name: one for name, one in trained.items() if name not in sparse})
    if not specs:
        raise CommandError(f"{target} gives a module whose gradients are sparse: they are sent by rows, not in buckets")
    cap_mb = _cap_for(specs, link) if bucket_cap_mb is None else bucket_cap_mb
    made = _plan(specs, cap_mb)
    if as_json:
        say_json(_as_value(made, link, specs, cap_mb) | {"sparse": by_rows})
        return FINE
    rows = f"\nbeside it, by rows, since their gradients are sparse: {name_list(by_rows)}" if by_rows else ""
    if ranks == 1:
        say(f"{made}{rows}\n\nOne rank sends nothing.")
    else:
        costs = _costs(made, link, f"{bandwidth}, {latency}")
        say(f"{made}{rows}\n\n{costs}\n\n{_other_caps(specs, link, cap_mb)}")
    return FINE


def _cap_for(specs: Sequence[ParameterSpec], link: Link) -> float:
    nbytes = sum(spec.nbytes for spec in specs)
    if link.ranks == 1 or nbytes <= PROBE_BYTES:
        return DEFAULT_CAP_MB
    return cost_of(link.all_reduce(4), link.all_reduce(PROBE_BYTES)).bucket_cap_bytes / MIB


def _plan(specs: Sequence[ParameterSpec], cap_mb: float) -> BucketPlan:
    return plan_buckets(specs, cap_bytes=max(1, int(cap_mb * MIB)))


def _sizes(made: BucketPlan) -> list[int]:
    """Bytes that travel, by bucket."""
    return [*map(made.sent_bytes, range(len(made.buckets)))]


def _costs(made: BucketPlan, link: Link, words: str) -> str:
    sizes = _sizes(made)
    total = link.all_reduces(sizes)
    rows = [("bucket", "size", "latency", "transfer", "all-reduce")]
    rows += [
        (str(number), format_bytes(size), ms(link.waiting()), ms(link.moving(size)), ms(link.all_reduce(size)))
        for number, size in enumerate(sizes)
    ]
    waiting, moving = len(sizes) * link.waiting(), link.moving(sum(sizes))
    rows.append(("all", format_bytes(sum(sizes)), ms(waiting), ms(moving), ms(total)))
    head = f"ring all-reduce over {link.ranks} ranks on a link of {words}, computed:"
    sent = format_bytes(link.sent(sum(sizes)))
    end = f"Each rank sends {sent} in a pass; latency is {share(waiting, total)} of {ms(total)}."
    if len(sizes) == 1:
        end += "\nBackward cannot hide any of it: the only bucket leaves when backward has ended."
    else:
        end += f"\nBackward can hide all but the last bucket's {ms(link.all_reduce(sizes[-1]))}."
    return f"{head}\n{columns(rows, left=())}\n{end}"


def _caps(cap_mb: float) -> list[float]:
    return sorted({*OTHER_CAPS, cap_mb})


def _other_caps(specs: Sequence[ParameterSpec], link: Link, cap_mb: float) -> str:
    rows: list[tuple[str, ...]] = [("bucket_cap_mb", "buckets", "latency", "all-reduce", "last bucket")]
    for cap in _caps(cap_mb):
        sizes = _sizes(_plan(specs, cap))
        number = len(sizes)
        times = (number * link.waiting(), link.all_reduces(sizes), link.all_reduce(sizes[-1]))
        rows.append((f"{cap:g}", str(number), *map(ms, times)))
    head = "Small buckets leave earlier and pay latency more often; the last one is never hidden:"
    return f"{head}\n{columns(rows, left=())}"


def _as_value(made: BucketPlan, link: Link, specs: Sequence[ParameterSpec], cap_mb: float) -> dict[str, Any]:
    """Times in seconds, sizes in bytes, the bandwidth in bits a second."""
    sizes = _sizes(made)
    buckets = [
        {
            "bytes": size,
            "parameters": [made.parameters[index].name for index in bucket.indices],
            "seconds": link.all_reduce(size),
        }
        for size, bucket in zip(sizes, made.buckets, strict=True)
    ]
    caps = {f"{cap:g}": _sizes(_plan(specs, cap)) for cap in _caps(cap_mb)}
    return {
        "plan": json.loads(made.to_json()),
        "hash": made.hash,
        "ranks": link.ranks,
        "bandwidth": link.bandwidth,
        "latency": link.latency,
        "buckets": buckets,
        "bytes": sum(sizes),
        "sent": link.sent(sum(sizes)),
        "waiting": len(sizes) * link.waiting(),
        "seconds": link.all_reduces(sizes),
        "by_cap_mb": {cap: {"buckets": len(found), "seconds": link.all_reduces(found)} for cap, found in caps.items()},
    }
