"""Every public name says what it is."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import memspan

PACKAGE = Path(memspan.__file__).parent
OTHERS = {"forward", "backward", "encoding", "isatty", "fileno", "write", "flush"}
"""Methods whose meaning torch and Python have given them."""


def public(node: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Modules, functions, classes and methods whose names do not begin with an underscore."""
    yield name, node
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            inside = f"{name}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from public(child, inside)
            elif not any(ast.unparse(each).endswith(".setter") for each in child.decorator_list):
                yield inside, child


def fields(node: ast.AST) -> Iterator[str]:
    """Fields of a class that have a docstring below them."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            yield ast.unparse(field.target)


def test_every_public_name_has_a_docstring() -> None:
    """A method may leave it to the interface that it implements, which has one of that name."""
    names: dict[str, ast.AST] = {}
    for path in PACKAGE.rglob("*.py"):
        if source := path.read_text():
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            names |= public(ast.parse(source), module)
    documented = {name for name, node in names.items() if ast.get_docstring(node)}  # type: ignore[arg-type]
    known = OTHERS | {name.rpartition(".")[2] for name in documented}
    known |= {field for node in names.values() for field in fields(node)}
    missing = [
        name
        for name, node in names.items()
        if name not in documented
        and not (
            isinstance(names.get(name.rpartition(".")[0]), ast.ClassDef)
            and name.rpartition(".")[2] in known
        )
    ]
    assert not missing, f"{len(missing)} public names have no docstring"
