"""What architectures say about their attention, and about what they write."""

from __future__ import annotations

import pytest
import torch

from architectures import CASES
from memspan.models import FastWeights

RELATIVE = ["xl-segment", "xl-fixed", "compressive", "feedback", "feedback-last-post"]


@pytest.mark.parametrize("name", RELATIVE)
def test_attention_is_all_there_and_none_in_the_future(name: str) -> None:
    backbone = CASES[name].model().backbone
    x = torch.randn(2, 12, backbone.config.d_model, dtype=torch.double)
    with torch.no_grad():
        memory = backbone(x[:, :7]).memory
    found = backbone.attention_weights(x[:, 7:], memory)
    assert found is not None
    assert len(found.layers) == backbone.config.n_layers
    kinds = torch.stack([keys.expand(2, -1) for keys in found.kinds.values()])
    assert (kinds.sum(0) == 1).all()
    for weights in found.layers:
        assert torch.allclose(weights.sum(-1), torch.ones((), dtype=torch.double))
        distances = found.distances.expand(2, *weights.shape[2:])[:, None].expand_as(weights)
        assert (weights[distances < 0] == 0).all()
        # Nothing was read before the first token.
        age = 7 + torch.arange(5)[:, None]
        assert (weights[distances > age] < 1e-12).all()


def test_compressed_slots_stand_for_the_middle_of_their_tokens() -> None:
    case = CASES["compressive"]
    backbone = case.model().backbone
    rate, slots = backbone.config.compression_rate, backbone.config.memory_length
    x = torch.randn(1, slots + rate + 1, backbone.config.d_model, dtype=torch.double)
    with torch.no_grad():
        memory = backbone(x[:, :-1]).memory
    found = backbone.attention_weights(x[:, -1:], memory)
    assert found is not None
    assert int(memory.compressed_length) == 1
    oldest = found.kinds["compressed"][0].nonzero().max()
    # The first c of slots + c tokens, seen from the next one.
    assert found.distances[0, 0, oldest] == slots + (rate + 1) / 2


@pytest.mark.parametrize(
    "name", ["fast-delta", "fast-sum", "fast-sum-attention", "fast-delta-elu-attention"]
)
def test_what_is_kept_of_a_value_is_what_its_write_still_adds(name: str) -> None:
    """The same tokens are read from memories with and without the first token's write."""
    backbone = CASES[name].model().backbone
    assert isinstance(backbone, FastWeights)
    layer = next(backbone.stack())
    x = torch.randn(2, 9, backbone.config.d_model, dtype=torch.double)
    with torch.no_grad():
        memory = backbone(torch.randn(2, 5, backbone.config.d_model, dtype=torch.double)).memory
        attention, z = layer.attention, memory.key_sum[:, 0]
        found = attention.retention(x, z)
        q, k, v, beta = attention.project(x)

        def read(first: int, last: int, weights: torch.Tensor, z: torch.Tensor):
            part = slice(first, last)
            rest = (t[:, :, part] for t in (q, k, v))
            b = None if beta is None else beta[:, :, part]
            return attention.write_and_read(*rest, b, weights, z, "reference")[1:]

        before = memory.weights[:, 0]
        with_it, z_after = read(0, 1, before, z)
        f = attention.features(k)[:, :, 0]
        written = torch.einsum("bhf,bhfv->bhv", f, with_it - before)
        for n in range(1, 9):
            one, z_n = read(1, n + 1, with_it, z_after)
            other, _ = read(1, n + 1, before, z_after)
            left = torch.einsum("bhf,bhfv->bhv", f, one - other)
            if backbone.config.normalisation == "attention":
                by_query = [(f * s).sum(-1) + backbone.config.epsilon for s in (z_after, z_n)]
                left = left * (by_query[0] / by_query[1])[..., None]
            share = (left * written).sum(-1) / (written * written).sum(-1)
            assert torch.allclose(found[:, :, n], share, atol=1e-5)
