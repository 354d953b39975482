"""What others find at ``ddp.reducer`` and ``ddp.logger``: stand-ins for torch's C++ objects.

docs/drop-in.md has a row for each member of torch's reducer.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from .analysis import torch_times
from .comm_hooks import sum_hook
from .engine import left_uncompiled
from .errors import SetupError, UnsupportedError

if TYPE_CHECKING:
    from .ddp_compat import TorchSurface
    from .handle import Synchronizer
    from .specs import ParameterSpec


class UnsupportedMemberError(UnsupportedError, AttributeError):
    """A member of torch's class without a counterpart. As an ``AttributeError`` it makes ``hasattr`` say no."""


class Armed:
    """Whether the next backward reduces: by what was set, as with any handle, and by torch's rule as well.

    torch's forward arms its reducer, so what ran forward inside ``no_sync`` is not reduced by a backward outside
    (micro-batches of diffusion trainers). A forward outside that no pass has followed so far is reduced all the same.
    Where backward ran inside after them there is nothing left to keep: then a backward of any other forward reduces.
    """

    def __init__(self, ddp: TorchSurface) -> None:
        self._ddp = weakref.ref(ddp)
        self._inside = -1
        """How many gradients had stayed here when forward last ran inside; -1 if one outside waits for its pass."""
        self._kept = False
        """Whether it has ended, so that no backward reduces before a forward outside."""
        self._awaited = -1
        """The last pass before a forward outside."""

    @property
    def value(self) -> bool:
        """As it was set."""
        return self._kept or self._handle.synchronize

    @value.setter
    def value(self, value: bool) -> None:
        self._kept, self._handle.synchronize = False, value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Neither a backward inside reduces, nor one outside of what only forwards inside have made."""
        before = self.value
        if before:  # else it is inside another, whose forwards count
            self._inside = self._handle.backwards[1] if self._kept else -1
        self.value = False
        try:
            yield
        finally:
            self.value = before
            if before and self._inside == self._handle.backwards[1]:
                self._kept, self._handle.synchronize = True, False

    @left_uncompiled
    def forward_begins(self) -> None:
        """Of the wrapper. Before the module's own, whose failure is one of the pass to which it belongs.

        One without gradients, an evaluation or a teacher, says nothing of the next backward.
        """
        if self.value and torch.is_grad_enabled():
            self.arm()

    @left_uncompiled
    def forward_ran(self) -> None:
        """Of the wrapper. One with gradients that backward calls, for a checkpoint, is a part of that pass."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            begun, kept = self._handle.backwards
            if self.value:
                self._awaited, self._inside = begun, -1
            elif self._awaited != begun:
                self._inside = kept

    def attached_anew(self) -> None:
        """The new handle counts from 0, so that a count of the former one could seem to be one of its own."""
        self._inside = self._awaited = -1

    def arm(self) -> None:
        """The next backward reduces, wherever forward ran; inside ``no_sync`` it does not."""
        if self._kept:
            self.value = True

    @property
    def _handle(self) -> Synchronizer:
        ddp = self._ddp()
        assert ddp is not None, "it is asking"
        return ddp.synchronizer


class ReducerFace:
    """What others call on ``ddp.reducer``. Preparations have no object here: any graph is right without."""

    def __init__(self, ddp: TorchSurface) -> None:
        self._ddp = weakref.ref(ddp)

    def prepare_for_forward(self) -> None:
        """Nothing to do."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Unused parameters are found in backward anyway; but a call of this asks that backward reduces."""
        if (ddp := self._ddp()) is not None:
            ddp._armed.arm()

    def _rebuild_buckets(self) -> bool:
        """Plans change at the end of passes: never now."""
        return False

    def _push_all_rebuilt_params(self) -> None:
        """Nothing to do."""

    def _delay_all_reduce(self) -> None:
        """Nothing to do: a pass is settled when the outermost backward ends."""

    def _set_static_graph(self) -> None:
        """Nothing to do."""

    def _reset_state(self) -> None:
        """Nothing to do: a pass that failed is cleared by itself."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing to do."""

    def set_logger(self, logger: object) -> None:
        """Nothing to do."""

    def _check_reducer_finalized(self) -> None:
        """Always true when backward has returned."""

    def _remove_autograd_hooks(self) -> None:
        """Stop reducing."""
        self._owner._remove_autograd_hooks()

    def _update_process_group(self, group: Any) -> None:
        """As the wrapper's."""
        self._owner._update_process_group(group)

    def _install_post_backward_futures(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Waits at once."""
        torch.futures.wait_all([*futures])

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last pass."""
        return torch.tensor([*self._owner.synchronizer.used_by.values()], dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self) -> bool:
        """Whether every pass of this rank has reached the same parameters."""
        return not self._owner.synchronizer.graph_changed

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """The sum over ranks of ``bucket.buffer()``, not divided."""
        return sum_hook(self._owner.process_group, bucket)

    def _run_comm_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """What the registered hook does with the bucket; without one, the sum."""
        hooks = self._owner._comm_hooks
        if not hooks:
            return self._run_allreduce_hook(bucket)
        hook, state = hooks[0]
        future: torch.futures.Future[Any] = hook(state, bucket)
        return future

    @property
    def _owner(self) -> TorchSurface:
        owner = self._ddp()
        if owner is None:
            raise SetupError("this reducer's DistributedDataParallel is gone")
        return owner

    def __getattr__(self, name: str) -> NoReturn:
        reason = REFUSED_OF_REDUCER.get(name)
        if reason is None:
            raise AttributeError(name)
        raise UnsupportedMemberError(f"DistributedDataParallel.reducer.{name} is not supported by stretto: {reason}.")


class Logger:
    """What torch writes down of a wrapper, gathered when it is asked for."""

    def __init__(self, ddp: TorchSurface) -> None:
        self._ddp = weakref.ref(ddp)
        self.error = ""
        self.comm_hook = ""
        self.joins = False

    def set_error_and_log(self, message: str) -> None:
        """Keep the message for ``_get_ddp_logging_data``."""
        self.error = message

    def data(self) -> dict[str, Any]:
        """torch's keys, as far as there is something to say."""
        ddp = self._ddp()
        assert ddp is not None
        sync = ddp.synchronizer
        plan, counts = sync.plan, sync.statistics
        parameters: list[ParameterSpec | torch.nn.Parameter] = [*plan.parameters, *sync.sparse_parameters.values()]
        group = ddp.process_group
        sizes = ", ".join(str(plan.bucket_bytes(i)) for i in range(len(plan.buckets)))
        found: dict[str, Any] = {
            "world_size": sync.world_size,
            "rank": sync.rank,
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules())),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "can_set_static_graph": 0,  # it would change nothing
            "backend_name": "" if group is None else dist.get_backend(group),
            "iteration": counts.passes,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(one.nbytes for one in parameters),
            "dtypes": ", ".join(sorted({_type_name(one.dtype) for one in parameters})),
            "bucket_sizes": sizes,
            "has_rebuilt_buckets": int(ddp._has_rebuilt_buckets),
            "num_buckets_reduced": counts.buckets_of_last_pass,
            "join_uneven_inputs": int(self.joins),
            "has_error": int(bool(self.error)),
            "error": self.error,
        }
        if ddp._has_rebuilt_buckets:
            found["rebuilt_bucket_sizes"] = sizes
            found["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.indices)) for bucket in plan.buckets
            )
            found["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, plan.order))
        if ddp._comm_hooks:
            hook = ddp._comm_hooks[0][0]
            found["comm_hook"] = self.comm_hook or getattr(hook, "__qualname__", repr(hook))
        for name in _ENVIRONMENT[found["backend_name"] if found["backend_name"] in _ENVIRONMENT else ""]:
            found[name.lower()] = os.environ.get(name, "N/A")
        records = [] if sync.sampler is None else [record for record, _ in sync.sampler.records]
        return found | torch_times(records)


_EVERYWHERE = ("MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_ENVIRONMENT = {
    "": _EVERYWHERE,
    "gloo": (*_EVERYWHERE, "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (*_EVERYWHERE, "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
}
_TYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}


def _type_name(dtype: torch.dtype) -> str:
    return _TYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


REFUSED_OF_REDUCER: dict[str, str] = {
    "_autograd_hook": "mixed_precision works without it",
    "_set_mixed_precision_param_dtype": "mixed_precision works without it",
    "_set_optimizer_in_backward": "a comm hook of stretto's serves _apply_optimizer_in_backward",
    "_set_forward_pass_work_handle": "join() divides by weights",
    "_get_zeros_like_grad_buckets": "joined ranks take part by themselves",
    "_set_sparse_metadata": "sparse gradients are reduced without it",
    "get_backward_stats": "observe passes with DistributedDataParallel.synchronizer.observe",
}
"""Members of torch's reducer that have no counterpart, and why."""
