"""A run's metrics: collected during training, printed in brief, written to ``metrics.jsonl`` and any
trackers; read back and plotted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import remedy, unreadable, write_atomically
from memspan.lab.evaluation import Scores, percent
from memspan.lab.pictures import FAINT, png
from memspan.lab.training.optimisers import learning_rate
from memspan.lab.training.state import TrainingState
from memspan.models.options import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, float | None]
"""Numbers by name; None if undefined, such as bits per byte of unknown tokens."""


SAMPLES = "samples.jsonl"
"""The file of text that the model wrote during training and at its end."""


@dataclass(frozen=True)
class Logger:
    """Takes one record at a time."""

    log: Callable[[int, Record], object]
    """Writes a record of the state after the given number of updates."""
    close: Callable[[], object]
    """Called once, after the last record."""


def loggers(folder: Path, trackers: Iterable[str], step: int) -> list[Logger]:
    """A logger for ``metrics.jsonl`` in ``folder``, then those of ``trackers``.

    ``step``: the run's; later records are dropped from ``metrics.jsonl``. The logger ``memspan`` warns
    of trackers that cannot continue the record of an earlier part of the run.
    """
    if step and (begun := [name for name in trackers if name in BEGIN_ANEW]):
        logging.getLogger("memspan").warning(
            f"{' and '.join(begun)}: a new record begins at step {step:,}, apart from that of earlier "
            "steps; metrics.jsonl has all of them"
        )
    return [_json_lines(folder, step), *(TRACKERS[name](folder) for name in trackers)]


def refuse_missing(trackers: Iterable[str]) -> None:
    """Raise :class:`MemspanError` if a tracker is not installed."""
    for name in trackers:
        try:
            import_module(name)
        except ImportError:
            raise MemspanError(
                f"{name} is not installed: pip install {name}, or leave it out of --train.tracker"
            ) from None


def _json_lines(folder: Path, step: int) -> Logger:
    path = folder / "metrics.jsonl"
    earlier = [record for record in read(path) if record["step"] <= step]
    lines = "".join(json.dumps(record) + "\n" for record in earlier)
    write_atomically(path, lines.encode(), make_folder=False)
    # Kept open, so that nothing is written to a folder that replaces this one. Unbuffered.
    file = open(path, "ab", buffering=0)  # noqa: SIM115

    def log(step: int, record: Record) -> None:
        try:
            file.write((json.dumps({"step": step, **record}) + "\n").encode())
        except OSError as error:
            raise MemspanError(
                f"cannot write {path} ({error.strerror}): {remedy(error)}, then --resume"
            ) from None

    return Logger(log, file.close)


def keep_sample(folder: Path, step: int, text: str) -> None:
    """Add a text that the model wrote after ``step`` updates to ``samples.jsonl`` in the run's folder;
    samples of this and later steps, left by an interrupted run, are dropped."""
    path = folder / SAMPLES
    kept = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise unreadable(path, error) from None
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            if json.loads(line)["step"] < step:
                kept.append(line)
    kept.append(json.dumps({"step": step, "text": text}, ensure_ascii=False))
    # Half a surrogate pair has no UTF-8.
    content = "".join(f"{line}\n" for line in kept).encode(errors="replace")
    write_atomically(path, content, make_folder=False)


def _tensorboard(folder: Path) -> Logger:
    """Event files in the run's folder ``tensorboard``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(_inside(folder, "tensorboard")))

    def log(step: int, record: Record) -> None:
        for name, value in _known(record).items():
            writer.add_scalar(name, value, step)

    return Logger(log, writer.close)


def _trackio(folder: Path) -> Logger:
    """A run of Trackio's project ``memspan``, named like the run's folder."""
    import trackio

    run: Any = trackio.init(project="memspan", name=folder.name)
    return Logger(lambda step, record: run.log({"step": step, **_known(record)}), run.finish)


def _wandb(folder: Path) -> Logger:
    """A run of Weights & Biases' project ``memspan``, named like the run's folder.

    Its files are in the run's folder ``wandb``; ``WANDB_MODE=offline`` keeps everything there. Other
    variables, such as ``WANDB_PROJECT``, also apply.
    """
    import wandb

    _inside(folder, "wandb")
    project = os.environ.get("WANDB_PROJECT") or "memspan"
    try:
        run = wandb.init(project=project, name=folder.name, dir=str(folder))
    except wandb.errors.Error as error:
        raise MemspanError(
            f"wandb does not start ({error}): log in with wandb login, set WANDB_MODE=offline, or "
            "leave it out of --train.tracker"
        ) from None
    return Logger(lambda step, record: run.log(_known(record), step=step), run.finish)


TRACKERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
"""Loggers besides ``metrics.jsonl``, by the name of the library that each needs."""


BEGIN_ANEW = ("trackio", "wandb")
"""Trackers that begin a new record when a run is resumed."""


def _inside(folder: Path, name: str) -> Path:
    if (folder / name).is_symlink():
        raise MemspanError(
            f"{folder / name} is a link out of the run's folder: put the folder itself there"
        )
    return folder / name


def _known(record: Record) -> dict[str, float]:
    return {name: value for name, value in record.items() if value is not None}


class MetricLogger:
    """Collects losses from record to record."""

    def __init__(self, state: TrainingState, loggers: Sequence[Logger], console: Console) -> None:
        self._state = state
        self._loggers = loggers
        self._console = console
        self._losses: list[Tensor] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Measure the speed from here on, without the work other than training that came before."""
        self._start = time.perf_counter()
        self._tokens_before = self._state.tokens_read

    def add(self, loss: Tensor | None) -> None:
        """Add an update's mean loss in nats per token, None if it was skipped."""
        if loss is not None:
            self._losses.append(loss)

    def record_training(self, statistics: Mapping[str, Tensor], show: Callable[..., None]) -> None:
        """Log the updates since the last record.

        Args:
            statistics: of the last segment, see :class:`~memspan.models.output.Output`.
            show: see :func:`memspan.lab.training.terminal.progress`.
        """
        state = self._state
        n_tokens = state.tokens_read - self._tokens_before
        speed = n_tokens / (time.perf_counter() - self._start)
        text = state.prepared.splits["train"]
        losses = {}
        short = "nan"
        if self._losses:
            nats = torch.stack(self._losses).mean().item()
            bits = None
            if not (state.unknown_share or text.altered):
                bits = nats / math.log(2) * len(text.tokens) / text.n_bytes
            losses = {"train_nats_per_token": nats, "train_bits_per_byte": bits}
            short = f"{nats:.3f}" if bits is None else f"{nats:.3f}  {bits:.3f} bits/byte"
        mean = {name: state.processes.mean(values) for name, values in statistics.items()}
        rate = learning_rate(state.step - 1, state.config.optim, state.steps)
        self._log(
            losses
            | dataclasses.asdict(state.health)
            | {"learning_rate": rate, "tokens_per_second": speed}
            | {f"train_{name}": value for name, value in by_layer(mean).items()}
        )
        show(completed=state.step, loss=short, speed=speed)
        self._losses = []
        self.restart_clock()

    def record_validation(self, scores: Scores, statistics: Mapping[str, Tensor]) -> None:
        """Log a validation, and print its score in one line."""
        record = {
            "validation_nats_per_token": scores.nats_per_token,
            "validation_bits_per_byte": scores.bits_per_byte,
        }
        if scores.n_unknown:
            record["validation_unknown_share"] = scores.unknown_share
        self._log(record | by_layer(statistics))
        nats = f"{scores.nats_per_token:.4f} nats per token"
        if scores.n_unknown:
            text = f"{nats} ({percent(scores.unknown_share)} unknown: no bits per byte)"
        elif scores.altered:
            text = nats
        else:
            text = f"{scores.bits_per_byte:.4f} bits per byte  ({nats})"
        self._console.print(f"step {self._state.step:>6,}  validation {text}")

    def _log(self, record: Record) -> None:
        for logger in self._loggers:
            logger.log(self._state.step, {"tokens": self._state.tokens_read, **record})

    def close(self) -> None:
        """Close the loggers."""
        for logger in self._loggers:
            logger.close()


def by_layer(statistics: Mapping[str, Tensor]) -> dict[str, float]:
    """``{"loss": [L]}`` as ``{"loss/layer_1": ..., ...}``."""
    return {
        f"{name}/layer_{n}": value
        for name, values in statistics.items()
        for n, value in enumerate(values.tolist(), 1)
    }


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a ``metrics.jsonl``, without lines cut short by a crash."""
    records = []
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise unreadable(path, error) from None
        for line in text.splitlines():
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


RESULT = "validation"
"""The line whose lowest point is a run's result."""


def plot(
    folder: Path, plots: Sequence[Plot] = (), ends: Mapping[str, Scores | None] | None = None
) -> list[Path]:
    """Draw a run's metrics, and return the pictures' paths.

    ``loss.png``: bits per byte in training and validation against tokens read, or nats per token if
    some are unknown. ``attention.png``, for architectures that report it: the share of attention on
    each part of memory.

    Args:
        folder: the run's.
        plots: the architecture's own.
        ends: scores of the trained model by name, marked beside the end of ``loss.png``'s lines.

    Raises:
        MemspanError: matplotlib is not installed, or fails; the disk is full.
    """
    records = read(folder / "metrics.jsonl")
    scored = {label: end for label, end in (ends or {}).items() if end}
    pictures = []

    def draw(
        name: str,
        lines: dict[str, tuple[str, dict[str, Any]]],
        ylabel: str,
        marked: Mapping[str, Scores],
    ) -> None:
        """``lines``: label -> start of the records' keys, whose mean is drawn, and style."""

        def on(figure: Figure) -> None:
            from matplotlib.transforms import offset_copy

            axes = figure.subplots()
            for label, (key, style) in lines.items():
                points = []
                for record in records:
                    values = [v for k, v in record.items() if k == key or k.startswith(f"{key}/")]
                    if values and None not in (record.get("tokens"), *values):
                        points.append((record["tokens"], sum(values) / len(values)))
                if points:
                    best = f", best {min(value for _, value in points):.3f}"
                    named = label + (best if label == RESULT else "")
                    axes.plot(*zip(*points, strict=True), label=named, **style)
            reached = max((r["tokens"] for r in records if r.get("tokens") is not None), default=0)
            # Nothing was measured before, so no line leads there. They stand beside the lines' end
            # and one another, which they would cover.
            for (label, end), marker, aside in zip(marked.items(), "oX", (11, 24), strict=False):
                value = getattr(end, unit)
                look: dict[str, Any] = {
                    "markersize": 10,
                    "fillstyle": "none",
                    "label": f"{label}: {value:.3f}",
                    "transform": offset_copy(axes.transData, figure, x=aside, units="points"),
                    "clip_on": False,
                }
                axes.plot([reached], [value], marker, **look)
            axes.set(xlabel="tokens read", ylabel=ylabel, title=folder.name)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            if axes.lines:
                axes.legend()

        # Written like everything else: completely or not at all, and never through a link.
        write_atomically(folder / name, png(on, 7, 4.2, dpi=120), make_folder=False)
        pictures.append(folder / name)

    kinds = ("train", "validation")
    # One unit for both lines.
    without_bits = any(r.get(f"{kind}_bits_per_byte", 0) is None for r in records for kind in kinds)
    without_bits |= any(end.bits_per_byte is None for end in scored.values())
    unit = "nats_per_token" if without_bits else "bits_per_byte"
    losses: dict[str, tuple[str, dict[str, Any]]] = {
        "train": (f"train_{unit}", {"linewidth": 1, "color": FAINT}),
        RESULT: (f"validation_{unit}", {"marker": "o"}),
    }
    draw("loss.png", losses, unit.replace("_", " "), scored)
    recorded = {key.split("/")[0] for record in records for key in record}
    for own in plots:
        if recorded.intersection(own.lines.values()):
            lines = {label: (key, {"marker": "o"}) for label, key in own.lines.items()}
            draw(own.file, lines, own.ylabel, {})
    return pictures
