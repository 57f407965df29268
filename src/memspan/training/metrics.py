"""What a run's ``metrics.jsonl`` holds: its records, their checksum, and pictures of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memspan.files.disk import write_atomically
from memspan.files.pictures import png
from memspan.models.options import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a ``metrics.jsonl``; lines that a crash cut short are left out."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            # ValueError: also a number of thousands of digits. RecursionError: nested as deep.
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                records.append(record)
    return [r for r in records if all(map(_is_number_or_none, r.values()))]


def _is_number_or_none(value: object) -> bool:
    return type(value) in (float, type(None)) or (type(value) is int and abs(value) < 1 << 63)


def checksum(folder: Path) -> dict[str, object]:
    """Size and SHA-256 of ``metrics.jsonl`` as it is now, flushed to the disk."""
    path = folder / "metrics.jsonl"
    content = b""
    if path.is_file():
        # Open for writing, too: Windows flushes only such files.
        with open(path, "r+b") as file:
            content = file.read()
            os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def unchanged(folder: Path, saved: dict[str, object]) -> bool:
    """Whether ``metrics.jsonl`` begins as it was when :func:`checksum` was taken."""
    path = folder / "metrics.jsonl"
    content = path.read_bytes() if path.is_file() else b""
    size = saved.get("bytes")
    kept = content[:size] if type(size) is int else b""
    return len(kept) == size and hashlib.sha256(kept).hexdigest() == saved.get("sha256")


def plot(folder: Path, plots: Sequence[Plot] = ()) -> list[Path]:
    """Draw a run's metrics, and return the pictures' paths.

    ``loss.png``: bits per byte in training and validation against tokens read, or nats per token if
    some are unknown. ``attention.png``, for architectures that report it: the share of attention on
    each part of memory.

    Raises:
        MemspanError: matplotlib is not installed, or fails; the disk is full.
    """
    records = read(folder / "metrics.jsonl")
    pictures = []

    def draw(name: str, lines: dict[str, tuple[str, dict[str, Any]]], ylabel: str) -> None:
        """``lines``: label -> start of the records' keys, whose mean is drawn, and style."""

        def on(figure: Figure) -> None:
            axes = figure.subplots()
            for label, (key, style) in lines.items():
                points = []
                for record in records:
                    values = [v for k, v in record.items() if k == key or k.startswith(f"{key}/")]
                    if values and None not in (record.get("tokens"), *values):
                        points.append((record["tokens"], sum(values) / len(values)))
                if points:
                    axes.plot(*zip(*points, strict=True), label=label, **style)
            axes.set(xlabel="tokens read", ylabel=ylabel, title=folder.name)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()

        # Written like everything else: completely or not at all, and never through a link.
        write_atomically(folder / name, png(on, 7, 4.2, dpi=120))
        pictures.append(folder / name)

    kinds = ("train", "validation")
    # One unit for both lines.
    without_bits = any(r.get(f"{kind}_bits_per_byte", 0) is None for r in records for kind in kinds)
    unit = "nats_per_token" if without_bits else "bits_per_byte"
    losses: dict[str, tuple[str, dict[str, Any]]] = {
        "train": (f"train_{unit}", {"alpha": 0.5, "linewidth": 1}),
        "validation": (f"validation_{unit}", {"marker": "o"}),
    }
    draw("loss.png", losses, unit.replace("_", " "))
    recorded = {key.split("/")[0] for record in records for key in record}
    for own in plots:
        if recorded.intersection(own.lines.values()):
            lines = {label: (key, {"marker": "o"}) for label, key in own.lines.items()}
            draw(own.file, lines, own.ylabel)
    return pictures
