"""``memspan check`` and ``memspan.check``: targets of every kind, and what is no target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memspan
from command_line import refused
from memspan import cli
from memspan.stateful import Function, Inputs

PROGRAM = """
import torch
from torch import nn
from memspan.stateful import Function, Inputs

gru = nn.GRU(4, 8)
both_ways = nn.GRU(4, 8, bidirectional=True)
linear = nn.Linear(4, 4)


def lstm():
    return nn.LSTM(4, 8, batch_first=True)


def forgetful():
    cell = nn.GRU(4, 8, batch_first=True)
    return Function(lambda x, s: cell(x[:, :1] * 0 + x), lambda n: 0, Inputs(width=4), cell)


class Forgets(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, None)


def forgets():
    return Forgets(4, 8)


class Hidden(nn.Module):
    config = type("", (), {"vocab_size": 3})

    def forward(self, input_ids):
        return {"last_hidden_state": torch.zeros(*input_ids.shape, 2)}


def stops():
    raise OSError("no weights")
"""


@pytest.fixture(autouse=True)
def program(own_folders: Path) -> None:
    Path("mine.py").write_text(PROGRAM)


def status(*arguments: str) -> int:
    try:
        cli.main(["check", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_model_from_a_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gru", "lstm"):
        assert status(f"mine.py:{name}", "--laws", "cuts,rows") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines[1:3]] == [["cuts", "holds"], ["rows", "holds"]]


def test_a_broken_law_is_status_1_with_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("mine.py:forgetful", "--json", "-", "--scripts", "out", "--laws", "cuts") == 1
    found = json.loads(capsys.readouterr().out)
    assert [f["outcome"] for f in found["findings"]] == ["broken"]
    assert Path("out/cuts.py").read_text() == found["findings"][0]["script"]
    assert status("mine.py:forgetful", "--json", "report.json", "--laws", "cuts") == 1
    assert "broken" in capsys.readouterr().out
    assert json.loads(Path("report.json").read_text())["findings"] == found["findings"]


@pytest.mark.processes
def test_a_script_about_a_file_needs_the_file_alone() -> None:
    assert status("mine.py:forgets", "--laws", "cuts", "--scripts", "out", "--seed", "3") == 1
    script = Path("out/cuts.py").read_text()
    assert "memspan" not in script
    assert len(script.splitlines()) < 30
    # Whatever the difference was, it is the same model again.
    said = script.rpartition("# rounding explains ")[2]
    shown = subprocess.run(
        [sys.executable, "out/cuts.py"], check=True, capture_output=True, text=True
    )
    assert float(shown.stdout) > 1000 * float(said)


def test_a_run_and_a_preset(
    run: Path, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("small.toml").write_text(
        'architecture = "compressive"\n[model]\nn_layers = 1\nd_model = 8\nd_ff = 8\nn_heads = 2\n'
        'memory_length = 5\ncompressed_length = 3\npositions = "learned"\n'
        "[embedding]\ncutoffs = [200, 400]\n[train]\nsegment_length = 40\n"
    )
    for target in ("run", "small.toml"):
        assert status(target, "--laws", "rows,files,cuts", "--budget", "30") == 0
        lines = capsys.readouterr().out.splitlines()
        outcomes = dict(line.split()[:2] for line in lines[1:] if line.split()[0] in "rows files")
        assert outcomes == {"rows": "holds", "files": "holds"}
        assert "by design" in " ".join(lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere", "there is no nowhere: give a run (shakespeare,"),
        ("nowhere.py:x", "no file nowhere.py"),
        ("mine.py:nobody", "mine.py has no nobody"),
        ("mine.py:stops", "mine.py:stops stopped with OSError: no weights"),
        ("mine.py:both_ways", "make it with bidirectional=False"),
        ("mine.py:linear", "Linear has no state that is known here"),
        ("mine.py:Hidden", "Hidden cannot be read: it does not return logits"),
        ("mine.py:gru --laws cuts,cut", "there is no law 'cut'"),
        ("mine.py:gru --budget 0", "budget must be a positive number"),
        ("mine.py:gru --device nowhere", "there is no device 'nowhere' here: use cpu"),
        ("", "target is missing: add it"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "check", *arguments.split())


def test_models_are_given_as_they_are() -> None:
    cell = nn.GRU(4, 8, batch_first=True)

    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = cell(x, state[None])
        return y, state[0]

    function = Function(read, lambda rows: torch.zeros(rows, 8), Inputs(width=4), cell)
    run = memspan.load("shakespeare-feedback")
    for model in (cell, function, run, run.model, run.model.backbone):
        report = memspan.check(model, ["repeatable", "bounded"], budget=60)
        assert [f.outcome for f in report.findings] == ["holds", "holds"]
