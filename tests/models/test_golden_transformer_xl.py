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

from golden import OUTPUT, Golden, assert_same, in_both_precisions, newest, parameters
from memspan.nn import sinusoids
from memspan.ops.relative import Positions, attention_weights, relative_attention
from recorded_models import model_of

pytestmark = pytest.mark.golden


# ----- Whole models: the authors', transformers' and labml's


def check_frequencies(g: Golden) -> None:
    """The peers compute their frequencies in the stored precision, we in float64."""
    ours = sinusoids(torch.ones(1), g.config["d_model"], torch.float64)[0]
    ours = ours[: g.config["d_model"] // 2].asin()
    # arcsin is steep at the first frequency, 1.
    for precision, tolerance in {"f64": 1e-12, "f32": 1e-6}.items():
        for name, theirs in g.named(f"{precision}.buf."):
            assert_same(ours, theirs, tolerance, f"{precision} {name}")


def check_model(g: Golden, folder: Path) -> None:
    """Each peer recorded a part of what is compared here; transformers' tensors are batch first."""
    hf = g.set == "hf_transfo_xl"
    model, rows = model_of(g, folder)
    check_frequencies(g)
    n_layers = len(model.backbone.layers)
    states: dict[int, Tensor] = {}
    for n, layer in enumerate(model.backbone.layers):
        layer.register_forward_pre_hook(lambda _, args, n=n: states.update({n: args[0]}))
    model.backbone.register_forward_hook(lambda _, args, out: states.update({n_layers: out.hidden}))

    def turned(x: Tensor) -> Tensor:
        return x if hf else x.transpose(0, 1)

    memory = model.initial_memory(g.config["batch"])
    outputs = memory.hidden[:, 0, :0]
    for i in g.segments:
        at = f"seg{i}"
        inputs = {name: turned(g.input(f"{at}.{name}")) for name, _ in g.named(f"in.{at}.")}
        tokens = inputs["input_ids" if hf else "tokens"]
        out = model(tokens, memory)
        scored = model(tokens, memory, targets=inputs.get("targets", tokens.roll(-1, 1)))
        assert scored.logits is None
        found = {f"{name}{n}": x for n, x in states.items() for name in ("hidden", "layer_input")}
        found["hidden"] = hidden = states[n_layers]

        reader = model.reader(memory)
        assert_same(reader.read(tokens), out.logits, OUTPUT[g.dtype], "reader")
        assert_same(reader.memory.hidden, out.memory.hidden, OUTPUT[g.dtype], "reader's memory")
        weights = model.backbone.attention_weights(model.embedding(tokens), memory)
        g.check(f"{at}.attn0", weights.layers[0])

        memory = out.memory.detach()
        for n in range(n_layers):
            g.check(f"{at}.mem{n}", newest(memory.hidden[:, n], memory.length).transpose(0, 1))
        # The authors' last memory is of outputs, which nobody reads.
        outputs = torch.cat([outputs, hidden.detach()], 1)
        outputs = outputs[:, max(0, outputs.shape[1] - g.config["mem_len"]) :]
        g.check(f"{at}.mem{n_layers}", outputs.transpose(0, 1))
        # A head with clusters gives probabilities.
        has_clusters = len(model.head.edges) > 2
        logprobs = out.logits if has_clusters else out.logits.log_softmax(-1)
        found |= {"logits": out.logits, "logprobs": logprobs, "nll": scored.losses}
        for name, tensor in found.items():
            g.check(f"{at}.{name}", turned(tensor))
        # transformers shifts the labels inside: the last token has no loss.
        shifted = scored.losses[:, :-1]
        g.check(f"{at}.nll_token_order", shifted)
        g.check(f"{at}.loss_mean_as_returned", shifted.mean())
        for name, losses in {"loss": scored.losses, "losses": shifted}.items():
            if (key := f"f64.{at}.{name}_as_returned") in g:
                # Theirs are grouped by cluster.
                ours, theirs = (x.flatten().sort().values for x in (losses, g[key]))
                assert_same(ours, theirs, OUTPUT[g.dtype], key)
        scores = {"w": out.logits, "w_logprobs": logprobs, "w_nll": scored.losses}
        scores["w_hidden"] = hidden
        g.score(at, *(x * inputs[name] for name, x in scores.items() if name in inputs))
    g.backward()
    g.check_gradients(rows)


# ----- The attention alone


def check_attention(g: Golden, _: Path) -> None:
    c = g.config
    n_heads = c["heads"]
    p = c["P"]
    n_queries = c["q_len"]
    n_keys = c["k_len"]
    width = c["d_model"] // n_heads
    past = torch.arange(n_keys) <= torch.arange(n_keys - n_queries, n_keys)[:, None]
    mask = g.input("mask").bool().permute(2, 0, 1)
    if (mask & ~past).any():
        pytest.skip("attention here is causal")
    table_rows = p - torch.arange(n_keys)
    scores = g["f64.scores_before_scale_and_mask"] * width**-0.5
    scores = scores.masked_fill(~mask.permute(1, 2, 0)[..., None], float("-inf"))

    def heads(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        x = F.linear(x, w[f"{name}.linear.weight"], w.get(f"{name}.linear.bias"))
        return x.view(*x.shape[:2], n_heads, width).permute(1, 2, 0, 3)

    for implementation in ("sdpa", "reference", "fused"):
        w = g.leaves()
        query, keys = (g.input(name).requires_grad_() for name in ("query", "key_value"))
        q = heads(query, w, "query")
        k = heads(keys, w, "key")
        v = heads(keys, w, "value")
        positions = Positions(
            w["key_pos_embeddings"][table_rows].transpose(0, 1),
            w["key_pos_bias"][table_rows].t(),
            content_bias=w["query_pos_bias"],
        )
        options: dict[str, Any] = {"mask": mask, "implementation": implementation}
        with torch.set_grad_enabled(implementation != "sdpa"):
            attended = relative_attention(q, k, v, positions, **options)
        attended = attended.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(attended, w["output.weight"], w["output.bias"])
        g.check("out", out)
        if implementation != "sdpa":
            g.score("", out * g.input("w"))
            g.backward()
            g.check_gradients(w)
            g.check("gradin.query", query.grad)
            g.check("gradin.key_value", keys.grad)
    weights = attention_weights(q, k, positions, mask=mask).permute(2, 3, 0, 1)
    g.check("attn", weights)
    assert_same(weights, scores.softmax(1), OUTPUT[g.dtype], "weights of their scores")


# ----- The tests: one for each configuration in the folder

CHECKS = {
    "kimi_xl": check_model,
    "hf_transfo_xl": check_model,
    "labml_xl": check_model,
    "labml_rel_mha": check_attention,
}


@pytest.mark.parametrize("path", parameters(*CHECKS))
def test_golden(path: Path, tmp_path: Path) -> None:
    for g in in_both_precisions(path):
        CHECKS[g.set](g, tmp_path / str(g.dtype))
