"""Imports of torch alone; of pytest for tests, and of transformers where one of its models is made."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import statelaws
from statelaws import floor

SOURCES = Path(statelaws.__file__).parent
FILES = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*.py")}
WITHIN_FUNCTIONS = {
    "adapters/recipes.py": {"transformers"},
    "adapters/transformers.py": {"transformers"},
    "targets.py": {"transformers"},
}


def packages(nodes: Iterator[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - {"statelaws"} - sys.stdlib_module_names


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_torch_alone(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    others = {"torch", "pytest"} if name == "testing.py" else {"torch"}
    assert packages(iter(tree.body)) <= others
    assert packages(ast.walk(tree)) <= others | WITHIN_FUNCTIONS.get(name, set())


def test_noticing_products_does_not_import_torchs_compiler() -> None:
    # Importing it takes longer than all laws of a small model; torch wraps what would call for it.
    assert not hasattr(floor._Products.__torch_dispatch__, "__wrapped__")


def test_public_names_are_those_of_dir_and_have_docstrings() -> None:
    assert {*dir(statelaws)} == {*statelaws.__all__, "__version__"}
    assert all(inspect.getdoc(getattr(statelaws, name)) for name in statelaws.__all__)
    assert (SOURCES / "py.typed").is_file()
