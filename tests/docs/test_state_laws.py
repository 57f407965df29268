"""docs/state-laws.md: its table is that of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

from stateful_laws import OUT, TORCH, TYPE, table

PAGE = Path(__file__).parents[2] / "docs" / "state-laws.md"


def test_the_table_is_that_of_the_results() -> None:
    models = json.loads(OUT.read_text())["models"]
    assert table(models) in PAGE.read_text(encoding="utf-8")


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
    assert named == broken
