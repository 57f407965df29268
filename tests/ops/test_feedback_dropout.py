"""Feedback's dropout: drawn beforehand, the same in every implementation. That these agree, in values
and gradients, is in ``test_feedback_attention.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import Feedback
from memspan.models.feedback import model as feedback
from memspan.models.feedback.config import FeedbackConfig
from memspan.ops.feedback.dropout import RESOLUTION, Dropout, draw

SEGMENT = torch.zeros(8, 9, 24)
SIZES = {"n_layers": 3, "n_heads": 2, "d_ff": 40, "n_slots": 30}


def model_of(**options: Any) -> Feedback:
    torch.manual_seed(0)
    small = {"n_layers": 2, "d_model": 24, "n_heads": 2, "d_ff": 40, "memory_length": 12}
    return Feedback(FeedbackConfig(**small | options))


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_share_kept_and_its_scale(dropout: float) -> None:
    """Of every kind, everywhere in it; on average a number stays what it is."""
    torch.manual_seed(0)
    kept = draw(SEGMENT, **SIZES, dropout=dropout, attention_dropout=1 - dropout)
    for name, factor in zip(Dropout._fields, kept.factors(torch.float64)[:4], strict=False):
        share = dropout if name == "weights" else 1 - dropout
        deviation = (share * (1 - share)) ** 0.5
        mask = getattr(kept, name)
        assert mask.shape == factor.shape
        assert abs(mask.double().mean() - share) < 4 * deviation / mask.numel() ** 0.5, name
        # Whichever of the four numbers in a draw of 64 bits it is.
        for quarter in range(4):
            part = mask.flatten()[quarter::4].double()
            assert abs(part.mean() - share) < 4 * deviation / len(part) ** 0.5, (name, quarter)
        assert set(factor.unique().tolist()) == {0.0, factor.max().item()}
        assert factor.max().item() == pytest.approx(1 / share, abs=1 / share**2 / RESOLUTION)


def test_what_is_dropped() -> None:
    """By the reference: attention weights, what either sub-layer adds, and activations, as drawn."""
    model = model_of(n_layers=1, dropout=0.4, attention_dropout=0.3, attention_bias=True)
    (layer,) = model.layers
    x = torch.randn(3, 24)
    keys, values = torch.randn(2, 3, 2, 5, 12)
    visible = torch.ones(3, 5, dtype=torch.bool)

    def run(**factors: Tensor) -> Tensor:
        return layer(x, keys, values, visible, None, Dropout(**factors))

    nothing = run(attention=torch.zeros(3, 24), feed_forward=torch.zeros(3, 24))
    assert torch.equal(nothing, x)
    fed = run(attention=torch.zeros(3, 24)) - x
    doubled = run(attention=torch.zeros(3, 24), feed_forward=torch.full((3, 24), 2.0)) - x
    assert_same(doubled, 2 * fed, 1e-6, "feed-forward")
    bias = layer.feed_forward.outer.bias.expand(3, -1)
    no_activation = run(attention=torch.zeros(3, 24), activated=torch.zeros(3, 40)) - x
    assert_same(no_activation, bias, 1e-6, "activations")
    no_weights = run(weights=torch.zeros(3, 2, 5), feed_forward=torch.zeros(3, 24)) - x
    assert_same(no_weights, layer.output.bias.expand(3, -1), 1e-6, "attention weights")
    # Factors of fewer slots are those of the nearest.
    masked = torch.tensor([0.0, 1, 0, 2]).expand(3, 2, 4)
    wide = torch.tensor([7.0, 0, 1, 0, 2]).expand(3, 2, 5)
    visible[:, 0] = False
    assert torch.equal(run(weights=masked), run(weights=wide))
    # The stack drops of its input.
    given: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(torch.ones(9, 9, 24), implementation="reference")
    assert abs((torch.stack(given) == 0).double().mean() - 0.4) < 0.05


@pytest.mark.parametrize("normalisation", ["pre", "post"])
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_the_same_is_dropped(
    rate: str, normalisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random state, with and without gradients, in the reference and in the fast path,
    which is the default. In evaluation nothing is drawn."""
    x, model = torch.randn(2, 6, 24), model_of(**{rate: 0.3}, normalisation=normalisation)
    outputs = []
    for implementation in ("reference", "fused", None):
        torch.manual_seed(1)
        outputs.append(model(x, implementation=implementation).hidden)
        assert_same(outputs[-1], outputs[0], 1e-5, str(implementation))
        with torch.no_grad():
            torch.manual_seed(1)
            assert torch.equal(outputs[-1], model(x, implementation=implementation).hidden)
    assert not torch.allclose(model(x).hidden, outputs[-1])
    monkeypatch.setattr(feedback, "feedback_attention", None)
    model(x)
    before, plain = torch.get_rng_state(), model.eval()(x).hidden
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(plain, model_of(normalisation=normalisation)(x).hidden)
    assert not torch.allclose(plain, outputs[0])


def test_learned_spans_drop_in_the_reference() -> None:
    model = model_of(adaptive_span=0.01, dropout=0.3, attention_dropout=0.3)
    x = torch.randn(2, 6, 24)
    assert not torch.allclose(model(x).hidden, model(x).hidden)
    for implementation in ("fused", "compiled"):
        with pytest.raises(MemspanError, match="neither adaptive spans nor changed modules"):
            model(x, implementation=implementation)
