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
    assert_all_seen,
    check_gradients,
    check_loss,
    labml_rows,
    write_parameters,
)
from memspan.config import CompressiveConfig, EmbeddingConfig
from memspan.models import LanguageModel
from memspan.ops import compression as ops
from memspan.ops.relative_attention import relative_attention

pytestmark = pytest.mark.golden


# ----- labml: the paper's, with pre-norm and learned positions


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


def check_labml_compressive(g: Golden, dtype: torch.dtype) -> None:
    tol, f = OUTPUT[dtype], PREFIX[dtype]
    model = labml_model(g)
    rows = labml_rows(model, g)
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
    total, magnitude = torch.zeros((), dtype=dtype), 0.0
    auxiliary = torch.zeros((), dtype=dtype)
    for i in g.segments:
        key = f"{f}.seg{i}"
        tokens = g.input(f"seg{i}.tokens", dtype).t()
        weights = g.input(f"seg{i}.w", dtype).transpose(0, 1)
        out = model(tokens, memory)
        assert_same(out.logits, g[f"{key}.logits"].transpose(0, 1), tol, "logits")
        terms = out.logits * weights
        check_loss(terms.sum(), terms.abs().sum().item(), g[f"{key}.loss"], dtype)
        total, magnitude = total + terms.sum(), magnitude + terms.abs().sum().item()
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
    check_loss(total, magnitude, g[f"{f}.loss"], dtype)
    assert_same(auxiliary, g[f"{f}.ar_loss_total"], tol, "ar_loss_total")

    total.backward()
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


# ----- The tests: one for each configuration in the folder

CHECKS = {"labml_compressive": check_labml_compressive}


@pytest.mark.parametrize("path", parameters(*CHECKS))
def test_golden(path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        CHECKS[path.parent.name](Golden(path), dtype)
