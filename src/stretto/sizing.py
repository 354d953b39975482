"""A plan whose buckets have the size that was asked for, or one that suits the transport.

Between hosts, that size follows from the cost of an all-reduce there, which is measured once, when ranks attach. A
message of c bytes takes a + c / B seconds. Small messages leave early, and little is left when backward has ended. But
the smaller they are, the larger is the part of their time taken by a, in which no byte moves. At c = a B that part is
half (n 1/2 in Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994). Here it is to be a third at
most,

    c = 2 a B

where a is the latency that was measured, and ``BUSY_SECONDS``. So buckets are small on a slow link and large on a fast
one. Sizes are rounded to powers of two, so that the next run on the same link mostly gets the same sizes: with more
than two ranks, the order in which Gloo's ring sums depends on where buckets are cut. A sixteenth is added, so that
matrices whose sizes are powers of two fit in together with their biases.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .options import Options
from .plan import BucketPlan, plan_buckets
from .specs import describe_parameters
from .transport.base import Transport, Work
from .wording import KIB, MIB, format_bytes

PROBE_BYTES = MIB
"""Of the larger of two messages that are timed. Models no larger are not worth it."""
PROBES = 3
BUSY_SECONDS = 4e-3
"""What a message takes besides its latency on an idle machine: threads that carry it find the cores computing. Measured
between two emulated hosts of one core each (Gloo): a step of 13 to 45 MB took 4 to 5 ms more a bucket."""
LEAST, MOST = 256 * KIB, 32 * MIB
log = logging.getLogger("stretto")

WaitFor = Callable[[Work, str], object]
"""Waits for a collective, named by a noun."""
Gather = Callable[[Any], list[Any]]
"""Gives the values of all ranks."""


@dataclass(frozen=True)
class AllReduceCost:
    """What an all-reduce takes over a transport where nothing computes."""

    latency: float
    """Seconds, however small it is."""
    bandwidth: float
    """Bytes of payload in a second, besides."""

    @property
    def bucket_cap_bytes(self) -> int:
        """A power of two and a sixteenth more.

        Example::

            slow, fast = AllReduceCost(5e-4, 117e6), AllReduceCost(5e-4, 800e6)
            assert slow.bucket_cap_bytes == 17 << 16
            assert fast.bucket_cap_bytes == 17 << 19
        """
        best = 2 * (self.latency + BUSY_SECONDS) * self.bandwidth
        return 17 << round(math.log2(min(max(best, LEAST), MOST) / 16))


def plan_for(
    parameters: Mapping[str, torch.nn.Parameter],
    options: Options,
    carrier: Transport | None,
    arrived: Collection[str] = (),
) -> BucketPlan:
    """A plan with the caps that were asked for, or that suit the transport.

    Args:
        parameters: by name, in order of registration.
        options: what the user asked for.
        carrier: the transport, if any.
        arrived: names in the order in which gradients used to arrive. Each other one is taken to arrive just before
            the one that was registered before it.
    """
    specs = describe_parameters(parameters, options.reduce_dtypes(parameters))
    cap, last = options.bucket_cap_mb, options.last_bucket_cap_mb
    if cap is None and options.delay:
        cap = last = 1 + sum(spec.nbytes for spec in specs) / MIB
    suits = (carrier.bucket_cap_bytes, carrier.last_bucket_cap_bytes) if carrier else (4 * MIB, MIB)
    names = [spec.name for spec in specs]
    index_of = {name: index for index, name in enumerate(names)}
    order = [index_of[name] for name in arrived if name in index_of]
    known = set(order)
    for index in range(len(names)):
        if index not in known:
            order.insert(order.index(index - 1) if index else len(order), index)
    return plan_buckets(
        specs,
        order,
        cap_bytes=suits[0] if cap is None else max(1, int(cap * MIB)),
        last_cap_bytes=int(last * MIB) if last is not None else suits[1] if cap is None else None,
        cut_after=[index_of[name] for name in options.launch_after if name in index_of],
    )


def suit_link(options: Options, plan: BucketPlan, transport: Transport, wait_for: WaitFor, gather: Gather) -> Options:
    """Options with the bucket size for this link, if it matters and none was given. Collective.

    Args:
        options, plan: the same on all ranks.
        transport: says by ``caps_follow_link`` whether its own caps are a guess.
        wait_for: waits for a collective, named by a noun.
        gather: gives the values of all ranks.
    """
    on_host = (number for number, bucket in enumerate(plan.buckets) if bucket.device == "cpu")
    nbytes = sum(map(plan.bucket_bytes, on_host))  # those of other devices may go another way
    asked = options.bucket_cap_mb is not None or options.delay
    if asked or nbytes <= PROBE_BYTES or not transport.caps_follow_link:
        return options
    cost = measure_all_reduce(transport, wait_for, gather)
    cap = cost.bucket_cap_bytes
    if transport.rank == 0:
        log.info(
            "attach: an all-reduce over %s moves %s/s, so buckets hold at most %s; to choose: attach(bucket_cap_mb=)",
            transport.name,
            format_bytes(int(cost.bandwidth)),
            format_bytes(cap),
        )
    return replace(options, bucket_cap_mb=cap / MIB)


def measure_all_reduce(transport: Transport, wait_for: WaitFor, gather: Gather) -> AllReduceCost:
    """Time some messages of one element and of ``PROBE_BYTES``, on the host. Collective; the same on all ranks."""
    numels = (1, PROBE_BYTES // 4)
    mine = [min(_timed(transport, wait_for, numel) for _ in range(PROBES)) for numel in numels]
    small, large = map(max, zip(*gather(mine), strict=True))  # a message is through when its last rank has it
    return cost_of(small, large)


def cost_of(small: float, large: float) -> AllReduceCost:
    """From the seconds of a message of one element and of one of ``PROBE_BYTES``."""
    return AllReduceCost(small, PROBE_BYTES / max(large - small, large / 4))  # whatever else the machine was doing


def _timed(transport: Transport, wait_for: WaitFor, numel: int) -> float:
    tensor = torch.zeros(numel, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    start = time.perf_counter()
    wait_for(transport.all_reduce(tensor), "messages that time the link")
    return time.perf_counter() - start
