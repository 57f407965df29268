"""A run's last lines, and what its folder keeps of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import memspan
from memspan.lab.training import start
from memspan.lab.training.options import OptimConfig
from tiny_runs import cut_at, options

pytestmark = pytest.mark.usefixtures("tiny_text")
SAMPLES = {"sample_tokens": 8, "evaluate_every": 2, "evaluate_tokens": 0}


def said(work: Any) -> str:
    console = Console(file=io.StringIO(), record=True, width=1000)
    work(console)
    return console.export_text()


def test_the_summary_agrees_with_evaluate() -> None:
    """Emptied, the first input of a segment stays what it is, as without a memory."""
    text = said(lambda console: start.train(options(**SAMPLES), Path("r"), console=console))
    carried, emptied = (memspan.evaluate("r", memory_length=n) for n in (None, 0))
    scores = json.loads(Path("r/scores.json").read_text())
    assert (scores["step"], scores["tokens"], scores["streams"]) == (6, carried.tokens, 1)
    for part, found in (("memory_carried", carried), ("memory_emptied", emptied)):
        assert scores[part]["nats_per_token"] == pytest.approx(found.nats_per_token, rel=1e-6)
    saved = 1 - carried.nats / emptied.nats
    shown = f"memory saves {saved:.1%} compared with emptying it while reading"
    assert (shown if saved >= 0.002 else "memory is not used yet") in text
    assert "Validations during training read it in 2 streams" in text


def test_samples_are_kept_once_however_the_run_is_cut() -> None:
    start.train(options(**SAMPLES), Path("whole"))
    with cut_at(5):
        start.train(options(**SAMPLES), Path("r"))
    start.resume(Path("r"))
    for name in ("samples.jsonl", "scores.json"):
        assert Path("r", name).read_bytes() == Path("whole", name).read_bytes()
    lines = [json.loads(line) for line in Path("r/samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["text"] for line in lines)


@pytest.mark.parametrize(("warmup", "ends_within"), [(6, True), (5, False)])
def test_a_run_that_ends_within_its_warm_up_says_so(warmup: int, ends_within: bool) -> None:
    optim = OptimConfig(learning_rate=0.5, warmup_steps=warmup)
    text = said(lambda console: start.train(options(optim=optim), Path("r"), console=console))
    assert ("ends within its warm-up of 6 steps, at a learning rate of 0.5" in text) == ends_within
