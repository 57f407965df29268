"""What a path names: a run, by its folder, or one of its checkpoints; and the runs of the package.

The trained runs that come with memspan are read by name, like any other, and never written to.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.disk import read_limited
from memspan.invocation import command

CHECKPOINTS = "checkpoints"
"""The folder in a run's with its checkpoints."""
BEST = "best"
"""The file there that names the best one."""
SHIPPED = {
    folder.name: Path(str(folder))
    for folder in sorted(resources.files("memspan").joinpath("trained").iterdir(), key=str)
    if folder.is_dir()
}
"""The runs that come with memspan: name -> folder."""


@dataclass(frozen=True)
class Place:
    """What a path names."""

    run: Path
    """The run's folder."""
    checkpoint: Path | None
    """The checkpoint's; None: the run itself, whose weights are the best so far."""


def folder_name(step: int) -> str:
    """The name of the folder with the checkpoint of ``step``."""
    return f"step-{step:08d}"


def place_of(path: str | Path) -> Place:
    """The run or checkpoint at that path, or the shipped run of that name.

    ``RUN/checkpoints/step-00000750`` is a checkpoint, as are ``step-750`` and ``best`` there. All else
    is taken for a run, whatever is there.

    Raises:
        MemspanError: the run has no such checkpoint.
    """
    folder = run_folder(path)
    # As it was given, unless that is from within the run's folder.
    whole = folder if folder.parent.name == CHECKPOINTS else Path(os.path.abspath(folder))
    if whole.parent.name != CHECKPOINTS or not (whole.parents[1] / "config.toml").is_file():
        return Place(folder, None)
    run, name = whole.parents[1], whole.name
    if name == BEST:
        with suppress(OSError):
            name = read_limited(whole, 100).decode(errors="replace").strip()
    known = re.fullmatch(r"step-([0-9]{1,18})", name)
    found = whole.with_name(folder_name(int(known[1]))) if known else None
    if found is None or not found.is_dir():
        kept = sorted(p.name for p in whole.parent.glob("step-*") if p.is_dir())
        raise MemspanError(
            f"there is no checkpoint {path}: use one of {', '.join(kept) or 'none yet'}, or {run} "
            "for the best weights so far"
        )
    return Place(run, found)


def run_alone(path: str | Path, why: str) -> Path:
    """The folder of the run at that path; ``why`` says what needs a run and not a checkpoint."""
    place = place_of(path)
    if place.checkpoint is not None:
        raise MemspanError(f"{path} is a checkpoint, and {why}: give the run's folder, {place.run}")
    return place.run


def run_folder(run: str | Path) -> Path:
    """The folder at that path or, where there is none, that of the shipped run of that name."""
    path = Path(run)
    return path if path.is_dir() else SHIPPED.get(str(path), path)


def is_shipped(folder: Path) -> bool:
    """Whether it is the folder of a shipped run."""
    return folder.is_dir() and any(folder.samefile(own) for own in SHIPPED.values())


def refuse_shipped(folder: Path) -> None:
    """Refuse to write to a shipped run."""
    if is_shipped(folder):
        own = command(
            "train", "--init-from", folder.name, "--preset", folder / "config.toml", "--data.corpus"
        )
        raise MemspanError(
            f"{folder.name} comes with memspan and is never changed: train a run of your own from its "
            f"weights with {own} TEXT"
        )
