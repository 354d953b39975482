"""stretto without its side door: a copy of the package in which nothing asks whether anybody watches."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import stretto
from stretto.events import EVENTS

NAME = "stretto_without_events"


class _Cut(ast.NodeTransformer):
    """``if events.bucket_full:`` becomes ``if False:``, which the compiler leaves out; so does ``and``'s part of it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._in_question = False

    def visit_If(self, node: ast.If) -> ast.If:
        self._in_question = True
        node.test = self.visit(node.test)
        self._in_question = False
        node.body = [self.visit(one) for one in node.body]
        node.orelse = [self.visit(one) for one in node.orelse]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if not self._in_question or node.attr not in EVENTS or owner not in ("events", "_events"):
            return node
        self.found.append(node.attr)
        return ast.Constant(False)


def without_events() -> ModuleType:
    """The package, imported anew from such a copy: no event is emitted, and passes are not recorded for a report."""
    there = Path(stretto.__file__).parent
    cut = _Cut()
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        copy = Path(folder) / NAME
        shutil.copytree(there, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.glob("*.py"):
            file.write_text(ast.unparse(ast.fix_missing_locations(cut.visit(ast.parse(file.read_text())))))
        missed = {*EVENTS} - {*cut.found}
        assert not missed, f"nothing asks for {missed}: do the names in _Cut still fit?"
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(NAME)
        finally:
            sys.path.remove(folder)
