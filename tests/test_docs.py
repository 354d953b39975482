"""The documentation: links lead somewhere, commands exist, code in it runs."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import warm_programs
from traces import a_trace, recorded

import stretto
from stretto.chrome import write_chrome
from stretto.page import to_html
from stretto.plots import save_picture
from stretto.sketch import sketch
from stretto.testing import RecordingTransport, run_ranks, spawn_ranks
from stretto.timeline import timeline_of
from stretto.trace import read_trace
from stretto.transport import LocalGroup

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/benchmarks.md",
        "docs/checkpoints.md",
        "docs/cli.md",
        "docs/design.md",
        "docs/drop-in.md",
        "docs/frameworks.md",
        "docs/lessons.md",
        "docs/limits.md",
        "docs/overlap.md",
        "docs/sharding.md",
        "docs/transports.md",
        "docs/troubleshooting.md",
    )
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:examples|benchmarks|docs|src|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_make_targets_of_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_ci_calls_what_the_readme_tells_a_person_to_call() -> None:
    assert re.search(r"^make test ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_readme_shows_what_overlap_draws_and_no_place_is_left_empty() -> None:
    text = (ROOT / "README.md").read_text()
    assert "bucket 0 " in text and "exposed " in text
    assert not re.search(r"^[A-Z]{4,}$", text, re.MULTILINE)


def test_every_exception_is_explained_and_is_what_the_page_says() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = text.partition("## What stretto raises")[2].partition("\n## ")[0]
    first = [line.split(" | ")[0] for line in rows.splitlines() if line.startswith("| `")]
    said = [
        [name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", one)]
        for cell in first
        for one in cell.split("; ")
    ]
    everything = {**vars(builtins), **vars(stretto)} | {one.__name__: one for one in raised()}
    for name, *bases in said:
        assert all(issubclass(everything[name], everything[base]) for base in bases), name
    assert sorted(name for name, *_ in said) == sorted(one.__name__ for one in raised())


def raised() -> list[type]:
    """Exceptions of the library; those of the command line are one line on the terminal."""
    for place in (*(ROOT / "src" / "stretto").glob("*.py"), *(ROOT / "src" / "stretto" / "sharding").glob("*.py")):
        importlib.import_module(".".join(place.relative_to(ROOT / "src").with_suffix("").parts))
    found, todo = [], [stretto.StrettoError]
    while todo:
        below = todo.pop().__subclasses__()
        found += below
        todo += below
    return [one for one in found if not one.__module__.startswith(("stretto.cli", "stretto.bench"))]


def test_version_stands_in_the_changelog() -> None:
    assert f"## [{stretto.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


UNSTEADY = 2  # advice depends on the machine and on what else it does
COMMANDS = re.findall(
    r"^\$ (stretto .*?)(?:  # exit code (\d+))?\n((?:(?!```).*\n)*)```",
    (ROOT / "docs/cli.md").read_text(),
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def with_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of the page, in which its commands run one after the other."""
    folder = tmp_path_factory.mktemp("commands")
    for code, name in re.findall(r"```python\n(# ([\w.]+)\n.*?)```", (ROOT / "docs/cli.md").read_text(), re.DOTALL):
        (folder / name).write_text(code)
    return folder


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_of_the_docs_run(with_scripts: Path) -> None:
    """What they print begins line by line with the words that are shown; figures differ.

    One test for all: each finds what those before it have left.
    """
    for line, code, shown in COMMANDS:
        done = warm_programs.run(["-m", *line.split()], cwd=with_scripts, timeout=100)
        assert done.returncode == int(code or 0), (line, done.stderr)
        printed = {beginning_of(one) for one in (done.stdout + done.stderr).splitlines()}
        wanted = {beginning_of(one) for one in shown.splitlines()} - {"...", ""}
        missing = wanted - printed
        assert len(missing) <= min(UNSTEADY, len(wanted) // 3), f"{line} prints nothing like {missing}"


def beginning_of(line: str) -> str:
    """Its first word, whatever the number in it."""
    return re.sub(r"\d+", "0", " ".join(line.split()[:1]))


def test_every_command_is_in_the_docs() -> None:
    helped = warm_programs.run(["-m", "stretto", "--help"])
    names = re.findall(r"^  ([a-z]+) ", helped.stdout.partition("Commands:")[2], re.MULTILINE)
    assert names and sorted(names) == sorted({line.split()[1] for line, _, _ in COMMANDS})


def examples_in_docstrings() -> dict[str, str]:
    """The ``Example::`` blocks of everything public, by name."""
    from stretto import chrome, events, handle, page, plan, plots, settings, tensors, testing, timeline
    from stretto.transport import local, process_group

    found: dict[str, str] = {}
    for module in (
        sys.modules["stretto.attach"],
        sys.modules["stretto.shard"],
        handle,
        settings,
        chrome,
        events,
        page,
        plan,
        plots,
        sys.modules["stretto.sketch"],
        tensors,
        testing,
        timeline,
        local,
        process_group,
        stretto.ddp,
    ):
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            members = vars(thing).items() if inspect.isclass(thing) else ()
            documented = [(n, m) for n, m in members if callable(m) or isinstance(m, property)]
            for full, one in [(name, thing), *((f"{name}.{n}", m) for n, m in documented)]:
                text = inspect.getdoc(one) or ""
                if "Example::" in text:
                    block = text.split("Example::\n", 1)[1]
                    found[f"{module.__name__}.{full}"] = textwrap.dedent(block.split("\n\n\n\n")[0])
    return found


@pytest.mark.parametrize("name", sorted(examples_in_docstrings()))
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = examples_in_docstrings()[name]
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "trace", 2, passes=1)

    def worker(transport):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(3, 2)
        needs_sync = "sync = " not in code and "sync." in code
        scope = {
            "torch": torch,
            "stretto": stretto,
            "model": model,
            "optimizer": optimizer,
            "x": x,
            "transport": transport,
            "sync": stretto.attach(model, transport=transport) if needs_sync else None,
            "loader": [(x, torch.randn(3, 1))],
            "loss_function": torch.nn.functional.mse_loss,
            "micro_batches": [x, x],
            "loss": lambda batch: model(batch).sum(),
            "RecordingTransport": RecordingTransport,
            "ProcessGroupTransport": lambda: transport,
            "run_ranks": run_ranks,
            "LocalGroup": LocalGroup,
            "train": lambda transport: None,
            "dist": type("dist", (), {"init_process_group": staticmethod(lambda *_: None)}),
            "contextlib": __import__("contextlib"),
            "itertools": __import__("itertools"),
            "json": __import__("json"),
            "train_on": lambda batch: model(batch[0]).sum().backward(),
            **{tool.__name__: tool for tool in (read_trace, timeline_of, write_chrome, save_picture, to_html, sketch)},
            "threading": __import__("threading"),
        }
        exec(compile(code, name, "exec"), scope)

    run_ranks(worker, 2)


# README.md


@pytest.mark.ranks
@pytest.mark.parametrize("how", [["-m", "stretto", "run", "--ranks", "2"], []], ids=["two ranks", "plain python"])
def test_the_program_of_the_readme_runs(how: list[str], tmp_path: Path) -> None:
    (code,) = [code for _, code in blocks_of(ROOT / "README.md") if code.startswith("# train.py")]
    (tmp_path / "train.py").write_text(code)
    done = warm_programs.run([*how, "train.py"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.2 * losses[0]
    assert ("a step takes" if how else "there is no other rank") in done.stdout
    assert (tmp_path / "model.pt").exists()


@pytest.mark.ranks
def test_the_error_in_the_readme_is_what_its_program_raises_where_rank_1_fails(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "README.md")
    (code,) = [code for _, code in blocks if code.startswith("# train.py")]
    (shown,) = [text for _, text in blocks if text.startswith("stretto.errors.PeerError")]
    assert code.count("model(inputs)") == 1
    code = code.replace("model(inputs)", "model(inputs[:, : 7 if rank == 1 and epoch == 2 else 8])")
    (tmp_path / "train.py").write_text(code)
    first, _ = warm_programs.run_ranks(["train.py"], 2, cwd=tmp_path)
    assert first.returncode and first.stderr.replace("[rank0]: ", "").endswith(shown)


# docs/overlap.md


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and text of what stands between fences."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.flaky(reruns=2)
@pytest.mark.alone
def test_code_on_the_overlap_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs" / "overlap.md")
    scope: dict[str, object] = {"__name__": "overlap"}
    ran = 0
    for number, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        ran += 1
        if "sync.trace(" in code:
            _train_on_ranks(code)
            continue
        exec(compile(code, f"docs/overlap.md, block {number}", "exec"), scope)
        printed = capsys.readouterr().out
        if "DelayTransport" in code:
            assert_about(printed, blocks[number + 1][1])
        elif code.rstrip().splitlines()[-1].lstrip().startswith("print("):
            assert printed == blocks[number + 1][1]
    assert ran == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["overlap.html", "overlap.png", "trace", "trace.json"]


def assert_about(printed: str, shown: str) -> None:
    """The same words, and numbers that other programs on this machine may have moved a little."""
    numbers, known = ([int(one) for one in re.findall(r"\d+", text)] for text in (printed, shown))
    assert re.sub(r"\d+", "", printed) == re.sub(r"\d+", "", shown)
    assert known == [75, 20]
    assert numbers[0] == pytest.approx(known[0], abs=8) and known[1] <= numbers[1] <= 1.5 * known[1]


def _train_on_ranks(code: str) -> None:
    def worker(transport):
        model = torch.nn.Linear(2, 1)
        scope = {
            "model": model,
            "sync": stretto.attach(model, transport=transport),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_function": torch.nn.functional.mse_loss,
            "loader": [(torch.randn(3, 2), torch.randn(3, 1))] * 5,
        }
        exec(code, scope)
        scope["sync"].detach()

    run_ranks(worker, 2)


# docs/sharding.md


@pytest.mark.ranks
def test_code_on_the_sharding_page_runs(tmp_path: Path) -> None:
    blocks = [code for language, code in blocks_of(ROOT / "docs" / "sharding.md") if language == "python"]
    assert len(blocks) == 4
    printed = spawn_ranks(run_sharding_page, 2, blocks, str(tmp_path))
    assert all("AdamW: in equal shares of each bucket: this rank steps" in text for text in printed)
    assert all("Footprint(parameters=" in text for text in printed)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def run_sharding_page(rank: int, blocks: list[str], folder: str) -> str:
    os.chdir(folder)
    torch.manual_seed(rank)
    printed = io.StringIO()
    scope: dict[str, object] = {
        "torch": torch,
        "stretto": stretto,
        "model": torch.nn.Linear(20, 1),
        "loss_function": torch.nn.functional.mse_loss,
        "loader": [(torch.randn(3, 20), torch.randn(3, 1))] * 3,
    }
    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(blocks):
            if "keep_grads=False" in code:
                scope["optimizer"].unshard()
            exec(compile(code, f"docs/sharding.md, block {number}", "exec"), scope)
    return printed.getvalue()


# docs/checkpoints.md


@pytest.mark.ranks
@pytest.mark.slow
def test_the_program_of_the_checkpoints_page_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    (code,) = [code for language, code in blocks_of(ROOT / "docs" / "checkpoints.md") if language == "python"]
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "stopped.py").write_text(code.replace("range(first, 30)", "range(first, 13)"))

    def run(script: str, ranks: int = 2) -> str:
        done = warm_programs.run(["-m", "stretto", "run", "--ranks", str(ranks), script], cwd=tmp_path, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = run("train.py")
    (tmp_path / "checkpoint.pt").unlink()
    assert run("stopped.py") != whole
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 10
    assert run("train.py", ranks=3) != whole  # from a checkpoint of two
    (tmp_path / "checkpoint.pt").unlink()
    run("stopped.py")
    assert run("train.py") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "stopped.py", "train.py"]


# docs/troubleshooting.md


def test_what_the_troubleshooting_page_quotes_is_what_stretto_says() -> None:
    before, _, after = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## What stretto raises")
    text = before + after.partition("\n## ")[2]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    quoted = [phrase for cell in cells for phrase in re.findall(r"`([^`]+)`", cell)]
    sources = [ast.parse(path.read_text()) for path in (ROOT / "src" / "stretto").rglob("*.py")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {id(one.body[0].value) for tree in sources for one in ast.walk(tree) if isinstance(one, documented)
            if one.body and isinstance(one.body[0], ast.Expr)}  # fmt: skip
    constants = [one for tree in sources for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    said = "\n".join(one.value for one in constants if isinstance(one.value, str) and id(one) not in docs)
    known = {"attach", "init_process_group", ".grad", "do not hold the same model"}  # the last is put together
    assert len(quoted) > 20
    assert [one for one in quoted if one not in said and one not in known] == []


HEADLINE = re.compile(r"(\d+) % of communication hidden behind backward; ([\d.]+) ms exposed, (\d+) % of the step")


def commands_on_the_overlap_page() -> list[str]:
    text = (ROOT / "docs" / "overlap.md").read_text()
    fenced = [line for language, block in blocks_of(ROOT / "docs" / "overlap.md") if not language
              for line in block.splitlines()]  # fmt: skip
    found = [line for line in fenced if line.startswith(("python ", "stretto "))]
    return found + re.findall(r"`(python [^`]+)`", text)


def printed_by(command: str, folder: Path) -> str:
    words = command.split()
    run = [ROOT / words[1]] if words[0] == "python" else ["-m", "stretto", words[1]]
    done = warm_programs.run([*run, *words[2:]], cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_command_on_the_overlap_page_is_run_by_a_test() -> None:
    assert commands_on_the_overlap_page() == [PICTURES, TRACE, SIZES, SKETCH]


PICTURES = "python examples/overlap.py --pictures docs/pictures"
TRACE = "stretto trace trace --text --html overlap.html --picture overlap.png --last 20"
SIZES = "python examples/overlap.py --sizes 0.001 0.07 0.13 0.3 1"
SKETCH = "python examples/overlap.py"


@pytest.mark.flaky(reruns=2)
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.alone
def test_the_four_pictures_show_what_the_page_says_of_them(tmp_path: Path) -> None:
    lines = dict(line.split(maxsplit=1) for line in printed_by(PICTURES, tmp_path).splitlines())
    told = {name: HEADLINE.fullmatch(line) for name, line in lines.items()}
    hidden, exposed = ({name: float(one[group]) for name, one in told.items() if one} for group in (1, 2))
    drawn = tmp_path / "docs" / "pictures"
    words = {path.stem: " ".join(ElementTree.parse(path).getroot().itertext()) for path in drawn.iterdir()}
    assert set(words) == set(hidden) == {"naive", "unbucketed", "not-overlapped", "overlapped"}
    shown = ROOT / "docs" / "pictures"
    assert sorted(path.name for path in drawn.iterdir()) == sorted(path.name for path in shown.iterdir())
    assert all(path.stat().st_size < 100_000 for path in shown.iterdir())
    assert all(path.stat().st_size < 200_000 for path in drawn.iterdir())  # the more the later gradients come
    buckets = {name: len(set(re.findall(r"\bbucket (\d+)", text))) for name, text in words.items()}
    assert buckets == {"naive": 1, "unbucketed": 24, "not-overlapped": 7, "overlapped": 7}
    assert hidden["naive"] == hidden["not-overlapped"] == 0, "nothing is hidden"
    assert hidden["unbucketed"] > 50, "most of it is hidden"
    assert exposed["overlapped"] < 0.8 * min(exposed["naive"], exposed["not-overlapped"])
    assert exposed["overlapped"] < 1.2 * exposed["unbucketed"]  # 0.6 of it, where nothing else runs
    whole = {name: exposed[name] / (1 - hidden[name] / 100) for name in exposed}
    assert whole["unbucketed"] > 1.3 * whole["overlapped"], "the link works longer than it has to"
    assert whole["unbucketed"] == pytest.approx(24 * 2 + 12 * 66048 / 20e3, rel=0.25), "what is sent"


def test_what_is_measured_goes_into_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make figures``: pictures, table, sizes and sketch, of synthetic passes here."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("overlap_page")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page.overlap, "traced", lambda options: timeline_of([a_trace(0, 2), a_trace(1, 2)]).only())
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/overlap.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    page.main()
    text = (tmp_path / "docs/overlap.md").read_text()
    rows = [f"| {name} | 3 | 40.0 ms | 48 % | 21.0 ms | 70.0 ms |" for name in
            ("naive", "unbucketed", "not overlapped", "overlapped")]  # fmt: skip
    assert "\n".join(["|---|---|---|---|---|---|", *rows, "", "<!-- end of runs -->"]) in text
    assert text.count(": 48 % of communication hidden behind backward; 21.0 ms exposed, 30 % of the step\n") == 5
    assert f"```\n{SIZES}\n```\n\n<!-- figure: sizes -->\n\n```\nbucket_cap_mb=0.001 " in text
    assert (
        "exposed, 30 % of the step (rank 0, pass 1)\n```\n\n<!-- end of sketch -->"
        in (tmp_path / "README.md").read_text()
    )
    assert len([*(tmp_path / "docs" / "pictures").iterdir()]) == 4


@pytest.mark.ranks
@pytest.mark.slow
def test_the_sketch_of_the_overlap_page_shows_one_backward(tmp_path: Path) -> None:
    lines = printed_by(SKETCH, tmp_path).splitlines()
    assert lines[8].startswith("exposed ") and " % of communication hidden behind backward; " in lines[10]
    assert re.match(r"backward +==", lines[0]) and [line[:8] for line in lines[1:8]] == [
        f"bucket {n}" for n in range(7)
    ]
    ends = lines[0].rindex("=")
    for line in lines[1:6]:
        assert "-" in line and line.index("-") < ends, "it leaves while backward computes"
    assert "-" not in lines[7][ends + 2 :] and lines[7].rstrip().endswith("#"), "what is filled last is not hidden"
    assert HEADLINE.match(lines[-1])


@pytest.mark.flaky(reruns=2)
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.alone
def test_sizes_of_buckets_do_what_the_page_says(tmp_path: Path) -> None:
    shown = next(text for _, text in blocks_of(ROOT / "docs" / "overlap.md") if text.startswith("bucket_cap_mb="))
    table = [
        [
            (line.split(":")[0], *map(float, found.groups()))
            for line in text.splitlines()
            if (found := HEADLINE.search(line))
        ]
        for text in (shown, printed_by(SIZES, tmp_path))
    ]
    for rows in table:
        assert [row[0].split() for row in rows] == [row[0].split() for row in table[0]] and len(rows) == 5
        hidden, exposed = [row[1] for row in rows], [row[2] for row in rows]
        assert hidden[-1] < min(hidden[:-1]), "too large leaves late"
        best = min(exposed)
        assert sum(one < 1.4 * best for one in exposed[1:4]) >= 2, "between them it is flat"
        assert exposed[-1] > best, "too large costs"


@pytest.mark.ranks
@pytest.mark.slow
def test_the_trace_of_the_overlap_page_is_drawn(tmp_path: Path) -> None:
    recorded(tmp_path / "trace", 2, passes=21)
    out = printed_by(TRACE, tmp_path)
    assert out.startswith("rank 0 of 2 over ") and ", means over the middle half of 20 passes\n" in out
    assert re.search(r"^backward +==", out, re.MULTILINE)
    made = {path.name for path in tmp_path.iterdir()} | {path.name for path in (tmp_path / "trace").iterdir()}
    assert made == {"trace", "overlap.html", "overlap.png", "trace.json", "rank0.jsonl", "rank1.jsonl"}
