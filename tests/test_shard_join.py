"""torch's Join over a model and its sharded optimizer: ranks without batches go on stepping their share."""

import contextlib
import logging
import threading

import pytest
import torch
import torch.distributed as dist
from models import words_come_late
from torch.distributed.algorithms.join import Join

import stretto
from stretto import DistributedDataParallel
from stretto.peers import Peers
from stretto.sharding.joining import lent
from stretto.testing import run_ranks, spawn_ranks

pytestmark = pytest.mark.ranks


class Net(torch.nn.Module):
    def __init__(self, *, sparse=False):
        super().__init__()
        self.words = torch.nn.Embedding(9, 8, sparse=sparse)
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.last = torch.nn.Linear(16, 3)
        self.unused = torch.nn.Parameter(torch.ones(5))

    def forward(self, words):
        return self.last(torch.relu(self.norm(self.first(self.words(words)))))


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "sparse": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "whole": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


def build(name, sharded, transport, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(sparse=name == "sparse"), transport=transport, bucket_cap_mb=0.0005)
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, stretto.shard(optimizer, model, **options) if sharded else optimizer


def backward(model, rank, step):
    words = torch.randint(9, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
    model(words).pow(2).sum().backward()


def trained(rank, name, counts, transport, sharded):
    """The model at the end, after clipping and with a schedule; all ranks go on together behind Join."""
    model, optimizer = build(name, sharded, transport)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Join([model, optimizer] if sharded else [model]):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            if step % 2:
                with model.no_sync():
                    backward(model, rank, step + 50)
            backward(model, rank, step)
            torch.nn.utils.clip_grad_norm_([*model.module.first.parameters(), *model.module.last.parameters()], 0.3)
            optimizer.step()
            schedule.step()
    kept = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    for group in optimizer.param_groups:  # a schedule has gone on where there were batches
        group["lr"] = 0.01
    optimizer.zero_grad()
    backward(model, rank, 99)
    own = [one.clone() for one in model.module.state_dict().values()]
    if sharded:  # without shares the state of a rank that was idle is behind
        optimizer.step()
    return own, kept


def everything(rank, counts, names, transport):
    return {name: [trained(rank, name, counts, transport, sharded) for sharded in (False, True)] for name in names}


@pytest.mark.parametrize(
    ("counts", "names", "transport"),
    [
        ((1, 4, 6), ("AdamW", "momentum", "sparse", "whole"), "auto"),
        ((5, 0), ("AdamW", "sparse"), "auto"),
        ((0, 2, 2), ("momentum",), "process_group"),
    ],
)
def test_the_model_is_that_of_a_plain_optimizer(counts, names, transport):
    ranks = spawn_ranks(everything, len(counts), counts, names, transport)
    for name in names:
        for (plain, plain_grads), (sharded, grads) in [found[name] for found in ranks]:
            assert all(torch.equal(one, other) for one, other in zip(sharded, plain, strict=True)), name
            assert [one is None for one in grads] == [one is None for one in plain_grads], name


def without_an_option(rank, transport):
    """The rank that goes on takes an option away, as before a second schedule."""
    model, optimizer = build("AdamW", True, transport)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    with Join([model, optimizer]):
        for step in range(1 + 3 * rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            if step == 2:
                del optimizer.param_groups[0]["initial_lr"]
            optimizer.step()
    return "initial_lr" in optimizer.param_groups[0]


@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_an_option_that_is_taken_away_is_so_where_there_are_no_batches_too(transport):
    assert spawn_ranks(without_an_option, 2, transport) == [False, False]


def outcome(run):
    try:
        run()
    except stretto.StrettoError as error:
        return type(error).__name__, str(error)
    return "no error"


def other_groups(rank):
    """The learning rate differs between ranks 1 and 2, which have batches; then all agree and go on."""
    model, optimizer = build("AdamW", True, "auto")
    found = []

    def run():
        with Join([model, optimizer]):
            for step in range(1 + (rank > 0)):
                optimizer.zero_grad()
                backward(model, rank, step)
                if step:
                    optimizer.param_groups[0]["lr"] = 0.1 * rank
                optimizer.step()

    found.append(outcome(run))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    torch.distributed.barrier()
    backward(model.module, rank, 0)
    optimizer.step()
    return found


def test_groups_must_be_alike_where_there_are_batches():
    assert spawn_ranks(other_groups, 3) == [
        [
            (
                "ModelMismatchError",
                f"rank {rank}, pass 2: parameter group 0 has lr=0.2 on rank 2, lr=0.1 on rank 1.\n"
                "No rank has stepped. Set the same on all ranks, schedules included; leave Join on all ranks, as those "
                "without batches have; then all can go on.",
            )
        ]
        for rank in range(3)
    ]


def goes_on_inside(rank, refused):
    """Rank 0 has fewest batches; the error of step() is caught inside by those that have some. Then all go on."""
    model, optimizer = build("AdamW", True, "auto")
    (parameters,) = (group["params"] for group in optimizer.param_groups)
    found = []

    def run():
        with Join([model, optimizer]):
            for step in range(1 + 2 * (rank > 0)):
                optimizer.zero_grad()
                backward(model, rank, step)
                if step == 1 and refused == "on all":
                    optimizer.param_groups[0]["lr"] = 0.1 * rank
                if step == 1 and refused == "on one" and rank == 1:
                    parameters.append(parameters[0])
                if step == 1 and refused == "for values" and rank == 1:
                    model.module.last.bias.data = torch.ones(3)
                found.append(outcome(optimizer.step))

    error = outcome(run)
    if refused == "on one" and rank == 1:
        parameters.pop()
    optimizer.param_groups[0]["lr"] = 0.1
    model.module.last.bias.data = torch.ones(3)
    with Join([model, optimizer]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
    return error, found, [one.clone() for one in model.parameters()]


@pytest.mark.parametrize(
    ("refused", "kind"),
    [("on all", "ModelMismatchError"), ("for values", "ModelMismatchError"), ("on one", "PeerError")],
)
def test_who_goes_on_inside_join_behind_a_refused_step_is_told_to_leave(refused, kind):
    """Ranks without batches have left with the error; the others waited for them until the time-out."""
    idle, *others = spawn_ranks(goes_on_inside, 3, refused, timeout=40)
    assert idle[1] == ["no error"] and idle[0][0] == kind
    assert "leave Join on all ranks, as those without batches have; then all" in idle[0][1]
    for rank, (error, found, parameters) in enumerate(others, 1):
        assert found[0] == "no error" and found[1][0] in ("ModelMismatchError", "PeerError", "SetupError")
        assert error == (
            "SetupError",
            f"rank {rank}, pass 2: the last step was refused inside Join, and ranks without batches have left Join "
            "with that error.\nAfter an error of step(), leave Join on all ranks; then all can go on.",
        )
        assert all(map(torch.equal, parameters, idle[2]))


def goes_on_without(rank):
    """What is kept of the error, or the Join itself, keeps a rank inside as far as it can see."""
    model, optimizer = build("AdamW", True, "auto")
    kept, found = [Join([model, optimizer])], []

    def run():
        with kept[0]:
            for step in range(1 + (rank > 0)):
                backward(model, rank, step)
                optimizer.param_groups[0]["lr"] = 0.1 * rank if step else 0.1
                optimizer.step()

    def one_pass():
        optimizer.zero_grad()
        backward(model, rank, 5)
        optimizer.step()

    found.append(outcome(run)[0])
    optimizer.param_groups[0]["lr"] = 0.1
    found.append(outcome(one_pass) if rank else "no error")
    kept.clear()
    for _ in range(3):
        one_pass()
    return found, [one.clone() for one in model.parameters()]


def test_who_left_join_behind_a_refused_step_can_go_on_without():
    (idle, one), *others = spawn_ranks(goes_on_without, 3, timeout=40)
    assert idle == ["ModelMismatchError", "no error"]
    for found, other in others:
        assert found[0] == "ModelMismatchError" and found[1][0] == "SetupError"
        assert all(map(torch.equal, one, other))


def two_of_them(rank):
    """The step of the first is refused, and that is caught: the second waited for ranks that have left."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    first, second = (
        stretto.shard(torch.optim.SGD(one.parameters(), lr=0.1), model)
        for one in (model.module.first, model.module.last)
    )

    def run():
        with Join([model, first, second]):
            for step in range(1 + (rank > 0)):
                backward(model, rank, step)
                if step:
                    first.param_groups[0]["lr"] = 0.1 * rank
                told = outcome(first.step)
                second.step()
                assert told == "no error"

    return outcome(run)[0]


def test_a_second_optimizer_does_not_step_behind_a_refused_one():
    assert spawn_ranks(two_of_them, 3, timeout=40) == ["ModelMismatchError", "SetupError", "SetupError"]


def refused(rank):
    found = {}
    model, optimizer = build("AdamW", True, "auto", keep_grads=False)
    found["shares"] = outcome(lambda: Join([model, optimizer]))
    optimizer.unshard()
    model, optimizer = build("AdamW", True, "auto")

    def alone():
        with model.join():
            backward(model, rank, 0)

    found["alone"] = outcome(alone)
    torch.distributed.barrier()
    found["anew"] = outcome(lambda: Join([model, optimizer], divide_by_initial_world_size=False))

    found["another group"] = outcome(lambda: model._update_process_group(torch.distributed.group.WORLD))

    def first():
        with Join([optimizer, model]):
            optimizer.step()

    found["first"] = outcome(first)
    return found


def test_what_is_refused_by_name():
    for rank, found in enumerate(spawn_ranks(refused, 2)):
        assert found == {
            "shares": (
                "SetupError",
                f"rank {rank}, before pass 1: with keep_grads=False each rank has only its share of the gradients, so "
                "nobody could step for a rank without batches.\nLeave out keep_grads=False, or give all ranks the same "
                "number of batches.",
            ),
            "alone": (
                "SetupError",
                f"rank {rank}: a rank without batches cannot leave the step to the others while an optimizer is "
                "sharded: its share of the model would not be updated.\n"
                "Give all ranks the same number of batches; or join the optimizer too, with Join([model, optimizer]); "
                "or let that rank step as well: a backward of zeros, parameter.backward(torch.zeros_like(parameter)), "
                "then optimizer.step().",
            ),
            "anew": (
                "SetupError",
                f"rank {rank}: join(divide_by_initial_world_size=False) makes a new handle, which would end "
                "the sharded optimizer.\nWrap with weighted=True before the optimizer is sharded: then the handle "
                "stays.",
            ),
            "another group": (
                "SetupError",
                f"rank {rank}: _update_process_group makes a new handle, which would end the sharded optimizer.\n"
                "Call its unshard() before, and shard what it returns once more afterwards.",
            ),
            "first": (
                "SetupError",
                "Join: a sharded optimizer must come after its model: with Join([model, optimizer]).",
            ),
        }


def left_out(rank):
    """Rank 1 has more batches, and leaves a step out."""
    model, optimizer = build("AdamW", True, "auto")

    def run():
        with Join([model, optimizer]):
            for step in range(1 + 3 * rank):
                optimizer.zero_grad()
                backward(model, rank, step)
                if step != 1:
                    optimizer.step()

    found = outcome(run)
    return found, outcome(lambda: optimizer.step())


def test_a_step_that_is_left_out_is_named_on_all_ranks():
    (idle, idle_later), (other, later) = spawn_ranks(left_out, 2)
    said = (
        "rank 1, pass 2 was not followed by a step of the sharded optimizer: inside Join, ranks without batches "
        "wait for a step after each pass.\n"
        "Step after each backward; accumulate inside no_sync()."
    )
    assert other == ("SetupError", said)
    assert idle[0] == "PeerError" and said.partition("\n")[0] in idle[1]
    assert idle_later[0] == later[0] == "CommunicationError"


def stepped_twice(rank):
    model, optimizer = build("AdamW", True, "auto")
    with Join([model, optimizer]):
        for step in range(1 + 3 * rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            if step:
                optimizer.step()


def test_a_second_step_is_named():
    with pytest.raises(RuntimeError) as raised:
        spawn_ranks(stepped_twice, 2, timeout=30)
    assert (
        "rank 1, pass 2: this step of the sharded optimizer follows no pass of its own: inside Join, ranks without "
        "batches step once after each pass.\n"
        "Step once after each backward outside of no_sync(); after one that has raised, call zero_grad() and go on."
    ) in str(raised.value)


def left_by_an_exception(rank):
    """Between a backward and its step; then on without Join, with it, and with a learning rate that is a tensor."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    rate = torch.tensor(0.05)
    optimizer = stretto.shard(torch.optim.AdamW(model.parameters(), lr=rate), model)
    try:
        with Join([model, optimizer]):
            backward(model, rank, 0)
            raise ValueError("caught")
    except ValueError:
        pass
    for step in range(2):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    with Join([model, optimizer]):
        for step in range(1 + 2 * rank):
            rate.fill_(0.01 if step else 0.05)
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
    rate.fill_(0.02)
    optimizer.zero_grad()
    backward(model, rank, 7)
    optimizer.step()
    kept = optimizer.param_groups[0]["lr"] is rate
    alone = dist.new_group([0]), dist.new_group([1])
    single = DistributedDataParallel(Net(), process_group=alone[rank])
    plain = stretto.shard(torch.optim.AdamW(single.parameters()), single)
    with Join([single, plain]):
        backward(single, rank, 0)
        plain.step()
    return kept, [one.clone() for one in model.parameters()]


def test_what_is_left_by_an_exception_goes_on():
    (kept, first), (also, second) = spawn_ranks(left_by_an_exception, 2)
    assert kept and also and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def used_behind_an_exception(rank):
    """What all ranks do right behind it, before any pass has told them that all have left."""
    model, optimizer = build("AdamW", True, "auto")

    def leave():
        with contextlib.suppress(ValueError), Join([model, optimizer]):
            optimizer.zero_grad()
            backward(model, rank, 0)
            optimizer.step()
            raise ValueError("caught")

    def alone():
        with model.join():
            for step in range(1 + rank):
                backward(model, rank, step)

    leave()
    optimizer.step()
    leave()
    with model.join(enable=False):
        backward(model, rank, 1)
        optimizer.step()
        optimizer.step()
    leave()
    refused = outcome(model.synchronizer.shadow_pass)[0]
    return refused, outcome(alone)[0], [one.clone() for one in model.parameters()]


def test_right_behind_an_exception_it_is_not_inside():
    """A plain step was refused there, a pass without one let through, and join() without it waited for its step."""
    (*refused, first), (*also, second) = spawn_ranks(used_behind_an_exception, 2)
    assert refused == also == ["SetupError"] * 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def fails_and_goes_on(rank, late):
    """The second pass of rank 1, with rank 0 or behind its batches: nobody steps then."""
    if late:
        words_come_late()
    model, optimizer = build("AdamW", True, "auto")
    became = []
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            fails = rank and step in (1, 3)
            hook = model.module.first.weight.register_hook(lambda gradient, fails=fails: 1 // 0 if fails else None)
            try:
                backward(model, rank, step)
            except (ZeroDivisionError, stretto.PeerError) as error:
                became.append(type(error).__name__)
                continue
            finally:
                hook.remove()
            optimizer.step()
            became.append("stepped")
    return became, [one.clone() for one in model.parameters()]


@pytest.mark.parametrize("late", [False, True])
def test_a_pass_that_failed_is_followed_by_no_step(late):
    """Who went on as told was refused in the next pass: the last had not been stepped. Late words let all hang."""
    (first, one), (second, other) = spawn_ranks(fails_and_goes_on, 2, late, timeout=30)
    assert first == ["stepped", "PeerError"]
    assert second == ["stepped", "ZeroDivisionError", "stepped", "ZeroDivisionError"]
    assert all(map(torch.equal, one, other))


def fails_around_join(rank, when, batches):
    """Rank 1, in the last pass before ``Join``, or in its last one inside, where a sharded step crosses nothing."""
    words_come_late()
    model, optimizer = build("AdamW", when == "inside", "auto")
    became = []

    def step(number, fails):
        optimizer.zero_grad()
        hook = model.module.first.weight.register_hook(lambda gradient: 1 // 0 if fails else None)
        try:
            backward(model, rank, number)
        except ZeroDivisionError as error:
            became.append(type(error).__name__)
        else:
            if when != "before" or number != 1:
                optimizer.step()
            became.append("went well")
        finally:
            hook.remove()

    try:
        step(0, False)
        step(1, rank and when == "before")
        with Join([model, optimizer] if when == "inside" else [model]):
            for number in range(batches[rank]):
                step(2 + number, rank and when == "inside" and number == batches[rank] - 1)
        for number in range(6, 8):
            step(number, False)
    except stretto.PeerError as error:
        assert not error.can_go_on
        became.append("PeerError")
    return became, [one.clone() for one in model.parameters()]


@pytest.mark.parametrize(
    ("when", "batches", "told"),
    [
        ("before", (1, 3), (["went well", "PeerError"], ["ZeroDivisionError", "PeerError"])),
        ("before", (0, 2), (["went well", "PeerError"], ["ZeroDivisionError", "PeerError"])),
        ("inside", (1, 2), (["went well"] * 4, [*["went well"] * 2, "ZeroDivisionError", *["went well"] * 2])),
    ],
)
def test_where_words_come_late_join_begins_or_ends_behind_a_pass_that_failed(when, batches, told):
    """The rank that failed took for known, or for unknown, what the others' pass had not been: it stepped alone."""
    (first, one), (second, other) = spawn_ranks(fails_around_join, 2, when, batches, timeout=30)
    assert (first, second) == (["went well", *told[0]], ["went well", *told[1]])
    assert all(map(torch.equal, one, other))


def fails_amid(rank, victim):
    """Between the first meeting and the step, where gradients are lent."""
    model, optimizer = build("AdamW", True, "auto")

    def fail(*_, **__):
        raise KeyboardInterrupt

    def run():
        with Join([model, optimizer]), pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                patch.setattr("stretto.sharding.joining.broadcast_coalesced", fail)
            for step in range(1 + rank):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
            if not rank:  # the rest runs as Join is left
                patch.undo() if victim else None
                optimizer.zero_grad()
                Join.__exit__(Join([model, optimizer]), None, None, None)

    try:
        return outcome(run)
    except KeyboardInterrupt:
        return "stopped", outcome(lambda: model.module.last.weight.sum().item())


def test_a_rank_that_fails_while_gradients_are_lent_is_named():
    (idle, _), (stopped, looked) = spawn_ranks(fails_amid, 2, 1)
    assert idle == "PeerError" and stopped == "stopped" and looked[0] == "CommunicationError"


def steps_behind_join(rank):
    """What is logged in a step behind ``Join``, at whose end torch copies the last rank's model to all."""
    told = []
    handler = logging.Handler("WARNING")
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("stretto").addHandler(handler)
    model, optimizer = build("momentum", True, "auto")
    with Join([model, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
    optimizer.zero_grad()
    backward(model, rank, 9)
    optimizer.step()
    return [one for one in told if "written in place" in one]


def test_the_copy_at_the_end_of_join_is_no_write_by_the_program():
    assert spawn_ranks(steps_behind_join, 2) == [[], []]


def test_the_lender_alone_sends_its_sparse_gradients(monkeypatch):
    """Each rank with batches sent its own, of which those of one are used."""
    sent, gather = [], Peers.gather

    def noted(self, value):
        if "torch.sparse_coo" in repr(value):
            sent.append(threading.current_thread().name)
        return gather(self, value)

    def worker(transport):
        model = torch.nn.Sequential(torch.nn.Embedding(9, 8, sparse=True), torch.nn.Linear(8, 1))
        sync = stretto.attach(model, transport=transport)
        sharded = sync.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([transport.rank])).sum().backward()
        for one in model.parameters():
            one.grad = one.grad * (transport.rank + 1)
        own = [one.grad for one in model.parameters()]
        queue, raised = sync._reducer.queue, []
        with lent(sharded._shares._groups, queue, raised.append, idle=transport.rank == 0):
            values = [one.grad.to_dense().tolist() for one in model.parameters()]
        assert all(one.grad is before for one, before in zip(model.parameters(), own, strict=True))
        return values, raised

    monkeypatch.setattr(Peers, "gather", noted)
    idle, lender, other = run_ranks(worker, 3)
    assert idle == lender != other
    assert sent == ["rank 1"]
