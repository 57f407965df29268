"""What the annotations say is true at run time, where mypy sees torch's ``Any`` only.

In a process of its own: the hook changes the package as it is imported, and the other tests run what
users run.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from dataclasses import replace
from pathlib import Path

import pytest

import memspan


@pytest.mark.processes
def test_annotations_are_true() -> None:
    folders = [str(Path(memspan.__file__).parents[1]), str(Path(__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def main() -> None:
    """Use every case of every architecture, by every implementation, under the hook."""
    from beartype import BeartypeConf
    from beartype.claw import beartype_packages

    # Not options: they check themselves, and their messages are what users see.
    rooms = ("options", "registry", "initialisation")
    configs = (f"{path.parent.name}.config" for path in MODELS.glob("*/config.py"))
    unchecked = tuple(f"memspan.models.{name}" for name in (*rooms, *configs))
    checked = BeartypeConf(claw_skip_package_names=unchecked)
    packages = ("memspan.memory", "memspan.nn", "memspan.ops", "memspan.models")
    beartype_packages(packages, conf=checked)
    # beartype looks for what a NamedTuple's annotations name in a module that does not exist.
    for path in MODELS.parent.rglob("*.py"):
        for name in re.findall(r"^class (\w+)\(NamedTuple\)", path.read_text(), re.M):
            sys.modules[f"namedtuple_{name}"] = Anything(name)

    # Layers import their options for types only, so that one that is taken home brings less along.
    layers = [*MODELS.glob("*/layer.py"), MODELS / "relative" / "self_attention.py"]
    for path in layers:
        module = importlib.import_module(f"memspan.models.{path.parent.name}.{path.stem}")
        (for_types,) = re.findall(r"^if TYPE_CHECKING:\n((?:    .+\n)+)", path.read_text(), re.M)
        exec(textwrap.dedent(for_types), vars(module))

    import torch
    from beartype.roar import BeartypeCallHintViolation

    from architectures import CASES, VOCABULARY, implementations
    from memspan.models import LanguageModel
    from memspan.ops.fast_weights.rules import delta_rule

    def use(model: LanguageModel, implementation: str) -> None:
        memory = None
        for n in range(2):
            tokens = torch.randint(VOCABULARY, (2, 5))
            out = model(
                tokens,
                memory,
                targets=tokens.flip(1),
                lengths=torch.tensor([5, 3]) if n else None,
                implementation=implementation,
            )
            memory = out.memory
        out.loss.backward()
        memory = memory.detach().reset([True, False]).select([1, 0]).to(dtype=torch.float64)
        reader = model.reader(memory)
        reader.read(tokens)
        reader.read(tokens, targets=tokens)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory"
            reader.memory.save(path, model.fingerprint())
            type(memory).load(path, model.fingerprint())

    torch.set_num_threads(1)
    for case in CASES.values():
        # Layers are alike.
        case = replace(case, backbone=replace(case.backbone, n_layers=1))
        model = case.model(torch.float32)
        for implementation in implementations(model.backbone):
            use(model, implementation)
    try:
        delta_rule(*[[1.0]] * 5)  # type: ignore[arg-type]
    except BeartypeCallHintViolation:
        return
    raise AssertionError("the hook lets everything through")


class Anything(types.ModuleType):
    """A module in which every name is a type that everything has."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


MODELS = Path(memspan.__file__).parent / "models"

if __name__ == "__main__":
    main()
