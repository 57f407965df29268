"""Metrics of a run: ``metrics.jsonl`` always, a tracker where asked, and the picture."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.files.bytes import write_atomically
from memspan.models.options import Plot


class Metrics:
    """One line of JSON per record. On resuming, records after ``step`` are dropped first."""

    def __init__(self, folder: Path, tracker: str, step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [r for r in read(self.path) if r["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept).encode())
        self._tracker = _tracker(tracker, folder)
        # Records follow the folder where it is moved to, and never go to another under its name.
        self._folder = os.open(folder, os.O_RDONLY)

    def log(self, step: int, **values: float | None) -> None:
        """Append a record. None: this number cannot be had."""
        try:
            with open(self.path.name, "a", encoding="utf-8", opener=self._open) as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise MemspanError(
                f"cannot write {self.path} ({error.strerror}): free some space, then --resume"
            ) from None
        if self._tracker is not None:
            self._tracker.log(step, {k: v for k, v in values.items() if v is not None})

    def close(self) -> None:
        os.close(self._folder)
        if self._tracker is not None:
            self._tracker.close()

    def _open(self, name: str, flags: int) -> int:
        # Not through a link to elsewhere, nor waiting for a pipe's reader.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=self._folder)


class Unwritten:
    """Takes what a process reports that does not keep the run's folder, and leaves it."""

    def log(self, step: int, **values: float | None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read(path: Path) -> list[dict[str, Any]]:
    """All records; a line that a crash cut short is left out."""
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


def checksum(folder: Path) -> dict[str, Any]:
    """What ``metrics.jsonl`` holds by now, durably: its size and SHA-256."""
    path = folder / "metrics.jsonl"
    content = b""
    if path.is_file():
        with open(path, "rb") as file:
            content = file.read()
            os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def unchanged(folder: Path, saved: dict[str, Any]) -> bool:
    """Whether ``metrics.jsonl`` begins as it was when :func:`checksum` was taken."""
    path = folder / "metrics.jsonl"
    content = path.read_bytes() if path.is_file() else b""
    size = saved.get("bytes")
    kept = content[:size] if type(size) is int else b""
    return len(kept) == size and hashlib.sha256(kept).hexdigest() == saved.get("sha256")


def plot(folder: Path, plots: Sequence[Plot] = ()) -> list[Path]:
    """Draw what a run's metrics tell, and return the pictures.

    ``loss.png``: bits per byte in training and validation against tokens read, or nats per token where
    unknown tokens leave no bits per byte. ``attention.png``, for architectures that report it: the
    share of attention that falls on each part of memory.

    Empty where matplotlib (the extra ``memspan[plot]``) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    records = read(folder / "metrics.jsonl")
    pictures = []

    def draw(name: str, lines: dict[str, tuple[str, dict[str, Any]]], ylabel: str) -> None:
        """``lines``: label -> start of the records' keys, whose mean is drawn, and style."""
        figure = Figure(figsize=(7, 4.2), layout="constrained")
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
        # Written as all else is: whole or not at all, and never through a link to elsewhere.
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
        write_atomically(folder / name, picture.getvalue())
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


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        logs = folder / "tensorboard"
        if logs.is_symlink():
            raise MemspanError(
                f"{logs} is a link out of the run's folder: put the folder itself there, or remove it"
            )
        self._writer = SummaryWriter(str(logs))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, folder: Path) -> None:
        import trackio

        self._run = trackio.init(project="memspan", name=folder.name)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]


def _tracker(name: str, folder: Path) -> _TensorBoard | _Trackio | None:
    if name == "none":
        return None
    try:
        return _TensorBoard(folder) if name == "tensorboard" else _Trackio(folder)
    except ImportError:
        raise MemspanError(
            f"{name} is not installed: pip install 'memspan[{name}]', or leave --train.tracker out"
        ) from None
