"""The trained runs that come with memspan: read by name, like any other, and never written to."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from memspan.errors import MemspanError
from memspan.invocation import command

SHIPPED = {
    folder.name: Path(str(folder))
    for folder in sorted(resources.files("memspan").joinpath("trained").iterdir(), key=str)
    if folder.is_dir()
}
"""Name -> folder."""


def run_folder(run: str | Path) -> Path:
    """The folder at that path or, where there is none, that of the shipped run of that name."""
    path = Path(run)
    return path if path.is_dir() else SHIPPED.get(str(path), path)


def is_shipped(folder: Path) -> bool:
    """Whether it is the folder of a shipped run."""
    return folder.is_dir() and any(folder.samefile(own) for own in SHIPPED.values())


def refuse_shipped(folder: Path) -> None:
    """Refuse to write to a shipped run.

    Raises:
        MemspanError: it is one.
    """
    if is_shipped(folder):
        own = command(
            "train", "--init-from", folder.name, "--preset", folder / "config.toml", "--data.corpus"
        )
        raise MemspanError(
            f"{folder.name} comes with memspan and is never changed: train a run of your own from its "
            f"weights with {own} TEXT"
        )
