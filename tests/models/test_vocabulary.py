"""A model whose vocabulary is resized: old tokens keep their logits, new ones begin as the average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from architectures import randomise
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import LanguageModel
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

XL = TransformerXLConfig(n_layers=1, d_model=8, n_heads=2, d_ff=12, memory_length=4)
OLD = 11
NEW = 14
PLAIN = EmbeddingConfig()
CLUSTERS = {"cutoffs": (3, 7)}
EMBEDDINGS = {
    "plain": PLAIN,
    "untied": EmbeddingConfig(tie=False),
    "projected": EmbeddingConfig(d_embed=6),
    "one-table": EmbeddingConfig(**CLUSTERS),
    "clusters": EmbeddingConfig(**CLUSTERS, div_val=2),
    "clusters-untied": EmbeddingConfig(**CLUSTERS, div_val=2, tie=False, tie_projections="none"),
}


def model_of(embedding: EmbeddingConfig = PLAIN, vocab_size: int = OLD) -> LanguageModel:
    return randomise(LanguageModel(vocab_size, XL, embedding)).double().eval()


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_a_larger_vocabulary_keeps_what_old_tokens_mean(embedding: EmbeddingConfig) -> None:
    old = model_of(embedding)
    model = model_of(embedding)
    names = list(model.state_dict())
    model.resize_token_embeddings(NEW)
    assert list(model.state_dict()) == names
    # What a model of that size has, in names and shapes; what is tied counts once.
    made = LanguageModel(NEW, XL, embedding)
    shapes = [{n: p.shape for n, p in each.named_parameters()} for each in (model, made)]
    assert shapes[0] == shapes[1]
    tokens = torch.arange(OLD)[None]
    before, after = (each(tokens).logits for each in (old, model))
    assert after.shape[-1] == NEW
    first = embedding.cutoffs[-1] if embedding.cutoffs else 0
    # New tokens take their probability from their own cluster alone.
    assert_same(after[..., :first], before[..., :first], 1e-10, "other clusters")
    ours, theirs = (each[..., first:OLD].log_softmax(-1) for each in (after, before))
    assert_same(ours, theirs, 1e-10, "own cluster")
    if first:
        whole = after[..., first:].logsumexp(-1)
        assert_same(whole, before[..., first:].logsumexp(-1), 1e-10, "cluster's probability")
    mean = after[..., first:OLD].mean(-1, keepdim=True).expand_as(after[..., OLD:])
    assert_same(after[..., OLD:], mean, 1e-10, "new tokens")
    # New tokens are read, and learn apart from each other.
    targets = torch.tensor([[OLD, NEW - 1]])
    model(targets, targets=targets).loss.backward()
    gradient = model.embedding.tables[-1].grad
    assert not torch.equal(gradient[-1], gradient[-2])


@pytest.mark.parametrize("embedding", EMBEDDINGS.values(), ids=EMBEDDINGS.keys())
def test_rows_added_and_dropped_again_leave_the_model_as_it_was(embedding: EmbeddingConfig) -> None:
    old = model_of(embedding)
    model = model_of(embedding)
    model.embedding.tables[0].requires_grad_(False)
    same = model.embedding.tables[-1]
    model.resize_token_embeddings(OLD)
    assert model.embedding.tables[-1] is same
    model.resize_token_embeddings(NEW)
    assert model.fingerprint() != old.fingerprint()
    model.resize_token_embeddings(OLD)
    assert model.fingerprint() == old.fingerprint()
    assert model.vocab_size == OLD
    assert not model.embedding.tables[0].requires_grad


@pytest.mark.parametrize(
    ("change", "vocab_size", "message"),
    [
        (lambda model: None, 0, "at least 1"),
        (lambda model: None, 12.0, "integer"),
        (lambda model: None, 7, "choose at least 8"),
        (lambda model: setattr(model, "head", nn.Linear(8, OLD)), NEW, "head is a Linear"),
    ],
    ids=["none", "float", "clusters", "replaced"],
)
def test_a_vocabulary_that_cannot_be_resized_is_refused_in_one_line(
    change: Any, vocab_size: Any, message: str
) -> None:
    model = model_of(EmbeddingConfig(**CLUSTERS))
    change(model)
    with pytest.raises(MemspanError, match=message) as caught:
        model.resize_token_embeddings(vocab_size)
    assert "\n" not in str(caught.value)
    assert len(model.embedding.tables[0]) == OLD
