"""Has the module the parameters that it had when it was attached?"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from .errors import SetupError, name_list
from .options import Options

EVERY = 16


class Membership:
    """Remembers which parameters a module has and which of them are frozen, without keeping the module alive.

    A parameter that is replaced, added or unfrozen after attaching has no hook: its gradient would stay local and the
    replicas would part without a word. One that is frozen just brings no gradient any more.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        self._module = weakref.ref(module)
        self._ignores: Callable[[str], bool] = options.ignores
        self._modules = [weakref.ref(one) for one in module.modules()]  # their tables would keep the parameters
        self._members = self._now()
        named = {name: p for name, p in module.named_parameters() if not options.ignores(name)}
        self._known = {id(parameter) for parameter in named.values()}
        self._frozen = [(name, weakref.ref(p)) for name, p in named.items() if not p.requires_grad]

    def _now(self) -> list[int]:
        alive = [one for reference in self._modules if (one := reference()) is not None]
        tables = (table.values() for one in alive for table in (one._parameters, one._modules))
        return [*map(id, itertools.chain.from_iterable(tables))]

    def check(self, number: int, where: str) -> None:
        """Raise ``SetupError`` if a parameter needs a hook that it does not have.

        Unfrozen ones are seen at once. All tables are compared in the first passes and then in every ``EVERY``-th, as
        that costs as much as some hooks.
        """
        unfrozen = [name for name, p in self._frozen if (alive := p()) is not None and alive.requires_grad]
        if not unfrozen and number > EVERY and number % EVERY:
            return
        module = self._module()
        if not unfrozen and (module is None or self._now() == self._members):
            return
        if module is not None:
            self._members = self._now()
            named = {name: p for name, p in module.named_parameters() if not self._ignores(name)}
            unfrozen += [name for name, p in named.items() if id(p) not in self._known and p.requires_grad]
        if unfrozen:
            raise SetupError(
                f"{where}: {name_list(dict.fromkeys(unfrozen))} became trainable, or took another's place, after the "
                "module was attached: no hook, so each rank has its own gradient.\n"
                "Attach again after such a change, on all ranks: sync.detach(); sync = stretto.attach(model)"
            )
