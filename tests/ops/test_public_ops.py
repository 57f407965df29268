"""Refusals of :mod:`memspan.ops`: shapes, types and devices, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memspan import MemspanError, ops
from memspan.models import Feedback, FeedbackConfig
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.rules import Chunking

pytestmark = pytest.mark.hardening
B = 2
H = 3
T = 4
S = 6
K = 5
V = 7
D = 8


def relative() -> dict[str, Any]:
    positions = ops.Positions(torch.randn(H, S, K), torch.randn(H, S), torch.randn(H, K))
    mask = torch.ones(1, T, S, dtype=torch.bool).tril(S - T)
    q = torch.randn(B, H, T, K)
    k = torch.randn(B, H, S, K)
    v = torch.randn(B, H, S, K)
    return {"q": q, "k": k, "v": v, "positions": positions, "mask": mask}


def rule() -> dict[str, Any]:
    q, k, v = (torch.randn(B, H, T, width) for width in (K, K, V))
    return {"q": q, "k": k, "v": v, "beta": torch.rand(B, H, T), "weights": torch.zeros(B, H, K, V)}


def convolution() -> dict[str, Any]:
    return {"x": torch.randn(B, T, D), "weight": torch.randn(D, 3), "before": torch.zeros(B, 2, D)}


def recurrence() -> dict[str, Any]:
    backbone = Feedback(FeedbackConfig(n_layers=2, d_model=D, n_heads=2, d_ff=8, memory_length=S))
    return {
        "x": torch.randn(B, T, D),
        "old": torch.randn(B, 3, D),
        "visible": torch.tensor([[3], [1]]) + torch.arange(T),
        "span": S,
        "weights": backbone.fold(S),
    }


def one_token() -> dict[str, Any]:
    return {
        "q": torch.randn(B, H, K),
        "k": torch.randn(B, H, S, K),
        "v": torch.randn(B, H, S, K),
        "distances": ops.Distances(torch.randn(S, H, K), torch.randn(S, H)),
        "content_bias": torch.zeros(H, K),
        "visible": torch.ones(B, S, dtype=torch.bool),
    }


def projected() -> dict[str, Any]:
    return {"x": torch.randn(B, K), "projection": ops.orthogonal_projection(K, 9)}


Operation = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
RELATIVE = (ops.relative_attention, relative)
RULE = (ops.delta_rule, rule)
CONVOLUTION = (ops.short_convolution, convolution)
FAVOR = (ops.favor, projected)
RECURRENCE = (ops.feedback_recurrence, recurrence)
ONE_TOKEN = (ops.feedback_attention, one_token)


def with_positions(**fields: Tensor) -> dict[str, Any]:
    return {"positions": relative()["positions"]._replace(**fields)}


def with_weights(**fields: Tensor) -> dict[str, Any]:
    return {"weights": replace(recurrence()["weights"], **fields)}


MISTAKES: list[tuple[Operation, dict[str, Any], str]] = [
    (RELATIVE, {"q": torch.randn(B, T, K)}, r"pass \[B, H, T, K\] and \[B, H, S, K\]"),
    (RELATIVE, {"q": torch.randn(B, H, 9, K)}, "9 queries need as many keys or more, not 6"),
    (RELATIVE, {"v": torch.randn(B, H, S - 1, K)}, r"v must be .* \[2, 3, 6, 5\], not"),
    (RELATIVE, {"v": torch.randn(B, H, S, K, device="meta")}, "v is on meta and q on cpu"),
    (
        RELATIVE,
        {"mask": torch.ones(1, T, S)},
        r"mask must be bool \[1 or 2, 4, 6\] on cpu, not float",
    ),
    (RELATIVE, {"mask": None}, "without a mask 4 queries see up to 3 keys"),
    (RELATIVE, {"received": torch.zeros(B, T)}, r"received must be \[B, S\], \[2, 6\]"),
    (RELATIVE, with_positions(keys=torch.randn(H, T, K)), r"H, S, K\], \[3, 6, 5\], not"),
    (RELATIVE, with_positions(content_bias=torch.zeros(K)), r"content_bias must be .* \[3, 5\]"),
    (RULE, {"q": torch.randn(B, T, K)}, "queries, keys and values do not fit together"),
    (RULE, {"v": torch.randn(B, H, T, V).double()}, "v is float64 and q float32: convert one"),
    (RULE, {"weights": torch.zeros(B, H, V, K)}, r"the memory is .* must be \[2, 3, 5, 7\]"),
    (RULE, {"beta": torch.ones(B, H, T, device="meta")}, "beta is on meta and q on cpu: move one"),
    (RULE, {"k": torch.ones(B, H, T, K, dtype=torch.long)}, "k must be a floating-point tensor"),
    (RULE, {"log_decay": torch.zeros(B, H)}, r"log_decay must be \[B, H, T\] or \[B, H, T, F\]"),
    (RULE, {"log_decay": torch.ones(B, H, T)}, "at most 0, not 1: pass the logarithm"),
    (RULE, {n: torch.randn(B, 2, T, K) for n in "qk"}, "3 heads of values cannot share 2 heads of"),
    (RULE, {n: torch.zeros(B, H, 0, 5) for n in "qk"}, "do not fit together|no tokens"),
    (RULE, {"chunking": Chunking(0)}, "chunk size"),
    (RULE, {"feature_map": DPFP(1)}, r"must be \[2, 3, 10, 7\], \[B, H, F, V\]"),
    (RULE, {"feature_map": DPFP(2 * K + 1)}, "nu must lie in"),
    (RULE, {"implementation": "quick"}, "no implementation 'quick': use compiled, chunked"),
    (CONVOLUTION, {"implementation": "quick"}, "no implementation 'quick': use by-tap, reference"),
    (CONVOLUTION, {"x": torch.randn(B, D)}, r"pass \[C, W\] and \[B, T, C\]"),
    (CONVOLUTION, {"weight": torch.randn(D)}, r"pass \[C, W\] and \[B, T, C\]"),
    (CONVOLUTION, {"before": torch.zeros(B, 3, D)}, r"before must be .* \[2, 2, 8\]"),
    (CONVOLUTION, {"before": torch.zeros(B, 2, D).double()}, "before is float64 and x float32"),
    (RECURRENCE, {"x": torch.randn(B, T, D + 1)}, r"x must be \[B, T, 8\]"),
    (RECURRENCE, {"old": torch.randn(B, S + 1, D)}, "O at most the span 6"),
    (
        RECURRENCE,
        {"visible": torch.tensor([3, 1])},
        r"visible must be int64 \[2, 4\] on cpu, not int64 \[2\]",
    ),
    (RECURRENCE, {"span": S + 1}, r"weights.position_keys must be .* a span of 7"),
    (RECURRENCE, with_weights(mix=torch.ones(2)), r"weights.mix must be \[3\]"),
    (RECURRENCE, with_weights(mix=torch.ones(3).double()), "mix is float64 and x float32"),
    (ONE_TOKEN, {"q": torch.randn(B, H, V)}, "a query .* and keys .* do not fit together"),
    (ONE_TOKEN, {"visible": torch.ones(B, S)}, r"visible must be bool \[B, S\]"),
    (
        ONE_TOKEN,
        {"distances": ops.Distances(torch.randn(T, H, K), torch.randn(T, H))},
        "6 keys need",
    ),
    (ONE_TOKEN, {"content_bias": torch.zeros(K)}, r"content_bias must be \[3, 5\]"),
    (FAVOR, {"x": torch.randn(B, K + 1)}, "for keys of width 6"),
    ((ops.dpfp, lambda: {"x": torch.randn(B, K)}), {"nu": 11}, "nu must lie in 1 .. 10"),
]


@pytest.mark.parametrize(("operation", "mistake", "says"), MISTAKES)
def test_a_mistake_is_one_line(operation: Operation, mistake: dict[str, Any], says: str) -> None:
    run, arguments = operation
    run(**arguments())
    with pytest.raises(MemspanError, match=says) as refused:
        run(**arguments() | mistake)
    assert "\n" not in str(refused.value)
