"""Pages of ``docs/measured`` show what the results files say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "measured").glob("*.md"))
RESULTS = (
    "latest",
    "no-compiler",
    "one-token",
    "one-token-avx512",
    "feedback-dropout",
    "feedback-options",
    "paper",
    "gated-delta-net",
    "gated-delta-rule",
)
OF = {"gated-delta-rule": "gated_delta_net"}
"""What rows without an architecture are of; otherwise the options of Feedback."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_speeds_are_measured_ones(page: Path) -> None:
    """Each ratio with its spread, ``1.5 (1.4-1.7)``, is that of a row of this architecture."""
    known = set()
    for name in RESULTS:
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            of = row.get("architecture", OF.get(name, "feedback")).replace("-", "_")
            if of == page.stem and row.get("ratio"):
                whole = (
                    row["ratio"]
                    if isinstance(row["ratio"], dict)
                    else row | {"middle": row["ratio"]}
                )
                numbers = whole["middle"], whole["low"], whole["high"]
                for digits in (0, 1, 2):
                    known.add("{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*numbers, d=digits))
    text = page.read_text(encoding="utf-8").replace("\N{EN DASH}", "-")
    shown = re.findall(r"[\d.]+ \([\d.]+-[\d.]+\)", text)
    assert len(shown) > 5
    assert set(shown) <= known
