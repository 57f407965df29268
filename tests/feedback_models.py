"""Small Feedback Transformers, and all that a pass of one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import randomise
from memspan.models import Feedback, FeedbackMemory
from memspan.models.feedback.config import FeedbackConfig
from memspan.ops.feedback import compiled as feedback_loop

# What the cases of ``architectures.py`` leave: long and short spans, and dropout.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"attention_bias": True, "n_layers": 3, "memory_norm": False},
    "per-layer-gelu": {"projections": "per-layer", "activation": "gelu", "d_head": 3},
    "short": {"memory_length": 3, "max_distance": 7, "memory_vector": "last"},
    "shortest": {"memory_length": 1, "memory_vector": "mean"},
    "post": {"normalisation": "post", "attention_bias": True},
    "dropout": {"dropout": 0.3, "attention_dropout": 0.2, "memory_vector": "last"},
    "dropout-post": {"dropout": 0.3, "attention_dropout": 0.2, "normalisation": "post"},
    "dropout-gelu": {"dropout": 0.3, "activation": "gelu", "projections": "per-layer"},
    "attention-dropout": {"attention_dropout": 0.4, "memory_length": 3, "memory_vector": "mean"},
}
needs_the_loops = pytest.mark.skipif(
    not feedback_loop.available(torch.zeros(())), reason="no loops in C"
)
FAST = ["fused", pytest.param("compiled", marks=needs_the_loops)]
fast = pytest.mark.parametrize("implementation", FAST)
every = pytest.mark.parametrize("implementation", ["reference", *FAST])
"""All that run on a CPU."""


def model_of(**options: Any) -> Feedback:
    small = {"n_layers": 2, "d_model": 6, "n_heads": 2, "d_ff": 8, "memory_length": 40}
    return randomise(Feedback(FeedbackConfig(**small | options)), 1).double()


def vectors(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 6, generator=generator, dtype=torch.float64)


def memory_of(model: Feedback, kind: str, rows: int) -> FeedbackMemory:
    """Empty; as long as the span; rows of different ages, one of which has none."""
    if kind == "empty":
        return model.initial_memory(rows)
    with torch.no_grad():
        if kind == "full":
            return model(vectors(rows, model.config.memory_length + 3, 5)).memory
        memory = model(vectors(rows, 5, 6)).memory.reset(torch.arange(rows) == 1)
        return model(vectors(rows, 2, 7), memory).memory.reset(torch.arange(rows) == 2)


def everything(
    model: Feedback,
    x: Tensor,
    memory: FeedbackMemory,
    cuts: list[int],
    implementation: Any,
    own: Tensor | float = 1,
    **documents: Any,
) -> dict[str, Tensor]:
    """Outputs, the final memory, and the gradient of a random function of both, by name; dropout draws
    the same in every call. ``documents``: ``starts`` and ``lengths``, where it is not cut; ``own``: 0
    for padding."""
    x = x.clone().requires_grad_()
    start = memory.vectors.clone().requires_grad_()
    memory = FeedbackMemory(memory.tokens_seen, start, memory.length)
    torch.manual_seed(3)
    hidden = []
    for segment in x.split(cuts, 1):
        out = model(segment, memory, implementation=implementation, **documents)
        hidden.append(out.hidden)
        memory = out.memory
    h = torch.cat(hidden, 1) * own
    generator = torch.Generator().manual_seed(9)
    loss = sum(
        (t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum()
        for t in (h, memory.vectors)
    )
    named = dict(model.named_parameters()) | {"x": x, "memory": start}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {"hidden": h, "vectors": memory.vectors, "length": memory.length}
    return found | {
        f"gradient of {name}": torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }


def gradients(model: Feedback, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
