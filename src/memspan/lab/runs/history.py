"""A run's ``history.jsonl``: options changed when it was resumed, one JSON object per line.

    {"step": 1000, "changed": {"train.steps": [1000, 5000]}, "before": SHA-256, "after": SHA-256}

The checksums are those of ``config.toml``: they tie checkpoints saved before a change to the options
after it. A change is recorded here before ``config.toml`` is written; after a crash in between it does
not count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from memspan.errors import MemspanError
from memspan.files.disk import read_limited, unreadable, write_atomically
from memspan.lab.runs.folder import RunLock

NAME = "history.jsonl"
LIMIT = 1 << 24
"""Maximum size of the file in bytes."""


@dataclass(frozen=True)
class Change:
    """Options changed at one resumption."""

    step: int
    changed: dict[str, list[object]]
    """Option -> its values before and after."""
    before: str
    """SHA-256 of ``config.toml`` before the change."""
    after: str
    """SHA-256 of ``config.toml`` after the change."""


def read(folder: Path) -> list[Change]:
    """All changes, in order."""
    path = folder / NAME
    try:
        lines = read_limited(path, LIMIT).decode().splitlines()
        return [Change(**json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None


def content(changes: list[Change]) -> bytes:
    """``changes`` as the content of ``history.jsonl``."""
    return "".join(json.dumps(asdict(change)) + "\n" for change in changes).encode()


def record(lock: RunLock, step: int, changed: dict[str, list[object]], config: bytes) -> None:
    """Record the options changed when the run is resumed at ``step``, if any, and write the new
    ``config.toml``."""
    before = lock.checksums["config.toml"]
    known = read(lock.folder)
    changes = made(known, before)
    if changed:
        changes = [*changes, Change(step, changed, before, hashlib.sha256(config).hexdigest())]
    if changes != known:
        write_atomically(lock.folder / NAME, content(changes), make_folder=False)
    if changed:
        write_atomically(lock.folder / "config.toml", config, make_folder=False)
        lock.load()


def made(changes: list[Change], config: str) -> list[Change]:
    """``changes`` without a last one that never reached ``config.toml``; ``config``: its SHA-256."""
    unmade = changes and changes[-1].after != config and changes[-1].before == config
    return changes[:-1] if unmade else changes


def leads(changes: list[Change], before: str | None, after: str) -> bool:
    """True if these changes turned the ``config.toml`` of checksum ``before`` into ``after``."""
    for change in changes:
        if change.before == before:
            before = change.after
    return before == after
