"""``statelaws check``: models by name, reports, and mistakes in one line."""

from __future__ import annotations

import json
import runpy
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import statelaws
from statelaws.cli import main

MODELS = """
import torch
from torch import nn

gru = nn.GRU(4, 8)
linear = nn.Linear(4, 4)


class Forgets(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, state if len(x) == 1 else None)


def forgets():
    return Forgets(4, 8)


class Ignores(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, None)


def ignores():
    return Ignores(4, 8)


def leaves():
    raise SystemExit(0)


def nowhere():
    return nn.GRU(4, 8, device="meta")


both_ways = nn.GRU(4, 8, bidirectional=True)
"""


@pytest.fixture(autouse=True)
def models(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in ``state_models.py``, some of which are not models at all."""
    Path("state_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "state_models", raising=False)


def status_of(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main(["check", *arguments])
    return stop.value.code


@pytest.mark.parametrize("target", ["state_models.py:gru", "state_models:gru"])
def test_models_are_found_in_files_and_modules(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", target, "--laws", "repeatable,cuts"])
    lines = capsys.readouterr().out.splitlines()[1:3]
    assert [line.split()[:2] for line in lines] == [["repeatable", "holds"], ["cuts", "holds"]]


@pytest.mark.parametrize("place", ["state_models.py", "state_models"])
@pytest.mark.parametrize("path", ["-", "report.json"])
def test_a_broken_law_has_a_script_that_runs_anywhere(
    place: str, path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--laws", "cuts", "--scripts", "out", "--seed", "3", "--json", path]
    assert status_of(f"{place}:forgets", *options) == 1
    said = capsys.readouterr().out
    report = json.loads(said if path == "-" else Path(path).read_text())
    (finding,) = report["findings"]
    assert finding["outcome"] == "broken"
    script = Path("out/cuts.py")
    assert finding["script"] == script.read_text()
    assert "statelaws" not in finding["script"]
    assert len(finding["script"].splitlines()) < 32
    # Whatever the difference was, it is the same model again.
    assert "torch.manual_seed(3)" in finding["script"]
    rounding = finding["script"].rpartition("# rounding explains ")[2]
    # It turns gradients off, here for itself alone.
    with torch.enable_grad():
        runpy.run_path(str(script))
    assert float(capsys.readouterr().out) > 1000 * float(rounding)


def test_the_status_is_two_where_no_law_can_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("state_models.py:ignores", "--laws", "cuts,bounded") == 2
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("refused") == 2
    assert "the state that was passed has no effect" in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "there is no nowhere: give FILE.py:NAME, MODULE:NAME, transformers:TYPE or"),
        (["gone.py:model"], "there is no file gone.py: check the path"),
        (["state_models.py:x"], "state_models.py has no x that is a model or makes one"),
        (["state_models:x"], "state_models has no x that is a model or makes one"),
        (["no_such_module:x"], "no_such_module:x stopped with ModuleNotFoundError"),
        (["state_models.py:leaves"], "state_models.py:leaves stopped with SystemExit: 0"),
        (["state_models.py:nowhere"], "the model cannot be moved to cpu: Cannot copy out of meta"),
        (["state_models.py:linear"], "Linear has no state that is known here: wrap it in"),
        (["state_models.py:both_ways"], "GRU cannot be read: a bidirectional GRU reads the end"),
        (["state_models.py:gru", "--laws", "cut"], "there is no law 'cut': use repeatable, cuts,"),
        (["state_models.py:gru", "--budget", "0"], "budget must be a positive number of seconds"),
        (["state_models.py:gru", "--threads", "0"], "--threads must be at least 1, not 0"),
        (["state_models.py:gru", "--device", "gpu"], "there is no device gpu: use cpu or cuda"),
        (["state_models.py:gru", "--json", "."], "--json . is a folder: name a file"),
        (["state_models.py:gru", "--json", "no/x"], "No such file or directory (no/x): check"),
        (
            ["state_models.py:gru", "--scripts", "state_models.py"],
            "--scripts state_models.py is not a folder: name one, new or existing",
        ),
        (["state_models.py:gru", "--law"], "argument --laws: expected one argument; statelaws"),
        ([], "the following arguments are required: TARGET; statelaws check --help explains"),
        (["transformers:bert"], "bert cannot be built: there are recipes for bailing_hybrid, "),
        (["transformers:mamba3"], "mamba3 cannot be built: perhaps mamba is meant"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--laws", "repeatable"] if "--json" in arguments else []
    assert status_of(*arguments, *options) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("statelaws: ")
    assert line in said


def test_a_file_that_is_replaced_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for done in ("written", "replaced"):
        main(["check", "state_models.py:gru", "--laws", "repeatable", "--json", "report.json"])
        assert f"{done}: report.json" in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"statelaws {metadata.version('statelaws')}\n"
    assert statelaws.__version__ == metadata.version("statelaws")
