"""Feedback Transformer against three independent implementations: outputs, memory, every gradient.

One test per recorded configuration. The peer's parameters are leaves, and ours are functions of them,
so what a peer ties, turns round or adds up is one expression, and gradients arrive at the peer's own
parameters. What a peer does differently is put together here from our pieces; each docstring names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden import Golden, in_both_precisions, newest, parameters
from memspan.models import FeedbackMemory, LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.options import EmbeddingConfig
from memspan.ops.feedback import compiled as feedback_loop
from recorded_models import model_of

pytestmark = pytest.mark.golden

Theirs = dict[str, Tensor]


def give(model: nn.Module, ours: Theirs) -> None:
    """Put tensors in place of the model's parameters, all of them."""
    own = dict(model.named_parameters())
    assert set(own) == set(ours), f"without counterpart: {set(own) ^ set(ours)}"
    for name, tensor in ours.items():
        assert tensor.shape == own[name].shape, name
        path, _, last = name.rpartition(".")
        # As functional_call does; an attribute has to be a Parameter, which is no function of others.
        model.get_submodule(path)._parameters[last] = tensor


def linear(name: str, theirs: Theirs, peer: str) -> Theirs:
    kinds = [k for k in ("weight", "bias") if f"{peer}.{k}" in theirs]
    return {f"{name}.{kind}": theirs[f"{peer}.{kind}"] for kind in kinds}


def check_segments(
    g: Golden,
    theirs: Theirs,
    read: Callable[[Tensor, FeedbackMemory | None], tuple[Theirs, FeedbackMemory]],
    *vanishing: str,
) -> None:
    """All segments and gradients. ``read`` returns the results by their recorded names, first what
    the loss is of, and what is carried to the next, at first None."""
    memory = None
    for i in g.segments:
        found, memory = read(g.input(f"seg{i}.tokens"), memory)
        memory = memory.detach()
        for name, tensor in found.items():
            g.check(f"seg{i}.{name}", tensor)
        g.score(f"seg{i}", next(iter(found.values())) * g.input(f"seg{i}.w"))
    g.backward()
    g.check_gradients(theirs, *vanishing)


# ----- labml: both versions, the same function as ours


def check_labml(g: Golden, folder: Path) -> None:
    """labml has no memory between calls."""
    model, rows = model_of(g, folder)
    backbone = model.backbone
    by_layer: dict[int, list[Tensor]] = {n: [] for n in range(len(backbone.layers))}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, n=n: by_layer[n].append(out))
        for n, layer in enumerate(backbone.layers)
    ]
    compiles = feedback_loop.available(torch.zeros((), dtype=g.dtype))
    for implementation in ("reference", "fused", *["compiled"] * compiles):
        backbone.zero_grad()
        x = g.input("x").requires_grad_()
        out = backbone(x.transpose(0, 1), implementation=implementation)
        # Only the reference, which comes first, calls them.
        for hook in hooks:
            hook.remove()
        hidden = out.hidden.transpose(0, 1)
        vectors = out.memory.vectors.transpose(0, 1)
        g.check("out", hidden)
        g.check("memory_seen_at_last_step", vectors[-len(x) : -1])
        keys, values = backbone.project(vectors)
        g.check("memory_keys", keys[0])
        g.check("memory_values", values[-1])
        g.score("", hidden * g.input("w"))
        g.backward()
        g.check_gradients(rows)
        g.check("gradin.x", x.grad)
    for n, outputs in by_layer.items():
        g.check(f"layer_output{n}", torch.stack(outputs))


# ----- Meta's, by the paper's authors


def check_meta(g: Golden, _: Path) -> None:
    """The start is a memory of zero vectors that are attended; one table of position keys serves all
    layers and heads, without biases. With post-norm this is our model.

    With pre-norm, memory vectors are normalised by each layer's norm before the projections, and what
    is carried to the next block was normalised by the first layer's already.
    """
    c = g.config
    if c.get("adapt_span", False):
        pytest.skip("adaptive spans are another model")
    theirs = g.leaves()
    span = c["attn_lim"]
    shared = c["share_proj_kv"]
    model = LanguageModel(
        c["vocab_sz"],
        FeedbackConfig(
            n_layers=c["nlayers"],
            d_model=c["hid_sz"],
            n_heads=c["nheads"],
            d_head=c["head_dim"],
            d_ff=c["inner_hid_sz"],
            memory_length=span,
            projections="shared" if shared else "per-layer",
            normalisation="pre" if c["pre_norm"] else "post",
            memory_norm=False,
        ),
        EmbeddingConfig(tie=False, scale=False),
    ).to(g.dtype)
    b = "backbone."
    ours = {
        "embedding.tables.0": theirs["in_emb.weight"],
        "head.tables.0": theirs["out.out_emb.weight"],
        "head.biases.0": theirs["out.out_emb.bias"],
        f"{b}layer_weights": theirs["single_memory_attn_params"].squeeze(0),
    } | linear(f"{b}final_norm", theirs, "out_norm")
    for n in range(c["nlayers"]):
        here = f"{b}layers.{n}"
        there = f"layers.{n}"
        ours |= linear(f"{here}.query", theirs, f"{there}.attn.proj_query")
        ours |= linear(f"{here}.output", theirs, f"{there}.attn.proj_out")
        # [1, K, S], the oldest first, to [S, H, K], the nearest first.
        table = theirs[f"{there}.attn.attn.key_pe"][0, :, -span:].flip(1).t()
        ours[f"{here}.position_keys"] = table[:, None].expand(-1, c["nheads"], -1)
        ours[f"{here}.position_scores"] = table.new_zeros(span, c["nheads"])
        ours[f"{here}.content_bias"] = table.new_zeros(c["nheads"], c["head_dim"])
        ours |= linear(f"{here}.feed_forward.inner", theirs, f"{there}.ff.fc1")
        ours |= linear(f"{here}.feed_forward.outer", theirs, f"{there}.ff.fc2")
        ours |= linear(f"{here}.attention_norm", theirs, f"{there}.norm1")
        ours |= linear(f"{here}.feed_forward_norm", theirs, f"{there}.norm2")
    for n in range(1 if shared else c["nlayers"]):
        ours |= linear(f"{b}key.{n}", theirs, f"layers.{n}.attn.proj_key")
        ours |= linear(f"{b}value.{n}", theirs, f"layers.{n}.attn.proj_val")

    give(model, ours)
    backbone = model.backbone
    norms = [layer.attention_norm for layer in model.backbone.layers]
    project = backbone.project

    def project_normalised(m: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = zip(*(project(norm(m)) for norm in norms), strict=True)
        return tuple([of_all[n] for n, of_all in enumerate(kind)] for kind in (keys, values))

    if c["pre_norm"]:
        backbone.project = project_normalised

    def read(tokens: Tensor, memory: FeedbackMemory | None) -> tuple[Theirs, FeedbackMemory]:
        memory = memory or model.initial_memory(len(tokens), start="zeros")
        out = model(tokens, memory, implementation="reference" if c["pre_norm"] else None)
        old, new = out.memory.vectors.tensor_split([max(0, span - tokens.shape[1])], 1)
        vectors = torch.cat([old, norms[0](new) if c["pre_norm"] else new], 1)
        found = {"logprobs": out.logits.log_softmax(-1), "cache0": vectors.transpose(0, 1)}
        return found, replace(out.memory, vectors=vectors)

    check_segments(g, theirs, read)
    g.check("buf.single_memory_attn_buf", backbone.mix()[None])


# ----- lucidrains


class Gated(nn.Module):
    """Their feed-forward: ``W_2 (a * gelu(b))`` with ``[a, b] = W_1 x``."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, 8 * d_model)
        self.outer = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).chunk(2, -1)
        return self.outer(a * F.gelu(b))


def check_lucidrains(g: Golden, _: Path) -> None:
    """Agrees with the paper one token at a time (``seq_len`` 1) only. Larger chunks attend to
    themselves in parallel, each layer to its own normalised input, which is not feedback.

    Its relative positions count the query from 0 whatever the memory: one token at a time, the bias is
    the same for all keys and does nothing, so ours are zero. The memory between segments is keys and
    values, detached: no gradient reaches the projections through it. The feed-forward is gated.
    """
    c = g.config
    if c["seq_len"] > 1:
        pytest.skip(f"chunks of {c['seq_len']} tokens attend within themselves: not the paper's")
    theirs = g.leaves()
    heads = (c["heads"], c["dim_head"])
    model = LanguageModel(
        c["num_tokens"],
        FeedbackConfig(
            n_layers=c["depth"],
            d_model=c["dim"],
            n_heads=c["heads"],
            d_head=c["dim_head"],
            memory_length=c["mem_len"],
            memory_vector="last" if c.get("keep_last_hidden", False) else "learned",
            memory_norm=False,
            attention_bias=True,
            value_bias=False,
        ),
        EmbeddingConfig(tie=False, scale=False),
    )
    backbone = model.backbone
    for layer in backbone.layers:
        layer.feed_forward = Gated(c["dim"])
    model.to(g.dtype)
    b = "backbone."
    key, value = theirs["shared_kv_proj.weight"].chunk(2)
    ours = {
        "embedding.tables.0": theirs["token_emb.weight"],
        "head.tables.0": theirs["to_logits.1.weight"],
        "head.biases.0": theirs["to_logits.1.bias"],
        f"{b}key.0.weight": key,
        f"{b}value.0.weight": value,
    } | linear(f"{b}final_norm", theirs, "to_logits.0")
    if backbone.layer_weights is not None:
        ours[f"{b}layer_weights"] = theirs["layer_weight"]
    for n in range(c["depth"]):
        here = f"{b}layers.{n}"
        attention = f"layers.{n}.0.fn.fn"
        ff = f"layers.{n}.1.fn"
        ours |= linear(f"{here}.query", theirs, f"{attention}.fn.to_q")
        ours |= linear(f"{here}.output", theirs, f"{attention}.fn.to_out")
        ours |= linear(f"{here}.attention_norm", theirs, f"{attention}.norm")
        ours |= linear(f"{here}.feed_forward_norm", theirs, f"{ff}.norm")
        ours |= linear(f"{here}.feed_forward.inner", theirs, f"{ff}.fn.net.0")
        ours |= linear(f"{here}.feed_forward.outer", theirs, f"{ff}.fn.net.3")
        ours[f"{here}.content_bias"] = key.new_zeros(heads)
        ours[f"{here}.position_keys"] = key.new_zeros(c["mem_len"], *heads)
        ours[f"{here}.position_scores"] = key.new_zeros(c["mem_len"], c["heads"])

    give(model, ours)
    project = backbone.project

    def project_new(m: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with torch.set_grad_enabled(m.requires_grad):
            return project(m)

    backbone.project = project_new

    def read(tokens: Tensor, memory: FeedbackMemory | None) -> tuple[Theirs, FeedbackMemory]:
        out = model(tokens, memory, implementation="reference")
        keys, values = project(newest(out.memory.vectors, out.memory.length))
        found = {"logits": out.logits, "mem_keys": keys[0], "mem_values": values[0]}
        return {name: tensor.flatten(2) for name, tensor in found.items()}, out.memory

    check_segments(g, theirs, read, "pos_emb.relative_attention_bias.weight")


CHECKS = {
    "labml_feedback": check_labml,
    "labml_feedback_kv": check_labml,
    "fb_feedback": check_meta,
    "lucidrains": check_lucidrains,
}


@pytest.mark.parametrize("path", parameters(*CHECKS, of="FeedbackTransformer"))
def test_golden(path: Path, tmp_path: Path) -> None:
    for g in in_both_precisions(path):
        CHECKS[g.set](g, tmp_path / str(g.dtype))
