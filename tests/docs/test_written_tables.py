"""Pages with tables that benchmarks write, from stored results; every broken law has its cause."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

import any_span
import findings
import stateful_laws
import which_one
from page_tables import rewritten
from stateful_laws import OUT, PAGE, TORCH, TYPE

PATCHES = Path(__file__).parents[2] / "benchmarks" / "state_patches"


@pytest.mark.parametrize("script", [any_span, findings, stateful_laws, which_one])
def test_the_tables_are_those_of_the_results(script: ModuleType) -> None:
    page: Path = script.PAGE
    now = page.read_text(encoding="utf-8")
    assert rewritten(page, script.tables()) == now, f"run {script.__name__}.py --page"


def test_every_cause_is_of_a_broken_model() -> None:
    """And torch's own modules, which are right, have none."""
    models = json.loads(OUT.read_text())["models"]
    broken = {
        name.removeprefix(TYPE)
        for name, by_dtype in models.items()
        if any(f["outcome"] == "broken" for r in by_dtype.values() for f in r["findings"].values())
    }
    assert not broken & TORCH.keys()
    causes = PAGE.read_text(encoding="utf-8").partition("## Causes")[2]
    heads = [line.partition(":")[0] for line in causes.splitlines() if line.startswith("**")]
    named = {name for head in heads for name in head.strip("*").split(", ")}
    assert named == broken == {path.stem for path in PATCHES.glob("*.patch")}
