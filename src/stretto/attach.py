"""``attach``: the checks, the agreement between ranks, rank 0's values to all, and the first plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .agreement import Statement, agree, state_model
from .broadcast import broadcast_coalesced
from .errors import AlreadyAttachedError, SetupError, StrettoError
from .handle import Synchronizer
from .options import Buffers, Options, dtype_patterns, names_of, names_of_sparse, patterns, refuse_arguments
from .peers import Peers
from .reducer import Reducer, reducer_of
from .scaling import Reduce
from .selection import named, refuse_cast_gradients, stand_in, trained, wrapping
from .sizing import plan_for, suit_link
from .transport import Transport, TransportName, choose
from .transport.choose import carrier_of, refuse_other_kinds, refuse_unknown_name, warn_of_group_of_one, warn_of_tasks
from .watch import INSTEAD_OF_TORCHS, taken_by_torch, torch_reduces
from .wording import name_list

log = logging.getLogger("stretto")


def attach(
    module: torch.nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    process_groups: Sequence[dist.ProcessGroup] = (),
    transport: Transport | TransportName | None = "auto",
    bucket_cap_mb: float | None = None,
    last_bucket_cap_mb: float | None = None,
    buffers: Buffers = "rank0",
    init_sync: bool = True,
    ignore: Iterable[str] = (),
    reduce: Reduce = "mean",
    weighted: bool = False,
    predivide_factor: float | None = None,
    reduce_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    delay: bool = False,
    launch_after: Iterable[str | torch.nn.Parameter] = (),
    check_every: int | None = None,
    sparse: Iterable[str] = (),
    beside: Iterable[Synchronizer] = (),
    **unknown: NoReturn,
) -> Synchronizer:
    """Average the gradients of ``module`` over ranks whenever backward reaches them. Collective.

    The module is not wrapped: hooks sit on its parameters, so any method may run forward, names in ``state_dict`` stay,
    and evaluation on one rank alone just works. All ranks start from rank 0's parameters and buffers.

    Parts of the module may be attached already: their handles keep their parameters and their own ``no_sync`` (and
    ``buffers``, unless ``"none"``), and this handle takes the rest. Gradients of the rest are sent after backward,
    unless they go through shared memory or another process group. Passes of such handles begin and end together.
    Detach the outer one first.
    The module may change afterwards, in the same way on all ranks: parameters that are frozen, unfrozen, added,
    replaced or converted are picked up in the next pass that reaches them; new ones take rank 0's values at its end.

    Args:
        module: the same model on every rank; at least one parameter must require grad.
        process_group: by default the default group. Without any group, or in a world of one, nothing is done, and the
            handle works all the same.
        process_groups: several groups of the same ranks. Buckets take turns among them (VLDB 2020, section 5.4), so
            that several are under way at once on backends that handle one message after the other.
        transport: ``"auto"`` or None uses shared memory if all ranks run on this host, shared memory and the network
            with several ranks on each of several hosts, else the process group. ``"shared_memory"`` or
            ``"process_group"`` insists on one. Or pass an object that carries the buckets instead; whoever made it
            closes it. Tensors on accelerators, and several ``process_groups``, always use the groups.
        bucket_cap_mb: the largest size of a bucket in MiB; a parameter of that size or more has a bucket of its own.
            The default suits the transport: 2.1 in shared memory, 25 for NCCL; over Gloo and between hosts 0.27 to 34,
            as measured with a few messages when ranks attach (4 if the model is no larger than 1 MiB, or without
            ``init_sync``). Set it if runs on more than two ranks must repeat to the bit, or if a comm hook keeps state
            per bucket.
        last_bucket_cap_mb: the same for the last bucket, which backward cannot hide; by default a quarter of
            ``bucket_cap_mb`` if that is given, else what suits the transport (0.25 in shared memory).
        buffers: at the end of every pass, with ``"rank0"`` buffers (BatchNorm's statistics) take rank 0's values; with
            ``"mean"`` floating ones (of more than 8 bits) become their mean and others take rank 0's values; with
            ``"none"`` each rank keeps its own. On the CPU, buffers of which none has changed for some passes (masks)
            are not sent until one does.
        init_sync: False if you know that the ranks hold the same values: then nothing is compared or sent, except what
            the choice of ``transport`` needs, unless that is ``"process_group"``.
        ignore: names or shell patterns (``"head.*"``) of parameters and buffers to leave alone: they are not averaged,
            do not get rank 0's values, and are not compared.
        reduce: ``"mean"`` or ``"sum"`` over ranks. What ``.grad`` already held before a pass (no ``zero_grad``, or set
            by hand) is averaged over ranks in both modes, never summed, so values equal on all ranks stay as they are.
        weighted: the mean is weighted by what each rank sets as ``sync.weight`` before backward (samples, tokens).
            Gradients travel multiplied by it: with float16 ones, give ``reduce_dtype=torch.float32`` for large weights.
        predivide_factor: divide by this before the sum and by the rest after it (Apex's ``gradient_predivide_factor``).
        reduce_dtype: gradients travel and are summed in this dtype, for example ``torch.float32`` for bfloat16 ones; a
            mapping gives one by pattern of parameter names. ``.grad`` keeps the parameter's dtype. With one for all,
            complex parameters travel in the complex dtype of that precision.
        delay: send everything after backward, in one flat message per dtype unless ``bucket_cap_mb`` is given (Apex's
            ``delay_allreduce``). It is the baseline to measure overlap against.
        launch_after: parameters, or their names, whose gradient closes the buckets that are being filled (Apex's
            trigger parameters).
        check_every: at the end of every n-th pass compare all parameters and buffers over the ranks by a cheap
            fingerprint, as the handle's ``check()`` does at any time. None: only spot checks, and a difference gives
            one warning. Unless it is 0, ranks also compare, once, parameters that an optimizer steps and no handle
            averages, and a few gradients of the first passes, to see whether all train on the same batches.
        sparse: names or shell patterns of parameters whose gradient is sparse although no ``nn.Embedding(sparse=True)``
            or ``nn.EmbeddingBag(sparse=True)`` owns them. Sparse gradients travel by rows when backward has ended, and
            ``.grad`` is their mean, sparse and coalesced; if it is dense on one rank, it becomes dense on all.
        beside: handles of other models that one backward may reach together with this one (actor and critic). Passes
            of all begin and end together, as with parts of a module: also of those that a backward does not reach, so
            what these hold of a ``no_sync`` is averaged too. On one process group this only saves a check of
            which models a backward reaches; on different groups it holds from the first pass on, not only once the
            models have met in one backward.

    Returns:
        The handle. Keep it for ``no_sync``, ``plan``, ``detach``; gradients are reduced even if you drop it. A copy of
        a module that holds the handle refers to the same one, and is not attached. It cannot be pickled.

    Raises:
        SetupError: no parameter requires grad; parameters are lazy or on the meta device; ``WORLD_SIZE`` is set and no
            group is initialised; ``"shared_memory"`` is not available; an argument has a wrong type, or names what the
            module does not have; torch's DistributedDataParallel already holds these parameters.
        AlreadyAttachedError: all parameters are attached already.
        ModelMismatchError: the ranks differ (all name the same difference), or another cannot attach. None is attached.
        UnsupportedError: there is no such argument, or it does not take such a value.
        CommunicationError: a rank does not call ``attach``; it says where all ranks are. ``PeerError`` if that rank has
            failed, ended or died. ``backward`` raises the same later on.

    Example::

        sync = stretto.attach(model)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
    """
    transport = "auto" if transport is None else transport
    if not isinstance(transport, str):  # names are compared first
        refuse_other_kinds(transport, "attach")
    others = list[Any](beside) if isinstance(beside, Iterable) else [beside]

    def ask() -> Options:  # where what is wrong on one rank is told to the others
        if strange := [type(one).__name__ for one in others if not isinstance(one, Synchronizer)]:
            raise SetupError(f"attach: beside= takes handles, as returned by attach(), not {strange[0]}")
        return Options(
            bucket_cap_mb=bucket_cap_mb,
            last_bucket_cap_mb=last_bucket_cap_mb,
            buffers=buffers,
            reduce=reduce,
            weighted=weighted,
            predivide_factor=predivide_factor,
            delay=delay,
            check_every=check_every,
            ignore=patterns("ignore", ignore),
            sparse=patterns("sparse", sparse),
            reduce_dtype=dtype_patterns(reduce_dtype),
            launch_after=names_of(module, launch_after),
        )

    base = carrier_of(transport, process_group, process_groups)
    if base is None or base.world_size == 1:
        _refuse_kinds(module, init_sync, unknown)
        if isinstance(transport, str):
            refuse_unknown_name(transport, "attach")
        return _attach_alone(module, base, ask(), init_sync=init_sync, closes=isinstance(transport, str))
    peers = Peers(base)
    try:
        peers.open()
        _refuse_kinds(module, init_sync, unknown)
        is_given = bool(process_groups) and transport == "auto"
        if isinstance(transport, str) and not (is_given or (transport == "process_group" and not init_sync)):
            base = _choose(module, base, transport, peers)
        return _attach(module, base, peers, ask, others, init_sync=init_sync, closes=isinstance(transport, str))
    except BaseException as error:
        peers.tell_failed("attach", error, error.__traceback__, leaves=True)
        peers.close(failed=True)
        raise


def _choose(module: torch.nn.Module, base: Transport, asked: TransportName, peers: Peers) -> Transport:
    """What carries the buckets. Collective, before anything that could fail on one rank alone."""
    on_host = any(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))
    chosen = choose(base, asked, on_host=on_host, gather=peers.gather)
    peers.use(chosen)
    return chosen


@torch.inference_mode(False)  # tensors made here are written to in every backward
def _attach_alone(
    module: torch.nn.Module, base: Transport | None, options: Options, *, init_sync: bool, closes: bool
) -> Synchronizer:
    """One rank, or none of a group: only what would fail with several fails here."""
    warn_of_tasks() if base is None else warn_of_group_of_one(base)
    _refuse(module, options, sends=init_sync)
    dense, rows = _split(module, options)
    _warn_of_dtypes_for_none(module, options)
    _inside(module, options)  # tells of them
    return Synchronizer(module, dense, plan_for(dense, options, base), base, options, rows, closes=closes)


@torch.inference_mode(False)
def _attach(
    module: torch.nn.Module,
    carrier: Transport,
    peers: Peers,
    ask: Callable[[], Options],
    beside: Sequence[Synchronizer],
    *,
    init_sync: bool,
    closes: bool,
) -> Synchronizer:
    """Collective. A rank that cannot attach takes part all the same, so that the others learn of it."""
    try:
        options = ask()
        _refuse(module, options, sends=init_sync)
        dense, rows = _split(module, options)
        plan = plan_for(dense, options, carrier)
    except StrettoError as problem:
        with contextlib.suppress(StrettoError):
            agree(Statement((), str(problem)), carrier.rank, peers.gather)
        problem.args = (f"rank {carrier.rank}: {problem}",)
        raise
    if init_sync:
        parameters, tensors = named(module, options, "parameters"), named(module, options, "buffers")
        facts = vars(options) | {
            "number of handles beside": len(beside),
            "attached already": [name for name, p in trained(module, options).items() if reducer_of(p)],
            "sparse parameters": [*rows],
            "plan": plan.hash,
        }
        agree(state_model(parameters, tensors, facts), carrier.rank, peers.gather)
        broadcast_coalesced([*parameters.values(), *tensors.values()], carrier, peers.wait_for)
        suited = suit_link(options, plan, carrier, peers.wait_for, peers.gather)
        if suited != options:
            options, plan = suited, plan_for(dense, suited, carrier)
    inside = _inside(module, options)
    if carrier.rank == 0:
        _warn_of_dtypes_for_none(module, options)
    peers.seat.attached = True
    return Synchronizer(
        module, dense, plan, carrier, options, rows, closes=closes, peers=peers, inside=inside, beside=beside
    )


def _refuse_kinds(module: object, init_sync: object, unknown: Collection[str]) -> None:
    """Raise where nothing can be asked of what was given."""
    refuse_arguments(attach, unknown)
    if not isinstance(module, torch.nn.Module):
        given = f"a torch.nn.Module, not {type(module).__name__}"
        raise SetupError(f"attach: the first argument must be {given}.\nGive it the model: stretto.attach(model)")
    if isinstance(init_sync, str):  # "no" would be taken for true
        raise SetupError(f"attach: init_sync={init_sync!r} must be True or False")


def _refuse(module: torch.nn.Module, options: Options, *, sends: bool) -> None:
    """Raise what keeps this module from being attached on this rank, if anything. ``sends``: rank 0's values to all."""
    scripts = [(name, one) for name, one in module.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    scripted = [name or "the module" for name, one in scripts if next(one.parameters(), None) is not None]
    if scripted:  # its tables are views that torch makes at each access: changes could not be followed
        raise SetupError(
            f"attach: {name_list(scripted)} went through torch.jit.script or torch.jit.trace.\n"
            "Attach the original module; to speed it up, use torch.compile(module)."
        )
    to_reduce = trained(module, options)
    mine = {id(one) for one in to_reduce.values()}
    wrappers = [(name, one) for name, one in module.named_modules() if torch_reduces(one)]
    if doubled := [name or "the module" for name, one in wrappers if mine & taken_by_torch(one, one.module)]:
        raise SetupError(
            f"attach: {name_list(doubled)} is wrapped in torch's DistributedDataParallel: two would average the same "
            f"gradients, and some would be lost.\n{INSTEAD_OF_TORCHS}"
        )
    everything = dict(module.named_parameters()) | dict(module.named_buffers())
    lazy = [name for name, tensor in everything.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise SetupError(
            f"attach: {name_list(lazy)} are not initialised yet (lazy modules).\n"
            "Run one forward with an example batch before stretto.attach(model)."
        )
    _refuse_valueless(module, options, sends=sends)
    if vain := _in_vain(options.ignore, everything):
        raise SetupError(
            f"attach: ignore= names {name_list(vain)}, which the module does not have.\n"
            "Give names, or patterns of names, of module.named_parameters() or module.named_buffers()."
        )
    refuse_cast_gradients(to_reduce)
    if not to_reduce:
        raise SetupError(
            "attach: the module has no parameter that requires a gradient, so there is nothing to reduce.\n"
            "Attach the module that is trained, and unfreeze (requires_grad_(True)) before attaching."
        )
    taken = [name for name, parameter in to_reduce.items() if reducer_of(parameter)]
    if len(taken) == len(to_reduce):
        raise AlreadyAttachedError(
            f"attach: {name_list(taken)} already attached, here or as part of another module.\n"
            "Call detach() on the first handle, or attach only once."
        )


def _refuse_valueless(module: torch.nn.Module, options: Options, *, sends: bool) -> None:
    """Raise where tensors that are to be sent have no values of their own."""
    parameters, tensors = named(module, options, "parameters"), named(module, options, "buffers")
    looked_at = parameters | (tensors if options.buffers != "none" else {})
    if empty := [name for name, tensor in looked_at.items() if tensor.is_meta]:
        raise SetupError(
            f"attach: {name_list(empty)} are on the meta device, which holds no values.\n"
            "Give them values before stretto.attach(model), for example with model.to_empty(device=...) and an "
            "initialisation, or leave them out with ignore=."
        )
    if wrapped := wrapping(looked_at | (tensors if sends else {})):
        raise SetupError(
            f"attach: {wrapped} have their values in other tensors, which cannot be averaged or sent.\n"
            "Leave them out with ignore=, and make sure that all ranks hold the same values."
        )


def _warn_of_dtypes_for_none(module: torch.nn.Module, options: Options) -> None:
    """No error: they may be meant for parameters that come later."""
    if vain := _in_vain(dict(options.reduce_dtype), [name for name, _ in module.named_parameters()]):
        log.warning(
            "attach: reduce_dtype= names %s, which no parameter has so far: see module.named_parameters()",
            name_list(vain),
        )


def _in_vain(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    return [one for one in patterns if one != "*" and not any(fnmatchcase(name, one) for name in names)]


def _split(
    module: torch.nn.Module, options: Options
) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.nn.Parameter]]:
    """The trained parameters that lie in the plan, and those whose gradients are sparse."""
    mine = {name: p for name, p in trained(module, options).items() if reducer_of(p) is None}
    wanted = names_of_sparse(module, options.sparse)
    rows = {name: parameter for name, parameter in mine.items() if name in wanted}
    dense = {name: parameter for name, parameter in mine.items() if name not in wanted}
    return dense or stand_in(rows), rows


def _inside(module: torch.nn.Module, options: Options) -> list[Reducer]:
    """The reducers that have parameters of the module already."""
    found: dict[Reducer, list[str]] = {}
    for name, parameter in trained(module, options).items():
        if (reducer := reducer_of(parameter)) is not None:
            found.setdefault(reducer, []).append(name)
    for reducer, names in found.items():
        over = reducer.transport.name
        log.info("attach: %d parameters (%s) are left to their handle over %s", len(names), name_list(names), over)
    return [*found]
