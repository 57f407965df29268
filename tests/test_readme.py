"""The Python examples of the README run as they are, on a tiny model and a short measurement."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import memspan
from memspan.models import TransformerXLConfig

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Once upon a time there was a fox. " * 40)
    whole_size, whole_measurement = memspan.train, memspan.measure

    def tiny(config: memspan.RunConfig[Any], folder: str) -> Path:
        train = memspan.TrainConfig(
            steps=1, batch_size=2, segment_length=8, evaluate_tokens=16, device="cpu"
        )
        model = TransformerXLConfig(n_layers=1, d_model=16, d_ff=16, n_heads=2)
        return whole_size(dataclasses.replace(config, model=model, train=train), folder)

    def short(folder: str) -> memspan.Measurement:
        return whole_measurement(folder, budget=0.5)

    monkeypatch.setattr(memspan, "train", tiny, raising=False)
    monkeypatch.setattr(memspan, "measure", short, raising=False)
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(examples) == 3
    for example in examples:
        exec(example, {})
    bits, text = capsys.readouterr().out.split("\n", 1)
    assert 0 < float(bits) < 20
    assert text
