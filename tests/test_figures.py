"""Figures of docs/benchmarks.md: what is made of measurements, and the driver for real."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_programs
from comparisons import made_up

from stretto.bench import Contestant, everybody
from stretto.bench.compare import in_block
from stretto.bench.contestants import ALONE

ROOT = Path(__file__).parent.parent


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("figures")


def run_of(names: list[str], **changes: Any) -> dict[str, Any]:
    return made_up({name: [0.01 * number, 0.011 * number] for number, name in enumerate(names, 1)}, **changes).to_dict()


def data_of(figures: Any, name: str) -> dict[str, Any]:
    """Made up, for each figure."""
    everyone = [one.name for one in everybody()]
    module = sys.modules[figures.FIGURES[name].table.__module__]
    if name == "breakdown":
        parts = {
            who: {part: [0.1, 0.2] for part in ("forward", "backward", "exposed", "hidden", "optimizer")}
            for who in everyone
        }
        return {"runs": [run_of(everyone)], "parts": [parts], "reported": [{}], "left_out": ["the network: not here"]}
    if name == "sweep":
        sizes = [module.label(cap) for cap in (module.A_PARAMETER, *module.SIZES)]
        flat = run_of([ALONE, *(one.name for one in module.baselines())])
        kinds = [module.SHARED, module.GROUP, module.TORCH, module.SIZELESS]
        return {"runs": [*[run_of([ALONE, *sizes])] * 3, flat], "kinds": kinds}
    if name == "skip":
        every = [1, 2]
        names = [ALONE, f"{ALONE}, step every 2", *(module.name_of(kind, n) for kind in module.KINDS for n in every)]
        return {"runs": [run_of(names)], "every": every}
    if name == "round_robin":
        others = [one.name for one in module.others()]
        return {"runs": [run_of([ALONE, *map(module.name_of, module.GROUPS), *others])]}
    if name == "ranks":
        who = [one.name for one in module.contestants()]
        return {"runs": [run_of(who, ranks=world) for world in (1, 2, 3, 4)]}
    return {"runs": [run_of(everyone)]}


@pytest.mark.parametrize("name", ["contest", "breakdown", "sweep", "skip", "round_robin", "ranks", "network"])
def test_each_figure_goes_to_json_a_table_and_a_plot(figures: Any, name: str, tmp_path: Path) -> None:
    assert [*figures.FIGURES] == ["contest", "breakdown", "sweep", "skip", "round_robin", "ranks", "network"]
    figure, data = figures.FIGURES[name], data_of(figures, name)
    figures.save(figure, data, tmp_path)
    again = json.loads((tmp_path / f"{name}.json").read_text())
    assert again == json.loads(json.dumps(data))
    assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    table = [line for line in figures.markdown(figure, again).splitlines() if line.startswith("|")]
    assert len(table) > 2 and len({line.count("|") for line in table}) == 1


def drawn(figures: Any, name: str, data: dict[str, Any]) -> Any:
    """On paper that nobody writes."""
    figure = figures.FIGURES[name]
    paper = pytest.importorskip("matplotlib.figure").Figure(figsize=figure.size, layout="constrained")
    figure.draw(data, paper)
    paper.draw_without_rendering()
    return paper


def test_a_row_of_the_breakdown_is_of_one_name_in_all_cases(figures: Any) -> None:
    """Between hosts somebody may not take part, and only the first case has the names beside it."""
    data = data_of(figures, "breakdown")
    data["runs"] *= 2
    data["parts"] = [data["parts"][0], {**data["parts"][0]}]
    data["parts"][1].pop("stretto over the process group")
    first, second = drawn(figures, "breakdown", data).axes
    names = {tick.get_position()[1]: tick.get_text() for tick in first.get_yticklabels()}
    assert set(names.values()) == {*data["parts"][0]} and not any(
        tick.get_visible() for tick in second.get_yticklabels()
    )
    assert first.get_ylim() == second.get_ylim()
    for axes, parts in zip((first, second), data["parts"], strict=True):
        middles = {round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches if bar.get_height() == 0.6}
        assert {names[at] for at in middles} == {*parts}


@pytest.mark.parametrize("name", ["sweep", "skip", "round_robin", "ranks"])
def test_names_along_a_line_do_not_overlap(figures: Any, name: str) -> None:
    data = json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())
    for axes in drawn(figures, name, data).axes:
        boxes = [tick.get_window_extent() for tick in axes.get_xticklabels()]
        assert all(one.x1 < after.x0 for one, after in itertools.pairwise(boxes))


EVERYBODY = {"a message a parameter, after backward", "one message, after backward", "torch DDP", "FSDP2 replicate"}
EVERYBODY |= {"stretto"}


@pytest.mark.parametrize("name", ["contest", "breakdown", "sweep", "skip", "round_robin", "ranks", "network"])
def test_each_figure_shows_all_ways_to_train(figures: Any, name: str) -> None:
    """In its table, by a row or a column each; docs/benchmarks.md says where somebody cannot take part."""
    text = figures.markdown(figures.FIGURES[name], data_of(figures, name)).partition("\n\n- ")[0]
    assert not [who for who in EVERYBODY if who not in text]
    assert "torch DDP, default" in text


@pytest.mark.parametrize("name", ["contest", "breakdown", "sweep", "skip", "round_robin", "ranks", "network"])
def test_what_the_page_shows_is_of_all_ways_to_train(figures: Any, name: str) -> None:
    """The measurements beside it are no older than the contestants."""
    data = json.loads((ROOT / "docs" / "benchmarks" / f"{name}.json").read_text())
    if "skipped" in data:
        pytest.skip(data["skipped"])
    text = figures.markdown(figures.FIGURES[name], data).partition("\n\n- ")[0]
    assert not [who for who in {*EVERYBODY, "torch DDP, default"} if who not in text]


def test_passes_in_a_block_end_with_a_synchronisation() -> None:
    found = [in_block(Contestant("", "alone", sync_every=every), 5) for every in (1, 2, 4, 5, 8)]
    assert found == [5, 4, 4, 5, 8]


def test_a_figure_that_cannot_be_measured_says_why(figures: Any, tmp_path: Path) -> None:
    data = {"skipped": "hosts cannot be emulated"}
    figures.save(figures.FIGURES["network"], data, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["network.json"]
    assert figures.markdown(figures.FIGURES["network"], data) == "Not measured: hosts cannot be emulated\n"


def test_breakdown_adds_up(figures: Any) -> None:
    """Backward takes 4 s alone and 5 with messages that take 3: 1 is exposed, 2 are hidden."""
    parts_of = sys.modules["paper.breakdown"].parts_of
    everyone = [{ALONE: [(1.0, 4.0, 0.5)], "stretto": [(1.0, 5.0, 0.5)], "slow": [(1.0, 9.0, 0.5)]}] * 2
    seconds = {"messages of stretto": [6.0], "messages of slow": [6.0]}
    told = parts_of("stretto", everyone, seconds, 2)
    assert told == {
        "forward": [1.0],
        "backward": [4.0],
        "exposed": [1.0],
        "hidden": [2.0],
        "optimizer": [0.5],
        "messages": [3.0],
    }
    assert parts_of("slow", everyone, seconds, 2)["hidden"] == [0.0], "all of it is exposed, and more"


@pytest.mark.ranks
def test_driver_measures_writes_and_draws_again(
    figures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, folder = tmp_path / "benchmarks.md", tmp_path / "benchmarks"
    page.write_text("before\n<!-- figure: round_robin -->\nold\n<!-- end of round_robin -->\nafter\n")
    command = [str(ROOT / "benchmarks" / "figures.py"), "round_robin", "--output", str(folder)]
    done = warm_programs.run([*command, "--quick"])
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in folder.iterdir()) == ["round_robin.json", "round_robin.svg"]
    text = page.read_text()
    assert text.startswith("before\n<!-- figure: round_robin -->\n")
    assert text.endswith("<!-- end of round_robin -->\nafter\n")
    assert "| 3 groups |" in text and "old" not in text
    assert "\n![Process groups in turn](benchmarks/round_robin.svg)\n" in text

    page.write_text(text.replace("groups", "changed"))
    monkeypatch.setattr(sys, "argv", [*command, "--draw-only"])
    figures.main()
    assert page.read_text() == text
    monkeypatch.setattr(sys, "argv", [command[0], "sweep", *command[1:], "--draw-only"])
    with pytest.raises(SystemExit) as caught:
        figures.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"{folder} has no sweep.json")


def test_page_has_a_place_for_every_figure(figures: Any) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in figures.FIGURES:
        assert text.count(f"<!-- figure: {name} -->") == text.count(f"<!-- end of {name} -->") == 1
        assert f"figures.py {name}" in text


def test_least_that_a_step_can_take_is_calculated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from least import Layer, Profile, least_seconds, profile

    step = Profile([Layer(100, 0.0, 0.8), Layer(300, 0.1, 0.4)], backward_ends=0.8, optimizer=0.2)
    assert least_seconds(step, lambda nbytes: 0, shares=False) == pytest.approx(1.0)
    assert least_seconds(step, lambda nbytes: 0, shares=True) == pytest.approx(0.9), "half of the optimizer's step"
    # all: the second layer's 3 s from 0.4 on, then the first's 1 s, then the step
    assert least_seconds(step, lambda nbytes: nbytes / 100, shares=False) == pytest.approx(0.4 + 4 + 0.2)
    # shares: a quarter of half a step, 0.5 s for the first layer while the rest is stepped, and 1.5 s for the second
    # before forward reaches it, 0.3 s later its gradients
    assert least_seconds(step, lambda nbytes: nbytes / 100, shares=True) == pytest.approx(0.025 + 2 + 0.3 + 2)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    found = profile(model, lambda net: net(torch.ones(3, 8)).sum(), torch.optim.SGD(model.parameters()), rounds=3)
    assert [layer.nbytes for layer in found.layers] == [4 * 72, 4 * 18]
    assert 0 <= found.layers[0].needed <= found.layers[1].needed <= found.layers[1].ready <= found.layers[0].ready
    assert found.layers[0].ready <= found.backward_ends and found.optimizer > 0
