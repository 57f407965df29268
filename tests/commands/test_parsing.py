"""The parser's errors as one line. tyro's events are private to it: these fail if they change."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import pytest
import tyro

from memspan.commands.evaluate import EvaluateArguments
from memspan.commands.parsing import (
    import_modules,
    parsed,
    peek_flags,
    with_architectures,
)
from memspan.errors import MemspanError
from memspan.models.registry import MODELS


@dataclass(frozen=True)
class Section:
    steps: int = 3

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise MemspanError("steps must be at least 1")


DEFAULT_SECTION = Section()


@dataclass(frozen=True)
class Arguments:
    """What it does."""

    run: Annotated[Path, tyro.conf.Positional]
    kind: Literal["a", "b"] = "a"
    train: Section = field(default_factory=Section)
    shown: Annotated[Section, tyro.conf.arg(name="")] = DEFAULT_SECTION


DEFAULT = Arguments(Path("r"), "b", Section(7))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "run is missing: add it"),
        (["x", "--kind", "c"], "--kind must be one of a, b, not 'c'"),
        (["x", "--kind"], "--kind needs a value: give one"),
        (["x", "--train.steps", "y"], "--train.steps takes an integer, not 'y'"),
        (["x", "--train.steps", "0"], "steps must be at least 1"),
        (
            ["x", "--train.stops=4"],
            "there is no option --train.stops; perhaps --train.steps is meant",
        ),
        (["x", "y"], "unexpected argument 'y': drop it, or name its option"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MemspanError) as caught:
        parsed(Arguments, arguments, "memspan verb", DEFAULT if arguments else None)
    assert str(caught.value) == f"{line}; memspan verb --help explains every option"
    assert capsys.readouterr() == ("", "")


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
    """With names of its own, and with no edit here."""

    @dataclass(frozen=True)
    class Options:
        echoes: int | None = None
        """Slots of echo."""

    class Echo(MODELS["feedback"]):  # type: ignore[misc]
        memory_options = Options

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "echo", Echo)
        kind = with_architectures(EvaluateArguments, "memory_options", "reader_options")
    assert parsed(kind, ["r", "--echoes", "3"], "verb").others()["echoes"] == 3
    (shown,) = get_type_hints(kind, include_extras=True)["echoes"].__metadata__
    assert shown.help == "Slots of echo. For echo."
