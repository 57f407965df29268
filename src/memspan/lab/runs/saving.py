"""Saves models that memspan did not train as runs: from your own training loop, or converted."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from memspan.calls import checked
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.data.tokenizers.registry import read_tokenizer
from memspan.lab.runs import checkpoints
from memspan.lab.runs.checkpoint_files import Checkpoint, State, check_fit, weights_of
from memspan.lab.runs.folder import lock_run
from memspan.lab.runs.options import RunConfig
from memspan.lab.runs.run import create
from memspan.models import LanguageModel
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS

NOT_BEGUN = State(step=0, best=None, best_step=None, unimproved=0, streams={}, corpus={}, health={})
"""The state of a run before its first step, with an unknown corpus."""


@checked
def save_run(
    model: LanguageModel,
    folder: str | Path,
    *,
    tokenizer: str | Path | Tokenizer = "bytes",
    segment_length: int = 64,
) -> Path:
    """Save a model from your own training loop as a run, for all verbs.

    Weights are saved in float32. ``memspan train --resume FOLDER --data.corpus TEXT`` trains the run
    further, beginning at step 0.

    Args:
        model: the model.
        folder: a new folder for the run.
        tokenizer: the tokeniser of its training text: ``bytes``, the path of a ``tokenizer.json`` of a
            run or of the library ``tokenizers``, or the tokeniser of a loaded run.
        segment_length: tokens to read at once, T, as in its training.

    Returns:
        The folder, for :func:`memspan.load`, :func:`memspan.evaluate` and :func:`memspan.generate`.

    Raises:
        MemspanError: the vocabularies differ in size; modules of the model were replaced; its
            architecture is not registered; the folder is not empty.

    Example::

        folder = memspan.save_run(model, "runs/mine")
        print(memspan.generate(folder, "The river", tokens=50).text)
    """
    folder = path_of(folder)
    if not isinstance(tokenizer, Tokenizer):
        named = str(tokenizer)
        tokenizer = ByteTokenizer() if named == "bytes" else read_tokenizer(path_of(named))
    if tokenizer.vocab_size != model.vocab_size:
        raise MemspanError(
            f"the tokeniser has {tokenizer.vocab_size:,} tokens ({tokenizer.kind}) and the model "
            f"{model.vocab_size:,}: give the one that made its tokens, as tokenizer="
        )
    options = model.backbone.config
    name = next((name for name, kind in MODELS.items() if type(options) is kind), None)
    if name is None:
        raise MemspanError(
            f"{type(options).__name__} is not registered: call memspan.models.register first"
        )
    kept = "bytes" if tokenizer.kind == "bytes" else str(folder.absolute() / "tokenizer.json")
    config = RunConfig(model=options, architecture=name, embedding=model._embedding_options)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tokenizer=kept),
        train=dataclasses.replace(config.train, segment_length=segment_length),
    )
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in weights_of(model).items()
    }
    try:
        check_fit(folder, config, model.vocab_size, weights)
    except MemspanError as error:
        raise MemspanError(
            f"the model differs from one made by its options, so it could not be loaded ({error}): "
            "save its state_dict with torch or safetensors instead"
        ) from None
    return write(folder, config, tokenizer, weights)


def write(
    folder: Path,
    config: RunConfig[BackboneConfig],
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
) -> Path:
    """Write a run that begins with these weights; after a failure nothing is left of it.

    Raises:
        MemspanError: the folder is not empty; the disk is full.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MemspanError(f"{folder} exists already: choose another folder for the run")
    with lock_run(folder) as lock, torch.no_grad():
        try:
            create(lock, config, tokenizer)
            checkpoints.save(lock, Checkpoint(weights, {}, NOT_BEGUN), True, keep=1)
        except BaseException:
            # Half a run would be in the way of the next attempt.
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder
