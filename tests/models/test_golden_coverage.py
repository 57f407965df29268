"""Every recorded configuration is some test's, or is skipped here by name: none is dropped silently."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import golden

pytestmark = pytest.mark.golden

TESTS = [p.stem for p in Path(__file__).parent.glob("test_golden_*.py") if p != Path(__file__)]
# Operations that no architecture here has.
TESTS += ["test_generalized_delta_rule"]


@pytest.mark.parametrize(
    "name", sorted(p.name for p in golden.folder().glob("*") if p.is_dir()) or ["absent"]
)
def test_no_configuration_is_left_out(name: str) -> None:
    for module in TESTS:
        importlib.import_module(module)
    recorded = sorted((golden.folder() / name).glob("*.json"))
    left = [p for p in recorded if p not in golden.CLAIMED]
    named = ", ".join(f"{name}/{p.stem} ({golden.class_of(p) or 'no class'})" for p in left)
    if left and name in golden.MIXED:
        pytest.skip(f"none of the four architectures: {named}")
    if not recorded:
        pytest.skip(f"no golden tensors in {golden.folder()}: set MEMSPAN_GOLDEN")
    assert not left, f"no test takes {named}"
