"""Tensors recorded from other implementations: where they are, how they are read and compared.

The format is described in the README of the golden folder. Nothing here goes by a file's name: the
sets' configurations are whatever JSON files lie in the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import device

ROOT = Path(__file__).resolve().parent.parent
MIXED = ("fb_feedback", "lucidrains")
"""Sets with several architectures."""
CLAIMED: set[Path] = set()
"""Configurations that some test has asked for."""


def folder() -> Path:
    """``MEMSPAN_GOLDEN``, or ``../shared/golden``; relative paths count from the repository."""
    return (ROOT / os.environ.get("MEMSPAN_GOLDEN", "../shared/golden")).resolve()


def class_of(path: Path) -> str:
    """What the peer calls the configuration's architecture."""
    return str(json.loads(path.read_text())["config"].get("cls", ""))


def parameters(*sets: str, of: str | None = None) -> list[Any]:
    """One pytest parameter per configuration of the sets; one that is skipped if there is none.

    ``of``: only configurations of this class, in sets that hold several.
    """
    paths = [path for name in sets for path in sorted((folder() / name).glob("*.json"))]
    paths = [p for p in paths if of is None or p.parent.name not in MIXED or class_of(p) == of]
    CLAIMED.update(paths)
    if not paths:
        reason = f"no golden tensors of {', '.join(sets)} in {folder()}: set MEMSPAN_GOLDEN"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in paths]


class Golden:
    """One configuration: its JSON, its tensors, and a record of which tensors were looked at."""

    def __init__(self, path: Path) -> None:
        self.json: dict[str, Any] = json.loads(path.read_text())
        self.config: dict[str, Any] = self.json["config"]
        tensors = load_file(path.with_name(self.json["file"]))
        self.tensors = {name: t.to(device.CHOSEN or "cpu") for name, t in tensors.items()}
        self._seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def __getitem__(self, key: str) -> Tensor:
        self._seen.add(key)
        return self.tensors[key]

    def input(self, name: str, dtype: torch.dtype) -> Tensor:
        """``in.<name>``, floating-point ones in ``dtype``."""
        tensor = self[f"in.{name}"]
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def named(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """All tensors whose key starts with ``prefix``, under the rest of their key."""
        for key in sorted(self.tensors):
            if key.startswith(prefix):
                yield key.removeprefix(prefix), self[key]

    def unseen(self, *prefixes: str) -> list[str]:
        """Keys under the prefixes that nothing has looked at."""
        return [k for k in sorted(self.tensors) if k.startswith(prefixes) and k not in self._seen]

    @property
    def segments(self) -> range:
        return range(len(self.config["segments"]))

    def tied_to(self, name: str) -> set[str]:
        """``name`` and every other name of the same parameter of the peer."""
        return next((set(g) for g in self.json["tied_parameters"] if name in g), {name})


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Equal to ``tolerance`` relative to the largest entry of ``theirs``."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} != {tuple(theirs.shape)}"
    if theirs.numel() == 0:
        return
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    scale = theirs.abs().max()
    difference = (ours - theirs).abs().max()
    # Not `>`: a NaN has to fail.
    assert difference <= tolerance * scale, (
        f"{what}: off by {difference:.3e}, largest entry {scale:.3e}"
    )
