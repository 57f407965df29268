"""Compressive Transformer against labml's, with pre-norm and learned positions: outputs, both memories,
losses, every gradient. One test per recorded configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from golden import Golden, assert_same, parameters
from golden_rows import (
    GRADIENT,
    OUTPUT,
    PREFIX,
    Losses,
    assert_all_seen,
    check_gradients,
    write_parameters,
)
from memspan.converters import labml
from memspan.models import LanguageModel
from memspan.models.compressive import compression as ops
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.options import EmbeddingConfig

pytestmark = pytest.mark.golden


def labml_model(g: Golden) -> LanguageModel:
    c = g.config
    span = c["mem_len"] + c["c_mem_len"] + max(c["segments"])
    return LanguageModel(
        c["n_tokens"],
        CompressiveConfig(
            n_layers=c["n_layers"],
            d_model=c["d_model"],
            n_heads=c["heads"],
            d_ff=c["d_ff"],
            memory_length=c["mem_len"],
            compressed_length=c["c_mem_len"],
            compression_rate=c["compression_rate"],
            positions="learned",
            max_distance=max(c["P"] + 1, span),
            attention_bias=True,
        ),
        EmbeddingConfig(tie=False, scale=False),
    )


def check(g: Golden, dtype: torch.dtype) -> None:
    tol, f = OUTPUT[dtype], PREFIX[dtype]
    model = labml_model(g)
    rows = labml.names(model, g.config["P"])
    write_parameters(model, rows, g)
    model.to(dtype).eval()
    inputs: dict[int, Tensor] = {}
    sources: dict[int, Tensor] = {}
    for n, layer in enumerate(model.backbone.layers):
        layer.register_forward_pre_hook(lambda _, args, n=n: inputs.__setitem__(n, args[0]))
        layer.compression.register_forward_pre_hook(
            lambda _, args, n=n: sources.__setitem__(n, args[0])
        )

    rate = g.config["compression_rate"]
    memory = model.initial_memory(g.config["batch"])
    losses, auxiliary = Losses(g, dtype), torch.zeros((), dtype=dtype)
    for i in g.segments:
        key = f"{f}.seg{i}"
        tokens = g.input(f"seg{i}.tokens", dtype).t()
        weights = g.input(f"seg{i}.w", dtype).transpose(0, 1)
        out = model(tokens, memory)
        assert_same(out.logits, g[f"{key}.logits"].transpose(0, 1), tol, "logits")
        losses.add(i, out.logits * weights)
        auxiliary = auxiliary + out.auxiliary_loss
        by_layer = out.statistics["auxiliary_loss"]
        if f"{key}.ar_loss" in g:
            assert_same(out.auxiliary_loss, g[f"{key}.ar_loss"], tol, f"{key}.ar_loss")
        else:
            assert not by_layer.any()

        reader = model.reader(memory)
        assert_same(reader.read(tokens), out.logits, tol, "reader")
        n_new = int(
            ops.append(
                memory.length,
                memory.compressed_length,
                tokens.shape[1],
                memory_slots=g.config["mem_len"],
                compressed_slots=g.config["c_mem_len"],
                rate=rate,
            ).n_compressed[0]
        )
        memory = out.memory.detach()
        assert_same(reader.memory.compressed, memory.compressed, tol, "reader's memory")
        for n in inputs:
            theirs = {
                f"layer_input{n}": inputs[n],
                f"mem{n}": newest(memory.hidden[:, n], memory.length),
                f"cmem{n}": newest(memory.compressed[:, n], memory.compressed_length),
                f"mem_to_compress{n}": sources[n][:, sources[n].shape[1] - n_new * rate :],
            }
            for name, ours in theirs.items():
                if f"{key}.{name}" in g:
                    recorded = g[f"{key}.{name}"].transpose(0, 1)
                    assert_same(ours, recorded, tol, f"{key}.{name}")
            if f"{key}.ar_loss_layer{n}" in g:
                assert_same(by_layer[n], g[f"{key}.ar_loss_layer{n}"], tol, f"{key}.ar_loss {n}")
    assert_same(auxiliary, g[f"{f}.ar_loss_total"], tol, "ar_loss_total")

    losses.total().backward()
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


@pytest.mark.parametrize("path", parameters("labml_compressive"))
def test_golden(path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        check(Golden(path), dtype)
