"""The real accelerate, Lightning, Fabric and transformers around the wrapper: the programs of docs/frameworks.md."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import warm_programs

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
PROGRAMS = {name: code for code, name in re.findall(r"```python\n(# (\w+)\.py\n.*?)```", PAGE.read_text(), re.DOTALL)}
FRAMEWORKS = {
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_fabric": "lightning",
    "with_transformers": "transformers",
}
IMPORTS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers.trainer"}
PLAIN = {
    "with_accelerate": "cpu=True,",
    "with_lightning": 'accelerator="cpu",',
    "with_fabric": 'accelerator="cpu",',
    "with_transformers": "use_cpu=True,",
}
BF16 = {
    "with_accelerate": ' mixed_precision="bf16",',
    "with_lightning": ' precision="bf16-mixed",',
    "with_fabric": ' precision="bf16-mixed",',
    "with_transformers": " bf16=True,",
}
RANKS = """
import importlib, os, socket, sys
importlib.import_module(sys.argv[1])  # takes many seconds: ranks are forks
for whose in os.listdir():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.chdir(whose)
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            os.dup2(os.open(f"told{rank}", os.O_CREAT | os.O_WRONLY), 1)
            sys.argv = ["program.py"]
            exec(compile(open("program.py").read(), "program.py", "exec"), {"__name__": "__main__"})
            sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert codes == [0, 0], (whose, codes)
"""
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
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_trains_with_it_to_the_same_bits_as_with_torchs(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: pip install '.[frameworks]'")
    assert PROGRAMS[name].count(PLAIN[name]) == 1
    for whose, before in BEFORE.items():
        for precision in ("fp32", "bf16"):
            folder = tmp_path / f"{whose} {precision}"
            folder.mkdir()
            more = BF16[name] if precision == "bf16" else ""
            program = before + PROGRAMS[name].replace(PLAIN[name], PLAIN[name] + more) + AFTER
            (folder / "program.py").write_text(program)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warm_programs.run(["-c", RANKS, IMPORTS[FRAMEWORKS[name]]], timeout=250, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    told = {
        folder.name: [re.findall(r"loss [\d.]+|bits .*", (folder / f"told{rank}").read_text()) for rank in range(2)]
        for folder in tmp_path.iterdir()
    }
    for precision in ("fp32", "bf16"):
        (loss, bits), (_, others) = ours = told[f"stretto {precision}"]
        assert loss.startswith("loss ") and bits == others, "alike on both ranks"
        assert bits.endswith(" 1"), "one wrapper was made, and it was stretto's"
        assert ours == told[f"torch {precision}"]
    assert told["stretto fp32"] != told["stretto bf16"]
