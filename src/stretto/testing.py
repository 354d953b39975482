"""Tools for testing code that trains in parallel: ranks as threads or processes, recorded and delayed transports.

run_ranks(worker, 3)        # threads of this process, each with a transport; what they return, in rank order
spawn_ranks(worker, 2)      # real processes over Gloo on loopback, each with a process group
"""

from __future__ import annotations

import datetime
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .transport import LocalGroup, LocalTransport, Transport, Work
from .transport.under_way import LETTING_GO_SECONDS

T = TypeVar("T")


def run_ranks(worker: Callable[[LocalTransport], T], world_size: int, *, timeout: float = 60.0) -> list[T]:
    """Run ``worker(transport)`` on each rank, as threads of this process.

    Raises the first exception of any rank; the others are told, so none waits. A rank waits ``timeout`` seconds for
    another; one that takes longer than twice that raises ``TimeoutError`` here. Several handles over this transport do
    not know of each other: where one backward reaches both, say ``attach(..., beside=[first])``.

    Example::

        def worker(transport):
            model = torch.nn.Linear(2, 1)
            sync = stretto.attach(model, transport=transport)
            model(torch.full((1, 2), float(transport.rank))).sum().backward()
            return model.weight.grad.clone()


        first, second = run_ranks(worker, 2)
        assert torch.equal(first, second)
    """
    torch.tanh(torch.ones(16))  # MKL's first call in a process may be off by 1e-4 if two threads make it at once
    group = LocalGroup(world_size, timeout=timeout)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        torch.get_num_threads()  # until it is asked, a new thread's convolutions take OpenMP's number, not torch's
        try:
            results[rank] = worker(group.transport(rank))
        except BaseException as error:
            failures.append(error)
            group.abort(f"rank {rank} raised {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout)
        if thread.is_alive():
            why = failures[0] if failures else None  # of another rank
            raise TimeoutError(f"{thread.name} did not end within {2 * timeout:.0f} s") from why
    if failures:
        raise failures[0]
    return results


def spawn_ranks(
    worker: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 90.0,
    started: Callable[[BaseProcess], object] | None = None,
) -> list[T]:
    """Run ``worker(rank, *args)`` in ``world_size`` processes with a Gloo process group on loopback.

    Results are sent back pickled through files. No port is chosen by hand: ranks meet through a file store.

    Args:
        worker: can be imported by its name.
        world_size: processes.
        args: anything that can be pickled.
        timeout: seconds.
        started: called with each process, for code that may have to end them; default, not called.

    Raises:
        RuntimeError: a rank failed; with the traceback of each that did.
        TimeoutError: some rank did not end; all are killed.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        processes = [
            context.Process(target=run_rank, args=(worker, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
                if started is not None:
                    started(process)
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:  # after Ctrl-C too, which a notebook sends to this process alone
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return read_results(folder, [process.exitcode for process in processes], late, timeout)


def run_rank(worker: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    """Be one rank of a Gloo group that meets in ``folder``, on loopback unless ``GLOO_SOCKET_IFNAME`` says otherwise.

    What ``worker(rank, *args)`` returns or raises is left in the folder, for :func:`read_results`. Collective.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = worker(rank, *args)
        torch.save(result, f"{folder}/result{rank}")
        dist.barrier()
        time.sleep(LETTING_GO_SECONDS)  # a hook may keep the group, whose threads abort an interpreter that ends
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"failure{rank}").write_text(traceback.format_exc())
        raise


def read_results(folder: str, exit_codes: Sequence[int | None], late: Sequence[int], timeout: float) -> list[Any]:
    """What ranks have left in ``folder``, by rank.

    Args:
        folder: where they met.
        exit_codes: of their processes.
        late: those that did not end by themselves.
        timeout: seconds that they had.

    Raises:
        RuntimeError: a rank failed; with the traceback of each that did.
        TimeoutError: some did not end.
    """
    paths = [Path(folder, f"failure{rank}") for rank in range(len(exit_codes))]
    told = [path.read_text() if path.exists() else "" for path in paths]
    if any(told):
        raise RuntimeError("\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(told) if text))
    if late:
        raise TimeoutError(f"ranks {[*late]} did not end within {timeout:.0f} s")
    died = {rank: code for rank, code in enumerate(exit_codes) if code}
    if died:
        raise RuntimeError(f"ranks died without a traceback, exit codes by rank: {died}")
    return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(len(exit_codes))]


class RecordingTransport(Transport):
    """Passes on what :class:`Transport` has, and writes down each collective in ``calls`` as ``(kind, bytes)``.

    What a transport can do for less than an all-reduce stays hidden behind it, as do memory that ranks share and the
    process group beneath: so a sharded step sends other messages than without it.

    Example::

        transport = RecordingTransport(ProcessGroupTransport())
        sync = stretto.attach(model, transport=transport)
        transport.calls.clear()
        model(x)
        assert transport.calls == []
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.caps_follow_link = inner.caps_follow_link
        self.bucket_cap_bytes = inner.bucket_cap_bytes
        self.last_bucket_cap_bytes = inner.last_bucket_cap_bytes
        self.store = inner.store
        self.own_channel = inner.own_channel
        self.leftovers = inner.leftovers
        self.calls: list[tuple[str, int]] = []

    @property
    def patience(self) -> float | None:  # type: ignore[override]  # never assigned elsewhere
        """That of the inner one."""
        return self.inner.patience

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Not a collective, so not recorded."""
        return self.inner.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Recorded."""
        self.calls.append(("all_reduce", tensor.nbytes))
        return self.inner.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Recorded."""
        self.calls.append(("broadcast", tensor.nbytes))
        return self.inner.broadcast(tensor, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Recorded, with 0 bytes."""
        self.calls.append(("all_gather_object", 0))
        return self.inner.all_gather_object(value)

    def close(self) -> None:
        """Passed on."""
        self.inner.close()

    def dead(self) -> Sequence[tuple[int, int]] | None:
        """Passed on."""
        return self.inner.dead()

    def break_off(self, reason: str) -> None:
        """Passed on."""
        self.inner.break_off(reason)

    def abandon(self, work: Any, handle: str, told: str) -> None:
        """Passed on."""
        self.inner.abandon(work, handle, told)

    def flush(self, seconds: float) -> None:
        """Passed on."""
        self.inner.flush(seconds)


class DelayTransport(RecordingTransport):
    """All-reduces go over a link of their own, one after the other, each for ``seconds(bytes)``.

    ``transfers`` holds when each was launched and when it is through, in seconds of ``time.perf_counter``. A link that
    is slow on one rank only makes that rank late.
    """

    def __init__(self, inner: Transport, seconds: Callable[[int], float]) -> None:
        super().__init__(inner)
        self.transfers: list[tuple[float, float]] = []
        self._seconds = seconds
        self._free_at = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """The inner one's work, through at a time that may lie in the future."""
        work = super().all_reduce(tensor)
        launched = time.perf_counter()
        self._free_at = max(launched, self._free_at) + self._seconds(self.calls[-1][1])
        self.transfers.append((launched, self._free_at))
        return _DelayedWork(work, self._free_at)


class _DelayedWork:
    def __init__(self, inner: Work, through: float) -> None:
        self._inner: Any = inner
        self._through = through
        self._over = self._overdue = False

    @property
    def ended_at(self) -> float | None:
        """When it was through; None while a peer has not come, whatever the link says."""
        now = time.perf_counter()
        if not self._over:
            self._over = self.is_completed()
            if self._over and self._overdue:  # the peer came since one has looked last
                self._through = now
            self._overdue = now > self._through
        return self._through if self._over else None

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        come = self._over or self.is_completed()
        self._inner.wait(*[timeout] if timeout else [])
        if not come:
            self._through = max(self._through, time.perf_counter())
        self._over = True
        time.sleep(max(0.0, self._through - time.perf_counter()))
