"""docs/findings.md is what the results files say; trainings are made once, and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import findings
import findings_page
from sides import n_parameters


def test_the_page_is_what_the_results_say() -> None:
    assert findings_page.PAGE.read_text(encoding="utf-8") == findings_page.text(), (
        "run python benchmarks/findings.py --page"
    )


def test_what_is_not_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings_page, "runs_in", lambda path: [])
    n_ours = findings_page.PROSE.read_text().count("results/findings.json")
    assert findings_page.text().count(findings_page.MISSING) == n_ours > 5


def made_up(job: dict[str, Any]) -> dict[str, Any]:
    """A training's measurements, as the real ones look; those of first variants are the best."""
    first = job["variant"] in ("recurrence, distances", "feedback", "compressive")
    nats = (1.0 if first else 2.0) + job["seed"] / 100
    attention = [i / 300 for i in range(3 * findings.BUCKETS)]
    return {key: value for key, value in job.items() if key != "text"} | {
        "nats": nats,
        "accuracy": 0.9 if first else 0.3,
        "last_value_known": 0.4,
        "by_memory_length": {str(n): nats - n / 1e4 for n in findings.MEMORY_LENGTHS},
        "without_compressed": nats,
        "attention": attention,
        "mixture": [0.5, 0.25, 0.25],
        "tokens": 10,
        "parameters": 1000,
        "cpu_seconds": 60.0,
        "processor": "a processor",
        "python": "3.x",
    }


def test_a_measured_page(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = findings.jobs_of([*findings.ROWS, "programs"], [1, 2, 3], 1.0)
    trials = findings.jobs_of(["positions"], [1], 0.5)
    runs = [made_up(job) for job in (*jobs, *trials)]
    monkeypatch.setattr(findings_page, "runs_in", lambda path: runs)
    page = findings_page.text()
    assert findings_page.MISSING not in page
    # No difference between the others, which all have the same scores.
    assert "| 1.020 with, 2.020 without | yes (without distances: undecided) | 12 |" in page
    assert "shared 2.020, per layer 2.020 | yes: no difference seen |" in page
    assert "1.020 with 64 slots, 0.994 with 256 | yes |" in page
    assert "Feedback 90.0 %, Transformer-XL 30.0 % | yes, one seed | 2 |" in page
    # More attention on the oldest of the memory than on the newest compressed slots.
    assert "| **no** |  |" in page


def test_verdicts() -> None:
    lower = findings_page.lower
    assert lower([1.0, 1.1], [2.0, 2.1]) == "yes"
    assert lower([2.0, 2.1], [1.0, 1.1]) == "**no**"
    assert lower([1.0, 2.0], [1.1, 2.1]) == "undecided"
    assert lower([1.0, 2.0], [1.1, 2.1], paired=True) == "yes"
    assert lower([1.0], [1.1]) == "yes, one seed"
    assert lower([1.0], [1.01]) == "undecided, one seed"


def test_every_variant_is_a_model() -> None:
    for row, trainings in findings.ROWS.items():
        for variant in trainings.variants:
            assert n_parameters(findings.config_of(row, variant, 1, 10)) > 100_000


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
