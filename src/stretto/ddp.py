"""The drop-in: torch's ``DistributedDataParallel`` by signature and by ``isinstance``, with stretto's reducer inside.

A thin subclass, so that accelerate, Lightning, torch's checkpointing and its compiler, which all test ``isinstance``,
take it for what it is. torch's own constructor never runs and torch's C++ reducer is never built. Forward calls the
wrapped module and nothing else: gradients are reduced whichever method ran forward, and buffers travel when backward
ends.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .attach import attach
from .comm_hooks import Hook
from .errors import SetupError, UnsupportedError

REFUSED: Mapping[str, str] = {
    "delay_all_reduce_named_params": "attach to the module and use no_sync() for what is to wait",
    "param_to_hook_all_reduce": "it goes with delay_all_reduce_named_params",
    "mixed_precision": "use torch.autocast, or cast the module before wrapping it",
    "bucket_cap_mb_list": "use bucket_cap_mb; the plan sizes its last bucket by itself",
}
"""Constructor arguments of torch's class that are not honoured, and what to do instead."""


class DistributedDataParallel(TorchDDP):
    """torch's ``DistributedDataParallel``, argument for argument. Collective.

    What differs, always for the better:

    - ``find_unused_parameters``, ``static_graph``, ``gradient_as_bucket_view``, ``batched_grad_copy`` and
      ``skip_all_reduce_unused_params`` are accepted and change nothing: any graph is right, and ``.grad`` is a view of
      its bucket.
    - ``no_sync`` counts where ``backward`` runs; forward may be outside.
    - Forward never communicates: ``forward_sync_buffers`` (``broadcast_buffers``) sends rank 0's buffers at the end of
      backward. Evaluation on one rank alone works.
    - Without a process group, or in a world of one, it is a plain wrapper.

    Args:
        module, device_ids, output_device, dim, broadcast_buffers, init_sync, process_group, bucket_cap_mb, device_mesh,
        forward_sync_buffers: as in torch.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, bucket_cap_mb_list: refused by name.

    Raises:
        UnsupportedError: an argument that is not honoured.
        SetupError: as :func:`stretto.attach`; it is a ``ValueError`` and a ``RuntimeError``, as torch raises both.

    Example::

        from stretto import DistributedDataParallel as DDP

        model = DDP(model)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = _group_of(process_group, device_mesh)  # type: ignore[assignment]  # None: a world of one
        self.device_mesh = device_mesh
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        self._set_devices(device_ids, output_device)
        self.dim = dim
        self.forward_sync_buffers = _sync_buffers_in_passes(broadcast_buffers, forward_sync_buffers)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and changes nothing.", FutureWarning, stacklevel=2)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self._use_python_reducer = False  # read by the compiler
        self._synchronizer = attach(
            module,
            process_group=self.process_group,
            bucket_cap_mb=bucket_cap_mb,
            buffers="rank0" if self.forward_sync_buffers else "none",
            init_sync=init_sync,
            ignore=self.parameters_to_ignore,
        )
        self.bucket_bytes_cap = int(self._synchronizer.plan.cap_bytes)

    def _set_devices(self, device_ids: list[Any] | None, output_device: Any) -> None:
        """torch's rules: one device id at most, and only for a module on one accelerator."""
        devices = {parameter.device for parameter in self._module_parameters}
        if not devices:
            raise SetupError("DistributedDataParallel is not needed: the module has no parameter to reduce.")
        self.device = next(iter(self._module_parameters)).device
        self.device_type = self.device.type
        self.is_multi_device_module = len(devices) > 1
        if device_ids and len(device_ids) > 1:
            raise SetupError(f"device_ids can only be None or contain a single element, got {device_ids}")
        movable = not self.is_multi_device_module and self.device_type != "cpu"
        if not movable and (device_ids or output_device is not None):
            raise SetupError(
                f"device_ids={device_ids} and output_device={output_device} only make sense for a module on one "
                f"accelerator, but its parameters are on {sorted(map(str, devices))}: leave both out."
            )
        self.device_ids = [torch.device(self.device_type, _index(device_ids[0])).index] if device_ids else None
        first = self.device_ids[0] if self.device_ids else None
        self.output_device = output_device if output_device is not None else first

    # torch's surface

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward. Inputs are moved to ``device_ids[0]`` if that was given."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            if self.device_ids:
                target = torch.device(self.device_type, self.device_ids[0])
                moved, moved_kwargs = _to_kwargs(inputs, kwargs, target, self.use_side_stream_for_tensor_copies)
                inputs, kwargs = moved[0], moved_kwargs[0]
            with self._inside_ddp_forward():  # the compiler then cuts its graphs where buckets end
                return self.module(*inputs, **kwargs)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward reduces. ``no_sync`` clears it; wrappers set it by hand."""
        return self._synchronizer.synchronize

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._synchronizer.synchronize = value

    @property
    def broadcast_buffers(self) -> bool:
        """torch's former name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value
        self._synchronizer.buffers = "rank0" if value else "none"

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As :meth:`stretto.Synchronizer.no_sync`."""
        with self._synchronizer.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """As :meth:`stretto.Synchronizer.register_comm_hook`."""
        self._synchronizer.register_comm_hook(state, hook)

    def will_sync_module_buffers(self) -> bool:
        """Whether buffers will follow rank 0's when the next backward ends."""
        return self.forward_sync_buffers and self.require_backward_grad_sync and any(True for _ in self.buffers())

    @property
    def synchronizer(self) -> Any:
        """stretto's handle: plan, statistics, ``describe()``, observers."""
        return self._synchronizer

    def join(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused."""
        _refuse_method("join", "give every rank the same number of batches (DistributedSampler does)")

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refused, and with it ``torch.distributed.algorithms.Join``."""
        _refuse_method("join_hook", "give every rank the same number of batches (DistributedSampler does)")


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(f"DistributedDataParallel({name}=...) is not honoured by stretto: {REFUSED[name]}.")


def _refuse_method(name: str, instead: str) -> NoReturn:
    raise UnsupportedError(f"DistributedDataParallel.{name} is not supported by stretto yet: {instead}.")


def _group_of(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup | None:
    if device_mesh is None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return process_group
    if process_group is not None:
        raise SetupError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise SetupError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        raise UnsupportedError("a mesh cut out of a larger one (DDP with tensor parallelism) is not supported yet")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def _sync_buffers_in_passes(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated in torch: use `forward_sync_buffers`.", FutureWarning, stacklevel=3
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return True if broadcast_buffers is None else broadcast_buffers


def _index(device: Any) -> int:
    return device if isinstance(device, int) else int(torch.device(device).index or 0)
