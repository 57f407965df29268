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

from golden import Golden, assert_same, parameters
from golden_rows import (
    GRADIENT,
    OUTPUT,
    PREFIX,
    Losses,
    assert_all_seen,
    check_gradients,
    check_leaves,
    labml_model,
    leaves,
    write_parameters,
)
from memspan.converters import labml
from memspan.models.compressive import compression as ops
from memspan.models.compressive.config import CompressiveConfig
from memspan.ops.relative import Positions, relative_attention

pytestmark = pytest.mark.golden


# ----- labml: the paper's, with pre-norm and learned positions


def check_labml_compressive(g: Golden, dtype: torch.dtype) -> None:
    c, tol, f = g.config, OUTPUT[dtype], PREFIX[dtype]
    more = {"compressed_length": c["c_mem_len"], "compression_rate": c["compression_rate"]}
    model = labml_model(g, CompressiveConfig, **more)
    rows = labml.names(model, c["P"])
    write_parameters(model, rows, g)
    model.to(dtype).eval()
    inputs: dict[int, Tensor] = {}
    sources: dict[int, Tensor] = {}
    for n, layer in enumerate(model.backbone.layers):
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.__setitem__(n, args[0]))
        layer.compression.register_forward_pre_hook(
            lambda _, args, n=n: sources.__setitem__(n, args[0])
        )

    rate = c["compression_rate"]
    memory = model.initial_memory(c["batch"])
    losses = Losses(g, dtype)
    auxiliary = torch.zeros((), dtype=dtype)
    for i in g.segments:
        key = f"{f}.seg{i}"
        tokens = g.input(f"seg{i}.tokens", dtype).t()
        weights = g.input(f"seg{i}.w", dtype).transpose(0, 1)
        out = model(tokens, memory)
        assert_same(out.logits, g[f"{key}.logits"].transpose(0, 1), tol, "logits")
        losses.add(f"seg{i}.loss", out.logits * weights)
        auxiliary = auxiliary + out.auxiliary_loss
        by_layer = out.statistics["auxiliary_loss"]
        if f"{key}.ar_loss" in g:
            assert_same(out.auxiliary_loss, g[f"{key}.ar_loss"], tol, f"{key}.ar_loss")
        else:
            assert not by_layer.any()

        reader = model.reader(memory)
        assert_same(reader.read(tokens), out.logits, tol, "reader")
        counts, sizes = (memory.length, memory.compressed_length), (c["mem_len"], c["c_mem_len"])
        n_new = int(ops.append(*counts, tokens.shape[1], *sizes, rate).n_compressed[0])
        memory = out.memory.detach()
        assert_same(reader.memory.compressed, memory.compressed, tol, "reader's memory")
        for n in inputs:
            for name, ours in {
                f"layer_input{n}": inputs[n],
                f"mem{n}": newest(memory.hidden[:, n], memory.length),
                f"cmem{n}": newest(memory.compressed[:, n], memory.compressed_length),
                f"mem_to_compress{n}": sources[n][:, sources[n].shape[1] - n_new * rate :],
            }.items():
                if f"{key}.{name}" in g:
                    recorded = g[f"{key}.{name}"].transpose(0, 1)
                    assert_same(ours, recorded, tol, f"{key}.{name}")
            if f"{key}.ar_loss_layer{n}" in g:
                assert_same(by_layer[n], g[f"{key}.ar_loss_layer{n}"], tol, f"{key}.ar_loss {n}")
    assert_same(auxiliary, g[f"{f}.ar_loss_total"], tol, "ar_loss_total")

    losses.backward()
    compressing = {id(p) for p in model.backbone.auxiliary_parameters()}
    assert all(p.grad is None for p in model.parameters() if id(p) in compressing)
    check_gradients(rows, g, dtype)
    model.zero_grad()
    auxiliary.backward()
    assert all((p.grad is None) == (id(p) not in compressing) for p in model.parameters())
    for name, theirs in g.named("f64.ar_grad."):
        ours = torch.cat(rows[name](lambda p: p.grad)).view_as(theirs)
        assert_same(ours, theirs, GRADIENT[dtype], f"auxiliary gradient of {name}")
        compressing -= {id(p) for p in model.parameters() if p.shape == theirs.shape}
    assert not compressing
    assert_all_seen(g, dtype)


def newest(x: Tensor, count: Tensor) -> Tensor:
    """The slots ``[B, N, D]`` that are in use, rows alike."""
    assert len(set(count.tolist())) == 1
    return x[:, x.shape[1] - int(count[0]) :]


# ----- What the two others compute, from our pieces


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def check_fb_feedback(g: Golden, dtype: torch.dtype) -> None:
    """Meta's, mean pooling. Different from the paper: memories start as zeros that are attended; every
    query sees a window of its own, the last ``attn_lim`` steps without itself and ``C + 1``
    compressed slots, one for ``c`` queries; these overlap with memory, since what is compressed is
    the oldest part of the window; one position table for all layers and heads, farthest first.
    """
    c, tol, f = g.config, OUTPUT[dtype], PREFIX[dtype]
    w = leaves(g, dtype)
    batch, n_layers, n_heads, rate = c["batch"], c["nlayers"], c["nheads"], c["compress_rate"]
    n_slots, window = c["compress_size"] // rate, c["attn_lim"]
    memory = [torch.zeros(batch, window, c["hid_sz"], dtype=dtype)] * n_layers
    compressed = [torch.zeros(batch, n_slots, c["hid_sz"], dtype=dtype)] * n_layers
    losses = Losses(g, dtype)
    for i in g.segments:
        tokens = g.input(f"seg{i}.tokens", dtype)
        length = tokens.shape[1]
        query = torch.arange(length)[:, None]
        recent = query + torch.arange(window)
        older = query // rate + torch.arange(n_slots + 1)
        h = F.embedding(tokens, w["in_emb.weight"])
        for n in range(n_layers):
            here = f"layers.{n}"
            steps = torch.cat([memory[n], h], 1)
            slots = torch.cat([compressed[n], ops.mean_pooling(steps[:, :length], rate)], 1)
            memory[n], compressed[n] = steps[:, -window:].detach(), slots[:, -n_slots:].detach()
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
        assert_same(out, g[f"{f}.seg{i}.logprobs"], tol, "logprobs")
        for n, tensor in enumerate([*memory, *compressed]):
            assert_same(tensor, g[f"{f}.seg{i}.cache{n}"], tol, f"seg{i}.cache{n}")
        losses.add(f"seg{i}.loss", out * g.input(f"seg{i}.w", dtype))
    losses.backward()
    check_leaves(g, w, dtype)
    assert_all_seen(g, dtype)


def check_lucidrains(g: Golden, dtype: torch.dtype) -> None:
    """lucidrains'. Different from the paper: memory holds normalised inputs, which are not normalised
    again; one position table for all layers, whose nearest row moves as memory grows; the auxiliary
    loss is a mean over layers; and from the first compression on, the projections of keys and
    values get no gradient any more, a fault that the recorded gradients show.
    """
    c, tol, f = g.config, OUTPUT[dtype], PREFIX[dtype]
    w = leaves(g, dtype)
    n_layers, n_heads, rate = c["depth"], c["heads"], c["cmem_ratio"]
    empty = torch.zeros(c["batch"], 0, c["dim"], dtype=dtype)
    memory, compressed = [empty] * n_layers, [empty] * n_layers
    losses = Losses(g, dtype)
    for i in g.segments:
        tokens = g.input(f"seg{i}.tokens", dtype)
        trained = g[f"{f}.seg{i}.to_kv_requires_grad_after"].tolist()
        length, old_length = tokens.shape[1], memory[0].shape[1] + compressed[0].shape[1]
        mask = torch.arange(old_length + length) <= torch.arange(length)[:, None] + old_length
        # Row total - 1 - d is for distance d.
        nearest = old_length + c["seq_len"]
        positions = w["pos_emb"][:, nearest - old_length - length : nearest].flip(1)
        auxiliary = torch.zeros((), dtype=dtype)
        h = F.embedding(tokens, w["token_emb.weight"])
        if c["enhanced_recurrence"]:
            memory, compressed = memory[1:] + memory[:1], compressed[1:] + compressed[:1]
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
                old, memory[n] = steps[:, :split], steps[:, split:]
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
                    new_k, new_v = heads(new_k, n_heads), heads(new_v, n_heads)
                    q = q.detach()
                    if seen == old.shape[1]:
                        all_count = torch.ones(c["batch"], new.shape[1], dtype=torch.bool)
                        loss = ops.attention_reconstruction(
                            q, old_k, old_v, new_k, new_v, all_count
                        )
                    else:
                        attend = F.scaled_dot_product_attention
                        loss = F.mse_loss(attend(q, new_k, new_v), attend(q, old_k, old_v))
                    auxiliary = auxiliary + loss
            h = gated(h, out, w, f"attn_layers.{n}", c)
            x = norm(h, w, f"ff_layers.{n}.fn.norm")
            x = F.gelu(linear(x, w, f"ff_layers.{n}.fn.fn.w1"))
            h = gated(h, linear(x, w, f"ff_layers.{n}.fn.fn.w2"), w, f"ff_layers.{n}", c)
        logits = linear(h, w, "to_logits.1")
        auxiliary = auxiliary / n_layers
        assert_same(logits, g[f"{f}.seg{i}.logits"], tol, "logits")
        assert_same(auxiliary, g[f"{f}.seg{i}.aux_loss"], tol, "aux_loss")
        assert_same(torch.stack(memory), g[f"{f}.seg{i}.mem"], tol, "mem")
        assert_same(torch.stack(compressed), g[f"{f}.seg{i}.cmem"], tol, "cmem")
        losses.add(f"seg{i}.loss", logits * g.input(f"seg{i}.w", dtype), auxiliary)
    losses.backward()
    check_leaves(g, w, dtype)
    assert_all_seen(g, dtype)


def gated(x: Tensor, out: Tensor, w: dict[str, Tensor], name: str, c: dict) -> Tensor:
    """The residual, or the gated recurrent unit that they have for it."""
    if not c["gru_gated_residual"]:
        return x + out
    parts = [w[f"{name}.gru.{p}"] for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return torch.gru_cell(out.flatten(0, 1), x.flatten(0, 1), *parts).view_as(x)


# ----- The tests: one for each configuration in the folder

CHECKS = {
    "labml_compressive": check_labml_compressive,
    "fb_feedback": check_fb_feedback,
    "lucidrains": check_lucidrains,
}


@pytest.mark.parametrize("path", parameters(*CHECKS, of="CompressiveTransformer"))
def test_golden(path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        CHECKS[path.parent.name](Golden(path), dtype)
