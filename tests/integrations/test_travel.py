"""Journeys of tests/journeys that need transformers: a run is exported, loaded and reads a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from texts import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer
from twins import RUNS
from verbs import Journey

from journeys.conftest import made, runs  # noqa: F401

READABLE = [name for name in TEXTS if name not in {"0-characters", "no-text"}]
"""A tokeniser of transformers reads text; without any there is nothing to continue."""
# A text in turn for every run always, all of them before a release.
ROWS = [
    pytest.param(
        name,
        text,
        id=f"{name}-{text}",
        marks=[
            pytest.mark.xdist_group(name),
            pytest.mark.smoke if text == READABLE[n % len(READABLE)] else pytest.mark.journeys,
        ],
    )
    for n, name in enumerate(RUNS)
    for text in READABLE
]


@pytest.mark.parametrize(("name", "text"), ROWS)
def test_exported_and_read(
    name: str,
    text: str,
    made: Path,  # noqa: F811
    own_folders: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    journey = Journey(name, made, text, own_folders, capsys)
    journey.calls("export", made, "--to", "transformers", "exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")
    model = AutoModelForCausalLM.from_pretrained("exported")
    prompt = [part.decode() for part in TEXTS[text]]
    inputs = tokenizer(prompt, padding=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert written.shape == (len(prompt), inputs["input_ids"].shape[1] + 3)
