"""The notebooks run, and what is stored with them tells nothing of the machine that made it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from notebooks.execute import HERE, executed

NUMBER = r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))


@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    stored = json.loads(path.read_text())["cells"]
    for before, cell in zip(stored, executed(path, tmp_path).cells, strict=True):
        kinds = [output["output_type"] for output in before.get("outputs", [])]
        assert [output.output_type for output in cell.get("outputs", [])] == kinds
        if path.stem != "tour":  # which trains, and writes what it samples
            assert numbers(cell) == pytest.approx(numbers(before), rel=0.05, abs=0.02)


def numbers(cell: dict[str, Any]) -> list[float]:
    """Numbers that a cell has printed; processors differ in the last digits."""
    printed = ["".join(output.get("text", "")) for output in cell.get("outputs", [])]
    return [float(n.replace(",", "")) for n in re.findall(NUMBER, "\n".join(printed))]


def test_stored_outputs_are_small_and_of_no_machine() -> None:
    assert len(NOTEBOOKS) == 8
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 700_000
    for path in NOTEBOOKS:
        text = path.read_text()
        notebook = json.loads(text)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert all(not cell["metadata"] for cell in code)
        assert notebook["metadata"]["language_info"] == {"name": "python"}
        assert "image/png" in text or path.stem.startswith("exercises")
        assert not [s for s in (os.sep + "tmp", os.sep + "home", "site-packages") if s in text]
        assert "Warning" not in text
