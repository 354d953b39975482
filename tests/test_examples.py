"""The examples and benchmarks, run as a user runs them: real processes, real data, short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm_programs

from stretto.bench.contestants import ALONE, MESSAGES, SHARDED, TUNED, least, sharded, steppers

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.ranks


def run(*command: object, expect: int = 0, timeout: float = 110) -> str:
    done = warm_programs.run(command, cwd=ROOT, timeout=timeout)
    assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_on_two_ranks(*command: object) -> None:
    """As under torchrun, which imports torch three times."""
    for done in warm_programs.run_ranks(command, 2, cwd=ROOT):
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", ["digits", "text"])
def test_example_is_short_and_shows_three_lines(name: str) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) < 120
    assert sum(f"{n} of 3" in line for n in (1, 2, 3) for line in lines) == 3


def test_digits_gives_torch_ddps_losses_and_resumes_on_all_ranks(tmp_path: Path) -> None:
    script = ROOT / "examples" / "digits.py"
    whole, first, second, ddp = (tmp_path / f"{name}.json" for name in ("whole", "first", "second", "ddp"))
    run(*TORCHRUN, script, "--epochs", 2, "--json", whole)
    run_on_two_ranks(script, "--epochs", 2, "--json", ddp, "--reducer", "ddp")
    run_on_two_ranks(script, "--epochs", 1, "--json", first, "--checkpoint", tmp_path / "c.pt")
    run_on_two_ranks(script, "--epochs", 2, "--json", second, "--checkpoint", tmp_path / "c.pt")
    losses = {path.stem: json.loads(path.read_text())["losses"] for path in (whole, first, second, ddp)}
    assert losses["whole"] == losses["ddp"]
    assert losses["first"] + losses["second"] == losses["whole"]


def test_digits_runs_alone_and_a_missed_target_is_an_exit_status() -> None:
    script = ROOT / "examples" / "digits.py"
    assert "test accuracy" in run(script, "--epochs", 1, "--target-accuracy", 0.5)
    run(script, "--epochs", 1, "--reducer", "none", "--target-accuracy", 1.01, expect=1)


def test_text_runs_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    command = [ROOT / "examples" / "text.py", "--bytes", 30_000, "--checkpoint", tmp_path / "c.pt"]
    run_on_two_ranks(*command, "--epochs", 1, "--json", tmp_path / "1.json")
    run(*TORCHRUN, *command, "--epochs", 2, "--json", tmp_path / "2.json")
    first, second = (json.loads((tmp_path / f"{epochs}.json").read_text())["losses"] for epochs in (1, 2))
    assert len(first) == len(second) and second[-1] < first[0], "the second epoch alone, from where the first ended"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_keeps_what_it_promises() -> None:
    """The body of `make demo`: the losses of torch DDP to the bit, 97 % of unseen digits, the plan that was learnt."""
    told = run(ROOT / "examples" / "demo.py", timeout=280)
    plan = r"^The plan stretto learnt:\nplan [0-9a-f]{16}: 11 parameters, 258 KB, in 2 buckets "  # at first it is one
    assert re.search(plan, told, re.MULTILINE)
    assert "The losses are the same numbers as those of torch DDP, at " in told
    (percent,) = re.findall(r"^It reads ([\d.]+)% of unseen digits, at least the 97% promised\.", told, re.MULTILINE)
    assert float(percent) >= 97
    (first,) = re.findall(r"first loss\s*│\s*([\d.]+)\s*│\s*([\d.]+)", told)
    (last,) = re.findall(r"last loss\s*│\s*([\d.]+)\s*│\s*([\d.]+)", told)
    assert first[0] == first[1] and last[0] == last[1] and float(last[0]) < 0.2 < float(first[0])


@pytest.mark.slow
def test_step_benchmark_compares_steps(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    run(ROOT / "benchmarks" / "step.py", "host", "--rounds", 1, "--only", "policy", "--json", file)
    found = json.loads(file.read_text())
    (one,) = found["runs"]
    names = [who.name for who in (*steppers(), *sharded(), least())]
    assert not one["skipped"] and [*one["seconds"]] == names
    assert all(found["geometric mean"][name] > 0 for name in names if name != ALONE)


@pytest.mark.slow
@pytest.mark.network
def test_step_benchmark_compares_with_what_cannot_be_beaten(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "network", "--workload", "policy", "--rounds", 1]
    done = subprocess.run([*map(str, command), "--json", str(file)], capture_output=True, text=True, timeout=110)
    if done.returncode == 1 and "not measured: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    seconds = {name: times[0] for name, times in found["runs"][0]["seconds"].items()}
    least = max(seconds[ALONE], seconds[MESSAGES])
    ratios = found["over max(compute, communication)"]
    assert ratios["stretto"]["median"] == pytest.approx(seconds["stretto"] / least)
    assert {TUNED, "stretto", SHARDED} < ratios.keys()
    assert [*found["calculated"]] == ["calculated least, all gradients before the step", "calculated least, in shares"]
    assert all(one > 0 for one in found["calculated"].values())


@pytest.mark.slow
def test_step_benchmark_weighs_parameters_and_state(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    run(ROOT / "benchmarks" / "step.py", "memory", "--megabytes", 32, "--json", file)
    found = json.loads(file.read_text())["bytes"]
    size = 32 * 2**20
    plain, zero = found["stretto"], found["torch DDP with ZeroRedundancyOptimizer"]
    for one in plain:
        assert one["parameters"] == pytest.approx(size, rel=0.15) and one["state"] == pytest.approx(2 * size, rel=0.15)
    for one in zero:
        assert one["parameters"] == pytest.approx(size, rel=0.15) and one["state"] == pytest.approx(size, rel=0.15)
    whole = max(one["parameters"] + one["state"] for one in plain)
    for one in found["stretto, sharded step"]:
        assert one["state"] == pytest.approx(size, rel=0.05)
        assert one["parameters"] + one["state"] <= (1 / 2 + 0.05) * whole


SMALL = {
    "overhead": ("--parameters", 20, "--rounds", 3, "--block", 0.01),
    "broadcast": ("--megabytes", 1, "--rounds", 3),
    "host": ("sizes", "steps", "--rounds", 3, "--largest", 256, "--only", "policy"),
}


@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_run_small(name: str, tmp_path: Path) -> None:
    plot = ("--plot", tmp_path / "sizes.svg") if name == "host" else ()
    run(ROOT / "benchmarks" / f"{name}.py", *SMALL[name], *plot, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["torch"]
    if name == "host":
        assert "<svg" in (tmp_path / "sizes.svg").read_text()
    if name == "overhead":
        assert found["events, share of a step"]["20 parameters"]["median"] > -1


@pytest.mark.parametrize(
    "line, said",
    [
        ("digits.py --epochs -1", "error: argument --epochs: -1 is no whole number above 0"),
        ("digits.py --json no/x.json", "error: argument --json: no/x.json cannot be written: there is no folder no"),
        ("text.py --checkpoint no/c", "error: argument --checkpoint: no/c cannot be written: there is no folder no"),
    ],
)
def test_bad_input_of_an_example_is_a_line_before_it_trains(line: str, said: str) -> None:
    name, *words = line.split()
    done = warm_programs.run([ROOT / "examples" / name, *words], cwd=ROOT)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"{name}: {said}")


@pytest.mark.parametrize(
    "line, said",
    [
        ("overhead.py --parameters 1", "error: --parameters: a layer has two"),
        ("overhead.py --block -1", "error: --block -1: seconds of steps, or 0 for one step"),
        ("overhead.py --rounds 0", "error: argument --rounds: 0 is no whole number above 0"),
        (
            "broadcast.py --json no/x.json",
            "error: argument --json: no/x.json cannot be written: there is no folder no",
        ),
        ("layerdrop.py --drop 1", "error: --drop 1: a share of layers, from 0 to less than 1"),
        ("host.py --largest 2", "error: --largest 2: the smallest all-reduce is 4 bytes"),
        ("host.py --plot x.gif", "x.gif: a plot ends in .svg, .png or .pdf (STRETTO_TRACEBACK=1 shows where)"),
        (
            "figures.py skip --draw-only --output {folder}",
            "{folder}/skip.json holds no measurements of a figure (STRETTO_TRACEBACK=1 shows where)",
        ),
    ],
)
def test_bad_input_of_a_benchmark_is_a_line_before_anything_is_measured(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "skip.json").write_text('{"a": 1}')
    name, *words = line.format(folder=tmp_path).split()
    done = warm_programs.run([ROOT / "benchmarks" / name, *words], cwd=ROOT, timeout=110)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"{name}: {said.format(folder=tmp_path)}"


def test_a_rank_of_a_benchmark_that_fails_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from common import ends_well, spawn\n"
        "def worker(rank): raise ValueError(f'no number {rank}')\n"
        "if __name__ == '__main__': ends_well(lambda: spawn(worker, 1, timeout=60))\n"
    )
    done = warm_programs.run([script], cwd=tmp_path, timeout=110)
    assert (done.returncode, done.stderr) == (
        1,
        "fails.py: ValueError: no number 0 (STRETTO_TRACEBACK=1 shows where)\n",
    )
