"""Relative attention: the reference against the equation, the fast paths against the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from golden import assert_same
from memspan.ops import relative as ops
from memspan.ops.relative import Positions, relative_attention

FAST = ["fused", "sdpa"]
# Queries, slots of memory.
LENGTHS = [(1, 0), (1, 63), (63, 0), (63, 100), (100, 1)]
OPTIONS = {
    "all": ("content_bias", "position_bias", "scores"),
    "sinusoidal": ("content_bias", "position_bias"),
    "learned": ("content_bias", "scores"),
    "scores": ("scores",),
    "position": ("position_bias",),
    "bare": (),
}


def inputs(
    n_queries: int,
    slots: int,
    options: str = "all",
    *,
    batch: int = 3,
    n_heads: int = 2,
    width: int = 4,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random float64 tensors under the names of the operation and of :class:`Positions`."""
    generator = torch.Generator().manual_seed(seed)
    n_keys = slots + n_queries
    shapes = {
        "q": (batch, n_heads, n_queries, width),
        "k": (batch, n_heads, n_keys, width),
        "v": (batch, n_heads, n_keys, width),
        "keys": (n_heads, n_keys, width),
        "content_bias": (n_heads, width),
        "position_bias": (n_heads, width),
        "scores": (n_heads, n_keys),
    }
    found = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
        if name in ("q", "k", "v", "keys", *OPTIONS[options])
    }
    # Views, as heads that were split: no layout is taken for granted.
    return {name: t.mT.contiguous().mT for name, t in found.items()}


def attend(**given: Any) -> Tensor:
    """The operation with :func:`inputs` as its arguments."""
    at = Positions(**{name: given.pop(name) for name in Positions._fields if name in given})
    return relative_attention(positions=at, **given)


def causal(n_queries: int, slots: int) -> Tensor:
    query = torch.arange(slots, slots + n_queries)[:, None]
    return (torch.arange(slots + n_queries) <= query)[None]


def masks(n_queries: int, slots: int) -> dict[str, Tensor | None]:
    """Everything of the past; the last positions only; rows whose memory is part empty."""
    key, query = torch.arange(slots + n_queries), torch.arange(slots, slots + n_queries)[:, None]
    past = causal(n_queries, slots)
    valid = torch.tensor([0, slots // 2, slots])[:, None, None]
    found: dict[str, Tensor | None] = {
        "past": past,
        "window": past & (query - key < max(1, slots)),
        "rows": past & (key >= slots - valid),
    }
    if n_queries == 1:
        found["none"] = None
    return found


def with_gradient(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in tensors.items()}


def by_hand(t: dict[str, Tensor], mask: Tensor | None, scale: float) -> Tensor:
    """The equation of SPEC section 1, element by element."""
    batch, n_heads, n_queries, width = t["q"].shape
    n_keys = t["k"].shape[2]
    lists = {name: tensor.tolist() for name, tensor in t.items()}
    zero = torch.zeros(n_heads, max(width, n_keys)).tolist()
    q, k, v, r = (lists[name] for name in ("q", "k", "v", "keys"))
    u, w, s = (lists.get(name, zero) for name in ("content_bias", "position_bias", "scores"))
    out = torch.zeros_like(t["q"])
    for b, h, i in itertools.product(range(batch), range(n_heads), range(n_queries)):
        weights = {}
        for j in range(n_keys):
            if mask is not None and not mask[b % len(mask), i, j]:
                continue
            d = n_keys - n_queries + i - j
            assert d >= 0
            score = s[h][d]
            for c in range(width):
                score += (q[b][h][i][c] + u[h][c]) * k[b][h][j][c]
                score += (q[b][h][i][c] + w[h][c]) * r[h][d][c]
            weights[j] = math.exp(score * scale)
        for c in range(width):
            attended = sum(weight * v[b][h][j][c] for j, weight in weights.items())
            out[b, h, i, c] = attended / sum(weights.values())
    return out


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("n_queries", "slots"), [(3, 4), (1, 3), (4, 0)])
def test_reference_is_the_equation(n_queries: int, slots: int, options: str) -> None:
    t = inputs(n_queries, slots, options)
    for name, mask in masks(n_queries, slots).items():
        out = attend(**t, mask=mask, implementation="reference")
        assert_same(out, by_hand(t, mask, 4**-0.5), 1e-12, name)


@pytest.mark.parametrize("cache_bytes", [1, ops.CACHE_BYTES], ids=["head by head", "all heads"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("n_queries", "slots"), LENGTHS)
def test_fast_paths_equal_the_reference(
    n_queries: int, slots: int, options: str, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, and fused gradients; the inputs are not changed."""
    monkeypatch.setattr(ops, "CACHE_BYTES", cache_bytes)
    given = inputs(n_queries, slots, options)
    for name, mask in masks(n_queries, slots).items():
        found = {}
        for implementation in ("reference", "fused"):
            t = with_gradient(given)
            out = attend(**t, mask=mask, implementation=implementation)
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
            gradients = torch.autograd.grad((out * weight).sum(), list(t.values()))
            found[implementation] = dict(zip(("out", *t), (out, *gradients), strict=True))
        out = attend(**given, mask=mask, implementation="sdpa")
        assert_same(out, found["reference"]["out"], 1e-12, name)
        for key, expected in found["reference"].items():
            # With one query of one visible key most gradients are nothing but rounding.
            scale = max(1.0, expected.abs().max().item())
            difference = (found["fused"][key] - expected).abs().max()
            assert difference <= 1e-11 * scale, f"{name}: {key}"
    for name, tensor in inputs(n_queries, slots, options).items():
        assert tensor.equal(given[name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("options", ["all", "learned", "bare"])
@pytest.mark.parametrize(("n_queries", "slots"), [(1, 2), (3, 2)])
def test_gradcheck(n_queries: int, slots: int, options: str, dropout: float) -> None:
    """Analytic against numeric derivatives of the fused path, dropout's draw held fixed."""
    t = with_gradient(inputs(n_queries, slots, options, width=2))
    mask = masks(n_queries, slots)["rows"]

    def run(*values: Tensor) -> Tensor:
        torch.manual_seed(2)
        return attend(
            **dict(zip(t, values, strict=True)),
            mask=mask,
            dropout=dropout,
            implementation="fused",
        )

    # Along a random direction where each element by itself would take seconds.
    assert torch.autograd.gradcheck(run, tuple(t.values()), fast_mode=n_queries > 1)


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_dropout_keeps_the_mean_and_drops_weights(implementation: Any) -> None:
    """Over many rows the mean is the result without dropout, and zeros are as many as asked."""
    n, p = 4000, 0.3
    t = inputs(2, 1, batch=1)
    t |= {name: t[name].expand(n, -1, -1, -1) for name in ("q", "k")}
    # Values that show the weights themselves.
    t["v"] = torch.eye(3, 4, dtype=torch.float64).expand(n, 2, -1, -1)
    plain = attend(**t, mask=causal(2, 1), implementation=implementation)[..., :3]
    torch.manual_seed(0)
    out = attend(**t, mask=causal(2, 1), dropout=p, implementation=implementation)
    out = out[..., :3]
    visible = causal(2, 1).expand_as(out[0])
    kept = out[:, visible] != 0
    assert (kept.double().mean(0) - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    scaled = plain / (1 - p)
    assert torch.allclose(out[:, visible][kept], scaled[:, visible][kept])
    assert not out[:, ~visible].any()


@pytest.mark.parametrize("implementation", ["reference", *FAST, None])
def test_hidden_keys_do_not_matter(implementation: Any) -> None:
    """What the mask hides may hold anything finite, and gets no gradient."""
    t, mask = inputs(4, 3), masks(4, 3)["rows"]
    before = attend(**t, mask=mask, implementation=implementation)
    t["k"][0, :, :3] = t["v"][0, :, :3] = 1e3
    after = attend(**t, mask=mask, implementation=implementation)
    assert_same(after, before, 1e-12, "hidden")
    if implementation == "fused":
        t = with_gradient(t)
        attend(**t, mask=mask, implementation="fused").sum().backward()
        assert not t["k"].grad[0, :, :3].any()
        assert not t["v"].grad[0, :, :3].any()


def test_choice_of_implementation() -> None:
    """fused where a gradient is wanted, else sdpa; both agree, and neither is swapped silently."""
    t, mask = inputs(5, 3), causal(5, 3)
    assert attend(**t, mask=mask).grad_fn is None
    out = attend(**with_gradient(t), mask=mask)
    assert "FusedRelativeAttention" in str(out.grad_fn.next_functions[0][0])
    with torch.no_grad():
        assert attend(**with_gradient(t), mask=mask).grad_fn is None
    with pytest.raises(ValueError, match="has no gradients"):
        attend(**with_gradient(t), mask=mask, implementation="sdpa")
    with pytest.raises(ValueError, match="dropout"):
        attend(**t, mask=mask, dropout=0.1, implementation="sdpa")


# ----- Keys of the future


@pytest.mark.parametrize("n_future", [2, 4])
@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_future_where_the_mask_allows_it(options: str, slots: int, n_future: int) -> None:
    """Every implementation, forward and backward, is that of queries behind the last key: there the
    same distances are positive, the future being padding that the mask excludes."""
    n_queries = 5
    n_keys = slots + n_queries
    t = inputs(n_queries, slots, options)
    wider = inputs(1, n_keys + n_future - 1, options, seed=1)
    table = {n: wider[n] for n in ("keys", "scores") if n in wider}
    query, key = torch.arange(slots, n_keys)[:, None], torch.arange(n_keys)
    mask: Tensor | None = (key <= query + n_future)[None]
    padding = torch.zeros(3, 2, n_future, 4, dtype=torch.float64)
    padded = {n: torch.cat([t[n], padding], 2) for n in ("k", "v")}
    excluded = torch.zeros(1, n_queries, n_future, dtype=torch.bool)
    expected = attend(
        **t | table | padded, mask=torch.cat([mask, excluded], 2), implementation="reference"
    )
    if n_future == n_queries - 1:
        mask = None
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    gradients = {}
    for implementation in ("reference", *FAST):
        with_table = with_gradient(t | table) if implementation != "sdpa" else t | table
        out = attend(**with_table, mask=mask, n_future=n_future, implementation=implementation)
        assert_same(out, expected, 1e-12, implementation)
        if implementation != "sdpa":
            found = torch.autograd.grad((out * weight).sum(), list(with_table.values()))
            gradients[implementation] = dict(zip(with_table, found, strict=True))
    for name, gradient in gradients["reference"].items():
        assert_same(gradients["fused"][name], gradient, 1e-11, name)
