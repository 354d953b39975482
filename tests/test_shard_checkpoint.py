"""The state of sharded optimizers through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from test_shard import OPTIMIZERS, Net, assert_same, assert_same_state, attached, train
from test_shared_memory import shared
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import stretto
from stretto.sharding import keeping
from stretto.sharding.checkpoint import boxes_in_memory
from stretto.sharding.division import Division
from stretto.testing import run_ranks, spawn_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")

TRAINED, MORE = range(3), range(3, 6)
IN_TURN = threading.Lock()
"""torch's planner says in a global for which version it flattens just now: ranks that are threads read in turn."""


def sharded_net(name: str, **options: Any) -> tuple[Net, stretto.ShardedOptimizer]:
    model = Net()
    sync = stretto.attach(model, bucket_cap_mb=0.008)
    return model, stretto.shard(OPTIMIZERS[name](model.parameters()), sync, **options)


def plain_net(name: str) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    stretto.attach(model)
    return model, OPTIMIZERS[name](model.parameters())


def save_in_shares(rank: int, name: str, folder: str, options: dict[str, Any]) -> int:
    """Beside the checkpoint, the whole state as a plain program has it. Returns the bytes of this rank."""
    model, optimizer = sharded_net(name, **options)
    train(model, optimizer, rank, TRAINED)
    dcp.save({"model": model, "optimizer": optimizer.stateful()}, checkpoint_id=f"{folder}/checkpoint")
    whole = model.state_dict(), optimizer.state_dict()
    if rank == 0:
        torch.save(whole, f"{folder}/whole")
    return sum(path.stat().st_size for path in Path(f"{folder}/checkpoint").glob(f"__{rank}_*"))


def save_plain(rank: int, name: str, folder: str) -> None:
    model, optimizer = plain_net(name)
    train(model, optimizer, rank, TRAINED)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    if rank == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/whole")


def load_in_shares(rank: int, name: str, folder: str, options: dict[str, Any]) -> None:
    """Goes on as a plain optimizer does that was given the whole state."""
    model, optimizer = sharded_net(name, **options)
    dcp.load({"model": model, "optimizer": optimizer.stateful()}, checkpoint_id=f"{folder}/checkpoint")
    goes_on_alike(rank, name, folder, model, optimizer)


def load_plain(rank: int, name: str, folder: str) -> None:
    model, optimizer = plain_net(name)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    goes_on_alike(rank, name, folder, model, optimizer)


def save_with_torch(rank: int, name: str, folder: str, options: dict[str, Any]) -> None:
    """As programs do that were written for a plain optimizer."""
    model, optimizer = sharded_net(name, **options)
    train(model, optimizer, rank, TRAINED)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    whole = model.state_dict(), optimizer.state_dict()
    if rank == 0:
        torch.save(whole, f"{folder}/whole")


def load_with_torch(rank: int, name: str, folder: str, options: dict[str, Any]) -> None:
    """Before the first step: torch takes one with no learning rate, to have something to load into."""
    model, optimizer = sharded_net(name, **options)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    goes_on_alike(rank, name, folder, model, optimizer)


def goes_on_alike(rank: int, name: str, folder: str, model: Net, optimizer: torch.optim.Optimizer) -> None:
    weights, whole = torch.load(f"{folder}/whole")
    plain, reference = plain_net(name)
    plain.load_state_dict(weights)
    reference.load_state_dict(whole)
    state = optimizer.state_dict()
    if rank == 0:
        assert_same_state(state, whole)
    train(model, optimizer, rank, MORE)
    train(plain, reference, rank, MORE)
    assert_same(model, plain)


def alone(worker: Any, name: str, folder: str, *options: Any) -> None:
    worker(0, name, folder, *options)


@pytest.mark.ranks
@pytest.mark.parametrize("keep_grads", [True, False], ids=["keep_grads", "shares"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_two_ranks_write_and_three_or_one_read(name: str, keep_grads: bool, tmp_path: Path) -> None:
    folder, options = str(tmp_path), {"keep_grads": keep_grads}
    written = spawn_ranks(save_in_shares, 2, name, folder, options)
    assert min(written) > 0.2 * sum(written), "each rank writes"
    spawn_ranks(load_in_shares, 3, name, folder, options)
    alone(load_plain, name, folder)
    alone(load_in_shares, name, folder, options)


def wide_net() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Each rank's share of its weight is stepped in four stretches."""
    model = torch.nn.Linear(1024, 1024)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_wide(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 1024), 1.0 + rank + step)).square().mean().backward()
        optimizer.step()


def write_and_read_wide(rank: int, folder: str) -> None:
    model, optimizer = wide_net()
    sharded = stretto.shard(optimizer, stretto.attach(model))
    train_wide(model, sharded, rank)
    dcp.save({"optimizer": sharded.stateful()}, checkpoint_id=f"{folder}/checkpoint")
    again, other = wide_net()
    other = stretto.shard(other, stretto.attach(again))
    dcp.load({"optimizer": other.stateful()}, checkpoint_id=f"{folder}/checkpoint")
    written, read = sharded.state_dict(), other.state_dict()
    if rank == 0:
        assert_same_state(read, written)
        torch.save(written, f"{folder}/whole")


@pytest.mark.ranks
def test_a_share_of_one_parameter_that_is_stepped_in_several_stretches(tmp_path: Path) -> None:
    spawn_ranks(write_and_read_wide, 2, str(tmp_path))
    model, optimizer = wide_net()
    optimizer.load_state_dict(torch.load(tmp_path / "whole"))
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    for one in state["optimizer"]["state"].values():
        for value in one.values():
            value.zero_()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same_state(optimizer.state_dict(), torch.load(tmp_path / "whole"))


@pytest.mark.ranks
def test_what_a_plain_program_has_written_is_read_in_shares(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone(save_plain, "AdamW", folder)
    spawn_ranks(load_in_shares, 3, "AdamW", folder, {})


@pytest.mark.ranks
def test_a_process_group_writes_and_plain_ranks_read(tmp_path: Path) -> None:
    folder = str(tmp_path)
    spawn_ranks(save_by_messages, 3, "Adam", folder)
    spawn_ranks(load_plain, 2, "Adam", folder)


@pytest.mark.ranks
@pytest.mark.parametrize("keep_grads", [True, False], ids=["keep_grads", "shares"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_torchs_own_functions_write_and_read(name: str, keep_grads: bool, tmp_path: Path) -> None:
    """What a rank but the first read was lost, as was all of it before the first step."""
    folder, options = str(tmp_path), {"keep_grads": keep_grads}
    spawn_ranks(save_with_torch, 2, name, folder, options)
    spawn_ranks(load_with_torch, 3, name, folder, options)
    alone(load_plain, name, folder)


def save_by_messages(rank: int, name: str, folder: str) -> None:
    model = Net()
    sync = stretto.attach(model, bucket_cap_mb=0.008, transport="process_group")
    optimizer = stretto.shard(OPTIMIZERS[name](model.parameters()), sync)
    train(model, optimizer, rank, TRAINED)
    dcp.save({"model": model, "optimizer": optimizer.stateful()}, checkpoint_id=f"{folder}/checkpoint")
    whole = model.state_dict(), optimizer.state_dict()
    if rank == 0:
        torch.save(whole, f"{folder}/whole")


def test_a_world_of_one_writes_and_ranks_that_have_stepped_already_read(tmp_path: Path) -> None:
    folder = str(tmp_path)
    alone(save_in_shares, "Adam", folder, {})

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS["Adam"](model.parameters()), sync)
        train(model, optimizer, transport.rank, range(7, 9))
        everything = {"model": model, "optimizer": optimizer.stateful()}
        with IN_TURN:
            dcp.load(everything, checkpoint_id=f"{folder}/checkpoint", no_dist=True)
        weights, whole = torch.load(f"{folder}/whole")
        state = optimizer.state_dict()
        if transport.rank == 0:
            assert_same_state(state, whole)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    shared(worker, 2)


def test_parameters_without_state_are_not_written_and_begin_without_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")

    def save() -> set[str]:
        model, optimizer = sharded_net("Adam")
        model.skip = True
        train(model, optimizer, 0, range(3))
        dcp.save({"optimizer": optimizer.stateful()}, checkpoint_id=folder)
        return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)

    written = save()
    assert "optimizer.state.last.weight.exp_avg" in written
    assert not any("second" in name for name in written if "state" in name)

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS["Adam"](model.parameters()), sync)
        planner = DefaultLoadPlanner(allow_partial_load=True)
        with IN_TURN:
            dcp.load({"optimizer": optimizer.stateful()}, checkpoint_id=folder, no_dist=True, planner=planner)
        train(model, optimizer, transport.rank, range(1))
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert transport.rank or steps == {1, 4}

    shared(worker, 2)


def test_where_nothing_is_kept_there_is_no_state_after_loading_either(tmp_path: Path) -> None:
    model, optimizer = sharded_net("SGD")
    train(model, optimizer, 0, range(1))
    before = optimizer.state_dict()
    assert before["state"] == {}
    dcp.save({"optimizer": optimizer.stateful()}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": optimizer.stateful()}, checkpoint_id=tmp_path)
    assert optimizer.state_dict() == before


def test_torchs_own_functions_do_not_step_to_have_a_state() -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS["Adam"](model.parameters()), sync)
        train(model, optimizer, transport.rank, range(3))
        optimizer.zero_grad()
        before = optimizer.state_dict()
        state = get_optimizer_state_dict(model, optimizer)
        if transport.rank == 0:
            assert state["state"]["last.weight"]["step"] == 3
            assert_same_state(optimizer.state_dict(), before)
        else:
            optimizer.state_dict()

    shared(worker, 2)


def test_options_of_groups_are_read(tmp_path: Path) -> None:
    model, optimizer = sharded_net("AdamW")
    train(model, optimizer, 0, range(2))
    optimizer.param_groups[0]["lr"] = 0.125
    dcp.save({"optimizer": optimizer.stateful()}, checkpoint_id=tmp_path)

    def worker(transport: Any) -> float:
        model, sync = attached(transport)
        sharded = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        with IN_TURN:
            dcp.load({"optimizer": sharded.stateful()}, checkpoint_id=tmp_path, no_dist=True)
        return sharded.param_groups[0]["lr"]

    assert shared(worker, 2) == [0.125, 0.125]


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    _, optimizer = sharded_net("SGD")
    with pytest.raises(stretto.SetupError) as caught:
        optimizer.stateful().load_state_dict({"state": {}, "param_groups": []})
    assert str(caught.value) == (
        "shard: this is not what state_dict() of the same object has returned.\nPass stateful() to "
        "torch.distributed.checkpoint.load(); a whole state is for load_state_dict() of the optimizer."
    )
    dcp.save({"optimizer": optimizer.stateful()}, checkpoint_id=tmp_path)
    other = Net()
    rest = [one for name, one in other.named_parameters() if "back" not in name]
    smaller = stretto.shard(torch.optim.SGD(rest, lr=0.1), stretto.attach(other))
    with pytest.raises(stretto.SetupError) as caught:
        dcp.load({"optimizer": smaller.stateful()}, checkpoint_id=tmp_path)
    assert str(caught.value) == (
        "shard: parameter group 0 of the checkpoint has other parameters than the optimizer's: back.bias, back.weight "
        "are in only one of them.\nBuild the optimizer again, with the groups that it was saved with: its previous "
        "state has been overwritten."
    )


@pytest.mark.parametrize("more", [0, 1], ids=["the checkpoint has one more", "the optimizer has one more"])
def test_a_checkpoint_with_another_number_of_groups_is_named(more: int) -> None:
    model = Net()
    last, rest = [*model.last.parameters()], [one for name, one in model.named_parameters() if "last" not in name]
    optimizer = stretto.shard(torch.optim.SGD([{"params": rest}, {"params": last}], lr=0.1), stretto.attach(model))
    stateful = optimizer.stateful()
    made = stateful.state_dict()
    (made["param_groups"] if more else optimizer.param_groups).pop()
    with pytest.raises(stretto.SetupError) as caught:
        stateful.load_state_dict(made)
    assert str(caught.value) == (
        "shard: parameter group 1 of the checkpoint has other parameters than the optimizer's: last.weight are in "
        "only one of them.\nBuild the optimizer again, with the groups that it was saved with: its previous "
        "state has been overwritten."
    )


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
@pytest.mark.parametrize("loads", [False, True])
def test_a_rank_that_cannot_write_or_read_its_share_is_told_of(
    monkeypatch: pytest.MonkeyPatch, run: Any, loads: bool
) -> None:
    """Behind a load of which one rank had caught an error all went on, it with half of a state; else others waited."""
    owner, name = (Division, "take") if loads else (keeping, "kept")
    real, fails = getattr(owner, name), threading.local()

    def fail(*arguments: Any) -> Any:
        if hasattr(fails, "here"):
            raise MemoryError("no room")
        return real(*arguments)

    monkeypatch.setattr(owner, name, fail)

    def worker(transport: Any) -> str:
        model = Net()
        sharded = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), stretto.attach(model, transport=transport))
        train(model, sharded, transport.rank, range(2))
        state = sharded.stateful()
        kept = state.state_dict() if loads else {}
        if transport.rank == 1:
            fails.here = True
            before = [{**group} for group in sharded.param_groups]
            for group in kept.get("param_groups", ()):
                group["lr"], group["of another"] = 7.0, True
            with pytest.raises(MemoryError):
                state.load_state_dict(kept) if loads else state.state_dict()
            assert [{**group} for group in sharded.param_groups] == before
        with pytest.raises(stretto.CommunicationError) as told:
            train(model, sharded, transport.rank, range(2, 3))
        return str(told.value)

    assert "rank 1, pass 2, waiting: MemoryError: no room\n" in run(worker, 2)[0]


@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_torchs_own_function_takes_no_step_that_a_plain_optimizer_would_not(name: str) -> None:
    """Adagrad has a state before its first step."""

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS[name](model.parameters()), sync)
        found = get_optimizer_state_dict(model, optimizer)["state"]
        plain = Net()
        expected = get_optimizer_state_dict(plain, OPTIMIZERS[name](plain.parameters()))["state"]
        if transport.rank == 0:
            assert {key: one["step"] for key, one in found.items()} == {
                key: one["step"] for key, one in expected.items()
            }

    run_ranks(worker, 2)


@pytest.mark.parametrize("run", [run_ranks, shared], ids=["apart", "shared"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "momentum"])
def test_what_state_dict_gave_each_rank_is_loaded_again(run: Any, name: str) -> None:
    """It gives the whole to rank 0 alone."""

    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS[name](model.parameters()), sync)
        train(model, optimizer, transport.rank, TRAINED)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, transport.rank, MORE)
        expected = copy.deepcopy(model)
        sync.check()  # all have copied
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        found = optimizer.state_dict()
        assert_same_state(found, state)
        train(model, optimizer, transport.rank, MORE)
        assert_same(model, expected)

    run(worker, 3)


def test_a_look_at_the_state_on_one_rank_before_it_is_sharded_is_no_state() -> None:
    """Ranks disagreed whether to take torch's first step."""

    def worker(transport: Any) -> bool:
        model, sync = attached(transport)
        plain = OPTIMIZERS["AdamW"](model.parameters())
        if transport.rank == 0:
            assert plain.state[next(model.parameters())] == {}
        return bool(stretto.shard(plain, sync).state)

    assert run_ranks(worker, 2) == [False, False]


def test_ranks_must_not_be_given_states_of_other_parameters() -> None:
    def worker(transport: Any) -> str:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        train(model, optimizer, transport.rank, range(1))
        state = optimizer.state_dict()
        if transport.rank == 1:
            state["state"][0] = {"step": torch.tensor(1.0)}
        with pytest.raises(stretto.SetupError) as caught:
            optimizer.load_state_dict(state)
        train(model, optimizer, transport.rank, range(1, 2))
        steps = {int(one["step"]) for one in optimizer.state_dict()["state"].values()}
        assert transport.rank or steps == {2}, "nothing was lost"
        return str(caught.value)

    for rank, text in enumerate(shared(worker, 2)):
        assert text == (
            f"rank {rank}, pass 1: rank 1 was given the state of 1 parameter to load, rank 0 that of 11.\n"
            "Give each rank the whole state that rank 0's state_dict() returned, or rank 0 alone; with "
            "torch.distributed.checkpoint, use stateful()."
        )


def test_a_share_is_for_checkpoints_alone() -> None:
    def worker(transport: Any) -> None:
        model, sync = attached(transport)
        optimizer = stretto.shard(OPTIMIZERS["AdamW"](model.parameters()), sync)
        train(model, optimizer, transport.rank, range(1))
        state = optimizer.stateful().state_dict()["state"]
        share = next(one["exp_avg"] for one in state.values() if len(one["exp_avg"].shape) == 2)
        assert repr(share).startswith("BoxedTensor(") and repr(share).endswith("torch.float32)")
        with pytest.raises(stretto.UnsupportedError) as caught:
            torch.add(share, 1)
        assert str(caught.value) == (
            "aten.add.Tensor of a share of optimizer state: the values of other ranks are not here.\n"
            "Pass stateful() only to torch.distributed.checkpoint's save and load; state_dict() gives whole tensors."
        )

    shared(worker, 2)


def test_names_are_those_that_torch_gives_where_it_has_wrapped_layers() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 1))
        sync = stretto.attach(model, transport=transport)
        optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
        names = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))["param_groups"][0]["params"]
        assert optimizer.stateful().state_dict()["param_groups"][0]["params"] == names
        sync.detach()

    run_ranks(worker, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_names_are_those_of_the_module_when_the_checkpoint_is_made(world: int) -> None:
    """``stateful()`` is asked for once, before training; layers come and go after that."""

    def worker(transport: Any = None) -> str:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
        sync = stretto.attach(model, transport=transport)
        optimizer = stretto.shard(torch.optim.AdamW(model.parameters()), sync)
        stateful = optimizer.stateful()
        assert stateful.state_dict()["param_groups"][0]["params"] == ["0.weight"]
        model.insert(0, torch.nn.Linear(2, 2, bias=False))
        optimizer.add_param_group({"params": [model[0].weight]})
        model[1](model[0](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        shares = stateful.state_dict()
        assert [group["params"] for group in shares["param_groups"]] == [["1.weight"], ["0.weight"]]
        assert shares["state"].keys() <= {"0.weight", "1.weight"}
        stateful.load_state_dict(shares)
        del model[0]
        with pytest.raises(stretto.SetupError) as caught:
            stateful.state_dict()
        return str(caught.value)

    said = run_ranks(worker, 2) if world > 1 else [worker()]
    assert said == [
        f"{f'rank {rank}, shard' if world > 1 else 'shard'}: parameter 0 of group 1, (2, 2), is not in the module "
        "any more, so a checkpoint has no name for it.\n"
        'Put its replacement into optimizer.param_groups, or remove it: group["params"].'
        for rank in range(world)
    ]


def test_a_loaded_share_keeps_no_more_than_itself_in_memory() -> None:
    def worker(transport: Any) -> None:
        model = torch.nn.Linear(300, 100, bias=False)
        sync = stretto.attach(model, transport=transport)
        plain = torch.optim.Adam(model.parameters())
        state = {"step": torch.tensor(3.0), **{key: torch.ones(100, 300) for key in ("exp_avg", "exp_avg_sq")}}
        whole = plain.state_dict() | {"state": {0: state}}
        optimizer = stretto.shard(plain, sync)
        optimizer.load_state_dict(whole)
        kept = optimizer.stateful().state_dict()["state"]["weight"]
        boxes = [box for key in ("exp_avg", "exp_avg_sq") for box in kept[key].boxes.values()]
        stored = {box.untyped_storage().data_ptr(): box.untyped_storage().nbytes() for box in boxes}
        assert sum(stored.values()) < 0.6 * 2 * 300 * 100 * 4

    shared(worker, 2)


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_boxes_are_the_elements_in_the_order_of_memory(shape: list[int], data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    lying = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
    tensor = lying.permute([order.index(dim) for dim in range(len(shape))])
    first = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(first, tensor.numel()))
    found = []
    boxes = [*boxes_in_memory(tensor.shape, tensor.stride(), first, stop)]
    for (offsets, sizes), by_memory in boxes:
        box = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        found += box.permute([*by_memory]).flatten().tolist()
    assert found == [*range(first, stop)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_sharded_optimizer_is_not_copied_or_pickled() -> None:
    _, optimizer = sharded_net("SGD")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(stretto.StrettoError) as caught:
            copied(optimizer)
        assert str(caught.value) == (
            "A sharded optimizer is tied to its process: use state_dict(), on all ranks, to save or copy it."
        )
