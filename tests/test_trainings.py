"""Trainings of comparisons: every variant is a model, each is made once, and kept."""

from __future__ import annotations

from pathlib import Path

import findings
import trainings
from sides import n_parameters


def test_every_variant_is_a_model() -> None:
    for row, group in findings.ROWS.items():
        for variant in group.variants:
            assert n_parameters(findings.config_of(row, variant, 1, 10)) > 100_000


def test_trainings_are_made_once(tmp_path: Path) -> None:
    path, text = tmp_path / "rows.json", tmp_path / "text.txt"
    text.write_text("to be or not to be, " * 300)
    jobs = findings.jobs_of(["positions"], [2], steps=1)
    (job,) = [job for job in jobs if job["variant"] == "distances"]
    assert trainings.missing([job], path) == [job]
    found = findings.run(job, text)
    trainings.keep(job | found, path)
    assert trainings.missing([job], path) == []
    # Another seed or length is another training.
    others = [job | {"seed": 1}, job | {"steps": 2}]
    assert trainings.missing(others, path) == others
    # Trained without memory; longer ones are read, too.
    assert found["by_memory_length"]["0"] == found["nats"] != found["by_memory_length"]["128"]
