"""Feedback: attention against the equation, the fused recurrence against the reference."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import feedback, randomise
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import Feedback, FeedbackMemory, LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.ops.feedback import compiled as feedback_loop
from memspan.ops.feedback.attention import Distances, feedback_attention, span_mask
from memspan.ops.native import compiler, threads

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-memory-norm": {"memory_norm": False, "attention_bias": True},
    "bias": {"attention_bias": True, "n_layers": 3},
    "per-layer": {"projections": "per-layer", "attention_bias": True},
    "gelu": {"activation": "gelu", "d_head": 3},
    "last": {"memory_vector": "last", "n_layers": 1},
    "mean": {"memory_vector": "mean", "n_layers": 1, "final_norm": False},
    "short": {"memory_length": 3, "max_distance": 7},
    "shortest": {"memory_length": 1},
}
# With a norm or dropout after the sub-layers.
AFTER: dict[str, dict[str, Any]] = {
    "post": {"normalisation": "post", "attention_bias": True},
    "post-gelu": {"normalisation": "post", "activation": "gelu", "projections": "per-layer"},
    "dropout": {"dropout": 0.3, "attention_dropout": 0.2, "memory_vector": "last"},
    "dropout-post": {"dropout": 0.3, "attention_dropout": 0.2, "normalisation": "post"},
    "dropout-gelu": {"dropout": 0.3, "activation": "gelu", "projections": "per-layer"},
    "attention-dropout": {"attention_dropout": 0.4, "memory_length": 3, "memory_vector": "mean"},
}


fast = pytest.mark.parametrize(
    "implementation",
    [
        "fused",
        pytest.param(
            "compiled",
            marks=pytest.mark.skipif(
                not feedback_loop.available(torch.zeros(())), reason="no C compiler"
            ),
        ),
    ],
)


def model_of(**options: Any) -> Feedback:
    small = {"n_layers": 2, "d_model": 6, "n_heads": 2, "d_ff": 8, "memory_length": 40}
    model = Feedback(FeedbackConfig(**small | options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = name.endswith("weight") and "norm" in name
            parameter.copy_(1 + 0.2 * noise if gain else 0.3 * noise)
    return model.double()


def ordinary_model(**options: Any) -> Feedback:
    sizes = {"n_layers": 2, "d_model": 72, "n_heads": 3, "d_ff": 100, "memory_length": 45}
    return Feedback(FeedbackConfig(**sizes | options))


def vectors(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 6, generator=generator, dtype=torch.float64)


def memory_of(model: Feedback, kind: str, rows: int) -> FeedbackMemory:
    """Empty; as long as the span; rows of different ages, one of which has none."""
    if kind == "empty":
        return model.initial_memory(rows)
    with torch.no_grad():
        if kind == "full":
            return model(vectors(rows, model.config.memory_length + 3, 5)).memory
        memory = model(vectors(rows, 5, 6)).memory.reset(torch.arange(rows) == 1)
        return model(vectors(rows, 2, 7), memory).memory.reset(torch.arange(rows) == 2)


def everything(
    model: Feedback, x: Tensor, memory: FeedbackMemory, cuts: list[int], implementation: Any
) -> dict[str, Tensor]:
    """Outputs, the final memory, and the gradient of a random function of both, by name; dropout draws
    the same in every call."""
    x = x.clone().requires_grad_()
    start = memory.vectors.clone().requires_grad_()
    memory = FeedbackMemory(memory.tokens_seen, start, memory.length)
    torch.manual_seed(3)
    hidden = []
    for segment in x.split(cuts, 1):
        out = model(segment, memory, implementation=implementation)
        hidden.append(out.hidden)
        memory = out.memory
    h = torch.cat(hidden, 1)
    generator = torch.Generator().manual_seed(9)
    loss = sum(
        (t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum()
        for t in (h, memory.vectors)
    )
    named = dict(model.named_parameters()) | {"x": x, "memory": start}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {"hidden": h, "vectors": memory.vectors, "length": memory.length}
    return found | {
        f"gradient of {name}": torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }


def test_attention_is_the_equation() -> None:
    """Element by element; a row that sees a part, and one that sees nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, r, s, u = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 4), (3, 2, 5, 4), (3, 2, 5, 4), (7, 2, 4), (7, 2), (2, 4))
    )
    visible = torch.arange(5) >= torch.tensor([0, 3, 5])[:, None]
    out = feedback_attention(q, k, v, Distances(r, s), u, visible)
    for b, h in itertools.product(range(3), range(2)):
        weights = {}
        for j in range(5):
            if visible[b, j]:
                d = 5 - j
                score = (q[b, h] + u[h]) @ k[b, h, j] + q[b, h] @ r[d - 1, h] + s[d - 1, h]
                weights[j] = math.exp(score.item() / 2)
        expected = sum((w * v[b, h, j] for j, w in weights.items()), torch.zeros(4).double())
        assert_same(out[b, h], expected / max(sum(weights.values()), 1e-300), 1e-12, "attention")
    assert not out[2].any()


def test_learned_spans() -> None:
    """Weights fade out by distance and sum to one; spans that grow are penalised; ratios come back."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, r, s, u = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((1, 2, 4), (1, 2, 7, 4), (1, 2, 7, 4), (7, 2, 4), (7, 2), (2, 4))
    )
    mask = span_mask(torch.tensor([0.0, 1.5]).double(), 2, 7)
    rows = [[1, 0.5, 0, 0, 0, 0, 0], [1, 1, 0.75, 0.25, 0, 0, 0]]
    assert torch.equal(mask, torch.tensor(rows).double())
    out = feedback_attention(q, k, v, Distances(r, s, mask), u, torch.ones(1, 7, dtype=torch.bool))
    for h, row in enumerate(rows):
        scores = [
            (q[0, h] + u[h]) @ k[0, h, -d] + q[0, h] @ r[d - 1, h] + s[d - 1, h]
            for d in range(1, 8)
        ]
        weights = torch.stack(scores).div(2).exp() * torch.tensor(row)
        expected = (weights / weights.sum()) @ v[0, h].flip(0)
        assert_same(out[0, h], expected, 1e-6, "attention")

    model = model_of(memory_length=8, adaptive_span=0.01, span_ramp=2, attention_bias=True)
    with torch.no_grad():
        for layer in model.layers:
            layer.span_ratio.copy_(torch.tensor([0.25, -0.5]))
    out = model(vectors(2, 9))
    # Two layers whose heads look 2 and 0 tokens back before the ramp.
    assert_same(out.auxiliary_loss, torch.tensor(2 * 0.01 * 1.0), 1e-6, "penalty")
    out.hidden.square().sum().backward()
    assert all(layer.span_ratio.grad.all() for layer in model.layers)


MEMORIES = [("empty", 1), ("empty", 20), ("full", 1), ("full", 20), ("rows", 2), ("rows", 63)]


@fast
@pytest.mark.parametrize(
    ("options", "kind", "n_tokens"),
    [
        *(pytest.param(o, *m, id=f"{i}-{m}") for i, o in OPTIONS.items() for m in MEMORIES),
        *(pytest.param(o, "empty", 20, id=f"{i}-empty") for i, o in AFTER.items()),
        pytest.param(AFTER["dropout-post"], "empty", 1, id="dropout-post-one-token"),
        *(pytest.param(o, "rows", 33, id=f"{i}-rows") for i, o in AFTER.items()),
    ],
)
def test_fast_paths_equal_the_reference(
    options: dict[str, Any], kind: str, n_tokens: int, implementation: Any
) -> None:
    """Outputs, final memory and every gradient, the initial memory's too."""
    model = model_of(**options)
    memory, x = memory_of(model, kind, 3), vectors(3, n_tokens)
    fused = everything(model, x, memory, [n_tokens], implementation)
    expected = everything(model, x, memory, [n_tokens], "reference")
    for name, tensor in expected.items():
        assert_same(fused[name], tensor, 1e-9, name)


@fast
@pytest.mark.parametrize("kind", ["empty", "rows"])
def test_fast_paths_over_200_tokens_and_cuts(kind: str, implementation: Any) -> None:
    """Longer than the span; in one call, and in segments with gradients through their memories."""
    model = model_of(projections="per-layer" if kind == "rows" else "shared")
    memory, x = memory_of(model, kind, 3), vectors(3, 200)
    expected = everything(model, x, memory, [200], "reference")
    for cuts in ([200], [1, 2, 63, 134], [50] * 4):
        fused = everything(model, x, memory, cuts, implementation)
        for name, tensor in expected.items():
            assert_same(fused[name], tensor, 1e-9, f"{name} with cuts {cuts}")


@fast
@pytest.mark.parametrize("options", [{}, AFTER["dropout-post"]], ids=["pre", "dropout-post"])
def test_gradients_are_numeric_ones(options: dict[str, Any], implementation: Any) -> None:
    model = model_of(memory_length=3, attention_bias=True, **options)
    memory = memory_of(model, "rows", 3)
    names, values = zip(*model.named_parameters(), strict=True)

    def run(x: Tensor, start: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, parameters, strict=True))
        start = FeedbackMemory(memory.tokens_seen, start, memory.length)
        torch.manual_seed(4)
        out = torch.func.functional_call(
            model, given, (x, start), {"implementation": implementation}
        )
        return out.hidden, out.memory.vectors

    inputs = [vectors(3, 4), memory.vectors, *values]
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(run, tuple(inputs), fast_mode=True)


# ----- What breaks where state is shared between calls


def gradients(model: Feedback, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def test_forwards_before_a_backward() -> None:
    """Two graphs, an evaluation and a reader in between, backward in the other order, and twice."""
    model = model_of()
    a, b = vectors(2, 9), vectors(2, 12, 1)
    expected = [gradients(model, model(x).hidden.square().sum()) for x in (a, b)]
    losses = [model(x).hidden.square().sum() for x in (a, b)]
    with torch.no_grad():
        model.eval()(vectors(5, 20, 2))
        model.reader(None, 2).read(vectors(2, 7, 3))
        model.train()
    for _ in range(2):
        for loss, wanted in zip(reversed(losses), reversed(expected), strict=True):
            for ours, theirs in zip(gradients(model, loss), wanted, strict=True):
                assert torch.equal(ours, theirs)


def test_copies_and_dtypes() -> None:
    """A copy made after a forward is its own; a changed dtype takes effect at once, and back."""
    model = model_of()
    x = vectors(2, 9)
    loss = model(x).hidden.square().sum()
    expected = gradients(model, loss)
    other = copy.deepcopy(model)
    for ours, theirs in zip(
        gradients(other, other(x).hidden.square().sum()), expected, strict=True
    ):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    for ours, theirs in zip(gradients(model, loss), expected, strict=True):
        assert torch.equal(ours, theirs)
    exact = model(x)
    rough = model.float()(x.float())
    assert rough.hidden.dtype == rough.memory.vectors.dtype == torch.float32
    assert_same(rough.hidden, exact.hidden, 1e-4, "float32")
    rough.hidden.sum().backward()
    assert model.double()(x).hidden.dtype == torch.float64


def test_writing_over_the_output_changes_no_gradient() -> None:
    model = model_of(final_norm=False)
    x = vectors(2, 5).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).hidden.sum(), x)
    out = model(x)
    loss = out.hidden.sum()
    with torch.no_grad():
        out.hidden.zero_()
        out.memory.vectors.zero_()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


# ----- Which implementation, and what is refused


@fast
@pytest.mark.parametrize("options", [{}, AFTER["dropout-post"]], ids=["pre", "dropout-post"])
def test_the_fast_paths_at_an_ordinary_size(options: dict[str, Any], implementation: Any) -> None:
    """Wide enough for every vector and remainder, in both precisions; more rows than fit at once."""
    torch.manual_seed(0)
    model = ordinary_model(**options)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        model = model.to(dtype)
        x = torch.randn(7, 61, 72, dtype=dtype)
        with torch.no_grad():
            memory = model(x).memory
            outputs = []
            for name in ("reference", implementation):
                torch.manual_seed(1)
                outputs.append(model(x, memory, implementation=name))
            expected, out = outputs
        assert_same(out.hidden, expected.hidden, tolerance, "hidden")
        assert_same(out.memory.vectors, expected.memory.vectors, tolerance, "vectors")


def single_precision(options: dict[str, Any], implementation: str) -> dict[str, Tensor]:
    """Outputs and gradients of 7 rows in float32."""
    torch.manual_seed(0)
    model = ordinary_model(**options)
    x = torch.randn(7, 21, 72).requires_grad_()
    memory = model(x[:, :5].detach()).memory.detach().reset(torch.arange(7) == 1)
    out = model(x, memory, implementation=implementation)
    loss = out.hidden.sin().sum() + out.memory.vectors.cos().sum()
    named = dict(model.named_parameters()) | {"x": x}
    found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    return found | {"hidden": out.hidden, "vectors": out.memory.vectors}


@fast
@pytest.mark.parametrize("options", [AFTER["dropout"], AFTER["dropout-post"]], ids=["pre", "post"])
def test_dropout_in_single_precision(options: dict[str, Any], implementation: Any) -> None:
    """Each gradient by itself, since a large one would hide a small one."""
    expected = single_precision(options, "reference")
    for name, found in single_precision(options, implementation).items():
        assert_same(found, expected[name], 2e-5, name)


@pytest.mark.skipif(not feedback_loop.available(torch.zeros(())), reason="no C compiler")
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread, and with 7 rows and 6 pairs of a layer and a head in 2 and in 4."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    results = []
    for n in (1, 2, 4):
        # Only of the loops: PyTorch's own products may add in another order.
        monkeypatch.setattr(threads.torch, "get_num_threads", lambda n=n: n)
        results.append(single_precision(AFTER["dropout"], "compiled"))
    for result in results[1:]:
        assert all(map(torch.equal, result.values(), results[0].values()))


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch serves, and asking for the compiled loop says what is missing."""
    monkeypatch.setattr(compiler, "functions", compiler.functions.__wrapped__)
    model = Feedback(FeedbackConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8))
    x = torch.randn(2, 3, 8)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    for change in ({"MEMSPAN_COMPILE": "0"}, {"CC": "no-such-compiler"}, {"CC": str(broken)}):
        with monkeypatch.context() as patch:
            for name, value in ({"MEMSPAN_CACHE": str(tmp_path / "cache")} | change).items():
                patch.setenv(name, value)
            assert torch.equal(model(x).hidden, model(x, implementation="fused").hidden)
            with pytest.raises(MemspanError, match=r"needs a CPU.* C compiler"):
                model(x, implementation="compiled")


def test_memory_vectors_are_the_mix_of_states() -> None:
    """By learned weights, the last layer's, or the mean."""
    x = vectors(2, 4)
    for option in ("learned", "last", "mean"):
        model = model_of(memory_vector=option, n_layers=2, final_norm=False)
        states: list[Tensor] = []
        for layer in model.layers:
            layer.register_forward_hook(lambda _, args, out, s=states: s.append(out))
        out = model(x, implementation="reference")
        first, second = (torch.stack(states[n::2], 1) for n in range(2))
        assert torch.equal(second, out.hidden)
        weights = {"last": [0.0, 0.0, 1.0], "mean": [1 / 3] * 3}.get(option)
        if weights is None:
            weights = model.layer_weights.softmax(0).tolist()
        mixed = weights[0] * x + weights[1] * first + weights[2] * second
        assert_same(out.memory.vectors[:, -4:], mixed, 1e-12, option)


def test_the_first_token_attends_to_nothing() -> None:
    """Its output does not depend on the attention at all, biases included."""
    model = model_of(attention_bias=True)
    other = model_of(attention_bias=True)
    with torch.no_grad():
        for layer in other.layers:
            for name, parameter in layer.named_parameters():
                if not name.startswith("feed_forward"):
                    parameter.add_(torch.randn_like(parameter))
    x = vectors(2, 2)
    for implementation in ("reference", "fused"):
        a, b = (m(x, implementation=implementation).hidden for m in (model, other))
        assert torch.equal(a[:, 0], b[:, 0])
        assert not torch.allclose(a[:, 1], b[:, 1])


def test_a_token_sees_exactly_the_span() -> None:
    """One layer, memory of the embedding alone: a token S back matters, one S + 1 back does not."""
    model = model_of(n_layers=1, memory_length=4, memory_vector="learned")
    with torch.no_grad():
        model.layer_weights.copy_(torch.tensor([0.0, -1e9]))
    x = vectors(1, 12)
    for back, matters in ((1, True), (4, True), (5, False)):
        changed = x.clone()
        changed[:, 11 - back] = vectors(1, 1, 8)[:, 0]
        same = torch.allclose(model(x).hidden[:, 11], model(changed).hidden[:, 11])
        assert same != matters, back


def test_a_span_beyond_the_table_is_refused() -> None:
    """In the config, in a new memory, and in a memory that another model made."""
    with pytest.raises(MemspanError, match="exceeds the position table"):
        FeedbackConfig(memory_length=9, max_distance=8)
    model = model_of(memory_length=5, max_distance=8)
    x = vectors(2, 3)
    model(x, model.initial_memory(2, memory_length=8))
    long = model_of(memory_length=9).initial_memory(2)
    attempts = (
        lambda: model.initial_memory(2, memory_length=9),
        lambda: model(x, long),
        lambda: model.reader(long, 2),
    )
    for attempt in attempts:
        with pytest.raises(MemspanError, match="span") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    with pytest.raises(MemspanError, match="memory_length must be at least 1, not 0"):
        model.initial_memory(2, memory_length=0)


def test_span_may_change_at_evaluation() -> None:
    """As a model made with that span, the weights being the same."""
    wide = randomise(LanguageModel(11, feedback(memory_length=3, max_distance=9).backbone)).double()
    own = randomise(LanguageModel(11, feedback(memory_length=7, max_distance=9).backbone)).double()
    wide.eval(), own.eval()
    tokens = torch.arange(20)[None] % 11
    memory = wide.initial_memory(1, memory_length=7)
    assert_same(wide(tokens, memory).logits, own(tokens).logits, 1e-12, "model")
    assert_same(wide.reader(memory).read(tokens), own(tokens).logits, 1e-9, "reader")
    assert not torch.allclose(wide(tokens).logits, own(tokens).logits)


def test_zeros_are_attended() -> None:
    """The start of the authors' code: S memory vectors that hold nothing but count."""
    model = model_of()
    zeros = model.initial_memory(2, start="zeros")
    assert zeros.length.tolist() == [40, 40]
    assert not zeros.vectors.any()
    x = vectors(2, 3)
    assert not torch.allclose(model(x, zeros).hidden, model(x).hidden)
    for implementation in ("reference", "fused"):
        out = model(x, zeros, implementation=implementation).hidden
        assert_same(out, model.reader(zeros, 2).read(x), 1e-9, implementation)


def test_a_reader_keeps_keys_and_values_once() -> None:
    """Shared projections: their size does not depend on the number of layers."""
    sizes = {}
    for n_layers, projections in itertools.product((1, 4), ("shared", "per-layer")):
        model = model_of(n_layers=n_layers, projections=projections).eval()
        with torch.no_grad():
            sizes[projections, n_layers] = model.reader(None, 1)._kv.numel()
    assert sizes["shared", 4] == sizes["shared", 1] == sizes["per-layer", 1]
    assert sizes["per-layer", 4] == 4 * sizes["shared", 1]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    ("kind", "normalisation"),
    [("empty", "pre"), ("full", "pre"), ("rows", "pre"), ("rows", "post")],
)
def test_a_reader_reads_segments_and_tokens_alike(
    kind: str, normalisation: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long segments, short ones and single tokens, in turn: the model's outputs and memory."""
    if not compiled:
        monkeypatch.setattr(feedback_loop, "available", lambda like: False)
    options = {"attention_bias": True, "normalisation": normalisation}
    model = model_of(memory_length=12, dropout=0.1, **options).eval()
    memory, x = memory_of(model, kind, 3), vectors(3, 90)
    reader = model.reader(memory, 3)
    at = 0
    for n in (1, 20, 3, 1, 30, 8, 7, 20):
        out = model(x[:, at : at + n], memory, implementation="reference")
        assert_same(reader.read(x[:, at : at + n]), out.hidden, 1e-9, f"{n} tokens at {at}")
        memory, at = out.memory, at + n
        assert_same(reader.memory.vectors, memory.vectors, 1e-9, "vectors")
        assert torch.equal(reader.memory.length, memory.length)
        assert torch.equal(reader.memory.tokens_seen, memory.tokens_seen)


@pytest.mark.parametrize("options", [{}, {"normalisation": "post"}], ids=["pre", "post"])
@torch.no_grad()
def test_nothing_to_read(options: dict[str, Any]) -> None:
    """No tokens: an empty result and the same memory. No rows: as many columns as were given."""
    model = model_of(memory_length=4, **options).eval()
    starts = torch.zeros(3, 0, dtype=torch.bool)
    for memory in (None, memory_of(model, "rows", 3)):
        expected = model.initial_memory(3) if memory is None else memory
        reader = model.reader(memory, 3)
        out = model(vectors(3, 0), memory, starts=starts, lengths=torch.zeros(3, dtype=torch.long))
        for hidden, after in (
            (out.hidden, out.memory),
            (reader.read(vectors(3, 0)), reader.memory),
        ):
            assert hidden.shape == (3, 0, 6)
            assert all(map(torch.equal, vars(after).values(), vars(expected).values()))
    memory = model.initial_memory(0)
    out, reader = model(vectors(0, 5), memory), model.reader(memory, 0)
    assert out.hidden.shape == reader.read(vectors(0, 5)).shape == (0, 5, 6)
    assert out.memory.vectors.shape == reader.memory.vectors.shape == (0, 4, 6)


def test_memory_does_not_grow_without_bound() -> None:
    """Normalised before it is projected, a memory vector answers large weights with no more of them."""
    for option, bounded in ((True, True), (False, False)):
        model = model_of(memory_norm=option, memory_vector="last").eval()
        with torch.no_grad():
            for layer in model.layers:
                layer.output.weight.mul_(5)
            out, memory = model(vectors(1, 300)), model.initial_memory(1)
            largest = out.memory.vectors.abs().max()
            reader = model.reader(memory, 1)
            assert_same(reader.read(vectors(1, 300)), out.hidden, 1e-6, "reader")
        assert (largest < 1e3) == bounded, largest


@pytest.mark.skipif(not feedback_loop.available(torch.zeros(())), reason="no C compiler")
@pytest.mark.parametrize("failing", ["prepare", "forward", "backward", "position_gradients"])
def test_the_compiled_loop_says_that_memory_is_full(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = feedback_loop.compiler.functions(feedback_loop.SOURCE, torch.float32, False)
    names = ("prepare", "forward", "backward", "position_gradients", "release")
    functions = {name: staticmethod(getattr(code, name)) for name in names}
    functions[failing] = staticmethod(lambda *_: 0)
    full = type("Full", (), functions)
    model = Feedback(FeedbackConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4))
    monkeypatch.setattr(feedback_loop.compiler, "functions", lambda *_: full)
    with pytest.raises(MemspanError, match="memory is full: use a smaller batch"):
        model(torch.randn(1, 3, 8), implementation="compiled").hidden.sum().backward()
