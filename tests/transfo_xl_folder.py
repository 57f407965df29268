"""Folders of transformers' Transformer-XL with random tensors, made without transformers."""

from __future__ import annotations

import json
import pickle
from collections import Counter, OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
OPTIONS: dict[str, Any] = {
    "model_type": "transfo-xl",
    "vocab_size": 20,
    "cutoffs": [6, 12],
    "d_model": 8,
    "d_embed": 8,
    "n_head": 2,
    "d_head": 3,
    "d_inner": 10,
    "div_val": 1,
    "n_layer": 2,
    "mem_len": 4,
    "clamp_len": -1,
    "same_length": False,
    "pre_lnorm": False,
    "untie_r": True,
    "attn_type": 0,
    "tie_projs": [False, True, True],
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "dropout": 0.1,
}


def random_tensors(c: dict[str, Any]) -> Tensors:
    """``TransfoXLLMHeadModel.state_dict()`` for the options ``c``: random, and tied as they say."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return 0.5 * torch.randn(shape, generator=generator)

    d = c["d_model"]
    inner = c["n_head"] * c["d_head"]
    by_cluster = c["div_val"] > 1
    sizes = [high - low for low, high in pairwise([0, *c["cutoffs"], c["vocab_size"]])]
    widths = [c["d_embed"] // c["div_val"] ** i for i in range(len(sizes))]
    rows = sizes if by_cluster else [sum(sizes)]
    tables = [new(n, width) for n, width in zip(rows, widths, strict=False)]
    t = {"transformer.pos_emb.inv_freq": new(d // 2)}
    for i, table in enumerate(tables):
        t[f"transformer.word_emb.emb_layers.{i}.weight"] = table
        tied = c.get("tie_word_embeddings", True)
        t[f"crit.out_layers.{i}.weight"] = table if tied else new(*table.shape)
        t[f"crit.out_layers.{i}.bias"] = new(len(table))
    if by_cluster or c["d_embed"] != d:
        projections = [new(d, table.shape[1]) for table in tables]
        t |= {f"transformer.word_emb.emb_projs.{i}": p for i, p in enumerate(projections)}
        for i, (tied, width) in enumerate(zip(c["tie_projs"], widths, strict=True)):
            own = projections[i if by_cluster else 0]
            t[f"crit.out_projs.{i}"] = own if tied else new(d, width)
    if c["cutoffs"]:
        t["crit.cluster_weight"] = new(len(c["cutoffs"]), c["d_embed"])
        t["crit.cluster_bias"] = new(len(c["cutoffs"]))
    biases = {name: new(c["n_head"], c["d_head"]) for name in ("r_w_bias", "r_r_bias")}
    if not c["untie_r"]:
        t |= {f"transformer.{name}": bias for name, bias in biases.items()}
    for n in range(c["n_layer"]):
        here = f"transformer.layers.{n}"
        for name, bias in biases.items():
            t[f"{here}.dec_attn.{name}"] = new(*bias.shape) if c["untie_r"] else bias
        for name, shape in {
            "dec_attn.qkv_net.weight": (3 * inner, d),
            "dec_attn.r_net.weight": (inner, d),
            "dec_attn.o_net.weight": (d, inner),
            "pos_ff.CoreNet.0.weight": (c["d_inner"], d),
            "pos_ff.CoreNet.0.bias": (c["d_inner"],),
            "pos_ff.CoreNet.3.weight": (d, c["d_inner"]),
            "pos_ff.CoreNet.3.bias": (d,),
            "dec_attn.layer_norm.weight": (d,),
            "dec_attn.layer_norm.bias": (d,),
            "pos_ff.layer_norm.weight": (d,),
            "pos_ff.layer_norm.bias": (d,),
        }.items():
            t[f"{here}.{name}"] = new(*shape)
    return t


def vocabulary(n: int) -> dict[str, Any]:
    """Attributes of the authors' ``Vocab``, with ``n`` words."""
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(n - 2))]
    return {
        "counter": Counter(words),
        "special": ["<eos>"],
        "lower_case": False,
        "delimiter": None,
        "idx2sym": words,
        "sym2idx": OrderedDict((word, i) for i, word in enumerate(words)),
        "eos_idx": 0,
    }


def write(path: Path, options: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder as ``save_pretrained`` writes it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(options))
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "vocab.pkl").write_bytes(pickle.dumps(vocabulary(options["vocab_size"])))
    return path
