"""The laws as cases of pytest, and the README's code."""

from __future__ import annotations

from pathlib import Path

import pytest

import memspan.stateful.testing
import pages

README = Path(memspan.stateful.testing.__file__).with_name("README.md")

CASES = """
import torch
from memspan.stateful.testing import laws
from small_models import Gated
import bugs

test_right = laws(Gated, only=["cuts", "files", "roll-back"], seeds=(0, 1))
test_wrong = laws(bugs.SelectIgnoresTheOrder, only=["rows", "cuts"])
"""


def test_a_failure_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_mine.py").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    pytest.main(["-p", "no:cacheprovider", "-q", "-rs", "test_mine.py"])
    said = capsys.readouterr().out
    for words in (
        "1 failed, 5 passed, 2 skipped",
        "test_wrong[rows-0]",
        "not so: a row's outputs do not depend on other rows",
        "select the rows in reverse: 2 rows of 2 x 1 tokens",
        "s4 = select(s3, torch.tensor([1, 0]))",
        "not-offered: it cannot be rolled back",
    ):
        assert words in said
    # The failure alone, not how it came about.
    assert "finding.script" not in said


def test_the_readme_runs_and_is_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 75
    scope: dict[str, object] = {}
    for _, code in pages.blocks(README):
        exec(code, scope)
    assert "cuts           holds" in capsys.readouterr().out
    assert scope["test_laws"]
