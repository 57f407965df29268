"""The smallest versions on the annotated pages compute what the models compute."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import compressive
import delta_product
import delta_rule
import fast_weights
import feedback
import feedback_backward
import gated_delta_net
import gated_delta_net_2
import gla
import infini
import kda
import learn
import mamba_2
import pytest
import relative_attention
import remember
import rmt
import rwkv_7
import torch
import transformer_xl
from torch import Tensor
from torch.nn.functional import pad

from docsite.code import ROOT
from docsite.standalone import standalone
from memspan import models
from memspan.ops import relative
from memspan.ops.fast_weights import rules
from memspan.ops.feedback.buffers import FoldedWeights
from memspan.ops.feedback.recurrence import feedback_recurrence
from smallest import LESSONS

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12}


RESULTS = json.loads((ROOT / "benchmarks/results/smallest.json").read_text(encoding="utf-8"))[
    "rows"
]


@pytest.mark.parametrize("version", LESSONS)
def test_lessons_say_what_was_measured(version: str) -> None:
    """Losses over all seeds, and right answers by distance."""
    said = (ROOT / f"docs/lessons/{version}.md").read_text(encoding="utf-8")
    rows = [row for row in RESULTS if row["version"] == version]
    for side in ("carried", "emptied"):
        losses = [row["found"][side][1] for row in rows if row["task"] == "rhyme"]
        assert len(losses) == 3
        assert f"{min(losses):.2f} to {max(losses):.2f}" in said
    (recalled,) = (row for row in rows if row["task"] == "recall")
    (listed,) = re.findall(r"^\| right \|(.*)\|$", said, flags=re.M)
    shown = [int(cell.strip(" %")) for cell in listed.split("|")]
    assert shown == list(recalled["found"].values())[: len(shown)]
    assert f"remember.py {version}`; {recalled['cpu_seconds']:.0f} CPU seconds" in said


def test_sizes() -> None:
    for path in Path(learn.__file__).parent.glob("*.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert 20 <= len(lines) <= 85, path.name


@pytest.mark.parametrize(
    "version",
    [
        transformer_xl,
        compressive,
        feedback,
        fast_weights,
        gated_delta_net,
        kda,
        mamba_2,
        gla,
        delta_product,
        gated_delta_net_2,
        infini,
        rmt,
        rwkv_7,
    ],
)
def test_trains(
    version: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python NAME.py` does, on the first letters of the rhyme."""
    monkeypatch.setattr(learn, "RHYME", learn.RHYME[:26])
    runpy.run_path(version.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    halves = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    ends = []
    for (how, *rounds), expected in zip(halves, ("carried", "emptied"), strict=True):
        assert how.startswith(f"memory {expected}")
        losses = [float(line.split(": ")[1].split()[0]) for line in rounds]
        assert losses[0] > 2
        assert losses[-1] < 0.8 * losses[0]
        ends.append(losses)
    # The same weights begin anew, with another loss.
    carried, emptied = ends
    assert emptied[0] > carried[-1]
    assert carried != emptied


LESSONS = ["transformer_xl", "compressive", "feedback", "fast_weights", "gated_delta_net"]


@pytest.mark.parametrize("name", LESSONS)
def test_a_lessons_program_stands_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Copied from the page it reads as the files do, and trains."""
    program = standalone(f"docs/annotated/smallest/{name}.py")
    assert "from learn" not in program
    assert "from transformer_xl" not in program
    copied: dict[str, Any] = {"__name__": "copied"}
    exec(compile(program, name, "exec"), copied)
    x = torch.randn(3, 32)
    outputs = []
    for small in (copied["small"], sys.modules[name].small):
        torch.manual_seed(0)
        segment, _, empty = small()
        outputs.append(segment(x, empty)[0])
    assert torch.equal(*outputs)
    copied["RHYME"] = copied["RHYME"][:10]
    copied["learn"](*copied["small"](), rounds=1)
    assert capsys.readouterr().out.count("nats per letter") == 2
    assert program.rstrip().splitlines()[-1].lstrip().startswith("learn(*small(")


@pytest.mark.parametrize("name", LESSONS)
def test_a_smallest_version_is_trained_on_recall(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remember, "N_TEXTS", 2)
    monkeypatch.setattr(remember, "N_SCORED", 3)
    torch.manual_seed(0)
    remember.recall(sys.modules[name], updates=1)
    shares = re.findall(r"tokens ago: (\d+)% right", capsys.readouterr().out)
    assert len(shares) > 3


def test_streams_ask_for_what_was_written_last() -> None:
    keys, values, answers, distances = remember.write_stream(300)
    asked = 0
    for t, (key, value, answer, back) in enumerate(
        zip(keys, values, answers, distances, strict=True)
    ):
        before = [i for i in range(t) if keys[i] == key and values[i] >= 0]
        if value < 0 and before:
            assert (answer, back) == (values[before[-1]], t - before[-1])
            asked += 1
        else:
            assert (answer, back) == (-1, 0)
    assert asked > 100


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def carried(
    model: Any, read: Callable[[Tensor, Any], Any], own: Any, segments: Sequence[int] = (3, 1, 4, 6)
) -> Iterator[Any]:
    """Segments of unequal length, so that memory is empty, partly full and full: outputs are the same.

    Yields the model's memory, that of the smallest version, and what else each of them returns.
    """
    memory = None
    for n_tokens in segments:
        x = torch.randn(n_tokens, model.config.d_model)
        output = model(x[None], memory)
        memory = output.memory.detach()
        hidden, own, *more = read(x, own)
        close(hidden, output.hidden[0])
        yield memory, own, output, *more


@pytest.mark.parametrize("memory_length", [0, 5])
def test_transformer_xl(memory_length: int) -> None:
    config = models.TransformerXLConfig(**SIZES, memory_length=memory_length, normalisation="post")
    model = drawn(models.TransformerXL(config))
    layers = [_layer(model, n) for n in range(config.n_layers)]
    empty = [torch.zeros(0, config.d_model)] * config.n_layers
    read = transformer_xl.read
    *_, (memory, own, _) = carried(model, lambda x, m: read(x, m, layers, memory_length), empty)
    torch.testing.assert_close(torch.stack(own), memory.hidden[0])


@pytest.mark.parametrize("auxiliary_loss", ["attention", "auto-encoding"])
@pytest.mark.parametrize(("M", "C", "c"), [(4, 3, 3), (2, 4, 3), (1, 0, 2)])
def test_compressive(auxiliary_loss: Any, M: int, C: int, c: int) -> None:
    """Until compressed slots are lost: outputs, memories, the loss and what it teaches."""
    sizes = SIZES | {"memory_length": M, "compressed_length": C, "compression_rate": c}
    config = models.CompressiveConfig(**sizes, auxiliary_loss=auxiliary_loss, normalisation="post")
    model = drawn(models.Compressive(config))
    layers = [_compressive_layer(model, n) for n in range(config.n_layers)]
    empty = [(torch.zeros(0, config.d_model),) * 2] * config.n_layers
    loss_of = getattr(compressive, f"{auxiliary_loss.replace('-', '_')}_loss")
    weights = list(model.parameters())

    def read(x: Tensor, memories: Any) -> Any:
        return compressive.read(x, memories, layers, M, C, loss_of)

    for memory, memories, output, loss in carried(model, read, empty, (3, 1, 5, 6, 1)):
        close(loss, output.auxiliary_loss)
        compressed, recent = (torch.stack(parts) for parts in zip(*memories, strict=True))
        n = int(memory.length)
        n_compressed = int(memory.compressed_length)
        close(recent, memory.hidden[0, :, M - n :])
        close(compressed, memory.compressed[0, :, C - n_compressed :])
        if loss.requires_grad:
            ours, real = (
                torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True)
                for x in (loss, output.auxiliary_loss)
            )
            taught = {id(p) for p, g in zip(weights, ours, strict=True) if g is not None}
            assert taught == {*map(id, model.auxiliary_parameters())}
            close(ours, real)
    assert n_compressed == config.compressed_length


@pytest.mark.parametrize("slots", [0, 5])
def test_relative_attention(slots: int) -> None:
    """Output and all gradients of the fused implementation, and the output of the reference."""
    n_queries = 4
    n_keys = slots + 4
    width = 3
    shapes = [(n_queries, width), *[(n_keys, width)] * 3, (width,), (width,)]
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    q, k, v, r, u, w = given
    past = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(slots)[None]
    positions = relative.Positions(r[None], content_bias=u[None], position_bias=w[None])
    one_head = [t[None, None] for t in (q, k, v)]
    real, plain = (
        relative.relative_attention(*one_head, positions, mask=past, implementation=implementation)
        for implementation in ("fused", "reference")
    )
    with torch.no_grad():
        output, saved = relative_attention.forward(*given)
        d_output = torch.randn_like(output)
        gradients = relative_attention.backward(d_output, saved)
    torch.testing.assert_close(output, real[0, 0])
    torch.testing.assert_close(output, plain[0, 0])
    close(gradients, torch.autograd.grad(real[0, 0], given, d_output))


def test_fast_weights() -> None:
    config = models.FastWeightsConfig(**SIZES, norm="post")
    model = drawn(models.FastWeights(config))
    layers = [_fast_weights_layer(layer) for layer in model.stack()]
    empty = model.initial_memory(1).weights[0]
    for memory, own, _ in carried(model, lambda x, m: fast_weights.read(x, m, layers), empty):
        close(torch.stack([torch.stack(heads) for heads in own]), memory.weights[0])


def test_gated_delta_net() -> None:
    config = models.GatedDeltaNetConfig(**SIZES, d_value=6)
    model = drawn(models.GatedDeltaNet(config))
    layers = [_gated_delta_net_layer(layer) for layer in model.stack()]
    empty = _by_head(config, model.initial_memory(1))
    for memory, own, _ in carried(model, lambda x, m: gated_delta_net.read(x, m, layers), empty):
        close(own, _by_head(config, memory))


@pytest.mark.parametrize(
    ("config", "version"),
    [
        (models.KDAConfig(**SIZES, d_value=6), kda),
        (models.GatedDeltaNet2Config(**SIZES, d_value=6), gated_delta_net_2),
        (models.DeltaProductConfig(**SIZES, d_value=6, n_householder=3), delta_product),
    ],
    ids=lambda given: type(given).__name__,
)
def test_neighbours_of_gated_delta_net(config: Any, version: Any) -> None:
    model = drawn(config.build())
    make = _delta_product_layer if version is delta_product else _kda_layer
    layers = [make(layer) for layer in model.stack()]
    empty = _by_head(config, model.initial_memory(1))
    for memory, own, _ in carried(
        model, lambda x, m: gated_delta_net.read(x, m, layers, version.head), empty
    ):
        close(own, _by_head(config, memory))


def test_rwkv_7() -> None:
    ranks = {"decay_rank": 3, "rate_rank": 2, "value_rank": 4, "gate_rank": 5}
    config = models.RWKV7Config(**SIZES, **ranks)
    model = drawn(models.RWKV7(config))
    layers = [_rwkv_7_layer(layer) for layer in model.stack()]

    def by_layer(memory: Any) -> list[Any]:
        both = zip(memory.weights[0], memory.inputs[0, :, 0], strict=True)
        return [(list(own.unbind()), *x.split(config.d_model)) for own, x in both]

    empty = by_layer(model.initial_memory(1))
    for memory, own, _ in carried(model, lambda x, m: rwkv_7.read(x, m, layers), empty):
        close(own, by_layer(memory))


def test_gla() -> None:
    model = drawn(models.GLA(models.GLAConfig(**SIZES)))
    layers = [_gla_layer(layer) for layer in model.stack()]

    def by_head(memory: Any) -> list[Any]:
        return [[[own] for own in matrices] for matrices in memory.weights[0]]

    empty = by_head(model.initial_memory(1))
    for memory, own, _ in carried(
        model, lambda x, m: gated_delta_net.read(x, m, layers, gla.head), empty
    ):
        close(own, by_head(memory))


def test_mamba_2() -> None:
    config = models.Mamba2Config(**SIZES | {"d_ff": 0}, d_state=5)
    model = drawn(models.Mamba2(config))
    layers = [_mamba_2_layer(layer.mixer) for layer in model.stack()]

    def by_layer(memory: Any) -> list[Any]:
        states = memory.weights[0].unbind()
        return [(list(own.unbind()), x) for own, x in zip(states, memory.inputs[0], strict=True)]

    empty = by_layer(model.initial_memory(1))
    for memory, own, _ in carried(model, lambda x, m: mamba_2.read(x, m, layers), empty):
        close(own, by_layer(memory))


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_infini(update: Any) -> None:
    """Blocks that end within segments, and segments of several blocks."""
    config = models.InfiniConfig(**SIZES, block_length=3, update=update)
    model = drawn(models.Infini(config))
    layers = [_infini_layer(layer) for layer in model.layers]
    empty = [[infini.empty(config.head_width)] * config.n_heads] * config.n_layers
    delta = update == "delta"
    for memory, own, _ in carried(model, lambda x, m: infini.read(x, m, layers, 3, delta), empty):
        of_all = [[torch.stack(parts) for parts in zip(*each, strict=True)] for each in own]
        matrices, sums, keys, values = map(torch.stack, zip(*of_all, strict=True))
        close(matrices, memory.weights[0])
        close(sums, memory.key_sum[0])
        slots = 2 - int(memory.length)
        close(keys, memory.keys[0, :, :, slots:])
        close(values, memory.values[0, :, :, slots:])


def test_rmt() -> None:
    config = models.RMTConfig(**SIZES, block_length=3, memory_tokens=2)
    model = drawn(models.RMT(config))
    layers = [_plain_layer(layer, layer, config.n_heads) for layer in model.layers]
    empty = (None, torch.zeros(0, config.d_model))
    read = rmt.read
    for memory, (tokens, block), _ in carried(
        model, lambda x, m: read(x, m, layers, model.memory_tokens, 3), empty
    ):
        seen = int(memory.tokens_seen)
        close(tokens, memory.tokens[0] if seen >= 3 else model.memory_tokens)
        close(block, memory.inputs[0, 2 - seen % 3 :])


def test_feedback() -> None:
    span = 5
    config = models.FeedbackConfig(**SIZES, memory_length=span, normalisation="post")
    model = drawn(models.Feedback(config))
    layers = [_feedback_layer(model, layer) for layer in model.stack()]
    empty = torch.zeros(0, config.d_model)
    mix = model.layer_weights
    for memory, past, _ in carried(
        model, lambda x, past: feedback.read(x, past, layers, mix, span), empty, (1, 3, 4)
    ):
        close(past, memory.vectors[0, span - len(past) :])


def test_delta_rule() -> None:
    """Chunks of 3 tokens, the last one shorter, from a memory that is not empty; the gradients of one
    chunk by hand."""
    q = torch.rand(8, 4)
    k = torch.rand(8, 4)
    v = torch.randn(8, 3)
    beta = torch.rand(8, 1)
    before = torch.randn(4, 3)
    beta[4] = 0.0
    given = [x.requires_grad_() for x in (q, k, v, beta, before)]
    shaped = [x[None, None] for x in (q, k, v, beta[:, 0], before)]
    real = rules.delta_rule(*shaped, implementation="reference")
    upstream = [torch.randn_like(x[0, 0]) for x in real]
    with torch.no_grad():
        read = delta_rule.read(*given, 3)
        *_, errors = delta_rule.chunk(*given)
        gradients = delta_rule.chunk_backward(q, k, beta, before, errors, *upstream)
    torch.testing.assert_close(read, tuple(x[0, 0] for x in real))
    expected = torch.autograd.grad([x[0, 0] for x in real], given, upstream)
    torch.testing.assert_close(gradients, expected)


def drawn(model: Any) -> Any:
    """With larger weights than at the start of a training; norms stay as they are."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def columns(module: Any, n_heads: int, names: str) -> dict[str, Any]:
    """Weights of products, each cut into those of the heads."""
    return {name: getattr(module, name).weight.T.chunk(n_heads, 1) for name in names.split()}


def layer_of(parts: dict[str, Any], output: Any, feed_forward: Any) -> dict[str, Any]:
    """``parts``: of each head one."""
    heads = zip(*parts.values(), strict=True)
    return {
        "heads": [dict(zip(parts, head, strict=True)) for head in heads],
        "output": output.weight.T,
        "output_bias": output.bias,
        "inner": feed_forward.inner.weight.T,
        "inner_bias": feed_forward.inner.bias,
        "outer": feed_forward.outer.weight.T,
        "outer_bias": feed_forward.outer.bias,
    }


def _layer(model: models.TransformerXL | models.Compressive, n: int) -> dict[str, Any]:
    layer: Any = model.layers[n]
    own = layer.attention
    parts = columns(own, own.n_heads, "query key value position")
    parts |= {"u": own.content_bias, "v": own.position_bias}
    return layer_of(parts, own.output, layer.feed_forward)


def _compressive_layer(model: models.Compressive, n: int) -> dict[str, Any]:
    own: Any = model.layers[n].attention.compression
    if own is None:
        # Of nothing but the rate is asked, by which memory gives slots away.
        return _layer(model, n) | {"f": torch.zeros(model.config.compression_rate, 0)}
    weights = {"f": own.weight.permute(2, 1, 0), "f_bias": own.bias}
    if model.config.auxiliary_loss == "auto-encoding":
        weights |= {"g": own.decoder_weight.permute(2, 0, 1), "g_bias": own.decoder_bias}
    return _layer(model, n) | weights


def _fast_weights_layer(layer: Any) -> dict[str, Any]:
    own = layer.attention
    parts = columns(own, own.n_heads, "query key value") | {"beta": own.beta.weight}
    return layer_of(parts, own.output, layer.feed_forward)


def _plain_layer(layer: Any, own: Any, n_heads: int, **more: Any) -> dict[str, Any]:
    """``own``: the attention, whose output has no bias."""
    parts = columns(own, n_heads, "query key value") | more
    return layer_of(parts, own.output, layer.feed_forward)


def _infini_layer(layer: Any) -> dict[str, Any]:
    own = layer.attention
    return _plain_layer(layer, own, own.config.n_heads, gate=own.gate)


def _feedback_layer(model: models.Feedback, layer: Any) -> dict[str, Any]:
    n_heads = len(layer.content_bias)
    parts = columns(layer, n_heads, "query") | {
        "key": model.key[0].weight.T.chunk(n_heads, 1),
        "value": model.value[0].weight.T.chunk(n_heads, 1),
        "u": layer.content_bias,
        "position_keys": layer.position_keys.unbind(1),
        "position_scores": layer.position_scores.unbind(1),
    }
    return layer_of(parts, layer.output, layer.feed_forward)


def _gated_delta_net_layer(layer: Any) -> dict[str, Any]:
    mixer = layer.mixer
    n = layer.mixer.config.n_heads
    parts = columns(mixer, n, "query key value") | {
        "gate": mixer.output_gate.weight.T.chunk(n, 1),
        "taps": _channels(mixer.config, mixer.convolution),
        "step": mixer.step.weight,
        "beta": mixer.beta.weight,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
    }
    return layer_of(parts, mixer.output, layer.feed_forward)


def _low_rank(part: Any, n: int, name: str) -> dict[str, Any]:
    """The product of low rank ``part``, the second half of it cut into those of the heads."""
    found = {f"{name}_down": [part.down.weight.T] * n}
    found |= {f"{name}_up": part.up.weight.T.chunk(n, 1)}
    return found if part.up.bias is None else found | {f"{name}_bias": part.up.bias.chunk(n)}


def _kda_layer(layer: Any) -> dict[str, Any]:
    mixer = layer.mixer
    n = layer.mixer.config.n_heads
    parts = columns(mixer, n, "query key value") | {
        "taps": _channels(mixer.config, mixer.convolution),
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias.chunk(n),
    }
    if hasattr(mixer, "erase"):
        parts |= columns(mixer, n, "erase write")
    else:
        parts |= {"beta": mixer.beta.weight}
    parts |= _low_rank(mixer.step, n, "step") | _low_rank(mixer.output_gate, n, "gate")
    return layer_of(parts, mixer.output, layer.feed_forward)


def _delta_product_layer(layer: Any) -> dict[str, Any]:
    mixer = layer.mixer
    config = layer.mixer.config
    n = config.n_heads
    names = ("query", "key", "value")
    projections = torch.cat([getattr(mixer, name).weight for name in names])
    by_head = [part.T for part in _channels(config, projections)]
    steps = config.n_householder
    sizes = [config.head_width, steps * config.head_width, steps * config.value_width]
    parts = dict(
        zip(names, zip(*(part.split(sizes, 1) for part in by_head), strict=True), strict=True)
    )
    parts |= {
        "taps": _channels(config, mixer.convolution),
        "beta": mixer.beta.weight.unflatten(0, (steps, n)).permute(1, 2, 0).unbind(),
        "gate": mixer.output_gate.weight.T.chunk(n, 1),
        "step": mixer.step.weight,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
    }
    return layer_of(parts, mixer.output, layer.feed_forward)


def _rwkv_7_layer(layer: Any) -> dict[str, Any]:
    mixer = layer.mixer
    names = ["query", "key", "value", "output"]
    found = {name: getattr(mixer, name).weight.T for name in names}
    parts = {"decay": "decay", "rate": "rate", "gate": "gate"}
    bases = ["decay", "rate"]
    if mixer.mixes_values:
        parts |= {"value": "value_mix"}
        bases += ["value"]
    for name, part in parts.items():
        found[f"{name}_down"] = getattr(mixer, part).down.weight.T
        found[f"{name}_up"] = getattr(mixer, part).up.weight.T
    found |= {f"{name}_base": getattr(mixer, f"{name}_base") for name in bases}
    found |= {name: getattr(mixer, name) for name in ("removal", "replacement", "bonus")}
    return found | {
        "norm": mixer.norm_weight,
        "norm_bias": mixer.norm_bias,
        "shift": dict(mixer.shift.items()),
        "channel_shift": layer.feed_forward.shift,
        "inner": layer.feed_forward.inner.weight.T,
        "outer": layer.feed_forward.outer.weight.T,
    }


def _gla_layer(layer: Any) -> dict[str, Any]:
    mixer = layer.mixer
    n = layer.mixer.config.n_heads
    parts = columns(mixer, n, "query key value") | _low_rank(mixer.decay, n, "decay")
    parts |= {"gate": mixer.output_gate.weight.T.chunk(n, 1)}
    return layer_of(parts, mixer.output, layer.feed_forward)


def _mamba_2_layer(mixer: Any) -> dict[str, Any]:
    parts = {"step": mixer.step.weight, "dt_bias": mixer.dt_bias}
    parts |= {"A_log": mixer.A_log, "D": mixer.D}
    projections = (mixer.query, mixer.key, mixer.value)
    return {
        "heads": [
            dict(zip(parts, head, strict=True)) for head in zip(*parts.values(), strict=True)
        ],
        "CBx": torch.cat([projection.weight for projection in projections]).T,
        "taps": mixer.convolution,
        "taps_bias": mixer.convolution_bias,
        "gate": mixer.output_gate.weight.T,
        "norm": mixer.norm_weight,
        "output": mixer.output.weight.T,
    }


def _by_head(config: Any, memory: Any) -> list[list[Any]]:
    """For each layer and head its matrix and the inputs of its convolutions."""
    layers = zip(memory.weights[0], memory.inputs[0], strict=True)
    return [
        [[own, of_head.T] for own, of_head in zip(matrices, _channels(config, x.T), strict=True)]
        for matrices, x in layers
    ]


def _channels(config: Any, x: Tensor) -> list[Tensor]:
    """Queries, keys and values side by side, ``[C, ...]``, head by head; those of several steps one
    after another."""
    steps = getattr(config, "n_householder", 1)
    parts = []
    for part, n in zip(x.split(config.widths), (1, steps, steps), strict=True):
        by_step = part.unflatten(0, (n, config.n_heads, -1)).transpose(0, 1)
        parts.append(by_step.flatten(1, 2).unbind())
    return [torch.cat(of_head) for of_head in zip(*parts, strict=True)]


def test_feedback_backward() -> None:
    """By hand, by autograd of the smallest version, and by the real one: the same gradients."""
    n_layers = 2
    n_tokens = 7
    d_model = 6
    width = 4
    d_ff = 5
    span = 3
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
    w = {name: torch.randn(shape).double().requires_grad_() for name, shape in shapes.items()}
    x = torch.randn(n_tokens, d_model).double().requires_grad_()
    upstream = torch.randn(2, n_tokens, d_model).double()
    *results, steps = feedback_backward.forward(x, w)
    with torch.no_grad():
        d_x, d = feedback_backward.backward(*upstream, w, steps)
    zeros = x.new_zeros
    one_head = FoldedWeights(
        query=w["query"][:, None],
        query_bias=zeros(n_layers, 1, 1, width),
        position_keys=w["position_keys"].mT[:, None],
        position_scores=w["position_scores"][:, None, None],
        # Their biases, which are zero, are a last row.
        output=pad(w["output"], (0, 0, 0, 1)),
        inner=w["inner"],
        inner_bias=zeros(n_layers, d_ff),
        outer=pad(w["outer"], (0, 0, 0, 1)),
        memory=w["memory"],
        memory_bias=zeros(2 * width),
        mix=w["mix"],
        gains=zeros(0),
        biases=zeros(0),
        norms_memory=True,
    )
    old = zeros(1, 0, d_model)
    real = feedback_recurrence(x[None], old, None, span, one_head)
    for computed in (results, [a[0] for a in real]):
        torch.testing.assert_close(computed, results)
        expected = torch.autograd.grad(computed, [x, *w.values()], [*upstream])
        torch.testing.assert_close([d_x, *d.values()], [*expected])


def test_the_readme_counts_their_lines() -> None:
    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"(\d+)(?:\s+lines)?\]\((docs/annotated/smallest/\w+\.py)\)", text)
    assert len(links) == 5
    for lines, file in links:
        assert len((root / file).read_text(encoding="utf-8").splitlines()) == int(lines)
