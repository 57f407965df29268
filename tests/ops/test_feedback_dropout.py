"""Feedback's dropout: drawn beforehand, the same in every implementation. That these agree, in values
and gradients, is in ``test_feedback_attention.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from feedback_models import model_of, vectors
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models.feedback import layer as feedback_layer
from memspan.ops.feedback.dropout import RESOLUTION, Dropout, draw


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_the_mean(dropout: float) -> None:
    """Dropout of every kind; on average a number stays what it is."""
    sizes = {"n_layers": 3, "n_heads": 2, "d_ff": 40, "n_slots": 30}
    segment = torch.zeros(8, 9, 24)
    kept = draw(segment, **sizes, dropout=dropout, attention_dropout=1 - dropout)
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
    assert draw(segment, **sizes, dropout=0, attention_dropout=0) == Dropout()


def test_dropout_acts_where_the_reference_says() -> None:
    """By the reference: attention weights, what either sub-layer adds, and activations, as drawn."""
    model = model_of(n_layers=1, dropout=0.4, attention_dropout=0.3, attention_bias=True)
    (layer,) = model.layers
    x = vectors(3, 1)[:, 0]
    keys, values = torch.randn(2, 3, 2, 5, 3).double()
    visible = torch.ones(3, 5, dtype=torch.bool)

    def added(**factors: Tensor) -> Tensor:
        return layer(x, keys, values, visible, None, Dropout(**factors)) - x

    none = torch.zeros(3, 6)
    assert not added(attention=none, feed_forward=none).any()
    fed, doubled = (added(attention=none, feed_forward=none + n) for n in (1, 2))
    assert_same(doubled, 2 * fed, 1e-6, "feed-forward")
    no_activation = added(attention=none, activated=torch.zeros(3, 8))
    bias = layer.feed_forward.outer.bias
    assert_same(no_activation, bias.expand(3, -1), 1e-6, "activations")
    no_weights = added(weights=torch.zeros(3, 2, 5), feed_forward=none)
    assert_same(no_weights, layer.output.bias.expand(3, -1), 1e-6, "attention weights")
    # Factors of fewer slots are those of the nearest.
    masked = torch.tensor([0.0, 1, 0, 2]).expand(3, 2, 4)
    wide = torch.tensor([7.0, 0, 1, 0, 2]).expand(3, 2, 5)
    visible[:, 0] = False
    assert torch.equal(added(weights=masked), added(weights=wide))
    # The stack drops of its input.
    given: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(torch.ones(40, 9, 6).double(), implementation="reference")
    assert abs((torch.stack(given) == 0).double().mean() - 0.4) < 0.05


@pytest.mark.parametrize("normalisation", ["pre", "post"])
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_draws_are_those_of_the_random_state_and_of_training(
    rate: str, normalisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without gradients. The fast path is the default. In evaluation nothing is drawn."""
    x = vectors(2, 6)
    model = model_of(**{rate: 0.3}, normalisation=normalisation)

    def drawn(seed: int = 1, implementation: str | None = None) -> Tensor:
        torch.manual_seed(seed)
        return model(x, implementation=implementation).hidden

    for implementation in ("reference", "fused", None):
        recorded = drawn(implementation=implementation)
        with torch.no_grad():
            assert torch.equal(drawn(implementation=implementation), recorded)
        assert_same(recorded, drawn(), 1e-5, str(implementation))
    assert not torch.allclose(drawn(2), recorded)
    monkeypatch.setattr(feedback_layer, "feedback_attention", None)
    drawn()
    before = torch.get_rng_state()
    plain = model.eval()(x).hidden
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(plain, model_of(normalisation=normalisation)(x).hidden)
    assert not torch.allclose(plain, recorded)


def test_learned_spans_drop_in_the_reference() -> None:
    model = model_of(adaptive_span=0.01, dropout=0.3, attention_dropout=0.3)
    x = vectors(2, 6)
    assert not torch.allclose(model(x).hidden, model(x).hidden)
    for implementation in ("fused", "compiled"):
        with pytest.raises(MemspanError, match="neither adaptive spans nor changed modules"):
            model(x, implementation=implementation)
