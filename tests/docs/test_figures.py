"""The numbers that figures are drawn from: today's models give them, and other forms are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import figures as written
import memspan
from docsite import figures
from docsite.errors import DocsError


def leaves(x: Any) -> Iterator[Any]:
    """Numbers and texts, in order, and lengths."""
    if isinstance(x, dict):
        yield from sorted(x)
        for key in sorted(x):
            yield from leaves(x[key])
    elif isinstance(x, list):
        yield len(x)
        for part in x:
            yield from leaves(part)
    else:
        yield x


@pytest.mark.parametrize("name", written.FIGURES)
def test_they_are_what_the_models_say(name: str) -> None:
    kept = figures.load(name)
    assert kept.pop("form") == written.FORM
    # Percent and thousandths, to rounding.
    most = 1 if kept["kind"] == "attention" else 0.002
    pairs = [*zip(leaves(kept), leaves(written.FIGURES[name]()), strict=True)]
    for old, new in pairs:
        assert old == new or abs(old - new) <= most


@pytest.mark.parametrize("name", ["transformer-xl", "compressive", "feedback"])
def test_attention_sums_to_one(name: str) -> None:
    for step in figures.load(name)["steps"]:
        for weights in step["weights"]:
            assert not weights or sum(weights) == pytest.approx(100, abs=len(weights) / 2)


def test_the_writes_sum_up_to_the_models_matrix() -> None:
    data = figures.load("fast-weights")
    run = memspan.load("shakespeare-fast-weights")
    with torch.no_grad():
        memory = run.model.backbone(run.model.embedding(written.tokens_of(run))).memory
    matrix = torch.tensor(data["keys"]).T @ torch.tensor(data["written"])
    expected = memory.weights[0, written.LAYER, written.HEAD]
    assert expected.abs().max() > 1
    torch.testing.assert_close(matrix, expected, atol=0.05, rtol=0)


def test_a_file_of_another_form(tmp_path: Path) -> None:
    folder = tmp_path / figures.FOLDER
    folder.mkdir(parents=True)
    for content, says in (
        (None, "is missing"),
        ("{", "no JSON"),
        ("[]", "form None"),
        (json.dumps({"form": 0}), "form 0, not 1"),
    ):
        if content is not None:
            (folder / "it.json").write_text(content)
        with pytest.raises(
            DocsError, match=f"docs/figures/it.json.*{says}.*: make figures"
        ) as error:
            figures.load("it", tmp_path)
        assert "\n" not in str(error.value)
