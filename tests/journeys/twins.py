"""Runs to travel with: those that come with memspan, a small twin of every preset, a converted one.

A twin has all options of its preset but sizes. Lengths in tokens shrink together, so that a text which
overruns a preset's table of positions overruns its twin's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from texts import prose

import memspan
import transfo_xl_folder
from memspan.lab.runs.folder import SHIPPED
from memspan.lab.runs.options import PRESETS, RunConfig, load_config, read_config, to_toml

SEGMENT_LENGTH = 16
VOCABULARY = 20
"""Words; sub-words have the bytes, too."""
CONVERTED = "converted"
RUNS = (*SHIPPED, *PRESETS, CONVERTED)
OF_WORDS = {
    CONVERTED,
    *(name for name in PRESETS if read_config(PRESETS[name]).data.tokenizer != "bytes"),
    *(name for name in SHIPPED if load_config(SHIPPED[name]).data.tokenizer != "bytes"),
}
"""Runs that read UTF-8 alone."""


def _smaller(part: Any, factor: float, sizes: dict[str, Any]) -> Any:
    """Options with ``sizes`` where they have a value, and lengths in tokens divided by ``factor``."""
    options = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    lengths = {
        name: round(value / factor)
        for name, value in options.items()
        if name.endswith(("_length", "_distance")) and type(value) is int
    }
    return dataclasses.replace(part, **lengths | {n: s for n, s in sizes.items() if options.get(n)})


def twin(preset: str) -> RunConfig[Any]:
    """The options of a preset's small twin, which is trained on ``prose.txt``."""
    config = read_config(PRESETS[preset])
    factor = config.train.segment_length / SEGMENT_LENGTH
    vocabulary = (config.data.vocab_size or 1) / VOCABULARY
    # The smallest width that an adaptive softmax divides.
    width = max(16, config.embedding.div_val ** len(config.embedding.cutoffs))
    model = {
        "n_layers": 2,
        "d_model": width,
        "n_heads": 2,
        "d_head": 8,
        "d_ff": 16,
        "memory_tokens": 2,
    }
    train = {
        "steps": 2, "batch_size": 2, "curriculum_steps": 1, "accumulate_from": 1, "evaluate_every": 1,
        "evaluate_tokens": 32, "save_every": 1, "sample_tokens": 2, "device": "cpu",
    }  # fmt: skip
    n_bytes = 256 if config.data.tokenizer == "subwords" else 0
    data = {"corpus": "prose.txt", "vocab_size": n_bytes + VOCABULARY}
    cutoffs = tuple(max(1, round(n / vocabulary)) for n in config.embedding.cutoffs)
    return dataclasses.replace(
        config,
        model=_smaller(config.model, factor, model),
        embedding=_smaller(config.embedding, 1, {"cutoffs": cutoffs, "d_embed": width}),
        data=_smaller(config.data, 1, data),
        optim=_smaller(config.optim, 1, {"warmup_steps": 1}),
        train=_smaller(config.train, factor, train),
    )


def make(name: str, folder: Path) -> Path:
    """The run of that name, made in the current folder, which is ``folder``, if it does not exist."""
    if name in SHIPPED:
        return SHIPPED[name]
    run = folder / name
    if run.exists():
        return run
    run.parent.mkdir(parents=True, exist_ok=True)
    if name == CONVERTED:
        options = transfo_xl_folder.OPTIONS
        tensors = transfo_xl_folder.random_tensors(options)
        source = transfo_xl_folder.write(folder / "source", options, tensors)
        return memspan.convert(source, run)
    (folder / "prose.txt").write_text(prose(3000))
    return memspan.train(twin(name), run)


def options_of(name: str, run: Path, folder: Path) -> Path:
    """A TOML file to train another run like ``run`` with."""
    if name in SHIPPED or name == CONVERTED:
        return run / "config.toml"
    path = folder / "twin.toml"
    path.write_text(to_toml(twin(name)))
    return path
