"""Below the public surface of torch's ``DistributedDataParallel``: what torch itself and the frameworks use there.

Members that are neither here nor in ddp.py are torch's own. They are inherited, and work on the attributes that are set
here. docs/drop-in.md has a row for each.
"""

# mypy: disallow-untyped-calls=False
# (torch annotates none of the methods that are inherited here)

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .attach import attach
from .comm_hooks import Hook
from .ddp_handover import hand_over
from .ddp_join import ShadowHook, announce_in_forward, announces_in_forward
from .ddp_substitutes import Called, Substitute, Substitutes, lower, whole
from .engine import compiled_inside
from .errors import StrettoError, UnsupportedError
from .handle import Synchronizer
from .in_backward import StepInBackward
from .wording import MIB, name_list


class TorchSurface(TorchDDP):
    """The private methods of torch's class, rewritten where torch's own would talk to torch's reducer."""

    _synchronizer: Synchronizer
    _attach_options: dict[str, Any]
    logger: Any
    reducer: Any
    _armed: Any
    process_group: Any
    mixed_precision: Any
    _forward_thread: int
    parameters_to_ignore: set[str]
    _substitutes: Substitutes | None
    _weighs_for_join: bool = False
    """Whether the handle has been attached again, for the mean over ranks that have batches."""

    def __init__(self) -> None:
        """Only for subclasses that skip ours by ``super(DistributedDataParallel, self)``: torch's wants a module."""
        torch.nn.Module.__init__(self)

    def _attach(self, *, init_sync: bool, **other: Any) -> None:
        """(Again) put hooks on the module's parameters. What was asked of the handle before holds for the new one."""
        before: Synchronizer | None = self.__dict__.get("_synchronizer")
        options = {**self._attach_options, **other}
        group = None if options["process_groups"] else self.process_group
        if before is not None:
            options["buffers"], kept = before.buffers, before.kept_here()
            before.detach()
        has_ended = hand_over(self) or before is not None
        try:
            made = attach(self.module, process_group=group, init_sync=init_sync, **options)
        except StrettoError as error:
            told = "\nWhat averaged the gradients here before has ended: wrap the module again." * has_ended
            error.args = (f"{error}{told}",)
            raise
        self._synchronizer = made if before is None else before.renew(made, kept)  # a program may have kept it
        self._armed.attached_anew()
        self._synchronizer.join(self.__dict__.get("_join_uneven"))

    @property
    def synchronizer(self) -> Synchronizer:
        """stretto's handle: plan, statistics, ``describe()``, observers."""
        return self._synchronizer

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init()
        in_forward = announces_in_forward(self)
        if (in_forward or "buffer_hook" in self.__dict__) and self._synchronizing_forward():
            is_new = not in_forward or announce_in_forward(self)
            if is_new and "buffer_hook" in self.__dict__ and self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
        if self.device_ids:
            target = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, target, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            return _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    @functools.partial(compiled_inside, inlined=False)
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._substitutes is not None:
            return self._substitutes.run(self.module, self._run_active, *inputs, **kwargs)
        return self._run_active(*inputs, **kwargs)

    @functools.partial(compiled_inside, inlined=False)
    def _run_active(self, *inputs: Any, **kwargs: Any) -> Any:
        here = self.__dict__["_forward_thread"] = threading.get_ident()
        before, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self  # whose buckets torch's compiler asks
        if isinstance(before, TorchSurface) and before._forward_thread != here:
            before = None  # its forward may end before this one does, and it would stay for good
        try:
            return self.module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = before

    def _substitute(self) -> None:
        """See ddp_substitutes.py. Before anything is attached: parameters may be replaced here."""
        config, mesh = self.mixed_precision, self.__dict__.get("device_mesh")
        chain: list[Substitute] = []
        if mesh is not None and mesh._get_root_mesh() != mesh:
            chain.append(whole(self.module))
            Called(self.module, Substitutes(chain.copy()))
        if config is not None:
            chain.insert(0, lower(self.module, config, self.parameters_to_ignore))
        self._substitutes = Substitutes(chain) if chain else None

    def _post_forward(self, output: Any) -> Any:
        if "buffer_hook" in self.__dict__ and self._synchronizing_forward() and self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        return output

    def _synchronizing_forward(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _setup_in_backward_optimizers(self) -> None:
        """Optimizers of ``_apply_optimizer_in_backward`` step when their bucket has been reduced, not before."""
        stepping = [p for p in self._module_parameters if hasattr(p, "_in_backward_optimizers")]
        if not stepping or self._synchronizer.world_size == 1:
            return
        handles = dist.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map  # type: ignore[attr-defined]
        for parameter in stepping:
            for handle in handles.get(parameter, []):
                handle.remove()
        rows = self._synchronizer.sparse_parameters.values()
        hook = StepInBackward(stepping, [p for p in rows if hasattr(p, "_in_backward_optimizers")])
        self.register_comm_hook(self.process_group, hook)
        self._synchronizer.observe(hook)

    # Buffers

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Buffers by name, as they are now, without those that are to be ignored."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        """Buffers as they are now, without those that are to be ignored."""
        return [*self.named_module_buffers.values()]

    def _assign_modules_buffers(self) -> None:
        """Nothing to do: buffers are looked up each time."""

    def _register_buffer_comm_hook(self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None) -> None:
        """As torch's. The hook runs around forward, and futures that it returns are waited for at once."""
        where = () if comm_hook_location is None else (comm_hook_location,)
        super()._register_buffer_comm_hook(state, hook, *where)
        self._synchronizer.buffers = "none"

    # Hooks

    @property
    def _comm_hooks(self) -> list[tuple[Hook, Any]]:  # type: ignore[override]
        return self._synchronizer.comm_hooks

    def _check_comm_hook(self, hook: Hook) -> None:
        """Done by ``register_comm_hook``."""

    def _register_fused_optim(self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """As torch's, which steps parameters in buckets; those with sparse gradients are in none."""
        rows = self._synchronizer.sparse_parameters
        asked = {id(parameter) for parameter in (rows.values() if optim_params is None else optim_params)}
        if missed := [name for name, parameter in rows.items() if id(parameter) in asked]:
            raise UnsupportedError(
                f"DistributedDataParallel._register_fused_optim would not step {name_list(missed)}: their gradients "
                "are sparse and lie in no bucket.\n"
                "Leave them out, optim_params=[...], and step them with an optimizer of their own."
            )
        super()._register_fused_optim(optim, *args, optim_params=optim_params, **kwargs)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's C++ hooks have twins in Python, which compute the same."""
        kinds: dict[Any, Hook] = {
            dist.BuiltinCommHookType.ALLREDUCE: allreduce_hook,  # type: ignore[attr-defined]
            dist.BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,  # type: ignore[attr-defined]
        }
        self.register_comm_hook(self.process_group, kinds[comm_hook_type])
        self.logger.comm_hook = str(comm_hook_type)

    # State

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        """Whether bucket indices are final where a comm hook is registered: the order is learnt in the first pass."""
        return self._synchronizer.statistics.passes > 0

    def _set_static_graph(self) -> None:
        """Remembered, and nothing else: no graph needs it, at any time."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record one pass in so many, as for ``synchronizer.report()``, after the first few."""
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        if self._synchronizer.sampler is not None:
            self._synchronizer.sampler.every = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """torch's keys with stretto's values; times, in nanoseconds, of the passes that were recorded."""
        return self.logger.data()  # type: ignore[no-any-return]

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Of no effect: outputs are passed on as they are."""

    def _remove_autograd_hooks(self) -> None:
        """Stop reducing."""
        self._synchronizer.detach()

    def _check_reducer_finalized(self) -> None:
        """Always true when backward has returned."""

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with other ranks. The plan starts again; nothing is sent. A rank outside the group trains alone."""
        advice = "Call its unshard() before, and shard what it returns once more afterwards."
        self._synchronizer.refuse_anew("_update_process_group", advice)
        if dist.distributed_c10d._rank_not_in_group(new_process_group):
            self._synchronizer.detach()
            return
        self.process_group = new_process_group
        self._attach_options["process_groups"] = ()
        hooks = self._comm_hooks
        hooks[:] = [(hook, new_process_group if isinstance(hook, StepInBackward) else s) for hook, s in hooks]
        self._attach(init_sync=False)

    def _check_default_group(self) -> None:
        if self.process_group is not None:
            super()._check_default_group()

    # Join: ranks that run out of batches early

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """As torch's: ranks that run out of batches take part in the others' passes. If it is off, nothing changes.

        Collective, on entry and exit. Make a new one for each ``with``.

        Example::

            with model.join():
                for inputs, targets in loader:
                    loss_function(model(inputs), targets).backward()
        """
        return super().join(divide_by_initial_world_size or not enable, enable, throw_on_early_termination)  # type: ignore[no-any-return]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """As torch's, for ``Join`` and ``join()``: ranks without batches take part in the passes of the others.

        With ``divide_by_initial_world_size=False`` the mean is over the ranks that still have batches. A comm hook does
        its own division, as in torch.
        """
        self.logger.joins = True
        for one in self._synchronizer.sharded:
            one.joins_over = self.process_group
            one.leave()  # an exception may have left an earlier Join
        effective = not kwargs.get("divide_by_initial_world_size", True)
        if effective and not self._comm_hooks and not self._attach_options["weighted"]:
            advice = "Wrap with weighted=True before the optimizer is sharded: then the handle stays."
            self._synchronizer.refuse_anew("join(divide_by_initial_world_size=False)", advice)
            self._attach(init_sync=False, weighted=True, **self._sizes())  # a rank without batches weighs nothing
            self._synchronizer.weight = 1.0  # nobody has forgotten to set it
            self._weighs_for_join = True
        else:
            self._back_to_options()
        return ShadowHook(self, self._back_to_options)

    def _back_to_options(self) -> None:
        """If ``join_hook`` has attached with other options, attach again with the program's. Collective."""
        if self._weighs_for_join:
            self._weighs_for_join = False
            self._attach(init_sync=False, **self._sizes())

    def _sizes(self) -> dict[str, float]:
        """What was found to suit the link, which is not timed again."""
        plan = self._synchronizer.plan
        return {"bucket_cap_mb": plan.cap_bytes / MIB, "last_bucket_cap_mb": plan.last_cap_bytes / MIB}

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """One pass of the other ranks, to which this one has nothing to give."""
        self._synchronizer.shadow_pass()


REFUSED: dict[str, str] = dict.fromkeys(
    ("_root_copy_hook", "_module_wait_for_copy_hook", "_fire_reducer_autograd_hook"),
    "mixed_precision works without it: what forward uses is part of the graph",
) | {
    "_set_sparse_metadata": "sparse gradients are reduced without it",
    "_ddp_init_helper": "it builds torch's reducer; wrap the module again instead",
    "_register_accum_grad_hook": "it serves torch's Python reducer; stretto's hooks are on the parameters already",
    "_register_delay_all_reduce_hook": "delayed parameters are reduced at the end of each backward",
    "_delayed_all_reduce_hook": "delayed parameters are reduced at the end of each backward",
    "_check_global_requires_backward_grad_sync": "joined ranks need not hear of passes without synchronisation",
    "_match_unused_params_allreduce": "which ranks had which gradients travels with the buckets",
}
"""Private methods of torch's class that have no counterpart, and why."""


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(f"DistributedDataParallel.{name} is not supported by stretto: {reason}.")

    refuse.__name__ = name
    return refuse


for _name, _reason in REFUSED.items():
    setattr(TorchSurface, _name, _refusal(_name, _reason))
