"""Two habits that this code does without: golf and docstrings that are noun clauses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "packages", "tests", "benchmarks", "docs", "examples")
CLAUSES = frozenset(
    ["How", "Of", "That", "Those", "What", "Whatever", "Whether", "Which", "Who", "Whose"]
)
"""Docstrings and names of tests begin with a verb or the thing's own noun, not with these."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every file of the repository with its syntax tree."""
    paths = sorted(ROOT.glob("*.py"))
    paths += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths
    }


def golf(tree: ast.Module) -> Iterator[int]:
    """Lines that assign several values in one statement without need: swaps are left."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if not any(isinstance(target, ast.Tuple) for target in node.targets):
            continue
        changed = {ast.unparse(each) for target in node.targets for each in ast.walk(target)}
        read = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
        if not changed & read:
            yield node.lineno


NOUN = re.compile("test_(the|a|an|every|each|all|any|other)_[a-z0-9]+")
"""Names of tests that are a noun and say no behaviour: ``test_the_guide``."""


def clauses(tree: ast.Module) -> Iterator[int]:
    """Lines of docstrings and tests that begin with a word of ``CLAUSES``, or are a mere ``NOUN``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.name.removeprefix("test_").split("_")[0]
            named = node.name.startswith("test_") and first.title() in CLAUSES
            if named or NOUN.fullmatch(node.name):
                yield node.lineno
        # Of modules, classes and functions, and below an assignment, for readers and the help of flags.
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words = str(node.value.value).split(maxsplit=1)
            if words and words[0].rstrip(",:") in CLAUSES:
                yield node.lineno


@pytest.mark.parametrize("habit", [golf, clauses])
def test_code_is_free_of(habit: type) -> None:
    found = [f"{file}:{line}" for file, tree in sources().items() for line in habit(tree)]
    assert not found


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        (golf, "a, b = 1, 2"),
        (golf, "def f(self):\n    self.a, self.b = a, b"),
        (clauses, "def f():\n    '''What is kept.'''"),
        (clauses, "class C:\n    '''Whether it is.'''"),
        (clauses, "class C:\n    x: int\n    '''How many there are.'''"),
        (clauses, "def test_what_is_kept(): pass"),
        (clauses, "def test_the_guide(): pass"),
    ],
)
def test_finds(habit: type, text: str) -> None:
    assert list(habit(ast.parse(text)))


def test_leaves_swaps_and_unpacking() -> None:
    assert not list(golf(ast.parse("a, b = b, a\na, b = x.shape\na, b = b, a + b")))
