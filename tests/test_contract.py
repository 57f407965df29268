"""What may import what: the linter fails on each import that the contract forbids."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memspan

PLANTED = {
    "ops/relative.py": "memspan.models.output",
    "ops/fast_weights/rules.py": "memspan.training.options",
    "data/streams.py": "memspan.models.output",
    "models/compressive/model.py": "memspan.models.transformer_xl.model",
    "models/lstm/model.py": "memspan.models.transformer.config",
    "models/feedback/config.py": "torch",
    "training/options.py": "torch",
    "evaluation.py": "memspan.measurement.span",
    "converters/convert.py": "memspan.evaluation",
    "converters/options.py": "torch",
    "measurement/span.py": "memspan.training.metrics",
    "runs/history.py": "memspan.training.metrics",
    "files/tensors.py": "memspan.nn",
    "stateful/protocol.py": "memspan.errors",
}
"""Files and what they must not import."""


@pytest.fixture
def lint(tmp_path: Path) -> Path:
    """A copy of the package and its contract."""
    package = Path(memspan.__file__).parent
    contract = Path(__file__).parents[1] / "pyproject.toml"
    if not contract.is_file():
        pytest.skip("no contract beside the tests")
    shutil.copytree(package, tmp_path / "memspan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(contract, tmp_path)
    return tmp_path


def linted(folder: Path) -> subprocess.CompletedProcess[str]:
    # Not by what is installed: the copy stands in the working folder.
    program = "import sys; sys.path.insert(0, '.'); from importlinter import cli; cli."
    program += "lint_imports_command()"
    command = [sys.executable, "-P", "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_every_forbidden_import_is_reported(lint: Path) -> None:
    before = linted(lint)
    assert before.returncode == 0, before.stdout
    for file, name in PLANTED.items():
        path = lint / "memspan" / file
        path.write_text(path.read_text() + f"\nimport {name}\n")
    after = linted(lint)
    assert after.returncode == 1
    said = "".join(after.stdout.split())
    for file, name in PLANTED.items():
        module = "memspan." + file.removesuffix(".py").replace("/", ".")
        assert f"{module}->{name}" in said, (module, name)


def test_a_module_without_a_layer_is_reported(lint: Path) -> None:
    (lint / "memspan" / "elsewhere.py").write_text("")
    after = linted(lint)
    assert after.returncode == 1
    assert "elsewhere" in after.stdout
