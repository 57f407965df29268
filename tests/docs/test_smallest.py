"""The smallest versions on the annotated pages compute what the models compute."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memspan.models import TransformerXL, TransformerXLConfig

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


def _layer(model: TransformerXL, n: int) -> dict[str, Any]:
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
