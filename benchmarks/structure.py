"""Figures about the code's structure, as a newcomer meets it. To be reported, not optimised.

    python benchmarks/structure.py

Of the package that Python imports: files, and changes from file to file, between ``memspan train`` and
the first step of the optimiser; ``Any`` in public signatures; long functions and those with many
parameters; lines without docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import io
import os
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import memspan

PACKAGE = Path(memspan.__file__).parent
LONG, MANY = 60, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


class FirstStep(BaseException):
    """The optimiser is about to make its first step."""


def walk() -> tuple[int, int]:
    """Files that a tiny training enters before its first step, and changes between them."""
    import torch

    from memspan import cli

    def stop(*_: Any, **__: Any) -> None:
        raise FirstStep

    entered: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)) and entered[-1:] != [name]:
            entered.append(name)

    sizes = {"n-layers": 2, "d-model": 16, "n-heads": 2, "d-ff": 32}
    flags = [f"--model.{name}={value}" for name, value in sizes.items()]
    loop = ["--train.batch-size=2", "--train.segment-length=8", "--train.device=cpu"]
    torch.optim.AdamW.step = stop  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMSPAN_CACHE"] = folder
        os.chdir(folder)
        Path("text.txt").write_text("what was read is remembered. " * 99)
        sys.setprofile(profile)
        try:
            cli.main(["train", "--data.corpus=text.txt", "--out=run", *flags, *loop])
        except FirstStep:
            pass
        finally:
            sys.setprofile(None)
            os.chdir("/")
    return len(set(entered)), len(entered) - 1


def functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, Function]]:
    """All functions and methods by their names."""
    for node in ast.iter_child_nodes(tree):
        inside = f"{name}.{node.name}" if isinstance(node, Function | ast.ClassDef) else name
        if isinstance(node, Function):
            yield inside, node
        yield from functions(node, inside)


def parameters(function: Function) -> list[ast.arg]:
    """All but ``self`` and ``cls``."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [arg for arg in named if arg.arg not in ("self", "cls")]


def code_lines(source: str) -> int:
    """Lines with code: no docstrings, comments and blank lines."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    total, unsaid, long, many = 0, 0, [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        total += code_lines(source)
        place = path.relative_to(PACKAGE).as_posix()
        for name, function in functions(ast.parse(source)):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > LONG:
                long.append(f"{place}{name.replace('.', ':', 1)} {length}")
            if len(parameters(function)) > MANY:
                many.append(f"{place}{name.replace('.', ':', 1)} {len(parameters(function))}")
            if not any(part.startswith("_") for part in name.split(".")[1:]):
                types = [*(arg.annotation for arg in parameters(function)), function.returns]
                unsaid += sum("Any" in ast.unparse(t) for t in types if t is not None)
    files, switches = walk()
    print(f"{files} files and {switches} switches between them before the first step")
    print(f"{unsaid} Any in public signatures, {total} lines of code")
    print(f"{len(long)} functions over {LONG} lines (docstrings counted):", *long, sep="\n  ")
    print(f"{len(many)} with more than {MANY} parameters:", *many, sep="\n  ")


if __name__ == "__main__":
    main()
