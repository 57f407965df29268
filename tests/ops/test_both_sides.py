"""Relative attention to both sides, as Conformers have it, and limits in place of masks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.errors import MemspanError
from memspan.ops.limits import Limits
from memspan.ops.relative import Positions, attention_weights, relative_attention

ROWS = 2
HEADS = 2
WIDTH = 4


def given(n_queries: int, slots: int, future: int) -> dict[str, Tensor]:
    """Random float64 tensors under the names of the operation and of :class:`Positions`."""
    n_keys = slots + n_queries
    shapes = {
        "q": (ROWS, HEADS, n_queries, WIDTH),
        "k": (ROWS, HEADS, n_keys, WIDTH),
        "v": (ROWS, HEADS, n_keys, WIDTH),
        "keys": (HEADS, n_keys + future, WIDTH),
        "scores": (HEADS, n_keys + future),
        "content_bias": (HEADS, WIDTH),
        "position_bias": (HEADS, WIDTH),
    }
    return {name: torch.randn(s, dtype=torch.float64) for name, s in shapes.items()}


def attend(
    t: dict[str, Tensor], mask: Tensor | Limits | None, implementation: str | None = None
) -> Tensor:
    positions = Positions(*(t[name] for name in Positions._fields))
    qkv = (t[name] for name in "qkv")
    return relative_attention(*qkv, positions, mask=mask, implementation=implementation)


def window(n_queries: int, slots: int, future: int, past: int = 1000) -> Limits:
    """So far back, and so far into the future."""
    query = torch.arange(slots, slots + n_queries)[None]
    last = (query + future).clamp(max=slots + n_queries - 1)
    return Limits((query - past).clamp(min=0), last)


def by_hand(t: dict[str, Tensor], limits: Limits, future: int) -> Tensor:
    """The equation, one query and one key after the other."""
    n_queries = t["q"].shape[2]
    n_keys = t["k"].shape[2]
    out = torch.zeros_like(t["q"])
    for b in range(ROWS):
        for h in range(HEADS):
            for i in range(n_queries):
                scores = torch.full((n_keys,), -torch.inf, dtype=torch.float64)
                for j in range(int(limits.first[0, i]), int(limits.last[0, i]) + 1):
                    row = n_keys - n_queries + i - j + future
                    content = (t["q"][b, h, i] + t["content_bias"][h]) @ t["k"][b, h, j]
                    position = (t["q"][b, h, i] + t["position_bias"][h]) @ t["keys"][h, row]
                    scores[j] = (content + position + t["scores"][h, row]) * WIDTH**-0.5
                out[b, h, i] = scores.softmax(0) @ t["v"][b, h]
    return out


@pytest.mark.parametrize("implementation", ["reference", "fused", "sdpa"])
@pytest.mark.parametrize(
    ("n_queries", "slots", "future"), [(5, 0, 4), (5, 3, 4), (6, 2, 2), (2, 0, 1), (1, 3, 0)]
)
def test_queries_see_both_sides(
    n_queries: int, slots: int, future: int, implementation: str
) -> None:
    t = given(n_queries, slots, future)
    seen = window(n_queries, slots, future)
    expected = by_hand(t, seen, future)
    assert_same(attend(t, seen, implementation), expected, 1e-12, "limits")
    mask = seen.mask(n_queries + slots)
    assert_same(attend(t, mask, implementation), expected, 1e-12, "mask")
    if future == n_queries - 1:
        assert_same(attend(t, None, implementation), expected, 1e-12, "no mask")


@pytest.mark.parametrize(
    ("n_queries", "slots", "future"), [(63, 0, 62), (100, 7, 30), (63, 63, 62)]
)
def test_gradients_of_both_sides_equal_the_references(
    n_queries: int, slots: int, future: int
) -> None:
    t = {n: x.requires_grad_() for n, x in given(n_queries, slots, future).items()}
    seen = window(n_queries, slots, future, past=50)
    upstream = torch.randn_like(t["q"])
    found = {
        name: torch.autograd.grad(attend(t, seen, name), list(t.values()), upstream)
        for name in ("reference", "fused")
    }
    for name, expected, other in zip(t, found["reference"], found["fused"], strict=True):
        assert_same(other, expected, 1e-11, name)


def test_weights_of_both_sides_sum_to_one() -> None:
    t = given(4, 2, 3)
    positions = Positions(*(t[name] for name in Positions._fields))
    weights = attention_weights(t["q"], t["k"], positions)
    assert (weights > 0).all()
    assert_same(weights.sum(-1), torch.ones(ROWS, HEADS, 4).double(), 1e-12, "sums")


def test_limits_are_their_mask() -> None:
    first = torch.tensor([[0, 2, 4], [1, 1, 3]])
    last = torch.tensor([[0, 4, 3], [1, 4, 4]])
    mask = Limits(first, last).mask(5)
    rows = [["10000", "00111", "00000"], ["01000", "01111", "00011"]]
    assert mask.int().tolist() == [[[int(c) for c in row] for row in each] for each in rows]
    assert torch.equal(Limits.of(mask).mask(5), mask)


def test_queries_outside_a_range_see_none_of_its_keys() -> None:
    n_queries = 9
    n_keys = 14
    first = torch.randint(0, n_keys, (ROWS, n_queries))
    limits = Limits(first, first + torch.randint(-1, 4, (ROWS, n_queries)))
    mask = limits.mask(n_keys)
    begin = limits.begin_query(n_keys)
    end = limits.end_query(n_keys)
    for b in range(ROWS):
        for j in range(n_keys):
            assert not mask[b, : begin[b, j], j:].any()
            assert not mask[b, end[b, j] :, : j + 1].any()
            # They are the narrowest such bounds.
            if begin[b, j] < n_queries:
                assert limits.last[b, begin[b, j]] >= j
            if end[b, j] > 0:
                assert limits.first[b, end[b, j] - 1] <= j


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "4 queries see up to 3 keys of their future"),
        (window(3, 2, 0), "mask.first must be int32 or int64 [1 or 2, 4] on cpu, not int64 [1, 3]"),
        (Limits(*(x.float() for x in window(4, 2, 0))), "mask.first must be int32 or int64"),
    ],
    ids=["none", "shape", "type"],
)
def test_wrong_limits_are_refused(mask: Limits | None, message: str) -> None:
    with pytest.raises(MemspanError, match=re.escape(message)):
        attend(given(4, 2, 2), mask)


def test_more_distances_than_queries_have_are_refused() -> None:
    t = given(4, 2, 4)
    with pytest.raises(
        MemspanError, match=re.escape("positions.keys must be [H, S, K], [2, 6, 4]")
    ):
        attend(t, window(4, 2, 3))
