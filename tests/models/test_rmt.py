"""The Recurrent Memory Transformer: what it wraps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from architectures import rmt
from golden import assert_same
from memspan import MemspanError
from memspan.models import MODELS, RMTConfig
from readings import text

WRAPPED = [name for name in MODELS if name not in ("rmt", "infini", "compressive")]


@pytest.mark.parametrize("name", WRAPPED)
def test_a_block_sees_memory_tokens_alone_of_all_before(name: str) -> None:
    """Around any backbone: a block equals one read by the backbone itself, from an empty memory, with
    the memory tokens before it and after."""
    backbone = rmt(backbone=name).model().backbone
    x = torch.randn(2, 10, 8, dtype=torch.float64)
    out = backbone(x)
    tokens = backbone.memory_tokens.expand(2, -1, -1)
    expected = []
    for block in x.split(4, 1):
        h = backbone.backbone(torch.cat([tokens, block, tokens], 1)).hidden
        expected.append(h[:, 2:-2])
        if block.shape[1] == 4:
            tokens = h[:, -2:]
    assert_same(out.hidden, torch.cat(expected, 1), 1e-9, name)
    assert_same(out.memory.tokens, tokens, 1e-9, name)


def test_gradients_flow_through_all_blocks_until_memory_is_detached() -> None:
    model = rmt(block_length=2).model()
    x = torch.randn(1, 8, 8, dtype=torch.float64, requires_grad=True)
    model.backbone(x).hidden[:, -1].sum().backward()
    assert x.grad[0].any(-1).all()
    x.grad = None
    memory = model.backbone(x[:, :4]).memory.detach()
    model.backbone(x[:, 4:], memory).hidden[:, -1].sum().backward()
    assert x.grad[0].any(-1).tolist() == [False] * 4 + [True] * 4


def test_an_empty_associative_memory_is_not_amplified() -> None:
    """A gradient of the first block's outputs by the memory before, as after a detached reset: divided
    by the epsilon it would be a hundred thousand times as large."""
    backbone = rmt(associative=True, block_length=5).model().backbone
    memory = backbone.initial_memory(1)
    memory.weights.requires_grad_()
    out = backbone(torch.randn(1, 4, 8, dtype=torch.float64), memory).hidden
    gradient = torch.autograd.grad(out[..., 0].sum(), memory.weights)[0]
    assert 0 < gradient.abs().max() < 1e3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_tokens": 5}, "memory_tokens 5 are more than the 4 tokens of a block: lower "),
        ({"memory_tokens": 0}, "memory_tokens must be at least 1"),
        ({"block_length": 0}, "block_length must be at least 1"),
        ({"backbone": "rmt"}, "backbone rmt carries a memory from block to block already: wrap"),
        (
            {"backbone": "infini"},
            "backbone infini carries a memory from block to block already: wrap",
        ),
        ({"backbone": "gru"}, "there is no backbone 'gru' to wrap: use one of transformer-xl, "),
        ({"backbone": "compressive"}, "backbone compressive learns by a loss on its own memory"),
        ({"backbone": "lstm", "associative": True}, "not those of lstm: use backbone transformer"),
        ({"n_heads": 3}, "rotary positions need a d_model divisible by"),
    ],
    ids=str,
)
def test_misfits_are_refused_in_one_line(options: Any, says: str) -> None:
    with pytest.raises(MemspanError) as refused:
        RMTConfig(**{"d_model": 8, "n_heads": 2, "block_length": 4, "memory_tokens": 2} | options)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_recomputation_reaches_the_backbone() -> None:
    model = rmt().model()
    model.recompute = True
    assert model.backbone.backbone.recompute
    model(text(1, 3), targets=text(1, 3)).loss.backward()
