"""Recording of every pass of an attached model into a folder: ``with sync.trace(folder)``."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping

from .clocks import compare_clocks
from .peers import Peers
from .plan import BucketPlan
from .record import PassRecord
from .recorder import GradientRecorder
from .reducer import Reducer
from .trace import TraceError, TraceWriter, header_of, next_aside, set_aside

Keep = Callable[[PassRecord, BucketPlan], object]


@contextlib.contextmanager
def tracing(
    reducer: Reducer, peers: Peers, folder: str | os.PathLike[str], tied: Mapping[str, str], also: Keep
) -> Iterator[None]:
    """Collective where it begins, since clocks are compared there; where it ends each rank is on its own.

    Args:
        reducer: of this rank.
        peers: the other ranks.
        folder: where each rank writes its file. A trace that lies there is moved into a folder inside.
        tied: names of parameters, and under what other name the module uses them too.
        also: told of each record.

    Raises:
        TraceError: on every rank, if one of them cannot write.
        CommunicationError: a rank does not come.
    """
    transport = reducer.transport
    clocks = compare_clocks(getattr(transport, "store", None), transport.rank, peers.gather)
    rank, world_size = transport.rank, transport.world_size
    everyone: list[tuple[str, int]] = peers.gather((secrets.token_hex(8), next_aside(folder)))
    header = header_of(rank, world_size, transport.name, clocks[rank], everyone[0][0], tied)
    writer, problem = None, ""
    try:
        set_aside(folder, rank, world_size, max(number for _, number in everyone))
        writer = TraceWriter(folder, header)
    except TraceError as error:
        problem = str(error)
    problems = {rank: one for rank, one in enumerate(peers.gather(problem)) if one}
    if writer is None or problems:
        if writer is not None:
            writer.close("another rank cannot write")
        raise TraceError("; ".join(f"rank {rank}: {one}" for rank, one in problems.items()))

    def keep(record: PassRecord, plan: BucketPlan) -> None:
        also(record, plan)
        writer.keep(record, plan)

    recorder = GradientRecorder(reducer, keep)
    recorder.start()
    end = "closed"
    try:
        yield
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
        raise
    finally:
        recorder.stop()
        writer.close(end)
