"""Any life of a model whose optimizer is sharded: steps, layers that come and go, groups that change, saving, loading.

The reference is a plain model with torch's own optimizer, which every rank keeps beside: since each knows what all do,
it is handed the mean. Values are whole numbers over powers of two, so that no rounding is taken for a fault, nor hides
one behind Adam, for which a gradient of 1e-7 is as good as one of 1.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stretto
from stretto.testing import run_ranks

SHAPES = [(3,), (2, 2), (), (0,), (33, 5), (2, 3, 2, 2), (300,)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.25, momentum=0.5, nesterov=True, weight_decay=0.125),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "fused Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.25),
}
OFTEN = ["backward"] * 6 + ["step"] * 6 + ["accumulate"] * 2 + ["zero"] * 2
SELDOM = ["freeze", "unfreeze", "leave", "enter", "move", "add", "rate", "save", "load", "clip", "values", "unshard"]
SELDOM += ["shard", "again", "copy", "away"]


def said(what: str, when: str, text: str) -> str:
    return f"{what}, {when}: {text}"


class Life:
    """One rank's, and the plain model's beside it."""

    def __init__(self, seed: int, transport: Any, name: str, keep_grads: bool) -> None:
        self.dice, self.transport, self.make, self.keep_grads = (
            random.Random(seed),
            transport,
            OPTIMIZERS[name],
            keep_grads,
        )
        self.model, self.plain = torch.nn.Module(), torch.nn.Module()
        self.options = {"bucket_cap_mb": self.dice.choice([1, 1e-3, 1e-5]), "delay": self.dice.random() < 0.2}
        self.made, self.sharded = 0, True
        self.waiting: set[str] = set()
        """Those with a gradient that was not averaged."""
        self.gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(transport.world_size)]
        for _ in range(self.dice.randint(2, 7)):
            self.register()
        self.sync = stretto.attach(self.model, transport=transport, **self.options)
        cut = self.dice.randint(1, self.made)
        self.optimizer, self.reference = (
            self.make([{"params": part} for part in (parameters[:cut], parameters[cut:]) if part])
            for parameters in ([*self.model.parameters()], [*self.plain.parameters()])
        )
        self.optimizer = stretto.shard(self.optimizer, self.sync, keep_grads=keep_grads)

    def register(self) -> str:
        name, dtype = f"p{self.made}", self.dice.choice([torch.float32, torch.float32, torch.float64])
        value = torch.full(self.dice.choice(SHAPES), self.dice.randint(-4, 4) / 2, dtype=dtype)
        for module in (self.model, self.plain):
            module.register_parameter(name, torch.nn.Parameter(value.clone()))
        self.made += 1
        return name

    def pair(self, name: str) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        return self.model.get_parameter(name), self.plain.get_parameter(name)

    def any_of(self, names: list[str]) -> str | None:
        return self.dice.choice(names) if names else None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    @property
    def trained(self) -> list[str]:
        return [name for name in self.names if self.pair(name)[0].requires_grad]

    def group_of(self, name: str) -> int | None:
        groups = enumerate(self.reference.param_groups)
        return next((k for k, group in groups if any(one is self.pair(name)[1] for one in group["params"])), None)

    @property
    def is_away(self) -> bool:
        """Whether there is state of what is in no group: torch cannot save then."""
        known = {id(one) for group in self.reference.param_groups for one in group["params"]}
        return any(id(one) not in known for one in self.reference.state)

    # Training

    def backward(self, *, synchronised: bool = True) -> None:
        if not self.keep_grads and not self.waiting:
            self.zero()
        count, trained = self.transport.world_size, self.trained
        everyone = [
            {name: self.dice.randint(-8, 8) for name in self.dice.sample(trained, self.dice.randint(1, len(trained)))}
            for _ in range(count)
        ]
        mine = everyone[self.transport.rank].items()
        loss = torch.stack([(self.pair(name)[0] * factor).sum().double() for name, factor in mine]).sum()
        if synchronised:
            loss.backward()
        else:
            with self.sync.no_sync():
                loss.backward()
        for own, used in zip(self.gradients, everyone, strict=True):
            for name, factor in used.items():
                own[name] = own.get(name, 0) + torch.full_like(self.pair(name)[1], factor)
                self.waiting.add(name)
        if synchronised:
            for name in self.waiting:
                zeros = torch.zeros_like(self.pair(name)[1])
                mean = sum((own.get(name, zeros) for own in self.gradients), zeros) / count
                for own in self.gradients:
                    own[name] = mean.clone()
            self.waiting = set()

    def accumulate(self) -> None:
        self.backward(synchronised=False)

    def step(self) -> None:
        if self.waiting:
            return
        for name in self.names:
            self.pair(name)[1].grad = self.gradients[0].get(name)
        self.reference.step()
        self.optimizer.step()
        if not self.keep_grads:
            self.zero()

    def zero(self) -> None:
        self.model.zero_grad()
        self.gradients, self.waiting = [{} for _ in self.gradients], set()

    def clip(self) -> None:
        if self.waiting:
            return
        for name in self.names:
            self.pair(name)[1].grad = self.gradients[0].get(name)
        wanted = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.5)
        torch.testing.assert_close(self.sync.clip_grad_norm_(1.5).double(), wanted.double(), rtol=1e-4, atol=1e-6)
        for own in self.gradients:
            own.update({name: self.pair(name)[1].grad.clone() for name in own})
        self.look("clip")
        self.zero()  # what comes on top would not be exact

    # Layers and groups

    def freeze(self) -> None:
        if len(self.trained) > 1:
            for one in self.pair(self.dice.choice(self.trained)):
                one.requires_grad_(False)

    def unfreeze(self) -> None:
        if (name := self.any_of([name for name in self.names if name not in self.trained])) is not None:
            self.zero()
            for one in self.pair(name):
                one.requires_grad_(True)

    def leave(self) -> str | None:
        inside = [name for name in self.names if self.group_of(name) is not None]
        if len(inside) < 2:
            return None
        name = self.dice.choice(inside)
        number = self.group_of(name)
        for one, optimizer in zip(self.pair(name), (self.optimizer, self.reference), strict=True):
            group = optimizer.param_groups[number]
            group["params"] = [other for other in group["params"] if other is not one]
        return name

    def enter(self, name: str | None = None) -> None:
        name = name or self.any_of([name for name in self.names if self.group_of(name) is None])
        number = self.dice.randrange(len(self.reference.param_groups))
        for one, optimizer in zip(self.pair(name), (self.optimizer, self.reference), strict=True) if name else ():
            optimizer.param_groups[number]["params"].append(one)

    def move(self) -> None:
        self.enter(self.leave())

    def add(self) -> None:
        name = self.register()
        self.backward()
        for one, optimizer in zip(self.pair(name), (self.optimizer, self.reference), strict=True):
            optimizer.add_param_group({"params": [one]})

    def rate(self) -> None:
        number, rate = self.dice.randrange(len(self.reference.param_groups)), self.dice.choice([0.5, 0.25, 0.125])
        for optimizer in (self.optimizer, self.reference):
            optimizer.param_groups[number]["lr"] = rate

    # Saving, and other ways out

    def save(self) -> None:
        if not self.is_away:
            self.compare_states(self.optimizer.state_dict(), whole=self.transport.rank == 0 or not self.sharded)

    def load(self) -> None:
        if not self.is_away:
            saved = copy.deepcopy(self.reference.state_dict())
            for optimizer in (self.optimizer, self.reference):
                optimizer.load_state_dict(copy.deepcopy(saved))

    def values(self) -> None:
        values = {name: torch.full_like(one, self.dice.randint(-3, 3)) for name, one in self.plain.state_dict().items()}
        for module in (self.model, self.plain):
            module.load_state_dict(values)

    def unshard(self) -> None:
        if self.sharded and not self.is_away:
            self.zero()
            self.optimizer, self.sharded = self.optimizer.unshard(), False
            self.compare_states(self.optimizer.state_dict(), whole=True)

    def shard(self) -> None:
        if not self.sharded and not self.is_away:
            self.zero()
            state, fresh = (
                self.optimizer.state_dict(),
                self.make([dict(group) for group in self.optimizer.param_groups]),
            )
            self.optimizer, self.sharded = stretto.shard(fresh, self.sync, keep_grads=self.keep_grads), True
            self.optimizer.load_state_dict(state)

    def again(self) -> None:
        """Another handle, and another optimizer, with the state of this one."""
        if not self.is_away:
            self.unshard()
            self.sync.detach()
            self.sync = stretto.attach(self.model, transport=self.transport, **self.options)
            self.shard()

    def copy(self) -> None:
        for one, other in zip(copy.deepcopy(self.model).parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)

    def away(self) -> None:
        """Weights elsewhere for a while, and back before the step."""
        before = {name: one.data for name, one in self.model.named_parameters()}
        for one in self.model.parameters():
            one.data = one.data + 1
        self.backward()
        for name, one in self.model.named_parameters():
            one.data = before[name]

    # Looking

    def compare_states(self, found: dict[str, Any], *, whole: bool) -> None:
        wanted = self.reference.state_dict()
        assert [group["params"] for group in found["param_groups"]] == [
            group["params"] for group in wanted["param_groups"]
        ]
        if whole:
            torch.testing.assert_close(found["state"], wanted["state"])

    def look(self, when: str) -> None:
        for name in self.names:
            one, other = self.pair(name)
            torch.testing.assert_close(one.detach(), other.detach(), msg=functools.partial(said, name, when))
            if self.keep_grads or not self.sharded:
                wanted = self.gradients[self.transport.rank].get(name)
                assert (one.grad is None) == (wanted is None), f"gradient of {name}, {when}"
                if wanted is not None:
                    torch.testing.assert_close(
                        one.grad, wanted, msg=functools.partial(said, f"gradient of {name}", when)
                    )


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 2, 4]),
    st.sampled_from([*OPTIMIZERS]),
    st.booleans(),
    st.lists(st.sampled_from(OFTEN + SELDOM), min_size=4, max_size=20),
)
def test_any_life(seed: int, world: int, name: str, keep_grads: bool, steps: list[str]) -> None:
    def worker(transport: Any) -> None:
        life = Life(seed, transport, name, keep_grads)
        for number, what in enumerate(steps):
            getattr(life, what)()
            life.look(f"behind step {number}, {what}")
        life.sync.detach()

    logging.disable(logging.WARNING)  # what changes in a model is told
    try:
        run_ranks(worker, world, timeout=30)
    finally:
        logging.disable(logging.NOTSET)
