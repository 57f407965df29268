"""Output of a language model: the loss to train on, unscored targets, and rows in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from architectures import CASES, VOCABULARY, compressive
from memspan.models import MODELS, LanguageModel
from memspan.models.embedding import Embedding, Head
from memspan.models.options import EmbeddingConfig
from memspan.nn import CHUNK, FeedForward
from readings import text


@pytest.mark.parametrize("cutoffs", [(), (3, 6)])
def test_ignored_targets_are_not_scored(cutoffs: tuple[int, ...]) -> None:
    """Targets of -100 and padding: loss 0, no gradient, and no share in the mean."""
    model = compressive(EmbeddingConfig(cutoffs=cutoffs, div_val=2 if cutoffs else 1)).model()
    tokens = text(3, 8)
    targets = text(3, 8, 1)
    full = model(tokens, targets=targets)
    assert full.n_scored == 24
    some = torch.rand(3, 8, generator=torch.Generator().manual_seed(2)) < 0.5
    out = model(tokens, targets=targets.masked_fill(~some, -100))
    assert out.n_scored == some.sum()
    torch.testing.assert_close(out.losses, full.losses.where(some, full.losses.new_zeros(())))
    expected = full.losses[some].mean() + full.auxiliary_loss
    torch.testing.assert_close(out.loss, expected)
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters) for x in (out.loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_nothing_scored_is_no_loss() -> None:
    """As where a process has padding alone: finite, and nothing but the auxiliary loss."""
    model = compressive().model()
    memory = model(text(2, 9), targets=text(2, 9)).memory
    out = model(text(2, 8), memory, targets=torch.full((2, 8), -100))
    assert out.n_scored == 0
    assert out.loss == out.auxiliary_loss


@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
def test_dropout_is_for_training_only(kind: type[Any]) -> None:
    for rate in {"dropout", "attention_dropout"} & {*kind.__dataclass_fields__}:
        model = LanguageModel(VOCABULARY, kind(n_layers=2, d_model=8, **{rate: 0.3})).eval()
        assert torch.equal(model(text(2, 5)).logits, model(text(2, 5)).logits)
        model.train()
        assert not torch.allclose(model(text(2, 5)).logits, model(text(2, 5)).logits), rate


@pytest.mark.parametrize("name", ["xl-segment", "compressive", "feedback", "fast-delta"])
def test_own_loop_trains_under_ddp(name: str, request: pytest.FixtureRequest) -> None:
    """DDP waits for every parameter that an output depends on: the loss must depend on them, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    model = CASES[name].model().train()
    wrapped: Any = DistributedDataParallel(model)
    memory = model.initial_memory(2)
    for n in range(3):
        output = wrapped(text(2, 6, n), memory, targets=text(2, 6, n + 9))
        output.loss.backward()
        memory = output.memory.detach()


# ----- Rows that are computed in chunks come out as all at once


rows_in_chunks = pytest.mark.parametrize("rows", [1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])


@rows_in_chunks
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_the_paper_s(rows: int, activation: str) -> None:
    layer = FeedForward(6, 10, activation, 0.0).double()
    x = torch.randn(rows, 1, 6, dtype=torch.float64, requires_grad=True)
    f = {"relu": F.relu, "gelu": F.gelu}[activation]
    inner = f(x @ layer.inner.weight.T + layer.inner.bias)
    expected = inner @ layer.outer.weight.T + layer.outer.bias
    found = layer(x)
    given = [x, *layer.parameters()]
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y, given, upstream) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@rows_in_chunks
@pytest.mark.parametrize("options", [EmbeddingConfig(), EmbeddingConfig(cutoffs=(2, 5))])
def test_losses_are_those_of_the_logits(rows: int, options: EmbeddingConfig) -> None:
    embedding = Embedding(9, 4, options)
    head = Head(embedding, options).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(1, rows, 4, dtype=torch.float64)
    targets = torch.randint(9, (1, rows))
    expected = -head(hidden).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(head.losses(hidden, targets), expected, rtol=1e-12, atol=1e-12)
