"""Tensors recorded from other implementations: where they are, how they are read and compared.

The format is described in the README of the golden folder. Nothing here goes by a file's name: the
sets' configurations are whatever JSON files lie in the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import device
from memspan.lab.converters.names import Rows

ROOT = Path(__file__).resolve().parent.parent
MIXED = ("fb_feedback", "lucidrains")
"""Sets with several architectures."""
CLAIMED: set[Path] = set()
"""Configurations that some test has asked for."""
OUTPUT = {torch.float64: 1e-9, torch.float32: 1e-4}
GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Tolerances. Both precisions are compared with what the peer computed in float64."""


def folder() -> Path:
    """``MEMSPAN_GOLDEN``, or ``../shared/golden``, or the few in ``tests/recorded`` that are in the
    repository; relative paths count from it."""
    found = (ROOT / "../shared/golden", ROOT / "tests" / "recorded")
    default = next((path for path in found if path.is_dir()), found[-1])
    return (ROOT / os.environ.get("MEMSPAN_GOLDEN", default)).resolve()


def set_folder(name: str) -> Path:
    """A set's folder, in ``tests/recorded`` where :func:`folder` does not have it."""
    places = (folder() / name, ROOT / "tests" / "recorded" / name)
    return next((place for place in places if place.is_dir()), places[0])


def class_of(path: Path) -> str:
    """Architecture of the configuration, by the peer's name."""
    return str(json.loads(path.read_text())["config"].get("cls", ""))


def parameters(*sets: str, of: str | None = None) -> list[Any]:
    """One pytest parameter per configuration of the sets; one that is skipped if there is none.

    ``of``: only configurations of this class, in sets that hold several.
    """
    paths = [path for name in sets for path in sorted(set_folder(name).glob("*.json"))]
    paths = [p for p in paths if of is None or p.parent.name not in MIXED or class_of(p) == of]
    CLAIMED.update(paths)
    if not paths:
        reason = f"no golden tensors of {', '.join(sets)} in {folder()}: set MEMSPAN_GOLDEN"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in paths]


def in_both_precisions(path: Path) -> Iterator[Golden]:
    """The configuration in float64 and in float32; what it recorded must have been compared."""
    for dtype in OUTPUT:
        golden = Golden(path, dtype)
        yield golden
        recorded = [k for k in golden.tensors if k.startswith(("in.", "param.", "f64."))]
        left = [k for k in recorded if k not in golden.seen and ".buf." not in k]
        assert not left, f"recorded, but not compared in {dtype}: {left}"


class Golden:
    """One configuration: its JSON, its tensors, and a record of which tensors were looked at."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float64) -> None:
        self.json: dict[str, Any] = json.loads(path.read_text())
        self.config: dict[str, Any] = self.json["config"]
        self.set = self.json["set"]
        self.dtype = dtype
        tensors = load_file(path.with_name(self.json["file"]))
        self.tensors = {name: t.to(device.CHOSEN or "cpu") for name, t in tensors.items()}
        self.seen: set[str] = set()
        self._loss = torch.zeros((), dtype=dtype)
        self._magnitude = 0.0

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def __getitem__(self, key: str) -> Tensor:
        self.seen.add(key)
        return self.tensors[key]

    def input(self, name: str) -> Tensor:
        """A copy of ``in.<name>``, floating-point ones in this precision."""
        tensor = self[f"in.{name}"]
        return tensor.to(self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def named(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """All tensors whose key starts with ``prefix``, under the rest of their key."""
        for key in sorted(self.tensors):
            if key.startswith(prefix):
                yield key.removeprefix(prefix), self[key]

    @property
    def segments(self) -> range:
        return range(len(self.config["segments"]))

    def tied_to(self, name: str) -> set[str]:
        """``name`` and every other name of the same parameter of the peer."""
        return next((set(g) for g in self.json["tied_parameters"] if name in g), {name})

    def leaves(self) -> dict[str, Tensor]:
        """The peer's parameters, for a model of our pieces; tied ones are one under all their names."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.named("param."):
            first = next((n for n in self.tied_to(name) if n in found), None)
            made = tensor.to(self.dtype, copy=True).requires_grad_()
            found[name] = found[first] if first else made
            assert_same(tensor, found[name], 1e-6, f"{name} is tied")
        return found

    def check(self, key: str, ours: Tensor) -> None:
        """Compare with ``f64.<key>`` if that is recorded: peers record some results only at times."""
        if f"f64.{key}" in self:
            tolerance = GRADIENT if "grad" in key else OUTPUT
            assert_same(ours, self[f"f64.{key}"], tolerance[self.dtype], f"{key} in {self.dtype}")

    def score(self, segment: str, *terms: Tensor) -> None:
        """Add what a segment is scored by to the loss."""
        loss = torch.stack([term.sum() for term in terms]).sum()
        magnitude = sum(term.detach().abs().sum().item() for term in terms)
        if f"f64.{segment}.loss" in self:
            self._check_loss(f"{segment}.loss", loss, magnitude)
        self._loss = self._loss + loss
        self._magnitude = self._magnitude + magnitude

    def backward(self) -> None:
        """From the loss of all that was scored."""
        self._check_loss("loss", self._loss, self._magnitude)
        # What parameters are made of, a peer has once for several passes.
        self._loss.backward(retain_graph=True)
        self._loss = torch.zeros((), dtype=self.dtype)
        self._magnitude = 0.0

    def _check_loss(self, key: str, ours: Tensor, magnitude: float) -> None:
        """Losses are sums that cancel: they are compared on the scale of what is summed."""
        theirs = self[f"f64.{key}"].item()
        difference = abs(ours.item() - theirs)
        assert difference <= OUTPUT[self.dtype] * max(magnitude, abs(theirs)), key

    def check_gradients(self, ours: Mapping[str, Rows | Tensor], *vanishing: str) -> None:
        """Gradients of all the peer's parameters. What it gives none must have none, or zero, with us.

        Args:
            ours: leaves, or rows of our parameters, by the peer's names.
            vanishing: parameters whose gradient is nothing but rounding with the peer.
        """

        def found(name: str) -> Tensor:
            rows = ours[name]
            return gradient(rows) if isinstance(rows, Tensor) else torch.cat(rows(gradient))

        compared: set[str] = set()
        for name, theirs in self.named("f64.grad."):
            compared |= self.tied_to(name)
            if name in vanishing:
                assert theirs.abs().max() < 1e-9, f"{name} has a gradient"
            else:
                self.check(f"grad.{name}", found(name).view_as(theirs))
        for name in set(self.json["parameters_without_gradient"]) - compared:
            assert name not in ours or not found(name).any(), f"{name}: a gradient from nowhere"
            compared |= self.tied_to(name)
        left = {name for name, _ in self.named("param.")} - compared
        assert not left, f"parameters whose gradient was not compared: {sorted(left)}"


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def newest(x: Tensor, count: Tensor) -> Tensor:
    """The slots of ``x [B, N, D]`` that are in use, ``count`` in every row."""
    assert len(set(count.tolist())) == 1
    return x[:, x.shape[1] - int(count[0]) :]


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Equal to ``tolerance`` relative to the largest entry of ``theirs``."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} != {tuple(theirs.shape)}"
    if theirs.numel() == 0:
        return
    ours = ours.detach().cpu().double()
    theirs = theirs.detach().cpu().double()
    scale = theirs.abs().max()
    difference = (ours - theirs).abs().max()
    # Not `>`: a NaN has to fail.
    assert difference <= tolerance * scale, (
        f"{what}: off by {difference:.3e}, largest entry {scale:.3e}"
    )
