"""Folders of transformers' Transformer-XL, such as ``transfo-xl-wt103`` (in transformers up to 4.35).

A folder has ``config.json``, ``model.safetensors`` or ``pytorch_model.bin``, and the vocabulary of a
``TransfoXLTokenizer``. Their first memory is zeros, which are attended to. Options and names of tensors
descend from the authors' PyTorch code, whose checkpoints share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from memspan.errors import MemspanError
from memspan.lab.converters import exported
from memspan.lab.converters.convert import Checkpoint
from memspan.lab.converters.names import Names, module, upside_down, whole
from memspan.lab.converters.options import Options
from memspan.lab.converters.tensors import load_weights, read_json, shape_of
from memspan.lab.converters.vocabulary import read_vocabulary
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.models.transformer_xl.model import TransformerXL

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
DATASETS = ("enwik8", "text8")
"""Data sets of the authors' ``train.py`` that are corpora of that name. ``wt103`` is WikiText-103."""
Ties = Literal["none", "all-but-first", "all"]


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    path = folder / "config.json"
    given = read_json(path)
    if given.get("model_type") == exported.MODEL_TYPE:
        return exported.read(folder)
    values = with_defaults(given, path)
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
            "Transformer-XL of transformers, and its own exports; if the folder is from the authors' "
            "code, say --from authors"
        )
    if "n_token" in given:
        given = {"vocab_size": given["n_token"], **given}
    values = DEFAULTS | given
    if not isinstance(values.get("tie_projs"), list):
        shared = values.get("proj_share_all_but_first", True) is not False
        cutoffs = values["cutoffs"] if isinstance(values["cutoffs"], list) else []
        values["tie_projs"] = [False, *[shared] * len(cutoffs)]
    return values


def run_config(
    values: Mapping[str, Any], where: str, start: Literal["empty", "zeros"]
) -> RunConfig[TransformerXLConfig]:
    """The options of a run from the peers' ``values``.

    Args:
        values: under the names of the authors' code, which transformers kept.
        where: the file that they come from, for messages.
        start: what their first memory is.
    """
    options = Options(values, where)
    options.refuse_unless("attn_type", 0, "positions are relative, as in the paper")
    options.refuse_unless("ext_len", 0, "memory ends where the segment begins")
    if options.integer("sample_softmax", -1) > 0:
        options.refuse_unless("sample_softmax", -1, "the softmax is over all words")
    config = RunConfig(model=_backbone(options, start), embedding=_embedding(options))
    # Training continues as in the authors' recipe for WikiText-103, most such checkpoints' text.
    corpus = values["dataset"] if values.get("dataset") in DATASETS else "wikitext-103"
    return replace(
        config,
        data=replace(config.data, corpus=corpus, tokenizer="words"),
        optim=replace(config.optim, learning_rate=2.5e-4, weight_decay=0.0, clip_norm=0.25),
        train=replace(config.train, segment_length=max(options.integer("tgt_len", 128), 1)),
    )


def _backbone(options: Options, start: Literal["empty", "zeros"]) -> TransformerXLConfig:
    clamp = options.integer("clamp_len", -1)
    return TransformerXLConfig(
        n_layers=options.integer("n_layer"),
        d_model=options.integer("d_model"),
        n_heads=options.integer("n_head"),
        d_head=options.integer("d_head"),
        d_ff=options.integer("d_inner"),
        memory_length=options.integer("mem_len"),
        start=start,
        attention_span="fixed" if options.flag("same_length", False) else "segment",
        clamp_length=clamp if clamp > 0 else None,
        tie_position_biases=not options.flag("untie_r", False),
        normalisation="pre" if options.flag("pre_lnorm", False) else "post",
        final_norm=False,
        norm_epsilon=options.number("layer_norm_epsilon", 1e-5),
        initialisation="papers",
        dropout=options.number("dropout", 0.0),
        attention_dropout=options.number("dropatt", 0.0),
    )


def _embedding(options: Options) -> EmbeddingConfig:
    cutoffs = options.items("cutoffs", int, [])
    div_val = options.integer("div_val", 1)
    d_model = options.integer("d_model")
    d_embed = options.integer("d_embed", d_model)
    flags = options.items("tie_projs", bool, [])
    flags = (flags + [False] * len(cutoffs) + [False])[: len(cutoffs) + 1]
    patterns: dict[tuple[bool, ...], Ties] = {
        (False, *[True] * len(cutoffs)): "all-but-first",
        (True,) * len(flags): "all",
        (False,) * len(flags): "none",
    }
    return EmbeddingConfig(
        tie=options.flag("tie_weight", True) and options.flag("tie_word_embeddings", True),
        d_embed=d_embed,
        cutoffs=tuple(cutoffs),
        div_val=div_val,
        tie_projections=patterns.get(tuple(flags), "none"),
        output_dropout=options.number("dropout", 0.0),
    )


MODULES = {
    "dec_attn.o_net": "attention.output",
    "dec_attn.r_net": "attention.position",
    "dec_attn.layer_norm": "attention_norm",
    "pos_ff.layer_norm": "feed_forward_norm",
    "pos_ff.CoreNet.0": "feed_forward.inner",
    "pos_ff.CoreNet.3": "feed_forward.outer",
}
"""The modules of each of their layers, and ours."""
BIASES = {"r_w_bias": "content_bias", "r_r_bias": "position_bias"}
"""``u`` and ``v``: theirs are of the model, of each layer, or under both names."""


def names(
    model: LanguageModel, prefix: str = "", clusters: Literal["in order", "reversed"] = "in order"
) -> Names:
    """The peers' names in terms of ``model``.

    Args:
        model: a Transformer-XL with sinusoidal positions.
        prefix: before the names of the backbone and the embedding.
        clusters: the order of the rows that stand for tail clusters in the head.
    """
    backbone = model.backbone
    head = model.head
    assert isinstance(backbone, TransformerXL)
    rows: Names = {}
    for theirs, tables in (
        (f"{prefix}word_emb.emb_layers.{{}}.weight", model.embedding.tables),
        (f"{prefix}word_emb.emb_projs.{{}}", model.embedding.projections),
        ("crit.out_layers.{}.weight", head.tables),
        ("crit.out_layers.{}.bias", head.biases),
        ("crit.out_projs.{}", head.projections),
    ):
        rows |= {theirs.format(i): whole(table) for i, table in enumerate(tables)}
    if len(head.edges) > 2:
        # In ours, tail cluster i is column cutoffs[0] + i - 1 of the head; with the authors, -i.
        order = whole if clusters == "in order" else upside_down
        rows["crit.cluster_weight"] = order(head.cluster_weight)
        rows["crit.cluster_bias"] = order(head.cluster_bias)
    for n, layer in enumerate(backbone.stack()):
        here = f"{prefix}layers.{n}"
        q, k, v = (getattr(layer.attention, name).weight for name in ("query", "key", "value"))
        rows[f"{here}.dec_attn.qkv_net.weight"] = whole(q, k, v)
        for theirs, name in MODULES.items():
            rows |= module(f"{here}.{theirs}", layer.get_submodule(name))
        for theirs, ours in BIASES.items():
            bias = getattr(layer.attention, ours)
            rows[f"{here}.dec_attn.{theirs}"] = whole(bias)
            if backbone.config.tie_position_biases:
                rows[f"{prefix}{theirs}"] = whole(bias)
    return rows
