"""transformers' Transformer-XL written once more, from its tensors and options by their names.

One row, with no code of ours: the equations of Dai et al. 2019 as they stand.
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
    memory = [torch.zeros(c["mem_len"], c["d_model"]).double()] * c["n_layer"]
    rows = []
    for begin in range(0, len(tokens), cut):
        h = torch.stack([embed(c, t, token) for token in tokens[begin : begin + cut]])
        for n, before in enumerate(memory):
            memory[n] = torch.cat([before, h])[len(h) :]
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
    weight = t[f"{name}.layer_norm.weight"]
    bias = t[f"{name}.layer_norm.bias"]
    return F.layer_norm(x, weight.shape, weight, bias, c["layer_norm_epsilon"])


def layer(c: dict[str, Any], t: Tensors, name: str, before: Tensor, h: Tensor) -> Tensor:
    pre = c["pre_lnorm"]
    attention = f"{name}.dec_attn"
    forward = f"{name}.pos_ff"
    first = f"{forward}.CoreNet.0"
    second = f"{forward}.CoreNet.3"
    slots = torch.cat([before, h])
    attended = []
    slots = norm(c, t, attention, slots) if pre else slots
    for end in range(len(before) + 1, len(slots) + 1):
        begin = max(0, end - c["mem_len"]) if c["same_length"] else 0
        attended.append(attend(c, t, attention, slots[begin:end]))
    y = h + torch.stack(attended)
    y = y if pre else norm(c, t, attention, y)
    inner = norm(c, t, forward, y) if pre else y
    inner = F.linear(inner, t[f"{first}.weight"], t[f"{first}.bias"]).relu()
    y = y + F.linear(inner, t[f"{second}.weight"], t[f"{second}.bias"])
    return y if pre else norm(c, t, forward, y)


def attend(c: dict[str, Any], t: Tensors, name: str, slots: Tensor) -> Tensor:
    """Attention of the last of ``slots [S, D]`` to all of them."""
    shape = (-1, c["n_head"], c["d_head"])
    d = c["d_model"]
    distances = torch.arange(len(slots)).flip(0).double()
    if c["clamp_len"] > 0:
        distances = distances.clamp(max=c["clamp_len"])
    angles = distances[:, None] / 10000 ** (torch.arange(0, d, 2).double() / d)
    code = torch.cat([angles.sin(), angles.cos()], 1)
    q, k, v = ((slots @ w.T).view(shape) for w in t[f"{name}.qkv_net.weight"].chunk(3))
    r = (code @ t[f"{name}.r_net.weight"].T).view(shape)
    content = q[-1] + t[f"{name}.r_w_bias"]
    position = q[-1] + t[f"{name}.r_r_bias"]
    scores = ((content * k).sum(2) + (position * r).sum(2)) / math.sqrt(c["d_head"])
    return t[f"{name}.o_net.weight"] @ (scores.softmax(0)[:, :, None] * v).sum(0).flatten()


def head(c: dict[str, Any], t: Tensors, x: Tensor) -> Tensor:
    edges = [0, *c["cutoffs"], c["vocab_size"]]

    def scores(i: int) -> Tensor:
        hidden = x @ t[f"crit.out_projs.{i}"] if f"crit.out_projs.{i}" in t else x
        if c["div_val"] > 1:
            weight = t[f"crit.out_layers.{i}.weight"]
            bias = t[f"crit.out_layers.{i}.bias"]
        else:
            rows = slice(edges[i], edges[i + 1])
            weight = t["crit.out_layers.0.weight"][rows]
            bias = t["crit.out_layers.0.bias"][rows]
        if i == 0 and c["cutoffs"]:
            weight = torch.cat([weight, t["crit.cluster_weight"]])
            bias = torch.cat([bias, t["crit.cluster_bias"]])
        return F.log_softmax(weight @ hidden + bias, 0)

    first = scores(0)
    tails = [first[edges[1] + i - 1] + scores(i) for i in range(1, len(edges) - 1)]
    return torch.cat([first[: edges[1]], *tails])
