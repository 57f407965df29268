"""docs/state-laws.md: its tables are those of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

from stateful_laws import OUT, PAGE, TORCH, TYPE, page

PATCHES = Path(__file__).parents[2] / "benchmarks" / "state_patches"


def test_the_tables_are_those_of_the_results() -> None:
    assert page() == PAGE.read_text(encoding="utf-8")


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
