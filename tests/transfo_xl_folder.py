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


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of ``TransfoXLLMHeadModel.state_dict()`` for the options ``c``, and its shape."""
    d, inner, edges = c["d_model"], c["n_head"] * c["d_head"], [0, *c["cutoffs"], c["vocab_size"]]
    found: dict[str, tuple[int, ...]] = {"transformer.pos_emb.inv_freq": (d // 2,)}
    by_cluster = c["div_val"] > 1
    tables = list(pairwise(edges)) if by_cluster else [(0, c["vocab_size"])]
    projected = by_cluster or c["d_embed"] != d
    for i, (low, high) in enumerate(tables):
        width = c["d_embed"] // c["div_val"] ** i
        found[f"transformer.word_emb.emb_layers.{i}.weight"] = (high - low, width)
        found[f"crit.out_layers.{i}.weight"] = (high - low, width)
        found[f"crit.out_layers.{i}.bias"] = (high - low,)
        if projected:
            found[f"transformer.word_emb.emb_projs.{i}"] = (d, width)
    for i in range(len(edges) - 1):
        if projected:
            found[f"crit.out_projs.{i}"] = (d, c["d_embed"] // c["div_val"] ** i)
    if c["cutoffs"]:
        found["crit.cluster_weight"] = (len(c["cutoffs"]), c["d_embed"])
        found["crit.cluster_bias"] = (len(c["cutoffs"]),)
    for name in ("r_w_bias", "r_r_bias"):
        if not c["untie_r"]:
            found[f"transformer.{name}"] = (c["n_head"], c["d_head"])
        for n in range(c["n_layer"]):
            found[f"transformer.layers.{n}.dec_attn.{name}"] = (c["n_head"], c["d_head"])
    for n in range(c["n_layer"]):
        here = f"transformer.layers.{n}"
        found[f"{here}.dec_attn.qkv_net.weight"] = (3 * inner, d)
        found[f"{here}.dec_attn.r_net.weight"] = (inner, d)
        found[f"{here}.dec_attn.o_net.weight"] = (d, inner)
        found[f"{here}.pos_ff.CoreNet.0.weight"] = (c["d_inner"], d)
        found[f"{here}.pos_ff.CoreNet.0.bias"] = (c["d_inner"],)
        found[f"{here}.pos_ff.CoreNet.3.weight"] = (d, c["d_inner"])
        found[f"{here}.pos_ff.CoreNet.3.bias"] = (d,)
        for norm in ("dec_attn", "pos_ff"):
            found[f"{here}.{norm}.layer_norm.weight"] = (d,)
            found[f"{here}.{norm}.layer_norm.bias"] = (d,)
    return found


def random_tensors(c: dict[str, Any]) -> Tensors:
    """Random tensors for the options ``c``, tied as they say."""
    generator = torch.Generator().manual_seed(0)
    t = {n: 0.5 * torch.randn(s, generator=generator) for n, s in shapes(c).items()}
    if c.get("tie_word_embeddings", True):
        for name in [n for n in t if n.startswith("crit.out_layers") and n.endswith("weight")]:
            t[name] = t[name.replace("crit.out_layers", "transformer.word_emb.emb_layers")]
    for i, tied in enumerate(c["tie_projs"]):
        n = i if c["div_val"] > 1 else 0
        if tied and f"crit.out_projs.{i}" in t:
            t[f"crit.out_projs.{i}"] = t[f"transformer.word_emb.emb_projs.{n}"]
    if not c["untie_r"]:
        for name in ("r_w_bias", "r_r_bias"):
            for n in range(c["n_layer"]):
                t[f"transformer.layers.{n}.dec_attn.{name}"] = t[f"transformer.{name}"]
    return t


def vocabulary(n: int) -> dict[str, Any]:
    """What the authors' ``Vocab`` holds, with ``n`` words."""
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
