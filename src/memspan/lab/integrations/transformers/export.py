"""A run as a folder that transformers reads."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from memspan.calls import checked
from memspan.errors import MemspanError, counted
from memspan.files.disk import path_of, unwritable, write_atomically
from memspan.lab.integrations.transformers.config import MemspanConfig
from memspan.lab.integrations.transformers.model import MemspanForCausalLM
from memspan.lab.integrations.transformers.tokenizer import fast_tokenizer
from memspan.lab.runs.run import Run, load

CARD = """\
---
library_name: memspan
pipeline_tag: text-generation
tags: [memspan, {architecture}]
---
# {name}

A language model with a memory ({architecture}, {parameters:,} parameters, {tokenizer} as tokens),
{origin} and exported by memspan. It needs memspan, and `pip install 'transformers>=5.4,<6'`.

```python
import memspan.lab.integrations.transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))
```
"""


@checked
def from_run(run: Run | str | Path) -> tuple[MemspanForCausalLM, PreTrainedTokenizerFast]:
    """A run's model, in evaluation mode, and its tokeniser. The model is a copy.

    Args:
        run: the run, or its folder.

    Raises:
        MemspanError: there is no such run, or a file in it is missing or damaged.

    Example::

        model, tokenizer = from_run("runs/book")
        model.push_to_hub("me/book")
        tokenizer.push_to_hub("me/book")
    """
    run = run if isinstance(run, Run) else load(run)
    options = dataclasses.asdict(run.config)
    config = MemspanConfig(
        **{name: options[name] for name in ("architecture", "model", "embedding")},
        vocab_size=run.tokenizer.vocab_size,
        segment_length=run.config.train.segment_length,
        padding_id=run.tokenizer.vocab_size,
    )
    tokenizer = fast_tokenizer(run.tokenizer)
    model = MemspanForCausalLM(config)
    model.model.load_state_dict(run.model.state_dict())
    return model.eval(), tokenizer


@checked
def export(run: Run | str | Path, folder: str | Path) -> None:
    """Write a run's best weights, options and tokeniser as a folder that ``from_pretrained`` reads.

    ``memspan export RUN --to transformers FOLDER`` on the command line.

    Args:
        run: the run, or its folder.
        folder: a new one.

    Raises:
        MemspanError: there is no such run, or the folder exists already or cannot be written.
    """
    folder = path_of(folder)
    if os.path.lexists(folder):
        raise MemspanError(f"{folder} exists already: choose another folder")
    run = run if isinstance(run, Run) else load(run)
    model, tokenizer = from_run(run)
    card = CARD.format(
        architecture=run.config.architecture,
        name=folder.name,
        parameters=model.num_parameters(),
        tokenizer=run.tokenizer.kind,
        origin=f"trained for {counted(run.step, 'step')}" if run.step else "converted",
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Complete or not at all: a folder never lacks its weights.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as outer:
            unfinished = Path(outer) / folder.name
            unfinished.mkdir()
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            write_atomically(unfinished / "README.md", card.encode())
            # safetensors writes files that only their owner can read.
            for weights in unfinished.glob("*.safetensors"):
                shutil.copymode(unfinished / "config.json", weights)
            unfinished.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
