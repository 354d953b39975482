"""Tensors that show the memory of parameters beside them, where a sharded optimizer moves that."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_shard import CARRIERS, OPTIMIZERS, Net, assert_same, backward, pair, train

import stretto
from stretto.sharding import aliases, layout
from stretto.testing import run_ranks, spawn_ranks


@pytest.fixture(params=["threads", "shared memory", "hosts", "memory of a device"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param in CARRIERS:
        return CARRIERS[request.param]
    monkeypatch.setattr(layout, "_own", layout.DeviceMemory)
    return CARRIERS["threads"]


SHOWN: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {
    "detached": lambda one: one.detach(),
    "data": lambda one: one.data,
    "rows": lambda one: one.data[1:3] if one.dim() else one.data,
    "transposed": lambda one: one.data.t() if one.dim() == 2 else one.data,
}


def shown(model: torch.nn.Module, how: str) -> list[torch.Tensor]:
    return [SHOWN[how](one) for one in model.parameters() if one.numel()]


def assert_shows(kept: list[torch.Tensor], model: torch.nn.Module, how: str) -> None:
    for one, now in zip(kept, shown(model, how), strict=True):
        assert torch.equal(one, now) and one.data_ptr() == now.data_ptr() and one.stride() == now.stride()


@pytest.mark.parametrize("how", SHOWN)
def test_what_shows_a_parameter_goes_with_it(carrier: Any, how: str) -> None:
    """From a time before the optimizer was sharded, from before the plan was learnt, and to the end."""

    def worker(transport: Any) -> None:
        model = Net()
        early = shown(model, how)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.008)
        sharded = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        assert_shows(early, model, how)
        late, first = shown(model, how), sync.plan
        train(model, sharded, transport.rank, range(3))
        assert sync.plan is not first, "nothing has moved since"
        assert_shows(early, model, how)
        assert_shows(late, model, how)
        sharded.unshard()
        sync.detach()
        transport.all_gather_object(None)
        with torch.no_grad():
            model.first.weight.fill_(3.0)
        transport.all_gather_object(None)
        assert_shows(early, model, how)
        assert_shows(late, model, how)

    carrier(worker, 2)


class Cached(torch.nn.Module):
    """Its loss goes through critics that were put by, detached, in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = torch.nn.Linear(40, 70), torch.nn.Linear(18, 40)
        self.put_by: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.put_by = self.put_by or [one.detach() for one in self.critic.parameters()]
        hidden = torch.tanh(self.actor(x))
        return torch.nn.functional.linear(hidden, *self.put_by) + self.critic(hidden.detach())


def test_a_loss_through_what_was_put_by_is_that_of_now(carrier: Any) -> None:
    def worker(transport: Any) -> None:
        nets = [net := Cached(), copy.deepcopy(net)]
        handles = [stretto.attach(net, transport=transport, bucket_cap_mb=0.008) for net in nets]
        plain = torch.optim.AdamW(nets[1].parameters(), lr=0.01)
        sharded = stretto.shard(torch.optim.AdamW(nets[0].parameters(), lr=0.01), handles[0])
        train(nets[0], sharded, transport.rank, range(6))  # type: ignore[arg-type]
        train(nets[1], plain, transport.rank, range(6))  # type: ignore[arg-type]
        assert_same(*nets)
        for handle in handles:
            handle.detach()

    carrier(worker, 2)


def test_objects_are_looked_through_only_where_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = gc.get_referrers
    monkeypatch.setattr(aliases.gc, "get_referrers", lambda *of: looked.append(1) or real(*of))

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(3))
        sharded.unshard()

    run_ranks(worker, 2)
    assert not looked


def test_other_threads_build_tuples_while_objects_are_looked_through() -> None:
    """CPython cannot complete a tuple that somebody else holds. Tensors of all classes are found."""

    class Own(torch.Tensor):
        pass

    whole = torch.arange(4.0)
    shown = [whole[:2], whole[1:].as_subclass(Own), torch.nn.Parameter(whole), torch.nn.Buffer(whole)]
    built, failed = list[int](), list[SystemError]()

    def build() -> None:
        try:
            while len(built) < 5000:
                built.append(len(tuple([number] for number in range(50))))
        except SystemError as error:
            failed.append(error)

    thread, interval = threading.Thread(target=build), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        while thread.is_alive():
            (found,) = aliases._aliases({whole.untyped_storage()._cdata}, {id(whole)}).values()
            assert {id(one) for one, _ in found} == {id(one) for one in shown}
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert not failed


def test_what_covers_more_than_a_parameter_stays_where_it_is() -> None:
    """And other parameters, graphs, and what has no memory of its own to speak of."""

    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        flat = torch.arange(32.0)
        for number, layer in enumerate(model):
            layer.weight.data = flat[16 * number : 16 * number + 16].view(4, 4)
        inside, sparse = flat[17:19], torch.eye(3).to_sparse()
        graph = model[0](torch.ones(1, 4))
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=1.0), sync)
        with torch.no_grad():
            model[1].weight.fill_(-1.0)
        transport.all_gather_object(None)
        assert flat.tolist() == [*map(float, range(32))] and inside.tolist() == [-1.0, -1.0]
        assert graph.tolist() == [[6.0, 22.0, 38.0, 54.0]] and sparse.is_sparse
        sharded.unshard()

    run_ranks(worker, 2)


@pytest.mark.parametrize("own", [layout._own, layout.DeviceMemory])
def test_a_step_waits_where_something_is_shown(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_own", own)

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        train(model, sharded, transport.rank, range(1))
        assert any(type(one) is not torch.nn.Parameter for one in model.parameters())
        kept = model.state_dict()
        train(model, sharded, transport.rank, range(1, 2))
        assert all(type(one) is torch.nn.Parameter for one in model.parameters()), "kept would not wait"
        assert "before step() returns, since " in sync.describe()
        assert "are visible through tensors that do not wait (p.detach())" in sync.describe()
        train(plain, optimizer, transport.rank, range(2))
        assert all(torch.equal(kept[name], one) for name, one in plain.named_parameters())
        del kept
        train(model, sharded, transport.rank, range(2, 3))
        assert "come from other ranks while the next forward runs" in sync.describe()
        assert any(type(one) is not torch.nn.Parameter for one in model.parameters())

    run_ranks(worker, 2)


def _clip_what_is_kept(rank: int) -> None:
    model, sharded, sync, plain, optimizer = pair("process_group", keep_grads=False)
    for net, one in ((model, sharded), (plain, optimizer)):
        kept = [*net.state_dict().values()]
        for step in range(5):
            one.zero_grad()
            backward(net, rank, step)
            one.step()
            for value in kept:
                value.clamp_(-0.05, 0.05)
    assert_same(model, plain)
    sync.check()


@pytest.mark.ranks
def test_weights_are_clipped_by_what_was_kept() -> None:
    spawn_ranks(_clip_what_is_kept, 2)


class Halves(torch.nn.Module):
    """Puts views by that autograd knows of, as some do for a projection that is stored as one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).clone())
        self.one, self.other = self.both[:, :4], self.both[:, 4:]
        self.transposed = self.both.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.one) * (x @ self.other) + (x @ self.transposed.t()).sum()


def test_views_with_a_graph_go_with_it(carrier: Any) -> None:
    """Forward computed with the weights of before ``shard``, alike on all ranks."""

    def worker(transport: Any) -> None:
        model, plain = Halves(), Halves()
        sync, plainly = (stretto.attach(one, transport=transport) for one in (model, plain))
        optimizers = (
            stretto.shard(torch.optim.SGD(model.parameters(), lr=0.05), sync),
            torch.optim.SGD(plain.parameters(), lr=0.05),
        )
        for step in range(4):
            for net, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                net(torch.full((2, 6), 0.1 * (step + transport.rank))).mean().backward()
                optimizer.step()
        assert_same(model, plain)
        assert torch.equal(model.one, model.both[:, :4])
        sync.detach()
        plainly.detach()

    carrier(worker, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_of_no_graph_are_in_nobodys_way(mode: Any) -> None:
    """torch refuses to say what made such a view once its parameter was stepped: shard, steps and detach raised."""

    def worker(transport: Any) -> None:
        model, sharded, sync, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        with mode():
            row = model.first.weight[0]
        train(model, sharded, transport.rank, range(2, 3))
        assert torch.equal(row, model.first.weight[0])
        sharded.unshard()
        sync.detach()
        with torch.no_grad():
            model.first.weight.fill_(2.0)
        assert row.tolist() == [2.0] * len(row)

    run_ranks(worker, 2)


def test_a_model_over_the_same_weights_goes_with_them(carrier: Any) -> None:
    """``load_state_dict(assign=True)``: one to evaluate with, say. It stayed at the values of the start."""

    def worker(transport: Any) -> None:
        model = Net()
        evaluated = copy.deepcopy(model)
        evaluated.load_state_dict(model.state_dict(), assign=True)
        sync = stretto.attach(model, transport=transport, bucket_cap_mb=0.008)
        sharded = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        train(model, sharded, transport.rank, range(4))
        now = model.state_dict()
        assert all(torch.equal(one, now[name]) for name, one in evaluated.state_dict().items())
        sharded.unshard()
        assert all(
            one.data_ptr() == model.state_dict()[name].data_ptr() for name, one in evaluated.state_dict().items()
        )

    carrier(worker, 2)


SEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda one: one.detach().conj(),
    "negative": lambda one: one.detach().conj().imag,
    "pairs": lambda one: torch.view_as_real(one.detach()),
    "real": lambda one: one.detach().real[1:],
    "bytes": lambda one: one.detach().view(torch.uint8),
}


@pytest.mark.parametrize("how", SEEN)
def test_what_shows_it_in_another_way_still_does(how: str) -> None:
    """A conjugate one came out as if it were none."""

    def worker(transport: Any) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.complex(torch.rand(3, 4), torch.rand(3, 4)))])
        kept = SEEN[how](model[0])
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        for _ in range(2):
            sharded.zero_grad()
            torch.view_as_real(model[0]).pow(2).sum().backward()
            sharded.step()
        model.state_dict()
        assert torch.equal(kept, SEEN[how](model[0]))
        sync.detach()

    run_ranks(worker, 2)


def test_one_that_is_no_dense_tensor() -> None:
    """It becomes one: what shows all of it goes along, and a part of it cannot."""

    def worker(transport: Any) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(6, 8)[:, :4])])
        whole, part = model[0].detach(), model[0].detach()[1]
        sync = stretto.attach(model, transport=transport)
        before = part.clone()
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        model[0].pow(2).sum().backward()
        sharded.step()
        model.state_dict()
        assert torch.equal(whole, model[0]) and torch.equal(part, before)
        sync.detach()

    run_ranks(worker, 2)


def test_what_shows_memory_that_was_given_by_hand() -> None:
    """``parameter.data = ...``, or ``.to()`` and back: with the next step it lies with the others again."""

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        for one in model.parameters():
            one.data = one.data.clone()
        kept = [one.detach() for one in model.parameters()]
        train(model, sharded, transport.rank, range(2, 4))
        assert all(torch.equal(one, now) for one, now in zip(kept, model.parameters(), strict=True))

    run_ranks(worker, 2)


class Hostile(torch.Tensor):
    """Has methods of its own by names of torch's."""

    @property
    def shape(self) -> Any:  # type: ignore[override]
        raise AttributeError("mine")

    def untyped_storage(self) -> Any:
        raise ValueError("mine")


class Fixed(torch.Tensor):
    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]


def test_whatever_tensors_a_program_has_are_in_nobodys_way() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(4, 4)
        flat, fixed = model.weight.detach().view(-1), model.weight.detach().as_subclass(Fixed)
        hostile = [torch.ones(3).as_subclass(Hostile), model.weight.detach().as_subclass(Hostile)]
        nested = torch._nested_view_from_buffer(
            flat, torch.tensor([[2, 2], [3, 4]]), torch.tensor([[2, 1], [4, 1]]), torch.tensor([0, 4])
        )
        sync = stretto.attach(model, transport=transport)
        sharded = stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        model(torch.ones(2, 4)).sum().backward()
        sharded.step()
        model.state_dict()
        assert torch.equal(fixed.as_subclass(torch.Tensor), model.weight)
        assert torch.equal(flat, model.weight.view(-1)) and nested.is_nested and len(hostile) == 2
        sync.detach()

    run_ranks(worker, 2)


def test_each_parameter_gets_memory_of_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = aliases.move

    def counting(moves: Any, known: Any = ()) -> None:
        moved.append(len(moves))
        real(moves, known)

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(2))
        moved.clear()
        transport.all_gather_object(None)
        sharded.unshard()
        transport.all_gather_object(None)
        assert moved == [sum(one.numel() > 0 for one in model.parameters())] * 2

    monkeypatch.setattr(layout, "move", counting)
    run_ranks(worker, 2)


def test_of_a_devices_memory_each_parameter_has_a_storage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved or copied, it takes no more than its bytes; and it outlives what it was cut from."""
    monkeypatch.setattr(layout, "_own", layout.DeviceMemory)

    def worker(transport: Any) -> None:
        model, sharded, *_ = pair(transport)
        train(model, sharded, transport.rank, range(3))
        for one in model.state_dict().values():
            assert one.untyped_storage().nbytes() == one.nbytes or one.dtype is torch.int64
        kept = [one.detach() for one in model.parameters()]
        values = [one.clone() for one in kept]
        sharded.unshard()
        assert all(torch.equal(one, value) for one, value in zip(kept, values, strict=True))

    run_ranks(worker, 2)

    memory = layout.DeviceMemory(64, torch.device("cpu"))
    cut = memory.tensor(16, 4, torch.bfloat16)
    del memory
    gc.collect()
    assert cut.fill_(3).tolist() == [3.0] * 4


def test_a_view_of_another_layout_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters of two sharded optimizers, swapped by hand: it was moved, and taken for memory of other processes."""

    def worker(transport: Any) -> None:
        nets = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        syncs = [stretto.attach(net, transport=transport) for net in nets]
        optimizers = [[torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net] for net in nets]
        stepped = [[stretto.shard(one, syncs[0]) for one in optimizers[0]], optimizers[1]]
        for step in range(6):
            for net, several in zip(nets, stepped, strict=True):
                net.zero_grad()
                net(torch.full((2, 4), 0.1 * (step + transport.rank + 1))).square().mean().backward()
                for one in several:
                    one.step()
                net.state_dict()
                transport.all_gather_object(None)
                if step == 2:
                    net[0].weight.data, net[1].weight.data = net[1].weight.data, net[0].weight.data
        assert_same(*nets)

    run_ranks(worker, 2)
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's exporter, of torch's
def test_tensors_of_other_programs_are_not_asked_for_their_shapes() -> None:
    """To ask a symbolic one whether it is empty is a guard in the program that it stands for."""

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.shape[0] // 2 :] * 2

    batch = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(Half(), (torch.zeros(10, 6),), dynamic_shapes=batch)

    def worker(transport: Any) -> None:
        model = torch.nn.Linear(6, 6)
        kept = model.weight.detach()
        sync = stretto.attach(model, transport=transport)
        stretto.shard(torch.optim.SGD(model.parameters(), lr=0.1), sync)
        assert kept.data_ptr() == model.weight.data_ptr()
        sync.detach()

    run_ranks(worker, 2)
    assert exported.run_decompositions().module()(torch.zeros(12, 6)).shape == (6, 6)


def test_where_a_device_has_no_dlpack_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("Unknown device type")

    monkeypatch.setattr(layout, "_own", layout.DeviceMemory)
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", refuse)

    def worker(transport: Any) -> None:
        model, sharded, sync, plain, optimizer = pair(transport)
        kept = [one.detach() for one in model.parameters()]
        for net, one in ((model, sharded), (plain, optimizer)):
            train(net, one, transport.rank, range(4))
        assert all(type(one) is torch.nn.Parameter for one in model.parameters())
        assert_same(model, plain)
        sharded.unshard()
        assert all(torch.equal(one, now) for one, now in zip(kept, model.parameters(), strict=True))
        sync.detach()

    run_ranks(worker, 2)
