"""Where the numbers of a run go: its ``metrics.jsonl``, and any trackers asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from memspan.errors import MemspanError
from memspan.files.disk import write_atomically
from memspan.training.metrics import read

Record = Mapping[str, float | None]
"""Numbers by name; None where a number does not exist, such as bits per byte of unknown tokens."""


class Logger(Protocol):
    """Takes one record at a time."""

    def log(self, step: int, record: Record) -> None:
        """Write the record of the state after ``step`` updates."""

    def close(self) -> None:
        """Called once, after the last record."""


def loggers(folder: Path, trackers: Iterable[str], step: int) -> list[Logger]:
    """A logger for ``metrics.jsonl`` in ``folder``, then those of ``trackers``.

    ``step``: that of the run, whose later records are dropped from ``metrics.jsonl``.
    """
    trackers = tuple(trackers)
    refuse_missing(trackers)
    others = [TRACKERS[name](folder) for name in trackers]
    return [JsonLines(folder, step), *others]


def refuse_missing(trackers: Iterable[str]) -> None:
    """Raise :class:`MemspanError` where a tracker is not installed."""
    for name in trackers:
        try:
            import_module(name)
        except ImportError:
            raise MemspanError(
                f"{name} is not installed: pip install {name}, or leave it out of --train.tracker"
            ) from None


class JsonLines:
    """Appends each record to ``metrics.jsonl`` as one line of JSON."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        earlier = [record for record in read(self.path) if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in earlier)
        write_atomically(self.path, lines.encode())

    def log(self, step: int, record: Record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **record}) + "\n")
        except OSError as error:
            raise MemspanError(
                f"cannot write {self.path} ({error.strerror}): free some space, then --resume"
            ) from None

    def close(self) -> None:
        """Every record is written at once: nothing is open."""


class TensorBoard:
    """Event files in the run's folder ``tensorboard``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        logs = folder / "tensorboard"
        _refuse_link(logs)
        self._writer = SummaryWriter(str(logs))

    def log(self, step: int, record: Record) -> None:
        for name, value in _known(record).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A run of Trackio's project ``memspan``, named like the run's folder."""

    def __init__(self, folder: Path) -> None:
        import trackio

        self._run = trackio.init(project="memspan", name=folder.name)

    def log(self, step: int, record: Record) -> None:
        self._run.log({"step": step, **_known(record)})

    def close(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]


class Wandb:
    """A run of Weights & Biases' project ``memspan``, named like the run's folder.

    Its own files are in the run's folder ``wandb``. ``WANDB_MODE=offline`` keeps all there, and its
    other variables, such as ``WANDB_PROJECT``, apply, too.
    """

    def __init__(self, folder: Path) -> None:
        import wandb

        _refuse_link(folder / "wandb")
        project = os.environ.get("WANDB_PROJECT") or "memspan"
        try:
            self._run = wandb.init(project=project, name=folder.name, dir=str(folder))
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise MemspanError(
                f"wandb does not start ({reason}): log in with wandb login, set WANDB_MODE=offline, or "
                "leave it out of --train.tracker"
            ) from None

    def log(self, step: int, record: Record) -> None:
        self._run.log(_known(record), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}
"""Loggers beside ``metrics.jsonl``, by the name of the library that each needs."""


def _known(record: Record) -> dict[str, float]:
    return {name: value for name, value in record.items() if value is not None}


def _refuse_link(logs: Path) -> None:
    if logs.is_symlink():
        raise MemspanError(
            f"{logs} is a link out of the run's folder: put the folder itself there, or remove it"
        )
