"""From a peer's parameters to ours: written, and their gradients compared, by one map.

The maps are those of :mod:`memspan.converters`; here they must be complete in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from golden import Golden, assert_same
from memspan.converters.names import Get, Names, Rows
from memspan.models import LanguageModel

OUTPUT = {torch.float64: 1e-9, torch.float32: 5e-5}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-3}
PREFIX = {torch.float64: "f64", torch.float32: "f32"}

# ----- Writing parameters, reading gradients


@torch.no_grad()
def write_parameters(model: LanguageModel, rows: Names, g: Golden) -> None:
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


def check_loss(ours: Tensor, magnitude: float, theirs: Tensor, dtype: torch.dtype) -> None:
    """Losses are sums that cancel: they are compared on the scale of what is summed."""
    assert abs(ours.item() - theirs.item()) <= OUTPUT[dtype] * max(magnitude, abs(theirs.item()))
