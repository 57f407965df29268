"""Compressive Transformer against independent implementations: outputs, both memories, losses, every
gradient. One test per recorded configuration.

labml's is ours, part for part. What the two others do differently is put together here from our
pieces; each docstring names it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from golden import OUTPUT, Golden, assert_same, gradient, in_both_precisions, newest, parameters
from memspan.models.compressive import compression as ops
from memspan.ops.relative import Positions, relative_attention
from recorded_models import model_of

pytestmark = pytest.mark.golden


# ----- labml: the paper's, with pre-norm and learned positions


def check_labml(g: Golden, folder: Path) -> None:
    model, rows = model_of(g, folder)
    layers = model.backbone.layers
    inputs: dict[int, Tensor] = {}
    old: dict[int, Tensor] = {}
    for n, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]}))
        layer.attention.compression.register_forward_pre_hook(
            lambda _, args, n=n: old.update({n: args[0]})
        )
    memory = model.initial_memory(g.config["batch"])
    auxiliary = torch.zeros((), dtype=g.dtype)
    for i in g.segments:
        at = f"seg{i}"
        tokens = g.input(f"{at}.tokens").t()
        out = model(tokens, memory)
        found = {f"layer_input{n}": x for n, x in inputs.items()} | {"logits": out.logits}
        g.score(at, out.logits.transpose(0, 1) * g.input(f"{at}.w"))
        by_layer = out.statistics["auxiliary_loss"]
        auxiliary = auxiliary + out.auxiliary_loss
        g.check(f"{at}.ar_loss", out.auxiliary_loss)
        assert f"f64.{at}.ar_loss" in g or not by_layer.any()

        reader = model.reader(memory)
        memory = out.memory.detach()
        assert_same(reader.read(tokens), out.logits, OUTPUT[g.dtype], "reader")
        assert_same(reader.memory.compressed, memory.compressed, OUTPUT[g.dtype], "its memory")
        for n in range(len(layers)):
            found[f"mem{n}"] = newest(memory.hidden[:, n], memory.length)
            found[f"cmem{n}"] = newest(memory.compressed[:, n], memory.compressed_length)
            if (key := f"f64.{at}.mem_to_compress{n}") in g:
                found[f"mem_to_compress{n}"] = old[n][:, old[n].shape[1] - len(g[key]) :]
            g.check(f"{at}.ar_loss_layer{n}", by_layer[n])
        for name, tensor in found.items():
            g.check(f"{at}.{name}", tensor.transpose(0, 1))
    g.check("ar_loss_total", auxiliary)

    g.backward()
    compressing = {id(p) for p in model.backbone.auxiliary_parameters()}
    assert all(p.grad is None for p in model.parameters() if id(p) in compressing)
    g.check_gradients(rows)
    model.zero_grad()
    auxiliary.backward()
    assert all((p.grad is None) == (id(p) not in compressing) for p in model.parameters())
    recorded = dict(g.named("f64.ar_grad."))
    assert len(recorded) == len(compressing)
    for name in recorded:
        g.check(f"ar_grad.{name}", torch.cat(rows[name](gradient)))


# ----- What the two others compute, from our pieces


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def check_meta(g: Golden, _: Path) -> None:
    """Meta's, mean pooling. Different from the paper: memories start as zeros that are attended; every
    query sees a window of its own, the last ``attn_lim`` steps without itself and ``C + 1``
    compressed slots, one for ``c`` queries; these overlap with memory, since what is compressed is
    the oldest part of the window; one position table for all layers and heads, farthest first.
    """
    c = g.config
    w = g.leaves()
    dtype = g.dtype
    batch = c["batch"]
    n_layers = c["nlayers"]
    n_heads = c["nheads"]
    rate = c["compress_rate"]
    n_slots = c["compress_size"] // rate
    window = c["attn_lim"]
    memory = [torch.zeros(batch, window, c["hid_sz"], dtype=dtype)] * n_layers
    compressed = [torch.zeros(batch, n_slots, c["hid_sz"], dtype=dtype)] * n_layers
    for i in g.segments:
        tokens = g.input(f"seg{i}.tokens")
        length = tokens.shape[1]
        query = torch.arange(length)[:, None]
        recent = query + torch.arange(window)
        older = query // rate + torch.arange(n_slots + 1)
        h = F.embedding(tokens, w["in_emb.weight"])
        for n in range(n_layers):
            here = f"layers.{n}"
            steps = torch.cat([memory[n], h], 1)
            slots = torch.cat([compressed[n], ops.mean_pooling(steps[:, :length], rate)], 1)
            memory[n] = steps[:, -window:].detach()
            compressed[n] = slots[:, -n_slots:].detach()
            seen = (slots, steps, h)
            if c["pre_norm"]:
                seen = tuple(norm(t, w, f"{here}.norm1") for t in seen)
            slots, steps, x = seen
            keys = torch.cat([slots[:, older], steps[:, recent]], 2).flatten(0, 1)
            attended = relative_attention(
                heads(linear(x, w, f"{here}.attn.proj_query").flatten(0, 1)[:, None], n_heads),
                heads(linear(keys, w, f"{here}.attn.proj_key"), n_heads),
                heads(linear(keys, w, f"{here}.attn.proj_val"), n_heads),
                Positions(
                    w[f"{here}.attn.attn.key_pe"].transpose(1, 2).flip(1).expand(n_heads, -1, -1)
                ),
            )
            attended = attended.flatten(1).unflatten(0, (batch, length))
            h = h + linear(attended, w, f"{here}.attn.proj_out")
            if not c["pre_norm"]:
                h = norm(h, w, f"{here}.norm1")
            x = norm(h, w, f"{here}.norm2") if c["pre_norm"] else h
            h = h + linear(F.relu(linear(x, w, f"{here}.ff.fc1")), w, f"{here}.ff.fc2")
            if not c["pre_norm"]:
                h = norm(h, w, f"{here}.norm2")
        if c["pre_norm"]:
            h = norm(h, w, "out_norm")
        out = linear(h, w, "out.out_emb").log_softmax(-1)
        g.check(f"seg{i}.logprobs", out)
        for n, tensor in enumerate([*memory, *compressed]):
            g.check(f"seg{i}.cache{n}", tensor)
        g.score(f"seg{i}", out * g.input(f"seg{i}.w"))
    g.backward()
    g.check_gradients(w)


def check_lucidrains(g: Golden, _: Path) -> None:
    """lucidrains'. Different from the paper: memory holds normalised inputs, which are not normalised
    again; one position table for all layers, whose nearest row moves as memory grows; the auxiliary
    loss is a mean over layers; and from the first compression on, the projections of keys and
    values get no gradient any more, a fault that the recorded gradients show.
    """
    c = g.config
    w = g.leaves()
    dtype = g.dtype
    n_layers = c["depth"]
    n_heads = c["heads"]
    rate = c["cmem_ratio"]
    empty = torch.zeros(c["batch"], 0, c["dim"], dtype=dtype)
    memory = [empty] * n_layers
    compressed = [empty] * n_layers
    for i in g.segments:
        tokens = g.input(f"seg{i}.tokens")
        trained = g[f"f64.seg{i}.to_kv_requires_grad_after"].tolist()
        length = tokens.shape[1]
        old_length = memory[0].shape[1] + compressed[0].shape[1]
        mask = torch.arange(old_length + length) <= torch.arange(length)[:, None] + old_length
        # Row total - 1 - d is for distance d.
        nearest = old_length + c["seq_len"]
        positions = w["pos_emb"][:, nearest - old_length - length : nearest].flip(1)
        auxiliary = torch.zeros((), dtype=dtype)
        h = F.embedding(tokens, w["token_emb.weight"])
        if c["enhanced_recurrence"]:
            memory = memory[1:] + memory[:1]
            compressed = compressed[1:] + compressed[:1]
        for n in range(n_layers):
            here = f"attn_layers.{n}.fn.fn"
            x = norm(h, w, f"attn_layers.{n}.fn.norm")
            kv = w[f"{here}.to_kv.weight"]
            context = torch.cat([compressed[n], memory[n], x], 1)
            k, v = F.linear(context, kv if trained[n] else kv.detach()).chunk(2, -1)
            q, k, v = (heads(t, n_heads) for t in (linear(x, w, f"{here}.to_q"), k, v))
            attended = relative_attention(q, k, v, Positions(positions), mask=mask[None])
            out = linear(attended.transpose(1, 2).flatten(2), w, f"{here}.to_out")
            steps = torch.cat([memory[n], x], 1).detach()
            split = max(0, steps.shape[1] - c["mem_len"])
            if length == c["seq_len"]:
                seen = memory[n].shape[1]
                old = steps[:, :split]
                memory[n] = steps[:, split:]
                old = F.pad(old, (0, 0, old.shape[1] % rate, 0))
                old = old[:, : old.shape[1] // rate * rate]
                if old.shape[1] and c["cmem_len"] > 0:
                    conv = f"{here}.compress_mem_fn.conv"
                    new = ops.convolution(old, w[f"{conv}.weight"], w[f"{conv}.bias"])
                    slots = torch.cat([compressed[n], new.detach()], 1)
                    compressed[n] = slots[:, max(0, slots.shape[1] - c["cmem_len"]) :]
                    new_k, new_v = F.linear(new, kv.detach()).chunk(2, -1)
                    # They compare with all of memory, even where less of it is compressed.
                    old_k, old_v = (
                        t[:, :, t.shape[2] - length - seen : t.shape[2] - length].detach()
                        for t in (k, v)
                    )
                    new_k = heads(new_k, n_heads)
                    new_v = heads(new_v, n_heads)
                    q = q.detach()
                    attend = F.scaled_dot_product_attention
                    loss = F.mse_loss(attend(q, new_k, new_v), attend(q, old_k, old_v))
                    auxiliary = auxiliary + loss
            h = gated(h, out, w, f"attn_layers.{n}", c)
            x = norm(h, w, f"ff_layers.{n}.fn.norm")
            x = F.gelu(linear(x, w, f"ff_layers.{n}.fn.fn.w1"))
            h = gated(h, linear(x, w, f"ff_layers.{n}.fn.fn.w2"), w, f"ff_layers.{n}", c)
        logits = linear(h, w, "to_logits.1")
        auxiliary = auxiliary / n_layers
        results = {"mem": torch.stack(memory), "cmem": torch.stack(compressed)}
        results |= {"logits": logits, "aux_loss": auxiliary}
        for name, tensor in results.items():
            g.check(f"seg{i}.{name}", tensor)
        g.score(f"seg{i}", logits * g.input(f"seg{i}.w"), auxiliary)
    g.backward()
    g.check_gradients(w)


def gated(x: Tensor, out: Tensor, w: dict[str, Tensor], name: str, c: dict) -> Tensor:
    """The residual, or the gated recurrent unit that they have for it."""
    if not c["gru_gated_residual"]:
        return x + out
    parts = [w[f"{name}.gru.{p}"] for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return torch.gru_cell(out.flatten(0, 1), x.flatten(0, 1), *parts).view_as(x)


# ----- The tests: one for each configuration in the folder

CHECKS = {
    "labml_compressive": check_labml,
    "fb_feedback": check_meta,
    "lucidrains": check_lucidrains,
}


@pytest.mark.parametrize("path", parameters(*CHECKS, of="CompressiveTransformer"))
def test_golden(path: Path, tmp_path: Path) -> None:
    for g in in_both_precisions(path):
        CHECKS[g.set](g, tmp_path / str(g.dtype))
