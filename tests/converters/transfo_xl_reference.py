"""transformers' Transformer-XL written once more, from its tensors and options by their names.

One row, token by token, with no code of memspan's: the equations of Dai et al. 2019 as they stand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transfo_xl_folder import Tensors


def log_probabilities(c: dict[str, Any], tensors: Tensors, tokens: list[int], cut: int) -> Tensor:
    """``float64 [T, V]`` after each of ``tokens``, read in segments of ``cut`` from zeros."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    memory = [[torch.zeros(c["d_model"]).double()] * c["mem_len"] for _ in range(c["n_layer"])]
    rows = []
    for begin in range(0, len(tokens), cut):
        h = [embed(c, t, token) for token in tokens[begin : begin + cut]]
        for n in range(c["n_layer"]):
            before = memory[n]
            memory[n] = (before + h)[len(h) :]
            h = layer(c, t, f"transformer.layers.{n}", before, h)
        rows += [head(c, t, x) for x in h]
    return torch.stack(rows)


def embed(c: dict[str, Any], t: Tensors, token: int) -> Tensor:
    edges = [0, *c["cutoffs"]] if c["div_val"] > 1 else [0]
    i = max(i for i, edge in enumerate(edges) if token >= edge)
    x = t[f"transformer.word_emb.emb_layers.{i}.weight"][token - edges[i]]
    if f"transformer.word_emb.emb_projs.{i}" in t:
        x = t[f"transformer.word_emb.emb_projs.{i}"] @ x
    return x * math.sqrt(c["d_model"])


def norm(c: dict[str, Any], t: Tensors, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean()
    scaled = centred / (centred.square().mean() + c["layer_norm_epsilon"]).sqrt()
    return scaled * t[f"{name}.layer_norm.weight"] + t[f"{name}.layer_norm.bias"]


def layer(
    c: dict[str, Any], t: Tensors, name: str, before: list[Tensor], h: list[Tensor]
) -> list[Tensor]:
    pre, out = c["pre_lnorm"], []
    for i, x in enumerate(h):
        slots = before + h[: i + 1]
        if c["same_length"]:
            slots = slots[-c["mem_len"] :]
        if pre:
            slots = [norm(c, t, f"{name}.dec_attn", slot) for slot in slots]
        y = x + attend(c, t, f"{name}.dec_attn", slots)
        y = y if pre else norm(c, t, f"{name}.dec_attn", y)
        inner = norm(c, t, f"{name}.pos_ff", y) if pre else y
        one = t[f"{name}.pos_ff.CoreNet.0.weight"] @ inner + t[f"{name}.pos_ff.CoreNet.0.bias"]
        two = t[f"{name}.pos_ff.CoreNet.3.weight"] @ one.relu()
        y = y + two + t[f"{name}.pos_ff.CoreNet.3.bias"]
        out.append(y if pre else norm(c, t, f"{name}.pos_ff", y))
    return out


def attend(c: dict[str, Any], t: Tensors, name: str, slots: list[Tensor]) -> Tensor:
    """What the last of ``slots`` attends to in all of them."""
    heads, width = c["n_head"], c["d_head"]
    wq, wk, wv = t[f"{name}.qkv_net.weight"].chunk(3)
    q = (wq @ slots[-1]).view(heads, width)
    scores = []
    for distance, slot in zip(reversed(range(len(slots))), slots, strict=True):
        if c["clamp_len"] > 0:
            distance = min(distance, c["clamp_len"])
        angles = [distance / 10000 ** (2 * m / c["d_model"]) for m in range(c["d_model"] // 2)]
        code = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        k, r = (wk @ slot).view(heads, width), (t[f"{name}.r_net.weight"] @ code).view(heads, width)
        content = ((q + t[f"{name}.r_w_bias"]) * k).sum(1)
        scores.append((content + ((q + t[f"{name}.r_r_bias"]) * r).sum(1)) / math.sqrt(width))
    weights = torch.stack(scores).softmax(0)
    values = torch.stack([(wv @ slot).view(heads, width) for slot in slots])
    return t[f"{name}.o_net.weight"] @ (weights[:, :, None] * values).sum(0).flatten()


def head(c: dict[str, Any], t: Tensors, x: Tensor) -> Tensor:
    edges = [0, *c["cutoffs"], c["vocab_size"]]

    def scores(i: int) -> Tensor:
        hidden = x @ t[f"crit.out_projs.{i}"] if f"crit.out_projs.{i}" in t else x
        if c["div_val"] > 1:
            weight, bias = t[f"crit.out_layers.{i}.weight"], t[f"crit.out_layers.{i}.bias"]
        else:
            rows = slice(edges[i], edges[i + 1])
            weight, bias = t["crit.out_layers.0.weight"][rows], t["crit.out_layers.0.bias"][rows]
        if i == 0 and c["cutoffs"]:
            weight = torch.cat([weight, t["crit.cluster_weight"]])
            bias = torch.cat([bias, t["crit.cluster_bias"]])
        return F.log_softmax(weight @ hidden + bias, 0)

    first = scores(0)
    tails = [first[edges[1] + i - 1] + scores(i) for i in range(1, len(edges) - 1)]
    return torch.cat([first[: edges[1]], *tails])
