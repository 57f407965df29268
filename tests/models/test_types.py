"""Annotations hold at run time, where mypy sees only torch's ``Any``.

In a process of its own: the hook changes the package as it is imported, and the other tests run what
users run.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import memspan

USES = (
    "reference.py::test_every_implementation_is_the_reference",
    "documents.py::test_nothing_to_read",
    "copies_and_files.py::test_memory_files_belong_to_a_model",
    "copies_and_files.py::test_memory_of_another_precision_is_taken",
)


@pytest.mark.processes
def test_annotations_are_true() -> None:
    folders = [str(Path(memspan.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """Other tests under the hook: every case of every architecture, by every implementation."""
    from beartype import BeartypeConf
    from beartype.claw import beartype_packages

    # Not options: they check themselves, and their messages are what users see.
    rooms = ("options", "registry", "initialisation")
    configs = (f"{path.parent.name}.config" for path in MODELS.glob("*/config.py"))
    options = (f"memspan.models.{name}" for name in (*rooms, *configs))
    # Triton's programs are not Python's functions.
    programs = ("memspan.ops.feedback.triton_kernel", "memspan.ops.relative_kernel.kernel")
    checked = BeartypeConf(claw_skip_package_names=(*options, *programs))
    packages = ("memspan.memory", "memspan.nn", "memspan.ops", "memspan.models")
    beartype_packages(packages, conf=checked)
    # beartype looks for what a NamedTuple's annotations name in a module that does not exist.
    for path in MODELS.parent.rglob("*.py"):
        for name in re.findall(r"^class (\w+)\(NamedTuple\)", path.read_text(), re.M):
            sys.modules[f"namedtuple_{name}"] = Anything(name)

    from memspan.ops.fast_weights.rules import delta_rule
    from memspan.ops.limits import Limits

    # Layers import their options for types only, so that one that is taken home brings less along.
    others = [MODELS / "matrix" / "mixer.py", MODELS / "relative" / "attention.py"]
    layers = [*MODELS.glob("*/layer.py"), *MODELS.glob("*/*_mixing.py"), *others]
    for path in layers:
        module = importlib.import_module(f"memspan.models.{path.parent.name}.{path.stem}")
        for block in re.findall(r"^if TYPE_CHECKING:\n((?:    .+\n)+)", path.read_text(), re.M):
            exec(textwrap.dedent(block), vars(module))

    # Fields of a memory or a pass may be the base class's, whose names its own module does not have.
    for path in [*MODELS.glob("*/model.py"), *layers]:
        module = importlib.import_module(f"memspan.models.{path.parent.name}.{path.stem}")
        vars(module).setdefault("Tensor", torch.Tensor)
        vars(module).setdefault("Limits", Limits)

    from beartype.roar import BeartypeCallHintViolation

    with pytest.raises(BeartypeCallHintViolation):
        delta_rule(*[[1.0]] * 5)  # type: ignore[arg-type]
    tests = [str(Path(__file__).with_name(f"test_{name}")) for name in USES]
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


class Anything(types.ModuleType):
    """A module in which every name is a type that everything has."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


MODELS = Path(memspan.__file__).parent / "models"

if __name__ == "__main__":
    main()
