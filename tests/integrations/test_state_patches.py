"""The patches that docs/state-laws.md names: with each, the laws hold that break without it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

import memspan
from memspan.stateful.recipes import build
from state_reproductions import SHOWN, made

PATCHES = Path(__file__).parents[2] / "benchmarks" / "state_patches"
RELEASE = "5.23.0"
"""Of transformers, that they apply to."""
LAWS = {
    "mamba": ["cuts", "padding-right"],
    "falcon_mamba": ["cuts", "padding-right"],
    "jamba": ["cuts", "padding-right"],
    "zamba": ["cuts", "padding-right"],
    "zamba2": ["cuts", "padding-right"],
    "nemotron_h": ["cuts"],
    "rwkv": ["cuts", "rows"],
    "minimax": ["rows"],
    "bloom": ["padding-left"],
    "gemma2": ["padding-right", "padding-left"],
    "recurrent_gemma": ["repeatable"],
}
FLOAT64 = ("bloom", "gemma2")
"""Broken in that precision alone."""

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("transformers") != RELEASE, reason="patches are for another release"
)


def patched(name: str, folder: Path) -> ModuleType:
    """The module of a model with its patch applied, which the library itself does not know."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert module.__file__
    copy = folder / "transformers" / "models" / name / f"modeling_{name}.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(module.__file__, copy)
    patch = PATCHES / f"{name}.patch"
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location(module.__name__, copy)
    assert spec
    assert spec.loader
    made = sys.modules[module.__name__] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    finally:
        sys.modules[module.__name__] = module
    return made


def test_every_patch_is_tried() -> None:
    assert {path.stem for path in PATCHES.glob("*.patch")} == LAWS.keys()


@pytest.mark.parametrize("name", LAWS)
def test_the_laws_hold_with_the_patch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kind = type(build(name).module).__name__
    own = getattr(patched(name, tmp_path), kind)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", own._from_config)
    model = build(name)
    assert type(model.module) is own
    if name in FLOAT64:
        model.module.double()
    report = memspan.check(model, LAWS[name], budget=120)
    torch.set_num_threads(threads)
    assert {finding.outcome for finding in report.findings} == {"holds"}, str(report)


def test_the_reproductions_show_it() -> None:
    """Each prints a difference that rounding does not explain."""
    for name, show in SHOWN.items():
        with torch.no_grad():
            lines = show(made(name))
        apart = [
            number for line in lines for number in re.findall(r": ([\d.e-]+|nan|\[2, 2)", line)
        ]
        assert any(each in ("nan", "[2, 2") or float(each) > 1e-3 for each in apart), lines
