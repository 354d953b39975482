"""The optimizer that ``shard`` returns."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ..engine import left_uncompiled
from ..errors import SetupError, StrettoError
from ..report import Footprint
from ..steps import stepped_by
from ..withheld import Withheld
from .elsewhere import Elsewhere, Guard
from .joining import Joins
from .members import refuse_memory, refuse_others, refuse_taken
from .other_steps import OtherSteps
from .rebuilt import bare_step
from .shares import Shares
from .turns import turns

if TYPE_CHECKING:
    from .checkpoint import ShardedState

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where torch keeps them."""
_GROUPS_ALONE = "stretto: the groups alone, as on rank"
"""A key of what ``state_dict()`` gives on ranks other than 0 where there is a state."""


class ShardedOptimizer(torch.optim.Optimizer, Joins):
    """An optimizer of which each rank keeps and steps only a share; see :func:`stretto.shard`.

    ``param_groups`` are those of the original optimizer: learning rates and other options can be changed there, also by
    schedulers. ``state`` is empty, because this rank's part of it does not cover whole parameters; ``state_dict()``
    assembles it.
    """

    _is_made = False  # so while torch's constructor runs, which adds each group to a list of its own

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        shares: Shares | None,
        beside: WeakSet[ShardedOptimizer],
        where: str,
    ) -> None:
        self.original = optimizer
        """The optimizer that was sharded. It keeps the groups, but no state."""
        self._of_torch: list[dict[str, Any]] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        Joins.__init__(self)
        self._elsewhere = None if shares is None else Elsewhere(optimizer, where, shares)
        for hooks in _HOOKS:  # hooks on either of the two must run
            setattr(self, hooks, getattr(optimizer, hooks))
        self._guard = None if shares is None else Guard(optimizer, where)
        is_shared = shares is not None and shares.layout.is_shared
        self._other_steps = OtherSteps(optimizer, shares, where) if shares is not None and is_shared else None
        self._module, self._shares, self._where = module, shares, where
        self.beside = beside
        """All sharded optimizers of one model, held weakly: otherwise they would live until a garbage collection."""
        beside.add(self)
        self.ended = False
        """Set by ``unshard()``, or when the handle ends."""
        self._handed_back = False
        """Set by ``unshard()``: the original has the state."""
        self._is_made, self._of_torch = True, []  # the list would keep parameters that leave the groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The original optimizer's; assigning to either of the two sets both."""
        return self.original.param_groups if self._is_made else self._of_torch

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._is_made:
            self.original.param_groups = value
        else:
            self._of_torch = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """With one rank, the optimizer's own. With several it is empty, and changing it raises ``UnsupportedError``."""
        return self.original.state if self._elsewhere is None else self._elsewhere

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        if not self._is_made:
            return
        if self._elsewhere is not None:
            self._elsewhere.refuse()
        self.original.state = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share; when this returns, the whole model is stepped. Collective.

        Args:
            closure: computes the gradients again and returns the loss, which is returned; called once.

        Raises:
            CommunicationError: a rank does not call ``step`` (``PeerError``: it has failed, ended or died); then the
                model may be stepped in part, and no step can follow.
            ModelMismatchError: the groups, or what was assigned to a parameter's ``data``, differ over ranks.
            SetupError: this optimizer has ended; or a parameter's size or dtype has changed, or two lie in one memory.
        """
        self.original._opt_called = True  # type: ignore[attr-defined]  # asked by schedulers that were built on it
        if self._shares is None and not self.ended:
            step = bare_step(self.original)
            return step() if closure is None else step(closure)  # some optimizers take none
        return self._step_share(closure)

    def _optimizer_step_code(self) -> None:
        """Here torch's profiler, when it follows Python, reads the state of each parameter: there is none."""
        if self._elsewhere is None:
            super()._optimizer_step_code()

    @left_uncompiled
    def _step_share(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.step_shares(self._usable())
        return loss

    @left_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With ``keep_grads=False``, gradients without values become None either way."""
        left = [] if self._shares is None else [one for one in self._shares.withholding.left if one.grad is not None]
        others = {id(one) for each in self.beside if each is not self for one in stepped_by(each)} if left else ()
        for parameter in (*stepped_by(self), *(one for one in left if id(one) not in others)):
            if isinstance(parameter.grad, Withheld):
                parameter.grad = None
        super().zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes only: maybe one of the original optimizer."""
        original = self.__dict__.get("original")
        if original is not None and name in turns(original):
            return functools.partial(self._turn, name)
        if name.startswith("__") or not hasattr(original, name):
            raise AttributeError(f"'ShardedOptimizer' object has no attribute {name!r}")
        kind = type(original).__name__
        raise AttributeError(
            f"A sharded {kind} has no {name}: each rank holds a share, which {kind} does not know about. step(), "
            "zero_grad(), add_param_group(), state_dict() and load_state_dict() are divided.\n"
            f"Use {kind} without stretto.shard(), or call unshard() first; .original is the one that was sharded."
        )

    @left_uncompiled
    def _turn(self, how: str) -> None:
        """``train()`` and ``eval()`` of an optimizer that has both (schedule-free ones). Collective, like ``step``."""
        if self._has_it_whole():
            getattr(self.original, how)()
            return
        if self.is_inside:
            raise SetupError(
                f"{self._where}: {how}() of a sharded optimizer inside Join, where ranks without batches only step.\n"
                "Call it before or after Join."
            )
        with torch.no_grad():
            self._usable().step(turn=how)

    def _own_use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._guard is None else self._guard.opened()

    def _has_it_whole(self) -> bool:
        """Whether the original has the state: alone, or since ``unshard()``."""
        return self._handed_back or (self._shares is None and not self.ended)

    def _usable(self) -> Shares:
        if self._shares is None or self._handed_back:
            raise SetupError(
                f"{self._where}: this sharded optimizer has ended: by detach() or unshard(), or for a later one.\n"
                "Call unshard() before, on all ranks, and use what it returns: it has the whole state."
            )
        self._shares.meetings.refuse_broken(self._where)
        return self._shares

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; add the same on all ranks.

        Raises:
            SetupError: a parameter is not reduced by the handle that the optimizer was sharded with, or belongs to
                another sharded optimizer.
        """
        if not self._is_made:  # these groups were checked before
            super().add_param_group(param_group)
            return
        before = len(self.original.param_groups)
        self.original.add_param_group(param_group)
        try:
            refuse_taken(self.original, self._module, self.beside - {self}, self._where)
            if self._shares is not None:
                self._shares.refuse_replaced()
                refuse_others(self.original, self._module, self._shares.reduced, self._where, before)
                refuse_memory(self.original, self._module, self._shares.layout.hosts, self._where)
        except BaseException:
            del self.original.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of the original optimizer. Collective.

        Whole on rank 0; on other ranks only the groups. Hooks are called with the original optimizer.

        Raises:
            SetupError: the handle was detached, and the state was lost with it.
        """
        if self._has_it_whole():
            return self.original.state_dict()
        shares = self._usable()
        keep, marks = shares.rank == 0, dict[str, int]()
        try:
            with shares.peers.in_call():
                for parameter, state in shares.states():
                    if not keep:
                        marks[_GROUPS_ALONE] = shares.rank
                    else:
                        self.original.state[parameter] = state
            shares.inner.hand_back(self.original)  # it may save what it counts in attributes
            with self._own_use():
                made = self.original.state_dict()
            return {**made, **marks} if marks else made
        finally:
            self.original.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of a plain optimizer or from ``state_dict()``, on all ranks or on rank 0. Collective.

        Raises:
            SetupError: a rank was given a state that torch refuses to load, with which no step could run (another
                shape, or a part is missing), or for other parameters than rank 0's; all ranks raise it. Or the handle
                was detached. Nothing has changed then.
        """
        groups = self.original.param_groups
        try:
            if self._has_it_whole():
                self._load_original(state_dict)
            else:
                self._load_shares(self._usable(), state_dict)
        except BaseException:
            self.original.param_groups = groups
            raise

    def _load_original(self, state_dict: dict[str, Any], rank: int = 0) -> None:
        if state_dict.get(_GROUPS_ALONE, 0) not in (0, rank):  # this rank's own is fine: rank 0 has the state
            raise SetupError(
                f"this is what rank {state_dict[_GROUPS_ALONE]} got from state_dict(), only the groups. "
                "Save what rank 0 gets; all ranks call state_dict()"
            )
        with self._own_use():
            self.original.load_state_dict(state_dict)

    def _load_shares(self, shares: Shares, state_dict: dict[str, Any]) -> None:
        shares.inner.hand_back(self.original)  # of which it may load a part
        problem = None
        try:
            try:
                self._load_original(state_dict, shares.rank)
            except Exception as error:
                problem = error
            shares.load(dict(self.original.state), problem)
        finally:
            self.original.state.clear()

    def stateful(self) -> ShardedState:
        """The state for ``torch.distributed.checkpoint``: each rank writes, and reads, its own share. Not collective.

        Names and values are those of ``get_optimizer_state_dict`` for the original optimizer, so another number of
        ranks, or a program without stretto, can load it; and the other way round. Parameters that have no state yet
        are not written. To load a checkpoint that lacks the state of some parameters, pass torch
        ``planner=DefaultLoadPlanner(allow_partial_load=True)``; parameters that have stepped keep their state then.

        Example::

            everything = {"model": model, "optimizer": sharded.stateful()}
            torch.distributed.checkpoint.save(everything, checkpoint_id=folder)
            torch.distributed.checkpoint.load(everything, checkpoint_id=folder)
        """
        from .checkpoint import OnlyRank, ShardedState  # brings 700 modules of torch: import stretto would take seconds

        def keeper() -> Shares | OnlyRank:
            return OnlyRank(self.original) if self._has_it_whole() else self._usable()

        keeper()  # has it ended?
        return ShardedState(self.original, keeper, self._module, self._where)

    def footprint(self) -> tuple[Footprint, Footprint] | None:
        """What this rank holds, and would hold without shares, less the others' state; None if it has no share."""
        return self._shares.footprint() if self._shares else None

    def describe(self) -> str:
        """A line for ``sync.describe()``; empty if it has no share."""
        return f"{type(self.original).__name__}: {self._shares.describe()}" if self._shares else ""

    def describe_gradients(self) -> str:
        """How gradients arrive, for reports; empty if they arrive whole, as asked."""
        told = self._shares.describe_gradients() if self._shares else ""
        return told and f"{type(self.original).__name__}: {told}"

    def unshard(self) -> torch.optim.Optimizer:
        """Return the original optimizer, with its whole state on every rank. Collective.

        Each rank's parameters get memory of their own again, and gradients that wait for a step are whole. May be
        called twice.

        Raises:
            SetupError: the handle was detached, and the state was lost with it.
        """
        if not self._has_it_whole():
            shares = self._usable()
            with shares.peers.in_call():
                whole = dict(shares.states(departed=True))
                shares.withholding.give_back()
            shares.inner.hand_back(self.original)
            self.original.state.update(whole)  # not earlier: a part of it would be taken for all
        self._handed_back, self._elsewhere = True, None
        self.end()
        return self.original

    def end(self) -> None:
        """Parameters get memory of their own. Not collective, so the state of this rank's share is lost."""
        if self._guard is not None:
            self._guard.end(loses_state=bool(self._shares and not self._handed_back and self._shares.inner.state))
        if self._other_steps is not None:
            self._other_steps.stop()
        if self._shares is not None:
            self._shares.release()
        self.beside.discard(self)
        self._shares, self.ended = None, True

    def __reduce__(self) -> Any:
        raise StrettoError(
            "A sharded optimizer is tied to its process: use state_dict(), on all ranks, to save or copy it."
        )
