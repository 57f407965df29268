"""A trained model in its folder: what evaluating, generating and starting from it read.

    config.toml  tokenizer.json             how it was made; their checksums stand in the header of
    model.safetensors                       the best weights so far

``checkpoint.py`` is about the rest of the folder: what training goes on from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.data.identity import Identity, recorded
from memspan.data.tokenizers import Tokenizer, load_tokenizer
from memspan.errors import MemspanError
from memspan.files.tensors import load_tensors
from memspan.models import LanguageModel
from memspan.runs import history
from memspan.runs.claim import BOUND
from memspan.runs.config_files import load_config
from memspan.runs.options import RunConfig

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Run:
    """A trained model with all that is needed to use it."""

    folder: Path
    config: RunConfig[Any]
    tokenizer: Tokenizer
    model: LanguageModel
    step: int
    corpus: Identity
    """Of what it was trained and validated on; empty where an older version saved it."""


def load(folder: str | Path, device: str = "cpu") -> Run:
    """The model and tokeniser of a run, ready to evaluate: the best weights so far.

    Raises:
        MemspanError: not a run, or a file in it is missing or damaged.
    """
    folder = Path(folder)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder)
    weights, header = load_tensors(folder / WEIGHTS)
    refuse_changes(folder, header)
    check_fit(folder, config, tokenizer.vocab_size, weights)
    model = LanguageModel(tokenizer.vocab_size, config.model, config.embedding)
    load_weights(model, weights, folder)
    try:
        corpus = recorded(json.loads(header.get("corpus", "{}")))
    except (ValueError, RecursionError) as error:
        raise MemspanError(f"{folder / WEIGHTS} is damaged ({error}): restore it") from None
    return Run(folder, config, tokenizer, model.to(device).eval(), _step(folder, header), corpus)


def _step(folder: Path, header: dict[str, str]) -> int:
    """The step of published weights, from their header."""
    try:
        return int(header["step"])
    except (KeyError, ValueError):
        raise MemspanError(f"{folder / WEIGHTS} does not say its step: restore it") from None


def check_fit(
    folder: Path, config: RunConfig[Any], vocab_size: int, weights: dict[str, Tensor]
) -> None:
    """Refuse weights that are not those of such a model, before it takes any memory or time.

    Raises:
        MemspanError: names, shapes or types differ.
    """
    reason = ""
    if config.model.n_layers > len(weights):
        reason = f"{len(weights)} tensors are no {config.model.n_layers:,} layers"
    else:
        try:
            with torch.device("meta"):
                model = LanguageModel(vocab_size, config.model, config.embedding)
        except (RuntimeError, TypeError, MemspanError) as error:
            # A size beyond all arithmetic.
            reason = " ".join(str(error).split())[:200]
        else:
            wanted, given = _forms(weights_of(model)), _forms(weights)
            if differ := sorted(dict(wanted.items() ^ given.items())):
                name = differ[0]
                reason = f"{name} is {given.get(name, 'missing')}, not {wanted.get(name, 'there')}"
    if reason:
        raise MemspanError(
            f"the weights in {folder} do not fit its config.toml ({reason}): restore both"
        )


def _forms(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in weights.items()}


def load_weights(model: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        model.load_state_dict(expand_ties(model, weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise MemspanError(
            f"the weights in {folder} do not fit its config.toml ({reason}): restore both"
        ) from None


def weights_of(model: LanguageModel) -> dict[str, Tensor]:
    """The state by name, every tied tensor once."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            weights[name] = tensor.detach()
            seen.add(id(tensor))
    return weights


def expand_ties(model: LanguageModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`weights_of`: tied tensors under all their names."""
    first: dict[int, str] = {}
    expanded = dict(weights)
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = first.setdefault(id(tensor), name)
        if name not in expanded and source in weights:
            expanded[name] = weights[source]
    return expanded


def config_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that say how the run was made."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if (folder / name).is_file()
        else "missing"
        for name in BOUND
    }


def refuse_changes(folder: Path, files: dict[str, str]) -> None:
    """``files``: checksums of ``config.toml`` and ``tokenizer.json``, among others, as saved."""
    for name, check in config_checksums(folder).items():
        if files.get(name) == check:
            continue
        if name == "config.toml":
            made = history.made(history.read(folder), check)
            if history.leads(made, files.get(name), check):
                continue
        raise MemspanError(
            f"{name} in {folder} has changed since the run was saved: restore it; options of "
            f"training are changed by flags, such as --resume {folder} --train.steps 5000"
        )
