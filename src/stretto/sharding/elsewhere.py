"""What stands in ``optimizer.state`` where ranks keep it in shares."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

import torch

from ..errors import UnsupportedError


class Elsewhere(defaultdict[torch.Tensor, Any]):
    """In place of a state by parameter: empty, and refuses what would have no effect on the shares.

    It says that it is not empty: torch.distributed.checkpoint would else step, to have a state to load into. What is no
    parameter of the optimizer, like one that has been replaced, may be taken out.

    Args:
        optimizer: has the parameters.
        where: how messages begin.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        super().__init__(dict)
        self._optimizer = optimizer
        self._where = where

    def __bool__(self) -> bool:
        return True

    def refuse(self) -> NoReturn:
        """Raise."""
        raise UnsupportedError(
            f"{self._where}: the ranks keep the state of this optimizer in shares, and none of it by parameter.\n"
            "To look at it: state_dict(), on all ranks; to set it: load_state_dict(). To begin without one: unshard(), "
            "then build the optimizer anew, and shard that."
        )

    def _refuse_own(self, key: object) -> None:
        if any(key is one for group in self._optimizer.param_groups for one in group["params"]):
            self.refuse()

    def __missing__(self, key: torch.Tensor) -> Any:
        self._refuse_own(key)
        return super().__missing__(key)

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._refuse_own(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: torch.Tensor) -> None:
        self._refuse_own(key)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._refuse_own(key)
        return super().__contains__(key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """As of a dict, where it is no parameter of the optimizer."""
        self._refuse_own(key)
        return super().get(key, default)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        """As of a dict, where it is no parameter of the optimizer."""
        self._refuse_own(key)
        return super().pop(key, *default)

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
