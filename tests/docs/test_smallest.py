"""The smallest versions on the annotated pages compute what the models compute."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from memspan.models import (
    Compressive,
    CompressiveConfig,
    FastWeights,
    FastWeightsConfig,
    Feedback,
    FeedbackConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    TransformerXL,
    TransformerXLConfig,
)
from memspan.ops.fast_weights.rules import delta_rule
from memspan.ops.feedback.buffers import FoldedWeights
from memspan.ops.feedback.recurrence import feedback_recurrence
from memspan.ops.relative import Positions, relative_attention

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12}
FOLDER = Path(__file__).parents[2] / "docs" / "annotated" / "smallest"


@pytest.fixture(autouse=True)
def _from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


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
        assert 20 <= len(lines) <= 85, path.name


@pytest.mark.parametrize(
    "name", ["transformer_xl", "compressive", "feedback", "fast_weights", "gated_delta_net"]
)
def test_trains(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python NAME.py` does, on the first letters of the rhyme."""
    learn = smallest("learn")
    learn.RHYME = learn.RHYME[:26]
    monkeypatch.setitem(sys.modules, "learn", learn)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    *rounds, carried, emptied = (
        float(line.split(": ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()
    )
    assert rounds[0] > 2
    assert rounds[-1] < 0.8 * rounds[0]
    assert carried != emptied


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def carried(
    model: Any, read: Callable[[Tensor, Any], Any], own: Any, segments: Sequence[int] = (3, 1, 4, 6)
) -> tuple[Any, Any]:
    """Segments of unequal length, so that memory is empty, partly full and full: outputs are the same.

    Returns:
        The memory of the model and that of the smallest version.
    """
    memory = None
    for n_tokens in segments:
        x = torch.randn(n_tokens, model.config.d_model)
        output = model(x[None], memory)
        memory = output.memory
        hidden, own = read(x, own)
        close(hidden, output.hidden[0])
    return memory, own


@pytest.mark.parametrize("memory_length", [0, 5])
def test_transformer_xl(memory_length: int) -> None:
    config = TransformerXLConfig(**SIZES, memory_length=memory_length, normalisation="post")
    model = drawn(TransformerXL(config))
    layers = [_layer(model, n) for n in range(config.n_layers)]
    version, empty = smallest("transformer_xl"), [torch.zeros(0, config.d_model)] * config.n_layers
    memory, own = carried(model, lambda x, m: version.read(x, m, layers, memory_length), empty)
    torch.testing.assert_close(torch.stack(own), memory.hidden[0])


@pytest.mark.parametrize("auxiliary_loss", ["attention", "auto-encoding"])
@pytest.mark.parametrize(("M", "C", "c"), [(4, 3, 3), (2, 4, 3), (1, 0, 2)])
def test_compressive(auxiliary_loss: Any, M: int, C: int, c: int) -> None:
    """Until compressed slots are lost: outputs, memories, the loss and what it teaches."""
    config = CompressiveConfig(
        **SIZES,
        memory_length=M,
        compressed_length=C,
        compression_rate=c,
        auxiliary_loss=auxiliary_loss,
        normalisation="post",
    )
    model = drawn(Compressive(config))
    layers = [_compressive_layer(model, n) for n in range(config.n_layers)]
    none = torch.zeros(0, config.d_model)
    memory, memories = None, [(none, none)] * config.n_layers
    version = smallest("compressive")
    loss_of = getattr(version, f"{auxiliary_loss.replace('-', '_')}_loss")
    learned = model.auxiliary_parameters()
    for n_tokens in (3, 1, 5, 6, 1):
        x = torch.randn(n_tokens, config.d_model)
        output = model(x[None], memory)
        memory = output.memory.detach()
        hidden, memories, loss = version.read(x, memories, layers, M, C, loss_of)
        close(hidden, output.hidden[0])
        close(loss, output.auxiliary_loss)
        compressed, recent = (torch.stack(parts) for parts in zip(*memories, strict=True))
        n, n_compressed = int(memory.length), int(memory.compressed_length)
        assert (recent.shape[1], compressed.shape[1]) == (n, n_compressed)
        torch.testing.assert_close(recent, memory.hidden[0, :, M - n :])
        torch.testing.assert_close(compressed, memory.compressed[0, :, C - n_compressed :])
        if loss.requires_grad:
            everything = list(model.parameters())
            ours = torch.autograd.grad(loss, everything, retain_graph=True, allow_unused=True)
            real = torch.autograd.grad(output.auxiliary_loss, learned, retain_graph=True)
            taught = {id(p): g for p, g in zip(everything, ours, strict=True) if g is not None}
            assert {*taught} == {id(p) for p in learned}
            for parameter, gradient in zip(learned, real, strict=True):
                close(taught[id(parameter)], gradient)
    assert n_compressed == config.compressed_length


@pytest.mark.parametrize("slots", [0, 5])
def test_relative_attention(slots: int) -> None:
    """Output and all gradients of the fused implementation, and the output of the reference."""
    version = smallest("relative_attention")
    n_queries, width = 4, 3
    n_keys = slots + n_queries
    shapes = [(n_queries, width), *[(n_keys, width)] * 3, (width,), (width,)]
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    q, k, v, r, u, w = given
    past = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(slots)[None]
    positions = Positions(r[None], content_bias=u[None], position_bias=w[None])
    one_head = [t[None, None] for t in (q, k, v)]
    real = relative_attention(*one_head, positions, mask=past, implementation="fused")
    plain = relative_attention(*one_head, positions, mask=past, implementation="reference")
    with torch.no_grad():
        output, saved = version.forward(*given)
        d_output = torch.randn_like(output)
        gradients = version.backward(d_output, saved)
    torch.testing.assert_close(output, real[0, 0])
    torch.testing.assert_close(output, plain[0, 0])
    expected = torch.autograd.grad(real[0, 0], given, d_output)
    close(gradients, expected)


def _compressive_layer(model: Compressive, n: int) -> dict[str, Any]:
    compression: Any = model.layers[n].compression
    if compression is None:
        # Of nothing but the rate is asked, by which memory gives slots away.
        return _layer(model, n) | {"f": torch.zeros(model.config.compression_rate, 0)}
    weights = {"f": compression.weight.permute(2, 1, 0), "f_bias": compression.bias}
    if model.config.auxiliary_loss == "auto-encoding":
        weights |= {
            "g": compression.decoder_weight.permute(2, 0, 1),
            "g_bias": compression.decoder_bias,
        }
    return _layer(model, n) | weights


def test_fast_weights() -> None:
    config = FastWeightsConfig(**SIZES, norm="post")
    model = drawn(FastWeights(config))
    layers = [_fast_weights_layer(layer) for layer in model.stack()]
    version, empty = smallest("fast_weights"), model.initial_memory(1).weights[0]
    memory, matrices = carried(model, lambda x, m: version.read(x, m, layers), empty)
    close(torch.stack([torch.stack(heads) for heads in matrices]), memory.weights[0])


def test_gated_delta_net() -> None:
    config = GatedDeltaNetConfig(**SIZES, d_value=6)
    model = drawn(GatedDeltaNet(config))
    layers = [_gated_delta_net_layer(layer) for layer in model.stack()]
    version, empty = smallest("gated_delta_net"), model.initial_memory(1)
    start = _by_head(config, empty.weights[0], empty.inputs[0])
    memory, own = carried(model, lambda x, m: version.read(x, m, layers), start)
    close(own, _by_head(config, memory.weights[0], memory.inputs[0]))


def test_feedback() -> None:
    config = FeedbackConfig(**SIZES, memory_length=5, normalisation="post")
    model = drawn(Feedback(config))
    layers = [_feedback_layer(model, n) for n in range(config.n_layers)]
    version, empty = smallest("feedback"), torch.zeros(0, config.d_model)

    def read(x: Tensor, past: Tensor) -> Any:
        return version.read(x, past, layers, model.layer_weights, config.memory_length)

    for segments in ((1, 3), (1, 3, 4)):
        memory, past = carried(model, read, empty, segments)
        close(past, memory.vectors[0, config.memory_length - len(past) :])


def test_delta_rule() -> None:
    """Chunks of 3 tokens, the last one shorter, from a memory that is not empty."""
    q, k = torch.rand(2, 8, 4)
    v, beta, before = torch.randn(8, 3), torch.rand(8, 1), torch.randn(4, 3)
    beta[4] = 0.0
    given = [x[None, None] for x in (q, k, v, beta[:, 0], before)]
    y, after = delta_rule(*given, implementation="reference")
    version = smallest("delta_rule")
    torch.testing.assert_close(version.read(q, k, v, beta, before, 3), (y[0, 0], after[0, 0]))


def test_gradients_of_a_chunk() -> None:
    """Those of the reference, by autograd."""
    q, k = torch.rand(2, 5, 4)
    v, beta, before = torch.randn(5, 3), torch.rand(5, 1), torch.randn(4, 3)
    given = [x.requires_grad_() for x in (q.clone(), k.clone(), v, beta, before)]
    shaped = [x[None, None] for x in (*given[:3], beta[:, 0], before)]
    y, after = delta_rule(*shaped, implementation="reference")
    d_y, d_after = torch.randn_like(y), torch.randn_like(after)
    wanted = torch.autograd.grad([y, after], given, [d_y, d_after])
    version = smallest("delta_rule")
    with torch.no_grad():
        _, _, z = version.chunk(*given)
        found = version.chunk_backward(q, k, beta, before, z, d_y[0, 0], d_after[0, 0])
    torch.testing.assert_close(found, wanted)


def drawn(model: Any) -> Any:
    """With larger weights than at the start of a training; norms stay as they are."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def by_head(n_heads: int, parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: part[h] for name, part in parts.items()} for h in range(n_heads)]


def columns(module: Any, n_heads: int, names: Iterable[str]) -> dict[str, Any]:
    """Weights of products, each cut into those of the heads."""
    return {name: getattr(module, name).weight.T.chunk(n_heads, 1) for name in names}


def layer_of(heads: list[dict[str, Any]], output: Any, feed_forward: Any) -> dict[str, Any]:
    return {
        "heads": heads,
        "output": output.weight.T,
        "inner": feed_forward.inner.weight.T,
        "inner_bias": feed_forward.inner.bias,
        "outer": feed_forward.outer.weight.T,
        "outer_bias": feed_forward.outer.bias,
    }


def _layer(model: TransformerXL | Compressive, n: int) -> dict[str, Any]:
    layer, (u, v) = model.layers[n], model.biases(n)
    own = layer.attention
    parts = columns(own, own.n_heads, ("query", "key", "value", "position"))
    heads = by_head(own.n_heads, parts | {"u": u, "v": v})
    return layer_of(heads, own.output, layer.feed_forward)


def _fast_weights_layer(layer: Any) -> dict[str, Any]:
    own = layer.attention
    parts = columns(own, own.n_heads, ("query", "key", "value")) | {"beta": own.beta.weight}
    whole = layer_of(by_head(own.n_heads, parts), own.output, layer.feed_forward)
    return whole | {"output_bias": own.output.bias}


def _feedback_layer(model: Feedback, n: int) -> dict[str, Any]:
    layer = list(model.stack())[n]
    n_heads = len(layer.content_bias)
    parts = columns(layer, n_heads, ["query"]) | {
        "key": model.key[0].weight.T.chunk(n_heads, 1),
        "value": model.value[0].weight.T.chunk(n_heads, 1),
        "u": layer.content_bias,
        "position_keys": layer.position_keys.unbind(1),
        "position_scores": layer.position_scores.unbind(1),
    }
    return layer_of(by_head(n_heads, parts), layer.output, layer.feed_forward)


def _by_head(config: GatedDeltaNetConfig, weights: Tensor, inputs: Tensor) -> list[list[Any]]:
    """For each layer and head its matrix and the inputs of its convolutions."""
    return [
        [[own, of_heads.T] for own, of_heads in zip(matrices, _channels(config, x.T), strict=True)]
        for matrices, x in zip(weights, inputs, strict=True)
    ]


def _channels(config: GatedDeltaNetConfig, x: Tensor) -> list[Tensor]:
    """Queries, keys and values side by side, ``[C, ...]``, head by head."""
    parts = (part.chunk(config.n_heads) for part in x.split(config.widths))
    return [torch.cat(of_head) for of_head in zip(*parts, strict=True)]


def _gated_delta_net_layer(layer: Any) -> dict[str, Any]:
    mixer, n = layer.mixer, layer.mixer.config.n_heads
    parts = columns(mixer, n, ("query", "key", "value")) | {
        "gate": mixer.output_gate.weight.T.chunk(n, 1),
        "taps": _channels(mixer.config, mixer.convolution),
        "step": mixer.step.weight,
        "beta": mixer.beta.weight,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
    }
    return layer_of(by_head(n, parts), mixer.output, layer.feed_forward)


def test_feedback_backward() -> None:
    """By hand, by autograd of the smallest version, and by the real one: the same gradients."""
    n_layers, n_tokens, d_model, width, d_ff, span = 2, 7, 6, 4, 5, 3
    shapes = {
        "query": (n_layers, d_model, width),
        "position_keys": (n_layers, span, width),
        "position_scores": (n_layers, span),
        "output": (n_layers, width, d_model),
        "inner": (n_layers, d_model, d_ff),
        "outer": (n_layers, d_ff, d_model),
        "memory": (d_model, 2 * width),
        "mix": (n_layers + 1,),
    }
    w = {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }
    x = torch.randn(n_tokens, d_model, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, n_tokens, d_model, dtype=torch.float64)
    version = smallest("feedback_backward")
    *results, steps = version.forward(x, w)
    with torch.no_grad():
        d_x, d = version.backward(*upstream, w, steps)
    real = [a[0] for a in _recurrence(x, w, span)]
    for computed in (results, real):
        torch.testing.assert_close(computed, results)
        by_autograd = torch.autograd.grad(computed, [x, *w.values()], [*upstream])
        for found, expected in zip([d_x, *d.values()], by_autograd, strict=True):
            torch.testing.assert_close(found, expected)


def _recurrence(x: Tensor, w: dict[str, Tensor], span: int) -> tuple[Tensor, Tensor]:
    n_layers, d_model, width = w["query"].shape
    zeros = x.new_zeros

    def with_bias(weight: Tensor) -> Tensor:
        return torch.cat([weight, zeros(n_layers, 1, d_model)], 1)

    folded = FoldedWeights(
        query=w["query"][:, None],
        query_bias=zeros(n_layers, 1, 1, width),
        position_keys=w["position_keys"].transpose(1, 2)[:, None],
        position_scores=w["position_scores"][:, None, None],
        output=with_bias(w["output"]),
        inner=w["inner"],
        inner_bias=zeros(n_layers, w["inner"].shape[2]),
        outer=with_bias(w["outer"]),
        memory=w["memory"],
        memory_bias=zeros(2 * width),
        mix=w["mix"],
        gains=zeros(0),
        biases=zeros(0),
        norms_memory=True,
    )
    none = torch.zeros(1, dtype=torch.long)
    return feedback_recurrence(x[None], x.new_zeros(1, 0, d_model), none, span, folded)
