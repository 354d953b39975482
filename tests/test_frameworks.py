"""The real accelerate, Lightning and transformers around stretto's wrapper: the programs of docs/frameworks.md."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import warm_programs

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
PROGRAMS = {name: code for code, name in re.findall(r"```python\n(# (\w+)\.py\n.*?)```", PAGE.read_text(), re.DOTALL)}
FRAMEWORKS = {"with_accelerate": "accelerate", "with_lightning": "lightning", "with_transformers": "transformers"}
BEFORE = {
    "stretto": "import stretto\nmade = []\nclass Counted(stretto.DistributedDataParallel):\n"
    "    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n        made.append(1)\n"
    "stretto.DistributedDataParallel = Counted\n",
    "torch": "import stretto, torch\nmade = [1]\n"
    "stretto.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel\n",
}
AFTER = (
    "import hashlib\ntensors = [*model.parameters(), *model.buffers()]\n"
    "print('bits', hashlib.sha256(b''.join(t.detach().numpy().tobytes() for t in tensors)).hexdigest(), len(made))\n"
)


def test_every_program_is_run() -> None:
    assert PROGRAMS.keys() == FRAMEWORKS.keys()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, ("", "")) for name in FRAMEWORKS), ("with_accelerate", ("cpu=True", 'cpu=True, mixed_precision="bf16"'))],
    ids=[*FRAMEWORKS, "with_accelerate in bf16"],
)
def test_a_framework_trains_with_it_to_the_same_bits_as_with_torchs(
    name: str, change: tuple[str, str], tmp_path: Path
) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: pip install 'stretto[frameworks]'")
    told = {}
    for whose, before in BEFORE.items():
        folder = tmp_path / whose
        folder.mkdir()
        (folder / "program.py").write_text(before + PROGRAMS[name].replace(*change) + AFTER)
        done = warm_programs.run_ranks(["program.py"], 2, timeout=130, cwd=folder)
        assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
        told[whose] = [re.findall(r"loss [\d.]+|bits .*", one.stdout) for one in done]
    (loss, bits), (_, others) = told["stretto"]
    assert loss.startswith("loss ") and bits == others, "alike on both ranks"
    assert bits.endswith(" 1"), "one wrapper was made, and it was stretto's"
    assert told["stretto"] == told["torch"]
