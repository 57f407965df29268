"""Documents inside a segment: each is read as if it were alone, with gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.ops.convolution import IMPLEMENTATIONS, short_convolution
from memspan.ops.fast_weights import compiled
from memspan.ops.fast_weights.feature_maps import DPFP
from memspan.ops.fast_weights.rules import Chunking, delta_rule, outer_product_rule, sum_rule

LENGTH = 150
"""Longer than the chunks, and than the intervals between two saved memories."""
NO_LOOPS = not compiled.available(torch.zeros(()))
COMPILES = pytest.param("compiled", marks=pytest.mark.skipif(NO_LOOPS, reason="no loops in C"))
STARTS = torch.zeros(3, LENGTH, dtype=torch.bool)
# None in the first row; in the last, two in one chunk, at the ends of intervals and at the very end.
STARTS[1, [0, 70]] = True
STARTS[2, [3, 5, 31, 32, 64, 128, 140, LENGTH - 1]] = True

RULES: dict[str, tuple[Any, list[str]]] = {
    "delta": (delta_rule, ["beta"]),
    "gated": (delta_rule, ["beta", "log_decay"]),
    "sum": (sum_rule, []),
}


def assert_as_alone(run: Any, given: dict[str, Tensor], carried: str, steps: int) -> None:
    """``run(**given, starts=...)`` gives the outputs, what is ``carried``, and gradients of documents
    read one by one. ``steps``: the dimension of the tokens."""
    given = {name: t.double().requires_grad_() for name, t in given.items()}
    timed = {name for name, t in given.items() if t.dim() > steps and t.shape[steps] == LENGTH}
    outputs = []
    ends = []
    for row, starts in enumerate(STARTS):
        now = given[carried][[row]]
        edges = sorted({0, *starts.nonzero().flatten().tolist(), LENGTH})
        parts = []
        for low, high in pairwise(edges):
            piece = {n: given[n][[row]].narrow(steps, low, high - low) for n in timed}
            rest = {n: t for n, t in given.items() if n not in timed}
            now = torch.zeros_like(now) if starts[low] else now
            y, now = run(**piece, **rest | {carried: now})
            parts.append(y)
        outputs.append(torch.cat(parts, steps))
        ends.append(now)
    found = run(**given, starts=STARTS)
    wanted = (torch.cat(outputs), torch.cat(ends))
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs, 1e-11, "output")
    gradients = [
        torch.autograd.grad(sum(x.sin().sum() for x in each), list(given.values()))
        for each in (found, wanted)
    ]
    for name, ours, theirs in zip(given, *gradients, strict=True):
        assert_same(ours, theirs, 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("implementation", ["reference", "chunked", COMPILES])
@pytest.mark.parametrize("recompute", [False, True])
def test_rules_read_each_document_alone(rule: str, implementation: str, recompute: bool) -> None:
    run, strengths = RULES[rule]
    keys = torch.nn.functional.normalize(torch.randn(3, 2, LENGTH, 4), dim=-1)
    given = {"q": torch.randn(3, 2, LENGTH, 4), "k": keys, "v": torch.randn(3, 2, LENGTH, 3)}
    given |= {name: -torch.rand(3, 2, LENGTH) for name in strengths}
    given["weights"] = torch.randn(3, 2, 4, 3)
    if "beta" in given:
        given["beta"] = given["beta"].abs()
    chunking = Chunking(16, recompute)

    def read(**given: Any) -> Any:
        return run(**given, implementation=implementation, chunking=chunking)

    assert_as_alone(read, given, "weights", 2)


@pytest.mark.skipif(NO_LOOPS, reason="no loops in C")
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_compiled_features_read_each_document_alone(rule: str) -> None:
    run, strengths = RULES[rule]
    given = {name: torch.randn(3, 2, LENGTH, 4) for name in ("q", "k", "v")}
    given |= {name: torch.rand(3, 2, LENGTH) for name in strengths}
    given["weights"] = torch.randn(3, 2, 8, 4)

    def read(**given: Any) -> Any:
        return run(**given, implementation="compiled", feature_map=DPFP(1, 1e-6))

    assert_as_alone(read, given, "weights", 2)


def test_outer_products_read_each_document_alone() -> None:
    given = {name: torch.randn(3, 1, LENGTH, 2) for name in ("q", "k", "v")}
    given["weights"] = torch.randn(3, 1, 2, 2)

    def read(**given: Any) -> Any:
        return outer_product_rule(**given, activation="tanh")

    assert_as_alone(read, given, "weights", 2)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_convolution_reads_each_document_alone(implementation: str, taps: int) -> None:
    given = {
        "x": torch.randn(3, LENGTH, 5),
        "weight": torch.randn(5, taps),
        "before": torch.randn(3, taps - 1, 5),
    }

    def read(**given: Any) -> Any:
        return short_convolution(**given, implementation=implementation)

    assert_as_alone(read, given, "before", 1)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_carries_no_padding(taps: int) -> None:
    x = torch.randn(4, 6, 5)
    weight = torch.randn(5, taps)
    before = torch.randn(4, taps - 1, 5)
    lengths = torch.tensor([6, 4, 1, 0])
    starts = torch.zeros(4, 6, dtype=torch.bool)
    starts[1, 3] = True
    for given in ({}, {"starts": starts}):
        _, carried = short_convolution(x, weight, before, lengths=lengths, **given)
        for row, n in enumerate(lengths.tolist()):
            own = {name: t[[row], :n] for name, t in given.items()}
            _, wanted = short_convolution(x[[row], :n], weight, before[[row]], **own)
            assert torch.equal(carried[[row]], wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("implementation", ["reference", "chunked", COMPILES])
def test_a_start_at_the_first_token_empties_a_spoilt_memory(rule: str, implementation: str) -> None:
    run, strengths = RULES[rule]
    given = {name: torch.randn(2, 1, 40, 4) for name in ("q", "k", "v")}
    given |= {name: -torch.rand(2, 1, 40) for name in strengths}
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, 0] = True
    weights = torch.full((2, 1, 4, 4), torch.nan)
    y, after = run(**given, weights=weights, starts=starts, implementation=implementation)
    for found in (y, after):
        assert found[0].isfinite().all()
        assert found[1].isnan().any()


def test_starts_of_other_sizes_are_refused() -> None:
    q = torch.randn(2, 1, 3, 4)
    starts = torch.zeros(2, 4, dtype=torch.bool)
    with pytest.raises(MemspanError, match=r"starts must be bool \[B, T\], \[2, 3\] on cpu"):
        sum_rule(q, q, q, torch.zeros(2, 1, 4, 4), starts=starts)
    with pytest.raises(MemspanError, match=r"lengths must be int64 \[B\]"):
        short_convolution(q[:, 0], torch.zeros(4, 2), q[:, 0, :1], lengths=starts)
