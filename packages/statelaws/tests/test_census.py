"""The census' results, where no model of others that somebody looked at and found right is accused, and
the length of its adapters."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from right_models import RIGHT

CENSUS = Path(__file__).parents[1] / "census"
JAX = "weights, states and inputs go to JAX and back, rows are its vmap, and a call is compiled"
LONG = {"OfJax": JAX, "of_memax": JAX}
"""Adapters of 25 lines or more, and the reason."""


TEXT = (CENSUS / "targets.py").read_text()
Definition = ast.FunctionDef | ast.ClassDef


def code(definition: Definition) -> set[int]:
    """Numbers of the lines with code: neither blank, nor comments, docstrings or decorators."""
    docstrings = {
        line
        for each in ast.walk(definition)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        for line in range(each.lineno, (each.end_lineno or 0) + 1)
    }
    own = range(definition.lineno, (definition.end_lineno or 0) + 1)
    lines = TEXT.splitlines()
    with_text = {line for line in own if lines[line - 1].strip()}
    comments = {line for line in own if lines[line - 1].lstrip().startswith("#")}
    return with_text - comments - docstrings


def makes_modules(definition: Definition) -> bool:
    """True of what makes the model that is adapted: classes and functions of ``nn.Module``."""
    if isinstance(definition, ast.ClassDef):
        return any(ast.unparse(base) == "nn.Module" for base in definition.bases)
    return definition.returns is not None and ast.unparse(definition.returns) == "nn.Module"


def adapters() -> dict[str, int]:
    """Lines of all that stands between a library's model and the laws, by name: a definition of
    targets.py, and whatever it uses of that file but what makes models."""
    found = [node for node in ast.parse(TEXT).body if isinstance(node, Definition)]
    definitions = {
        node.name if node.name != "_" else ast.unparse(node.decorator_list[0]): node
        for node in found
        if node.name not in ("target", "by_turns") and not makes_modules(node)
    }

    def lines(name: str, seen: set[str]) -> set[int]:
        seen.add(name)
        uses = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
        rest = [lines(use, seen) for use in sorted(uses & {*definitions} - seen) if use not in seen]
        return code(definitions[name]).union(*rest)

    return {name: len(lines(name, set())) for name in definitions}


def test_adapters_take_fewer_than_25_lines() -> None:
    long = {name: n for name, n in adapters().items() if n >= 25}
    assert {*long} == {*LONG}, long


def test_right_models_of_others_were_read_and_no_law_accused_them() -> None:
    lines = (CENSUS / "right.txt").read_text().splitlines()
    right = {line for line in lines if line and not line.startswith("#")}
    results = map(json.loads, (CENSUS / "results.jsonl").read_text().splitlines())
    read = {result["target"]: result.get("findings", []) for result in results}
    accused = {
        f"{name}: {finding['law']}"
        for name in right
        for finding in read.get(name, [])
        if finding["outcome"] == "broken"
    }
    tried = {name for name in right if any(f["outcome"] == "holds" for f in read.get(name, []))}
    assert not accused
    assert len(tried) >= 20
    assert len(tried) + len(RIGHT) >= 60
