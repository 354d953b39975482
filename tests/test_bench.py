"""The fair comparison: who takes part, what is told of them, and ``stretto bench``."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_programs
from comparisons import MACHINE, made_up

from stretto import SetupError
from stretto.bench import Comparison, Contestant, Effort, Machine, Quartiles, compare, everybody, this_machine
from stretto.bench.build import Training, build
from stretto.bench.compare import enter
from stretto.bench.contestants import ALONE, FLOOR, LOCKSTEP, REPLICATE, TUNED, alone, chosen, least, naive
from stretto.bench.factory import model_of, try_out, workload_of
from stretto.bench.load import BrokenModelError, load
from stretto.bench.plots import check, plot
from stretto.bench.result import geometric_mean
from stretto.bench.timing import interleave
from stretto.cli import execute
from stretto.quiet import quietly
from stretto.sharding.awaited import Arrival
from stretto.testing import read_results, spawn_ranks
from stretto.transport import SharedMemoryTransport

ROOT = Path(__file__).parent.parent
QUICK = Effort(rounds=2, seconds=1.0, block=0.002, warm_up=1)
MINE = """
import torch
from torch import nn

class Answer:
    def __init__(self, loss): self.loss = loss

class Keywords(nn.Linear):
    def forward(self, x, scale): return Answer(super().forward(x).sum() * scale)

class Pair(nn.Linear):
    def forward(self, x, y): return super().forward(x), y

class Named(nn.Linear):
    def forward(self, x): return {"logits": (made := super().forward(x)), "loss": made.sum()}

class Silent(nn.Linear):
    def forward(self, x): return None

class Unlabelled(nn.Linear):
    def forward(self, x): return Answer(None)

count = [0]
def counted():
    count[0] += 1
    return torch.ones(3, 4)

def plain(): return nn.Linear(4, 4), torch.ones(3, 4)
def keywords(): return Keywords(4, 4), {"x": torch.ones(3, 4), "scale": 2}
def pair(): return Pair(4, 4), (torch.ones(3, 4), 1)
def named(): return Named(4, 4), torch.ones(3, 4)
def three(): return nn.Linear(4, 4), counted, lambda model, batch: model(batch).sum()
def silent(): return Silent(4, 4), torch.ones(3, 4)
def unlabelled(): return Unlabelled(4, 4), torch.ones(3, 4)
def lone(): return nn.Linear(4, 4)
def images(): return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
def tokens(): return nn.Sequential(nn.Embedding(7, 2), nn.Flatten())
def guessed_wrong(): return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(4, 4))
def no_layer(): return nn.PReLU()
def odd_loss(): return torch.nn.Linear(4, 4), torch.ones(2, 4), lambda model, batch: model(batch)
def fails(): raise KeyError("lost")
def fails_in_a_library(): return __import__("json").loads("")
def with_targets(): return nn.Linear(4, 4), (torch.ones(3, 4), torch.ones(3, 4))
class Nets:
    small = nn.Linear(4, 1)
def swapped(): return torch.ones(3, 4), nn.Linear(4, 4)
def shapes(): return nn.Linear(4, 4), torch.ones(3, 5)
number = 3
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("mine") / "mine_for_bench.py"
    file.write_text(MINE)
    return str(file)


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


# For real


@pytest.fixture(scope="module")
def found(mine: str) -> Comparison:
    broken = Contestant("broken", "torch", {"no_such_option": 1})
    return compare(f"{mine}:plain", contestants=[*everybody(), broken], effort=QUICK)


@pytest.mark.ranks
def test_everybody_runs_and_who_cannot_is_named(found: Comparison) -> None:
    assert [*found.seconds] == [one.name for one in everybody()]
    assert {ALONE, *(one.name for one in naive()), TUNED, REPLICATE, "stretto", LOCKSTEP, FLOOR} <= {*found.seconds}
    assert [*found.skipped] == ["broken"] and found.skipped["broken"].startswith("TypeError: ")
    assert found.stands_for[TUNED].startswith("torch DDP, ") and found.stands_for[REPLICATE].startswith("replicate, ")
    assert all(len(times) == found.rounds == 2 and min(times) > 0 for times in found.seconds.values())
    assert found.ratio(ALONE).median == 1.0 and found.ratio("stretto").median > 0


def steps_in_shares(rank: int) -> dict[str, object]:
    model, loss = workload_of("policy")()
    training = build(least(), lambda: (model, loss))
    met, shared = [], SharedMemoryTransport
    meet = shared.meet
    shared.meet = lambda self, *told: met.append(rank) or meet(self, *told)
    training.steps(3)
    floor = training.after
    loss(model).backward()  # as in every step before
    share = slice(rank * 5508 // 2, (rank + 1) * 5508 // 2)
    own = torch.cat([one.grad.flatten() for one in model.parameters()])[share]
    model.zero_grad()
    return {
        "stepped": sum(one.numel() for one in floor.parameters),
        "of": sum(one.numel() for one in model.parameters()),
        "against": torch.equal(torch.cat([*floor.parameters]).sign(), -own.sign()),
        "sums of shares": {one for block in floor.blocks for one in block.share.tolist()},
        "meetings": len(met),
        "gradients left": sum(one.grad is not None for one in model.parameters()),
    }


@pytest.mark.ranks
def test_model_stays_as_it_is_however_long_it_is_stepped() -> None:
    """What a model knows by heart has subnormal gradients, and takes several times as long."""
    before, after, moved = spawn_ranks(stepped_for_long, 1)[0]
    assert after == pytest.approx(before, rel=1e-3) and moved


def stepped_for_long(_: int) -> tuple[float, float, bool]:
    torch.manual_seed(0)
    model, loss = workload_of("layers")()
    training = build(replace(alone(), optimizer="adamw"), lambda: (model, loss))
    before, bias = loss(model).item(), model[0].bias.detach().clone()
    training.steps(20)
    return before, loss(model).item(), not torch.equal(model[0].bias, bias)


@pytest.mark.ranks
def test_floor_in_shares_steps_what_each_rank_would_have() -> None:
    """What is summed is 1 on every rank; what is stepped follows the model's gradients."""
    for found in spawn_ranks(steps_in_shares, 2):
        expected = {"of": 5508, "against": True, "sums of shares": {2.0}, "meetings": 6, "gradients left": 0}
        assert found == expected | {"stepped": 5508 // 2}


@pytest.mark.ranks
def test_result_goes_to_json_and_back_and_says_what_must_be_known(found: Comparison) -> None:
    value = json.loads(json.dumps(found.to_dict()))
    again = Comparison.from_dict(value)
    assert again.to_dict() == found.to_dict()
    assert value["summary"]["stretto"]["ratio"]["low"] <= value["summary"]["stretto"]["ratio"]["high"]
    text = str(found)
    assert "2 ranks x 1 thread, one host" in text and "stretto over the process group" in text
    assert f"{TUNED}: {found.stands_for[TUNED]}, the fastest in a short run before." in text
    assert "broken did not take part: TypeError: " in text and torch.__version__ in text


@pytest.mark.ranks
@pytest.mark.network
@pytest.mark.slow
def test_ranks_on_emulated_hosts(mine: str) -> None:
    try:
        told = compare(f"{mine}:plain", only=["stretto"], effort=QUICK, network="1gbit")
    except OSError as error:
        pytest.skip(f"{error}")
    assert [*told.seconds] == [ALONE, "stretto"]
    assert "The hosts and the link between them are emulated on one machine" in str(told)


# Values


def test_table_of_a_comparison() -> None:
    run = made_up({ALONE: [0.1, 0.2, 0.3], "stretto": [0.11, 0.22, 0.33], "torch DDP, default": [0.2, 0.4, 0.6]})
    lines = str(run).splitlines()
    assert lines[:6] == [
        "policy, 2 x Linear(64), batch 256: 2 ranks x 1 thread, one host",
        "",
        "SGD step                                   ms  over no communication",
        "no communication    200.00 [150.00 .. 250.00]    1.00 [1.00 .. 1.00]",
        "stretto             220.00 [165.00 .. 275.00]    1.10 [1.10 .. 1.10]",
        "torch DDP, default  400.00 [300.00 .. 500.00]    2.00 [2.00 .. 2.00]",
    ]
    assert lines[-2] == "medians [quartiles] of 3 rounds of 10 steps, contestants in turn"
    assert lines[-1].endswith("load 0.50, others used 2 % of the cores at the start (quiet)")


def test_what_makes_figures_doubtful_is_said() -> None:
    run = made_up({ALONE: [1.0]}, ranks=4, machine=replace(MACHINE, busy=0.5), network="two emulated hosts")
    assert run.remarks == [
        "4 ranks share 2 cores: times are of ranks that take turns.",
        "The hosts and the link between them are emulated on one machine (network namespaces, veth).",
    ]
    run = made_up({ALONE: [1.0]}, ranks=1, threads=8)
    assert run.remarks == ["8 threads share 2 cores: times are of threads that take turns."]
    run = made_up({ALONE: [1.0]}, machine=replace(MACHINE, cores=1))
    assert run.remarks == ["2 ranks share 1 core: times are of ranks that take turns."]


def test_a_busy_machine_is_said() -> None:
    run = made_up({ALONE: [1.0]}, machine=replace(MACHINE, busy=0.5))
    assert not run.machine.quiet
    assert str(run).endswith("others used 50 % of the cores at the start (NOT QUIET: figures are doubtful)")


def test_ratios_are_of_the_same_round() -> None:
    run = made_up({ALONE: [1.0, 10.0, 100.0], "stretto": [2.0, 20.0, 200.0]})
    assert run.ratio("stretto") == Quartiles(2.0, 2.0, 2.0)
    other = made_up({ALONE: [1.0], "stretto": [8.0]})
    assert geometric_mean([run, other], "stretto") == pytest.approx(4.0)
    assert geometric_mean([run, other], "torch") is None


def test_machine_is_this_one() -> None:
    seen = this_machine(0.01)
    assert seen.torch == torch.__version__ and seen.cores >= 1 and 0 <= (seen.busy or 0) <= 1
    assert Machine(**seen.to_dict()) == seen


def test_every_contestant_runs_once_a_round_in_changing_order() -> None:
    order: list[str] = []
    contestants = {name: lambda name=name: order.append(name) for name in "abcd"}
    told = interleave(contestants, 6, 2, watched=False)
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert len(rounds) == 8 and all(sorted(one) == [*"abcd"] for one in rounds) and len({*map(tuple, rounds)}) > 1
    assert {name: len(times) for name, times in told.items()} == dict.fromkeys("abcd", 6)
    assert len(interleave(contestants, 100, 1, seconds=1e-9, watched=False)["a"]) == 5
    assert len(interleave(contestants, 6, 1, seconds=1.7e308, watched=False)["a"]) == 6


def test_some_are_chosen_by_name() -> None:
    names = [one.name for one in chosen(everybody(), ["torch", "floor"])]
    assert names == [ALONE, "torch DDP, default", TUNED, FLOOR]


# The user's own model


@pytest.mark.parametrize("name", ["keywords", "named", "pair", "plain", "three", "lone", "images", "tokens"])
def test_factories_of_all_forms_give_a_loss_and_a_model(mine: str, name: str) -> None:
    make = workload_of(f"{mine}:{name}")
    model, loss = make()
    value = loss(model)
    assert value.dim() == 0 and value.requires_grad
    again, other = make()
    assert torch.equal(other(again), value), "seeded alike"
    shapes = [one.shape for one in model.parameters()]
    assert [one.shape for one in model_of(f"{mine}:{name}").parameters()] == shapes


def test_a_batch_that_is_made_up_is_told_of(mine: str) -> None:
    told = "The batch is made up to fit the first layer: {}."
    assert try_out(f"{mine}:plain") == try_out("policy") == ""
    assert try_out(f"{mine}:lone") == told.format("32 x 4 random numbers")
    assert try_out(f"{mine}:images") == told.format("32 x 3 x 64 x 64 random numbers")
    assert try_out(f"{mine}:tokens") == told.format("32 x 64 random tokens")
    assert made_up({ALONE: [1.0]}, about_batch=told).remarks == [told]


def test_a_model_that_is_there_and_a_built_in_one_will_do(mine: str) -> None:
    assert model_of(f"{mine}:Nets.small").out_features == 1
    assert len([*model_of("policy").parameters()]) == 6


def test_a_batch_that_is_a_function_is_made_in_every_step(mine: str) -> None:
    model, loss = workload_of(f"{mine}:three")()
    before = sys.modules["mine_for_bench"].count[0]
    loss(model), loss(model)
    assert sys.modules["mine_for_bench"].count[0] == before + 2


def test_a_module_is_found_from_the_working_directory(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(mine).parent)
    assert load("mine_for_bench:plain")()[0].in_features == 4


@pytest.mark.ranks
@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("source", ["mine_for_bench.py:plain", "mine_for_bench:plain"])
def test_emulated_hosts_find_a_model_from_the_working_directory(
    mine: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(mine).parent)
    try:
        told = compare(source, only=["stretto"], effort=QUICK, network="unlimited")
    except OSError as error:
        pytest.skip(f"{error}")
    assert [*told.seconds] == [ALONE, "stretto"]


def test_example_and_page_show_factories_that_work(tmp_path: Path) -> None:
    code = re.search(r"```python\n(# train.py.*?)```", (ROOT / "docs" / "benchmarks.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "train.py").write_text(f"import torch\n{code[1]}")
    try_out(f"{tmp_path}/train.py:make_model")
    try_out(f"{ROOT}/examples/own_model.py:classifier")


def refusals(mine: str) -> list[tuple[Any, str]]:
    odd = (
        f"{mine}:{{}} gives {{}}: return model, (model, batch) or (model, batch, loss), with a torch.nn.Module and "
        "loss(model, batch)"
    )
    names = "no communication; stretto"
    return [
        (
            lambda: workload_of("nix"),
            "'nix' is neither a built-in model (policy, layers, mlp, gpt2, gpt2x8, resnet18) nor a function of yours, "
            "script.py:factory or package.module:factory",
        ),
        (lambda: load(":x"), "':x': say where the model is made, script.py:factory or package.module:factory"),
        (lambda: workload_of("no_such_module:f"), "there is no module 'no_such_module'"),
        (lambda: workload_of("none.py:f"), "none.py: no such file"),
        (lambda: workload_of(f"{mine}:number"), f"{mine}:number is of type int, which cannot be called"),
        (lambda: workload_of(f"{mine}:torch.missing"), f"{mine} has no 'missing'"),
        (lambda: workload_of(f"{mine}:missing"), f"{mine} has no 'missing': write a function that returns the model"),
        (lambda: workload_of(mine), f"{mine}: say which function in it returns the model, as {mine}:make_model"),
        (lambda: workload_of(f"{mine}:counted")(), odd.format("counted", "a Tensor")),
        (lambda: model_of(f"{mine}:swapped"), odd.format("swapped", "(Tensor, Linear)")),
        (
            lambda: workload_of(f"{mine}:no_layer")(),
            f"{mine}:no_layer gives only a model, without a layer (Linear, Conv, Embedding) that tells what its "
            "input is: return (model, batch)",
        ),
        (
            lambda: try_out(f"{mine}:silent"),
            "the model returns NoneType, which cannot be made into a loss.\n"
            "Return (model, batch, loss) from the factory, where loss(model, batch) is the loss of a step.",
        ),
        (
            lambda: try_out(f"{mine}:unlabelled"),
            "the model returns Answer, whose loss is None, which cannot be made into a loss.\n"
            "Return (model, batch, loss) from the factory, where loss(model, batch) is the loss of a step.",
        ),
        (lambda: compare(ranks=0), "ranks=0 must be 1 or more"),
        (lambda: compare(ranks=1, network="1gbit"), "a network needs two hosts, so ranks must be 2 or more"),
        (
            lambda: chosen([Contestant(name, "alone") for name in names.split("; ")], ["elephant"]),
            f"no contestant has 'elephant' in its name.\nThere are: {names}.",
        ),
        (lambda: Effort(rounds=0), "rounds=0, seconds=30 and block=0.05 must be positive"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(14))
def test_text_of_what_is_refused(mine: str, number: int) -> None:
    trigger, text = refusals(mine)[number]
    with pytest.raises(SetupError) as caught:
        trigger()
    assert str(caught.value) == text


STEP = (
    "of (model, batch) a step is model(batch), or model(*batch) where that is a tuple: with targets in it, return "
    "(model, batch, loss) with loss(model, batch)"
)


def test_text_of_models_that_raise(mine: str) -> None:
    line = MINE.splitlines().index('def fails(): raise KeyError("lost")') + 1
    shapes = "cannot make one step: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    for trigger, text in (
        (lambda: workload_of(f"{mine}:fails")(), f"{mine}:fails() failed: KeyError: 'lost' ({mine}:{line})"),
        (lambda: try_out(f"{mine}:shapes"), f"{mine}:shapes {shapes} (3x5 and 4x4); {STEP}"),
        (
            lambda: try_out(f"{mine}:with_targets"),
            f"{mine}:with_targets cannot make one step: TypeError: Linear.forward() takes 2 positional arguments but 3 "
            f"were given; {STEP}",
        ),
        (
            lambda: try_out(f"{mine}:guessed_wrong"),
            f"{mine}:guessed_wrong cannot make one step: RuntimeError: unflatten: Provided sizes [2, 3] don't multiply "
            "up to the size of dim 1 (4) in the input tensor; 32 x 4 random numbers went into it, made up to fit its "
            "first layer: return (model, batch)",
        ),
        (
            lambda: try_out(f"{mine}:odd_loss"),
            f"{mine}:odd_loss cannot make one step: RuntimeError: grad can be implicitly created only for scalar "
            "outputs; loss(model, batch) is called, and what it returns is to be a tensor of one element",
        ),
        (
            lambda: load("broken_for_bench:f"),
            f"importing broken_for_bench failed: ZeroDivisionError: division by zero ({Path(mine).parent}/broken_for_"
            'bench.py:1); code other than definitions belongs under if __name__ == "__main__":',
        ),
        (
            lambda: workload_of(f"{mine}:fails_in_a_library")(),  # the line is the user's
            f"{mine}:fails_in_a_library() failed: JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
            f"({mine}:{line + 1})",
        ),
    ):
        Path(mine).with_name("broken_for_bench.py").write_text("1 / 0")
        sys.path.insert(0, str(Path(mine).parent))
        with pytest.raises(BrokenModelError) as caught:
            trigger()
        assert str(caught.value) == text


def test_text_of_plots_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError) as caught:
        check(Path("a.foo"))
    assert str(caught.value) == "a.foo: a plot ends in .svg, .png or .pdf"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError) as caught:
        check(Path("a.svg"))
    assert str(caught.value) == "plots need matplotlib, which is not installed: pip install matplotlib"


def test_text_of_a_yardstick_that_fails() -> None:
    def make() -> Any:
        raise ValueError("not here")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError) as caught:
            enter([alone()], make)
    finally:
        dist.destroy_process_group()
    assert str(caught.value) == "the step without communication failed: ValueError: not here"


# stretto bench


@pytest.mark.ranks
def test_command_compares_a_model_of_ones_own(tmp_path: Path) -> None:
    picture = tmp_path / "bars.svg"
    command = ["-m", "stretto", "bench", "examples/own_model.py:reader", "--only", "stretto"]
    command += ["--rounds", "2", "--seconds", "1", "--json", "--plot", str(picture)]
    done = warm_programs.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert Comparison.from_dict(json.loads(done.stdout)).ratio("stretto").median > 0
    assert "<svg" in picture.read_text() and [*tmp_path.iterdir()] == [picture]


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["nix"], "stretto: 'nix' is neither a built-in model"),
        (["none.py:f"], "stretto: none.py: no such file\n"),
        (["--ranks", "0"], "stretto: ranks=0 must be 1 or more"),
        (["--ranks", "two"], "stretto: Invalid value for '--ranks'"),
        (["--rounds", "0"], "stretto: --rounds 0: must be 1 or more"),
        (["--only", "elephant"], "stretto: no contestant has 'elephant' in its name."),
        (["--ranks", "1", "--network", "1gbit"], "stretto: a network needs two hosts"),
        (["--plot", "a.gif"], "stretto: a.gif: a plot ends in .svg, .png or .pdf\n"),
        (["--plot", "no/a.svg"], "stretto: no/a.svg cannot be written: there is no folder no"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(line) and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize(
    "error, arguments, line",
    [
        (OSError("ip is missing"), ["--network", "1gbit"], "--network 1gbit: ip is missing"),
        (OSError("no space is left"), [], "no space is left"),
        (TimeoutError("ranks [1] did not end within 3600 s"), [], "ranks [1] did not end within 3600 s"),
        (
            TimeoutError("ranks [1] did not end within 3600 s"),
            ["--network", "1gbit"],
            "ranks [1] did not end within 3600 s",
        ),
        (RuntimeError("rank 1:\nTraceback\nValueError: odd"), [], "a rank failed: ValueError: odd"),
    ],
)
def test_what_fails_on_ranks_is_one_line(
    error: Exception, arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("stretto.cli.bench"), "compare", fail)
    assert execute(["bench", *arguments]) == 1
    assert capsys.readouterr().err == f"stretto: {line}\n"


def test_a_model_that_stretto_cannot_train_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = made_up({ALONE: [1.0, 1.0], "torch DDP, default": [1.1, 1.2]}, skipped={"stretto": "SetupError: odd"})
    monkeypatch.setattr(importlib.import_module("stretto.cli.bench"), "compare", lambda *_, **__: run)
    assert execute(["bench"]) == 1
    told = capsys.readouterr()
    assert told.err == "stretto: stretto did not take part: SetupError: odd\n" and told.out == f"{run}\n"
    others = replace(run, skipped={"torch DDP, tuned": "TypeError: odd"})
    monkeypatch.setattr(importlib.import_module("stretto.cli.bench"), "compare", lambda *_, **__: others)
    assert execute(["bench"]) == 0


def test_what_was_measured_is_told_where_it_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = made_up({ALONE: [1.0, 1.0], "stretto": [1.1, 1.2]})
    commands = importlib.import_module("stretto.cli.bench")
    monkeypatch.setattr(commands, "compare", lambda *_, **__: run)
    for error, told in (
        (OSError(28, "No space left on device"), f"{tmp_path}/a.svg cannot be written: No space left on device"),
        (ImportError("broken"), "broken"),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(commands, "plot", fail)
        assert execute(["bench", "--plot", str(tmp_path / "a.svg")]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err) == (f"{run}\n", f"stretto: {told}\n")


SLOW = """
import os, time, torch
def make():
    open(f"{os.getpid()}.ran", "w").close()
    def loss(model, batch):
        time.sleep(0.2)
        return model(batch).sum()
    return torch.nn.Linear(1, 1), torch.ones(1, 1), loss
"""


@pytest.mark.ranks
def test_ctrl_c_ends_a_comparison_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "stretto", "bench", "slow.py:make", "--only", "stretto"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as running:
        until = time.monotonic() + 60
        while len([*tmp_path.glob("*.ran")]) < 2 and time.monotonic() < until:  # this process and a rank
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        assert (*running.communicate(timeout=30), running.returncode) == ("", "", 130)


@pytest.mark.ranks
def test_something_moves_until_rank_0_draws(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To start ranks takes seconds; two processes must not draw on one terminal at once."""
    seen: list[str] = []

    @contextmanager
    def bar(title: str, *, wanted: bool) -> Iterator[None]:
        seen.append(f"{title}, wanted: {wanted}")
        yield
        seen.append("gone")

    def results(*args: Any) -> list[Any]:
        seen.append("ranks have ended")
        return read_results(*args)

    monkeypatch.setattr(importlib.import_module("stretto.bench.compare"), "bar", bar)
    monkeypatch.setattr("stretto.testing.read_results", results)
    compare(f"{mine}:plain", contestants=[alone()], effort=QUICK, progress=True)
    assert seen == ["starting 2 ranks, wanted: True", "gone", "ranks have ended"]


def stays(rank: int, folder: str) -> None:
    Path(folder, f"{rank}.unfinished").write_text(str(os.getpid()))
    os.replace(f"{folder}/{rank}.unfinished", f"{folder}/{rank}.pid")
    signal.pause()


@pytest.mark.ranks
def test_ctrl_c_ends_ranks_and_no_other_child(tmp_path: Path) -> None:
    """Such as the workers of a DataLoader."""

    def ctrl_c() -> None:
        if len([*tmp_path.glob("*.pid")]) == 2:
            raise KeyboardInterrupt

    other = multiprocessing.get_context("spawn").Process(target=signal.pause)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        quietly(spawn_ranks, stays, 2, str(tmp_path), timeout=60, meanwhile=ctrl_c)
    assert other.is_alive()
    other.kill()
    other.join()
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_a_picture_of_a_comparison(tmp_path: Path) -> None:
    file = tmp_path / "bars.svg"
    plot(made_up({ALONE: [1.0, 1.0], "stretto": [1.1, 1.2]}), file)
    assert "stretto" in file.read_text()


def test_nothing_of_a_contestant_is_under_way_when_it_has_trained() -> None:
    model, came = torch.nn.Linear(2, 1), []
    Arrival([*model.parameters()], lambda: came.append(True))
    training = Training(model, model, lambda called: called(torch.ones(1, 2)).sum())
    training.steps(0)
    assert came == [True]


WORKLOADS = sorted(re.findall(r"^def (\w+)", (Path(__file__).parents[1] / "benchmarks/workloads.py").read_text(), re.M))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_workloads_of_benchmarks_take_a_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    model, loss = workload_of(f"{Path(__file__).parents[1]}/benchmarks/workloads.py:{name}")()
    for one in {"common", "digits", "text"} - before:  # of examples; benchmarks have a common.py of their own
        sys.modules.pop(one, None)
    loss(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
