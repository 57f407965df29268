"""The smallest versions on the annotated pages compute what the models compute."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memspan.models import Compressive, CompressiveConfig, TransformerXL, TransformerXLConfig

FOLDER = Path(__file__).parents[2] / "docs" / "annotated" / "smallest"


def smallest(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes() -> None:
    for path in FOLDER.glob("*.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert 20 <= len(lines) <= 60, path.name


def test_transformer_xl() -> None:
    """Four segments of unequal length, so that the memory is empty, partly full and full."""
    torch.manual_seed(0)
    config = TransformerXLConfig(
        n_layers=2, d_model=8, n_heads=2, d_ff=12, memory_length=5, normalisation="post"
    )
    model = TransformerXL(config)
    for parameter in model.parameters():
        if parameter.ndim != 1 or parameter.shape[0] == config.d_ff:
            torch.nn.init.normal_(parameter, std=0.5)
    layers = [_layer(model, n) for n in range(config.n_layers)]
    memory, memories = None, [torch.zeros(0, config.d_model)] * config.n_layers
    version = smallest("transformer_xl")
    with torch.no_grad():
        for n_tokens in (3, 1, 4, 6):
            x = torch.randn(n_tokens, config.d_model)
            output = model(x[None], memory)
            memory = output.memory
            hidden, memories = version.read(x, memories, layers, config.memory_length)
            torch.testing.assert_close(hidden, output.hidden[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(memories), memory.hidden[0])


@pytest.mark.parametrize("auxiliary_loss", ["attention", "auto-encoding"])
def test_compressive(auxiliary_loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until compressed slots are lost: outputs, memories, the loss and what it teaches."""
    monkeypatch.syspath_prepend(str(FOLDER))
    torch.manual_seed(0)
    config = CompressiveConfig(
        n_layers=2,
        d_model=8,
        n_heads=2,
        d_ff=12,
        memory_length=4,
        compressed_length=3,
        compression_rate=3,
        auxiliary_loss=auxiliary_loss,
        normalisation="post",
    )
    model = Compressive(config)
    for parameter in model.parameters():
        if parameter.ndim != 1 or parameter.shape[0] == config.d_ff:
            torch.nn.init.normal_(parameter, std=0.5)
    layers = [_compressive_layer(model, n) for n in range(config.n_layers)]
    none = torch.zeros(0, config.d_model)
    memory, memories = None, [(none, none)] * config.n_layers
    version = smallest("compressive")
    loss_of = {
        "attention": version.attention_loss,
        "auto-encoding": version.auto_encoding_loss,
    }[auxiliary_loss]
    learned = model.auxiliary_parameters()
    for n_tokens in (3, 1, 5, 6, 1):
        x = torch.randn(n_tokens, config.d_model)
        output = model(x[None], memory)
        memory = output.memory.detach()
        hidden, memories, loss = version.read(x, memories, layers, 4, 3, loss_of)
        torch.testing.assert_close(hidden, output.hidden[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(loss, output.auxiliary_loss, atol=1e-5, rtol=1e-5)
        compressed, recent = (torch.stack(parts) for parts in zip(*memories, strict=True))
        n, n_compressed = int(memory.length), int(memory.compressed_length)
        assert (recent.shape[1], compressed.shape[1]) == (n, n_compressed)
        torch.testing.assert_close(recent, memory.hidden[0, :, 4 - n :])
        torch.testing.assert_close(compressed, memory.compressed[0, :, 3 - n_compressed :])
        if loss.requires_grad:
            everything = list(model.parameters())
            ours = torch.autograd.grad(loss, everything, retain_graph=True, allow_unused=True)
            real = torch.autograd.grad(output.auxiliary_loss, learned, retain_graph=True)
            taught = {id(p): g for p, g in zip(everything, ours, strict=True) if g is not None}
            assert {*taught} == {id(p) for p in learned}
            for parameter, gradient in zip(learned, real, strict=True):
                torch.testing.assert_close(taught[id(parameter)], gradient, atol=1e-5, rtol=1e-5)
    assert n_compressed == config.compressed_length


def _compressive_layer(model: Compressive, n: int) -> dict[str, Any]:
    compression: Any = model.layers[n].compression
    weights = {"f": compression.weight.permute(2, 1, 0), "f_bias": compression.bias}
    if model.config.auxiliary_loss == "auto-encoding":
        weights |= {
            "g": compression.decoder_weight.permute(2, 0, 1),
            "g_bias": compression.decoder_bias,
        }
    return _layer(model, n) | weights


def _layer(model: TransformerXL | Compressive, n: int) -> dict[str, Any]:
    layer = model.layers[n]
    attention, feed_forward = layer.attention, layer.feed_forward
    u, v = model.biases(n)
    per_head = {
        name: getattr(attention, name).weight.T.chunk(attention.n_heads, 1)
        for name in ("query", "key", "value", "position")
    }
    heads = [
        {name: parts[h] for name, parts in per_head.items()} | {"u": u[h], "v": v[h]}
        for h in range(attention.n_heads)
    ]
    return {
        "heads": heads,
        "output": attention.output.weight.T,
        "inner": feed_forward.inner.weight.T,
        "inner_bias": feed_forward.inner.bias,
        "outer": feed_forward.outer.weight.T,
        "outer_bias": feed_forward.outer.bias,
    }
