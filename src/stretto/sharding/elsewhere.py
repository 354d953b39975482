"""What ``optimizer.state`` is while ranks keep it in shares, and a guard against use of the original optimizer."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import SetupError, UnsupportedError
from ..steps import stepped_by

if TYPE_CHECKING:
    from .shares import Shares

log = logging.getLogger("stretto")


class Elsewhere(defaultdict[torch.Tensor, Any]):
    """Replaces the state by parameter: is empty, and refuses changes, which would not reach the shares.

    As a boolean it says whether there has been a step or a load: before, torch.distributed.checkpoint takes a step with
    no learning rate, as with a plain optimizer, to have a state to load into. Keys that are not parameters of the
    optimizer, such as one that has been replaced, may be taken out. A loop over it gives one warning, and no error:
    frameworks loop over it to move a state to a device.

    Args:
        optimizer: has the parameters.
        where: how messages begin.
        shares: this rank's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, where: str, shares: Shares) -> None:
        super().__init__(dict)
        self._shares = shares
        self._optimizer = optimizer
        self._where = where
        self._has_told = False

    def _tell(self) -> None:
        if not (self._has_told or len(self)):
            self._has_told = True
            log.warning(
                "%s: the state of this optimizer is divided over the ranks, so a loop over optimizer.state finds "
                "nothing, and changes nothing.\n"
                "To read it: state_dict(), on all ranks; to set it: load_state_dict(). Shown once.",
                self._where,
            )

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._tell()
        return super().__iter__()

    def keys(self) -> KeysView[torch.Tensor]:  # type: ignore[override]
        """As in a dict: keys that are not parameters of the optimizer."""
        self._tell()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The same."""
        self._tell()
        return super().values()

    def items(self) -> ItemsView[torch.Tensor, Any]:  # type: ignore[override]
        """The same."""
        self._tell()
        return super().items()

    def __bool__(self) -> bool:
        return self._shares.has_begun

    def refuse(self) -> NoReturn:
        """Raise."""
        raise UnsupportedError(
            f"{self._where}: the state of this optimizer is divided over the ranks, so optimizer.state has no "
            "entries to read or set.\n"
            "To read it: state_dict(), on all ranks; to set it: load_state_dict(). To start without a state: "
            "unshard(), then build a new optimizer, and shard that."
        )

    def _is_own(self, key: object) -> bool:
        return any(key is one for one in stepped_by(self._optimizer))

    def _refuse_own(self, key: object) -> None:
        if self._is_own(key):
            self.refuse()

    def __missing__(self, key: torch.Tensor) -> Any:
        self._refuse_own(key)
        return super().__missing__(key)

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._refuse_own(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: torch.Tensor) -> None:
        self._refuse_own(key)
        if self._shares.forget(key) is None or super().__contains__(key):
            super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        """True for its parameters; torch's compiler asks this wherever it meets an optimizer."""
        return self._is_own(key) or super().__contains__(key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """As of a dict, where it is no parameter of the optimizer."""
        self._refuse_own(key)
        return super().get(key, default)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        """As of a dict, where it is no parameter of the optimizer.

        Of one that has left the groups since the last step, the state is still in shares: it gives an empty one.
        """
        self._refuse_own(key)
        left = self._shares.forget(key)
        return super().pop(key, *(default if left is None else (left,)))

    def setdefault(self, key: torch.Tensor, default: Any = None) -> Any:
        """As of a dict, where it is no parameter of the optimizer."""
        self._refuse_own(key)
        return super().setdefault(key, default)

    def clear(self) -> None:
        """Raises ``UnsupportedError``."""
        self.refuse()

    def update(self, *_: Any, **__: Any) -> None:
        """Raises ``UnsupportedError``."""
        self.refuse()

    def copy(self) -> NoReturn:
        """Raises ``UnsupportedError``: a copy to go back to would be empty."""
        self.refuse()

    def __ior__(self, _: Any) -> NoReturn:  # type: ignore[misc]
        self.refuse()

    __copy__ = copy

    def __reduce__(self) -> NoReturn:
        self.refuse()


class Guard:
    """Refuses direct use of the original optimizer: it has no state to save, and shares would not see what it loads.

    Args:
        optimizer: the original. The sharded one has the same hooks.
        where: how messages begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._is_open = self._has_lost_state = False
        self._where = where
        self._optimizer = weakref.ref(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._refuse_step),
            optimizer.register_state_dict_pre_hook(self._refuse_state, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._refuse_state, prepend=True),
        ]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the original may save and load: its state is there for that time."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def end(self, *, loses_state: bool) -> None:
        """The original may be used directly again. ``loses_state``: what it had is lost, which its next step tells."""
        for hook in self._hooks:
            hook.remove()
        if loses_state and (optimizer := self._optimizer()) is not None:
            self._has_lost_state = True
            optimizer.register_step_pre_hook(self._tell_of_loss)
            optimizer.register_load_state_dict_post_hook(self._has_state_again)

    def _has_state_again(self, _: torch.optim.Optimizer) -> None:
        self._has_lost_state = False

    def _tell_of_loss(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._has_lost_state or getattr(optimizer, "ended", False):
            return
        if all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
            return  # torch's get_optimizer_state_dict and set_optimizer_state_dict do so, to have a state
        self._has_lost_state = False  # and the hook stays: torch goes through them
        if isinstance(optimizer.state, Elsewhere) and optimizer.state:  # torch.distributed.checkpoint has loaded it
            return
        kind = type(getattr(optimizer, "original", optimizer)).__name__
        log.warning(
            "%s: this %s was sharded before, and begins again without the state that it had: the shares of it were "
            "lost by detach(), or with a wrapper that another has replaced.\n"
            "To keep it: optimizer = optimizer.unshard(), on all ranks, before that. Shown once.",
            self._where,
            kind,
        )

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Else every rank would step the whole model, which they share, one after the other."""
        if not isinstance(optimizer.state, Elsewhere):
            raise SetupError(
                f"this {type(optimizer).__name__} was sharded: it has no state any more, and must not step by "
                "itself.\nStep what stretto.shard() has returned: optimizer = stretto.shard(optimizer, sync)."
            )

    def _refuse_state(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_open:
            raise SetupError(
                f"this {type(optimizer).__name__} was sharded: it has no state any more to save or load.\n"
                "Call state_dict() and load_state_dict() of what stretto.shard() has returned, on all ranks."
            )


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is known to be 0; an accelerator is not asked."""
    if rate is None or (isinstance(rate, torch.Tensor) and not rate.is_cpu):
        return False
    return bool(rate == 0)
