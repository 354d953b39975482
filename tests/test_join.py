"""Inside ``join()``: a pass is announced as it begins, whatever ran forward or failed before; whose buffers count."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Fails, words_come_late
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join, Joinable

import stretto
from stretto.testing import spawn_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, fails: str = "") -> torch.Tensor:
        if fails == "forward":
            raise ValueError("bad token")
        hidden = self.norm(self.a(x))
        return self.b(Fails.apply(hidden) if fails == "backward" else hidden)


Trained = tuple[list[str], list[torch.Tensor], int, list[torch.Tensor], list[str]]


def train(rank: int, transport: str, fails: str, batches: tuple[int, int], at: int = 3) -> Trained:
    """What became of each batch, the parameters before the end of ``join()`` makes all equal, the number of passes by
    then, the parameters behind one more step without it, and what was warned of."""
    torch.manual_seed(0)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("stretto").addHandler(handler)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    became = []

    def step(number: int, fails: str = "") -> None:
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = model(x, fails=fails).square().mean()
        if fails == "loss":
            raise ValueError("bad weight")
        loss.backward()
        optimizer.step()

    with model.join():
        for number in range(batches[rank]):
            try:
                step(number, fails if rank == 1 and number == at else "")
            except (ValueError, stretto.PeerError) as error:
                became.append(type(error).__name__)
            else:
                became.append("stepped")
        before = [parameter.detach().clone() for parameter in model.parameters()]
    passes = model.synchronizer.statistics.passes
    step(20)
    logging.getLogger("stretto").removeHandler(handler)
    return became, before, passes, [parameter.detach().clone() for parameter in model.parameters()], warnings


STEPPED, MINE, TOLD = "stepped", "ValueError", "PeerError"
BATCHES = {"both have batches": (5, 5), "the other has run out": (2, 5)}
BECAME = {  # of rank 1's fourth batch, and behind it; a forward that failed is told in the next pass
    ("forward", "both have batches"): ([*[STEPPED] * 3, TOLD, STEPPED], [*[STEPPED] * 3, MINE, TOLD]),
    ("forward", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, STEPPED]),
    ("backward", "both have batches"): ([*[STEPPED] * 3, TOLD, STEPPED], [*[STEPPED] * 3, MINE, STEPPED]),
    ("backward", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, STEPPED]),
    ("loss", "both have batches"): ([STEPPED] * 5, [*[STEPPED] * 3, MINE, STEPPED]),
    ("loss", "the other has run out"): ([STEPPED] * 2, [*[STEPPED] * 3, MINE, STEPPED]),
}


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize(("fails", "who"), BECAME)
def test_a_failure_that_is_caught_inside_join_leaves_all_in_step(transport: str, fails: str, who: str) -> None:
    """They told joined ranks of the batch that had failed and of the next: Gloo aborted, or all waited for ever."""
    (first, *mine), (second, *theirs) = spawn_ranks(train, 2, transport, fails, BATCHES[who])
    assert (first, second) == BECAME[fails, who]
    if fails == "backward" and who == "both have batches":  # else one has stepped more often
        assert all(map(torch.equal, mine[0], theirs[0]))
    assert all(map(torch.equal, mine[2], theirs[2]))
    are_shifted = fails == "loss" and who == "both have batches"
    assert ["ran forward more often" in "".join(warnings) for warnings in (mine[3], theirs[3])] == [are_shifted] * 2
    assert len(mine[3]) == are_shifted


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("fails", ["forward", "loss"])
def test_a_last_batch_that_fails_before_its_backward_is_no_pass(transport: str, fails: str) -> None:
    """It had been announced in forward: the others waited for it, or Gloo ended a process."""
    (first, _, one, mine, *_), (second, _, other, theirs, *_) = spawn_ranks(train, 2, transport, fails, (2, 4))
    assert (first, second) == ([STEPPED] * 2, [*[STEPPED] * 3, MINE])
    assert (one, other) == (2, 3)
    assert all(map(torch.equal, mine, theirs))


def in_one(model: torch.nn.Module, *batches: torch.Tensor) -> None:
    one, other = map(model, batches)
    (one.mean() + other.square().mean()).backward()


def in_two(model: torch.nn.Module, *batches: torch.Tensor) -> None:
    one, other = map(model, batches)
    one.mean().backward()
    model.zero_grad()  # else what it has summed would be divided again, as in torch: who has run out holds nothing
    other.square().mean().backward()


def past_the_wrapper(model: torch.nn.Module, *batches: torch.Tensor) -> None:
    getattr(model, "module", model)(batches[0]).mean().backward()


Backward = Callable[..., None]
BACKWARDS: dict[Backward, int] = {in_one: 1, in_two: 2, past_the_wrapper: 1}


def batches_of(rank: int, number: int) -> list[torch.Tensor]:
    return [*torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(10 * number + rank))]


def train_by(rank: int, transport: str, backward: Backward, steps: tuple[int, ...]) -> tuple[list[torch.Tensor], ...]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for number in range(steps[rank]):
            optimizer.zero_grad()
            backward(model, *batches_of(rank, number))
            optimizer.step()
        inside = [one.detach().clone() for one in model.state_dict().values()]
    assert model.synchronizer.statistics.passes == BACKWARDS[backward] * steps[rank]
    assert model._get_ddp_logging_data()["num_buckets_reduced"] == len(model.synchronizer.plan.buckets)
    return inside, [one.detach().clone() for one in model.state_dict().values()]


def alone(backward: Backward, steps: tuple[int, ...]) -> list[torch.Tensor]:
    """One process, with a model for each rank; those that have run out give nothing, and follow the last that has not.

    Returns what the last rank's state is in the end.
    """
    torch.manual_seed(0)
    model = Net()
    models = [model, *(copy.deepcopy(model) for _ in steps[1:])]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    for number in range(max(steps)):
        have = [rank for rank, most in enumerate(steps) if number < most]
        for rank in have:
            optimizers[rank].zero_grad()
            backward(models[rank], *batches_of(rank, number))
        means = [
            sum(p.grad / len(steps) for p in ps)
            for ps in zip(*(models[rank].parameters() for rank in have), strict=True)
        ]
        for rank in have:
            for parameter, mean in zip(models[rank].parameters(), means, strict=True):
                parameter.grad = mean.clone()
            optimizers[rank].step()
            for name, buffer in models[rank].named_buffers():
                buffer.copy_(models[have[-1]].get_buffer(name))
    return [*models[steps.index(max(steps))].state_dict().values()]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("steps", [(2, 4), (4, 2), (3, 1, 2)])
def test_a_pass_is_announced_when_it_begins(transport: str, backward: Backward, steps: tuple[int, ...]) -> None:
    """By whatever forward, once or twice. Buffers follow a rank that has batches, and so does the model in the end."""
    found = spawn_ranks(train_by, len(steps), transport, backward, steps)
    wanted = alone(backward, steps)
    for rank, (_, behind) in enumerate(found):
        assert all(map(torch.equal, behind, found[0][1])), rank
    last = found[steps.index(max(steps))][0]
    torch.testing.assert_close(last, wanted)


# What Join is, and when it is over


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.state_dict().values()]


def without(rank: int, transport: str, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = {
        "off": lambda: model.join(enable=False),
        "off, by weights": lambda: model.join(enable=False, divide_by_initial_world_size=False),
        "left by an exception": model.join,
    }.get(how, contextlib.nullcontext)
    with contextlib.suppress(ValueError), inside():
        if how == "left by an exception":
            raise ValueError("bad epoch")
        past_the_wrapper(model, *batches_of(rank, 0))
        optimizer.step()
    for number in range(1, 4):
        optimizer.zero_grad()
        (past_the_wrapper if number < 3 else in_one)(model, *batches_of(rank, number))
        optimizer.step()
    return state_of(model)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_where_join_is_off_or_was_left_all_is_as_without_it(transport: str) -> None:
    """Buffers went on to follow the last rank, in silence."""
    plain = spawn_ranks(without, 2, transport, "without")
    for how in ("off", "off, by weights"):
        for one, other in zip(spawn_ranks(without, 2, transport, how), plain, strict=True):
            assert all(map(torch.equal, one, other)), how
    left = spawn_ranks(without, 2, transport, "left by an exception")
    assert all(map(torch.equal, *left))


def buffers_behind_an_exception(rank: int, transport: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    with contextlib.suppress(ValueError), model.join():
        in_one(model, *batches_of(rank, 0))
        raise ValueError("bad epoch")
    in_one(model, *batches_of(rank, 2))  # in which all say that they have left
    before = model.module.norm.running_mean.tolist()
    wanted = copy.deepcopy(model.module)
    wanted(batches_of(0, 1)[0])  # rank 0's batch
    past_the_wrapper(model, *batches_of(rank, 1))
    assert before != model.module.norm.running_mean.tolist()
    return model.module.norm.running_mean.tolist(), wanted.norm.running_mean.tolist()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_behind_an_exception_that_left_join_buffers_follow_rank_0_again(transport: str) -> None:
    for found, wanted in spawn_ranks(buffers_behind_an_exception, 2, transport):
        assert found == wanted


def buffers_of_a_mean(rank: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport="shared_memory", buffers="mean")
    wanted = copy.deepcopy(model.module)
    with model.join():
        for number in range(1 + rank):
            wanted.load_state_dict(model.module.state_dict())
            past_the_wrapper(model, *batches_of(rank, number))
    wanted(batches_of(1, 1)[0])
    return model.module.norm.running_mean.tolist(), wanted.norm.running_mean.tolist()


def test_a_rank_without_batches_has_no_part_in_the_mean_of_buffers() -> None:
    (mine, _), (theirs, wanted) = spawn_ranks(buffers_of_a_mean, 2)
    assert mine == theirs == wanted


def goes_on_behind(rank: int, transport: str, throws: bool) -> tuple[list[float], list[int], list[torch.Tensor]]:
    """All leave by an exception, which one rank keeps, and the Join with it.

    Returns what a sum of the program's own came to behind each of some passes, how many passes had been announced by
    then, and the parameters.
    """
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    announced, tell = [0], Join.notify_join_context

    def notify(joinable: Joinable) -> object:
        announced[0] += joinable._join_config.enable
        return tell(joinable)

    Join.notify_join_context = staticmethod(notify)

    def step(number: int) -> None:
        optimizer.zero_grad()
        in_one(model, *batches_of(rank, number))
        optimizer.step()

    def epoch() -> ValueError | None:
        context = model.join(throw_on_early_termination=throws)
        try:
            with context:
                step(0)
                raise ValueError("bad epoch")
        except ValueError as error:
            return error if rank else None

    sums, passes, kept = [], [], epoch()
    for number in range(1, 5):
        if number == 3:
            kept = None
        step(number)
        mine = torch.tensor([10.0 * (rank + 1)])
        dist.all_reduce(mine)
        sums.append(mine.item())
        passes.append(announced[0])
    assert kept is None
    return sums, passes, [one.detach().clone() for one in model.state_dict().values()]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("throws", [False, True])
def test_an_exception_has_left_join_where_it_has_on_all_ranks(transport: str, throws: bool) -> None:
    """A rank that kept it went on to announce passes, alone: a sum of the program's own was another's."""
    (sums, passes, one), (sums_too, passes_too, other) = spawn_ranks(goes_on_behind, 2, transport, throws)
    assert sums == sums_too == [30.0] * 4
    assert passes == passes_too == [2, 3, 4, 4]
    assert all(map(torch.equal, one, other))


def late_words(rank: int, transport: str) -> tuple[int, list[torch.Tensor]]:
    words_come_late()
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    in_one(model, *batches_of(rank, 0))
    with contextlib.suppress(ValueError), model.join():
        raise ValueError("bad epoch")
    in_one(model, *batches_of(rank, 1))  # in which all say that they have left
    with model.join():
        for number in range(2 + 2 * rank):
            model.zero_grad()
            in_one(model, *batches_of(rank, number))
    return model.synchronizer.statistics.passes, state_of(model)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_words_that_come_late_end_no_later_join(transport: str) -> None:
    (passes, one), (also, other) = spawn_ranks(late_words, 2, transport)
    assert (passes, also) == (4, 6)
    assert all(map(torch.equal, one, other))


def hooked_inside(rank: int) -> tuple[int, list[torch.Tensor]]:
    """What is registered inside lets the handle be made anew."""
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(torch.nn.Linear(3, 1))
    with model.join(divide_by_initial_world_size=False):
        model.register_comm_hook(None, fp16_compress_hook)
        for _ in range(1 + 2 * rank):
            model(torch.ones(2, 3)).mean().backward()
            model.zero_grad()
    return model.synchronizer.statistics.passes, state_of(model)


def test_a_handle_that_is_made_anew_inside_join_is_inside_too() -> None:
    (passes, one), (also, other) = spawn_ranks(hooked_inside, 2)
    assert (passes, also) == (1, 3)
    assert all(map(torch.equal, one, other))


def words_held(rank: int) -> list[bool]:
    """Of the words about passes: whether somebody still has them."""
    model = stretto.DistributedDataParallel(torch.nn.Linear(3, 1))
    words, tell = [], Join.notify_join_context

    def notify(joinable: Joinable) -> object:
        words.append(weakref.ref(word := tell(joinable)))
        return word

    Join.notify_join_context = staticmethod(notify)
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(2, 3)).mean().backward()
    copy.deepcopy(model)
    return [word() is not None for word in words]


def test_gloo_is_not_the_last_to_hold_the_word_about_a_pass() -> None:
    """A thread of Gloo's was, and asked for the interpreter's lock as the program ended: "terminate called"."""
    assert spawn_ranks(words_held, 2) == [[True] * 2, [True] * 3]


def weighs(rank: int, transport: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a last step of rank 1's alone, inside a plain ``join()``, and with a comm hook behind it."""
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(torch.nn.Linear(3, 1), transport=transport)
    first = model.synchronizer
    with model.join(divide_by_initial_world_size=False, enable=False):
        assert model.synchronizer is first

    def leave() -> None:
        with contextlib.suppress(ValueError), model.join(divide_by_initial_world_size=False):
            model(torch.ones(2, 3)).mean().backward()
            raise ValueError("bad epoch")

    leave()
    with model.join():
        for _ in range(rank):
            model.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            alone = model.module.weight.grad.clone()
    leave()
    model.register_comm_hook(None, fp16_compress_hook)
    model.zero_grad()
    model((rank + 1) * torch.ones(2, 3)).mean().backward()
    return alone if rank else torch.full((1, 3), 0.5), model.module.weight.grad


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_behind_an_exception_the_mean_is_over_all_ranks_again(transport: str) -> None:
    """It went on over those that had batches; and a comm hook was refused for a weight that nobody had asked for."""
    for alone, hooked in spawn_ranks(weighs, 2, transport):
        torch.testing.assert_close(alone, torch.full((1, 3), 0.5))
        torch.testing.assert_close(hooked, torch.full((1, 3), 1.5))


def throws(rank: int, transport: str, backward: Backward) -> tuple[int, str, int]:
    torch.manual_seed(0)
    model = stretto.DistributedDataParallel(Net(), transport=transport)
    steps, text = 0, ""
    try:
        with model.join(throw_on_early_termination=True):
            for number in range(2 + 3 * rank):
                model.zero_grad()
                backward(model, *batches_of(rank, number))
                steps += 1
    except RuntimeError as error:
        text = str(error)
        for number in range(2):  # they go on together, while the exception holds the Join on one rank alone
            in_one(model, *batches_of(rank, number))
    return steps, text, model.synchronizer.statistics.passes


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("backward", [in_one, past_the_wrapper])
def test_who_is_to_stop_early_is_told_whatever_ran_forward(transport: str, backward: Backward) -> None:
    assert spawn_ranks(throws, 2, transport, backward) == [
        (2, "Rank 0 exhausted all inputs.", 4),
        (2, "Detected at least one rank that exhausted inputs. Throwing across all ranks.", 4),
    ]


class Mixin:
    def __init__(self) -> None:
        self.steps = 0


class OfAProgram(stretto.DistributedDataParallel, Mixin):
    """Whose other constructor is its own affair."""


def counts(rank: int, transport: str) -> int:
    model = OfAProgram(Net(), transport=transport)
    model.steps = 7
    for _ in range(2):
        with model.join():
            for number in range(1 + rank):
                in_one(model, *batches_of(rank, number))
    return model.steps


def test_the_end_of_join_leaves_what_a_program_has_on_its_wrapper() -> None:
    """It ran the constructors of the program's mixins."""
    assert spawn_ranks(counts, 2, "shared_memory") == [7, 7]
