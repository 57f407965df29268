"""Relative attention at three sizes, by our implementations and by others', and its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.ops.limits import Limits
from memspan.ops.relative import (
    Positions,
    _farthest_first,
    _fold_biases,
    _position_term,
    _shift,
    relative_attention,
)
from on_gpu.jobs import (
    ASK,
    ATTENTION_OPERATIONS_PER_SECOND,
    START,
    Call,
    Job,
    Predicted,
    one_line,
)
from triton_proofs import mend_bfloat16

SIZES = {
    "small": (8, 8, 512, 1024, 64),
    "middle": (16, 16, 1024, 2048, 64),
    "large": (4, 16, 2048, 4096, 128),
}
"""``B, H, T, S, K``."""
TOY = (1, 2, 5, 9, 16)
ACCURACY = (2, 2, 100, 170, 64)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The largest difference from float64 that is allowed, as a part of the largest number."""
Given = dict[str, Tensor]
Side = Callable[[Given, Tensor], Tensor]


def step_1(given: Given, mask: Tensor) -> Tensor:
    """No kernel of our own: torch's attention with the shifted position term as its bias, whose
    gradient is torch's."""
    positions = Positions(given["keys"], None, given["u"], given["w"])
    q, scores = _fold_biases(given["q"], positions)
    keys, scores = _farthest_first(positions.keys, scores)
    batch, n_heads, n_queries, width = q.shape
    n_keys = given["k"].shape[2]
    heads = q.transpose(0, 1).flatten(1, 2)
    by_distance = _position_term(heads, keys, scores).view(n_heads * batch, -1)
    position = _shift(by_distance, n_queries, n_keys).unflatten(0, (n_heads, batch))
    bias = position.transpose(0, 1).masked_fill(~mask[:, None], -torch.inf) * width**-0.5
    return F.scaled_dot_product_attention(q, given["k"], given["v"], attn_mask=bias)


def ours(name: str, given: Given, mask: Tensor) -> Tensor:
    positions = Positions(given["keys"], None, given["u"], given["w"])
    q, k, v = (given[n] for n in "qkv")
    seen = Limits.of(mask) if name == "triton" else mask
    return relative_attention(q, k, v, positions, mask=seen, implementation=name)


def plain(given: Given, mask: Tensor) -> Tensor:
    """Torch's attention without positions: what there would be to gain."""
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (given[n] for n in "qkv")
    return F.scaled_dot_product_attention(q, k, v, causal_lower_right(*mask.shape[1:]))


def labml(given: Given, mask: Tensor) -> Tensor:
    """labml-nn's scores, softmax and sum, without its projections; its tables are its own."""
    from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention

    q, k, v = (given[n].permute(2, 0, 1, 3) for n in "qkv")
    n_heads, width = q.shape[2:]
    if "labml" not in _made:
        with in_type(q.dtype):
            _made["labml"] = RelativeMultiHeadAttention(n_heads, n_heads * width, 0.0)
        if q.device.type != "cpu":
            _made["labml"].to(q.device)
    attention = _made["labml"]
    scores = attention.get_scores(q, k) * attention.scale
    scores = scores.masked_fill(~mask[0, :, :, None, None], -torch.inf)
    return torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v).permute(1, 2, 0, 3)


@contextmanager
def in_type(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def x_transformers(given: Given, mask: Tensor) -> Tensor:
    """x-transformers' attention with a bias by distance alone, as its T5 positions have: another
    function, which costs less."""
    from x_transformers.attend import Attend

    q, k, v = (given[n] for n in "qkv")
    n_queries, n_keys = mask.shape[1:]
    if "x" not in _made:
        _made["x"] = Attend(heads=q.shape[1], causal=True, flash=True)
    query = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]
    distance = (query - torch.arange(n_keys, device=q.device)).clamp(min=0)
    bias = given["keys"][:, :, 0][:, distance]
    return _made["x"](q, k, v, attn_bias=bias)[0]


_made: dict[str, Any] = {}
PLAIN = "SDPA without positions"
SIDES: dict[str, Side] = {
    "triton": partial(ours, "triton"),
    "step 1": step_1,
    "fused": partial(ours, "fused"),
    PLAIN: plain,
    "labml-nn": labml,
    "x-transformers, T5 bias": x_transformers,
}


def drawn(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Given:
    batch, n_heads, n_queries, n_keys, width = size
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (batch, n_heads, n_queries, width),
        "k": (batch, n_heads, n_keys, width),
        "v": (batch, n_heads, n_keys, width),
        "keys": (n_heads, n_keys, width),
        "u": (n_heads, width),
        "w": (n_heads, width),
    }
    return {
        name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def causal(size: tuple[int, ...], device: torch.device) -> Tensor:
    n_queries, n_keys = size[2:4]
    whole = torch.ones(1, n_queries, n_keys, dtype=torch.bool, device=device)
    return whole.tril(n_keys - n_queries)


def prepare(
    side: str, size: tuple[int, ...], dtype: torch.dtype, backward: bool, device: torch.device
) -> Call:
    _made.clear()
    given = drawn(size, dtype, device)
    mask = causal(size, device)
    upstream = torch.ones_like(given["q"]).detach()

    def forward() -> None:
        with torch.no_grad():
            SIDES[side](given, mask)

    def both() -> None:
        out = SIDES[side](given, mask)
        torch.autograd.grad(out, list(given.values()), upstream, allow_unused=True)

    return both if backward else forward


def jobs_of(name: str, toy: bool) -> list[Job]:
    """Every side, forward and with backward; in float32 at the smallest size only."""
    size = TOY if toy else SIZES[name]
    types = [torch.bfloat16, torch.float32] if name == "small" else [torch.bfloat16]
    return [
        Job(
            f"{side}, {str(dtype).removeprefix('torch.')}, {'training' if both else 'forward'}",
            partial(prepare, side, size, dtype, both),
            programs=plain_programs(size, dtype, both) if side == PLAIN else None,
        )
        for dtype in types
        for both in (False, True)
        for side in SIDES
    ]


def plain_programs(size: tuple[int, ...], dtype: torch.dtype, backward: bool) -> Predicted:
    """Torch's attention by limits in place of a mask, which cannot be asked for without a GPU."""
    batch, n_heads, n_queries, n_keys, width = size
    pairs = batch * n_heads
    # Half of the segment's own part is in the future.
    one_product = 2 * pairs * n_queries * (n_keys - n_queries / 2) * width
    rate = ATTENTION_OPERATIONS_PER_SECOND[True] if dtype == torch.bfloat16 else 2e13
    # Recomputed scores make five products of the backward's four.
    products = (7 if backward else 2) * one_product
    rows = n_queries * (4 if backward else 1) + 2 * n_keys * backward
    asking = (8 if backward else 3) * ASK
    return Predicted(products / rate + 4 * START, asking, pairs * width * dtype.itemsize * rows)


def accuracy(device: torch.device) -> Iterator[dict[str, Any]]:
    """The largest difference of outputs and gradients from the reference in float64."""
    if device.type == "cpu" and find_spec("triton") is not None:
        mend_bfloat16()
    mask = causal(ACCURACY, torch.device("cpu"))
    for dtype in LIMITS:
        given = drawn(ACCURACY, dtype, device)
        exact = {n: t.detach().cpu().double().requires_grad_() for n, t in given.items()}
        upstream = torch.linspace(-1, 1, given["q"].numel()).view_as(given["q"]).to(device, dtype)
        expected = results(partial(ours, "reference"), exact, mask, upstream.cpu().double())
        for name in ("triton", "step 1", "fused"):
            row: dict[str, Any] = {"what": f"{name}, {str(dtype).removeprefix('torch.')}, error"}
            try:
                found = results(SIDES[name], given, mask.to(device), upstream)
            except Exception as error:
                yield row | {"error": one_line(error)}
                continue
            pairs = zip(found, expected, strict=True)
            worst = max(
                ((a.cpu().double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
                for a, b in pairs
            )
            good = worst < LIMITS[dtype]
            yield (
                row
                | {"difference": worst, "at_most": LIMITS[dtype]}
                | ({} if good else {"error": f"differs from float64 by {worst:.1e}"})
            )


def results(side: Side, given: Given, mask: Tensor, upstream: Tensor) -> list[Tensor]:
    out = side(given, mask)
    return [out.detach(), *torch.autograd.grad(out, list(given.values()), upstream)]
