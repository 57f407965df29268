"""Law 8: documents and padding inside a segment, for every architecture and option.

What is expected is read row by row and document by document, without boundaries or padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import CASES, VOCABULARY, Case
from golden import assert_same
from memspan.memory import Memory
from memspan.models import LanguageModel
from memspan.models.segments import Padding, padding_mask
from readings import assert_memories_equal, every_case, rows_of, seeds, some_memory, text

ROWS = 3
LENGTH = 9


@st.composite
def boundaries(draw: st.DrawFn) -> dict[str, Any]:
    """Starts, lengths or both; the side of the padding."""
    starts = {"starts": text(ROWS, LENGTH, draw(seeds)) < draw(st.integers(1, 3))}
    lengths = draw(st.lists(st.integers(0, LENGTH), min_size=ROWS, max_size=ROWS))
    padded = {"lengths": torch.tensor(lengths), "padding": draw(st.sampled_from(["right", "left"]))}
    return draw(st.sampled_from([starts, padded, starts | padded]))


def expected(
    model: LanguageModel, tokens: Tensor, targets: Tensor, memory: Memory, where: dict[str, Any]
) -> tuple[dict[tuple[int, int], Tensor], list[Memory]]:
    """Losses by row and column, and the memory after each row, of documents read alone."""
    losses: dict[tuple[int, int], Tensor] = {}
    memories = []
    for row in range(ROWS):
        n = int(where["lengths"][row]) if "lengths" in where else LENGTH
        first = LENGTH - n if where.get("padding") == "left" else 0
        starts = where["starts"][row].nonzero().flatten().tolist() if "starts" in where else []
        edges = sorted({first, *(s for s in starts if first <= s < first + n), first + n})
        before = rows_of(memory, row)
        for low, high in pairwise(edges):
            if low in starts:
                before = before.reset([True])
            here = slice(low, high)
            out = model(tokens[[row], here], before, targets=targets[[row], here])
            before = out.memory
            losses |= {(row, low + i): loss for i, loss in enumerate(out.losses[0])}
        memories.append(before)
    return losses, memories


@every_case
@given(where=boundaries(), empty=st.booleans())
@torch.no_grad()
def test_documents_and_padding(case: Case, where: dict[str, Any], empty: bool) -> None:
    """Losses and memory are those of each row's documents, read alone."""
    model = case.shared_model()
    memory = model.initial_memory(ROWS) if empty else some_memory(model, ROWS)
    tokens = text(ROWS, LENGTH, 5)
    targets = text(ROWS, LENGTH, 6)
    out = model(tokens, memory, targets=targets, **where)
    losses, memories = expected(model, tokens, targets, memory, where)
    for (row, column), loss in losses.items():
        assert_same(out.losses[row, column], loss, 1e-9, f"the loss at {row, column}")
    padding = [(r, c) for r in range(ROWS) for c in range(LENGTH) if (r, c) not in losses]
    assert all(out.losses[cell] == 0 for cell in padding)
    for row, after in enumerate(memories):
        assert_memories_equal(rows_of(out.memory, row), after, 1e-9)


@pytest.mark.parametrize("name", ["feedback", "fast-delta"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.uint16])
@torch.no_grad()
def test_lengths_may_be_integers_of_any_type(name: str, kind: torch.dtype) -> None:
    model = CASES[name].shared_model()
    lengths = torch.tensor([LENGTH, 4, 0])
    tokens = text(ROWS, LENGTH, 5)
    found = model(tokens, lengths=lengths.to(kind), padding="left")
    wanted = model(tokens, lengths=lengths, padding="left")
    assert torch.equal(found.logits, wanted.logits)
    assert found.memory.tokens_seen.tolist() == lengths.tolist()


@torch.no_grad()
def test_few_calls_read_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that starts in one row does not cut the others."""
    rows = 8
    length = 60
    model = CASES["lstm"].shared_model()
    sizes: list[tuple[int, int]] = []
    read = model.backbone.read_piece

    def count(x: Tensor, memory: Memory, implementation: str | None) -> Any:
        sizes.append((x.shape[0], x.shape[1]))
        return read(x, memory, implementation)

    monkeypatch.setattr(model.backbone, "read_piece", count)
    lengths = torch.tensor([60, 59, 41, 30, 0, 17, 5, 60])
    model(text(rows, length), starts=text(rows, length, 1) == 0, lengths=lengths)
    assert len(sizes) <= 6
    assert sum(n_rows * n_tokens for n_rows, n_tokens in sizes) == lengths.sum()
    sizes.clear()
    # All rows alike: one call for each of two documents' lengths.
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 7] = True
    model(text(rows, length), starts=starts)
    assert sizes == [(16, 7), (8, 46)]


@every_case
def test_gradients_of_documents(case: Case) -> None:
    """Every parameter's gradient is that of the documents read alone."""
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    starts[0, 4] = starts[1, 0] = starts[1, 7] = starts[2, 5] = True
    where = {"starts": starts, "lengths": torch.tensor([9, 8, 6]), "padding": "left"}
    tokens = text(ROWS, LENGTH, 5)
    targets = text(ROWS, LENGTH, 6)
    model = case.shared_model()
    with torch.no_grad():
        memory = some_memory(model, ROWS).detach()
    names, parameters = zip(*model.named_parameters(), strict=True)
    together = model(tokens, memory, targets=targets, **where).losses.sum()
    losses, _ = expected(model, tokens, targets, memory, where)
    ours, theirs = (
        torch.autograd.grad(loss, parameters, materialize_grads=True)
        for loss in (together, torch.stack(list(losses.values())).sum())
    )
    for name, gradient, wanted in zip(names, ours, theirs, strict=True):
        assert_same(gradient, wanted, 1e-9, name)


@every_case
@pytest.mark.parametrize("padding", ["right", "left"])
def test_padding_may_hold_anything(case: Case, padding: Padding) -> None:
    """NaN where a row is padded reaches neither results nor gradients."""
    backbone = case.shared_model().backbone
    lengths = torch.tensor([5, 0, 2])
    own = padding_mask(lengths, 5, padding)
    torch.manual_seed(2)
    clean = torch.randn(3, 5, backbone.config.d_model, dtype=torch.float64)
    found = []
    for x in (clean, clean.masked_fill(~own[..., None], torch.nan)):
        x.requires_grad_()
        out = backbone(x, lengths=lengths, padding=padding)
        loss = out.hidden[own].square().sum() + out.auxiliary_loss
        parameters = [x, *backbone.parameters()]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append((out.hidden[own], out.memory, gradients))
    (hidden, memory, gradients), (other, after, others) = found
    assert torch.equal(hidden, other)
    assert_memories_equal(after, memory, 0)
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@every_case
@torch.no_grad()
def test_nothing_to_read(case: Case) -> None:
    """No tokens, or no rows: an empty result, no loss, and the same memory."""
    model = case.shared_model()
    memory = some_memory(model, ROWS)
    tokens = text(ROWS, 0)
    lengths = torch.zeros(ROWS, dtype=torch.long)
    for read, before, where in (
        (tokens, memory, {}),
        (tokens, memory, {"starts": tokens.bool()}),
        (tokens, memory, {"lengths": lengths, "padding": "left"}),
        (text(0, 4), rows_of(memory), {}),
        (text(0, 0), rows_of(memory), {}),
    ):
        scored = model(read, before, targets=read, **where)
        assert scored.losses.shape == read.shape
        assert scored.loss == scored.auxiliary_loss == 0
        assert not any(s.isnan().any() for s in scored.statistics.values())
        out = model(read, before, **where)
        assert out.logits.shape == (*read.shape, VOCABULARY)
        reader = model.reader(before)
        if "lengths" not in where:
            assert reader.read(read, **where).shape == out.logits.shape
            assert reader.read(read, targets=read, **where).shape == read.shape
        for after in (scored.memory, out.memory, reader.memory):
            assert_memories_equal(after, before)
