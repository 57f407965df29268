"""The code of the guide runs as it stands, from export to the last training."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import memspan
import tiny_runs
from memspan import cli
from pages import blocks

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "transformers.md"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_the_guide(own_folders: Path) -> None:
    Path("text.txt").write_text(tiny_runs.TEXT)
    memspan.train(tiny_runs.OPTIONS, "runs/book")
    names: dict[str, Any] = {}
    for language, block in blocks(GUIDE):
        if language == "python":
            exec(compile(block, str(GUIDE), "exec"), names)
        for line in block.splitlines() if language == "sh" else []:
            if line.startswith("memspan"):
                cli.main(shlex.split(line)[1:])
    trainer, n_steps = names["trainer"], names["n_steps"]
    assert trainer.state.global_step == n_steps > 10
    # Every stream was read to its end, in order.
    assert trainer.memory.tokens_seen.tolist() == [n_steps * names["length"]] * names["rows"]
    assert trainer.evaluate(names["segments"])["eval_loss"] > 0
    model, inputs, targets = names["model"].eval(), names["inputs"], names["targets"]
    trained = AutoModelForCausalLM.from_pretrained("exported/finetuned")
    before = AutoModelForCausalLM.from_pretrained("exported/book")
    with torch.no_grad():
        losses = [
            float(m(inputs.flatten(1), shift_labels=targets.flatten(1)).loss)
            for m in (model, trained, before)
        ]
    assert losses[0] == losses[1] < losses[2]
    assert json.loads(Path("exported/finetuned/config.json").read_text())["model_type"] == "memspan"
