"""The census' results: models of others that are right, as somebody looked, were not accused."""

from __future__ import annotations

import json
from pathlib import Path

from right_models import RIGHT

CENSUS = Path(__file__).parents[1] / "census"


def test_right_models_of_others_were_read_and_no_law_accused_them() -> None:
    lines = (CENSUS / "right.txt").read_text().splitlines()
    right = {line for line in lines if line and not line.startswith("#")}
    results = map(json.loads, (CENSUS / "results.jsonl").read_text().splitlines())
    read = {result["target"]: result.get("findings", []) for result in results}
    accused = {
        f"{name}: {finding['law']}"
        for name in right
        for finding in read.get(name, [])
        if finding["outcome"] == "broken"
    }
    tried = {name for name in right if any(f["outcome"] == "holds" for f in read.get(name, []))}
    assert not accused
    assert len(tried) >= 20
    assert len(tried) + len(RIGHT) >= 60
