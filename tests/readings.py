"""Random texts, models that read them in segments, and memories compared: for tests of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from architectures import CASES, VOCABULARY
from golden import assert_same
from memspan.memory import Memory
from memspan.models import LanguageModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


seeds = st.integers(0, 2**16)
precisions = st.sampled_from(list(TOLERANCE))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """Tokens ``[B, T]`` and the lengths of the segments that they are cut into."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    return text(draw(st.integers(1, 3)), sum(lengths), draw(seeds)), lengths


def read(
    model: LanguageModel, tokens: Tensor, lengths: list[int], memory: Memory | None = None
) -> tuple[Tensor, Memory]:
    """Logits and final memory after reading in segments."""
    logits = []
    for segment in tokens.split(lengths, 1):
        out = model(segment, memory)
        logits.append(out.logits)
        memory = out.memory
    assert memory is not None
    return torch.cat(logits, 1), memory


def some_memory(model: LanguageModel, rows: int, seed: int = 1) -> Memory:
    """After some text, rows of different ages: one read less, one has forgotten and read on."""
    _, memory = read(model, text(rows, 6, seed), [4, 2])
    memory = memory.reset(torch.arange(rows) % 3 == 1)
    _, memory = read(model, text(rows, 2, seed + 1), [2], memory)
    return memory.reset(torch.arange(rows) % 3 == 2).detach()


def fields(memory: Memory) -> dict[str, Tensor]:
    return memory.tensors()


def assert_memories_equal(a: Memory, b: Memory, tolerance: float = 0.0) -> None:
    assert type(a) is type(b)
    for name, tensor in fields(a).items():
        assert tolerance or tensor.dtype == fields(b)[name].dtype, name
        if tensor.is_floating_point():
            assert_same(tensor, fields(b)[name], tolerance, name)
        else:
            assert torch.equal(tensor, fields(b)[name]), name


def outcome(
    model: LanguageModel, before: Memory, tokens: Tensor, targets: Tensor, *segments: dict[str, Any]
) -> dict[str, Tensor]:
    """By name the losses and the memory after, and the gradients of all these: every parameter's and
    that of the memory before. ``segments``: further arguments of each, which are of one length."""
    before = before.map(lambda t: t.clone().requires_grad_(t.is_floating_point()))
    memory = before
    losses = []
    loss = torch.zeros(())
    cut = zip(*(t.chunk(len(segments), 1) for t in (tokens, targets)), segments, strict=True)
    for part, wanted, options in cut:
        out = model(part, memory, targets=wanted, **options)
        memory = out.memory
        loss = loss + out.losses.sin().sum() + out.auxiliary_loss
        losses.append(out.losses)
    after = {f"{name} after": t for name, t in fields(memory).items()}
    loss = loss + sum(t.sin().sum() for t in after.values() if t.is_floating_point())
    leaves = dict(model.named_parameters()) | fields(before)
    leaves = {name: t for name, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    named = after | dict(zip(leaves, found, strict=True)) | {"losses": torch.cat(losses, 1)}
    return {name: t.detach() for name, t in named.items()}


def rows_of(memory: Memory, *rows: int) -> Memory:
    return memory.select(list(rows))
