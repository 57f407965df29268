"""Pages show what benchmarks stored: in tables, as speeds in the text, as causes of broken laws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import any_span
import findings
import stateful_laws
import which_one
from docsite.code import ROOT
from page_tables import rewritten
from stateful_laws import OUT, PAGE, TORCH, TYPE

MEASURED = sorted((ROOT / "docs" / "measured").glob("*.md"))
RESULTS = """
latest no-compiler one-token one-token-avx512 feedback-dropout feedback-options paper
gated-delta-net delta-rule
"""
OF = {"delta-rule": "gated_delta_net"}
"""Architecture of rows that name none; otherwise the options of Feedback."""


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.stem)
def test_speeds_are_measured_ones(page: Path) -> None:
    """Each ratio with its spread, ``1.5 (1.4-1.7)``, is that of a row of this architecture."""
    known = set()
    for name in RESULTS.split():
        results = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        for row in results["rows"]:
            of = row.get("architecture", OF.get(name, "feedback")).replace("-", "_")
            if of == page.stem and (ratio := row.get("ratio")):
                whole = ratio if isinstance(ratio, dict) else row | {"middle": ratio}
                for digits in (0, 1, 2):
                    numbers = (f"{whole[n]:.{digits}f}" for n in ("middle", "low", "high"))
                    known.add("{} ({}-{})".format(*numbers))
    text = page.read_text(encoding="utf-8").replace("\N{EN DASH}", "-")
    shown = re.findall(r"[\d.]+ \([\d.]+-[\d.]+\)", text)
    assert len(shown) > 5
    assert set(shown) <= known


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
    patches = (ROOT / "benchmarks" / "state_patches").glob("*.patch")
    assert named == broken == {path.stem for path in patches}
