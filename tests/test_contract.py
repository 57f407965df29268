"""Imports: which are allowed, and which are made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import memspan
import statelaws
from memspan.models.registry import MODELS

PLANTED = {
    "ops/relative.py": "memspan.models.output",
    "ops/fast_weights/rules.py": "memspan.lab.training.options",
    "lab/data/streams.py": "memspan.models.output",
    "models/compressive/model.py": "memspan.models.transformer_xl.model",
    "models/lstm/model.py": "memspan.models.transformer.config",
    "models/feedback/config.py": "torch",
    "lab/training/options.py": "torch",
    "lab/evaluation.py": "memspan.lab.measurement.span",
    "lab/converters/convert.py": "memspan.lab.evaluation",
    "lab/converters/options.py": "torch",
    "lab/measurement/span.py": "memspan.lab.training.metrics",
    "lab/runs/history.py": "memspan.lab.training.metrics",
    "files/tensors.py": "memspan.nn",
    "files/disk.py": "rich",
    "models/language_model.py": "memspan.lab.runs.run",
    "models/options.py": "tyro",
    "models/registry.py": "statelaws.protocol",
    "../statelaws/protocol.py": "memspan.errors",
}
"""Files and what they must not import."""


NAMING = (
    "models/",
    "ops/",
    "lab/converters/",
    "lab/integrations/transformers/",
    "layers.py",
)
"""Modules that may name an architecture: its parts, others' models as ours, the list of layers."""
LIBRARIES = ("lab/integrations/torchrl.py",)
"""For models of other libraries, some of which have the same names."""


def test_only_models_name_architectures() -> None:
    """Names of the registry in any spelling, and their modules; but in docstrings' examples.
    ``transformer`` is a word, too."""
    package = Path(memspan.__file__).parent
    names = "|".join(name.replace("-", "[-_ ]?") for name in MODELS if name != "transformer")
    # Infinity and rmtree are none.
    named = rf"\b(?!infinit|rmtree)({names})|models\.transformer\b|TransformerConfig"
    naming = re.compile(named, re.IGNORECASE)
    example = re.compile(r"Example::\n.*?\"\"\"", re.DOTALL)
    places = {file.relative_to(package).as_posix(): file for file in package.rglob("*.py")}
    found = {
        place: said
        for place, file in places.items()
        if not place.startswith((*NAMING, *LIBRARIES))
        and (said := naming.search(example.sub("", file.read_text(encoding="utf-8"))))
    }
    assert not found
    assert all(any(place.startswith(part) for place in places) for part in (*NAMING, *LIBRARIES))


@pytest.mark.processes
def test_every_forbidden_import_is_reported(tmp_path: Path) -> None:
    """In a copy of the package, beside its contract."""
    package = Path(memspan.__file__).parent
    contract = Path(__file__).parents[1] / "pyproject.toml"
    if not contract.is_file():
        pytest.skip("no contract beside the tests")
    for each in (package, Path(statelaws.__file__).parent):
        shutil.copytree(each, tmp_path / each.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(contract, tmp_path)
    # Not by what is installed: the copy stands in the working folder.
    program = "import sys; sys.path.insert(0, '.'); from importlinter import cli; cli."
    program += "lint_imports_command()"
    command = [sys.executable, "-P", "-c", program, "--no-cache"]
    lint = partial(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    before = lint()
    assert before.returncode == 0, before.stdout
    for file, name in PLANTED.items():
        with Path(tmp_path, "memspan", file).open("a") as planted:
            planted.write(f"\nimport {name}\n")
    after = lint()
    assert after.returncode == 1
    said = "".join(after.stdout.split())
    for file, name in PLANTED.items():
        module = os.path.normpath(f"memspan/{file}").removesuffix(".py").replace("/", ".")
        assert f"{module}->{name}" in said, (module, name)


# ----- What comes along when one operation or layer is taken home


MOST = {
    "feedback_recurrence": (17, 2306),
    "memspan.ops": (8, 1103),
    "TransformerXL": (16, 2649),
    "Compressive": (17, 3099),
    "RWKV7": (20, 3113),
    "": (18, 3049),
}
"""Modules and lines, of names with this in them: Feedback's two loops, other operations, and layers:
relative attention, what compresses, RWKV-7's two halves, and all others, about half of the 34 and 4,798
that one layer's attention once imported."""
PROGRAM = """
import sys
from importlib import import_module

import torch
import memspan

def ours():
    return {n for n in sys.modules if n == "memspan" or n.startswith("memspan.")}

for package in sys.argv[1:]:
    for name in dir(import_module(package)):
        # As in a process of its own, without the seconds that torch takes in each.
        for module in ours():
            del sys.modules[module]
        getattr(import_module(package), name)
        files = [open(sys.modules[module].__file__).readlines() for module in ours()]
        # Folders have an __init__.py; an empty one is no module to read.
        print(f"{package}.{name}", sum(map(bool, files)), sum(map(len, files)))
"""


@pytest.mark.processes
def test_a_block_brings_little_along() -> None:
    """Counted in a fresh process."""
    command = [sys.executable, "-c", PROGRAM, "memspan.ops", "memspan.layers"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = {name: (int(m), int(n)) for name, m, n in map(str.split, done.stdout.splitlines())}
    assert counts["memspan.ops.delta_rule"] > (1, 1)
    for name, (modules, lines) in counts.items():
        most_modules, most_lines = next(most for part, most in MOST.items() if part in name)
        assert modules <= most_modules, name
        assert lines <= most_lines, name
