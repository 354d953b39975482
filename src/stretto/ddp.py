"""The drop-in: torch's ``DistributedDataParallel`` by signature and by ``isinstance``, with stretto's reducer inside.

It is a thin subclass, so accelerate, Lightning, torch's checkpointing and its compiler, which all test ``isinstance``,
accept it. torch's own constructor never runs and torch's C++ reducer is never built. Forward is like torch's; the steps
of our own only move inputs. Gradients are reduced whichever method ran forward, and buffers travel when backward ends.
What frameworks use below the public surface is in ddp_compat.py, and what they find at ``.reducer`` and ``.logger`` is
in ddp_faces.py.
"""

# mypy: disallow-untyped-calls=False
# (torch annotates none of the methods that are inherited here)

from __future__ import annotations

import contextlib
import functools
import glob
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import _BucketCapacityConfig

from .comm_hooks import Hook, check_hook
from .ddp_compat import TorchSurface
from .ddp_faces import Armed, Logger, ReducerFace
from .ddp_substitutes import config_of
from .engine import compiled_inside
from .errors import SetupError
from .options import Buffers, listed, patterns, positive, refuse_arguments
from .scaling import Reduce
from .transport import TransportName, as_groups


class DistributedDataParallel(TorchSurface):
    """torch's ``DistributedDataParallel``, argument for argument. Collective.

    ``synchronizer`` is the handle that :func:`stretto.attach` would return: ``model.synchronizer.report()``.

    What differs:

    - ``find_unused_parameters``, ``static_graph``, ``gradient_as_bucket_view``, ``batched_grad_copy``,
      ``skip_all_reduce_unused_params`` and ``delay_all_reduce_named_params`` are accepted and change nothing: any graph
      is right, and ``.grad`` lies in its bucket.
    - ``no_sync`` counts where ``backward`` runs; what only a forward inside has produced is not reduced either.
    - Forward never communicates (except for a buffer hook, and where ``join()`` is to throw): ``forward_sync_buffers``
      (``broadcast_buffers``) sends rank 0's buffers at the end of backward. Evaluation on one rank alone works.
    - Hooks are on parameters, so a backward through ``ddp.module(x)`` is reduced too, where torch would not reduce it:
      run it inside ``no_sync()`` if this rank needs gradients of its own.
    - Without a process group, or in a world of one, it is a plain wrapper.

    Args:
        module, device_ids, output_device, dim, broadcast_buffers, init_sync, process_group, bucket_cap_mb, device_mesh,
        bucket_cap_mb_list, forward_sync_buffers: as in torch; the largest of a list of caps counts.
        mixed_precision: as in torch; outside of forward, and in ``state_dict``, parameters are never in low precision.
        last_bucket_cap_mb, buffers, ignore, reduce, weighted, predivide_factor, reduce_dtype, delay, launch_after,
            process_groups, check_every, sparse, transport (its name): as in :func:`stretto.attach`.

    Raises:
        UnsupportedError: an argument that stretto does not support.
        SetupError: as in :func:`stretto.attach`; it is a ``ValueError`` and a ``RuntimeError``, as torch raises both.
        AlreadyAttachedError, ModelMismatchError, CommunicationError: as in :func:`stretto.attach`.

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
        *,
        last_bucket_cap_mb: float | None = None,
        buffers: Buffers | None = None,
        ignore: Iterable[str] = (),
        reduce: Reduce = "mean",
        weighted: bool = False,
        predivide_factor: float | None = None,
        reduce_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        delay: bool = False,
        launch_after: Iterable[str | torch.nn.Parameter] = (),
        process_groups: Sequence[dist.ProcessGroup] = (),
        check_every: int | None = None,
        sparse: Iterable[str] = (),
        transport: TransportName = "auto",
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments(DistributedDataParallel, unknown)
        _refuse_half(delay_all_reduce_named_params, param_to_hook_all_reduce)
        _warn_of_deprecated(broadcast_buffers, check_reduction)
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        self.device_mesh = device_mesh
        groups = as_groups(process_groups)
        self.process_group = _group_of(process_group, groups, device_mesh)  # None: a world of one
        left_alone = patterns("ignore", ignore)
        self._hold(module, mixed_precision, left_alone)
        self._set_devices(device_ids, output_device)
        self.dim = dim
        unsent = self._set_buffers(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self._delay_all_reduce_params = [p for _, p in delay_all_reduce_named_params or ()]
        self._stand_for_torchs()
        self._attach_options: dict[str, Any] = {
            "bucket_cap_mb": self._set_bucket_caps(bucket_cap_mb, bucket_cap_mb_list),
            "last_bucket_cap_mb": last_bucket_cap_mb,
            "buffers": buffers or ("rank0" if self.forward_sync_buffers else "none"),
            "ignore": {*left_alone, *map(glob.escape, self.parameters_to_ignore.intersection(self._names()))},
            "reduce": reduce,
            "weighted": weighted,
            "predivide_factor": predivide_factor,
            "reduce_dtype": self._travels_as() if reduce_dtype is None else reduce_dtype,
            "delay": delay,
            "launch_after": listed(launch_after),
            "process_groups": groups,
            "check_every": check_every,
            "sparse": listed(sparse),
            "transport": transport,
        }
        self._attach(init_sync=init_sync, ignore=self._attach_options["ignore"] | unsent)
        # The compiler cuts graphs by this, the first after 1 MiB, and wants it to be no less.
        smallest: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        self.bucket_bytes_cap = max(int(self._synchronizer.plan.cap_bytes), smallest)

    def _hold(self, module: torch.nn.Module, mixed_precision: Any, ignore: Iterable[str]) -> None:
        """The module, and which of its parameters are reduced."""
        self.logger, self.reducer, self._armed = Logger(self), ReducerFace(self), Armed(self)
        self.module = module
        by_pattern = {name for name in self._names() if any(fnmatchcase(name, pattern) for pattern in ignore)}
        self.parameters_to_ignore = by_pattern.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.mixed_precision = config_of(mixed_precision)
        self._substitute()

    def _names(self) -> list[str]:
        return [name for kind in (self.module.named_parameters, self.module.named_buffers) for name, _ in kind()]

    @property
    def _module_parameters(self) -> list[torch.nn.Parameter]:  # type: ignore[override]  # a list of torch's class
        """Those that the module has now: a list would keep parameters that have been replaced, which tell by going."""
        return [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _travels_as(self) -> torch.dtype | None:
        """By torch's rule gradients travel in the dtype in which they were computed, where no other is asked for."""
        config = self.mixed_precision
        return None if config is None else config.reduce_dtype or config.param_dtype

    def _set_buffers(self, former: bool | None, flag: bool | None) -> set[str]:
        """By torch's flags, old and new; returns patterns of those not even sent at construction."""
        asked = former is None or bool(former)  # 0 and NumPy's False are off as well
        self.forward_sync_buffers = asked if flag is None else flag
        return set() if asked or flag is not None else {glob.escape(name) for name, _ in self.module.named_buffers()}

    def _set_bucket_caps(self, cap_mb: float | None, caps_mb: list[int] | None) -> float | None:
        """torch's attributes, by torch's rules; returns the cap for ``attach``, in MiB, if one was asked for."""
        cap: Any = cap_mb  # a fraction works as well; torch would multiply a text
        if isinstance(cap, str):
            positive("bucket_cap_mb", cap, or_none=True)
        self._bucket_config = _BucketCapacityConfig.create(cap, caps_mb, use_python_reducer=False)
        self.bucket_bytes_cap_list = [*self._bucket_config.per_bucket_bytes_caps]
        self.bucket_bytes_cap_default = cap_mb is None and not caps_mb
        return None if self.bucket_bytes_cap_default else self._bucket_config.bucket_bytes_cap / 2**20

    def _stand_for_torchs(self) -> None:
        """What torch's forward, its compiler and frameworks read, and nothing here does."""
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._use_python_reducer = False
        self._lazy_init_ran = False
        self._delay_all_reduce_all_params = False

    def _set_devices(self, device_ids: list[Any] | None, output_device: Any) -> None:
        """torch's rules: one device id at most, and only for a module on one accelerator."""
        devices = {parameter.device for parameter in self._module_parameters}
        if not devices:
            raise SetupError(
                "DistributedDataParallel is not needed: the module has no parameter to reduce.\n"
                "Wrap the module that is trained, and use this one as it is."
            )
        self.device = next(iter(self._module_parameters)).device
        self.device_type = self.device.type
        self.is_multi_device_module = len(devices) > 1
        if device_ids and len(device_ids) > 1:
            raise SetupError(
                f"device_ids can only be None or contain a single element, got {device_ids}.\n"
                "Start one process for each device."
            )
        if len({device.type for device in devices}) > 1:
            raise SetupError(
                f"the module's parameters must be on one type of device, but are on {sorted(map(str, devices))}.\n"
                "Call module.to(device) before wrapping it."
            )
        movable = not self.is_multi_device_module and self.device_type != "cpu"
        if not movable and (device_ids or output_device is not None):
            raise SetupError(
                f"device_ids={device_ids} and output_device={output_device} only make sense for a module on one "
                f"accelerator, but its parameters are on {sorted(map(str, devices))}: leave both out."
            )
        self.device_ids = [torch.device(self.device_type, _index(device_ids[0])).index] if device_ids else None
        first = self.device_ids[0] if self.device_ids else None
        self.output_device = output_device if output_device is not None else first

    # torch's public surface, as far as it is not inherited

    @functools.partial(compiled_inside, inlined=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As torch's, but for a note to the profiler where there is none, and for a context: 40 us, in each step."""
        self._armed.forward_begins()
        if torch.autograd.profiler._is_profiler_enabled:
            output = super().forward(*inputs, **kwargs)
        else:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._post_forward(self._run_ddp_forward(*inputs, **kwargs))
        self._armed.forward_ran()
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward reduces. ``no_sync`` clears it; wrappers set it by hand."""
        return bool(self._armed.value)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._armed.value = value

    @property
    def forward_sync_buffers(self) -> bool:
        """What was given, or set since; torch's class calls it ``broadcast_buffers`` as well."""
        return bool(self.__dict__["forward_sync_buffers"])

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.__dict__["forward_sync_buffers"] = value
        if "_synchronizer" in self.__dict__ and "buffer_hook" not in self.__dict__:
            asked = self._attach_options["buffers"]
            self._synchronizer.heed({*map(glob.escape, self.named_module_buffers)} if value else ())
            self._synchronizer.buffers = "none" if not value else "rank0" if asked == "none" else asked

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As :meth:`stretto.Synchronizer.no_sync`; and what ran forward inside is not reduced by a backward outside."""
        with self._armed.no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """As :meth:`stretto.Synchronizer.register_comm_hook`, with torch's checks of the hook's annotations."""
        problem = check_hook(hook)
        if problem is not None:
            self._log_and_throw(type(problem), str(problem))
        self._back_to_options()  # an exception may have left Join
        self._synchronizer.register_comm_hook(state, hook)

    def will_sync_module_buffers(self) -> bool:
        """Whether buffers will be made equal when the next backward ends."""
        hooked = "buffer_hook" in self.__dict__
        asked = self.forward_sync_buffers if hooked else self._synchronizer.buffers != "none"
        return asked and self.require_backward_grad_sync and bool(self.modules_buffers)

    # Pickling and copy.deepcopy: torch's rule is "the default group only", since a group itself cannot travel

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        here = {"process_group", "_synchronizer", "reducer", "logger", "_armed", "_substitutes"}
        out = here | {"_join_config", "_join_told", "_join_words", "_join_uneven", "_weighs_for_join"}
        options = {**self._attach_options, "buffers": self._synchronizer.buffers, "process_groups": ()}
        return {key: value for key, value in self.__dict__.items() if key not in out} | {"_attach_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)
        Joinable.__init__(self)
        self.process_group = _group_of(None, (), None)
        self.logger, self.reducer, self._armed = Logger(self), ReducerFace(self), Armed(self)
        self._substitute()
        # One rank alone may make a copy, to keep an average of the weights: nothing is asked of the others.
        self._attach(init_sync=False, transport="process_group")


def _group_of(
    process_group: dist.ProcessGroup | None, process_groups: Sequence[dist.ProcessGroup], device_mesh: Any
) -> dist.ProcessGroup | None:
    if process_groups:
        if process_group is not None:
            raise SetupError("Cannot specify both process_group and process_groups.\nLeave one of them out.")
        process_group = process_groups[0]
    if device_mesh is None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return process_group
    if process_group is not None:
        raise SetupError("Cannot specify both process_group and device_mesh arguments.\nLeave one of them out.")
    if device_mesh.ndim != 1:
        raise SetupError(
            f"Only 1D device mesh is supported, but got {device_mesh}.\nGive one of its dimensions' group."
        )
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def _index(device: Any) -> int:
    return device if isinstance(device, int) else int(torch.device(device).index or 0)


def _refuse_half(delayed: object, delayed_with: object) -> None:
    if (delayed is None) != (delayed_with is None):
        raise SetupError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.\n"
            "Leave both out: they have no effect here."
        )


def _warn_of_deprecated(broadcast_buffers: bool | None, check_reduction: bool) -> None:
    """The caller's caller is told."""
    if broadcast_buffers is not None:
        warnings.warn("`broadcast_buffers` is deprecated in torch: use `forward_sync_buffers`.", FutureWarning, 3)
    if check_reduction:
        warnings.warn("`check_reduction` is deprecated and changes nothing.", FutureWarning, stacklevel=3)
