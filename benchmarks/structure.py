"""Figures about the code's structure, as a newcomer meets it. To be reported, not optimised.

    python benchmarks/structure.py

Of the package that Python imports: lines of each room, as ``benchmarks/house.py`` draws; files that
a reader opens, and changes from file to file, on five trips through a tiny run; ``Any`` in public
signatures; short files; long functions and those with many parameters; lines without docstrings,
comments and blank lines.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import memspan

PACKAGE = Path(memspan.__file__).parent
LONG, MANY, SHORT = 60, 8, 60
Function = ast.FunctionDef | ast.AsyncFunctionDef


def calls() -> list[str]:
    """All functions under the package, ``FILE:FUNCTION``, that a tiny training and its continuation
    enter, in order. What importing runs is left out."""
    from memspan import cli

    entered: list[str] = []
    importing = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        inside = event == "call" and code.co_filename.startswith(f"{PACKAGE}{os.sep}")
        if inside and not importing:
            place = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            entered.append(f"{place}:{code.co_qualname}")

    sizes = {"n-layers": 2, "d-model": 16, "n-heads": 2, "d-ff": 32}
    model = [f"--model.{name}={value}" for name, value in sizes.items()]
    loop = {"batch-size": 2, "segment-length": 8, "device": "cpu", "steps": 4, "save-every": 2}
    flags = [f"--train.{name}={value}" for name, value in loop.items()]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["MEMSPAN_CACHE"] = folder
        Path("text.txt").write_text("what was read is remembered. " * 99)
        sys.setprofile(profile)
        try:
            cli.main(["train", "--data.corpus=text.txt", "--out=run", *model, *flags])
            cli.main(["generate", "run", "--prompt=what was", "--tokens=4"])
        finally:
            sys.setprofile(None)
    return entered


def trips() -> dict[str, list[str]]:
    """The parts of :func:`calls` that a reader follows one at a time."""
    entered = calls()

    def at(name: str) -> list[int]:
        return [n for n, place in enumerate(entered) if place.endswith(f":{name}")]

    updates, noted, asked = at("Updater.update"), at("MetricLogger.add"), at("Trainer._is_stopping")
    saved, [_, generating] = at("Checkpointer.save")[0], at("main")
    writing = min(n for n in at("draw_tokens") if n > generating)
    # The first token of a reader packs its weights; later ones are alike.
    _, second, third, *_ = at("Sample.push")[-4:]
    return {
        "train until the first update": entered[: updates[0]],
        "one update": entered[updates[1] : noted[1]],
        "checkpoint": entered[saved : min(n for n in asked if n > saved)],
        "generate until the prompt is read": entered[generating:writing],
        "one token": entered[second + 1 : third + 1],
    }


def files_of(trip: list[str]) -> list[str]:
    """The files of a trip, one after the other; a change of file is a new entry."""
    files = [place.partition(":")[0] for place in trip]
    return [file for file, before in zip(files, ["", *files], strict=False) if file != before]


def lines_of(path: Path) -> int:
    """All lines of a file, or of the Python files in a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def rooms() -> dict[str, int]:
    """What stands in the package, file or folder, with its lines of Python."""
    found = (path for path in sorted(PACKAGE.iterdir()) if path.suffix == ".py" or path.is_dir())
    return {path.stem: n for path in found if (n := lines_of(path))}


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
    total, unsaid, long, many, short = 0, 0, [], [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        total += code_lines(source)
        place = path.relative_to(PACKAGE).as_posix()
        if lines_of(path) < SHORT:
            short.append(place)
        for name, function in functions(ast.parse(source)):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > LONG:
                long.append(f"{place}{name.replace('.', ':', 1)} {length}")
            if len(parameters(function)) > MANY:
                many.append(f"{place}{name.replace('.', ':', 1)} {len(parameters(function))}")
            if not any(part.startswith("_") for part in name.split(".")[1:]):
                types = [*(arg.annotation for arg in parameters(function)), function.returns]
                unsaid += sum("Any" in ast.unparse(t) for t in types if t is not None)
    walked = {name: files_of(trip) for name, trip in trips().items()}
    print("lines:", *(f"{name} {n:,}" for name, n in rooms().items()), sep="\n  ")
    for name, files in walked.items():
        print(f"{name}: {len(set(files))} files, {len(files) - 1} switches between them")
    print(f"{unsaid} Any in public signatures, {total} lines of code")
    print(
        f"{len(short)} files under {SHORT} lines, {sum('__init__' in p for p in short)} __init__.py"
    )
    print(f"{len(long)} functions over {LONG} lines (docstrings counted):", *long, sep="\n  ")
    print(f"{len(many)} with more than {MANY} parameters:", *many, sep="\n  ")


if __name__ == "__main__":
    main()
