"""docs/benchmarks.md: its commands run as they stand there, and its tables say what the measurements beside it say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import warm_programs

from stretto.bench import Comparison
from stretto.testing_network import EmulatedHosts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
TEXT = PAGE.read_text()
FIGURES = sorted(set(re.findall(r"python benchmarks/figures\.py (\w+)", TEXT)) - {"all"})
STEPS = re.findall(r"^python benchmarks/step\.py (\w+)", TEXT, re.MULTILINE)
BENCH = re.findall(r"^(stretto bench .*?)(?:  +#.*)?$", TEXT, re.MULTILINE)
QUICK = {"figures.py": ["--quick"], "bench": ["--rounds", "1", "--seconds", "1", "--only", "stretto"]}
"""Appended, so that what takes minutes takes seconds."""

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader of the page is: in a checkout, with the script of the page."""
    for name in ("benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (code,) = re.findall(r"```python\n(# train.py.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "docs" / "benchmarks")
    shutil.copy(PAGE, tmp_path / "docs")
    return tmp_path


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = warm_programs.run(command, cwd=folder, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", FIGURES)
def test_command_of_a_figure_runs(folder: Path, name: str) -> None:
    """Into a folder of its own: what is written beside the page is not of such a run."""
    run(folder, "benchmarks/figures.py", name, *QUICK["figures.py"], "--output", "found")
    found = json.loads((folder / "found" / f"{name}.json").read_text())
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert all(Comparison.from_dict(one).rounds == 3 for one in found["runs"])
    skipped = {who: why for one in found["runs"] for who, why in one["skipped"].items()}
    assert not skipped
    assert "<svg" in (folder / "found" / f"{name}.svg").read_text()


def test_modes_of_a_step_are_those_that_are_tested() -> None:
    tests = (ROOT / "tests" / "test_examples.py").read_text()
    assert STEPS and [mode for mode in STEPS if f'"step.py", "{mode}"' not in tests] == []


@pytest.mark.parametrize("line", dict.fromkeys(BENCH))
def test_bench_commands_run(folder: Path, line: str) -> None:
    words, _, file = line.partition(" > ")
    if "--network" in words:
        try:
            EmulatedHosts().close()
        except OSError as error:
            pytest.skip(f"{error}")
    done = run(folder, "-m", *words.split(), *QUICK["bench"])
    if file:
        assert Comparison.from_dict(json.loads(done.stdout)).ratio("stretto").median > 0
    else:
        source = words.split()[2]
        assert done.stdout.startswith(f"{source}: ") and "\nstretto " in done.stdout
    for picture in re.findall(r"--plot (\S+)", words):
        assert "<svg" in (folder / picture).read_text()


def test_gloo_takes_two_connections_as_the_page_says(folder: Path) -> None:
    assert "`GLOO_SOCKET_IFNAME=lo,lo` in front of the command" in TEXT
    run(folder, "-m", "stretto", "bench", "policy", *QUICK["bench"], GLOO_SOCKET_IFNAME="lo,lo")


def test_no_table_is_written_by_hand(folder: Path) -> None:
    """Drawn again from the measurements beside the page, it is what it was."""
    there = sorted(path.stem for path in (folder / "docs" / "benchmarks").glob("*.json"))
    assert there and set(there) <= set(FIGURES)
    run(folder, "benchmarks/figures.py", *there, "--draw-only", "--output", str(folder / "docs" / "benchmarks"))
    assert (folder / "docs" / "benchmarks.md").read_text() == TEXT


def test_page_says_how_many_rounds_there_are_at_most() -> None:
    assert "**Rounds** are at most 30" in TEXT
    assert "(default: 30)" in run(ROOT, "benchmarks/figures.py", "--help").stdout
