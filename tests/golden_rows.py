"""From a peer's parameters to ours: written, and their gradients compared, by one map.

The maps are those of :mod:`memspan.converters`; here they must be complete in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from golden import Golden, assert_same
from memspan.converters.names import Get, Names, Rows
from memspan.models import EmbeddingConfig, LanguageModel

OUTPUT = {torch.float64: 1e-9, torch.float32: 5e-5}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-3}
PREFIX = {torch.float64: "f64", torch.float32: "f32"}


def labml_model(g: Golden, kind: Any, **sizes: int) -> LanguageModel:
    """labml's options as those of an architecture with learned positions."""
    c = g.config
    slots = c["mem_len"] + sizes.get("compressed_length", 0)
    config = kind(
        n_layers=c["n_layers"],
        d_model=c["d_model"],
        n_heads=c["heads"],
        d_ff=c["d_ff"],
        memory_length=c["mem_len"],
        positions="learned",
        max_distance=max(c["P"] + 1, slots + max(c["segments"])),
        attention_bias=True,
        **sizes,
    )
    return LanguageModel(c["n_tokens"], config, EmbeddingConfig(tie=False, scale=False))


# ----- Writing parameters, reading gradients


@torch.no_grad()
def write_parameters(model: nn.Module, rows: Names, g: Golden) -> None:
    """Every parameter of the peer into ours; fails if one of either side is left over."""
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    theirs = dict(g.named("param."))
    assert set(theirs) == set(rows), f"unmapped: {set(theirs) ^ set(rows)}"
    for name, tensor in theirs.items():
        views = rows[name](lambda p: p.data)
        flat = tensor.unsqueeze(0) if views[0].dim() > tensor.dim() else tensor
        assert sum(len(v) for v in views) == len(flat), f"{name}: sizes differ"
        for view, part in zip(views, flat.split([len(v) for v in views]), strict=True):
            assert view.shape == part.shape, f"{name}: {view.shape} != {part.shape}"
            view.copy_(part)
    for name, parameter in model.named_parameters():
        if name.endswith(("position_keys", "position_scores")):
            # Distances past the peer's table, which no recorded segment reaches.
            parameter[g.config["P"] + 1 :] = 0
        assert parameter.isfinite().all(), f"{name} has no counterpart"
    for name, tensor in theirs.items():
        # Nothing was written twice with two values. The future of a table is not ours.
        past = g.config["P"] + 1 if "key_pos_" in name else None
        ours = read(rows[name], tensor, lambda p: p.data)
        assert_same(ours[:past], tensor[:past], 0.0, f"param {name}")


def read(rows: Rows, like: Tensor, get: Get) -> Tensor:
    return torch.cat(rows(get)).view_as(like)


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def check_gradients(rows: Names, g: Golden, dtype: torch.dtype) -> None:
    """All gradients of the peer; what it gives none must be none, or zero, with us."""
    compared = set()
    for name, theirs in g.named("f64.grad."):
        ours = read(rows[name], theirs, gradient)
        assert_same(ours, theirs, GRADIENT[dtype], f"gradient of {name}")
        compared |= g.tied_to(name)
    without = set(g.json["parameters_without_gradient"])
    for name in (without & set(rows)) - compared:
        assert all(not r.any() for r in rows[name](gradient)), f"{name}: a gradient from nowhere"
    left = set(rows) - compared - {n for w in without for n in g.tied_to(w)}
    assert not left, f"parameters whose gradient was not compared: {sorted(left)}"


def assert_all_seen(g: Golden, dtype: torch.dtype) -> None:
    left = g.unseen("in.", "param.", f"{PREFIX[dtype]}.", "f64.grad.")
    assert not left, f"recorded, but not compared: {left}"


class Losses:
    """What the segments are scored by, one after the other, and in all."""

    def __init__(self, g: Golden, dtype: torch.dtype) -> None:
        self._g, self._dtype = g, dtype
        self._total, self._magnitude = torch.zeros((), dtype=dtype), 0.0

    def add(self, key: str, *terms: Tensor) -> None:
        """Losses are sums that cancel: they are compared on the scale of what is summed."""
        loss = torch.stack([term.sum() for term in terms]).sum()
        magnitude = sum(term.abs().sum().item() for term in terms)
        self._check(loss, magnitude, key)
        self._total, self._magnitude = self._total + loss, self._magnitude + magnitude

    def backward(self) -> None:
        self._check(self._total, self._magnitude, "loss")
        # What parameters are made of, a peer has once for several passes.
        self._total.backward(retain_graph=True)

    def _check(self, ours: Tensor, magnitude: float, key: str) -> None:
        theirs = self._g[f"{PREFIX[self._dtype]}.{key}"].item()
        assert abs(ours.item() - theirs) <= OUTPUT[self._dtype] * max(magnitude, abs(theirs)), key


# ----- Where a peer is put together from our pieces: its parameters as leaves


def leaves(g: Golden, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tied parameters are one leaf under all their names."""
    found: dict[str, Tensor] = {}
    for name, tensor in g.named("param."):
        first = next((n for n in g.tied_to(name) if n in found), None)
        found[name] = found[first] if first else tensor.to(dtype, copy=True).requires_grad_()
        assert_same(tensor, found[name], 1e-6, f"{name} is tied")
    return found


def check_leaves(
    g: Golden, theirs: dict[str, Tensor], dtype: torch.dtype, vanishing: tuple[str, ...] = ()
) -> None:
    """All gradients of the peer. ``vanishing``: what it gives one that is nothing but rounding."""
    compared: set[str] = set()
    for name, expected in g.named("f64.grad."):
        compared |= g.tied_to(name)
        if name in vanishing:
            assert expected.abs().max() < 1e-9, f"{name} has a gradient"
        else:
            assert_same(gradient(theirs[name]), expected, GRADIENT[dtype], f"gradient of {name}")
    without = set(g.json["parameters_without_gradient"])
    for name in without - compared:
        assert not gradient(theirs[name]).any(), f"{name}: a gradient from nowhere"
    left = set(theirs) - compared - {n for w in without for n in g.tied_to(w)}
    assert not left, f"not compared: {sorted(left)}"
