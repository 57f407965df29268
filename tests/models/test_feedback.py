"""The Feedback Transformer beyond the laws: what its memory holds, its span, its reader."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from architectures import feedback
from feedback_models import memory_of, model_of, vectors
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.feedback.config import FeedbackConfig
from memspan.ops.feedback import compiled as feedback_loop


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
    model, other = (model_of(attention_bias=True) for _ in range(2))
    with torch.no_grad():
        for name, parameter in other.layers.named_parameters():
            if "feed_forward" not in name:
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


def test_spans_that_are_refused() -> None:
    """In the config, in a new memory, and in a memory that another model made."""
    model = model_of(memory_length=5, max_distance=8)
    x = vectors(2, 3)
    model(x, model.initial_memory(2, memory_length=8))
    long = model_of(memory_length=9).initial_memory(2)
    for says, attempt in (
        ("exceeds the position", lambda: FeedbackConfig(memory_length=9, max_distance=8)),
        ("span", lambda: model.initial_memory(2, memory_length=9)),
        ("span", lambda: model(x, long)),
        ("span", lambda: model.reader(long, 2)),
        ("must be at least 1, not 0", lambda: model.initial_memory(2, memory_length=0)),
    ):
        with pytest.raises(MemspanError, match=says) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_span_may_change_at_evaluation() -> None:
    """As a model made with that span, the weights being the same."""
    wide, own = (feedback(memory_length=span, max_distance=9).model() for span in (3, 7))
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


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    ("kind", "normalisation"), [("full", "pre"), ("rows", "pre"), ("rows", "post")]
)
def test_a_reader_reads_segments_and_tokens_alike(
    kind: str, normalisation: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long segments, short ones and single tokens, in turn: the model's outputs and memory."""
    if not compiled:
        monkeypatch.setattr(feedback_loop, "available", lambda like: False)
    options = {"attention_bias": True, "normalisation": normalisation}
    model = model_of(memory_length=12, dropout=0.1, **options).eval()
    memory = memory_of(model, kind, 3)
    x = vectors(3, 90)
    reader = model.reader(memory, 3)
    at = 0
    for n in (20, 20, 3, 1, 30, 8, 7, 1):
        out = model(x[:, at : at + n], memory, implementation="reference")
        assert_same(reader.read(x[:, at : at + n]), out.hidden, 1e-9, f"{n} tokens at {at}")
        memory = out.memory
        at = at + n
        assert_same(reader.memory.vectors, memory.vectors, 1e-9, "vectors")
        assert torch.equal(reader.memory.length, memory.length)
        assert torch.equal(reader.memory.tokens_seen, memory.tokens_seen)


def test_memory_does_not_grow_without_bound() -> None:
    """Normalised before it is projected, a memory vector answers large weights with no more of them."""
    for option, bounded in ((True, True), (False, False)):
        model = model_of(memory_norm=option, memory_vector="last").eval()
        with torch.no_grad():
            for layer in model.layers:
                layer.output.weight.mul_(5)
            out = model(vectors(1, 300))
            memory = model.initial_memory(1)
            largest = out.memory.vectors.abs().max()
            reader = model.reader(memory, 1)
            assert_same(reader.read(vectors(1, 300)), out.hidden, 1e-6, "reader")
        assert (largest < 1e3) == bounded, largest


@torch.no_grad()
def test_a_call_that_could_not_be_prepared_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of().eval()
    x = vectors(2, 8)
    reader = model.reader(None, 2)
    reader.read(x[:, :5])

    def full(*_: object) -> None:
        raise MemspanError("this machine's memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(reader._loop.loops, "prepare", full)
        with pytest.raises(MemspanError, match="is full"):
            reader.read(x[:, 5:])
    assert_same(reader.read(x[:, 5:]), model(x).hidden[:, 5:], 1e-12, "again")
