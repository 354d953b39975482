"""The package as a whole: who may import whom, what is public, no side effects of importing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import torch

import stretto

SOURCE = Path(stretto.__file__).parent
DESIGN = (Path(__file__).parents[1] / "docs/design.md").read_text()


def imports_of(path: Path) -> set[str]:
    """Top modules of the package that a file imports."""
    found: set[str] = set()
    depth = len(path.relative_to(SOURCE).parts)
    tree = ast.parse(path.read_text())
    for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stretto"):
            found.add([*node.module.split("."), "__init__"][1])
    return found


def module_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_module_has_a_layer_and_imports_upwards_only() -> None:
    """By the list of layers in docs/design.md, section 3."""
    layers = DESIGN.partition("reads the imports):\n")[2].partition("\n\n")[0]
    layers = re.sub(r"\(.*?\)", "", layers).split("·")
    level = {name: number for number, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    for path in SOURCE.rglob("*.py"):
        module = module_of(path)
        assert module in level, f"{module} has no place in docs/design.md, section 3"
        for imported in imports_of(path):
            assert level[imported] <= level[module], f"{module} imports {imported} from a later layer"


def test_every_module_has_an_owner_in_the_design() -> None:
    """docs/design.md, section 7: each file by its name, and no file that is gone."""
    section = DESIGN.partition("\n## 7.")[2]
    table = "\n".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `"))
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`([\w/]+\.py)`", table)) == files


def test_no_circles() -> None:
    needs = {module_of(path): set() for path in SOURCE.rglob("*.py")}
    for path in SOURCE.rglob("*.py"):
        needs[module_of(path)] |= imports_of(path) - {module_of(path)}
    while needs:
        free = [module for module, wanted in needs.items() if not wanted]
        assert free, f"a circle of imports among {sorted(needs)}"
        for module in free:
            del needs[module]
        for wanted in needs.values():
            wanted.difference_update(free)


def test_no_file_reaches_into_the_privates_of_another() -> None:
    """But for names that torch's own classes have, which others use as they are."""
    owners: dict[str, set[Path]] = {}
    reached: list[tuple[str, Path, int]] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
                owners.setdefault(node.name, set()).add(path)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                if ast.unparse(node.value) == "self":
                    owners.setdefault(node.attr, set()).add(path)
                else:
                    reached.append((node.attr, path, node.lineno))
    torchs = {*dir(torch.nn.Module()), *dir(stretto.DistributedDataParallel(torch.nn.Linear(1, 1)))}
    ours = {"_synchronizer", "_attach", "_buffers_policy", "_attach_options"}
    for name, path, line in reached:
        if name in owners and (name in ours or name not in torchs):
            assert path in owners[name], f"{path.name}:{line} reaches for {name} of another file"


def test_public_names() -> None:
    assert stretto.__all__ == sorted(stretto.__all__)
    assert all(hasattr(stretto, name) for name in stretto.__all__)
    assert stretto.__all__ == [
        "AlreadyAttachedError",
        "BucketPlan",
        "BucketSpec",
        "CommunicationError",
        "DistributedDataParallel",
        "ModelMismatchError",
        "Observer",
        "ParameterSpec",
        "PeerError",
        "PlanError",
        "ReplicaError",
        "Report",
        "SetupError",
        "ShardedOptimizer",
        "Statistics",
        "StrettoError",
        "Synchronizer",
        "TraceError",
        "UnsupportedError",
        "WithheldError",
        "attach",
        "reduce",
        "shard",
    ]


def test_every_public_name_has_a_docstring() -> None:
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert path.name == "__init__.py" or ast.get_docstring(tree), path
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                private = any(
                    isinstance(parent, (ast.FunctionDef, ast.ClassDef))
                    and (parent.name.startswith("_") or isinstance(parent, ast.FunctionDef))
                    and node in ast.walk(parent)
                    and parent is not node
                    for parent in ast.walk(tree)
                )
                setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
                assert private or setter or ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def test_importing_starts_nothing() -> None:
    program = (
        "import threading, logging, os, torch; before = set(os.environ); handlers = list(logging.root.handlers)\n"
        "hooks = torch.nn.modules.module._global_forward_hooks; import stretto, stretto.testing\n"
        "assert threading.active_count() == 1 and not torch.distributed.is_initialized()\n"
        "assert logging.root.handlers == handlers and not hooks and set(os.environ) == before\n"
        "import sys; slow = {'matplotlib', 'rich', 'sklearn', 'typer', 'torch.distributed.checkpoint'}\n"
        "assert not slow & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_files_stay_small() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 350, f"{path.name} is two files"


def test_a_destroyed_process_group_is_gone() -> None:
    """torch.distributed.nn, imported while a group exists, holds it for ever; stretto imports it first."""
    program = (
        "import stretto, torch.distributed as dist, weakref\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "import torch.distributed.nn\n"
        "group = weakref.ref(dist.group.WORLD); dist.destroy_process_group(); assert group() is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
