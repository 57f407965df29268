"""Rows that are computed in chunks come out as all at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memspan.models.embedding import Embedding, Head
from memspan.models.options import EmbeddingConfig
from memspan.nn import CHUNK, FeedForward

ROWS = [1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_the_paper_s(rows: int, activation: str) -> None:
    layer = FeedForward(6, 10, activation, 0.0).double()
    x = torch.randn(rows, 1, 6, dtype=torch.float64, requires_grad=True)
    f = {"relu": F.relu, "gelu": F.gelu}[activation]
    inner = f(x @ layer.inner.weight.T + layer.inner.bias)
    expected = inner @ layer.outer.weight.T + layer.outer.bias
    found, given, upstream = layer(x), [x, *layer.parameters()], torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y, given, upstream) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("options", [EmbeddingConfig(), EmbeddingConfig(cutoffs=(2, 5))])
def test_losses_are_those_of_the_logits(rows: int, options: EmbeddingConfig) -> None:
    embedding = Embedding(9, 4, options)
    head = Head(embedding, options).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(1, rows, 4, dtype=torch.float64)
    targets = torch.randint(9, (1, rows))
    log_p = head(hidden).log_softmax(-1)
    expected = -log_p.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(head.losses(hidden, targets), expected, rtol=1e-12, atol=1e-12)
