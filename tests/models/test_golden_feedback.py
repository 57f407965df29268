"""Feedback Transformer against labml's two versions and Meta's: outputs, memory, every gradient.

One test per recorded configuration. The peer's parameters are leaves, and ours are functions of them,
so what a peer ties, turns round or adds up is one expression, and gradients arrive at the peer's own
parameters. What a peer does differently is put together here from our pieces; each docstring names it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from golden import Golden, assert_same, parameters
from golden_rows import GRADIENT, OUTPUT, PREFIX, Losses, assert_all_seen, check_loss
from memspan.models import Feedback, FeedbackMemory, LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.options import EmbeddingConfig
from memspan.ops.feedback import compiled as feedback_loop

pytestmark = pytest.mark.golden

Theirs = dict[str, Tensor]
Keys = tuple[list[Tensor], list[Tensor]]
"""Keys and values of one token, for each layer ``[B, H, K]``."""


# ----- The peer's parameters as leaves


def leaves(g: Golden, dtype: torch.dtype) -> Theirs:
    """Tied parameters are one leaf under all their names."""
    found: Theirs = {}
    for name, tensor in g.named("param."):
        first = next((n for n in found if n in g.tied_to(name)), None)
        if first is None:
            found[name] = tensor.to(dtype).requires_grad_()
        else:
            assert_same(tensor, found[first], 0.0, f"{name} is tied")
            found[name] = found[first]
    return found


class Call(nn.Module):
    """A function of a model, for :func:`torch.func.functional_call`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(self.model, *args, **options)


def called(
    model: nn.Module, ours: Theirs, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """``function(model, ...)`` with ``ours`` in place of the model's parameters, all of them."""
    own = dict(model.named_parameters())
    assert set(own) == set(ours), f"without counterpart: {set(own) ^ set(ours)}"
    for name, tensor in ours.items():
        assert tensor.shape == own[name].shape, name
    given = {f"model.{name}": tensor for name, tensor in ours.items()}
    return functional_call(Call(model, function), given, args, options)


def check_gradients(g: Golden, theirs: Theirs, dtype: torch.dtype) -> None:
    """All gradients of the peer."""
    compared = set()
    for name, gradient in g.named("f64.grad."):
        got = theirs[name].grad
        assert got is not None, f"{name} is not used"
        assert_same(got, gradient, GRADIENT[dtype], f"gradient of {name}")
        compared |= g.tied_to(name)
    for name in g.json["parameters_without_gradient"]:
        got = theirs[name].grad
        assert got is None or not got.any(), f"{name}: a gradient from nowhere"
        compared |= g.tied_to(name)
    assert compared == set(theirs), f"not compared: {set(theirs) ^ compared}"


def clear(theirs: Theirs) -> None:
    for tensor in theirs.values():
        tensor.grad = None


def linear(name: str, theirs: Theirs, peer: str) -> Theirs:
    kinds = [k for k in ("weight", "bias") if f"{peer}.{k}" in theirs]
    return {f"{name}.{kind}": theirs[f"{peer}.{kind}"] for kind in kinds}


def token_by_token(
    model: Feedback, x: Tensor, past: list[Keys], context: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The reference's loop after ``past``, a span of tokens, with a ``context`` before the projections:
    outputs ``[B, T, D]`` and memory vectors."""
    outputs, vectors, past = [], [], list(past)
    span = len(past)
    visible = torch.ones(len(x), span, dtype=torch.bool)
    for x_t in x.unbind(1):
        states = [x_t]
        for n, layer in enumerate(model.stack()):
            keys = torch.stack([k[n] for k, _ in past[-span:]], 2)
            values = torch.stack([v[n] for _, v in past[-span:]], 2)
            states.append(layer(states[-1], keys, values, visible, None))
        vector = torch.einsum("l,lbd->bd", model.mix(), torch.stack(states))
        past.append(keys_of(model, vector, context))
        outputs.append(states[-1])
        vectors.append(vector)
    return torch.stack(outputs, 1), vectors


def keys_of(model: Feedback, vector: Tensor, context: Callable[[int, Tensor], Tensor]) -> Keys:
    by_layer = [model.project(context(n, vector)) for n in range(len(model.layers))]
    return [k[n] for n, (k, _) in enumerate(by_layer)], [v[n] for n, (_, v) in enumerate(by_layer)]


# ----- labml: both versions, the same function as ours


def check_labml(g: Golden, dtype: torch.dtype) -> None:
    """labml has no memory between calls, and its tables start at the farthest distance."""
    c, f, tol = g.config, PREFIX[dtype], OUTPUT[dtype]
    theirs = leaves(g, dtype)
    shared = "key.linear.weight" in theirs
    # The distances that they have; where only memory is longer, what is farther is never asked for.
    rows = max(c["P"], c["seq_len"])
    model = Feedback(
        FeedbackConfig(
            n_layers=c["n_layers"],
            d_model=c["d_model"],
            n_heads=c["heads"],
            d_ff=c["d_ff"],
            memory_length=c["seq_len"],
            max_distance=rows,
            projections="shared" if shared else "per-layer",
            memory_norm=False,
            attention_bias=True,
            # Where keys and values are shared, its values have no bias.
            value_bias=not shared,
        )
    ).to(dtype)
    ours: Theirs = {"layer_weights": theirs["weights"]} | linear("final_norm", theirs, "norm")
    for n in range(c["n_layers"]):
        here, there = f"layers.{n}", f"layers.{n}.attn"
        ours |= linear(f"{here}.query", theirs, f"{there}.query.linear")
        ours |= linear(f"{here}.output", theirs, f"{there}.output")
        ours[f"{here}.content_bias"] = theirs[f"{there}.query_pos_bias"]
        for ours_is, theirs_is in (
            ("position_keys", "key_pos_embeddings"),
            ("position_scores", "key_pos_bias"),
        ):
            table = theirs[f"{there}.{theirs_is}"].flip(0)
            more = table.new_zeros(rows - len(table), *table.shape[1:])
            ours[f"{here}.{ours_is}"] = torch.cat([table, more])
        ours |= linear(f"{here}.feed_forward.inner", theirs, f"{here}.feed_forward.layer1")
        ours |= linear(f"{here}.feed_forward.outer", theirs, f"{here}.feed_forward.layer2")
        ours |= linear(f"{here}.attention_norm", theirs, f"{here}.norm_self_attn")
        ours |= linear(f"{here}.feed_forward_norm", theirs, f"{here}.norm_ff")
    for n in range(1 if shared else c["n_layers"]):
        there = "" if shared else f"layers.{n}.attn."
        ours |= linear(f"key.{n}", theirs, f"{there}key.linear")
        ours |= linear(f"value.{n}", theirs, f"{there}value.linear")

    weights = g.input("w", dtype).transpose(0, 1)
    by_layer: dict[int, list[Tensor]] = {n: [] for n in range(c["n_layers"])}
    hooks = [
        layer.register_forward_hook(lambda _, args, out, n=n: by_layer[n].append(out))
        for n, layer in enumerate(model.layers)
    ]
    compiles = feedback_loop.available(torch.zeros((), dtype=dtype))
    for implementation in ("reference", "fused", *["compiled"] * compiles):
        clear(theirs)
        x = g.input("x", dtype).transpose(0, 1).requires_grad_()
        out = called(model, ours, Feedback.forward, x, implementation=implementation)
        # Only the reference, which comes first, calls them.
        for hook in hooks:
            hook.remove()
        assert_same(out.hidden.transpose(0, 1), g[f"{f}.out"], tol, "out")
        vectors = out.memory.vectors.transpose(0, 1)
        if f"{f}.memory_seen_at_last_step" in g:
            seen = g[f"{f}.memory_seen_at_last_step"]
            assert_same(vectors[-len(seen) - 1 : -1], seen, tol, "memory vectors")
        if f"{f}.memory_keys" in g:
            keys, values = called(model, ours, Feedback.project, vectors)
            assert_same(keys[0], g[f"{f}.memory_keys"], tol, "keys")
            assert_same(values[-1], g[f"{f}.memory_values"], tol, "values")
        loss = (out.hidden * weights).sum()
        check_loss(loss, (out.hidden * weights).abs().sum().item(), g[f"{f}.loss"], dtype)
        loss.backward(retain_graph=True)
        check_gradients(g, theirs, dtype)
        assert_same(x.grad.transpose(0, 1), g["f64.gradin.x"], GRADIENT[dtype], "gradient of x")
    for n in range(c["n_layers"]):
        if f"{f}.layer_output{n}" in g:
            assert_same(torch.stack(by_layer[n]), g[f"{f}.layer_output{n}"], tol, "layer's output")
    assert_all_seen(g, dtype)


# ----- Meta's, by the paper's authors


def check_meta(g: Golden, dtype: torch.dtype) -> None:
    """The start is a memory of zero vectors that are attended; one table of position keys serves all
    layers and heads, without biases. With post-norm this is our model.

    With pre-norm, memory vectors are normalised by each layer's norm before the projections, and what
    is carried to the next block was normalised by the first layer's already.
    """
    c, f, tol = g.config, PREFIX[dtype], OUTPUT[dtype]
    theirs = leaves(g, dtype)
    span, shared = c["attn_lim"], c["share_proj_kv"]
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
    ).to(dtype)
    b = "backbone."
    ours = {
        "embedding.tables.0": theirs["in_emb.weight"],
        "head.tables.0": theirs["out.out_emb.weight"],
        "head.biases.0": theirs["out.out_emb.bias"],
        f"{b}layer_weights": theirs["single_memory_attn_params"].squeeze(0),
    } | linear(f"{b}final_norm", theirs, "out_norm")
    for n in range(c["nlayers"]):
        here, there = f"{b}layers.{n}", f"layers.{n}"
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

    def read_post(
        model: LanguageModel, tokens: Tensor, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        memory = model.initial_memory(len(tokens), start="zeros")
        if cache is not None:
            memory = FeedbackMemory(memory.tokens_seen, cache, memory.length)
        out = model(tokens, memory)
        return out.logits, out.memory.vectors

    def read_pre(
        model: LanguageModel, tokens: Tensor, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        backbone, x = model.backbone, model.embedding(tokens)
        norms = [layer.attention_norm for layer in backbone.layers]

        def context(n: int, m: Tensor) -> Tensor:
            return norms[n](m)

        if cache is None:
            cache = x.new_zeros(len(x), span, c["hid_sz"])
        past = [keys_of(backbone, m, context) for m in cache.unbind(1)]
        h, vectors = token_by_token(backbone, x, past, context)
        kept = [*cache.unbind(1), *(norms[0](m) for m in vectors)][-span:]
        return model.head(backbone.final_norm(h)), torch.stack(kept, 1)

    losses, cache = Losses(g, dtype), None
    for i in g.segments:
        tokens, read = g.input(f"seg{i}.tokens", dtype), read_pre if c["pre_norm"] else read_post
        logits, cache = called(model, ours, read, tokens, cache)
        cache = cache.detach()
        logprobs = logits.log_softmax(-1)
        assert_same(logprobs, g[f"{f}.seg{i}.logprobs"], tol, f"logprobs {i}")
        assert_same(cache.transpose(0, 1), g[f"{f}.seg{i}.cache0"], tol, f"cache {i}")
        losses.add(i, logprobs * g.input(f"seg{i}.w", dtype))
    losses.total().backward()
    check_gradients(g, theirs, dtype)
    left = [k for k in g.unseen("in.", "param.", f"{f}.", "f64.grad.") if ".buf." not in k]
    assert not left, f"recorded, but not compared: {left}"
    mix = called(model, ours, lambda m: m.backbone.mix())
    assert_same(mix[None], g[f"{f}.buf.single_memory_attn_buf"], tol, "layer weights")


CHECKS = {
    "labml_feedback": check_labml,
    "labml_feedback_kv": check_labml,
    "fb_feedback": check_meta,
}


@pytest.mark.parametrize("path", parameters(*CHECKS, of="FeedbackTransformer"))
def test_golden(path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        g = Golden(path)
        CHECKS[g.json["set"]](g, dtype)
