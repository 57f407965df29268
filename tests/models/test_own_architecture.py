"""An architecture from outside the package gets its flags, help, plots and errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import refused
from memspan import cli
from memspan.models.registry import MODELS

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_architecture.py"
pytestmark = pytest.mark.usefixtures("own_architectures")
SMALL = """--model gated-recurrence --model.half-life 8 --model.d-model 8 --data.corpus text.txt
--train.steps 4 --train.batch-size 2 --train.segment-length 8 --train.evaluate-every 2
--train.evaluate-tokens 32 --train.sample-tokens 4 --train.device cpu --out mine"""


def test_the_example(own_folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(EXAMPLE, "own_architecture.py")
    Path("text.txt").write_text("what was read is kept. " * 100)
    known = ("--import", "own_architecture")
    cli.main(["train", *known, *SMALL.split()])
    capsys.readouterr()
    scores = []
    for more in ([], ["--carried-share", "0.1"]):
        cli.main(["evaluate", "mine", *known, *more])
        scores.append(capsys.readouterr().out)
    assert scores[0].splitlines()[2] != scores[1].splitlines()[2]
    assert "carried share 0.1" in scores[1]
    cli.main(["generate", "mine", *known, "--tokens", "3"])
    with pytest.raises(SystemExit):
        cli.main(["evaluate", *known, "--help"])
    assert "--carried-share" in capsys.readouterr().out
    del MODELS["gated-recurrence"]
    assert "--import MODULE" in refused(capsys, "evaluate", "mine")


def test_an_entry_point_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "installed_package.py")
    distribution = tmp_path / "installed_package-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Name: installed-package\nVersion: 1.0\n")
    entry = "[memspan.architectures]\ngated-recurrence = installed_package\n"
    (distribution / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["train", "--model", "gated-recurrence", "--help"])
    assert MODELS["gated-recurrence"].__module__ == "installed_package"
    assert "--model.half-life" in capsys.readouterr().out
