"""Which parameters a module has now, which of them are trained, and how a change is noticed without searching for it.

[Note: outsiders]  Parameters of the module that are not in the plan (frozen ones, and new ones as soon as they are
registered) carry a hook of their own. It is silent until one of them gets a gradient. The first one that does begins
the pass if need be, so that a pass which reaches nothing else is seen too. On accelerators that would come too late for
ranks that do not use it yet, so there ``some_unfrozen`` asks all of them.

[Note: back and forth]  A frozen parameter does no harm in a plan, and costs zeros; but each change of plan costs a
round of messages. So a parameter that has come back once stays in the plan, frozen or not. Where two halves of a model
are trained in turn, the plan changes twice and then no more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch

from .arrivals import Hooked, hook_gradient, owner_of
from .engine import current_task, left_uncompiled
from .options import Options, names_of_sparse
from .preset import Preset
from .selection import named, stand_in
from .survivors import Survivors
from .tables import Tables, lent
from .watch import listen, refuse_torchs, stop_listening
from .withheld import Withheld


class Membership:
    """Looks at a module without keeping it alive.

    Args:
        module: the attached one.
        options: say which names to leave alone.
        apart: returns the parameters that others look after: those of attached models inside.
    """

    def __init__(self, module: torch.nn.Module, options: Options, apart: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.options = options
        self._apart = apart
        self._module, self.suspect = weakref.ref(module), False
        self._came: Callable[[], object] | None = None
        self._preset: Preset | None = None
        self._survivors: Survivors | None = None
        self._planned_alive = Survivors(self._none_planned_left)
        self.is_bare = False
        """Whether nothing is left of what was planned, and no pass has followed: then a forward checks."""
        self._hooks = Hooked()
        self._planned: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        self._frozen: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        self._returned, self._waiting = set[str](), set[str]()
        self._arrived, self._trained_outside = set[int](), set[int]()

    def watch(self, came: Callable[[], object], none_left: Callable[[], None], preset: Preset | None = None) -> None:
        """From now on call ``came`` when an outsider gets a gradient. See watch.py for other callers.

        ``none_left`` is called when the module and all its parameters are gone. ``preset``, if any, follows all that
        may get a gradient: a frozen parameter may keep one and be unfrozen.
        """
        self._came, self._preset, self._survivors = came, preset, Survivors(none_left)
        listen(self._registered)
        self._follow_survivors()
        self._follow_gradients(self.everything().values())

    def stop(self) -> None:
        """Take the hooks off."""
        self.let_go()
        stop_listening(self._registered)
        self._hooks.keep(())

    def let_go(self) -> None:
        """Call it no more. See survivors.py for what must be left alone."""
        self._came = None
        self._planned_alive.follow(())
        self.is_bare = False
        if self._survivors is not None:
            self._survivors.follow(())

    # What the module has

    def module(self) -> torch.nn.Module | None:
        """The module, unless it was freed."""
        return self._module()

    def all_parameters(self) -> list[torch.nn.Parameter]:
        """Of the module, those that are left alone too."""
        module = self._module()
        return [] if module is None else [*module.parameters()]

    def everything(self) -> dict[str, torch.nn.Parameter]:
        """All parameters that are not to be left alone, here or by others."""
        module = self._module()
        apart = {id(parameter) for parameter in self._apart()}
        found = {} if module is None else named(module, self.options, "parameters")
        return {name: parameter for name, parameter in found.items() if id(parameter) not in apart}

    def wanted(self) -> dict[str, torch.nn.Parameter]:
        """Those that belong into the plan: see [Note: back and forth]. A stand-in where all are sparse."""
        rows = self.rows()
        found = {name: one for name, one in self._to_reduce().items() if name not in rows}
        return found or (stand_in(rows) if rows else {})

    def rows(self) -> dict[str, torch.nn.Parameter]:
        """Those whose gradients are sparse."""
        module = self._module()
        names = set() if module is None else names_of_sparse(module, self.options.sparse, strict=False)
        return {name: one for name, one in self._to_reduce().items() if name in names} if names else {}

    def _to_reduce(self) -> dict[str, torch.nn.Parameter]:
        kept, mine = (self._returned & self._planned.keys()) | self._waiting, self._ids()
        asked = {name: p for name, p in self.everything().items() if p.requires_grad or name in kept}
        return {name: p for name, p in asked.items() if id(p) in mine or owner_of(p) is None}

    def keep(self, names: Iterable[str]) -> None:
        """These are wanted when the ranks agree next, frozen or not: some rank has a gradient that was not sent."""
        self._waiting = {*names}

    def may_leave(self, name: str) -> bool:
        """Whether freezing it is a reason for another plan."""
        return name not in self._returned

    def known(self, names: Iterable[str]) -> set[str]:
        """Those of the names that were there, outside the plan, when the ranks last agreed: unfrozen since."""
        everything = self.everything()
        return {name for name in names if name in self._frozen and self._frozen[name]() is everything[name]}

    def strangers(self) -> set[str]:
        """Frozen ones that were not there when the ranks last agreed: each rank has its own values."""
        outside = self.everything().keys() - self._to_reduce().keys()
        return outside - self.known(outside) - self._planned.keys()

    def outsiders(self) -> list[torch.Tensor]:
        """Those outside the plan whose gradients are seen, and that require one now."""
        return [one for one in self._hooks.alive() if one.requires_grad]

    def some_unfrozen(self) -> bool:
        """Whether an outsider requires a gradient now, and did not when what the module has was last known."""
        return any(id(one) not in self._trained_outside for one in self.outsiders())

    def hooked(self, parameter: torch.Tensor) -> bool:
        """Whether it is an outsider whose gradients are seen."""
        reference, _ = self._hooks.get(id(parameter), (None, None))
        return reference is not None and reference() is parameter

    def got_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether an outsider may have got one in this pass, or in ones without synchronisation before it."""
        return id(parameter) in self._arrived or not self.hooked(parameter)

    def claim(self, parameter: torch.Tensor) -> None:
        """An outsider has got one, as another observer has seen."""
        self._arrived.add(id(parameter))

    def orphans(self) -> list[str]:
        """Where the module was freed: outsiders of it that live on, and have got a gradient since."""
        if self.module() is not None:
            return []
        names = {id(reference()): name for name, reference in self._frozen.items()}
        came = [one for one in self._hooks.alive() if id(one) in self._arrived]
        return [names.get(id(one), f"one of shape {tuple(one.shape)}") for one in came]

    def follow(self, planned: Mapping[str, torch.nn.Parameter]) -> None:
        """These are reduced, by rows or in the plan: all others are outsiders from here on."""
        self._returned |= self.known(planned) | self._waiting
        self._waiting = set()
        self._planned = {name: weakref.ref(parameter) for name, parameter in planned.items()}
        self._planned_alive.follow(planned.values())
        self.is_bare = False
        self._arrived.clear()
        self.remember()
        self._frozen = {n: weakref.ref(one) for n, one in self.everything().items() if n not in self._planned}

    def remember(self) -> None:
        """What the module has now is known: put hooks on outsiders, and take them off others."""
        self.suspect = False
        module, everything = self._module(), self.everything()
        outside = [one for name, one in everything.items() if name not in self._planned]
        self._hooks.keep(outside)
        for parameter in outside:
            self._hook(parameter)
        self._trained_outside = {*map(id, self.outsiders())}
        self._follow_gradients(everything.values())
        modules = [] if module is None else list(module.modules())
        self._modules = weakref.WeakSet(modules)
        self.tables = Tables(modules, self._ids())
        self._follow_survivors()

    def _follow_survivors(self) -> None:
        if self._survivors is not None:
            planned = (reference() for reference in self._planned.values())
            everything = [self._module(), *self.everything().values(), *planned, *self._hooks.alive()]
            self._survivors.follow(one for one in everything if one is not None)

    def drop_withheld(self, planned: Iterable[torch.Tensor]) -> None:
        """Of parameters no longer in the module: none is stepped, and shares cannot be added up."""
        here = {id(one) for one in self.everything().values()}
        for one in planned:
            if id(one) not in here and isinstance(one.grad, Withheld):
                one.grad = None

    def _follow_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self._preset is not None:
            self._preset.follow(filter(_is_differentiable, parameters))

    def unseen(self) -> dict[str, int]:
        """Names of trained ones that no hook has seen, and how many passes before this one that may have been so."""
        passes = self.tables.passes_before
        seen = self._ids()
        seen |= {id(one) for module in self.tables.came(self._modules) for one in module.parameters()}
        there = [(name, one) for name, one in self._to_reduce().items() if passes and id(one) not in seen]
        return {name: passes for name, one in there if not self.hooked(one)}

    # How it is told of changes

    def _registered(self, owner: torch.nn.Module, item: object) -> None:
        """Something is about to be registered, in some module of the process."""
        refuse_torchs(owner, item, (parameter() for parameter in self._planned.values()))
        if owner not in self._modules:
            return
        self.suspect = True
        if isinstance(item, torch.nn.Module):
            self._modules.update(item.modules())
            new = list(item.parameters())
        else:
            new = [item] if isinstance(item, torch.nn.Parameter) else []
        planned = self._ids()
        for parameter in new:
            if id(parameter) not in planned:
                self._hook(parameter)
        self._follow_gradients([*self.everything().values(), *new])

    def _ids(self) -> set[int]:
        return {id(one) for reference in self._planned.values() if (one := reference()) is not None}

    @left_uncompiled
    def look_before(self) -> None:
        """Before a forward, with one of the plan gone: an optimizer, or a graph, may hold it, on one rank alone."""
        if lent():
            return
        if self._ids().isdisjoint(map(id, self.everything().values())):
            self.hook_what_is_there()

    def _none_planned_left(self) -> None:
        """Where that was past registration, no hook on what is trained is left to begin a pass. See survivors.py.

        What stands for parameters for a while (``functional_call``) is no reason: they are to come back, and live.
        """
        self.is_bare = self._came is not None and self.module() is not None
        if self.is_bare:
            self.hook_what_is_there()

    @left_uncompiled
    def hook_what_is_there(self) -> None:
        """While it is bare: what has come in place of the planned. Again before each forward; it may come later."""
        there = [one for one in self.everything().values() if isinstance(one, torch.nn.Parameter) and one.is_leaf]
        amid = current_task() != -1
        for parameter in sorted(there, key=lambda one: not one.requires_grad):
            known = self.hooked(parameter)
            with contextlib.suppress(RuntimeError):  # torch.func allows no hook on a frozen one; the next forward does
                self._hook(parameter)
            if amid and not known and parameter.grad is not None:
                self._arrived.add(id(parameter))  # before it was hooked
        self._follow_gradients(there)

    def _hook(self, parameter: torch.nn.Parameter) -> None:
        if self.hooked(parameter) or not _is_differentiable(parameter):
            return
        self._hooks[id(parameter)] = weakref.ref(parameter), hook_gradient(parameter, self._outsider_came)
        if self._survivors is not None:
            self._survivors.also(parameter)

    @left_uncompiled
    def _outsider_came(self, parameter: torch.Tensor) -> None:
        if self._came is None or (owner_of(parameter) is not None and id(parameter) not in self._ids()):
            return  # another handle has it, attached while it was frozen here
        if self.module() is not None and not any(one is parameter for one in self.everything().values()):
            return  # taken out again, or to be ignored; ``remember`` will see to it
        self.suspect = True
        self._arrived.add(id(parameter))
        self._came()
        if self._preset is not None:
            self._preset.accumulated(parameter)


def _is_differentiable(parameter: torch.Tensor) -> bool:
    kind = parameter.is_floating_point() or parameter.is_complex()
    return kind and not torch.nn.parameter.is_lazy(parameter) and not parameter.is_inference()


def parameters_of(several: Iterable[Membership]) -> list[torch.Tensor]:
    """What handles look after."""
    return [parameter for members in several for parameter in members.everything().values()]


def ids_of(several: Iterable[Membership]) -> set[int]:
    """Of all parameters that their modules have."""
    return {id(parameter) for members in several for parameter in members.all_parameters()}
