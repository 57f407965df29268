"""What architectures say about their attention, and about what they write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from architectures import CASES
from memspan.measurement import inside
from memspan.measurement.subject import Budget
from memspan.models import FastWeights
from memspan.models.protocol import AttentionWeights, WriteRetention

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


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """History and tokens of every look; nothing is read for them."""
    seen: list[tuple[int, int]] = []

    def after_history(subject: Any, draws: Any, *sizes: int) -> tuple[None, None]:
        seen.append(sizes)  # type: ignore[arg-type]
        return None, None

    monkeypatch.setattr(inside, "after_history", after_history)
    return seen


def subject_that_says(look: str, found: object) -> Any:
    """A run of 100 tokens whose backbone always says the same."""
    backbone = SimpleNamespace(**{look: lambda x, memory: found})
    return SimpleNamespace(
        segment_length=2, tokens=range(100), model=SimpleNamespace(backbone=backbone)
    )


def test_attention_is_added_up_by_distance(
    looked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two tokens and three keys, one of them in memory."""
    weights = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])[None, None]
    distances = torch.tensor([[2.0, 1.0, 0.0], [3.0, 2.0, 1.0]])[None]
    in_memory = torch.tensor([[True, False, False]])
    kinds = {"memory": in_memory, "segment": ~in_memory}
    subject = subject_that_says("attention_weights", AttentionWeights([weights], distances, kinds))
    monkeypatch.setattr(inside, "MOST_TOKENS", 3)
    first, last = inside.attention(subject, 10, Budget(60))
    assert looked == [(10, 2)] * 2
    assert (first.tokens, last.tokens) == (2, 4)
    assert last.distances == (0, 1, 2)
    (layer,) = last.layers
    # 0, 1, and 2 to 3 tokens back.
    assert layer.by_distance == pytest.approx((0.25, 0.25, 0.5))
    assert layer.by_kind == pytest.approx({"memory": 0.375, "segment": 0.625})
    assert layer.mean_distance == pytest.approx(1.5)


def test_what_is_kept_is_told_after_powers_of_two(
    looked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, rank = torch.arange(9.0, 0, -1)[None] / 9, torch.tensor([2.5])
    subject = subject_that_says("write_retention", WriteRetention(kept, rank, 4))
    monkeypatch.setattr(inside, "MOST_ROUNDS", 2)
    *_, last = inside.retention(subject, 9, Budget(60))
    assert looked == [(9, 9)] * 2
    assert (last.after, last.full_rank) == ((0, 1, 2, 4, 8), 4)
    (layer,) = last.layers
    assert layer.kept == pytest.approx([each / 9 for each in (9, 8, 7, 5, 1)])
    assert layer.effective_rank == 2.5
