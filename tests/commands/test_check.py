"""``memspan check`` and ``memspan.check``: what holds, what is broken, and targets of every kind."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memspan
from command_line import printed
from memspan.lab import cli
from statelaws import Function, Inputs

pytestmark = pytest.mark.usefixtures("models")

PRESET = """
architecture = "compressive"
embedding = {cutoffs = [200, 400]}
train = {segment_length = 40}
[model]
n_layers = 1
d_model = 8
n_heads = 2
memory_length = 5
compressed_length = 3
positions = "learned"
"""
CUT_BY_DESIGN = {"cuts": "not-offered", "rows": "holds", "files": "holds"}
OUTCOMES = {
    "models.py:gru": {"cuts": "holds", "rows": "holds"},
    "run": CUT_BY_DESIGN,
    "small.toml": CUT_BY_DESIGN,
}


@pytest.mark.parametrize("target", OUTCOMES)
def test_prints_laws_that_hold(run: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.toml").write_text(PRESET)
    laws = ",".join(OUTCOMES[target])
    said = printed(capsys, "check", target, "--laws", laws, "--budget", "30")
    lines = said.splitlines()[1 : 1 + len(OUTCOMES[target])]
    assert dict(line.split()[:2] for line in lines) == OUTCOMES[target]
    assert ("by design" in said) == ("not-offered" in said)


def test_prints_broken_laws_with_their_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, a report, and a script that needs the file of the model alone."""
    for path in ("-", "report.json"):
        options = ["--laws", "cuts", "--scripts", "out", "--seed", "3", "--json", path]
        with pytest.raises(SystemExit) as stop:
            cli.main(["check", "models.py:forgets", *options])
        assert stop.value.code == 1
        said = capsys.readouterr().out
        assert "broken" in said
        report = json.loads(said if path == "-" else Path(path).read_text())
        (finding,) = report["findings"]
        assert finding["outcome"] == "broken"
        assert finding["script"] == Path("out/cuts.py").read_text()
    script = finding["script"]
    # Wherever it is run.
    assert f"run_path({str(Path('models.py').absolute())!r})" in script
    assert "import memspan" not in script
    assert "from memspan" not in script
    assert len(script.splitlines()) < 30
    # Whatever the difference was, it is the same model again.
    assert "torch.manual_seed(3)" in script
    rounding = script.rpartition("# rounding explains ")[2]
    # It turns gradients off, here for itself alone.
    with torch.enable_grad():
        runpy.run_path("out/cuts.py")
    assert float(capsys.readouterr().out) > 1000 * float(rounding)


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


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("leaves", "models.py:leaves stopped with SystemExit: 0"),
        ("nowhere", "the model cannot be moved to cpu: Cannot copy out of meta tensor"),
        ("claiming", "Claims.lengths: 'window' must be at least 1 token, not 0: leave it out"),
    ],
)
def test_refuses_objects_that_are_no_models(
    target: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", f"models.py:{target}"])
    assert stop.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize(
    ("target", "detail"),
    [("ignores", "the state that was passed has no effect"), ("stopping", "it raised SystemExit")],
)
def test_status_is_two_if_no_law_can_be_tried(
    target: str, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["check", f"models.py:{target}", "--laws", "cuts,bounded"])
    assert stop.value.code == 2
    said = capsys.readouterr().out
    assert said.count("refused") == 2
    assert detail in " ".join(said.split())


def test_files_that_are_replaced_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--laws", "repeatable", "--json", "report.json"]
    for done in ("written", "replaced"):
        cli.main(["check", "models.py:gru", *options])
        assert f"{done}: report.json" in capsys.readouterr().err
    Path("folder").mkdir()
    with pytest.raises(SystemExit):
        cli.main(["check", "models.py:gru", "--json", "folder"])
    assert "--json folder is a folder: name a file" in capsys.readouterr().err


# ----- Without statelaws


@pytest.mark.parametrize("verb", ["check", "measure"])
def test_without_statelaws_a_line_says_what_to_install(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "statelaws":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    remedy = "pip install ./packages/statelaws, in a checkout of memspan"
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "models.py:gru"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"memspan: statelaws is not installed: {remedy}"
    with pytest.raises(memspan.MemspanError, match="statelaws is not installed"):
        getattr(memspan, verb)(nn.GRU(4, 8))


@pytest.mark.processes
def test_only_checking_imports_statelaws() -> None:
    program = (
        "import sys; sys.modules['statelaws'] = None; import memspan;"
        "[getattr(memspan, name) for name in memspan.__all__];"
        "import memspan.lab.commands.check, memspan.lab.commands.measure;"
        "from memspan.lab.measurement.measure import is_run; assert is_run('shakespeare')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
