"""The examples and benchmarks, run as a user runs them: real processes, real data, short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm_programs

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.ranks


def run(*command: object, expect: int = 0) -> str:
    done = warm_programs.run(command, cwd=ROOT)
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


def test_overlap_draws_a_picture() -> None:
    picture = run(ROOT / "examples" / "overlap.py")
    assert picture.startswith("backward ") and "\nbucket 0 " in picture and "\nexposed " in picture
    assert " % of communication hidden behind backward; " in picture


@pytest.mark.slow
def test_overlap_makes_the_pictures_of_the_docs_and_compares_sizes(tmp_path: Path) -> None:
    told = run(ROOT / "examples" / "overlap.py", "--pictures", tmp_path, "--sizes", 1)
    lines = told.splitlines()
    assert lines[0].startswith("bucket_cap_mb=1       2 buckets: ") and lines[1].startswith("naive ")
    assert "0 % of communication hidden" in lines[1] and "0 % of communication hidden" not in lines[4]
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in (ROOT / "docs" / "pictures").iterdir())
    assert all((ROOT / "docs" / "pictures" / name).stat().st_size < 100_000 for name in made)


def test_benchmarks_run_small(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks"
    run(folder / "overhead.py", "--parameters", 20, "--rounds", 3, "--json", tmp_path / "o.json")
    run(folder / "broadcast.py", "--megabytes", 1, "--rounds", 3, "--json", tmp_path / "b.json")
    small = ("--rounds", 3, "--largest", 4096, "--only", "policy")
    run(folder / "host.py", "sizes", "steps", *small, "--json", tmp_path / "h.json")
    for name in ("o", "b", "h"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["machine"]["torch"]
