"""Architectures' reports on their attention, and on what they write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import CASES
from memspan.lab.measurement import inside
from memspan.lab.measurement.subject import Budget
from memspan.models import FastWeights
from memspan.models.defaults import AttentionWeights, WriteRetention

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
    rate = backbone.config.compression_rate
    slots = backbone.config.memory_length
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
@torch.no_grad()
def test_retention_matches_remaining_write(name: str) -> None:
    """The same tokens are read from memories with and without the first token's write."""
    backbone = CASES[name].model().backbone
    assert isinstance(backbone, FastWeights)
    attention = next(backbone.stack()).attention
    before, x = torch.randn(2, 14, backbone.config.d_model, dtype=torch.double).split((5, 9), 1)
    memory = backbone(before).memory
    weights = memory.weights[:, 0]
    z = memory.key_sum[:, 0]
    found = attention.retention(x, z)
    projected = attention.project(x)
    f = attention.features(projected[1])[:, :, 0]

    def read(part: slice, *state: Tensor) -> tuple[Tensor, Tensor]:
        given = (None if t is None else t[:, :, part] for t in projected)
        return attention.write_and_read(*given, *state, "reference")[1:]

    written, z_after = read(slice(0, 1), weights, z)
    added = torch.einsum("bhf,bhfv->bhv", f, written - weights)
    for n in range(1, 9):
        (one, z_n), (other, _) = (
            read(slice(1, n + 1), start, z_after) for start in (written, weights)
        )
        left = torch.einsum("bhf,bhfv->bhv", f, one - other)
        if backbone.config.normalisation == "attention":
            by_query = [(f * s).sum(-1) + backbone.config.epsilon for s in (z_after, z_n)]
            left = left * (by_query[0] / by_query[1])[..., None]
        share = (left * added).sum(-1) / (added * added).sum(-1)
        assert torch.allclose(found[:, :, n], share, atol=1e-5)


def looking(
    monkeypatch: pytest.MonkeyPatch, look: str, found: object
) -> tuple[Any, list[tuple[int, ...]]]:
    """A run of 100 tokens whose backbone always says the same, and of every look history and tokens;
    nothing is read for them."""
    seen: list[tuple[int, ...]] = []

    def after_history(subject: Any, draws: Any, *sizes: int) -> tuple[None, None]:
        seen.append(sizes)
        return None, None

    monkeypatch.setattr(inside, "after_history", after_history)
    model = SimpleNamespace(backbone=SimpleNamespace(**{look: lambda x, memory: found}))
    return SimpleNamespace(segment_length=2, tokens=range(100), model=model), seen


def test_attention_is_added_up_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows and heads, two tokens and three keys, one of them in memory, summed by hand."""
    mean = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.375, 0.125]])
    apart = torch.tensor([0.125, 0.0, -0.125])
    weights = torch.stack([mean + apart, mean - apart]).expand(2, -1, -1, -1)
    distances = torch.tensor([[2.0, 1.0, 0.0], [3.0, 2.0, 1.0]])[None]
    in_memory = torch.tensor([[True, False, False]])
    said = AttentionWeights([weights], distances, {"memory": in_memory, "segment": ~in_memory})
    subject, looked = looking(monkeypatch, "attention_weights", said)
    monkeypatch.setattr(inside, "MOST_TOKENS", 7)
    first, last = inside.attention(subject, 10, Budget(60))
    assert looked == [(10, 2)] * 2
    assert (first.tokens, last.tokens) == (4, 8)
    assert last.distances == (0, 1, 2)
    (layer,) = last.layers
    # 0, 1, and 2 to 3 tokens back.
    assert layer.by_distance == pytest.approx((0.25, 0.1875, 0.5625))
    assert layer.by_kind == pytest.approx({"memory": 0.375, "segment": 0.625})
    assert layer.mean_distance == pytest.approx(1.5625)


def test_retention_is_measured_after_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.arange(9.0, 0, -1)[None] / 9
    rank = torch.tensor([2.5])
    subject, looked = looking(monkeypatch, "write_retention", WriteRetention(kept, rank, 4))
    monkeypatch.setattr(inside, "MOST_ROUNDS", 2)
    *_, last = inside.retention(subject, 9, Budget(60))
    assert looked == [(9, 9)] * 2
    assert (last.after, last.full_rank) == ((0, 1, 2, 4, 8), 4)
    (layer,) = last.layers
    assert layer.kept == pytest.approx([each / 9 for each in (9, 8, 7, 5, 1)])
    assert layer.effective_rank == 2.5
