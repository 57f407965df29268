"""A smallest version as one program, to copy: what it imports from its neighbours stands in it."""

from __future__ import annotations

import ast
from pathlib import Path

from docsite.code import ROOT


def standalone(path: str, root: Path = ROOT) -> str:
    """A program's source: the model first, then what it uses of the files beside it, then its start.

    Args:
        path: from the repository's root.
        root: the repository.
    """
    file = root / path
    about = ""
    start = ""
    parts: list[str] = []
    imports: dict[str, set[str]] = {}

    def add(file: Path, wanted: set[str] | None) -> None:
        """Add a file's definitions: all, or those of these names and what they need."""
        nonlocal about, start
        lines = file.read_text(encoding="utf-8").splitlines()
        docstring, *body = ast.parse("\n".join(lines)).body
        needed = _needed(body, wanted)
        neighbours: list[tuple[Path, set[str]]] = []
        end = docstring.end_lineno or 0
        if not wanted:
            about = "\n".join(lines[:end])
        for node in body:
            # With the comment above it.
            text = "\n".join(lines[end : node.end_lineno]).strip("\n")
            end = node.end_lineno or 0
            match node:
                case ast.Import(names=names):
                    for name in names:
                        imports.setdefault(f"import {name.name}", set())
                case ast.ImportFrom(module=str(module), names=names):
                    used = {name.name for name in names} & needed
                    beside = file.with_name(f"{module}.py")
                    if beside.is_file():
                        neighbours.append((beside, used))
                    elif used:
                        imports.setdefault(f"from {module} import", set()).update(used)
                case ast.If():
                    start = start or text
                case _ if _names(node) & needed and text not in parts:
                    parts.append(text)
        for beside, used in neighbours:
            add(beside, used)

    add(file, None)
    head = [" ".join([line, ", ".join(sorted(names))]).strip() for line, names in imports.items()]
    head.sort(key=lambda line: (line.startswith("from"), line))
    return "\n\n".join([about, "\n".join(head), "\n\n\n".join([*parts, start])]) + "\n"


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement at a module's top defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _needed(body: list[ast.stmt], wanted: set[str] | None) -> set[str]:
    """The names that a module's definitions use, from these on; all, where none are given."""
    uses = {
        name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for node in body
        for name in _names(node)
    }
    if wanted is None:
        return {
            part.id for node in body for part in ast.walk(node) if isinstance(part, ast.Name)
        } | {*uses}
    found: set[str] = set()
    waiting = [*wanted]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += uses.get(name, ())
    return found
