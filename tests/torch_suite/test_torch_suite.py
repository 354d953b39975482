"""torch's own DDP tests pass with the drop-in in the place of torch's class.

Each test of torch's is one test here, in two fresh processes. listed.py has those that cannot run without a GPU, and
those that end in a complaint that torch's error did not come: there the complaint is what is asserted.
"""

import ast
import multiprocessing.forkserver
import os
import pathlib
import re
import time

import pytest
import torch
import warm
from listed import CANNOT_RUN, TORCH_COMPLAINS
from torch_suite_rank import perform

pytestmark = pytest.mark.ranks
HERE = str(pathlib.Path(__file__).parent)
WORLD_SIZE = 2


def names():
    """Every test that reaches DistributedDataParallel, by itself or through the helper methods that it calls."""
    file = pathlib.Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
    tree = ast.parse(file.read_text())  # not imported here: it wants WORLD_SIZE and more in the environment
    base = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    tests = [node for node in base.body if isinstance(node, ast.FunctionDef)]
    texts = {node.name: "\n".join(map(ast.unparse, node.body)) for node in tests}  # without the decorators

    def reaches(name, seen):
        if "DistributedDataParallel" in texts[name]:
            return True
        called = set(re.findall(r"self\.(_\w+)\(", texts[name])) & texts.keys() - seen
        return any(reaches(one, seen | called) for one in called)

    return [name for name in texts if name.startswith("test_") and reaches(name, {name})]


NAMES = names()


@pytest.fixture(scope="module")
def fork_server():
    """torch and its tests are imported once; a rank is a fork, ready at once. pytest is its main module."""
    context = warm.fork_server(["pytest", "torch_suite_stage"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)  # until 3.13 the server does not get sys.path
        multiprocessing.forkserver.ensure_running()
    return context


LEFT_ALONE = ("Connection closed by peer", "Connection reset by peer")
"""What Gloo says when the other rank has gone."""


RUN = [name for name in NAMES if name not in CANNOT_RUN]
PARTS = [pytest.mark.xdist_group(f"torch's suite, part {part}") for part in range(4)]  # each needs the server anew


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", [pytest.param(name, marks=PARTS[n % len(PARTS)]) for n, name in enumerate(RUN)])
def test_of_torch(name, fork_server, tmp_path):
    outcomes = run(fork_server, name, tmp_path)
    if name not in TORCH_COMPLAINS:
        assert not any(outcomes), "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(outcomes))
        return
    complaint, _ = TORCH_COMPLAINS[name]
    assert any(text and complaint in text for text in outcomes), outcomes
    for text in outcomes:  # a rank without a complaint of its own is left alone by the others
        assert text is None or complaint in text or any(end in text for end in LEFT_ALONE), text


def test_what_is_listed_exists():
    listed = [*CANNOT_RUN, *TORCH_COMPLAINS]
    assert len(set(listed)) == len(listed)
    assert not [name for name in listed if name not in NAMES]


def run(context, name, folder, limit=80):
    """Outcome of each rank: None, or a traceback."""
    ends = []
    processes = []
    for rank in range(WORLD_SIZE):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=perform, args=(name, rank, WORLD_SIZE, str(folder / "meeting"), theirs))
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    deadline = time.monotonic() + limit
    outcomes = []
    for end in ends:
        try:
            ready = end.poll(max(0.0, deadline - time.monotonic()))
            outcomes.append(end.recv() if ready else f"did not end within {limit} s")
        except EOFError:
            outcomes.append("died")
    for process in processes:
        process.kill()
        process.join()
    return outcomes
