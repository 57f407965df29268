"""Relative attention: the reference against the equation, the fast paths against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from golden import assert_same
from memspan.ops import relative as ops
from memspan.ops.relative import Positions, relative_attention

LENGTHS = [(1, 0), (1, 63), (63, 0), (63, 100), (100, 1), (5, 3)]
"""Queries, and slots of memory."""
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
    width: int = 4,
) -> dict[str, Tensor]:
    """Random float64 tensors under the names of the operation and of :class:`Positions`."""
    generator = torch.Generator().manual_seed(0)
    n_heads = 2
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


def masks(n_queries: int, slots: int) -> dict[str, Tensor | None]:
    """The past; the last of it; rows whose memory is partly empty; no mask, for one query."""
    key = torch.arange(slots + n_queries)
    query = torch.arange(slots, slots + n_queries)[:, None]
    reached = (key <= query)[None]
    valid = torch.tensor([0, slots // 2, slots])[:, None, None]
    found: dict[str, Tensor | None] = {
        "reached": reached,
        "window": reached & (query - key < max(1, slots)),
        "rows": reached & (key >= slots - valid),
    }
    return found | ({"none": None} if n_queries == 1 else {})


def with_gradient(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in tensors.items()}


def by_hand(t: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    """The equation of SPEC section 1, query by query."""
    batch, n_heads, n_queries, width = t["q"].shape
    n_keys = t["k"].shape[2]
    zeros = torch.zeros(n_heads, width).double()
    u, v = (t.get(name, zeros) for name in ("content_bias", "position_bias"))
    out = torch.zeros_like(t["q"])
    for b, h, i in itertools.product(range(batch), range(n_heads), range(n_queries)):
        seen = torch.arange(n_keys) if mask is None else mask[b % len(mask), i].nonzero()[:, 0]
        row = n_keys - n_queries + i - seen
        assert row.min() >= 0
        q = t["q"][b, h, i]
        keys = t["k"][b, h, seen]
        table = t["keys"][h, row]
        scores = keys @ (q + u[h]) + table @ (q + v[h])
        if "scores" in t:
            scores += t["scores"][h, row]
        out[b, h, i] = (scores * width**-0.5).softmax(0) @ t["v"][b, h, seen]
    return out


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [(3, 4), (1, 3), (4, 0)], ids=str)
def test_reference_is_the_equation(lengths: tuple[int, int], options: str) -> None:
    t = inputs(*lengths, options)
    for name, mask in masks(*lengths).items():
        out = attend(**t, mask=mask, implementation="reference")
        assert_same(out, by_hand(t, mask), 1e-12, name)


@pytest.mark.parametrize("cache_bytes", [1, ops.CACHE_BYTES], ids=["head by head", "all heads"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fast_paths_equal_the_reference(
    lengths: tuple[int, int],
    options: str,
    cache_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results, and fused gradients; the inputs are not changed."""
    monkeypatch.setattr(ops, "CACHE_BYTES", cache_bytes)
    given = inputs(*lengths, options)
    for name, mask in masks(*lengths).items():
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
    for name, tensor in inputs(*lengths, options).items():
        assert tensor.equal(given[name]), name


@pytest.mark.parametrize("options", ["all", "learned", "bare"])
@pytest.mark.parametrize(("n_queries", "slots"), [(1, 2), (3, 2)])
def test_gradients_with_dropout(n_queries: int, slots: int, options: str) -> None:
    """Analytic against numeric derivatives of the fused path, the draw held fixed."""
    t = with_gradient(inputs(n_queries, slots, options, width=2))
    at: dict[str, Any] = {"mask": masks(n_queries, slots)["rows"], "dropout": 0.4}

    def run(*values: Tensor) -> Tensor:
        torch.manual_seed(2)
        return attend(**dict(zip(t, values, strict=True)), **at, implementation="fused")

    # Along a random direction where each element by itself would take seconds.
    assert torch.autograd.gradcheck(run, tuple(t.values()), fast_mode=n_queries > 1)


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_dropout_keeps_the_mean_and_drops_weights(implementation: Any) -> None:
    """Over many rows the mean is the result without dropout, and zeros are as many as asked."""
    n = 4000
    p = 0.3
    t = inputs(2, 1, batch=1)
    mask = masks(2, 1)["reached"]
    assert mask is not None
    t |= {name: t[name].expand(n, -1, -1, -1) for name in ("q", "k")}
    # Values that show the weights themselves.
    t["v"] = torch.eye(3, 4, dtype=torch.float64).expand(n, 2, -1, -1)
    plain, out = (
        attend(**t, mask=mask, dropout=dropout, implementation=implementation)[..., :3]
        for dropout in (0, p)
    )
    visible = mask.expand_as(out[0])
    kept = out[:, visible] != 0
    assert (kept.double().mean(0) - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.allclose(out[:, visible][kept], plain[:, visible][kept] / (1 - p))
    assert not out[:, ~visible].any()
    # Not values, which all queries would miss together.
    assert not kept[:, 0].equal(kept[:, 2])


@pytest.mark.parametrize("implementation", ["reference", "fused", "sdpa"])
def test_hidden_keys_do_not_matter(implementation: str) -> None:
    """Masked positions may hold anything finite, and get no gradient."""
    t = inputs(4, 3)
    mask = masks(4, 3)["rows"]
    before = attend(**t, mask=mask, implementation=implementation)
    t["k"][0, :, :3] = t["v"][0, :, :3] = 1e3
    t = with_gradient(t) if implementation != "sdpa" else t
    after = attend(**t, mask=mask, implementation=implementation)
    assert_same(after, before, 1e-12, "hidden")
    if implementation != "sdpa":
        for gradient in torch.autograd.grad(after.sum(), (t["k"], t["v"])):
            assert not gradient[0, :, :3].any()


def test_choice_of_implementation() -> None:
    """fused where a gradient is wanted, else sdpa; neither is swapped silently."""
    t = inputs(5, 3)
    at = {"mask": masks(5, 3)["reached"]}
    one_learned = t | {"scores": t["scores"].clone().requires_grad_()}
    assert attend(**t, **at).grad_fn is None
    out = attend(**one_learned, **at)
    assert "FusedRelativeAttention" in str(out.grad_fn.next_functions[0][0])
    with torch.no_grad():
        assert attend(**one_learned, **at, implementation="sdpa").equal(attend(**t, **at))
    with pytest.raises(ValueError, match="has no gradients"):
        attend(**one_learned, **at, implementation="sdpa")
    with pytest.raises(ValueError, match="dropout"):
        attend(**t, **at, dropout=0.1, implementation="sdpa")
