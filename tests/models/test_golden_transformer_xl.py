"""Transformer-XL against four independent implementations: every output, every gradient.

One test per recorded configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memspan.models.relative.self_attention as attention_module
from golden import Golden, assert_same, parameters
from golden_rows import (
    GRADIENT,
    OUTPUT,
    PREFIX,
    Losses,
    assert_all_seen,
    check_gradients,
    labml_model,
    leaves,
    write_parameters,
)
from memspan.converters import labml, transfo_xl
from memspan.converters.names import Names
from memspan.models import LanguageModel
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.nn import sinusoids
from memspan.ops.relative import Positions, relative_attention

pytestmark = pytest.mark.golden


def peer_model(g: Golden) -> tuple[LanguageModel, str]:
    """The model of kimi's or HF's options, and the prefix of their names."""
    hf = "n_token" not in g.config
    values = dict(g.config)
    if hf:
        values = transfo_xl.with_defaults(values | {"dropout": 0.0}, Path("config"))
    elif values["tie_projs"] == "all_but_first":
        values["tie_projs"] = [False] + [True] * len(values["cutoffs"])
    config = transfo_xl.run_config(values, "config", "zeros" if hf else "empty")
    size = values["vocab_size" if hf else "n_token"]
    model = LanguageModel(size, config.model, config.embedding)
    for i in range(len(model.head.projections)):
        if values["tie_projs"][i : i + 1] == [True]:
            # Patterns that no option names are tied by hand.
            source = model.embedding.projections[i if values["div_val"] > 1 else 0]
            model.head.projections[i] = source
    return model, "transformer." if hf else ""


def peer_rows(model: LanguageModel, g: Golden, prefix: str) -> Names:
    """Their names. Biases are recorded under one of the names that they have with one peer or other."""
    rows = transfo_xl.names(model, prefix, "in order" if prefix else "reversed")
    return {n: r for n, r in rows.items() if not n.endswith("_bias") or f"param.{n}" in g}


# ----- Reading the segments


class Recorder:
    """Layer inputs, the backbone's output and the first attention of a forward pass."""

    def __init__(self, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layer_inputs: dict[int, Tensor] = {}
        self.hidden = torch.empty(0)
        self.attention: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        for n, layer in enumerate(model.backbone.layers):
            layer.register_forward_pre_hook(
                lambda _, args, n=n: self.layer_inputs.__setitem__(n, args[0])
            )
        model.backbone.register_forward_hook(
            lambda _, args, out: setattr(self, "hidden", out.hidden)
        )

        def spy(*args: Any, **options: Any) -> Tensor:
            if self.attention is None:
                self.attention = args, options
            return relative_attention(*args, **options)

        monkeypatch.setattr(attention_module, "relative_attention", spy)

    @torch.no_grad()
    def first_attention(self) -> Tensor:
        """``[B, H, T, S]`` of layer 0: what attention makes of the identity as values."""
        assert self.attention is not None
        (q, k, _, positions), options = self.attention
        eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:3], -1)
        return relative_attention(q, k, eye, positions, **options | {"implementation": "reference"})


def log_probabilities(model: LanguageModel, logits: Tensor) -> Tensor:
    return logits if len(model.head.edges) > 2 else logits.log_softmax(-1)


def check_memory(g: Golden, key: str, memory: Any, tolerance: float, layers: range) -> None:
    for n in layers:
        if f"{key}.mem{n}" in g:
            theirs = g[f"{key}.mem{n}"].transpose(0, 1)
            slots = theirs.shape[1]
            assert memory.length.tolist() == [slots] * len(theirs)
            ours = memory.hidden[:, n, memory.hidden.shape[2] - slots :]
            assert_same(ours, theirs, tolerance, f"{key}.mem{n}")


def check_frequencies(g: Golden, key: str) -> None:
    """The peers compute their frequencies in the stored precision, we in float64."""
    ours = sinusoids(torch.ones(1), g.config["d_model"], torch.float64)[0]
    ours = ours[: g.config["d_model"] // 2].asin()
    # arcsin is steep at the first frequency, 1.
    assert_same(ours, g[f"f64.buf.{key}"], 1e-12, "float64 frequencies")
    assert_same(ours, g[f"f32.buf.{key}"], 1e-6, "float32 frequencies")


def check_reader(model: LanguageModel, before: Any, tokens: Tensor, out: Any, tol: float) -> None:
    reader = model.reader(before)
    assert_same(reader.read(tokens), out.logits, tol, "reader")
    assert_same(reader.memory.hidden, out.memory.hidden, tol, "reader's memory")


def check_kimi_xl(g: Golden, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tol, f = OUTPUT[dtype], PREFIX[dtype]
    model, prefix = peer_model(g)
    rows = peer_rows(model, g, prefix)
    write_parameters(model, rows, g)
    check_frequencies(g, "pos_emb.inv_freq")
    model.to(dtype).eval()
    seen = Recorder(model, monkeypatch)

    n_layers, mem_len = g.config["n_layer"], g.config["mem_len"]
    memory = model.initial_memory(g.config["batch"], start="empty")
    final = torch.empty(g.config["batch"], 0, g.config["d_model"], dtype=dtype)
    losses = Losses(g, dtype)
    for i in g.segments:
        tokens = g.input(f"seg{i}.tokens", dtype).t()
        targets = g.input(f"seg{i}.targets", dtype).t()
        w_nll = g.input(f"seg{i}.w_nll", dtype).t()
        w_hidden = g.input(f"seg{i}.w_hidden", dtype).transpose(0, 1)
        with torch.no_grad():
            out = model(tokens, memory)
        ours = log_probabilities(model, out.logits)
        assert_same(ours, g[f"{f}.seg{i}.logprobs"].transpose(0, 1), tol, f"seg{i}.logprobs")
        check_reader(model, memory, tokens, out, tol)

        out = model(tokens, memory, targets=targets)
        assert out.logits is None
        hidden = seen.hidden
        assert_same(hidden, g[f"{f}.seg{i}.hidden"].transpose(0, 1), tol, f"seg{i}.hidden")
        assert_same(out.losses, g[f"{f}.seg{i}.nll"].t(), tol, f"seg{i}.nll")
        # Theirs is grouped by cluster.
        returned = g[f"{f}.seg{i}.loss_as_returned"].flatten().sort().values
        assert_same(out.losses.flatten().sort().values, returned, tol, f"seg{i}.loss_as_returned")
        losses.add(f"seg{i}.loss", out.losses * w_nll, hidden * w_hidden)

        memory = out.memory.detach()
        check_memory(g, f"{f}.seg{i}", memory, tol, range(n_layers))
        # Their last memory is the final output, which nobody reads.
        final = torch.cat([final, hidden.detach()], 1)
        final = final[:, max(0, final.shape[1] - mem_len) :]
        if f"{f}.seg{i}.mem{n_layers}" in g:
            theirs = g[f"{f}.seg{i}.mem{n_layers}"].transpose(0, 1)
            assert_same(final, theirs, tol, f"seg{i}.mem{n_layers}")
    losses.backward()
    check_gradients(rows, g, dtype)
    assert_all_seen(g, dtype)


def check_hf_or_labml(g: Golden, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tol, f, hf = OUTPUT[dtype], PREFIX[dtype], g.json["set"] == "hf_transfo_xl"
    if hf:
        model, prefix = peer_model(g)
        rows = peer_rows(model, g, prefix)
        check_frequencies(g, "transformer.pos_emb.inv_freq")
        names = {"tokens": "input_ids", "w": "w_logprobs", "out": "logprobs", "layer": "hidden"}
    else:
        model = labml_model(g, TransformerXLConfig)
        rows = labml.names(model, g.config["P"])
        names = {"tokens": "tokens", "w": "w", "out": "logits", "layer": "layer_input"}
    write_parameters(model, rows, g)
    model.to(dtype).eval()
    seen, n_layers = Recorder(model, monkeypatch), len(model.backbone.layers)

    def batch_first(x: Tensor) -> Tensor:
        return x if hf else x.transpose(0, 1)

    memory = model.initial_memory(g.config["batch"], start="zeros" if hf else "empty")
    losses = Losses(g, dtype)
    for i in g.segments:
        at = f"{f}.seg{i}"
        tokens = batch_first(g.input(f"seg{i}.{names['tokens']}", dtype))
        seen.attention = None
        out = model(tokens, memory)
        ours = log_probabilities(model, out.logits) if hf else out.logits
        assert_same(ours, batch_first(g[f"{at}.{names['out']}"]), tol, f"{at} output")
        for n, hidden in (seen.layer_inputs | {n_layers: seen.hidden}).items():
            if (key := f"{at}.{names['layer']}{n}") in g:
                assert_same(hidden, batch_first(g[key]), tol, key)
        if f"{at}.attn0" in g:
            assert_same(seen.first_attention(), g[f"{at}.attn0"], tol, f"{at}.attn0")
        losses.add(f"seg{i}.loss", ours * batch_first(g.input(f"seg{i}.{names['w']}", dtype)))
        check_reader(model, memory, tokens, out, tol)
        if hf:
            check_shifted_losses(g, at, model, tokens, memory, tol)
        memory = out.memory.detach()
        check_memory(g, at, memory, tol, range(n_layers))
    losses.backward()
    check_gradients(rows, g, dtype)
    assert_all_seen(g, dtype)


@torch.no_grad()
def check_shifted_losses(
    g: Golden, at: str, model: LanguageModel, tokens: Tensor, memory: Any, tol: float
) -> None:
    """Theirs shift the labels inside: the last token has no loss."""
    nll = model(tokens, memory, targets=tokens.roll(-1, 1)).losses[:, :-1]
    for key, value in {"nll_token_order": nll, "loss_mean_as_returned": nll.mean()}.items():
        if f"{at}.{key}" in g:
            assert_same(value, g[f"{at}.{key}"], tol, f"{at}.{key}")
    if f"{at}.losses_as_returned" in g:
        # Theirs is grouped by cluster.
        returned = g[f"{at}.losses_as_returned"].flatten().sort().values
        assert_same(nll.flatten().sort().values, returned, tol, f"{at} as returned")


# ----- The attention alone


def check_labml_rel_mha(g: Golden, dtype: torch.dtype, _: pytest.MonkeyPatch) -> None:
    for implementation in ("sdpa", "reference", "fused"):
        check_attention(g, dtype, implementation)
    assert_all_seen(g, dtype)


def check_attention(g: Golden, dtype: torch.dtype, implementation: str) -> None:
    tol, f = OUTPUT[dtype], PREFIX[dtype]
    c = g.config
    n_heads, p, n_queries, n_keys = c["heads"], c["P"], c["q_len"], c["k_len"]
    width = c["d_model"] // n_heads
    w = leaves(g, dtype)
    query, keys = (g.input(n, dtype).clone().requires_grad_() for n in ("query", "key_value"))
    # Without a mask everything is visible.
    mask = g.input("mask", dtype).bool() if "in.mask" in g else torch.ones(n_queries, n_keys, 1) > 0
    mask = mask.permute(2, 0, 1)

    past = torch.arange(n_keys) <= torch.arange(n_keys - n_queries, n_keys)[:, None]
    n_future = n_queries - 1 if (mask & ~past).any() else 0
    # Where everything is visible, no mask says the same.
    visible = None if mask.all() and n_future else mask
    table_rows = p - torch.arange(-n_future, n_keys)

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], n_heads, width).permute(1, 2, 0, 3)

    def attend(values: Tensor, how: Any) -> Tensor:
        k = heads(F.linear(keys, w["key.linear.weight"]))
        return relative_attention(
            heads(F.linear(query, w["query.linear.weight"])),
            k,
            values,
            Positions(
                w["key_pos_embeddings"][table_rows].transpose(0, 1),
                w["key_pos_bias"][table_rows].t(),
                content_bias=w["query_pos_bias"],
                n_future=n_future,
            ),
            mask=visible,
            implementation=how,
        )

    with torch.set_grad_enabled(implementation != "sdpa"):
        values = heads(F.linear(keys, w["value.linear.weight"], w["value.linear.bias"]))
        out = attend(values, implementation).permute(2, 0, 1, 3).flatten(2)
        out = F.linear(out, w["output.weight"], w["output.bias"])
    assert_same(out, g[f"{f}.out"], tol, "out")
    losses = Losses(g, dtype)
    losses.add("loss", out * g.input("w", dtype))
    if implementation == "sdpa":
        return

    losses.backward()
    for name, theirs in g.named("f64.grad."):
        assert_same(w.pop(name).grad, theirs, GRADIENT[dtype], f"gradient of {name}")
    assert set(w) == set(g.json["parameters_without_gradient"])
    for name, x in (("query", query), ("key_value", keys)):
        assert_same(x.grad, g[f"f64.gradin.{name}"], GRADIENT[dtype], f"gradient of {name}")
    list(g.named("f32.grad"))  # Ours in float32 were compared with the better ones.

    w = {name: t.to(dtype) for name, t in g.named("param.")}
    with torch.no_grad():
        eye = torch.eye(n_keys, dtype=dtype).expand(c["batch"], n_heads, -1, -1)
        attention = attend(eye, "reference").permute(2, 3, 0, 1)
        assert_same(attention, g[f"{f}.attn"], tol, "attn")
        scores = g[f"{f}.scores_before_scale_and_mask"] * width**-0.5
        scores = scores.masked_fill(~mask.permute(1, 2, 0)[..., None], float("-inf"))
        assert_same(attention, scores.softmax(1), tol, "scores")


# ----- The tests: one for each configuration in the folder

CHECKS = {
    "kimi_xl": check_kimi_xl,
    "hf_transfo_xl": check_hf_or_labml,
    "labml_xl": check_hf_or_labml,
    "labml_rel_mha": check_labml_rel_mha,
}


@pytest.mark.parametrize("path", parameters(*CHECKS))
def test_golden(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float64, torch.float32):
        with monkeypatch.context() as patch:
            CHECKS[path.parent.name](Golden(path), dtype, patch)
