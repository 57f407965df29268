"""The examples in docstrings run as they stand."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
import memspan.models
import tiny_runs

SOURCES = Path(memspan.__file__).parent
NOT_RUN = {"from_run", "MemspanCache", "MemspanLM", "resize_embeddings"}
"""Examples of integrations: they upload, or need another library."""


def examples() -> Iterator[Any]:
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            _, found, example = (ast.get_docstring(node) or "").partition("Example::\n\n")
            # Up to the first line that is not indented.
            lines = example.splitlines()
            end = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
            if found and node.name not in NOT_RUN:
                yield pytest.param("\n".join(lines[:end]), id=f"{path.stem}-{node.name}")


@pytest.fixture
def names(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that the examples take for granted: a run of a book, its model and a memory of it."""
    Path("text.txt").write_text(tiny_runs.TEXT)
    for name in ("book.txt", "other-book.txt"):
        shutil.copyfile("text.txt", name)
    memspan.train(tiny_runs.OPTIONS, "runs/book")
    shutil.copytree("runs/book", "runs/first")
    model = memspan.load("runs/book").model
    tokens = torch.zeros(4, 5, dtype=torch.long)
    reader = model.reader(batch_size=4)
    reader.read(tokens)
    reader.memory.save("book.memory", model.fingerprint())
    whole = memspan.train

    def train(config: memspan.RunConfig[Any], folder: str) -> Path:
        shutil.rmtree(folder)
        options = dataclasses.replace(tiny_runs.OPTIONS, data=config.data)
        return whole(options, folder)

    monkeypatch.setattr(memspan, "train", train, raising=False)
    monkeypatch.setattr(
        memspan, "convert", lambda source, out: shutil.copytree("runs/book", out), raising=False
    )
    return {
        **{name: getattr(memspan.models, name) for name in memspan.models.__all__},
        "dataclasses": dataclasses,
        "memspan": memspan,
        "model": model,
        "next_memory": reader.memory[0],
        "reader": reader,
        "tokens": tokens,
        "torch": torch,
    }


@pytest.mark.parametrize("example", [*examples()])
def test_an_example_runs(example: str, names: dict[str, Any]) -> None:
    code = example.replace("budget=300", "budget=1, longest=16").replace("steps=5000", "steps=8")
    exec(compile(ast.parse("if True:\n" + code), "docstring", "exec"), names)
