"""What may import what: the linter fails on each import that the contract forbids."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memspan
from memspan.models.registry import MODELS

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


NAMING = ("models/", "ops/", "converters/", "integrations/transformers/", "layers.py")
"""What may name an architecture: what it is made of, others' models as ours, the list of layers."""
LIBRARIES = ("stateful/recurrent.py", "stateful/recipes.py", "integrations/torchrl.py")
"""Of models of other libraries, some of which have the same names."""


def test_only_models_name_architectures() -> None:
    """Names of the registry in any spelling, and their modules. ``transformer`` is a word, too."""
    package = Path(memspan.__file__).parent
    names = "|".join(name.replace("-", "[-_ ]?") for name in MODELS if name != "transformer")
    naming = re.compile(rf"\b({names})|models\.transformer\b|TransformerConfig", re.IGNORECASE)
    places = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    found = {
        place: said
        for place, file in places.items()
        if not place.startswith((*NAMING, *LIBRARIES))
        and (said := naming.search(file.read_text(encoding="utf-8")))
    }
    assert not found
    assert all(any(place.startswith(part) for place in places) for part in (*NAMING, *LIBRARIES))


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


@pytest.mark.processes
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
