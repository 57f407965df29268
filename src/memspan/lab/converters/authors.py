"""Checkpoints of the Transformer-XL authors' PyTorch code (github.com/kimiyoung/transformer-xl).

Their ``train.py`` saves the whole model object as ``model.pt``. Its modules are read as data: their
parameters and attributes, without their code. A state dict with the options of ``train.py`` beside it
(``args.json``) does as well. The words are in ``cache.pt``, which they keep with the corpus. The first
memory is empty.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.lab.converters.convert import Checkpoint
from memspan.lab.converters.tensors import as_tensors, read_json, shape_of
from memspan.lab.converters.torch_files import Inert, Stored
from memspan.lab.converters.torch_files import read as read_saved
from memspan.lab.converters.transfo_xl import names, run_config
from memspan.lab.converters.vocabulary import read_vocabulary
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer, WordTokenizer
from memspan.lab.runs.options import RunConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

Config = RunConfig[TransformerXLConfig]
FILES = ("model.pt", "model_state.pt")
CUTOFFS = {"wt103": [20000, 40000, 200000], "lm1b": [60000, 100000, 640000]}
"""Cutoffs of their adaptive softmax, by data set; ``train.py`` has no option for them."""
LETTERS = frozenset("_" + string.ascii_lowercase)
"""The words of their text8."""
BYTES = frozenset(map(str, range(256)))
OF_ENWIK8 = 204
"""Number of distinct bytes in enwik8, without the line break: it identifies their vocabulary."""
LONGEST = 200
"""Maximum length of a nested module's name; theirs have 40 characters."""


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    path = next((folder / name for name in FILES if (folder / name).exists()), None)
    if path is None:
        raise MemspanError(
            f"{folder} has no weights: put {' or '.join(FILES)} of the checkpoint there"
        )
    value = read_saved(path)
    if isinstance(value, Inert):
        tensors = as_tensors(dict(_tensors(value, set())), path)
        given = _attributes(value)
    else:
        tensors, given = _state_and_options(value, path)
    tensors = {
        name.removeprefix("module."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("pos_emb.inv_freq")
    }
    values = given | _sizes(tensors, path)
    if "crit.cluster_weight" in tensors and values.get("cutoffs") is None:
        values["cutoffs"] = _cutoffs(tensors, values)
    config = run_config(values, str(path), start="empty")
    words, about = read_vocabulary(folder, values["n_token"])
    config, tokenizer = (config, words) if about else _as_read(config, words)
    own = partial(names, clusters="reversed")
    return Checkpoint(config, tokenizer, tensors, own, path, tuple(about))


def _as_read(config: Config, words: WordTokenizer) -> tuple[Config, Tokenizer]:
    """The tokeniser that reads the data set itself, and the run's options with it.

    The authors' scripts write text8 as letters with spaces between them, ``_`` for a space in the text,
    and enwik8 as the numbers of its bytes, without line breaks.
    """
    listed = words.words
    data = config.data
    tokenizer: Tokenizer = words
    if "_" in listed and LETTERS.issuperset(listed):
        tokenizer = CharacterTokenizer("".join(listed).replace("_", " "), others=False)
        data = replace(data, corpus="text8", tokenizer="characters")
    elif BYTES.issuperset(listed) and (data.corpus == "enwik8" or len(listed) == OF_ENWIK8):
        tokenizer = ByteTokenizer([int(word) for word in listed])
        data = replace(data, corpus="enwik8", tokenizer="bytes")
    return replace(config, data=data), tokenizer


def _tensors(module: Inert, seen: set[int], prefix: str = "") -> Iterator[tuple[str, Stored]]:
    """Parameters and buffers by name, as ``state_dict`` would have them.

    ``seen``: identities of visited dicts, since a file can put one inside itself.
    """
    for kind in ("_parameters", "_buffers", "_modules"):
        held = module.state.get(kind)
        if id(held) in seen or len(prefix) > LONGEST:
            continue
        seen.add(id(held))
        for name, found in _held(module, kind).items():
            if isinstance(found, Stored):
                yield f"{prefix}{name}", found
            elif isinstance(found, Inert):
                yield from _tensors(found, seen, f"{prefix}{name}.")


def _held(module: Inert, kind: str) -> dict[Any, Any]:
    found = module.state.get(kind)
    return found if isinstance(found, dict) else {}


def _attributes(model: Inert) -> dict[str, Any]:
    """The options that the model object keeps, by the names that ``train.py`` gives them."""
    inside = _held(model, "_modules").get("module")
    model = inside if isinstance(inside, Inert) else model
    embedding = _part(model, "word_emb")
    attention = _part(model, "layers", "0", "dec_attn")
    cutoffs = embedding.get("cutoffs")
    return model.state | {
        # Theirs end with the vocabulary's size.
        "cutoffs": cutoffs[:-1] if isinstance(cutoffs, list) else None,
        "div_val": embedding.get("div_val"),
        "dropout": _part(model, "drop").get("p", 0.0),
        "pre_lnorm": attention.get("pre_lnorm", False),
        "dropatt": _part(model, "layers", "0", "dec_attn", "dropatt").get("p", 0.0),
    }


def _part(module: Inert, *path: str) -> dict[str, Any]:
    """The state of a module inside another; empty if that is missing."""
    for name in path:
        found = _held(module, "_modules").get(name)
        module = found if isinstance(found, Inert) else Inert()
    return module.state


def _state_and_options(value: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of a checkpoint that is not a model object."""
    wrapped = isinstance(value, dict) and "model_state" in value
    tensors = as_tensors(value["model_state"] if wrapped else value, path)
    options = value.get("model_config", value.get("args")) if wrapped else None
    options = options.state if isinstance(options, Inert) else options
    args = path.parent / "args.json"
    if not isinstance(options, dict):
        if not args.exists():
            raise MemspanError(
                f"{path} has tensors but not the model's options: put {args.name} next to it, the "
                "options of train.py as JSON, such as mem_len, same_length, clamp_len and pre_lnorm"
            )
        options = read_json(args)
    return tensors, options


def _sizes(tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Options that follow from the tensors; they override what the file says."""

    def shape(name: str, n_dimensions: int) -> tuple[int, ...]:
        otherwise = "it is not the authors' model with attn_type 0 and an adaptive or full softmax"
        return shape_of(tensors, name, n_dimensions, path, otherwise)

    def equal(one: str, other: str) -> bool:
        return one in tensors and other in tensors and torch.equal(tensors[one], tensors[other])

    n_heads, width = shape("r_w_bias", 2)
    d_inner, d_model = shape("layers.0.pos_ff.CoreNet.0.weight", 2)
    d_embed = shape("word_emb.emb_layers.0.weight", 2)[1]
    of_layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    tables = [name for name in tensors if name.startswith("word_emb.emb_layers.")]
    n_projections = sum(name.startswith("crit.out_projs.") for name in tensors)
    inner = [f"word_emb.emb_projs.{n}" for n in range(n_projections)]
    return {
        "n_head": n_heads,
        "d_head": width,
        "d_inner": d_inner,
        "d_model": d_model,
        "d_embed": d_embed,
        "n_layer": len(of_layers),
        "n_token": sum(shape(name, 2)[0] for name in tables),
        "tie_weight": all(equal(t, t.replace("word_emb.emb", "crit.out")) for t in tables),
        "tie_projs": [
            equal(name if name in tensors else inner[0], f"crit.out_projs.{n}")
            for n, name in enumerate(inner)
        ],
        "untie_r": False,
    }


def _cutoffs(tensors: dict[str, Tensor], options: dict[str, Any]) -> list[int] | None:
    """The first id of each cluster: from the tables, or as ``train.py`` sets them for a data set."""
    rows: list[int] = []
    while (name := f"word_emb.emb_layers.{len(rows)}.weight") in tensors:
        rows.append(len(tensors[name]))
    if len(rows) > 1:
        return list(accumulate(rows))[:-1]
    dataset = options.get("dataset")
    return CUTOFFS.get(dataset) if isinstance(dataset, str) else None
