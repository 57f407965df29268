"""The parser's errors as one line, and options that are read before it runs."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_type_hints

import pytest

from command_line import refused
from memspan.errors import MemspanError
from memspan.lab.commands.evaluate import EvaluateArguments
from memspan.lab.commands.parsing import import_modules, parsed, peek_flags, with_architectures

MEANT = "perhaps {} is meant, or name its option"


@pytest.mark.parametrize(
    ("arguments", "line"),
    {
        "evaluate": "run must be given: add what is missing",
        "evaluate run other": f"unexpected argument 'other': {MEANT.format('--corpus other')}",
        "evaluate run --bach-size=2": "there is no option --bach-size; perhaps --batch-size is meant",
        "evaluate run --split x": "invalid choice 'x' for argument '--split'. Expected one of *",
        "evaluate run --tokens": "Missing value for argument *--tokens*",
        "evaluate run --segment-length x": "--segment-length takes an integer, not 'x'*",
        "train --optim.clip-norm x": "--optim.clip-norm takes a number, not 'x'*",
        "train --steps 4": "there is no option --steps; perhaps --train.steps is meant",
        "train --lr 1": "there is no option --lr; perhaps --optim.learning-rate is meant",
        "train --batch_size 1": "there is no option --batch-size; perhaps --train.batch-size is meant",
        "train text.txt": (
            f"unexpected argument 'text.txt': {MEANT.format('--data.corpus text.txt')}"
        ),
        "generate run Once": (f"unexpected argument 'Once': {MEANT.format('--prompt Once')}"),
        "generate run --max-tokens 9": "there is no option --max-tokens; perhaps --tokens is meant",
        "train --train.steps 0": "steps must be at least 1, not 0",
    }.items(),
)
def test_mistakes_are_one_line(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *_ = words = arguments.split()
    whole = f"memspan: {line}; memspan {verb} --help explains every option"
    said = refused(capsys, *words)
    assert fnmatchcase(said, whole)
    assert len(said) < 250


def test_peek_flags_finds_four_options_anywhere() -> None:
    look = peek_flags(
        ["--data.corpus=--preset=x", "--model=a", "--steps", "4", "--import", "b", "--model", "c"]
    )
    assert (look.model, look.preset, look.resume, look.modules) == ("c", None, None, ["b"])
    assert peek_flags(["--resume"]).resume is None


def test_modules_are_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "of_this_folder.py").touch()
    import_modules(["train", "--import", "of_this_folder"])
    assert sys.modules.pop("of_this_folder").__file__ == str(tmp_path / "of_this_folder.py")
    # Installed libraries come first.
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
    with pytest.raises(MemspanError, match="there is no module not_there: check the name"):
        import_modules(["--import=not_there"])


def test_options_of_architectures_are_flags_with_help() -> None:
    kind = with_architectures(EvaluateArguments, "memory_options", "reader_options")
    read = parsed(kind, ["r", "--compressed-length", "3"], "memspan evaluate")
    assert read.keywords()["compressed_length"] == 3
    hints = get_type_hints(kind, include_extras=True)
    for name, owners in {
        "compressed_length": "compressive",
        "memory_length": ".*, feedback",
    }.items():
        (shown,) = hints[name].__metadata__
        assert re.fullmatch(rf"[A-Z].+\. For {owners}\.", shown.help)
