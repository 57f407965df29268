"""Pages are what the results files say; trainings are made once, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import any_span
import findings
import findings_page
import which_one


@pytest.mark.parametrize("module", [findings_page, any_span, which_one], ids=lambda m: m.__name__)
def test_a_page_is_what_the_results_say(module: Any) -> None:
    page = module.text() if module is findings_page else module.page()
    assert module.PAGE.read_text(encoding="utf-8") == page, "run its program with --page"


def test_verdicts() -> None:
    lower = findings_page.lower
    assert lower([1.0, 1.1], [2.0, 2.1]) == "yes"
    assert lower([2.0, 2.1], [1.0, 1.1]) == "**no**"
    assert lower([1.0, 2.0], [1.1, 2.1]) == "undecided"
    assert lower([1.0, 2.0], [1.1, 2.1], paired=True) == "yes"
    assert lower([1.0], [1.1]) == "yes, one seed"
    assert lower([1.0], [1.01]) == "undecided, one seed"


def test_trainings_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RESULTS", tmp_path / "findings.json")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 300)
    monkeypatch.setattr(findings, "MEMORY_LENGTHS", (0, 8))
    (job,) = [
        j for j in findings.jobs_of(["positions"], [2], 0.00125) if j["variant"] == "distances"
    ]
    assert job["steps"] == 1
    assert findings.missing([job]) == [job]
    found = findings.run(job | {"text": str(text)})
    findings.keep(found)
    assert findings.missing([job]) == []
    # Another seed or length is another training.
    assert findings.missing([job | {"seed": 1}, job | {"steps": 2}]) != []
    # Trained without memory; longer ones are read, too.
    assert found["by_memory_length"][0] == found["nats"] != found["by_memory_length"][8]
    assert "text" not in found
