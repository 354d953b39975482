"""Recording of every pass of an attached model into a folder: ``with sync.trace(folder)``."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .analysis import compare_clocks
from .clocks import ClockTalk
from .comm_hooks import carrier
from .plan import BucketPlan
from .record import PassRecord
from .recorder import GradientRecorder
from .reducer import Reducer, reducer_of
from .trace import TraceError
from .wording import describe_ranks, ranks_by
from .writing import TraceWriter, header_of, next_aside, set_aside

Keep = Callable[[PassRecord, BucketPlan], object]
log = logging.getLogger("stretto")


@contextlib.contextmanager
def tracing(reducer: Reducer, folder: str | os.PathLike[str], tied: Mapping[str, str], also: Keep) -> Iterator[None]:
    """Collective where it begins, since clocks are compared there; where it ends each rank is on its own.

    Where hosts have clocks of their own they are compared once more at the end: for a few seconds at most, and not
    after an exception.

    Args:
        reducer: of this rank.
        folder: where each rank writes its file. A trace that lies there is moved into a folder inside.
        tied: names of parameters, and under what other name the module uses them too.
        also: told of each record.

    Raises:
        TraceError: on every rank, if one of them cannot write.
        CommunicationError: a rank does not come.
    """
    talk, writer = _begin(reducer, folder, tied)

    def keep(record: PassRecord, plan: BucketPlan) -> None:
        also(record, plan)
        writer.keep(record, plan)

    recorder = GradientRecorder(reducer, keep)
    end, later = "closed", None
    try:
        recorder.start()
        yield
        recorder.stop()
        later = talk.again()
        if reducer.detached and any(map(reducer_of, reducer.parameters)):
            log.warning(
                "rank %s: sync.trace(%r) has recorded nothing since the model was attached anew, by join() or a new "
                "wrapper.\n"
                "Begin it behind that: with model.synchronizer.trace(folder), inside of with model.join().",
                reducer.transport.rank,
                os.fspath(folder),
            )
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
        raise
    finally:
        recorder.stop()
        writer.close(end, later)


def _begin(reducer: Reducer, folder: str | os.PathLike[str], tied: Mapping[str, str]) -> tuple[ClockTalk, TraceWriter]:
    """Collective: open this rank's file, if all ranks can open theirs."""
    transport, peers = reducer.transport, reducer.queue.peers
    rank, world_size = transport.rank, transport.world_size
    talk, clocks = compare_clocks(reducer)
    everyone: list[tuple[str, int]] = peers.gather((secrets.token_hex(8), next_aside(folder)))
    devices = sorted({parameter.device.type for parameter in reducer.parameters})
    over = carrier(reducer.queue.comm_hook, transport.name)
    header = header_of(rank, world_size, over, clocks[rank], everyone[0][0], tied, talk.clock, devices)
    with contextlib.ExitStack() as opened:
        problem = ""
        try:
            set_aside(folder, rank, world_size, max(number for _, number in everyone))
            writer = TraceWriter(folder, header)
            opened.callback(writer.close, "another rank cannot write")
        except TraceError as error:
            problem = str(error)
        problems = ranks_by(enumerate(peers.gather(problem)))
        problems.pop("", None)
        if problems:
            raise TraceError("; ".join(f"{describe_ranks(ranks)}: {told}" for told, ranks in problems.items()))
        opened.pop_all()
        return talk, writer


@contextlib.contextmanager
def nothing_traced(folder: str | os.PathLike[str], rank: int, world_size: int) -> Iterator[None]:
    """Say why there will be no trace."""
    if world_size == 1:
        why = "there is no other rank to communicate with.\nStart several: stretto run --ranks 2 script.py"
    else:
        why = "the handle is detached.\nTrace before detach(), or attach again."
    log.warning("rank %s: sync.trace(%r) records nothing: %s", rank, os.fspath(folder), why)
    yield


class ToEnter(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """What ``sync.trace(folder)`` returns. Nothing is recorded before it is entered; a warning says so if it never is.

    Args:
        make: what is entered, each time.
        folder, rank: for the message.
    """

    def __init__(
        self, make: Callable[[], contextlib.AbstractContextManager[None]], folder: str | os.PathLike[str], rank: int
    ) -> None:
        self._make, self._folder, self._rank = make, folder, rank
        self._inner: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._inner = self._make()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        assert self._inner is not None, "it was entered"
        return self._inner.__exit__(*error)

    def __del__(self) -> None:
        if self._inner is None:
            log.warning(
                "rank %s: sync.trace(%r) by itself records nothing.\n"
                "Write with sync.trace(folder): around the steps to record.",
                self._rank,
                os.fspath(self._folder),
            )
