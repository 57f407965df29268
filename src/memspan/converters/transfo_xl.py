"""Folders of transformers' Transformer-XL, such as ``transfo-xl-wt103`` (in transformers up to 4.35).

A folder has ``config.json``, ``model.safetensors`` or ``pytorch_model.bin``, and the vocabulary of a
``TransfoXLTokenizer``. Their first memory is zeros, which are attended to.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from memspan.converters.convert import Checkpoint
from memspan.converters.tensors import load_weights, read_json, shape_of
from memspan.converters.transformer_xl import names, run_config
from memspan.converters.vocabulary import read_vocabulary
from memspan.errors import MemspanError

DEFAULTS: dict[str, Any] = {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
    "div_val": 4,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "untie_r": True,
    "dropout": 0.1,
}
"""transformers' defaults of options that a config.json leaves out, except those that are off."""


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    path = folder / "config.json"
    values = with_defaults(read_json(path), path)
    config = run_config(values, str(path), start="zeros")
    tensors, where = load_weights(folder)
    # Frequencies of the sinusoids: no parameters.
    tensors = {n: t for n, t in tensors.items() if not n.endswith("pos_emb.inv_freq")}
    tables = [name for name in tensors if name.startswith("transformer.word_emb.emb_layers.")]
    rows = sum(shape_of(tensors, name, 2, where)[0] for name in tables)
    if rows != values["vocab_size"]:
        raise MemspanError(
            f"{where} has {rows:,} embeddings, but {path.name} has a vocab_size of "
            f"{str(values['vocab_size'])[:40]}: check that its options are this model's"
        )
    tokenizer, about = read_vocabulary(folder, rows)
    own = partial(names, prefix="transformer.")
    return Checkpoint(config, tokenizer, tensors, own, where, tuple(about))


def with_defaults(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """The options of a ``config.json``, completed as transformers completes them."""
    kind = given.get("model_type", "transfo-xl" if "mem_len" in given else "unknown")
    if kind != "transfo-xl":
        raise MemspanError(
            f"{path} is of a model of type {str(kind)[:40]!r}: memspan converts transfo-xl, the "
            "Transformer-XL of transformers; if the folder is from the authors' code or labml's, say "
            "--from authors or --from labml"
        )
    if "n_token" in given:
        given = {"vocab_size": given["n_token"], **given}
    values = DEFAULTS | given
    if not isinstance(values.get("tie_projs"), list):
        shared = values.get("proj_share_all_but_first", True) is not False
        cutoffs = values["cutoffs"] if isinstance(values["cutoffs"], list) else []
        values["tie_projs"] = [False, *[shared] * len(cutoffs)]
    return values
