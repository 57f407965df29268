"""Metrics of a run: ``metrics.jsonl`` always, a tracker where asked, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.files import write_atomically


class Metrics:
    """One line of JSON per record. On resuming, records after ``step`` are dropped first."""

    def __init__(self, folder: Path, tracker: str, step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [r for r in read(self.path) if r["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in kept).encode())
        self._tracker = _tracker(tracker, folder)

    def log(self, step: int, **values: float) -> None:
        """Append a record."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise MemspanError(
                f"cannot write {self.path} ({error.strerror}): free some space, then --resume"
            ) from None
        if self._tracker is not None:
            self._tracker.log(step, values)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All records; a line that a crash cut short is left out."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def plot(folder: Path) -> Path | None:
    """Draw ``loss.png``: bits per byte in training and validation against tokens read.

    Returns None where matplotlib (the extra ``memspan[plot]``) is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    records = read(folder / "metrics.jsonl")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = (("train", {"alpha": 0.5, "linewidth": 1}), ("validation", {"marker": "o"}))
    for name, style in styles:
        points = [
            (r["tokens"], r[f"{name}_bits_per_byte"])
            for r in records
            if f"{name}_bits_per_byte" in r
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set(xlabel="tokens read", ylabel="bits per byte", title=folder.name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    target = folder / "loss.png"
    figure.savefig(target, dpi=120)
    return target


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

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
